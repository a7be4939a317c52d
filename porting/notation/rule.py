"""Rules: terms on two sides that share their indices.

A rule is checked as far as it can be without any tensor: every index stands on both sides, once on each.  What a rule
pairs, the k-th piece of that source with the j-th piece of that target, is settled here too, and is all that the plan
needs; read from right to left it is the inverse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from porting.errors import Code
from porting.notation.axes import Axis, Index, Row, leaves, parse_axes, pieces, row_indices, sized, whole
from porting.notation.expression import Expression, Number
from porting.notation.faults import NotationError
from porting.notation.name import Decimal, Name, Output
from porting.ops import CONSTANTS, Arithmetic, Constant, Formula, FormulaError, Operation, Sum

RESULT = "y"
"""The name of the target in ``back``, the formulas that undo a formula."""

REST = "..."
"""Stands for all the axes of a term that names none."""


MASK_KINDS = ("bool", "padding", "additive")
"""How [inputs] can hand a mask on, ``mask -> bool``; :func:`porting.trials.inputs.for_port` makes them."""


@dataclass(frozen=True)
class Term:
    """One side's name and axes, ``layers.{i}.attention -> 1 [b h q k]``.

    Attributes:
        name: the name pattern; for an activation, of the module.
        output: for an activation, which output of the module (``-> 1``); empty for the only one.
        axes: the axes, or None when the tensor is taken as it is.
    """

    name: Name
    output: str = ""
    axes: tuple[Axis, ...] | None = None

    @classmethod
    def parse(cls, text: str, *, rows: bool = False, named: bool = False) -> Term:
        """Parse ``text``; ``rows`` and ``named`` as in :func:`porting.notation.axes.parse_axes`."""
        lead = len(text) - len(text.lstrip())
        head, bracket, inside = text.partition("[")
        axes = None
        if bracket:
            if not inside.rstrip().endswith("]"):
                raise NotationError(Code.BAD_AXES, "a bracket is not closed", len(head))
            axes = parse_axes(inside.rstrip()[:-1], len(head) + 1, rows=rows, named=named)
        name, arrow, output = head.partition("->")
        if arrow and not output.strip():
            raise NotationError(Code.BAD_NAME, "nothing follows '->'", len(name))
        try:
            term = cls(Name.parse(name.strip()), output.strip(), axes)
        except NotationError as error:
            error.offset = None if error.offset is None else error.offset + lead
            raise
        if axes is not None:
            _keep_law(term, len(head))
        return term

    @property
    def key(self) -> Name:
        """The name under which a tensor or an activation of this term is listed: the output is a part of it."""
        return Name((*self.name.parts, Output(f" -> {self.output}"))) if self.output else self.name

    @property
    def indices(self) -> set[str]:
        """Every index of the term, those without a counterpart left out."""
        inner = {REST} if self.axes is None else {one for one in leaves(self.axes) if not one.startswith("_")}
        return {*self.name.indices, *inner}

    def bounded(self, bounds: Mapping[str, tuple[int, int]]) -> Term:
        """The term with these bounds of its name's indices."""
        parts = (
            part.bounded(*bounds[part.index]) if isinstance(part, Decimal) and part.index in bounds else part
            for part in self.name.parts
        )
        return replace(self, name=Name(tuple(parts)))

    def keys(self) -> list[frozenset[str] | None]:
        """For each piece, the indices it ranges over; None for one without a counterpart."""
        if self.axes is None:
            return [frozenset(self.indices)]
        ones = {sized(name): 1 for name in leaves(self.axes)}
        return [
            None if piece.dropped else frozenset({*self.name.indices, *piece.strides})
            for piece in pieces(self.axes, (1,) * len(self.axes), ones)
        ]

    def __str__(self) -> str:
        output = f" -> {self.output}" if self.output else ""
        axes = "" if self.axes is None else f" [{' '.join(map(str, self.axes))}]"
        return f"{self.name}{output}{axes}"


def _keep_law(term: Term, offset: int) -> None:
    for index in term.name.indices:
        if term.axes is not None and index in leaves(term.axes):
            raise NotationError(Code.INDEX_TWICE, f"index {index!r} stands in the name and among the axes", offset)
    if term.name.rest is not None:
        raise NotationError(Code.BAD_AXES, f"{{*{term.name.rest}}} takes tensors as they are: no axes", offset)


@dataclass(frozen=True)
class Pair:
    """A piece of a source and the piece of a target that it fills: term and piece numbers on each side."""

    source: int
    source_piece: int
    target: int
    target_piece: int


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Sources and targets that share their indices.

    Attributes:
        pairs: which piece fills which; derived.
        constants: what is computed with a constant, in the order in which that is done, and the constants.
        fold: the target is the sum of the sources; the inverse gives it to the first, zeros to the others.
        fill: the value of elements that have no counterpart on the other side; None when they cannot be made up.
        optional: the rule may match nothing on either side.
        formula: how the target is computed of the sources; None when elements are moved.
        operands: what the formula calls the sources.
        undone: a formula over the target for each of them, by which it is undone; empty when it cannot be.
        dtype: the dtype of the target, where the first source is quantised; empty for that of the first source.
        rest: it reads and writes what no other rule does, as a line of [rest].
        again: its sources are read by the rule in front of it as well: the two come from one line with several targets.
        besides: of such a rule, the names that it neither reads (first) nor writes (second): other sections list them.
        by_row: a line of [inputs] into a module without an axis for the batch, which is called once for each row.  The
            targets have that axis here.
        turned: its sides were exchanged, to see what it makes of the checkpoint; messages show it as the table has it.
        where: its place in the table, ``bert.toml:12:3``.
    """

    sources: tuple[Term, ...]
    targets: tuple[Term, ...]
    pairs: tuple[Pair, ...]
    constants: tuple[tuple[type[Constant], Expression], ...] = ()
    fold: bool = False
    fill: float | None = None
    optional: bool = False
    formula: Formula | None = None
    operands: tuple[str, ...] = ()
    undone: tuple[tuple[str, Formula], ...] = ()
    dtype: str = ""
    rest: bool = False
    besides: tuple[tuple[Name, ...], tuple[Name, ...]] = ((), ())
    again: bool = False
    by_row: bool = False
    turned: bool = False
    where: str = ""

    @property
    def operations(self) -> tuple[type[Operation], ...]:
        """The operations, in the order in which they are applied; empty where elements are only moved."""
        computed: tuple[type[Operation], ...] = () if self.formula is None else (Formula,)
        return (*computed, *([Sum] if self.fold else []), *(kind for kind, _ in self.constants))

    @property
    def exact(self) -> bool:
        """Whether the rule can be undone to the bit."""
        return all(kind.exact for kind in self.operations)

    def arithmetic(self, values: Mapping[str, object]) -> Arithmetic:
        """The operations with their constants, evaluated over the config."""
        if self.formula is not None:
            return Arithmetic((self.formula,), numbers=self.numbers(values), where=self.where)
        constants = (kind(_exact(expression.evaluate(values))) for kind, expression in self.constants)
        return Arithmetic((*([Sum()] if self.fold else []), *constants), where=self.where)

    @cached_property
    def back(self) -> Mapping[str, Formula]:
        """The formulas by which it is undone, by the operands that they give."""
        return dict(self.undone)

    def numbers(self, values: Mapping[str, object]) -> dict[str, float]:
        """The fields of the config that its formulas read."""
        every = [one for one in (self.formula, *self.back.values()) if one is not None]
        names = sorted({name for one in every for name in one.names} - {*self.operands, RESULT})
        return {name: _exact(Expression.parse(name).evaluate(values)) for name in names}

    @property
    def fixed_sizes(self) -> dict[str, int]:
        """The sizes that its formula gives indices."""
        return {} if self.formula is None else self.formula.unpacked_sizes

    def indices_of(self, term: Term) -> tuple[str, ...]:
        """The indices that a term has in a formula: those of its axes, and those of its name that are not outer."""
        inner = [REST] if term.axes is None else [one for one in leaves(term.axes) if not one.startswith("_")]
        return (*(index for index in term.name.indices if index not in self.outer), *inner)

    @cached_property
    def outer(self) -> tuple[str, ...]:
        """The indices that every name carries: the rule is applied once for each of their values."""
        needed = self.targets if self.fold else (*self.sources, *self.targets)
        first, *others = (set(term.name.indices) for term in needed)
        shared = first.intersection(*others)
        if self.fold:
            shared &= set(self.sources[0].name.indices)
        return tuple(index for index in self.targets[0].name.indices if index in shared)

    @cached_property
    def inner(self) -> frozenset[str]:
        """The indices that stand among axes, by which their sizes are known."""
        terms = (*self.sources, *self.targets)
        return frozenset(
            sized(index) for term in terms for index in (*leaves(term.axes or ()), *row_indices(term.axes or ()))
        )

    @cached_property
    def deduced(self) -> frozenset[str]:
        """The indices that are only ever a part of an axis, so that no shape shows their size."""
        terms = (*self.sources, *self.targets)
        inner = {sized(index) for term in terms for index in leaves(term.axes or ()) if not index.startswith("_")}
        seen = {index for term in terms for index in (*whole(term.axes or ()), *term.name.indices)}
        return frozenset(inner - seen)

    @cached_property
    def enumerations(self) -> dict[str, int]:
        """The sizes of the enumerated indices."""
        return {
            index: size for term in (*self.sources, *self.targets) for index, size in term.name.enumerations.items()
        }

    def __str__(self) -> str:
        left, right = (self.targets, self.sources) if self.turned else (self.sources, self.targets)
        if self.by_row:
            right = tuple(replace(term, axes=(term.axes or ())[1:]) for term in right)
        return f"{' + '.join(map(str, left))} = {' + '.join(map(str, right))}"


def make_rule(
    sources: Sequence[Term],
    targets: Sequence[Term],
    *,
    constants: Mapping[str, Expression] | None = None,
    fold: bool = False,
    fill: float | None = None,
    optional: bool = False,
    where: str = "",
    formula: Formula | None = None,
    operands: Sequence[str] = (),
    back: Mapping[str, Formula] | None = None,
    dtype: str = "",
) -> Rule:
    """A rule from its terms, held to the law that every index stands on both sides.

    Args:
        constants: the expressions of the operations with a constant, by their keys.
        back: the formulas by which it is undone, by the operands that they give.
    """
    sources, targets = _same_bounds(sources, targets)
    _same_kinds([*sources, *targets])
    described = {term.axes is None for term in (*sources, *targets)}
    if len(described) > 1:
        terms = [*sources, *targets]
        having, lacking = (next(one for one in terms if (one.axes is None) == none) for none in (False, True))
        raise NotationError(
            Code.AXES_ONE_SIDE, f"'{having}' has axes, and '{lacking}' has none", hint="give all or none"
        )
    if (
        not fold
        and formula is None
        and any(isinstance(axis, Row) for term in (*sources, *targets) for axis in term.axes or ())
    ):
        raise NotationError(Code.BAD_AXES, "a row can be taken in a fold only")
    given = constants or {}
    if formula is not None:
        rule = Rule(
            sources=tuple(sources),
            targets=tuple(targets),
            pairs=(),
            fill=fill,
            optional=optional,
            where=where,
            formula=formula,
            operands=tuple(operands),
            undone=tuple((back or {}).items()),
            dtype=dtype,
        )
        _keep_formula(rule, [*given, *(["fold"] if fold else []), *(["fill"] if fill is not None else [])])
        return rule
    if back or dtype or operands:
        raise NotationError(Code.BAD_EXPRESSION, "back, dtype and named sources belong to a formula, and there is none")
    pairs = _fold(sources, targets) if fold else _pair(sources, targets)
    return Rule(
        sources=tuple(sources),
        targets=tuple(targets),
        pairs=pairs,
        constants=tuple((kind, given[key]) for key, kind in CONSTANTS.items() if key in given),
        fold=fold,
        fill=fill,
        optional=optional,
        where=where,
    )


def make_input_rule(source: Term, target: Term, *, where: str = "") -> Rule:
    """A rule of [inputs]: the first axis may stand in the source alone, as in ``"input_ids [b s]" = "tokens [s]"``.

    >>> rule = make_input_rule(Term.parse("input_ids [b s]"), Term.parse("tokens [s]"))
    >>> rule.by_row, str(rule.targets[0])
    (True, 'tokens [b s]')

    Raises:
        NotationError: as :func:`make_rule`.
    """
    first = source.axes[0] if source.axes and target.axes is not None else None
    by_row = isinstance(first, Index) and first.name not in leaves(target.axes or ())
    if by_row and first is not None:
        target = replace(target, axes=(first, *(target.axes or ())))
    return replace(make_rule([source], [target], where=where), by_row=by_row)


def _keep_formula(rule: Rule, others: Sequence[str]) -> None:
    """Raise NotationError when the operands of a formula, its indices or its ``back`` do not fit."""
    formula = rule.formula
    if formula is None:
        return
    _keep_operands(rule, formula, others)
    target = rule.targets[0]
    operands = {name: rule.indices_of(term) for name, term in zip(rule.operands, rule.sources, strict=True)}
    result = rule.indices_of(target)
    try:
        _require_indices(formula.indices(operands), result, f"formula = {formula.text!r}", str(target), exactly=True)
        for name in rule.operands if rule.back else ():
            if name not in rule.back:
                raise NotationError(Code.BAD_EXPRESSION, f"'back' does not say {name!r}: it gives every source or none")
        for name, undone in rule.back.items():
            _keep_back(rule, name, undone)
            found = undone.indices({RESULT: result})
            _require_indices(found, operands[name], f"back = {undone.text!r}", name, exactly=False)
    except FormulaError as error:
        raise NotationError(Code.BAD_EXPRESSION, str(error)) from error


def _keep_back(rule: Rule, name: str, undone: Formula) -> None:
    if name not in rule.operands:
        raise NotationError(Code.BAD_EXPRESSION, f"'back' gives {name!r}, which is not a source")
    foreign = sorted(undone.names & set(rule.operands))
    if foreign:
        message = f"back = {undone.text!r} reads {foreign[0]!r}; it has the target, {RESULT!r}, alone"
        raise NotationError(Code.BAD_EXPRESSION, message)


def _keep_operands(rule: Rule, formula: Formula, others: Sequence[str]) -> None:
    """Raise NotationError when the terms of a formula are not such as it takes."""
    if others:
        raise NotationError(Code.BAD_EXPRESSION, f"a rule with a formula has no {others[0]!r}: write it in the formula")
    if len(rule.targets) != 1:
        raise NotationError(Code.BAD_EXPRESSION, f"a formula has one target, this one {len(rule.targets)}")
    if RESULT in rule.operands:
        raise NotationError(Code.BAD_EXPRESSION, f"{RESULT!r} is the target of a formula: call the source otherwise")
    idle = sorted(set(rule.operands) - formula.names)
    if idle:
        raise NotationError(Code.BAD_EXPRESSION, f"formula = {formula.text!r} does not use {idle[0]!r}")
    for term in (*rule.sources, *rule.targets):
        kept = [key for key in term.keys() if key is not None]  # noqa: SIM118  # Term.keys is ours
        cut = len(term.keys()) > 1 or any(isinstance(axis, Row) for axis in term.axes or ())
        if len(kept) != 1 or (cut and term in rule.targets):
            raise NotationError(Code.BAD_EXPRESSION, f"'{term}' is in parts, and a formula takes a term as one")
        if cut and rule.back:
            message = f"'{term}' is a part of a tensor, which 'back' cannot make whole"
            raise NotationError(Code.BAD_EXPRESSION, message, hint="leave 'back' out: the rule has no way back")
    target = rule.targets[0]
    alone = sorted(set(target.name.indices) - set(rule.outer))
    if alone:
        message = f"index {alone[0]!r} of '{target}' is not in the name of every source, which a formula needs"
        raise NotationError(Code.INDEX_ONE_SIDE, message)


def _require_indices(found: frozenset[str], wanted: Sequence[str], text: str, named: str, *, exactly: bool) -> None:
    more, less = sorted(found - set(wanted)), sorted(set(wanted) - found)
    if more or (less and exactly):
        which, verb = (more[0], "has") if more else (less[0], "lacks")
        message = f"{text} {verb} the index {which!r}, and '{named}' {'has not' if more else 'has it'}"
        raise NotationError(Code.INDEX_ONE_SIDE, message)


def _same_bounds(sources: Sequence[Term], targets: Sequence[Term]) -> tuple[list[Term], list[Term]]:
    """The terms, a range that one name gives an index given to it in every name."""
    terms = [*sources, *targets]
    bounds: dict[str, tuple[int, int]] = {}
    for term in terms:
        for part in term.name.parts:
            if isinstance(part, Decimal) and part.high is not None:
                mine = (part.low, part.high)
                other = bounds.setdefault(part.index, mine)
                if other != mine:
                    message = f"index {part.index!r} goes from {other[0]} to {other[1]} in one name and from {mine[0]} "
                    raise NotationError(Code.SIZE_CONFLICT, f"{message}to {mine[1]} in another")
    for index, (low, high) in bounds.items():
        if low and not all(index in term.name.indices for term in terms):
            shifted = f"{{{index}+{low}:{low}..{high}}}"
            message = f"index {index!r} begins at {low} in a name, and an axis begins at 0"
            raise NotationError(Code.BAD_NAME, message, hint=f"write {shifted}")
    bounded = [term.bounded(bounds) for term in terms] if bounds else terms
    return bounded[: len(sources)], bounded[len(sources) :]


def _same_kinds(terms: Sequence[Term]) -> None:
    """An index has as many spellings wherever it is enumerated, and is the rest of a name everywhere or nowhere."""
    sizes: dict[str, int] = {}
    rests = {term.name.rest for term in terms} - {None}
    for term in terms:
        for index, size in term.name.enumerations.items():
            if sizes.setdefault(index, size) != size:
                message = f"index {index!r} has {sizes[index]} spellings in one name and {size} in another"
                raise NotationError(Code.SIZE_CONFLICT, message)
        for index in term.indices:
            if index in rests and index != term.name.rest:
                message = f"{{*{index}}} is the rest of a name and {index!r} is something else in '{term}'"
                raise NotationError(Code.INDEX_ONE_SIDE, message)


def _pair(sources: Sequence[Term], targets: Sequence[Term]) -> tuple[Pair, ...]:
    """Pieces that range over the same indices belong together, in order where there are several."""
    waiting: dict[frozenset[str], list[tuple[int, int]]] = {}
    for number, term in enumerate(targets):
        for piece, key in enumerate(term.keys()):
            if key is not None:
                waiting.setdefault(key, []).append((number, piece))
    pairs = []
    for number, term in enumerate(sources):
        for piece, key in enumerate(term.keys()):
            if key is None:
                continue
            if not waiting.get(key):
                raise NotationError(Code.INDEX_ONE_SIDE, _lonely(key, sources, targets, "left", "right"))
            pairs.append(Pair(number, piece, *waiting[key].pop(0)))
    for key, left in waiting.items():
        if left:
            raise NotationError(Code.INDEX_ONE_SIDE, _lonely(key, targets, sources, "right", "left"))
    return tuple(pairs)


def _lonely(key: frozenset[str], here: Sequence[Term], there: Sequence[Term], side: str, other: str) -> str:
    """The reason why a part over the indices ``key`` on one side has no counterpart on the other."""
    mine = {index for term in here for index in term.indices}
    others = {index for term in there for index in term.indices}
    for alone, has, lacks in ((mine - others, side, other), (others - mine, other, side)):
        if alone:
            named = ", ".join(repr(index) for index in sorted(alone))
            return f"index {named} stands on the {has} and not on the {lacks}"
    named = " ".join(sorted(key)) or "1"
    return f"a part over the indices ({named}) on the {side} has no counterpart on the {other}"


def _exact(number: Number) -> Number:
    """A number as a float, where that is the same number or int64 does not have it either."""
    if isinstance(number, int) and abs(number) < 2**63 and float(number) != number:
        return number
    try:
        return float(number)
    except OverflowError as error:
        raise NotationError(Code.BAD_EXPRESSION, "the config has a number that is too large to compute with") from error


def _fold(sources: Sequence[Term], targets: Sequence[Term]) -> tuple[Pair, ...]:
    if len(targets) != 1:
        raise NotationError(Code.BAD_FOLD, f"a fold has one target, this one {len(targets)}")
    kept = [[(piece, key) for piece, key in enumerate(term.keys()) if key is not None] for term in (*sources, *targets)]
    for term, parts in zip((*sources, *targets), kept, strict=True):
        if len(parts) != 1:
            raise NotationError(
                Code.BAD_FOLD, f"a term of a fold has one part with a counterpart, '{term}' {len(parts)}"
            )
    target_piece, whole_key = kept[-1][0]
    pairs = []
    for number, ((piece, key),) in enumerate(kept[:-1]):
        if key - whole_key:
            raise NotationError(Code.INDEX_ONE_SIDE, _lonely(key, sources, targets, "left", "right"))
        if number == 0 and key != whole_key:
            missing = ", ".join(sorted(whole_key - key))
            raise NotationError(Code.BAD_FOLD, f"the first term of a fold carries every index, {missing} is missing")
        pairs.append(Pair(number, piece, 0, target_piece))
    return tuple(pairs)
