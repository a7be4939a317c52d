"""What is done to tensors without values is what torch does to tensors with them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from porting.notation.faults import TableError
from porting.registries.conversions import Conversion, FollowedTensor, opened
from porting.registries.layout import LayoutError
from porting.registries.patterns import rules
from porting.registries.wording import worded
from tests.plan.carrying import port, same

Done: TypeAlias = Callable[[list[Tensor]], dict[str, Tensor]]


def rope(tensor: Tensor) -> Tensor:
    return tensor.view(2, 3, 2, 5).transpose(1, 2).reshape(12, 5)


def fused(tensor: Tensor) -> dict[str, Tensor]:
    """Query and key in one tensor, of which the query alone is permuted."""
    query, key = tensor.chunk(2, dim=0)
    return {"q": query.reshape(3, 2, 5).transpose(0, 1).reshape(6, 5), "k": key}


CASES: dict[str, tuple[int, Done]] = {
    "transpose": (1, lambda t: {"a": t[0].transpose(0, 1).contiguous()}),
    "permute": (1, lambda t: {"a": t[0].reshape(3, 4, 5).permute(1, 2, 0)}),
    "stack": (3, lambda t: {"a": torch.stack(t, dim=1)}),
    "cat": (3, lambda t: {"a": torch.cat(t, dim=0)}),
    "cat along the second axis": (2, lambda t: {"a": torch.cat(t, dim=1)}),
    "chunk": (1, lambda t: dict(zip("abc", torch.chunk(t[0], 3, dim=0), strict=True))),
    "chunk with a short end": (1, lambda t: dict(zip("abc", torch.chunk(t[0], 3, dim=1), strict=True))),
    "split": (1, lambda t: dict(zip("ab", t[0].split_with_sizes([7, 5]), strict=True))),
    "interleave": (1, lambda t: {"a": t[0].reshape(6, 2, 5).transpose(0, 1).reshape(12, 5)}),
    "interleave and chunk": (
        1,
        lambda t: dict(zip("ab", t[0].reshape(6, 2, 5).transpose(0, 1).reshape(12, 5).chunk(2, dim=0), strict=True)),
    ),
    "interleave the other way and chunk": (
        1,
        lambda t: dict(zip("ab", t[0].reshape(2, 6, 5).transpose(0, 1).reshape(12, 5).chunk(2, dim=0), strict=True)),
    ),
    "rope": (1, lambda t: {"a": rope(t[0])}),
    "chunk, one of them permuted": (1, lambda t: fused(t[0])),
    "stack and cat": (4, lambda t: {"a": torch.cat([torch.stack(t[:2]), torch.stack(t[2:])], dim=1)}),
    "two rows": (1, lambda t: dict(zip("ab", t[0].reshape(6, 2, 5).chunk(2, dim=1), strict=True))),
    "squeeze and flatten": (1, lambda t: {"a": t[0].unsqueeze(0).flatten(1).squeeze(0)}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rule_says_what_was_done(case: str) -> None:
    count, do = CASES[case]
    values = {f"e.{number}.w": torch.randn(12, 5) for number in range(count)}
    found = do([opened(name, (12, 5), torch.float32) for name in values])
    followed = {name: one for name, one in found.items() if isinstance(one, FollowedTensor)}
    sources = dict.fromkeys(source.whole or source for one in followed.values() for source in one.sources)
    wording = worded(Conversion(sources=tuple(sources), targets={name: one.axes for name, one in followed.items()}))
    ((left, right),) = rules([wording])
    sizes = "".join(f"{name} = {size}\n" for name, size in wording.sizes)
    wanted = do(list(values.values()))
    text = f"[sizes]\n{sizes}[[rule]]\nsource = {list(left)}\ntarget = {list(right)}\n"
    carried = port(text, dict.fromkeys(values, (12, 5)), {name: tuple(one.shape) for name, one in wanted.items()})
    same(carried.forward(values), wanted)
    same(carried.backward(wanted), values)


def test_a_tensor_that_is_still_the_files_own_is_counted() -> None:
    tensors = [opened(f"e.{number}.w", (4,), torch.float32).contiguous() for number in range(3)]
    merged = torch.stack([*tensors])
    assert isinstance(merged, FollowedTensor)
    assert merged.sources[1].whole is not None
    assert merged.sources[1].whole.names == ["e.0.w", "e.1.w", "e.2.w"]


REFUSED: dict[str, tuple[Done, str]] = {
    "computed": (lambda t: {"a": t[0] * 2}, "torch's 'mul'"),
    "cast": (lambda t: {"a": t[0].to(torch.float16)}, "a cast from torch.float32 to torch.float16"),
    "indexed": (lambda t: {"a": t[0][:3]}, "torch's '__getitem__'"),
    "with a constant": (
        lambda t: {"a": torch.cat([t[0], torch.ones(1, 5, device="meta")])},
        "'cat' of a constant",
    ),
    "made anew": (lambda t: {"a": t[0].new_zeros(3)}, "torch's 'new_zeros'"),
    "cut inside": (lambda t: {"a": rope(t[0]).split_with_sizes([5, 7])[0]}, "falls inside of a part of 6"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_computes_is_refused_by_its_name(case: str) -> None:
    do, message = REFUSED[case]
    with pytest.raises(LayoutError, match=re.escape(message)):
        do([opened("w", (12, 5), torch.float32)])


def test_rows_that_change_their_order_are_refused() -> None:
    tensor = opened("w", (2, 5), torch.float32)
    first, second = tensor.chunk(2, dim=0)
    assert isinstance(first, FollowedTensor)
    assert isinstance(second, FollowedTensor)
    worded(Conversion(sources=tensor.sources, targets={"a": first.axes, "b": second.axes}))
    with pytest.raises(TableError, match="single rows of 'w' change their order"):
        worded(Conversion(sources=tensor.sources, targets={"a": second.axes, "b": first.axes}))


def test_what_leaves_elements_out_is_refused() -> None:
    tensor = opened("w", (12, 5), torch.float32)
    half = tensor.chunk(2, dim=0)[1]
    assert isinstance(half, FollowedTensor)
    with pytest.raises(TableError, match="'w' is not all of what becomes 'a'"):
        worded(Conversion(sources=tensor.sources, targets={"a": half.axes}))
