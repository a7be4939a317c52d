"""Moves out of tensors stored in another order: composed with the order, they find the same elements."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from porting.staging import through
from tests.plan.carrying import port


@settings(max_examples=200)
@given(st.data())
def test_a_move_out_of_a_permuted_tensor_finds_the_same_elements(data: st.DataObject) -> None:
    names = "abcd"[: data.draw(st.integers(1, 4))]
    sizes = {name: data.draw(st.integers(1, 4)) for name in names}

    def axes(order: list[str]) -> list[list[str]]:
        groups: list[list[str]] = []
        while order:
            count = data.draw(st.integers(1, len(order)))
            groups.append(order[:count])
            order = order[count:]
        return groups

    def text(groups: list[list[str]]) -> str:
        return " ".join(f"({' '.join(group)})" for group in groups)

    left, right = (axes(list(data.draw(st.permutations(names)))) for _ in range(2))
    shape = tuple(math.prod(sizes[one] for one in group) for group in left)
    target = tuple(math.prod(sizes[one] for one in group) for group in right)
    given_sizes = "[sizes]\n" + "".join(f"{name} = {size}\n" for name, size in sizes.items())
    made = port(f'[tensors]\n"x [{text(left)}]" = "y [{text(right)}]"\n{given_sizes}', {"x": shape}, {"y": target})
    stored = (
        torch.randperm(math.prod(shape)).reshape([shape[one] for one in order])
        if (order := data.draw(st.permutations(range(len(shape)))))
        else torch.empty(0)
    )
    inverse = [list(order).index(axis) for axis in range(len(shape))]
    seen = stored.permute(inverse)  # in the order of the shape, over a file in another order
    assert tuple(seen.shape) == shape
    expected = made.forward({"x": seen.contiguous()})["y"]
    found = torch.full((expected.numel(),), -1)
    for step in made.steps:
        for copy in step.copies:
            moved = through(copy, shape, seen.stride())
            box = stored.reshape(-1).as_strided(moved.sizes, moved.source_strides, moved.source_offset)
            found.as_strided(moved.sizes, moved.target_strides, moved.target_offset).copy_(box)
    assert torch.equal(found.reshape(expected.shape), expected)
