"""Every box of a target gets its elements, and no others, held against the whole tensor."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from porting.plan.copies import Copy, clip, make_copy, window
from porting.plan.move import gather


@st.composite
def moves(draw: st.DrawFn) -> tuple[list[Copy], tuple[int, ...], tuple[int, ...]]:
    """The moves of a random permutation of digits, in one part or in two segments of an axis, and both shapes."""
    count = draw(st.integers(1, 4))
    names = [f"i{number}" for number in range(count)]
    sizes = {name: draw(st.integers(1, 4)) for name in names}
    segment = draw(st.sampled_from(names))
    first = draw(st.integers(0, sizes[segment]))
    spans = [(0, sizes[segment])] if first in (0, sizes[segment]) else [(0, first), (first, sizes[segment])]
    order, other = draw(st.permutations(names)), draw(st.permutations(names))
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=2)))
    cuts_other = sorted(draw(st.lists(st.integers(0, count), max_size=2)))
    copies = []
    for low, high in spans:
        box = {**sizes, segment: high - low}
        theirs, ours = strides(order, sizes), strides(other, sizes)
        copies.append(make_copy("s", "t", box, (low * theirs[segment], theirs), (low * ours[segment], ours)))
    return copies, shape_of(order, sizes, cuts), shape_of(other, sizes, cuts_other)


def strides(order: list[str], sizes: dict[str, int]) -> dict[str, int]:
    found, step = {}, 1
    for name in reversed(order):
        found[name] = step
        step *= sizes[name]
    return found


def shape_of(order: list[str], sizes: dict[str, int], cuts: list[int]) -> tuple[int, ...]:
    """The digits put together into axes at these cuts; an empty group is an axis of one."""
    groups = [order[low:high] for low, high in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    return tuple(math.prod(sizes[name] for name in group) for group in groups)


@given(moves=moves(), data=st.data())
def test_a_box_gets_what_the_whole_tensor_has_there(
    moves: tuple[list[Copy], tuple[int, ...], tuple[int, ...]], data: st.DataObject
) -> None:
    copies, source_shape, shape = moves
    source = torch.arange(math.prod(source_shape))
    whole = gather(copies, shape, lambda name: source)
    bounds = [sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size)))) for size in shape]
    starts, sizes = [low for low, _ in bounds], [high - low for low, high in bounds]
    found = torch.full((math.prod(sizes),), -1)
    moved = 0
    for copy in copies:
        for part in clip(copy, shape, starts, sizes):
            place(part, found).copy_(box(part, source))
            moved += part.numel
    expected = whole[tuple(slice(low, high) for low, high in bounds)]
    assert moved == expected.numel(), "each element once"
    assert torch.equal(found.view(expected.shape), expected)


@given(moves=moves(), data=st.data())
def test_a_window_is_a_box_of_the_flattened_target(
    moves: tuple[list[Copy], tuple[int, ...], tuple[int, ...]], data: st.DataObject
) -> None:
    copies, source_shape, shape = moves
    source = torch.arange(math.prod(source_shape))
    whole = gather(copies, shape, lambda name: source).reshape(-1)
    start, stop = sorted((data.draw(st.integers(0, whole.numel())), data.draw(st.integers(0, whole.numel()))))
    found = torch.full((stop - start,), -1)
    for copy in copies:
        for part in window(copy, start, stop):
            place(part, found).copy_(box(part, source))
    assert torch.equal(found, whole[start:stop])


def box(copy: Copy, tensor: Tensor) -> Tensor:
    return tensor.as_strided(copy.sizes, copy.source_strides, copy.source_offset)


def place(copy: Copy, tensor: Tensor) -> Tensor:
    return tensor.as_strided(copy.sizes, copy.target_strides, copy.target_offset)


def test_a_window_of_a_plain_copy_is_one_run() -> None:
    plain = Copy("s", "t", (1000,), 5, (1,), 0, (1,))
    assert list(window(plain, 300, 400)) == [Copy("s", "t", (100,), 305, (1,), 0, (1,))]
    assert list(window(plain, 1000, 1100)) == []


def test_the_work_does_not_grow_with_the_window() -> None:
    """Elements are never gone through one by one: these windows have more of them than anybody could."""
    plain = Copy("s", "t", (2**50,), 0, (1,), 0, (1,))
    assert list(window(plain, 2**10, 2**49)) == [Copy("s", "t", (2**49 - 2**10,), 2**10, (1,), 0, (1,))]
    transposed = Copy("s", "t", (2**25, 2**25), 0, (1, 2**25), 0, (2**25, 1))
    parts = list(window(transposed, 2**30 + 5, 2**49 + 7))
    assert sum(part.numel for part in parts) == 2**49 + 7 - 2**30 - 5
    assert len(parts) == 3
