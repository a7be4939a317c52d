"""Other layouts of a table's tensors: the lines that would have to stand there for the port to read what it is given.

A line that lays a tensor out in another way than the module reads it still fits all shapes. Each line that writes a
guilty module's weights is written in the usual other ways; what the module computes with them decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import combinations, permutations

from torch import Tensor

from porting.notation.axes import Index, Product
from porting.notation.faults import NotationError
from porting.notation.name import Enumerated
from porting.notation.rule import Rule, Term, make_rule
from porting.plan.align import align
from porting.plan.move import forward
from porting.plan.plan import Plan

LAYOUT, EXCHANGED = "layout in the table", "tensors exchanged in the table"

WHAT: Mapping[str, str] = {
    LAYOUT: "a line of the table lays a tensor out in another order than the module reads it; the shapes fit",
    EXCHANGED: "the table gives a tensor of the module the values that another one of the same shape should have",
}

MAX_FACTORS = 4
"""Largest number of factors of an axis whose orders are all tried."""

Line = tuple[Rule, tuple[Rule, ...]]
"""A line of a table, and those that should stand there."""

PARTS = (2, 3)
"""The usual numbers of tensors in a fused projection."""


@dataclass(frozen=True)
class Edit:
    """One change that can be made to lines of a table, such as to those of a weight and of its bias.

    Attributes:
        side: the side of the rule that is changed: ``"source"``, ``"target"``, or ``"both"``, which get axes.
        before, after: the axes, or spellings of an index, in their order; of ``"both"``, the axes of the two sides, of
            which a matrix has another one where they are one.
        sizes: sizes of the indices that the edit brings in.
    """

    side: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...] = ()

    def apply(self, rule: Rule, axes: int) -> Rule | None:
        """Return the changed rule, whose target has so many axes; None where the rule has nothing to change."""
        source, target = str(rule.sources[0]), str(rule.targets[0])
        if self.side == "both":
            if rule.targets[0].axes is not None or not len(self.before) <= axes <= 2:
                return None
            rest = [_unused(rule)[-1]] if axes > len(self.before) else []
            source, target = (
                f"{text} [{' '.join([*own, *rest])}]" for text, own in ((source, self.before), (target, self.after))
            )
        else:
            text = source if self.side == "source" else target
            changed = text.replace(_spelled(self.before), _spelled(self.after))
            if changed == text:
                return None
            source, target = (changed, target) if self.side == "source" else (source, changed)
        try:
            return make_rule([Term.parse(source)], [Term.parse(target)], where=rule.where, optional=rule.optional)
        except NotationError:
            return None


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Lines of a table, and what should stand there.

    Attributes:
        lines: the rules of the table, each with the one in its place.
        values: what the corrected rules write, by name.
        sizes: sizes of indices that ``[sizes]`` would have to give.
    """

    name: str
    lines: tuple[Line, ...]
    values: Mapping[str, Tensor] = field(repr=False)
    sizes: Mapping[str, int]

    @property
    def detail(self) -> str:
        """What the table says of the first tensor and what it should say."""
        rule, (corrected, *_) = self.lines[0]
        if self.name == EXCHANGED:
            return f"{rule.targets[0].name} should have {corrected.sources[0].name}"
        if rule.targets[0].axes is None:
            source, target = (_axes(one) for one in (corrected.sources[0], corrected.targets[0]))
            return f"{corrected.targets[0].name} is given {source} and read as {target}"
        side = int(str(rule.sources[0]) == str(corrected.sources[0]))
        first, second = ((one.sources[0], one.targets[0])[side] for one in (rule, corrected))
        if _axes(first) != _axes(second):
            return f"{first.name}: {_axes(first)} should be {_axes(second)}"
        parts = zip(first.name.parts, second.name.parts, strict=True)
        return "; ".join(f"{before} should be {after}" for before, after in parts if before != after)

    @property
    def explicit(self) -> bool:
        """Whether the lines say themselves how the tensors are laid out, so that the mistake is theirs."""
        return self.name == EXCHANGED or all(rule.targets[0].axes is not None for rule, _ in self.lines)

    @property
    def fix(self) -> str:
        """Each line of the table and its replacement."""
        texts = [
            f"{rule.where}: replace {_line(rule)} by {' and '.join(map(_line, corrected))}"
            for rule, corrected in self.lines
        ]
        sizes = ", ".join(f"{index} = {size}" for index, size in self.sizes.items())
        return "; ".join([*texts, *([f"with {sizes} in [sizes]"] if sizes else [])])


def corrections(plan: Plan, read: Callable[[str], Tensor], where: Sequence[str]) -> Iterator[Correction]:
    """Yield other lines for those that write some modules' weights, the likeliest first.

    Args:
        where: the places of the lines in the table, ``bert.toml:12:3``.
    """
    rules = [rule for rule in dict.fromkeys(step.rule for step in plan.steps) if rule.where in where]
    groups: dict[str, list[Rule]] = {}
    for rule in filter(_moves_only, rules):
        groups.setdefault(str(rule.targets[0].name).rpartition(".")[0], []).append(rule)
    tried: set[object] = set()

    def corrected(name: str, lines: Sequence[Line], sizes: Sequence[tuple[str, int]] = ()) -> Iterator[Correction]:
        key = tuple(sorted(str(rule) for _, written in lines for rule in written)), tuple(sizes)
        values = _values(plan, read, lines, dict(sizes)) if lines and key not in tried else {}
        tried.add(key)
        if values:
            yield Correction(name=name, lines=tuple(lines), values=values, sizes=dict(sizes))

    matrices = [
        group for group in groups.values() if any(axes > 1 for rule in group for _, axes in _by_shape(rule, plan))
    ]
    for edit in {edit: None for group in matrices for rule in group for edit in _edits(rule, plan)}:
        changed = ([line for rule in group if (line := _changed(rule, edit, plan))] for group in matrices)
        parts = [lines for lines in changed if lines]
        together = [line for lines in parts for line in lines]
        for lines in (*parts, *([*one, *other] for one, other in combinations(parts, 2)), together):
            yield from corrected(LAYOUT, lines, edit.sizes)
    for rule in (rule for group in groups.values() for rule in group):
        for exchanged in _renamed(rule):
            yield from corrected(EXCHANGED, [(rule, (exchanged,))])
    for first, second in combinations(groups.values(), 2):
        yield from corrected(EXCHANGED, _exchanged(first, second))


def _moves_only(rule: Rule) -> bool:
    """Return whether a rule only moves elements, from one term to one term."""
    return len(rule.sources) == len(rule.targets) == 1 and not rule.operations and not rule.rest and rule.fill is None


def _changed(rule: Rule, edit: Edit, plan: Plan) -> Line | None:
    """Return a line with one of its tensors' layouts changed; a line of several shapes becomes one for each."""
    written, any_changed = [], False
    for part, axes in _by_shape(rule, plan):
        changed = edit.apply(part, axes)
        any_changed = any_changed or changed is not None
        written.append(changed or part)
    return (rule, tuple(written)) if any_changed else None


def _by_shape(rule: Rule, plan: Plan) -> list[tuple[Rule, int]]:
    """Return a rule with the number of its target's axes; for tensors of several shapes, one for each spelling."""
    steps = [step for step in plan.steps if step.rule == rule]
    axes = {name: len(plan.targets[name].shape) for step in steps for name in step.targets}
    if len({*axes.values()}) == 1:
        return [(rule, next(iter(axes.values())))]
    source, target = rule.sources[0], rule.targets[0]
    for index in source.name.enumerations.keys() & target.name.enumerations.keys():
        theirs, ours = _spellings(source, index), _spellings(target, index)
        split = []
        for one, other in zip(theirs, ours, strict=True):
            mine, name = one.partition("/")[0], other.partition("/")[0]
            terms = (
                Term.parse(str(source).replace(_enumeration(index, theirs), mine)),
                Term.parse(str(target).replace(_enumeration(index, ours), name)),
            )
            extents = {count for target_name, count in axes.items() if name in re.split(r"[._]", target_name)}
            if len(extents) == 1:
                split.append((make_rule(terms[:1], terms[1:], where=rule.where), next(iter(extents))))
        if len(split) == len(ours):
            return split
    return []


def _edits(rule: Rule, plan: Plan) -> Iterator[Edit]:
    """Yield the changes of one rule's layout."""
    for side, term in (("source", rule.sources[0]), ("target", rule.targets[0])):
        for axis in term.axes or ():
            if isinstance(axis, Product) and 1 < len(axis.factors) <= MAX_FACTORS:
                factors = tuple(map(str, axis.factors))
                for order in permutations(factors):
                    if order != factors:
                        yield Edit(side, ("(", *factors, ")"), ("(", *order, ")"))
        for part in term.name.parts:
            if isinstance(part, Enumerated) and part.index not in rule.outer:
                spellings = _spellings(term, part.index)
                for order in permutations(spellings) if len(spellings) <= MAX_FACTORS else ():
                    if order != spellings:
                        yield Edit(side, (_enumeration(part.index, spellings),), (_enumeration(part.index, order),))
    axes = rule.targets[0].axes
    if axes is not None and len(axes) == 2 and all(isinstance(axis, Index) for axis in axes):
        names = tuple(map(str, axes))
        yield Edit("target", ("[", *names, "]"), ("[", *reversed(names), "]"))
    if axes is None:
        yield from _splits(rule, plan)


def _splits(rule: Rule, plan: Plan) -> Iterator[Edit]:
    """Yield the changes of a rule that takes a tensor as it is."""
    p, h, d, rest, other = _unused(rule)
    yield Edit("both", (rest, other), (other, rest))
    heads = _heads(plan.config)
    forms: list[tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[str, int], ...]]] = []
    for parts in PARTS:
        forms.append(((p, d), (d, p), ((p, parts),)))
        for count in heads:
            both = ((p, parts), (h, count))
            forms.append(((h, p, d), (p, h, d), both))
            forms += [((h, d, p), (h, p, d), both)] if parts == PARTS[0] else []
    forms += [((h, d), (d, h), ((h, count),)) for count in heads]
    for first, second, sizes in forms:
        for before, after in ((first, second), (second, first)):
            yield Edit("both", (f"({' '.join(before)})",), (f"({' '.join(after)})",), sizes)


def _heads(config: Mapping[str, object]) -> list[int]:
    """Return the numbers of heads that a config has."""
    counts = (value for key, value in config.items() if "head" in key and not re.search("dim|size|width", key))
    return list(dict.fromkeys(count for count in counts if isinstance(count, int) and count > 1))


def _unused(rule: Rule) -> list[str]:
    """Return letters for five indices that a rule does not have."""
    used = {index for term in (*rule.sources, *rule.targets) for index in term.indices}
    letters = [letter for letter in "phdeoabcxyz" if letter not in used]
    return [next(letter for letter in (wanted, *"abcxyz") if letter in letters) for wanted in "phdeo"]


def _renamed(rule: Rule) -> Iterator[Rule]:
    """Yield the rule with other names in place of those that it enumerates on both sides, if these fit no worse."""
    source, target = rule.sources[0], rule.targets[0]
    for index in source.name.enumerations.keys() & target.name.enumerations.keys():
        ours, theirs = _spellings(target, index), _spellings(source, index)
        for first, second in combinations(range(len(ours)), 2):
            order = list(theirs)
            order[first], order[second] = order[second], order[first]
            if sum(map(_alike, order, ours)) >= sum(map(_alike, theirs, ours)):
                names = str(source).replace(_enumeration(index, theirs), _enumeration(index, order))
                yield make_rule([Term.parse(names)], rule.targets, where=rule.where)


def _exchanged(first: Sequence[Rule], second: Sequence[Rule]) -> list[Line]:
    """Return the rules of two modules with their sources exchanged, where the names fit no worse."""
    pairs = [
        (one, two)
        for one in first
        for two in second
        if str(one.targets[0]).rpartition(".")[2] == str(two.targets[0]).rpartition(".")[2]
    ]
    lines: list[Line] = []
    for one, two in pairs:
        names = [str(rule.sources[0].name) for rule in (one, two)], [str(rule.targets[0].name) for rule in (one, two)]
        if sum(map(_alike, reversed(names[0]), names[1])) < sum(map(_alike, *names)):
            return []
        for rule, other in ((one, two), (two, one)):
            try:
                lines.append((rule, (make_rule(other.sources, rule.targets, where=rule.where),)))
            except NotationError:
                return []
    return lines


def _alike(first: str, second: str) -> float:
    return SequenceMatcher(None, first, second).ratio()


def _values(
    plan: Plan, read: Callable[[str], Tensor], lines: Sequence[Line], sizes: Mapping[str, int]
) -> dict[str, Tensor]:
    """Return what changed rules write; empty where they do not fit, or write nothing else than before."""
    steps = [step for step in plan.steps if any(step.rule == rule for rule, _ in lines)]
    written = {name for step in steps for name in step.targets}
    known = {index: int(size.evaluate(plan.config)) for index, size in plan.table.sizes.items()}
    alignment = align(
        [rule for _, corrected in lines for rule in corrected],
        {name: tuple(plan.sources[name].shape) for step in steps for name in step.sources},
        {name: tuple(plan.targets[name].shape) for name in written},
        sizes={**known, **sizes},
        fields=plan.config,
        prefix=plan.table.prefix,
        target_prefix=plan.table.target_prefix,
    )
    if alignment.faults or alignment.gaps or {name for step in alignment.steps for name in step.targets} != written:
        return {}
    return {name: value for step in alignment.steps for name, value in forward(step, plan.targets, read)}


def _spelled(parts: Sequence[str]) -> str:
    """Return axes or an enumeration as a table has them."""
    return re.sub(r"(?<=[(\[]) | (?=[)\]])", "", " ".join(parts))


def _spellings(term: Term, index: str) -> tuple[str, ...]:
    """Return the spellings of an enumerated index, in order."""
    part = next(part for part in term.name.parts if isinstance(part, Enumerated) and part.index == index)
    return tuple(str(part).strip("{}").partition(":")[2].split(","))


def _enumeration(index: str, spellings: Sequence[str]) -> str:
    return f"{{{index}:{','.join(spellings)}}}"


def _axes(term: Term) -> str:
    """Return the axes of a term as the table has them."""
    return f"[{' '.join(map(str, term.axes or ()))}]"


def _line(rule: Rule) -> str:
    return f'"{rule.sources[0]}" = "{rule.targets[0]}"'
