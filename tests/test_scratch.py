"""Temporary folders: private, gone at the end, and removed by the next process if their own was killed."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from porting.scratch import PREFIX, Scratch


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_private_and_gone_at_the_end(temporary: Path) -> None:
    made = Scratch()
    with made as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "in" / "side").mkdir(parents=True)
        with Scratch() as other:
            assert {*temporary.iterdir()} == {folder, other}, "one in use stays"
    assert not [*temporary.iterdir()]
    made.close()


def test_what_a_killed_process_left_is_removed_by_the_next(temporary: Path) -> None:
    code = f"import tempfile, os, signal\ntempfile.tempdir = {str(temporary)!r}\nfrom porting.scratch import Scratch\n"
    code += 'open(Scratch().path / "x", "w").write("left")\nos.kill(os.getpid(), signal.SIGKILL)\n'
    killed = subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[1])
    assert killed.returncode == -signal.SIGKILL
    assert [one.name for one in temporary.rglob("x")] == ["x"]
    with Scratch() as folder:
        assert [*temporary.iterdir()] == [folder]


def test_without_locks_folders_are_made_and_none_is_swept(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with Scratch() as first, Scratch() as second:
        assert {*temporary.iterdir()} == {first, second}
    assert not [*temporary.iterdir()]


def test_what_is_no_such_folder_stays(temporary: Path) -> None:
    (temporary / "elsewhere").mkdir()
    (temporary / "elsewhere" / "file").write_text("")
    os.symlink("elsewhere", temporary / f"{PREFIX}link")
    (temporary / f"{PREFIX}file").write_text("")
    before = {*temporary.rglob("*")}
    Scratch().close()
    assert {*temporary.rglob("*")} == before
