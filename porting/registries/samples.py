"""Small random tensors for the rules of a table, on both sides; translations into other notations are tried on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import count, product

import torch
from torch import Tensor

from porting.errors import Code, Fault
from porting.notation.axes import Axis, Concatenation, Product, leaves, size_of, sized
from porting.notation.faults import TableError
from porting.notation.name import Decimal, Enumerated, Literal, Rest, Value
from porting.notation.rule import Rule, Term
from porting.notation.table import Table
from porting.plan.align import align
from porting.plan.config import sizes
from porting.plan.members import sort_names
from porting.plan.move import forward

COUNTED = 3
"""Number of tensors for an index that is part of a name on this side and an axis on the other."""

LAYERS = (0, 1, 10)
"""The values of an index that stands in every name."""

REST = "some.weight"
"""The sample value of ``{*rest}``."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Tensors that a rule reads, and what it makes of them.

    Attributes:
        config: the fields of the config that sizes were computed from.
    """

    rule: Rule
    sources: Mapping[str, Tensor]
    targets: Mapping[str, Tensor]
    config: Mapping[str, object]


def untranslated(rule: object, where: str, into: str, message: str, hint: str = "") -> TableError:
    """The error for a rule that another notation cannot say."""
    said = f"'{rule}' cannot be said as {into}: {message}"
    return TableError(Fault(code=Code.NOT_TRANSLATED, where=where, message=said, hint=hint))


def sample(table: Table, rule: Rule, *, into: str, equal: bool = False) -> Sample:
    """Random tensors for one rule."""
    fields = sorted({name for expression in table.sizes.values() for name in expression.names})
    config = {name: 4 * (number + 1) for number, name in enumerate(fields)}
    known, faults = sizes(table, config)
    faulty = sorted(known.by_layer)
    if faulty:
        raise untranslated(rule, rule.where, into, f"the size of {faulty[0]} differs from layer to layer")
    if faults:
        raise untranslated(rule, rule.where, into, f"its sizes cannot be tried: {faults[0].message}")
    terms = (*rule.sources, *rule.targets)
    extents = dict(known)
    for index in {name for term in terms for name in term.name.indices} - {*rule.outer}:
        extents[index] = rule.enumerations.get(index, COUNTED)
    segments = {one for term in terms for axis in term.axes or () for one in _segments(axis)} if equal else set()
    primes = (number for number in count(5) if all(number % divisor for divisor in range(2, number)))
    for term in terms:
        for index in map(sized, leaves(term.axes or ())):
            if index not in extents:
                extents[index] = 6 if index in segments else next(primes)
    torch.manual_seed(0)
    shapes = [_shapes(rule, side, extents) for side in (rule.sources, rule.targets)]
    values = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes[0].items()}
    aligned = align([rule], shapes[0], shapes[1], sizes=extents)
    wrong = [str(fault) for fault in (*aligned.faults, *aligned.gaps) if fault.code != Code.INDEX_GAP]
    if wrong:
        raise untranslated(rule, rule.where, into, f"it cannot be tried: {wrong[0]}")
    held = {name: torch.empty(shape, dtype=torch.float64, device="meta") for name, shape in shapes[1].items()}
    targets = {name: one for step in aligned.steps for name, one in forward(step, held, values.__getitem__)}
    return Sample(rule=rule, sources=values, targets=targets, config=config)


def _segments(axis: Axis) -> Iterator[str]:
    """The indices that stand in concatenations."""
    match axis:
        case Concatenation(segments=inner):
            yield from map(sized, leaves(inner))
        case Product(factors=inner):
            for one in inner:
                yield from _segments(one)


def _shapes(rule: Rule, terms: Sequence[Term], extents: MutableMapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The names of one side and their shapes."""
    found: dict[str, tuple[int, ...]] = {}
    for term in terms:
        shape = (5,) if term.axes is None else tuple(size_of(axis, extents) or 1 for axis in term.axes)
        for name in spelled(rule, term, extents):
            found[name] = shape
    return found


def spelled(rule: Rule, term: Term, extents: Mapping[str, int]) -> Iterator[str]:
    """The names of one term: for a few values of the indices that all names have, and for all of the others."""
    ranges: list[Sequence[Value]] = []
    for index in term.name.indices:
        if index == term.name.rest:
            ranges.append([REST])
        elif index in rule.enumerations:
            ranges.append(range(rule.enumerations[index]))
        else:
            ranges.append(LAYERS if index in rule.outer else range(extents[index]))
    for values in product(*ranges):
        yield term.name.spell(dict(zip(term.name.indices, values, strict=True)))


def strays(table: Table) -> Iterator[tuple[Rule, str, str]]:
    """Names that a ``{*rest}`` takes, and that begin or end as those of another rule do.

    Another notation that replaces parts of names may take them for names of that rule.

    Returns:
        The rule with ``{*rest}``, the name, and what the table makes of it.
    """
    rests = [rule for rule in table.rules if rule.sources[0].name.rest is not None]
    fronts, ends = dict[str, None](), dict[str, None]()
    for parts in (source for rule in table.rules if rule not in rests for left, _ in unrolled(rule) for source in left):
        if any(isinstance(part, Decimal) for part in parts):
            fronts |= {part.text: None for part in parts[:1] if isinstance(part, Literal)}
            ends |= {part.text: None for part in parts[-1:] if isinstance(part, Literal)}
    heads = [rule.sources[0].name.front for rule in rests]
    names = [f"{front}0.{REST}" for front in fronts]
    names += [f"{head}some.0{end}" for head in heads for end in ends]
    found = sort_names(table.rules, names if rests else [], "source", "")
    for rule, terms in zip(table.rules, found.terms, strict=True):
        taken = [name for members in terms[0].values() for name in members.values()] if rule in rests else []
        for name in taken:
            bindings = rule.sources[0].name.read(name)
            if bindings is not None:
                yield rule, name, rule.targets[0].name.spell(bindings)


Parts = tuple[Literal | Decimal | Rest, ...]
"""A name without enumerated indices."""


def unrolled(rule: Rule) -> Iterator[tuple[list[Parts], list[Parts]]]:
    """The names of both sides with enumerated indices spelled out, once for each value of those that all names have.

    Of older spellings the first is taken: it is the one that is written.
    """
    shared = [index for index in rule.outer if index in rule.enumerations]
    for values in product(*(range(rule.enumerations[index]) for index in shared)):
        chosen = dict(zip(shared, values, strict=True))
        left, right = (
            [one for term in side for one in _names(rule, term, chosen)] for side in (rule.sources, rule.targets)
        )
        yield left, right


def _names(rule: Rule, term: Term, chosen: Mapping[str, int]) -> Iterator[Parts]:
    """The names of a term, those that an enumerated index of its own spells one after the other."""
    own = [index for index in term.name.indices if index in rule.enumerations and index not in chosen]
    for values in product(*(range(rule.enumerations[index]) for index in own)):
        bound = {**chosen, **dict(zip(own, values, strict=True))}
        parts: list[Literal | Decimal | Rest] = []
        for part in term.name.parts:
            plain = Literal(part.spell(bound)) if isinstance(part, Enumerated) else part
            before = parts[-1] if parts else None
            if isinstance(plain, Literal) and isinstance(before, Literal):
                parts[-1] = Literal(before.text + plain.text)
            else:
                parts.append(plain)
        yield tuple(parts)
