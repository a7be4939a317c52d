"""A destination in a folder that others can write to: what they put there is refused, left alone, not waited for."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import porting
from porting import atomic
from porting.atomic import explained, new_directory, new_file
from porting.checkpoint import CheckpointError, write_directory, write_safetensors
from porting.converting.conversion import convert
from porting.converting.integrity import verify_files
from porting.converting.journal import Past, past
from porting.converting.making import Made, Maker
from porting.converting.workplace import root_of, workplace
from porting.notation.table import parse_table
from porting.opening import Folder
from porting.plan.recipe import Recipe
from porting.sharding import writing
from tests.converting.test_identity import TABLE, contents, run, write_version
from tests.guards.tree import ROOT
from tests.small_checkpoint import write_checkpoint as write_small

STRANGER = 12345
"""The number of a user who is not this one."""

WEIGHTS = {"a": torch.zeros(1)}

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file another user's")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_version(tmp_path / "source", 1)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that everybody can write to, beside the one of the victim."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "precious").write_bytes(b"precious")
    return folder


def state(folder: Path) -> list[tuple[str, int, int, bytes]]:
    """Everything below a folder, links not followed."""
    found = []
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        when = 0 if path.is_dir() else status.st_mtime_ns
        found.append((str(path), status.st_mode, when, content))
    return found


def refused(source: Path, destination: Path, message: str) -> None:
    """The conversion is, and nothing that is there is touched."""
    before = state(destination.parent.parent)
    with pytest.raises(CheckpointError, match=message) as caught:
        run(source, destination)
    assert len(caught.value.faults) == 1
    assert state(destination.parent.parent) == before


def planted(source: Path, destination: Path) -> Path:
    """A workplace with a journal that is valid: a conversion that was interrupted after its fifth tensor."""
    real, done = Maker.make, [0]

    def make(self: Maker, recipe: Recipe, target: int, at: int) -> Made:
        if done[0] == 5:
            raise KeyboardInterrupt
        done[0] += 1
        return real(self, recipe, target, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Maker, "make", make)
        with pytest.raises(KeyboardInterrupt):
            run(source, destination)
    return root_of(destination)


# ------------------------------------------------------------------------------------------------ who made it, and how


@as_root
@pytest.mark.parametrize("what", ["", "files", "journals", "owner", "files/model.safetensors", "journals/0.jsonl"])
def test_a_workplace_of_another_user_is_refused(what: str, source: Path, shared: Path) -> None:
    root = planted(source, shared / "out")
    os.chown(root / what, STRANGER, STRANGER)
    refused(source, shared / "out", f"belongs to the user {STRANGER}|which other users can write to|another user's")


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o702])
def test_a_workplace_that_others_can_write_to_is_refused(mode: int, source: Path, shared: Path) -> None:
    root = planted(source, shared / "out")
    root.chmod(mode)
    refused(source, shared / "out", "out.porting-convert, can be written to by other users")


def test_folders_in_it_that_others_can_write_to_are_refused(source: Path, shared: Path) -> None:
    root = planted(source, shared / "out")
    root.chmod(0o755)
    (root / "files").chmod(0o777)
    refused(source, shared / "out", "holds 'files', which other users can write to")


def link(path: Path, target: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for one in path.iterdir():
            one.unlink()
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize(
    "what",
    ["files", "journals", "owner", "files/model.safetensors", "files/config.json", "files/provenance.json",
     "journals/0.jsonl", "journals/1.jsonl", "files/stranger"],
)  # fmt: skip
def test_a_link_in_a_workplace_is_refused(what: str, source: Path, shared: Path) -> None:
    """Wherever it is, and to a file or a folder of the victim's: nothing is written or removed through it."""
    root = planted(source, shared / "out")
    home = shared.parent / "home"
    link(root / what, home if what in {"files", "journals"} else home / "precious")
    refused(source, shared / "out", "holds a link")


def test_a_workplace_that_is_a_link_is_refused(source: Path, shared: Path) -> None:
    """Also one that leads to a workplace of one's own."""
    root = planted(source, shared.parent / "home" / "out")
    root_of(shared / "out").symlink_to(root)
    refused(source, shared / "out", "out.porting-convert, is a link")


@pytest.mark.parametrize("what", ["", "owner", "files/model.safetensors", "journals/0.jsonl", "journals/9.jsonl"])
def test_a_fifo_is_not_waited_for(what: str, source: Path, shared: Path) -> None:
    root = root_of(shared / "out")
    if what:
        planted(source, shared / "out")
        (root / what).unlink(missing_ok=True)
        os.mkfifo(root / what)
    else:
        os.mkfifo(root)
    refused(source, shared / "out", r"(holds|is) a named pipe \(FIFO\)")


def test_a_file_with_another_name_is_not_written_to(source: Path, shared: Path) -> None:
    root = planted(source, shared / "out")
    (root / "files" / "config.json").unlink(missing_ok=True)
    os.link(shared.parent / "home" / "precious", root / "files" / "config.json")
    refused(source, shared / "out", "which is another file as well")


@pytest.mark.parametrize("kind", ["folder", "socket", "device"])
def test_what_is_no_plain_file_is_refused(kind: str, source: Path, shared: Path) -> None:
    root = planted(source, shared / "out")
    path = root / "files" / "x"
    if kind == "folder":
        path.mkdir()
    elif kind == "socket":
        os.chdir(path.parent)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("x")
        os.chdir(shared)
    elif os.geteuid() == 0:
        os.mknod(path, 0o20666, os.makedev(1, 3))
    else:
        pytest.skip("only root can make a device")
    refused(source, shared / "out", "holds a (directory|socket|character device)")


def test_ones_own_is_gone_on_from(source: Path, shared: Path) -> None:
    root = planted(source, shared / "out")
    assert root.stat().st_mode & 0o777 == 0o700
    assert run(source, shared / "out") > 0
    run(source, shared / "fresh")
    assert contents(shared / "out") == contents(shared / "fresh")
    umask = os.umask(0)
    os.umask(umask)
    assert (shared / "out").stat().st_mode & 0o777 == 0o777 & ~umask
    assert sorted(os.listdir(shared)) == ["fresh", "out"]


# ---------------------------------------------------------------------------------- what an earlier process wrote down

NO_HEADERS = {
    "nested lists": b"[" * 200_000 + b"\n",
    "nested lists without an end of line": b"[" * 200_000,
    "nested objects": b'{"plan":' * 100_000 + b"\n",
    "digits": b"9" * 5000 + b"\n",
    "no UTF-8": b'{"plan":"\xff"}\n',
    "a byte-order mark": b'\xef\xbb\xbf{"plan":"","sources":[]}\n',
    "zeros, as after a power cut": bytes(4096),
    "other types": b'{"plan":3,"sources":{}}\n',
    "a list": b"[]\n",
    "an empty line": b"\n",
    "a line of a tensor": b'{"tensor":"a","digest":"0"}\n',
    "a line without an end": b'{"plan":"' + b"x" * (9 << 20),
}


@pytest.mark.parametrize("what", NO_HEADERS)
def test_a_journal_that_cannot_be_read_is_named_and_nothing_is_removed(what: str, source: Path, shared: Path) -> None:
    """What was written is perhaps hours of work, so that it is for the user to say that it may go."""
    root = planted(source, shared / "out")
    journal = root / "journals" / "0.jsonl"
    journal.write_bytes(NO_HEADERS[what])
    before = contents_of(root)
    with pytest.raises(CheckpointError, match="the journal of an interrupted conversion cannot be read") as caught:
        run(source, shared / "out")
    (fault,) = caught.value.faults
    assert fault.where == str(journal)
    assert f"`rm -r {root}`" in fault.hint
    assert contents_of(root) == before | {str(root / "owner"): f"process {os.getpid()}\n".encode()}
    shutil.rmtree(root)
    assert run(source, shared / "out") == 0
    assert verify_files(shared / "out").problems == ()


@pytest.mark.parametrize("length", [0, 1, 20, 120])
def test_a_journal_whose_first_line_was_cut_off_is_begun_anew(length: int, source: Path, shared: Path) -> None:
    journal = planted(source, shared / "out") / "journals" / "0.jsonl"
    journal.write_bytes(journal.read_bytes()[:length])
    assert run(source, shared / "out") == 0
    assert verify_files(shared / "out").problems == ()


NO_ENTRIES = {
    "nested": b"[" * 200_000,
    "digits": b"9" * 5000,
    "no UTF-8": b"\xff",
    "zeros": bytes(4096),
    "other types": b'{"tensor":[],"digest":{},"infinite":"","vanished":null,"sources":[]}',
    "losses of 4000 digits": b'{"tensor":"%s","digest":"%s","infinite":' + b"9" * 4000 + b',"vanished":0,"sources":{}}',
    "negative losses": b'{"tensor":"%s","digest":"%s","infinite":-1,"vanished":0,"sources":{}}',
    "a tensor of another conversion": b'{"tensor":"z","digest":"0","infinite":0,"vanished":0,"sources":{"z":"0"}}',
    "a key that stands twice": b'{"source":"c.0","source":"z","digest":"0"}',
    "a line without an end": b"x" * (9 << 20),
}


@pytest.mark.parametrize("what", NO_ENTRIES)
def test_a_line_of_a_journal_that_cannot_be_read_costs_a_tensor_at_most(what: str, source: Path, shared: Path) -> None:
    journal = planted(source, shared / "out") / "journals" / "0.jsonl"
    header, first, *rest = journal.read_bytes().splitlines()
    made = json.loads(first)
    strange = NO_ENTRIES[what]
    if b"%s" in strange:
        strange %= made["tensor"].encode(), made["digest"].encode()
    journal.write_bytes(b"\n".join([header, first, *rest, strange, b""]))
    resumed = run(source, shared / "out")
    run(source, shared / "fresh")
    assert contents(shared / "out") == contents(shared / "fresh")
    assert resumed == 5 * 30 * 40 * 4


def test_a_journal_of_many_strange_tensors_takes_no_memory(source: Path, shared: Path) -> None:
    """Entries of tensors that the conversion does not make are passed over, and lines are read one at a time."""
    folder = Folder(planted(source, shared / "out") / "journals")
    header = (folder.path / "0.jsonl").read_bytes().splitlines()[0]
    lines = [b'{"source":"strange.%d","digest":"%032d"}' % (number, number) for number in range(20_000)]
    (folder.path / "0.jsonl").write_bytes(b"\n".join([header, *lines, b""]))
    key = json.loads(header)
    tracemalloc.start()
    assert past(folder, key, made=frozenset(), sources={"a.0"}) == Past(made={}, sources={})
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < sum(map(len, lines)) / 4


@pytest.mark.parametrize("name", ["precious", "files", "journals", "journals/notes.txt"])
def test_what_no_conversion_puts_into_a_workplace_is_left_alone(name: str, source: Path, shared: Path) -> None:
    root = planted(source, shared / "out")
    if (root / name).is_dir():
        shutil.rmtree(root / name)
    (root / name).write_bytes(b"precious")
    refused(source, shared / "out", f"holds a file '{name}', which no conversion puts there")


@pytest.mark.parametrize("other", ["convert", "export", "record"])
def test_an_interrupted_conversion_outlives_what_else_is_written_there(other: str, source: Path, shared: Path) -> None:
    root = planted(source, shared / "out")
    before = contents_of(root)
    precious = shared / ".out.porting-precious"
    precious.mkdir()
    if other == "convert":
        (shared / "out").mkdir()
        with pytest.raises(CheckpointError, match="exists already"):
            run(source, shared / "out")
        (shared / "out").rmdir()
    elif other == "export":
        write_directory(shared / "out", files={"config.json": b"{}"})
        shutil.rmtree(shared / "out")
    else:
        write_safetensors(shared / "out", WEIGHTS)
        (shared / "out").unlink()
    assert contents_of(root) == before
    assert run(source, shared / "out") == 5 * 30 * 40 * 4
    assert precious.is_dir()
    assert not root.exists()


# ------------------------------------------------------------------------------------ what changes while it is written


def test_a_workplace_that_is_exchanged_leads_nothing_outside(source: Path, shared: Path) -> None:
    """Its name leads elsewhere while files are written in it: to the victim's home, whose files have the same names."""
    home = shared.parent / "home"
    for name in ("files", "journals"):
        (home / name).mkdir()
    (home / "files" / "model.safetensors").write_bytes(b"precious")
    before = contents_of(home)
    done: list[int] = []

    def exchange(progress: object) -> None:
        if not done:
            root_of(shared / "out").rename(shared / "aside")
            root_of(shared / "out").symlink_to(home)
            done.append(1)

    made = convert(source, shared / "out", parse_table(TABLE), threads=1, memory=1 << 20, tell=exchange)
    assert done == [1]
    assert contents_of(home) == before
    assert verify_files(made.path).problems == ()
    assert not (shared / "out").is_symlink()


@pytest.mark.parametrize("made", ["conversion", "directory", "file"])
@pytest.mark.parametrize("swap", [True, False], ids=["exchange", "aside"])
def test_a_folder_that_is_exchanged_leads_nothing_outside(
    made: str, swap: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is overwritten lies in the folder that was opened, although its path leads elsewhere at the end."""
    if not swap:
        monkeypatch.setattr(atomic, "_exchanged", lambda *arguments: False)
    folder, home = tmp_path / "folder", tmp_path / "elsewhere"
    for each in (folder, home):
        each.mkdir()
        write_directory(each / "out", {"config.json": b"{}", "x.bin": b"precious"})
        (each / "file").write_bytes(b"precious")
    before = contents_of(home)
    done: list[int] = []

    def exchange(*progress: object) -> None:
        if not done:
            folder.rename(tmp_path / "aside")
            folder.symlink_to(home)
            done.append(1)

    def make() -> None:
        if made == "conversion":
            convert(source, folder / "out", parse_table(TABLE), threads=1, overwrite=True, tell=exchange)
        elif made == "directory":
            with new_directory(folder / "out", needed=1, overwrite=True):
                exchange()
        else:
            with new_file(folder / "file", size=1, overwrite=True):
                exchange()

    with pytest.raises(CheckpointError, match="lies in a directory that was replaced or moved while it was written"):
        make()
    assert done == [1]
    assert contents_of(home) == before
    names = [{str(path.relative_to(each)) for path in each.rglob("*")} for each in (tmp_path / "aside", home)]
    assert names[0] == names[1], "nothing temporary is left"


@pytest.mark.parametrize("made", ["conversion", "directory", "file"])
def test_a_folder_is_opened_once(made: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its path leads to after it was opened is neither written to nor swept."""
    folder, home, real = tmp_path / "folder", tmp_path / "elsewhere", os.open
    for each in (folder, home):
        each.mkdir()
    for name in ("out", "file"):
        (home / f".{name}.porting-01234567").mkdir()
        (home / f".{name}.porting-01234567" / "precious").write_bytes(b"precious")
    before = contents_of(home)
    done: list[int] = []

    def exchange(path: Any, *arguments: Any, **options: Any) -> int:
        descriptor = real(path, *arguments, **options)
        if path == folder and not done:
            folder.rename(tmp_path / "aside")
            folder.symlink_to(home)
            done.append(1)
        return descriptor

    calls: dict[str, Callable[[], object]] = {
        "conversion": lambda: convert(source, folder / "out", parse_table(TABLE), threads=1),
        "directory": lambda: write_directory(folder / "out", {"config.json": b"{}"}),
        "file": lambda: atomic.write_file(folder / "file", b"content"),
    }
    monkeypatch.setattr(os, "open", exchange)
    with pytest.raises(CheckpointError, match="lies in a directory that was replaced or moved while it was written"):
        calls[made]()
    assert done == [1]
    assert contents_of(home) == before


@pytest.mark.parametrize("nameless", [True, False])
def test_the_check_of_a_folder_leaves_nothing_and_removes_nothing_elsewhere(
    nameless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that shows that one can be made is made and removed in the folder that was opened."""
    if not nameless:
        monkeypatch.setattr(os, "O_TMPFILE", 0, raising=False)
    folder, home, real = tmp_path / "folder", tmp_path / "elsewhere", os.open
    for each in (folder, home):
        each.mkdir()
    made: list[str] = []

    def exchange(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        descriptor = real(path, flags, *arguments, **options)
        if flags & os.O_WRONLY and not made:
            made.append(os.path.basename(path))
            (home / made[0]).write_bytes(b"precious") if made[0] != "." else None
            folder.rename(tmp_path / "aside")
            folder.symlink_to(home)
        return descriptor

    monkeypatch.setattr(os, "open", exchange)
    atomic.check_destination(folder / "out", overwrite=False)
    assert len(made) == 1
    assert list((tmp_path / "aside").iterdir()) == []
    assert [path.read_bytes() for path in home.iterdir()] == ([] if made == ["."] else [b"precious"])


def test_shards_are_written_in_the_directory_that_was_opened(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name leads to the victim's home, whose files have the same names, before the values are written."""
    home, source = tmp_path / "home", write_small(tmp_path / "m")
    done: list[Path] = []
    (home / "model.safetensors").write_bytes(b"precious")
    before, real = contents_of(home), writing._changed_steps

    def exchange(*arguments: Any) -> set[int]:
        (made,) = shared.glob(".out.*")
        made.rename(tmp_path / "aside")
        made.symlink_to(home)
        done.append(made)
        return real(*arguments)

    monkeypatch.setattr("porting.exporting.is_sharded", lambda module: True)
    monkeypatch.setattr(writing, "_changed_steps", exchange)
    with pytest.raises(CheckpointError, match="another user moved the temporary files"):
        porting.export(porting.load(source), None, shared / "out")
    assert len(done) == 1
    assert contents_of(home) == before


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_what_takes_the_name_of_a_workplace_is_not_removed(tmp_path: Path) -> None:
    """Another folder of the victim's is moved there before the conversion tidies up."""
    precious = tmp_path / "precious"
    (precious / "sub").mkdir(parents=True)
    (precious / "sub" / "file").write_text("unharmed")
    out = tmp_path / "out"
    with explained(out, 0) as writing, workplace(out, writing):
        root_of(tmp_path / "out").rename(tmp_path / "aside")
        precious.rename(root_of(tmp_path / "out"))
    assert (root_of(tmp_path / "out") / "sub" / "file").read_text() == "unharmed"
    assert list((tmp_path / "aside").iterdir()) == []


# ------------------------------------------------------------------------------------------- beside the destination

WAITING = """
import sys, torch
from pathlib import Path
from porting.converting.conversion import convert
from porting.notation.table import parse_table
print(convert(sys.argv[1], sys.argv[2], parse_table(sys.argv[3]), threads=1, memory=1 << 20).tensors)
"""


def mkfifo(path: Path) -> None:
    os.mkfifo(path)


def mkdir_of_a_stranger(path: Path) -> None:
    path.mkdir()
    (path / "theirs").write_text("unharmed")
    os.chown(path, STRANGER, STRANGER)


def link_home(path: Path) -> None:
    path.symlink_to(path.parent.parent / "home")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "make", [mkfifo, link_home, pytest.param(mkdir_of_a_stranger, marks=as_root)], ids=["fifo", "link", "stranger"]
)
def test_siblings_that_are_not_ours_are_neither_waited_for_nor_removed(
    make: Callable[[Path], None], source: Path, shared: Path
) -> None:
    """In a process of its own: one that hangs must not take the others with it."""
    make(shared / ".out.porting-00000000")
    before = state(shared.parent)
    words = [sys.executable, "-c", WAITING, str(source), str(shared / "out"), TABLE]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == "12\n"
    left = [one for one in state(shared.parent) if not one[0].startswith(str(shared / "out"))]
    assert left == before
    write_safetensors(shared / "file.safetensors", {"a": torch.zeros(1)})
    save_file({"a": torch.zeros(1)}, shared / "again.safetensors")
    assert contents(shared / "out").keys() == {"config.json", "model.safetensors", "provenance.json"}


@pytest.mark.parametrize("put", ["a link", "a directory", "a file"])
@pytest.mark.parametrize("kind", ["directory", "file"])
def test_a_temporary_sibling_that_is_exchanged_leads_nothing_outside(
    kind: str, put: str, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``export`` and ``record``, in a folder where others may rename, while the bytes are written."""
    home = shared.parent / "home"
    real = os.fsync
    moved: list[Path] = []

    def exchange(descriptor: int) -> None:
        real(descriptor)
        for sibling in [] if moved else list(shared.glob(".d.porting-*")):
            moved.append(sibling.rename(shared / "aside"))
            if put == "a link":
                sibling.symlink_to(home if kind == "directory" else home / "precious")
            elif put == "a directory":
                sibling.mkdir()
                (sibling / "config.json").write_bytes(b"theirs")
            else:
                sibling.write_bytes(b"theirs")

    before = state(home)
    monkeypatch.setattr(os, "fsync", exchange)
    files = {"a.json": b"{}", "config.json": b"{}"}
    made = partial(write_directory, files=files) if kind == "directory" else partial(write_safetensors, tensors=WEIGHTS)
    with pytest.raises(CheckpointError, match="another user moved the temporary files"):
        made(shared / "d")
    assert moved
    assert not (shared / "d").exists()
    assert state(home) == before
