"""Biases that a softmax cannot see: a key's bias moves all scores of a query by the same number.

So some modules have a bias for the query and the value only.  Where one side has all of them in one tensor, the key's
part of it belongs to nothing: it is zeros, or left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from porting.suggesting.search.layouts import CandidateRule, Matrix, RuleTerm, distance
from porting.suggesting.search.search_result import SAME
from porting.suggesting.subjects.operation_trace import TracedModel

SOFTMAX_IGNORES = "softmax cannot see it: it moves all scores of a query by the same number"


def is_ignored_by_softmax(side: TracedModel, biases: Sequence[str], weights: Sequence[str]) -> bool:
    """Whether a model returns the same whatever these biases are, and something else with other weights.

    It is tried out: with keys that are rotated, or that something else reads as well, a bias shows.

    Args:
        side: the model; its values are as before when this returns.
        biases, weights: a matrix's.
    """
    base = [one for one in side.run().outputs if one.is_floating_point()]

    def moves(names: Sequence[str]) -> bool:
        kept = {name: side.leaves[name].detach().clone() for name in names}
        generator = torch.Generator().manual_seed(0)
        try:
            for name, value in kept.items():
                noise = torch.randn(value.shape, dtype=torch.float64, generator=generator)
                side.leaves[name].data.copy_(value + 0.5 * noise)
            other = [one for one in side.run().outputs if one.is_floating_point()]
        finally:
            for name, value in kept.items():
                side.leaves[name].data.copy_(value)
        return any(distance(one, two) > SAME for one, two in zip(base, other, strict=True))

    return bool(base and biases and weights) and not moves(biases) and moves(weights)


PARTS = "abfjlmuwx"
"""Indices of parts of different sizes; the other letters have sizes of their own."""

UNSEEN = "softmax cannot see a key's bias"


def is_partial(ours: Sequence[Matrix], theirs: Sequence[Matrix]) -> bool:
    """Whether one of several has no bias, or one side's is made of several tensors."""
    one, several = _sides(ours, theirs)
    if len(several) < 2 or not one.biases:
        return False
    having = [part for part in several if part.biases]
    return len(having) == len(several) - 1 or (bool(one.parts) and len(one.parts) == len(having))


def bare(some: Sequence[Matrix]) -> list[Matrix]:
    """The matrices without their biases."""
    return [replace(one, biases=(), bias_shape=None, parts=()) for one in some]


def biases(ours: Sequence[Matrix], theirs: Sequence[Matrix]) -> tuple[CandidateRule, ...]:
    """The rules for the biases of one fused tensor and of several, block after block in this order."""
    one, several = _sides(ours, theirs)
    having = [part.biases[0] for part in several if part.biases]
    if one.parts:
        pairs = zip(having, one.parts, strict=False) if several is theirs else zip(one.parts, having, strict=False)
        fits = len(one.parts) == len(having)
        return tuple(CandidateRule((_piece(a),), (_piece(b),)) for a, b in pairs) if fits else ()
    letters = [letter if part.biases else f"_{letter}" for letter, part in zip(PARTS, several, strict=False)]
    whole = _piece(one.biases[0], f"({'|'.join(letters)})")
    each = tuple(_piece(name, letter) for name, letter in zip(having, [x for x in letters if x[0] != "_"], strict=True))
    return (
        CandidateRule(each, (whole,), fill=0.0, why=UNSEEN)
        if several is theirs
        else CandidateRule((whole,), each, fill=0.0, why=UNSEEN),
    )


def in_blocks(moves: Sequence[CandidateRule]) -> bool:
    """Whether the weights lie one after the other in the fused tensor."""
    return any("(p o)" in piece.axes for move in moves for piece in (*move.sources, *move.targets))


def _sides(ours: Sequence[Matrix], theirs: Sequence[Matrix]) -> tuple[Matrix, Sequence[Matrix]]:
    return (ours[0], theirs) if len(ours) == 1 else (theirs[0], ours)


def _piece(name: str, axes: str = "") -> RuleTerm:
    return RuleTerm(name, (name,), axes)
