"""Pair the lookup tables: words, positions and segments, which are summed before anything else happens."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations, product

import torch

from porting.suggesting.search.layouts import (
    CandidateRule,
    RuleTerm,
    Shape,
    Shapes,
    Ways,
    distance,
    element_axes,
    factorings,
    single_rule,
    single_term,
    written,
)
from porting.suggesting.search.name_similarity import similarity
from porting.suggesting.search.search_result import SAME
from porting.suggesting.subjects.operation_trace import Unit, WeightUse
from porting.suggesting.subjects.questions import Question

ROW = "(1|_rest) e"
"""The axes of a table of which the module has the first row alone, as one that adds one learned row to each token."""

FEW = 4
"""Rows that are nobody's: in front of the positions, or a padding segment.  More are a table of another length."""


def candidates(
    port: Sequence[Unit],
    reference: Sequence[Unit],
    port_shapes: Shapes,
    reference_shapes: Shapes,
    scales: Sequence[str],
    heads: Collection[str] = (),
) -> Ways:
    """Ways in which the port's tables may be made of the reference's.

    Args:
        port, reference: the tables that are looked up or added; a lookup's operand is its index.
        scales: constants that the words may have to be multiplied by, as a table writes them.
        heads: the port's tables that are the matrix of a head as well: what is added to one changes the head.
    """
    found: list[tuple[float, tuple[CandidateRule, ...], list[Unit]]] = []
    ours = list(port)
    count = min(len(ours), len(reference))
    statistics = _have_statistics(ours) and _have_statistics(reference)
    due = {a.number: _given_the_same(a, reference) for a in ours} if statistics else {}
    ways = {
        (a.number, a.names, b.number, b.names): list(_single(a, b, port_shapes, reference_shapes))
        for a, b in product(ours, reference)
        if not statistics or (_statistic(a) == _statistic(b) and b.number in due[a.number])
    }
    for theirs in _assigned(ours[:count], reference, ways):
        options = [ways[a.number, a.names, b.number, b.names] for a, b in zip(ours, theirs, strict=False)]
        left = [one for one in reference if one not in theirs]
        rank = -sum(_affinity(a, b) for a, b in zip(ours, theirs, strict=False))
        found += [(rank + 0.1 * number, moves, left) for number, moves in enumerate(product(*options))]
    found += [(10.0, moves, left) for moves, left in _joint(ours, reference, port_shapes, reference_shapes)]
    found.sort(key=lambda one: one[0])
    plain = [(moves, left) for _, moves, left in found]
    for moves, _ in plain[:1]:
        yield moves
        yield from _with_one_scaled(moves, ours, scales)
    yield from (moves for moves, _ in plain[1:])
    for moves, left in plain:
        yield from _folded(moves, left, ours, reference_shapes, heads)
    for scale in scales:
        for moves, left in plain:
            scaled = tuple(replace(move, scale=scale) if _words(move, ours) else move for move in moves)
            yield scaled
            yield from _folded(scaled, left, ours, reference_shapes, heads)


_Pair = tuple[int, tuple[str, ...], int, tuple[str, ...]]


def _assigned(
    ours: Sequence[Unit], reference: Sequence[Unit], ways: Mapping[_Pair, Sequence[CandidateRule]]
) -> Iterator[tuple[Unit, ...]]:
    """Each way of giving every table of ours another one of the reference's that it can be made of."""
    if not ours:
        yield ()
        return
    first, *rest = ours
    for one in reference:
        if ways.get((first.number, first.names, one.number, one.names)):
            others = [other for other in reference if other is not one]
            yield from ((one, *more) for more in _assigned(rest, others, ways))


STATISTICS = frozenset({"running_mean", "running_var"})
"""The names of the counts of torch's batch norms: they are not names of either side's own, and are never paired."""


def _statistic(one: Unit) -> str:
    last = one.names[0].rpartition(".")[2]
    return last if last in STATISTICS else ""


def _have_statistics(some: Sequence[Unit]) -> bool:
    return any(map(_statistic, some))


def _given_the_same(unit: Unit, reference: Sequence[Unit]) -> set[int]:
    """The numbers of the operations that are given what a batch norm is given: those of other branches are not.

    All of them where none is, as behind a place that differs.
    """
    alike = {
        one.number
        for one in reference
        if unit.given is not None and one.given is not None and distance(unit.given, one.given, SAME) <= SAME
    }
    return alike or {one.number for one in reference}


def _affinity(ours: Unit, theirs: Unit) -> float:
    """How much speaks for two tables being one: the same index, the same way of use, like names."""
    likeness = 3.0 * indexed_alike(ours, theirs) + 1.0 * (ours.kind == theirs.kind)
    return likeness + similarity(ours.names[0], theirs.names[0])


def indexed_alike(one: Unit, other: Unit) -> bool:
    """Whether two tables are looked up at the same places."""
    if one.operand is None or other.operand is None or one.operand.numel() != other.operand.numel():
        return False
    return bool(torch.equal(one.operand.flatten().sort().values, other.operand.flatten().sort().values))


def _single(ours: Unit, theirs: Unit, port_shapes: Shapes, reference_shapes: Shapes) -> Iterator[CandidateRule]:
    """One table into one: as it is, with axes of one element, turned, or with rows more or less."""
    name, source = ours.names[0], theirs.names[0]
    shape, their_shape = port_shapes[name], reference_shapes[source]
    if shape == their_shape:
        yield single_rule(source, name)
    rows = [size for size in their_shape if size != 1]
    squeezed = [size for size in shape if size != 1]
    if len(rows) != 2 and squeezed == rows and shape != their_shape:
        yield single_rule(source, name, element_axes(their_shape), element_axes(shape))
    if len(rows) == len(their_shape) == 2 and squeezed == rows[1:]:
        yield single_rule(source, name, ROW, element_axes(shape), fill=0.0)
    if max(len(rows), len(squeezed)) > 2 or len(rows) != len(squeezed):
        yield from (single_rule(source, name, *axes) for axes in _rearranged(their_shape, shape))
    if len(rows) != 2 or len(squeezed) != 2:
        return
    left = _axes(their_shape, "t", "e")
    if squeezed == rows and shape != their_shape:
        yield single_rule(source, name, left, _axes(shape, "t", "e"))
    if squeezed == rows[::-1] and rows[0] != rows[1]:
        yield single_rule(source, name, left, _axes(shape, "e", "t"))
    if squeezed[1] == rows[1]:
        tabular = WeightUse.TABLE in {ours.kind, theirs.kind} or squeezed[0] > rows[0]
        for parts, others in _rows(squeezed[0] - rows[0], their_shape, shape, tabular=tabular):
            yield single_rule(source, name, parts, others, fill=0.0)


MOST_AXES = 4
"""Axes of a table that may be put together or in another order."""


def _rearranged(theirs: Shape, ours: Shape) -> Iterator[tuple[str, str]]:
    """The axes of two tables of which one has several of the other's in one, or in another order.

    >>> list(_rearranged((49, 2), (2, 7, 7)))
    [('(m n) l', 'l m n'), ('(n m) l', 'l m n')]
    >>> list(_rearranged((49, 1), (1, 7, 7)))
    [('(l m) 1', '1 l m'), ('(m l) 1', '1 l m')]
    """
    if math.prod(theirs) != math.prod(ours) or [one for one in theirs if one > 1] == [one for one in ours if one > 1]:
        return
    turned = sum(one > 1 for one in theirs) > sum(one > 1 for one in ours)
    finer, coarser = (theirs, ours) if turned else (ours, theirs)
    if sum(one > 1 for one in finer) > MOST_AXES:
        return
    names = iter("lmno")  # no index of a size that a config tells
    apart = tuple((next(names),) if size > 1 else () for size in finer)
    sizes = {axis[0]: size for axis, size in zip(apart, finer, strict=True) if axis}
    for together in factorings(sizes, coarser):
        axes = written(together), written(apart)
        yield axes[::-1] if turned else axes


def _rows(more: int, theirs: Shape, ours: Shape, *, tabular: bool) -> Iterator[tuple[str, str]]:
    """The axes of two tables of which one has rows that are nobody's.

    Args:
        more: how many rows ours has more; negative for fewer.
        tabular: tables of different lengths have the first rows in common: they are positions, or words that are
            followed by some that nobody has, since so many are a rounder number.
    """
    left, right = _axes(theirs, "t", "e"), _axes(ours, "t", "e")
    number = abs(more)
    if number > FEW:
        if tabular:
            parts = "(t|_rest)"
            yield (left, _axes(ours, parts, "e")) if more > 0 else (_axes(theirs, parts, "e"), right)
    elif number:
        for parts in (f"(_{number}|t)", f"(t|_{number})"):
            yield (left, _axes(ours, parts, "e")) if more > 0 else (_axes(theirs, parts, "e"), right)
    else:
        for shift in (2, 1):  # the reference's rows begin later, and the module's table has as many
            yield _axes(theirs, f"(_{shift}|t)", "e"), _axes(ours, f"(t|_{shift})", "e")
        for shift in (2, 1) if tabular else ():  # or the module's do
            yield _axes(theirs, f"(t|_{shift})", "e"), _axes(ours, f"(_{shift}|t)", "e")


def _axes(shape: Shape, rows: str, columns: str) -> str:
    left = [rows, columns]
    return " ".join("1" if size == 1 and len(shape) > 2 else left.pop(0) for size in shape)


def _joint(
    port: Sequence[Unit], reference: Sequence[Unit], port_shapes: Shapes, reference_shapes: Shapes
) -> Iterator[tuple[tuple[CandidateRule, ...], list[Unit]]]:
    """Two tables one after the other in one, and the others in theirs; with what is left of the reference's."""
    for ours in port:
        name = ours.names[0]
        others = [one for one in port if one is not ours]
        for first, second in permutations(reference, 2):
            names = (first.names[0], second.names[0])
            shapes = [reference_shapes[one] for one in names]
            fits = len(port_shapes[name]) == 2 and all(len(one) == 2 for one in shapes)
            if not fits or port_shapes[name] != (shapes[0][0] + shapes[1][0], shapes[0][1]):
                continue
            sources = (single_term(names[0], "w e"), single_term(names[1], "t e"))
            joint = CandidateRule(sources, (single_term(name, "(w|t) e"),))
            rest = [one for one in reference if one not in (first, second)]
            for theirs in permutations(rest, min(len(others), len(rest))):
                pairs = zip(others, theirs, strict=False)
                options = [list(_single(a, b, port_shapes, reference_shapes)) for a, b in pairs]
                left = [one for one in rest if one not in theirs]
                yield from (((joint, *moves), left) for moves in product(*options))


def _folded(
    moves: tuple[CandidateRule, ...],
    left: Sequence[Unit],
    port: Sequence[Unit],
    reference_shapes: Shapes,
    heads: Collection[str],
) -> Ways:
    """The first row of a table that the module lacks, added to every position."""

    def unlikely(move: CandidateRule) -> tuple[bool, bool]:
        return not {*move.writes}.isdisjoint(heads), _words(move, port)

    for extra in left:
        source = extra.names[0]
        if len(reference_shapes[source]) != 2:
            continue
        for number, move in sorted(enumerate(moves), key=lambda one: unlikely(one[1])):
            if len(move.sources) == 1 and not move.constants:
                yield (*moves[:number], _with(move, (single_term(source, "0 e"),)), *moves[number + 1 :])


def _with_one_scaled(moves: tuple[CandidateRule, ...], port: Sequence[Unit], scales: Sequence[str]) -> Ways:
    """The likeliest way with one of several lookups scaled: words alone are, before positions are added."""
    looked_up = [number for number, move in enumerate(moves) if _words(move, port)]
    for number, scale in product(looked_up if len(moves) > 1 else (), scales):
        yield (*moves[:number], replace(moves[number], scale=scale), *moves[number + 1 :])


def _words(move: CandidateRule, port: Sequence[Unit]) -> bool:
    """Whether the move fills a table that is looked up by words, and not by places."""
    return any(unit.kind is WeightUse.LOOKUP for unit in port if unit.names[0] in move.writes)


def where_to_fold(moves: Sequence[CandidateRule], tables: Collection[str]) -> Question | None:
    """Ask which table to add a row to that the module has no table for; None where there is only one.

    Args:
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


def _takes(move: CandidateRule, tables: Collection[str]) -> bool:
    """Whether a row can be added to what this rule writes: one table made of one, as it is."""
    single = len(move.sources) == len(move.targets) == 1 and not (move.fold or move.constants)
    return single and move.targets[0].names[0] in tables


def refolded(moves: Sequence[CandidateRule], target: str) -> list[CandidateRule]:
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


def _bare(folded: CandidateRule) -> CandidateRule:
    axes = folded.sources[0].axes, folded.targets[0].axes
    return folded.along(*(axes if axes[0] != axes[1] else ("", "")))


def _with(move: CandidateRule, row: tuple[RuleTerm, ...]) -> CandidateRule:
    spelled = move if move.sources[0].axes else move.along("t e", "t e")
    return replace(spelled, sources=(*spelled.sources, *row), fold=True)
