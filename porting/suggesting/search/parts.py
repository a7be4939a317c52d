"""Which of the weights that meet one activation belong to one part of the model.

The keys and values of every decoder layer are given the same activation, what the encoder returns.  They are told apart
by what is made of them: a part ends at the first matrix whose operand comes from the part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from porting.suggesting.subjects.tracing import Kind, Unit


def first_part(some: Sequence[Unit], units: Sequence[Unit]) -> list[Unit]:
    """Those of the first one's part.

    Args:
        some: units that are given one activation, in order of execution.
        units: all units of the run.
    """
    wanted = {id(one) for one in some}
    made = {some[0].number}
    found = [some[0]]
    for one in units[units.index(some[0]) + 1 :]:
        if one.behind & made:
            if one.kind is Kind.LINEAR:
                break
            made.add(one.number)
        elif id(one) in wanted:
            made.add(one.number)
            found.append(one)
    return found


def size(some: Sequence[Unit], shapes: Mapping[str, tuple[int, ...]]) -> int:
    """How many numbers the matrices have together."""
    return sum(math.prod(shapes[name]) for one in some for name in one.weights)
