"""One elementary move: a box of one tensor onto a box of another, as offsets and strides.

Every rule comes down to such moves, and a move read from right to left is its own inverse, so that nothing about a
port is ever written twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

Direction = tuple[int, int, int]
"""A size, a stride in the source and one in the target."""


@dataclass(frozen=True, slots=True)
class Copy:
    """``target[box] = source[box]``, both in row-major elements.

    Attributes:
        source, target: names of the two tensors.
        sizes: the box, its slowest direction in the target first; neighbouring directions that run on are merged, so
            that a plain copy has one.
    """

    source: str
    target: str
    sizes: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    target_offset: int
    target_strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements are moved."""
        return math.prod(self.sizes)

    @property
    def contiguous(self) -> bool:
        """Whether it is one run of elements on both sides."""
        return self.source_strides in ((), (1,)) and self.target_strides in ((), (1,))

    @property
    def directions(self) -> list[Direction]:
        """Each size, its stride in the source, and its stride in the target."""
        return list(zip(self.sizes, self.source_strides, self.target_strides, strict=True))

    @property
    def inverse(self) -> Copy:
        """The move back."""
        return self._turned(self.directions)

    @property
    def written_back(self) -> Copy:
        """The move back, by which an element that was read for several places is written once."""
        return self._turned([one for one in self.directions if one[1]])

    def _turned(self, directions: list[Direction]) -> Copy:
        box = [(size, place, step) for size, step, place in directions]
        return order_copy(self.target, self.source, box, self.target_offset, self.source_offset)


def make_copy(
    source: str,
    target: str,
    sizes: Mapping[str, int],
    source_box: tuple[int, Mapping[str, int]],
    target_box: tuple[int, Mapping[str, int]],
) -> Copy:
    """The move between two boxes, each an offset and a stride for each index of ``sizes``.

    An index that the source's box lacks is broadcast: its stride there is 0.
    """
    directions = [(size, source_box[1].get(index, 0), target_box[1].get(index, 0)) for index, size in sizes.items()]
    return order_copy(source, target, directions, source_box[0], target_box[0])


def order_copy(source: str, target: str, directions: list[Direction], source_offset: int, target_offset: int) -> Copy:
    """The move along these directions, ordered and merged."""
    directions = sorted((one for one in directions if one[0] != 1), key=lambda one: (-one[2], -one[1]))
    merged: list[Direction] = []
    for size, step, place in directions:
        if merged:
            slower, slower_step, slower_place = merged[-1]
            if slower_step == size * step and slower_place == size * place:
                merged[-1] = (slower * size, step, place)
                continue
        merged.append((size, step, place))
    return Copy(
        source,
        target,
        tuple(one[0] for one in merged),
        source_offset,
        tuple(one[1] for one in merged),
        target_offset,
        tuple(one[2] for one in merged),
    )


def whole(source: str, target: str, numel: int) -> Copy:
    """The move of a whole tensor of so many elements, each to the same place of another."""
    return Copy(source, target, (numel,), 0, (1,), 0, (1,))


def grouped(copies: Iterable[Copy], side: Literal["source", "target"]) -> dict[str, tuple[Copy, ...]]:
    """Moves by the tensor that they read or write, in their order."""
    groups: dict[str, list[Copy]] = {}
    for copy in copies:
        groups.setdefault(copy.source if side == "source" else copy.target, []).append(copy)
    return {name: tuple(group) for name, group in groups.items()}


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
