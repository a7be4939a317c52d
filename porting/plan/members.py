"""The names of one side, sorted by the rule, the term and the indices that they spell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Literal

from porting.errors import Code, Fault
from porting.notation.name import Decimal, Name, Value
from porting.notation.rule import Rule, Term
from porting.plan.fault_grouping import Nearest
from porting.plan.matching import Match, Matcher

Key = tuple[Value, ...]
Members = dict[Key, str]
"""The tensors of one term under one value of the outer indices, by the values of the term's inner indices."""

Side = Literal["source", "target"]


@dataclass(frozen=True, kw_only=True)
class Astray:
    """Names that do not meet: a misspelling leaves one of each kind.

    Attributes:
        absent: names that a rule misses on each side, each with the rule's place.
    """

    unmatched: Mapping[Side, Sequence[str]]
    absent: Mapping[Side, dict[str, str]] = field(default_factory=lambda: {"source": {}, "target": {}})
    near: Nearest = field(default_factory=Nearest)


MOST_MISSING = 3
"""The most missing members of one term that are named; the rest is counted."""


@dataclass
class Sorted:
    """The names of one side.

    Attributes:
        terms: for each rule and each of its terms on this side, the members by the values of the outer indices.
        faults: names that two rules spell, or two names that one rule takes for the same.
    """

    terms: list[list[dict[Key, Members]]]
    unmatched: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def sort_names(rules: Sequence[Rule], names: Iterable[str], side: Side, prefix: str) -> Sorted:
    """Sort the names of one side; a name that several rules spell is a fault and stays with the first.

    Several formulas may read the same source: its elements are not moved by any of them.  So may the rules of one line
    with several targets.
    """
    terms = [rule.sources if side == "source" else rule.targets for rule in rules]
    patterns = [(term.key, (number, place)) for number, one in enumerate(terms) for place, term in enumerate(one)]
    matcher = Matcher(patterns, prefix)
    found = Sorted([[{} for _ in one] for one in terms])
    besides = _Besides(rules, side, prefix)
    for name in names:
        matches = matcher.read(name)
        if besides.needed and matches:
            matches = besides(name, matches)
        if not matches:
            found.unmatched.append(name)
            continue
        claiming = [rules[match.line[0]] for match in matches]
        together = _seen(claiming[0], side) == "source" and (
            all(rule.formula is not None for rule in claiming)
            or (all(rule.again for rule in claiming[1:]) and len({rule.where for rule in claiming}) == 1)
        )
        if len(matches) > 1 and not together:
            found.faults.append(_claimed(name, [(rules[n], terms[n][k]) for n, k in (m.line for m in matches)], side))
        for match in matches if together else matches[:1]:
            number, place = match.line
            _add(found, rules[number], terms[number][place], match, name)
    return found


def _add(found: Sorted, rule: Rule, term: Term, match: Match[tuple[int, int]], name: str) -> None:
    """Put a name to the members of the term that spells it."""
    number, place = match.line
    outer = tuple([match.bindings[index] for index in rule.outer if index in match.bindings])
    inner = tuple([value for index, value in match.bindings.items() if index not in rule.outer])
    members = found.terms[number][place].setdefault(outer, {})
    if inner in members:
        message = f"{members[inner]!r} and {name!r} are two spellings of one tensor of '{term}'"
        hint = "keep one of them in the checkpoint, or map the other by a rule of its own"
        found.faults.append(Fault(code=Code.SPELLED_TWICE, where=rule.where, message=message, hint=hint))
    else:
        members[inner] = name


class _Besides:
    """Leaves a line of [rest] what no other rule names: neither another line nor another section.

    Args:
        rules: the rules, lines of [rest] among them.
    """

    def __init__(self, rules: Sequence[Rule], side: Side, prefix: str) -> None:
        sides = ((number, rule.sources if side == "source" else rule.targets) for number, rule in enumerate(rules))
        self._rest = {number: len(terms[0].name.front) for number, terms in sides if rules[number].rest}
        self.needed = bool(self._rest)
        listed = next((rule.besides[side == "target"] for rule in rules if rule.rest), ())
        self._listed = Matcher(((name, name) for name in listed), prefix)

    def __call__(self, name: str, matches: list[Match[tuple[int, int]]]) -> list[Match[tuple[int, int]]]:
        """The rules that are meant, of those that match a name."""
        named = [match for match in matches if match.line[0] not in self._rest]
        if named:
            return named
        longest = max(matches, key=lambda match: self._rest[match.line[0]])
        return [] if self._listed.read(name) else [longest]


def _claimed(name: str, claims: list[tuple[Rule, Term]], side: Side) -> Fault:
    code, verb = (Code.READ_TWICE, "read") if side == "source" else (Code.WRITTEN_TWICE, "written")
    rules = " and ".join(f"'{term}' at {rule.where or 'no place'}" for rule, term in claims)
    hint = "make one pattern narrower, or take one rule away"
    return Fault(code=code, where=name, message=f"{verb} by {len(claims)} rules: {rules}", hint=hint)


def outer_keys(rule: Rule, terms: Iterable[dict[Key, Members]]) -> list[Key]:
    """Every value of the outer indices that some term has, in natural order."""
    width = len(rule.outer)
    return sorted({key for by_key in terms for key in by_key if len(key) == width})


def members_under(rule: Rule, term: Term, by_key: Mapping[Key, Members], key: Key) -> Members:
    """The term's members under ``key``.  A term of a fold may lack outer indices: it serves each of their values."""
    if rule.fold:
        key = tuple(value for index, value in zip(rule.outer, key, strict=True) if index in term.name.indices)
    return by_key.get(key, {})


def count_members(
    rule: Rule,
    term: Term,
    members: Members,
    outer: Mapping[str, Value],
    side: Side,
    counts: dict[str, int],
    astray: Astray | None = None,
) -> Iterator[Fault]:
    """Put the sizes of the term's inner indices into ``counts``; a fault if members that they call for are missing."""
    inner = [index for index in term.name.indices if index not in outer]
    sizes: list[int] = []
    for place, index in enumerate(inner):
        values = {key[place] for key in members}
        size = rule.enumerations.get(index) or max((one + 1 for one in values if isinstance(one, int)), default=1)
        if index not in rule.enumerations and len(values) < size:
            pattern = f"'{term.key.spell(outer)}'"
            yield gap(pattern, index, [one for one in values if isinstance(one, int)], _seen(rule, side), rule.where)
            return
        counts[index] = max(counts.get(index, 0), size)
        sizes.append(size)
    lacking = math.prod(sizes) - len(members)
    if lacking:
        keys = islice((key for key in product(*map(range, sizes)) if key not in members), MOST_MISSING)
        names = [term.key.spell({**outer, **dict(zip(inner, key, strict=True))}) for key in keys]
        listed = ", ".join(map(repr, names)) + (f" and {lacking - len(names)} more" if lacking > len(names) else "")
        message = f"the {_NOUN[_seen(rule, side)]} lacks {listed} of '{rule}'"
        hint = ""
        if astray is not None:
            hint = astray.near(names[0], astray.unmatched[side])
            astray.absent[side].update(dict.fromkeys(names, rule.where))
        hint = hint or (f"it has {next(iter(members.values()))!r}" if members else "")
        yield Fault(code=Code.MISSING_MEMBER, where=rule.where, message=message, hint=hint)


def gaps(rules: Sequence[Rule], found: Sorted) -> Iterator[Fault]:
    """A fault for each outer index of the sources that leaves numbers out.

    All rules that count at the same place count together: ``layers.{i}.mlp`` may skip the layers that have
    ``layers.{i}.experts`` instead.
    """
    counted: dict[tuple[str, str], tuple[Rule, set[Value]]] = {}
    lowest: dict[tuple[str, str], int] = {}
    for rule, terms in zip(rules, found.terms, strict=True):
        for term, by_key in zip(rule.sources, terms, strict=True):
            own = [index for index in rule.outer if index in term.name.indices]
            for place, part in enumerate(term.key.parts):
                stem = Name(term.key.parts[:place])
                if isinstance(part, Decimal) and {part.index, *stem.indices} <= set(own):
                    for outer, values in _numbers(by_key, own, stem.indices, part.index).items():
                        before = stem.spell(dict(zip(stem.indices, outer, strict=True)))
                        spot = (before, part.place)
                        counted.setdefault(spot, (rule, set()))[1].update(values)
                        lowest[spot] = min(lowest.get(spot, part.low), part.low)
    for (before, number), (rule, values) in counted.items():
        numbers = [value for value in values if isinstance(value, int)]
        low = lowest[before, number]
        if len(numbers) <= max(numbers) - low:
            yield gap(f"'{before}{number}'", "i", numbers, "source", rule.where, low)


def _numbers(by_key: Iterable[Key], own: list[str], stem: Sequence[str], index: str) -> dict[Key, set[Value]]:
    """The values of an index under each value of the indices before it."""
    places, last = [own.index(one) for one in stem], own.index(index)
    found: dict[Key, set[Value]] = {}
    for key in by_key:
        found.setdefault(tuple([key[place] for place in places]), set()).add(key[last])
    return found


def gap(pattern: str, index: str, values: Iterable[int], side: Side, where: str, low: int = 0) -> Fault:
    """The fault of an index that leaves numbers out; ``low`` is the first that may be there."""
    present = set(values)
    seen = sorted(present)
    missing = list(islice((one for one in range(low, seen[-1]) if one not in present), MOST_MISSING + 1))
    listed = ", ".join(map(str, missing[:MOST_MISSING])) + (", ..." if len(missing) > MOST_MISSING else "")
    found = ", ".join(map(str, seen)) if len(seen) <= 8 else f"{seen[0]} to {seen[-1]}"
    verb = "is" if len(missing) == 1 else "are"
    message = f"{pattern} has {index} = {found} in the {_NOUN[side]}: {listed} {verb} missing"
    hint = f"every number from {low} on must be there"
    if missing == [0]:
        hint = f"an index counts from 0: where names begin with 1, write {{{index}+1}}"
    return Fault(code=Code.INDEX_GAP, where=where, message=message, hint=hint)


def _seen(rule: Rule, side: Side) -> Side:
    """The side as the table has it: the other one of a rule whose sides were exchanged."""
    return side if not rule.turned else "source" if side == "target" else "target"


_NOUN = {"source": "checkpoint", "target": "module"}
