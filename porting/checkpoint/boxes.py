"""Whether boxes of a tensor are disjoint, in time that does not explode with their number."""

from __future__ import annotations

from collections.abc import Sequence

Corner = tuple[int, ...]

MANY = 4096
"""Boxes that lie in no rows along any axis are compared in pairs, up to so many."""

LOOKS = 16
"""How often a box is looked at on the average: grids of grids take a few for each axis."""


class TangledError(ValueError):
    """The boxes are so many, and in so little order, that it would take too long to say."""


def overlapping(boxes: Sequence[tuple[Corner, Corner]]) -> tuple[int, int] | None:
    """Two boxes that share an element, by their places; None when there are none.

    What processes cut is a grid, or grids in the cells of one: along some axis the boxes then fall into rows, and each
    row is looked at by itself.  Where there is no such axis all pairs are compared.

    Args:
        boxes: where each begins, and its sizes, axis by axis; none of the sizes is 0.

    Raises:
        TangledError: nobody cuts a tensor so.

    >>> overlapping([((0, 0), (2, 3)), ((2, 0), (2, 3)), ((0, 3), (4, 1))])
    >>> overlapping([((0, 0), (2, 3)), ((1, 2), (2, 3))])
    (0, 1)
    """
    pending = [list(range(len(boxes)))]
    left = LOOKS * max(len(boxes), MANY)
    while pending:
        row = pending.pop()
        left -= len(row)
        if left < 0:
            raise TangledError
        if len(row) < 2:
            continue
        rows = _rows(boxes, row)
        if rows is not None:
            pending += rows
            continue
        found = _pair(boxes, row)
        if found is not None:
            return found
    return None


def _rows(boxes: Sequence[tuple[Corner, Corner]], row: Sequence[int]) -> list[list[int]] | None:
    """The boxes in several rows, none of which meets another; None where no axis shows any."""
    for axis in range(len(boxes[row[0]][0])):
        ordered = sorted(row, key=lambda one: boxes[one][0][axis])
        rows: list[list[int]] = []
        end = -1
        for one in ordered:
            start, size = boxes[one][0][axis], boxes[one][1][axis]
            if start >= end:
                rows.append([])
            rows[-1].append(one)
            end = max(end, start + size)
        if len(rows) > 1:
            return rows
    return None


def _pair(boxes: Sequence[tuple[Corner, Corner]], row: Sequence[int]) -> tuple[int, int] | None:
    if len(row) > MANY:
        raise TangledError
    for place, one in enumerate(row):
        for other in row[place + 1 :]:
            if all(
                start < other_start + other_size and other_start < start + size
                for start, size, other_start, other_size in zip(*boxes[one], *boxes[other], strict=True)
            ):
                return min(one, other), max(one, other)
    return None
