"""A copy is a copy, also of what a module keeps in closures."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest
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


class Holder:
    """What keeps something that cannot be copied beside something that can."""

    def __init__(self, part: nn.Module) -> None:
        self.lock, self.part = threading.Lock(), part


class Stream:
    """As handles of a device are: nobody can make a second one."""

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError("cannot pickle 'Stream' object")


class Odd(nn.Module):
    """Holds what :func:`copy.deepcopy` refuses."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.up.weight
        self.seen: list[int] = []
        held: dict[str, object] = {
            "lock": threading.Lock(),
            "lock in a list": [threading.Lock(), self.up],
            "lock in an object": Holder(self.up),
            "stream": Stream(),
            "numbers": (number for number in range(3)),
            "random": torch.Generator().manual_seed(3),
            "history": torch.ones(4, requires_grad=True) * 2,
            "file": io.FileIO(0, closefd=False),
        }
        self.held: Any = held[kind]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.other(self.up(x))
        return out


@pytest.mark.parametrize(
    "kind", ["lock", "lock in a list", "lock in an object", "stream", "numbers", "random", "history", "file"]
)
def test_what_cannot_be_copied_is_had_in_common_and_all_else_is_copied(kind: str) -> None:
    torch.manual_seed(0)
    module, x = Odd(kind), torch.randn(3, 4)
    seen = module.seen
    module.up.register_forward_hook(lambda part, given, out: seen.append(1))
    before = module(x)
    copied = duplicate(module)
    torch.testing.assert_close(copied(x), before)
    assert module.seen == [1], "the copy's hook has a list of its own"
    assert isinstance(copied, Odd)
    assert copied.other.weight is copied.up.weight
    with torch.no_grad():
        copied.up.weight.zero_()
    torch.testing.assert_close(module(x), before)
    match kind:
        case "lock" | "stream" | "numbers" | "file":
            assert copied.held is module.held
        case "random":
            assert torch.rand(2, generator=copied.held).tolist() == torch.rand(2, generator=module.held).tolist()
        case "history":
            assert copied.held.is_leaf
            assert copied.held.tolist() == module.held.tolist()
        case "lock in a list":
            assert copied.held[0] is module.held[0]
            assert copied.held[1] is copied.up
        case "lock in an object":
            assert copied.held.lock is module.held.lock
            assert copied.held.part is copied.up
