"""An entry of transformers' registry is tried, and what is converted wrongly is seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scripts import transformers_registry
from scripts.transformers_registry import BUILD, DIFFERS, EQUAL, architectures, tried


@pytest.fixture(autouse=True)
def _unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_registry, "set_limits", lambda: None)  # they would stay with this process


def test_an_entry_is_equal_in_both_directions() -> None:
    assert architectures("ViTModel") == ("ViTModel",)
    found = tried("ViTModel", "ViTModel")
    assert (found.outcome, found.said) == (EQUAL, "")
    assert found.tensors > 20


def test_a_tensor_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = transformers_registry._bits

    def bits(tensor: Tensor) -> tuple[object, ...]:
        return whole(tensor + torch.rand(())) if tensor.shape[0] == 1 else whole(tensor)

    monkeypatch.setattr(transformers_registry, "_bits", bits)
    found = tried("ViTModel", "ViTModel")
    assert found.outcome == DIFFERS
    assert "embeddings.cls_token" in found.said


@pytest.mark.slow
def test_an_entry_that_nothing_stands_for_is_not_built() -> None:
    assert architectures("no_such_entry") == ()
    assert tried("no_such_entry", "").outcome == BUILD
    assert "MaskFormerForInstanceSegmentation" in architectures("MaskFormerDetrDecoder")
