"""Sizes of indices, solved from the shapes of one application of a rule, and the boxes that follow from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from porting.errors import Code, Fault
from porting.limits import charge, combinations
from porting.notation.axes import Axis, Index, Mismatch, Piece, leaves, pieces, row_indices, size_of, sized, solve_all
from porting.notation.faults import NotationError
from porting.notation.name import Value
from porting.notation.rule import RESULT, Rule, Term
from porting.ops import Formula
from porting.plan.config import sizes_under
from porting.plan.copies import Copy, make_copy, row_major
from porting.plan.formulas import Layout, Operand

Shape = tuple[int, ...]
Key = tuple[Value, ...]
Members = Mapping[Key, str]


@dataclass(frozen=True)
class Move:
    """A box between the member ``source_key`` of a source term and the member ``target_key`` of a target term."""

    source_term: int
    source_key: Key
    target_term: int
    target_key: Key
    box: Copy


@dataclass(frozen=True)
class _Side:
    """One term, its members and their shapes."""

    term: Term
    members: Members
    shapes: list[Shape]

    @property
    def shape(self) -> Shape:
        return self.shapes[0]

    @property
    def axes(self) -> tuple[Axis, ...]:
        return axes_of(self.term, len(self.shape))

    def __str__(self) -> str:
        more = f" (one of {len(self.members)})" if len(self.members) > 1 else ""
        return f"{next(iter(self.members.values()))!r} {list(self.shape)}{more}"


class _Misfit(Exception):  # noqa: N818  # never leaves this file: it carries one fault to where it is completed
    """The shapes do not fit."""

    def __init__(self, code: Code, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint


class Fitter:
    """Solves sizes and remembers: the layers of a model have the same shapes, so each rule is solved about once.

    Args:
        sources, targets: the shapes of the two sides, by name.
        sizes: what [sizes] says.
    """

    def __init__(
        self,
        sources: Mapping[str, Shape],
        targets: Mapping[str, Shape],
        sizes: Mapping[str, int],
        fields: Mapping[str, object],
    ) -> None:
        self.sources = sources
        self.targets = targets
        self.sizes = sizes
        self.fields = fields
        self.faults: list[Fault] = []
        self._known: dict[tuple[object, ...], tuple[Move, ...]] = {}
        self._layouts: dict[int, tuple[Operand, list[tuple[str, ...]], Mapping[str, int]]] = {}
        self._deduced: dict[str, tuple[int, str]] = {}

    def fit(
        self,
        rule: Rule,
        left: Sequence[Members],
        right: Sequence[Members],
        counts: Mapping[str, int],
        outer: Mapping[str, Value],
    ) -> tuple[Move, ...] | None:
        """The moves, or None when the shapes do not fit: ``faults`` then says why."""
        try:
            known = sizes_under(self.sizes, outer, rule.inner)
        except NotationError as error:
            message = f"[sizes]: {error}, in '{rule}'"
            self.faults.append(Fault(code=error.code, where=rule.where, message=message, hint=error.hint))
            return None
        theirs = [[self.sources[name] for name in members.values()] for members in left]
        ours = [[self.targets[name] for name in members.values()] for members in right]
        key = (id(rule), *map(tuple, theirs), *map(tuple, ours), *counts.items(), *sorted(known.items()))
        if key in self._known:
            return self._known[key]
        sources = [_Side(*one) for one in zip(rule.sources, left, theirs, strict=True)]
        targets = [_Side(*one) for one in zip(rule.targets, right, ours, strict=True)]
        try:
            sizes = self._solve(rule, [*sources, *targets], counts, known)
        except _Misfit as misfit:
            tensors = f"{', '.join(map(str, sources))} -> {', '.join(map(str, targets))}"
            message = f"{tensors}: {misfit}, in '{rule}'"
            hint = misfit.hint or self._contradicted(rule, sources, targets)
            self.faults.append(Fault(code=misfit.code, where=rule.where, message=message, hint=hint))
            return None
        parts = [pieces(side.axes, side.shape, sizes) for side in (*sources, *targets)]
        if rule.formula is None:
            self._known[key] = tuple(_moves(rule, parts, sizes, counts))
        else:
            if reason := rule.formula.unfit_blocks(sizes):
                message = f"{reason}, in '{rule}'"
                self.faults.append(Fault(code=Code.SHAPE_MISMATCH, where=rule.where, message=message))
                return None
            result = _result(parts[-1][0], sizes)
            found = [
                _operand(rule, number, next(one for one in part if not one.dropped), sizes, counts, result.indices)
                for number, part in enumerate(parts[:-1])
            ]
            self._known[key] = tuple(move for moves, _ in found for move in moves)
            self._layouts[id(self._known[key])] = (result, [indices for _, indices in found], sizes)
        return self._known[key]

    def layout(self, rule: Rule, moves: tuple[Move, ...], copies: Sequence[Copy], target: str) -> Layout:
        """The buffers of a rule's formula."""
        result, operand_indices, sizes = self._layouts[id(moves)]
        operands = []
        for number, indices in enumerate(operand_indices):
            mine = tuple(copy for move, copy in zip(moves, copies, strict=True) if move.source_term == number)
            extents = tuple(sizes[index] for index in indices)
            operands.append(Operand(rule.operands[number], indices, extents, mine))
        (copy,) = result.copies
        named = replace(copy, source=target, target=target)
        given = dict(zip(rule.operands, operand_indices, strict=True))
        _charge_formula(rule, rule.formula, given, result.indices, sizes, whole=not copy.inverse.contiguous)
        for name, back in rule.back.items():
            _charge_formula(rule, back, {RESULT: result.indices}, given[name], sizes, whole=False)
        return Layout(operands=tuple(operands), result=replace(result, copies=(named,)), sizes=sizes)

    def _solve(
        self, rule: Rule, sides: list[_Side], counts: Mapping[str, int], known: Mapping[str, int]
    ) -> dict[str, int]:
        for side in sides:
            for name, shape in zip(side.members.values(), side.shapes, strict=True):
                if shape != side.shape:
                    raise _Misfit(Code.SHAPE_MISMATCH, f"{name!r} has another shape, {list(shape)}")
            if side.term.axes is None and len(side.shape) != len(sides[0].shape):
                raise _Misfit(Code.SHAPE_MISMATCH, "the tensors have different numbers of axes")
            if len(side.axes) != len(side.shape):
                message = f"'{side.term}' has {len(side.axes)} axes, and the tensor {len(side.shape)}"
                raise _Misfit(Code.SHAPE_MISMATCH, message)
        every = {index for side in sides for index in (*leaves(side.axes), *row_indices(side.axes))}
        inner = {sized(index) for index in every}
        sizes = {index: size for index, size in known.items() if index in inner or index in counts}
        _add_sizes(sizes, rule.fixed_sizes, "formula")
        _add_sizes(sizes, counts, "names")
        try:
            solve_all([pair for side in sides for pair in zip(side.axes, side.shape, strict=True)], sizes)
        except Mismatch as error:
            raise _Misfit(Code.SIZE_CONFLICT if rule.deduced else Code.SHAPE_MISMATCH, str(error)) from error
        unknown = sorted(index for index in inner if size_of(Index(index), sizes) is None)
        if unknown:
            message = f"the size of {', '.join(unknown)} follows from no shape"
            raise _Misfit(Code.SIZE_UNKNOWN, message, sized_by(unknown))
        for index in sorted(rule.deduced - known.keys()):
            before, where = self._deduced.setdefault(index, (sizes[index], rule.where))
            if before != sizes[index]:
                message = f"{index} comes out as {sizes[index]} here and as {before} at {where}"
                hint = (
                    "a part of an axis has one size in the whole table: use another index, or give the sizes in [sizes]"
                )
                raise _Misfit(Code.SIZE_CONFLICT, message, hint)
        return sizes | {index: sizes[sized(index)] for index in every if index.endswith("'")}

    def _contradicted(self, rule: Rule, sources: list[_Side], targets: list[_Side]) -> str:
        """Name the entries of [sizes] and of the config that give sizes which only the module has."""
        theirs = {extent for side in sources for extent in side.shape}
        ours = {extent for side in targets for extent in side.shape}
        indices = {sized(index) for side in (*sources, *targets) for index in leaves(side.axes)}
        said = [f"[sizes] gives {index} = {size}" for index, size in self.sizes.items() if index in indices]
        fields = [
            f"config.json has {field} = {value}"
            for field, value in self.fields.items()
            if isinstance(value, int) and not isinstance(value, bool) and value in ours - theirs
        ]
        return "; ".join([*said, *fields])


def _add_sizes(sizes: dict[str, int], more: Mapping[str, int], place: str) -> None:
    """Add the sizes of indices that another place says."""
    for index, size in more.items():
        if sizes.setdefault(index, size) != size:
            raise _Misfit(Code.SIZE_CONFLICT, f"{index} is {sizes[index]} in [sizes] and {size} in the {place}")


def sized_by(unknown: Sequence[str]) -> str:
    """How a table says the size of indices that no shape shows."""
    equal = f", or, where {unknown[1]} has the size of {unknown[0]}, write it {unknown[0]}'" if unknown[1:] else ""
    return f'give it in [sizes]: {unknown[0]} = "..."{equal}'


def axes_of(term: Term, rank: int) -> tuple[Axis, ...]:
    """The term's axes; a term that names none has one plain index per axis."""
    return tuple(Index(f"axis{number}") for number in range(rank)) if term.axes is None else term.axes


def _moves(rule: Rule, parts: list[list[Piece]], sizes: Mapping[str, int], counts: Mapping[str, int]) -> list[Move]:
    """Every pair of pieces, for every value of the indices that one side's names carry and the other's axes."""
    moves = []
    for pair in rule.pairs:
        source, target = rule.sources[pair.source], rule.targets[pair.target]
        theirs = parts[pair.source][pair.source_piece]
        ours = parts[len(rule.sources) + pair.target][pair.target_piece]
        fixed = [index for index in counts if index in source.name.indices or index in target.name.indices]
        box = {index: sizes[index] for index in ours.strides if index not in fixed}
        for values in combinations([range(counts[index]) for index in fixed], where=rule.where):
            at = dict(zip(fixed, values, strict=True))
            copy = make_copy("", "", box, (_offset(theirs, at), theirs.strides), (_offset(ours, at), ours.strides))
            source_key = tuple(at[index] for index in source.name.indices if index in at)
            target_key = tuple(at[index] for index in target.name.indices if index in at)
            moves.append(Move(pair.source, source_key, pair.target, target_key, copy))
    return moves


def _result(piece: Piece, sizes: Mapping[str, int]) -> Operand:
    """The target of a formula as a buffer: its indices in the order in which they lie in the tensor."""
    indices = tuple(sorted(piece.strides, key=lambda index: -piece.strides[index]))
    extents = tuple(sizes[index] for index in indices)
    steps = dict(zip(indices, row_major(extents), strict=True))
    copy = make_copy("", "", {index: sizes[index] for index in indices}, (piece.offset, piece.strides), (0, steps))
    return Operand("", indices, extents, (copy,))


def _operand(
    rule: Rule,
    number: int,
    piece: Piece,
    sizes: Mapping[str, int],
    counts: Mapping[str, int],
    result: Sequence[str],
) -> tuple[list[Move], tuple[str, ...]]:
    """The moves that fill the buffer of a formula's source, and the buffer's indices: those of the target go first."""
    inner = [index for index in rule.sources[number].name.indices if index in counts]
    every = [*inner, *piece.strides]
    indices = (*(index for index in result if index in every), *(index for index in every if index not in result))
    steps = dict(zip(indices, row_major([sizes[index] for index in indices]), strict=True))
    moves = []
    for values in combinations([range(counts[index]) for index in inner], where=rule.where):
        at = dict(zip(inner, values, strict=True))
        box = {index: sizes[index] for index in piece.strides}
        begin = sum(steps[index] * value for index, value in at.items())
        copy = make_copy("", "", box, (piece.offset, piece.strides), (begin, steps))
        moves.append(Move(number, tuple(values), 0, (), copy))
    return moves, indices


def _offset(piece: Piece, at: Mapping[str, int]) -> int:
    return piece.offset + sum(piece.strides.get(index, 0) * value for index, value in at.items())


REPEATED = 512
"""Elements that a formula may compute for each element that it reads; the ranks of adapters are smaller."""

HELD = 8
"""Elements that a formula may hold at a time for each element that it reads."""


def _charge_formula(
    rule: Rule,
    formula: Formula | None,
    operands: Mapping[str, Sequence[str]],
    result: Sequence[str],
    sizes: Mapping[str, int],
    *,
    whole: bool,
) -> None:
    """Charge what a formula makes far beyond what it reads: all values together, those of a row, and the result."""
    if formula is None:
        return
    read = sum(math.prod(sizes[index] for index in indices) for indices in operands.values())
    in_rows = (
        not whole and bool(result) and formula.kept(result[0]) and any(result[0] in one for one in operands.values())
    )
    row = formula.work(operands, {**sizes, result[0]: 1} if in_rows else sizes)
    made = math.prod(sizes[index] for index in result)
    beyond = max(formula.work(operands, sizes) - REPEATED * read, row - HELD * read, made - REPEATED * read, 0)
    charge("made", 8 * beyond, where=rule.where)
