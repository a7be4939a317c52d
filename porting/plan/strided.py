"""Moves out of tensors that do not lie in row-major order in their file, as pickled views may."""

from __future__ import annotations

from collections.abc import Sequence

from porting.plan.clipping import row_major
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
    rows = row_major(shape)
    offset, rest = 0, copy.source_offset
    position = []
    for axis, row in enumerate(rows):
        at, rest = divmod(rest, row)
        position.append(at)
        offset += at * strides[axis]
    sizes: list[int] = []
    theirs: list[int] = []
    ours: list[int] = []
    for size, step, place in zip(copy.sizes, copy.source_strides, copy.target_strides, strict=True):
        for part, count, inner in _split(size, step, shape, rows, strides, position):
            sizes.append(part)
            theirs.append(count)
            ours.append(place * inner)
    return Copy(copy.source, copy.target, tuple(sizes), offset, tuple(theirs), copy.target_offset, tuple(ours))


def _split(
    size: int,
    step: int,
    shape: Sequence[int],
    rows: Sequence[int],
    strides: Sequence[int],
    position: Sequence[int],
) -> list[tuple[int, int, int]]:
    """One index as steps along single axes: size, step in the file, and how many steps of the index it makes at once.

    An index that runs over several axes runs over the whole of each but the slowest: it was merged from theirs.
    """
    if step == 0:
        return [(size, 0, 1)]
    found: list[tuple[int, int, int]] = []
    inner = 1
    axis = min(one for one in range(len(shape)) if rows[one] <= step and shape[one] > 1)
    stride = step // rows[axis] * strides[axis]
    each = step // rows[axis]
    while True:
        left = (shape[axis] - position[axis] + each - 1) // each
        if size <= left:
            found.append((size, stride, inner))
            return found[::-1]
        found.append((left, stride, inner))
        size, inner = size // left, inner * left
        axis = max(one for one in range(axis) if shape[one] > 1)
        stride, each = strides[axis], 1
