"""Activations that are too large for memory go to a file and come back as they were."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from porting.errors import VerifyError
from porting.tracing import activations
from porting.tracing.activations import Activations, StoredTensor, TensorFile
from porting.tracing.torch_modes import FunctionMode
from porting.verification import verify
from tests.causes.wrong_ports import Wrong, verified
from tests.small_checkpoint import write_checkpoint


def test_what_is_large_comes_back_as_it_was() -> None:
    held = Activations(most=1000)
    small, large = torch.randn(3), torch.randn(40, 50, dtype=torch.float64)
    given = {
        "small": small,
        "large": large,
        "transposed": large.T,
        "bool": large > 0,
        "half": large.bfloat16(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.0),
    }
    for name, tensor in given.items():
        held[name] = tensor.requires_grad_(tensor.is_floating_point() and tensor.is_leaf)
    assert held.stored
    assert list(held) == list(given)
    assert held.shapes() == {name: tuple(tensor.shape) for name, tensor in given.items()}
    for name, tensor in given.items():
        assert torch.equal(held[name], tensor)
        assert not held[name].requires_grad
    with torch.no_grad():
        small.zero_()  # a copy is kept
    assert held["small"].any()
    assert torch.equal(held.pop("large"), large)
    assert "large" not in held
    assert len(held) == len(given) - 1


def test_what_is_small_makes_no_file() -> None:
    held = Activations()
    held["a"] = torch.randn(10)
    assert not held.stored


def test_a_full_disk_leaves_them_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    held = Activations(most=0)
    held["before"] = torch.ones(5)
    monkeypatch.setattr(os, "pwrite", full)
    held["after"] = torch.ones(6)
    assert held["before"].sum() == 5
    assert held["after"].sum() == 6


def test_a_file_that_is_cut_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Activations(most=0)
    held["a"] = torch.ones(5)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(VerifyError, match="has been cut short"):
        held["a"]


@pytest.mark.slow
def test_a_verification_is_the_same_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint(tmp_path / "bert")
    before = verify(path, gradients=True, trials=False)
    monkeypatch.setattr(activations, "HELD", 0)
    after = verify(path, gradients=True, trials=False)
    assert after.probes == before.probes
    assert after.noise == before.noise
    assert after.shown == before.shown
    assert after.learned == before.learned


@pytest.mark.slow
def test_the_search_for_a_cause_reads_what_it_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every activation for each distance, which is ten times as much in a model of two layers."""
    wrong = Wrong("bert", {"LayerNorm(HIDDEN, eps=EPS)": "LayerNorm(HIDDEN, eps=1e-5)"}, ("LayerNorm eps",))
    kept = verified(wrong, trials=False)
    monkeypatch.setattr(activations, "HELD", 0)
    read = StoredTensor.read
    reads: list[StoredTensor] = []

    def counted(one: StoredTensor) -> torch.Tensor:
        reads.append(one)
        return read(one)

    monkeypatch.setattr(StoredTensor, "read", counted)
    report = verified(wrong, trials=False)
    assert [one.name for one in report.causes] == [one.name for one in kept.causes] == ["LayerNorm eps"]
    assert 0 < len(reads) < 500 * len(report.probes)


def test_views_of_one_storage_are_written_once_and_keep_their_strides() -> None:
    base = torch.randn(40, 50, dtype=torch.float64)
    views = [base, base.T, base[3:, ::2], base[:1].expand(7, 50), base.long()]
    file = TensorFile()
    stored = file.write_storages(views)
    for view, one in zip(views, stored, strict=True):
        assert one is not None
        assert one.read().stride() == view.stride()
        assert torch.equal(one.read(), view)
    assert len({one.offset for one in stored if one is not None}) == 2


def test_a_mode_does_not_see_the_reading() -> None:
    seen: list[object] = []

    class Watch(FunctionMode):
        def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            seen.append(func)
            return func(*args, **kwargs)

    stored = TensorFile().write(torch.ones(6))
    with Watch():
        assert stored is not None
        value = stored.read()
    assert not seen
    assert value.sum() == 6
