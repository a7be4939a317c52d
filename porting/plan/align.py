"""Applying rules to two sets of names and shapes: what moves where, and everything that does not fit.

This is the heart of the library and knows nothing of files or modules: checkpoints, gradients, inputs and activations
all come here as names and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from porting.errors import Fault
from porting.notation.name import Bindings
from porting.notation.rule import Rule, Term
from porting.notation.table import Table
from porting.plan.copies import Copy
from porting.plan.fitting import Fitter
from porting.plan.formulas import Layout
from porting.plan.members import Astray, Key, Members, Side, count_members, gaps, members_under, outer_keys, sort_names

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One rule applied under one value of its outer indices.

    Attributes:
        sources, targets: the tensors it reads and writes.
        copies: the moves; for a rule with a formula, from sources into the buffers that it is computed in.
        layout: for a rule with a formula, those buffers.
    """

    rule: Rule
    bindings: Bindings
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    copies: tuple[Copy, ...]
    layout: Layout | None = None


@dataclass(frozen=True, kw_only=True)
class Lone:
    """Names that a rule matched on one side and whose counterparts the other side does not have.

    Attributes:
        bindings: the values of its outer indices, under which it was applied.
    """

    rule: Rule
    bindings: Bindings
    names: tuple[str, ...]
    expected: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """The effect of a set of rules on names and shapes.

    Attributes:
        unread, unwritten: source and target names that no rule matches.
        unplaced: source names whose targets do not exist.
        unsourced: target names whose sources do not exist.
        idle: rules that match nothing on either side.
        gaps: numbers that the source's names leave out.
        absent: members that a rule misses on each side beside others that are there, each with the rule's place.
    """

    steps: tuple[Step, ...]
    unread: tuple[str, ...]
    unwritten: tuple[str, ...]
    unplaced: tuple[Lone, ...]
    unsourced: tuple[Lone, ...]
    idle: tuple[Rule, ...]
    gaps: tuple[Fault, ...]
    faults: tuple[Fault, ...]
    absent: Mapping[Side, Mapping[str, str]]


def align(
    rules: Sequence[Rule],
    sources: Mapping[str, Shape],
    targets: Mapping[str, Shape],
    *,
    sizes: Mapping[str, int] | None = None,
    fields: Mapping[str, object] | None = None,
    prefix: str = "",
    target_prefix: str = "",
) -> Alignment:
    """Find what each rule reads and writes.

    Args:
        fields: config fields, for messages: a shape that does not fit may be one that the config says.
    """
    read = sort_names(rules, sources, "source", prefix)
    written = sort_names(rules, targets, "target", target_prefix)
    faults = [*read.faults, *written.faults]
    astray = Astray(unmatched={"source": read.unmatched, "target": written.unmatched})
    fitter = Fitter(sources, targets, {} if sizes is None else sizes, fields or {})
    steps: list[Step] = []
    unplaced: list[Lone] = []
    unsourced: list[Lone] = []
    idle: list[Rule] = []
    for rule, theirs, ours in zip(rules, read.terms, written.terms, strict=True):
        if not any(theirs) and not any(ours):
            idle.append(rule)
            continue
        used: set[str] = set()
        for key in outer_keys(rule, (*theirs, *ours)):
            left = [members_under(rule, *one, key) for one in zip(rule.sources, theirs, strict=True)]
            right = [members_under(rule, *one, key) for one in zip(rule.targets, ours, strict=True)]
            if not any(right):
                unplaced.append(_lone(rule, left, rule.targets, key))
            elif not any(left):
                unsourced.append(_lone(rule, right, rule.sources, key))
            else:
                step = _step(rule, key, left, right, fitter, astray, faults)
                if step is not None:
                    steps.append(step)
            used.update(name for members in left for name in members.values())
        every = (name for by_key in theirs for members in by_key.values() for name in members.values())
        stray = tuple(name for name in every if name not in used)
        if stray:
            unplaced.append(
                Lone(rule=rule, bindings={}, names=stray, expected=tuple(str(term.key) for term in rule.targets))
            )
    return Alignment(
        steps=tuple(steps),
        unread=tuple(read.unmatched),
        unwritten=tuple(written.unmatched),
        unplaced=tuple(unplaced),
        unsourced=tuple(unsourced),
        idle=tuple(idle),
        gaps=tuple(gaps(rules, read)),
        faults=(*faults, *fitter.faults),
        absent=astray.absent,
    )


class Shaped(Protocol):
    """The interface of tensors and of their descriptions: a shape."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""


def align_table(
    table: Table,
    sources: Mapping[str, Shape | Shaped],
    targets: Mapping[str, Shape | Shaped],
    sizes: Mapping[str, int],
    fields: Mapping[str, object] | None = None,
) -> Alignment:
    """:func:`align` for the rules of a table and its prefixes."""
    theirs, ours = (
        {name: one if isinstance(one, tuple) else tuple(one.shape) for name, one in side.items()}
        for side in (sources, targets)
    )
    prefix, target_prefix = table.prefix, table.target_prefix
    return align(table.rules, theirs, ours, sizes=sizes, fields=fields, prefix=prefix, target_prefix=target_prefix)


def _lone(rule: Rule, members: Sequence[Members], others: Sequence[Term], key: Key) -> Lone:
    bindings = dict(zip(rule.outer, key, strict=True))
    names = tuple(name for one in members for name in one.values())
    return Lone(rule=rule, bindings=bindings, names=names, expected=tuple(term.key.spell(bindings) for term in others))


def _step(
    rule: Rule,
    key: Key,
    left: list[Members],
    right: list[Members],
    fitter: Fitter,
    astray: Astray,
    faults: list[Fault],
) -> Step | None:
    """The rule under one outer key, or None when it does not fit: the faults say why."""
    outer = dict(zip(rule.outer, key, strict=True))
    counts: dict[str, int] = {}
    before = len(faults)
    for term, members in zip(rule.sources, left, strict=True):
        faults.extend(count_members(rule, term, members, outer, "source", counts, astray))
    for term, members in zip(rule.targets, right, strict=True):
        faults.extend(count_members(rule, term, members, outer, "target", counts, astray))
    moves = fitter.fit(rule, left, right, counts, outer) if len(faults) == before else None
    if moves is None:
        return None
    copies = tuple(
        replace(
            move.box,
            source=left[move.source_term][move.source_key],
            target=right[move.target_term][move.target_key],
        )
        for move in moves
    )
    target = tuple(name for members in right for name in members.values())
    layout = None if rule.formula is None else fitter.layout(rule, moves, copies, target[0])
    return Step(
        rule=rule,
        bindings=outer,
        sources=tuple(dict.fromkeys(name for members in left for name in members.values())),
        targets=target,
        copies=copies,
        layout=layout,
    )
