"""``load`` and ``export``."""

from __future__ import annotations

import errno
import filecmp
import json
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.conftest import Run
from tests.cli.modules import write_own
from tests.small_checkpoint import tensors


def test_export_gives_the_same_bytes_back(run: Run, checkpoint: Path) -> None:
    result = run("export", checkpoint, "back")
    assert result.exit_code == 0, result.stderr
    assert "byte for byte those of the checkpoint" in result.stdout
    assert filecmp.cmp(checkpoint / "model.safetensors", "back/model.safetensors", shallow=False)
    assert Path("back/tokenizer.json").is_file()
    assert result.stdout.splitlines()[-1] == "next: porting hash back"


def test_export_with_a_cast_says_that_the_bytes_differ(run: Run, checkpoint: Path) -> None:
    result = run("export", checkpoint, "half", "--dtype", "float16", "--json")
    found = json.loads(result.stdout)
    assert found["differing"] == ["model.safetensors"]
    exported = load_file("half/model.safetensors")
    assert all(exported[name].equal(tensor.half()) for name, tensor in tensors().items())


def test_a_destination_that_exists_is_kept(run: Run, checkpoint: Path) -> None:
    assert run("export", checkpoint, "back").exit_code == 0
    (Path("back") / "model.safetensors").write_bytes(b"mine")
    result = run("export", checkpoint, "back")
    assert result.exit_code == 2
    assert "[destination-refused]" in result.stderr
    assert (Path("back") / "model.safetensors").read_bytes() == b"mine"


def test_export_from_a_module_of_ones_own(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_model", raising=False)
    write_own(Path())
    own = ("--table", "own.toml", "--into", "own_model.py:build")
    result = run("export", checkpoint, "back", *own)
    assert result.exit_code == 0, result.stderr
    exported = load_file("back/model.safetensors")
    assert all(exported[name].equal(tensor) for name, tensor in tensors().items() if name in exported)
    assert any("query" in name for name in exported)


def test_an_error_after_the_files_are_complete_says_so(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The written files are compared with the checkpoint's, and cannot be read."""

    def broken(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr("porting.cli.export._differing", broken)
        result = run("export", checkpoint, "back")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[1] == "note: back is complete"
    assert run("hash", "back").exit_code == 0
