"""What the tests of checkpoints share."""

from __future__ import annotations

import pytest
import torch

from tests.hub_server import hub

__all__ = ["hub", "weights"]


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    """Tensors of three shapes and dtypes."""
    return {"b": torch.randn(5).bfloat16(), "a": torch.randn(3, 4), "c": torch.tensor([True, False])}
