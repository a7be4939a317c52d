"""Tensors that are long runs of others' elements one after the other: renamed, joined, cut apart, interleaved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import product

from porting.plan.copies import Copy

LONG = 1 << 12
"""Bytes of a run: reading shorter ones one by one takes longer than to sort them out in memory."""


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """Elements that lie side by side in the source and in the target.

    Attributes:
        target, source: where they begin, in elements.
        count: how many there are.
        move: the number of the move that they belong to.
    """

    target: int
    source: int
    count: int
    move: int


def in_long_runs(copy: Copy, width: int) -> bool:
    """Whether a move is one run, or several long ones; ``width`` are the bytes of an element."""
    if not copy.sizes:
        return True
    if copy.source_strides[-1] != 1 or copy.target_strides[-1] != 1:
        return False
    return len(copy.sizes) == 1 or copy.sizes[-1] * width >= LONG


def in_order(copies: Sequence[Copy]) -> Iterator[Run]:
    """The runs of moves of which :func:`in_long_runs` is true, in the order of the target.

    >>> [run.source for run in in_order([Copy("a", "c", (2, 4), 0, (4, 1), 0, (8, 1))])]
    [0, 4]
    >>> [(run.move, run.target) for run in in_order([Copy("a", "c", (2, 4), 0, (4, 1), 0, (8, 1)),
    ...                                              Copy("b", "c", (2, 4), 0, (4, 1), 4, (8, 1))])]
    [(0, 0), (1, 4), (0, 8), (1, 12)]
    """
    found = [_runs(copy, number) for number, copy in enumerate(copies) if copy.numel]
    return found[0] if len(found) == 1 else merge(*found)


def _runs(copy: Copy, number: int) -> Iterator[Run]:
    directions = list(zip(copy.sizes, copy.source_strides, copy.target_strides, strict=True))[:-1]
    count = copy.sizes[-1] if copy.sizes else 1
    for place in product(*(range(size) for size, _, _ in directions)):
        source = sum(at * step for at, (_, step, _) in zip(place, directions, strict=True))
        target = sum(at * step for at, (_, _, step) in zip(place, directions, strict=True))
        yield Run(copy.target_offset + target, copy.source_offset + source, count, number)
