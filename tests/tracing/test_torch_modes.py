"""Gradients that torch or a model would cut off."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from porting.tracing.running import Side
from porting.tracing.torch_modes import GradientOfEveryRow
from porting.tracing.trace import Point


@pytest.mark.parametrize("within", [False, True])
def test_the_padding_word_takes_a_gradient_within_alone(within: bool) -> None:
    table = nn.Embedding(5, 3, padding_idx=1)
    found = table(torch.tensor([[0, 1, 1, 4]]))
    if within:
        with GradientOfEveryRow():
            (gradient,) = torch.autograd.grad(found.sum(), [table.weight])
    else:
        (gradient,) = torch.autograd.grad(found.sum(), [table.weight])
    assert gradient[:, 0].tolist() == [1.0, 2.0 if within else 0.0, 0.0, 0.0, 1.0]
    assert table.padding_idx == 1


class Positioned(nn.Module):
    """Adds positions that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.register_buffer("positions", torch.randn(1, 9, 6))
        self.out = nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        positions = self.get_buffer("positions")[:, : ids.shape[1]].requires_grad_(False)
        found: Tensor = self.out(self.words(ids) + positions)
        return found


@pytest.fixture
def side() -> Side:
    module = Positioned().double()
    for tensor in module.state_dict(keep_vars=True).values():
        tensor.requires_grad_(True)
    return Side(title="it", module=module, arguments=[{"0": torch.tensor([[1, 2, 3]])}], wanted=[Point("out")])


def test_such_a_slice_stays_in_the_graph(side: Side) -> None:
    found: list[Tensor] = []
    side.run(0, lambda _, value: found.append(value), gradients=True)
    buffer = side.module.get_buffer("positions")
    (gradient,) = torch.autograd.grad(found[0].square().sum(), buffer)
    assert bool(gradient[:, :3].any())


def test_to_be_told_to_require_a_gradient_is_left_to_torch(side: Side) -> None:
    """Nothing else is changed: what a forward makes a leaf of is one."""
    seen: list[bool] = []
    side.module.register_forward_pre_hook(lambda *_: seen.append(torch.ones(2).requires_grad_().requires_grad))
    side.run(0, lambda *_: None, gradients=True)
    assert seen == [True]
