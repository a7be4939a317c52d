"""Activations that are too large for memory go to a file and come back as they were."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from porting.errors import VerifyError
from porting.tracing import activations
from porting.tracing.activations import Activations
from porting.verification import verify
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


def test_a_verification_is_the_same_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint(tmp_path / "bert")
    before = verify(path, gradients=True, trials=False)
    monkeypatch.setattr(activations, "HELD", 0)
    after = verify(path, gradients=True, trials=False)
    assert after.probes == before.probes
    assert after.noise == before.noise
    assert after.shown == before.shown
    assert after.learned == before.learned
