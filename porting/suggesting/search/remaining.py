"""What is left on both sides and is plainly one: constants of the same values, and weights that never run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from porting.suggesting.search.layouts import Move, Piece
from porting.suggesting.search.naming import likeness
from porting.suggesting.subjects.twin import is_frequencies

ALIKE = 0.5
"""Names of weights that never run have at least so much in common."""

COMPUTED, UNRUN = "it is computed, and has these values", "it never runs: by its name"


def remaining(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], running: frozenset[str]
) -> Iterator[tuple[Move, Tensor]]:
    """Moves for what no place has shown, each with what is written.

    Args:
        ours, theirs: the tensors of either side that nothing fills, and that nothing reads.
        running: the names of all that meet an activation, on either side.
    """
    constants = [name for name, one in theirs.items() if is_frequencies(one)]
    for name, one in ours.items():
        same = next(
            (other for other in constants if theirs[other].shape == one.shape and _equal(theirs[other], one)), ""
        )
        if same and not isinstance(one, nn.Parameter):
            constants.remove(same)
            yield _move(same, name, COMPUTED), theirs[same]
    still = [name for name in theirs if name not in running]
    for name, one in ours.items():
        if name in running or not isinstance(one, nn.Parameter):
            continue
        near = _nearest(name, [other for other in still if theirs[other].shape == one.shape])
        if near:
            still.remove(near)
            yield _move(near, name, UNRUN), theirs[near]


def _nearest(name: str, others: Sequence[str]) -> str:
    """Of those that end alike, the one that has most in common with a name; empty where that is little."""
    ends = [one for one in others if one.rpartition(".")[2] == name.rpartition(".")[2]]
    best = max(ends, key=lambda one: likeness(one, name), default="")
    return best if best and likeness(best, name) >= ALIKE else ""


def _equal(one: Tensor, other: Tensor) -> bool:
    return bool(torch.allclose(one.double(), other.double(), rtol=1e-6, atol=0.0))


def _move(theirs: str, ours: str, why: str) -> Move:
    return Move((Piece(theirs, (theirs,)),), (Piece(ours, (ours,)),), why=why)
