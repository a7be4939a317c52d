"""Pages and pictures are files of their own: no link is followed to where they would be, and nothing waits."""

from __future__ import annotations

import errno
import mmap
import os
import re
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from porting.atomic import check_destination, explained, new_directory, new_file, write_all, write_file
from porting.errors import CheckpointError
from porting.write_failure import described


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    for content in (b"long and wide", b"short"):
        write_file(path, content)
        assert path.read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "directory"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "page.html", tmp_path / "other"
    match kind:
        case "link":
            other.write_text("kept")
            path.symlink_to(other)
        case "dangling":
            path.symlink_to(other)
        case "fifo":
            os.mkfifo(path)
        case _:
            path.mkdir()
    with pytest.raises(CheckpointError, match=r"destination is|writing failed"):
        write_file(path, b"page")
    assert not other.exists() or other.read_text() == "kept"
    assert len(list(tmp_path.iterdir())) == 1 + (kind == "link")


def test_a_destination_below_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CheckpointError, match="lies in a directory that does not exist"):
        check_destination(tmp_path / "loop" / "out", overwrite=False)


def test_a_directory_is_no_destination_for_a_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is a directory"):
        check_destination(tmp_path, overwrite=True, file=True)


def test_a_source_that_is_cut_short_while_it_is_written_is_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(1 << 16))
    with source.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        os.truncate(source, 0)
        with (
            pytest.raises(CheckpointError, match=r"was cut short meanwhile.*restore it"),
            new_file(tmp_path / "out", size=0, overwrite=False) as descriptor,
        ):
            write_all(descriptor, memoryview(mapped))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("n" * 300, "has a name of 300 bytes, and the file system takes names of 255"),
        ("é" * 150, "has a name of 300 bytes, and the file system takes names of 255"),
        (f"{'n' * 300}/x", "has a name of 300 bytes, and the file system takes names of 255"),
        (
            "n" * 240,
            "its temporary name has 18 more (.NAME.porting-…), and the file system takes names of 255 (choose a",
        ),
        ("/".join(["n" * 200] * 30), "bytes, which is more than the system takes"),
    ],
)
def test_a_name_that_is_too_long_is_refused_before_the_work(tmp_path: Path, name: str, message: str) -> None:
    assert os.pathconf(tmp_path, "PC_NAME_MAX") == 255
    with pytest.raises(CheckpointError, match=re.escape(message)):
        check_destination(tmp_path / name, overwrite=False)


def test_the_longest_name_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"choose a name of at most 237 bytes"):
        write_file(tmp_path / ("n" * 238), b"page")
    write_file(tmp_path / ("n" * 237), b"page")
    with new_directory(tmp_path / ("d" * 237), needed=1, overwrite=False):
        pass
    assert sorted(map(len, os.listdir(tmp_path))) == [237, 237]


@pytest.mark.parametrize("hard", [True, False])
def test_the_limit_of_the_process_is_named(tmp_path: Path, hard: bool) -> None:
    """In a process of its own, since a hard limit cannot be raised again."""
    pid = os.fork()
    if not pid:
        most = 4096 if hard else resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))
        try:
            write_file(tmp_path / "page", bytes(5000))
        except CheckpointError as error:
            (tmp_path / "said").write_text(str(error))
        os._exit(0)
    os.waitpid(pid, 0)
    said = (tmp_path / "said").read_text()
    expected = "5000 bytes are needed, and this process may write files of at most 4096 bytes (`ulimit -f`)"
    assert expected in said
    assert ("its hard limit is 4096 bytes" if hard else "run `ulimit -f unlimited`") in said
    assert "are free" not in said


@pytest.mark.parametrize(
    ("number", "message", "hint"),
    [
        (errno.ENOSPC, "10 bytes are needed and 20 are free; 3 inodes are free, of which each file", "`df -i "),
        (errno.EDQUOT, "10 bytes are needed, and your quota there allows no more", "`quota -s`"),
        (errno.EFBIG, "10 bytes are needed, and the file system takes no", "another file system, or write smaller"),
        (errno.EROFS, "Read-only file system", "choose a destination that can be written to"),
        (errno.ENAMETOOLONG, "names of 143 bytes", "a shorter name"),
        (errno.EACCES, "Permission denied", "check the permissions of "),
        (errno.EIO, "the disk or its connection failed", "`dmesg`"),
        (errno.EINVAL, "Invalid argument", "choose another destination"),
    ],
)
def test_what_the_system_refuses_has_a_hint_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, message: str, hint: str
) -> None:
    status = SimpleNamespace(f_files=10, f_favail=3)
    monkeypatch.setattr(os, "statvfs", lambda path: status)
    monkeypatch.setattr("porting.write_failure.shutil.disk_usage", lambda path: SimpleNamespace(free=20))
    monkeypatch.setattr(os, "pathconf", lambda path, name: 143)
    with pytest.raises(CheckpointError) as caught, explained(tmp_path / "out", 10):
        raise OSError(number, os.strerror(number))
    (fault,) = caught.value.faults
    assert message in fault.message
    assert hint in fault.hint


def test_inodes_are_named_only_where_there_is_room_and_few_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("porting.write_failure.shutil.disk_usage", lambda path: SimpleNamespace(free=20))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for files, available, needed in ((10, 3, 30), (10**6, 10**5, 10), (0, 0, 10)):
        status = SimpleNamespace(f_files=files, f_favail=available)
        monkeypatch.setattr(os, "statvfs", lambda path, status=status: status)
        reason, hint = described(full, tmp_path, needed)
        assert "inode" not in reason + hint
        assert hint == "free some space, or choose another destination"


@pytest.mark.parametrize("nameless", [True, False])
def test_a_folder_that_cannot_be_written_to_is_refused_before_the_work(
    nameless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By making a file: what ``os.access`` says of attributes, mounts and network disks is often wrong."""
    if not nameless:
        monkeypatch.setattr(os, "O_TMPFILE", 0, raising=False)
    path, before = tmp_path / "page.html", tmp_path.stat().st_ino
    check_destination(path, overwrite=False, file=True)
    assert list(tmp_path.iterdir()) == []
    whole = os.open

    def read_only(name: str | Path, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_WRONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return whole(name, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(CheckpointError, match=r"page\.html: the destination cannot be written: Read-only file system"):
        check_destination(path, overwrite=False, file=True)
    assert (list(tmp_path.iterdir()), tmp_path.stat().st_ino) == ([], before)


@pytest.mark.skipif(not Path("/sys").is_dir(), reason="no /sys, in which the kernel lets no file be made")
def test_a_folder_in_which_even_root_can_make_no_file_is_refused() -> None:
    with pytest.raises(CheckpointError, match="the destination cannot be written: "):
        check_destination(Path("/sys/page.html"), overwrite=True, file=True)
