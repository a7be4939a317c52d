from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from porting.checkpoint import CheckpointError, open_checkpoint

INDEX = "model.safetensors.index.json"


def test_view_can_be_written_to_and_the_file_stays(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "model.safetensors"
    save_file(weights, path)
    before = path.read_bytes()
    for own in (False, True):
        view = open_checkpoint(path).read("a", own=own)
        view += 1
        assert torch.equal(view, weights["a"] + 1)
    gc.collect()
    assert path.read_bytes() == before
    assert torch.equal(open_checkpoint(path).read("a"), weights["a"])


def test_view_is_of_the_mapped_file_and_own_is_not(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "model.safetensors"
    save_file(weights, path)
    checkpoint = open_checkpoint(path)
    mapped = checkpoint.read("a")
    (line,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    low, high = (int(part, 16) for part in line.split()[0].split("-"))
    assert low <= mapped.data_ptr() < high
    assert "p" in line.split()[1], "a private mapping"
    assert not low <= checkpoint.read("a", own=True).data_ptr() < high


def test_every_tensor_has_a_storage_of_its_own(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Savers take tensors on one storage for tied."""
    save_file(weights, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    for name, tensor in weights.items():
        assert checkpoint.read(name).untyped_storage().nbytes() == tensor.nbytes


def test_own_copy_survives_deletion_and_truncation(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "model.safetensors"
    save_file(weights, path)
    own = open_checkpoint(path).read("a", own=True)
    os.truncate(path, 0)
    path.unlink()
    assert torch.equal(own, weights["a"])


def test_view_survives_deletion_and_the_end_of_the_checkpoint(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "model.safetensors"
    save_file(weights, path)
    view = open_checkpoint(path).read("a")
    gc.collect()
    path.unlink()
    assert torch.equal(view, weights["a"])


@pytest.mark.parametrize("own", [False, True])
def test_file_that_was_cut_after_it_was_opened_is_not_read(
    tmp_path: Path, weights: dict[str, torch.Tensor], own: bool
) -> None:
    path = tmp_path / "model.safetensors"
    save_file(weights, path)
    size = path.stat().st_size
    checkpoint = open_checkpoint(path)
    os.truncate(path, 20)
    with pytest.raises(CheckpointError, match=f"it had {size} bytes when it was opened and has 20 now"):
        checkpoint.read("a", own=own)


def test_file_that_was_replaced_after_it_was_opened_is_still_the_old_one(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    path = tmp_path / "model.safetensors"
    save_file(weights, path)
    checkpoint = open_checkpoint(path)
    path.unlink()
    path.write_bytes(b"new")
    assert torch.equal(checkpoint.read("a"), weights["a"])
    assert torch.equal(checkpoint.read("a", own=True), weights["a"])


def test_unknown_tensor(tmp_path: Path) -> None:
    save_file({"layer.0.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor 'layer.0.wieght' .did you mean 'layer.0.weight'"):
        open_checkpoint(tmp_path).read("layer.0.wieght")
