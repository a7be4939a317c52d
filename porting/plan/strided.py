"""Moves out of tensors that do not lie in row-major order in their file, as pickled views may."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from porting.plan.clipping import row_major, split_by_axes
from porting.plan.copies import Copy


def through(copy: Copy, shape: Sequence[int], strides: Sequence[int]) -> Copy:
    """The move with its source counted as it lies in the file.

    Args:
        copy: the move, its source counted in row-major elements.
        shape: the source's extents.
        strides: steps of its axes in the file, in elements.

    >>> moved = through(Copy("a", "b", (6,), 0, (1,), 0, (1,)), (2, 3), (1, 2))  # stored transposed
    >>> moved.sizes, moved.source_strides, moved.target_strides
    ((2, 3), (1, 2), (3, 1))
    """
    if copy.numel == 0:
        return copy
    rows = row_major(shape)
    offset, rest = 0, copy.source_offset
    for row, stride in zip(rows, strides, strict=True):
        at, rest = divmod(rest, row)
        offset += at * stride
    turned = replace(copy, source_strides=copy.target_strides, target_strides=copy.source_strides)
    directions = [
        (size, step * stride, place)
        for stride, digits in zip(strides, split_by_axes(turned, shape, rows), strict=True)
        for size, step, place in digits
    ]
    directions += [(size, 0, place) for size, step, place in copy.directions if not step]
    directions.sort(key=lambda one: (-one[2], -one[1]))  # not merged: each stays within one axis
    sizes, theirs, ours = (tuple(one[part] for one in directions) for part in range(3))
    return Copy(copy.source, copy.target, sizes, offset, theirs, copy.target_offset, ours)
