"""Find the rule that reads each name, in time linear in the number of names.

Names that differ only in their numbers share a skeleton (``layer.#.weight``), so each name is tried against the few
patterns of its skeleton and not against every rule of the table.  Of these, one that spells numbers out
(``layer.3.{w}``) is found by them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Generic, TypeVar

from porting.notation.name import Decimal, Enumerated, Literal, Name, Rest, Value

MOST_SKELETONS = 64
"""A pattern with more spellings than this is found by the text that it begins with instead."""

_DIGITS = re.compile(r"[0-9]+")

_ANY = "\0"
"""Stands for the digits of a placeholder; no name holds it."""

_DIGITS_OR_ANY = re.compile(f"[0-9{_ANY}]+")

Numbers = tuple[str | None, ...]
"""The digits of a skeleton's places; None where a placeholder stands for them."""

Line = TypeVar("Line")


@dataclass(frozen=True, slots=True)
class Match(Generic[Line]):
    """The line of a pattern that matches a name, and the values of its indices."""

    line: Line
    bindings: dict[str, Value]


class Matcher(Generic[Line]):
    """Patterns, each with what it stands for, matched with and without a prefix."""

    def __init__(self, patterns: Iterable[tuple[Name, Line]], prefix: str = "") -> None:
        self._by_skeleton: dict[str, dict[tuple[int, ...], dict[Numbers, list[tuple[int, Name]]]]] = {}
        self._by_beginning: dict[str, list[tuple[int, Name]]] = {}
        self._lines: list[Line] = []
        for number, (pattern, line) in enumerate(patterns):
            self._lines.append(line)
            for spelled in (pattern, pattern.without(prefix)):
                if spelled is not None:
                    self._add(number, spelled)
        # of one key the longest beginning comes first: "model.{*rest}" reads "model.a", and not with the prefix inside
        self._lengths = sorted({len(beginning) for beginning in self._by_beginning}, reverse=True)

    def _add(self, number: int, pattern: Name) -> None:
        skeletons = _skeletons(pattern)
        if skeletons is None:
            first = pattern.parts[0]
            beginning = first.text if isinstance(first, Literal) else ""
            self._by_beginning.setdefault(beginning, []).append((number, pattern))
            return
        for skeleton, numbers in skeletons:
            spelled_out = tuple(place for place, digits in enumerate(numbers) if digits is not None)
            by_numbers = self._by_skeleton.setdefault(skeleton, {}).setdefault(spelled_out, {})
            by_numbers.setdefault(tuple(numbers[place] for place in spelled_out), []).append((number, pattern))

    def read(self, name: str) -> list[Match[Line]]:
        """The lines of the patterns that match ``name``, each once, in the order in which they were given."""
        found: dict[int, Match[Line]] = {}
        for number, pattern in self._candidates(name):
            if number not in found:
                bindings = pattern.read(name)
                if bindings is not None:
                    found[number] = Match(self._lines[number], bindings)
        return [found[number] for number in sorted(found)]

    def first(self, name: str) -> Match[Line] | None:
        """The first of these; None where no pattern spells the name."""
        return next(iter(self.read(name)), None)

    def _candidates(self, name: str) -> Sequence[tuple[int, Name]]:
        candidates: list[tuple[int, Name]] = []
        known = self._by_skeleton.get(_DIGITS.sub("#", name)) if self._by_skeleton else None
        if known:  # else the name, which may be long, is gone through once
            digits = _DIGITS.findall(name)
            for spelled_out, by_numbers in known.items():
                candidates += by_numbers.get(tuple([digits[place] for place in spelled_out]), [])
        for length in self._lengths:
            candidates += self._by_beginning.get(name[:length], [])
        return candidates


def _skeletons(pattern: Name) -> set[tuple[str, Numbers]] | None:
    """The skeletons of what a pattern can spell, each with its digits; None when they cannot be listed."""
    choices: list[list[str]] = []
    for part in pattern.parts:
        match part:
            case Literal(text=text):
                choices.append([text])
            case Decimal():
                choices.append([_ANY])
            case Enumerated(spellings=spellings):
                choices.append([one for place in spellings for one in place])
            case Rest():
                return None
    if math.prod(len(one) for one in choices) > MOST_SKELETONS:
        return None
    spelled = ("".join(choice) for choice in product(*choices))
    return {(_DIGITS_OR_ANY.sub("#", one), _numbers(one)) for one in spelled}


def _numbers(spelled: str) -> Numbers:
    return tuple([None if _ANY in digits else digits for digits in _DIGITS_OR_ANY.findall(spelled)])
