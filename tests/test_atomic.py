"""Pages and pictures are files of their own: no link is followed to where they would be, and nothing waits."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from porting.atomic import check_destination, new_file, write_all, write_file
from porting.errors import CheckpointError


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
