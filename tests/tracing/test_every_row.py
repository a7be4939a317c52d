"""The padding word takes a gradient, and the model that asks for its number still gets it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from porting.tracing.every_row import EveryRow


@pytest.mark.parametrize("within", [False, True])
def test_the_padding_word_takes_a_gradient_within_alone(within: bool) -> None:
    table = nn.Embedding(5, 3, padding_idx=1)
    found = table(torch.tensor([[0, 1, 1, 4]]))
    if within:
        with EveryRow():
            (gradient,) = torch.autograd.grad(found.sum(), [table.weight])
    else:
        (gradient,) = torch.autograd.grad(found.sum(), [table.weight])
    assert gradient[:, 0].tolist() == [1.0, 2.0 if within else 0.0, 0.0, 0.0, 1.0]
    assert table.padding_idx == 1
