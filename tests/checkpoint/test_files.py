from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from porting.checkpoint import CheckpointError, open_checkpoint
from tests.checkpoint.hostile import refused

INDEX = "model.safetensors.index.json"


def test_fifo_or_directory_in_place_of_a_file_is_refused_at_once(tmp_path: Path) -> None:
    """In a process of its own: one that hangs must not take the others with it."""
    expected: list[str] = []
    for kind, make in (("a named pipe (FIFO)", os.mkfifo), ("a directory", os.mkdir)):
        for name in ("model.safetensors", "pytorch_model.bin", INDEX, "config.json"):
            root = tmp_path / str(len(expected))
            root.mkdir()
            if name == "config.json":
                save_file({"a": torch.zeros(1)}, root / "model.safetensors")
            make(root / name)
            expected.append(f"{root / name}: found {kind} where a file of weights or settings should be")
    code = (
        "import sys; from porting.checkpoint import CheckpointError, open_checkpoint\n"
        "for path in sys.argv[1:]:\n"
        "    try: open_checkpoint(path)\n"
        "    except CheckpointError as error: print(error)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *(str(tmp_path / str(number)) for number in range(len(expected)))],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        timeout=60,
    )
    lines = result.stdout.splitlines()
    assert [line.partition(" (put")[0] for line in lines] == expected


def test_devices_are_refused() -> None:
    refused("/dev/zero", "found a character device")
    refused("/dev/null", "found a character device")


def test_link_that_leaves_the_directory_is_refused_unless_asked_for(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    outside, root = tmp_path / "outside", tmp_path / "model"
    outside.mkdir()
    root.mkdir()
    save_file(weights, outside / "w.safetensors")
    (root / "model.safetensors").symlink_to(outside / "w.safetensors")
    refused(root, f"a link to '{outside / 'w.safetensors'}', outside the checkpoint", "follow_links=True")
    assert "a" in open_checkpoint(root, follow_links=True).tensors
    assert "a" in open_checkpoint(root / "model.safetensors").tensors, "the file itself was named"


def test_directory_may_itself_be_a_link(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    save_file(weights, tmp_path / "real" / "model.safetensors")
    assert "a" in open_checkpoint(tmp_path / "link").tensors


def test_links_within_the_directory_and_into_the_hub_cache_are_followed(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    root = tmp_path / "models--org--name" / "snapshots" / "0123"
    blobs = tmp_path / "models--org--name" / "blobs"
    root.mkdir(parents=True)
    blobs.mkdir()
    save_file(weights, blobs / "feed")
    (root / "model.safetensors").symlink_to("../../blobs/feed")
    (root / "inner.safetensors").symlink_to("model.safetensors")
    assert "a" in open_checkpoint(root).tensors
    assert "a" in open_checkpoint(root / "inner.safetensors").tensors
    (root / "config.json").symlink_to("/etc/hostname")
    refused(root, "outside the checkpoint")


def test_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("gone")
    refused(tmp_path, "a link to 'gone', which does not exist (mend the link or copy the file)")


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: dict[str, torch.Tensor]) -> None:
    """As anyone but root would find it."""
    save_file(weights, tmp_path / "model.safetensors")

    def denied(path: object, *arguments: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "open", denied)
    refused(tmp_path, "cannot be opened: Permission denied", "chmod u+r")


def test_read_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)

    def broken(*arguments: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointError, match=r"model.safetensors: reading failed: Input/output error"):
        checkpoint.read("a", own=True)
