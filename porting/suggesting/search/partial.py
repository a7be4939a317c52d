"""Biases that only some of a group have: the query's and the value's, since softmax does not see a key's.

Where one side has all of them in one tensor, the key's part of it is nobody's: zeros, or left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from porting.suggesting.search.layouts import Matrix, Move, Piece

_PARTS = "abfjlmuwx"

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


def biases(ours: Sequence[Matrix], theirs: Sequence[Matrix]) -> tuple[Move, ...]:
    """The rules for the biases of one fused tensor and of several, block after block in this order."""
    one, several = _sides(ours, theirs)
    having = [part.biases[0] for part in several if part.biases]
    if one.parts:
        pairs = zip(having, one.parts, strict=False) if several is theirs else zip(one.parts, having, strict=False)
        fits = len(one.parts) == len(having)
        return tuple(Move((_piece(a),), (_piece(b),)) for a, b in pairs) if fits else ()
    letters = [letter if part.biases else f"_{letter}" for letter, part in zip(_PARTS, several, strict=False)]
    whole = _piece(one.biases[0], f"({'|'.join(letters)})")
    each = tuple(_piece(name, letter) for name, letter in zip(having, [x for x in letters if x[0] != "_"], strict=True))
    return (
        Move(each, (whole,), fill=0.0, why=UNSEEN) if several is theirs else Move((whole,), each, fill=0.0, why=UNSEEN),
    )


def in_blocks(moves: Sequence[Move]) -> bool:
    """Whether the weights lie one after the other in the fused tensor."""
    return any("(p o)" in piece.axes for move in moves for piece in (*move.sources, *move.targets))


def _sides(ours: Sequence[Matrix], theirs: Sequence[Matrix]) -> tuple[Matrix, Sequence[Matrix]]:
    return (ours[0], theirs) if len(ours) == 1 else (theirs[0], ours)


def _piece(name: str, axes: str = "") -> Piece:
    return Piece(name, (name,), axes)
