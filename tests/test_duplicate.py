"""A copy is a copy, also of what a module keeps in closures."""

from __future__ import annotations

import torch
from torch import nn

from porting.duplicate import duplicate


class Closed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
        parts = self.parts
        self.mix = lambda x: parts["down"](parts["up"](x).relu())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mix(x)  # type: ignore[no-untyped-call]  # a lambda
        return out


def test_a_closure_of_the_copy_calls_the_copy_s_parts() -> None:
    torch.manual_seed(0)
    module, x = Closed(), torch.randn(3, 4)
    before = module(x)
    copied = duplicate(module).double()
    torch.testing.assert_close(copied(x.double()).float(), before)
    with torch.no_grad():
        copied.get_parameter("parts.up.weight").zero_()
    assert torch.equal(module(x), before)
    assert not torch.equal(copied(x.double()).float(), before)
