"""One elementary move: a box of one tensor onto a box of another, as offsets and strides.

Every rule comes down to such moves, and a move read from right to left is its own inverse, so that nothing about a
port is ever written twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
