"""Pages and pictures are files of their own: no link is followed to where they would be, and nothing waits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from porting.checkpoint.atomic import write_file
from porting.errors import CheckpointError


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    for content in (b"long and wide", b"short"):
        write_file(path, content)
        assert path.read_bytes() == content
    assert [one.name for one in tmp_path.iterdir()] == ["page.html"]


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
