"""The question which table takes the row of one that the module does not have, and what its answer makes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from porting.suggesting.search.layouts import Move, Piece
from porting.suggesting.subjects.asking import Question


def where_to_fold(moves: Sequence[Move], tables: Collection[str]) -> Question | None:
    """Which table a row goes into that the module has no table for; None where there is one only.

    Args:
        moves: what was found.
        tables: the module's tensors that are looked up, or added row by row.
    """
    folded = next((move for move in moves if move.fold), None)
    others = [move for move in moves if _takes(move, tables)]
    if folded is None or not others:
        return None
    extra, first = folded.sources[1].pattern, folded.targets[0].pattern
    return Question(
        about="fold",
        said=f"Which table takes row 0 of {extra}?",
        why="the module has no such table; the sum is the same, and an export gives it back to the table that took it",
        choices=dict.fromkeys((first, *(move.targets[0].pattern for move in others)), ""),
        default=first,
    )


def _takes(move: Move, tables: Collection[str]) -> bool:
    """Whether a row can be added to what this rule writes: one table made of one, as it is."""
    single = len(move.sources) == len(move.targets) == 1 and not (move.fold or move.scale)
    return single and move.targets[0].names[0] in tables


def refolded(moves: Sequence[Move], target: str) -> list[Move]:
    """The moves with the row taken by another table."""
    folded = next(move for move in moves if move.fold)
    if folded.targets[0].pattern == target:
        return list(moves)
    row = folded.sources[1:]
    found = []
    for move in moves:
        if move is folded:
            found.append(replace(_bare(move), fold=False))
        elif move.targets[0].pattern == target:
            found.append(_with(move, row))
        else:
            found.append(move)
    return found


def _bare(folded: Move) -> Move:
    source, target = folded.sources[0], folded.targets[0]
    if source.axes == target.axes:
        source, target = replace(source, axes=""), replace(target, axes="")
    return replace(folded, sources=(source,), targets=(target,))


def _with(move: Move, row: tuple[Piece, ...]) -> Move:
    source, target = move.sources[0], move.targets[0]
    if not source.axes:
        source, target = replace(source, axes="t e"), replace(target, axes="t e")
    return replace(move, sources=(source, *row), targets=(target,), fold=True)
