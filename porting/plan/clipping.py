"""The part of a move that falls into a box of its target, as a move into that box alone.

A writer that holds one window of a tensor, and a rank that holds one shard of it, need the elements of that box and
no others.  A move is a box of its own, given by offsets and strides, so that the part is found by arithmetic alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from porting.plan.copies import Copy, order_copy

ENDLESS = 2**63
"""The length of an axis that every target fits on, seen as one row of elements."""

Digit = tuple[int, int, int]
"""One direction of a move inside one axis of the target: size, step along the axis, step in the source."""

Part = tuple[int, int, tuple[Digit, ...]]
"""A part of a move along one axis: where it begins on the axis, how far into the source that is, its directions."""


def clip(copy: Copy, shape: Sequence[int], starts: Sequence[int], sizes: Sequence[int]) -> Iterator[Copy]:
    """The parts of a move that write into a box of its target.

    Args:
        copy: the move; its strides are those of a target of ``shape`` in row-major order.

    Yields:
        Moves that together bring the elements of the box and no others; their target is the box, in row-major order.

    >>> whole = Copy("a", "b", (6,), 0, (1,), 0, (1,))
    >>> [part] = clip(whole, (2, 3), (0, 1), (2, 2))
    >>> part.sizes, part.source_offset, part.source_strides, part.target_strides
    ((2, 2), 1, (3, 1), (2, 1))
    """
    if 0 in sizes:
        return
    strides, local = row_major(shape), row_major(sizes)
    digits = split_by_axes(copy, shape, strides)
    choices: list[list[Part]] = []
    still = [
        one for one in copy.directions if one[2] == 0
    ]  # elements that land in one place: the inverse of a broadcast
    offset = copy.target_offset
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        at, offset = divmod(offset, strides[axis])
        choices.append(list(_within(digits[axis], at, start, start + size)))
    for choice in product(*choices):
        directions = [
            (size, source_step, step * local[axis])
            for axis, (_, _, inside) in enumerate(choice)
            for size, step, source_step in inside
        ]
        directions += still
        into = sum((at - starts[axis]) * local[axis] for axis, (at, _, _) in enumerate(choice))
        skipped = sum(source for _, source, _ in choice)
        yield order_copy(copy.source, copy.target, directions, copy.source_offset + skipped, into)


def window(copy: Copy, start: int, stop: int) -> Iterator[Copy]:
    """The parts of a move that write the elements from ``start`` to ``stop`` of its target, in row-major order."""
    if copy.sizes and copy.contiguous:  # most are: one run, which takes no search
        first, last = max(start - copy.target_offset, 0), min(stop - copy.target_offset, copy.sizes[0])
        if first < last:
            at = copy.source_offset + first, copy.target_offset + first - start
            yield Copy(copy.source, copy.target, (last - first,), at[0], (1,), at[1], (1,))
        return
    last = copy.target_offset + sum((size - 1) * step for size, _, step in copy.directions)
    if copy.target_offset < stop and start <= last:
        yield from clip(copy, (ENDLESS,), (start,), (stop - start,))


def clip_source(copy: Copy, shape: Sequence[int], starts: Sequence[int], sizes: Sequence[int]) -> Iterator[Copy]:
    """The parts of a move that read from a box of its source.

    Args:
        copy: the move; each of its directions runs over whole axes of the source but for the slowest, as those of a
            plan do.

    Yields:
        Moves that together read the elements of the box and no others; their source is the box, in row-major order.

    >>> turned = Copy("a", "b", (3, 2), 0, (1, 3), 0, (2, 1))  # of [2, 3] into [3, 2]
    >>> [part] = clip_source(turned, (2, 3), (1, 0), (1, 3))
    >>> part.sizes, part.source_strides, part.target_offset, part.target_strides
    ((3,), (1,), 1, (2,))
    """
    again = [(size, 0, place) for size, step, place in copy.directions if not step]  # read once, put in several places
    for part in clip(copy.written_back, shape, starts, sizes):
        directions = [(size, place, step) for size, step, place in part.directions]
        yield order_copy(copy.source, copy.target, directions + again, part.target_offset, part.source_offset)


def row_major(shape: Sequence[int]) -> list[int]:
    """Row-major strides in elements; an axis without elements counts as one, so that none of them is 0."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


def split_by_axes(copy: Copy, shape: Sequence[int], strides: Sequence[int]) -> list[list[Digit]]:
    """The move's directions, each cut where it runs on from one axis to the next slower one; slowest first."""
    digits: list[list[Digit]] = [[] for _ in shape]
    for size, source_step, step in copy.directions:
        for axis in reversed(range(len(shape))):
            if size == 1 or step == 0 or step >= strides[axis] * shape[axis]:
                continue
            room = strides[axis] * shape[axis] // step
            inside = min(size, room)
            digits[axis].append((inside, step // strides[axis], source_step))
            size, source_step, step = size // inside, source_step * inside, step * inside  # noqa: PLW2901  # what is left
    return [sorted(one, key=lambda digit: -digit[1]) for one in digits]


def _within(digits: Sequence[Digit], at: int, low: int, high: int) -> Iterator[Part]:
    """The parts whose places on an axis, ``at`` and the digits' steps added, lie between ``low`` and ``high``."""
    if not digits:
        if low <= at < high:
            yield at, 0, ()
        return
    (size, step, source_step), *rest = digits
    reach = sum((count - 1) * width for count, width, _ in rest)
    first, last = max(0, -((at - low) // step)), min(size, (high - 1 - at - reach) // step + 1)
    if first < last:
        yield at + first * step, first * source_step, ((last - first, step, source_step), *rest)
    if not rest:
        return
    begun, ended = max(0, -((at + reach - low) // step)), min(size, (high - 1 - at) // step + 1)
    inside = range(first, max(first, last))
    # Of what is only touched there is one step at either end: the steps of the other digits do not reach further.
    for number in (*range(begun, min(inside.start, ended)), *range(max(inside.stop, begun), ended)):
        for begin, skipped, part in _within(rest, at + number * step, low, high):
            yield begin, skipped + number * source_step, part
