"""Which rule reads which name, in time linear in the number of names.

Names that differ only in their numbers share a skeleton (``layer.#.weight``), so each name is tried against the few
patterns of its skeleton and not against every rule of the table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from porting.notation.name import Decimal, Enumerated, Literal, Name, Rest, Value

MOST_SKELETONS = 64
"""A pattern with more spellings than this is found by the text that it begins with instead."""

_DIGITS = re.compile(r"[0-9]+")

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Match:
    """A pattern that spells a name: its key, as it was given, and the index values."""

    key: Key
    bindings: dict[str, Value]


class Matcher:
    """Patterns, each under a key of the caller's, matched with and without a prefix."""

    def __init__(self, patterns: Iterable[tuple[Key, Name]], prefix: str = "") -> None:
        self._by_skeleton: dict[str, list[tuple[Key, Name]]] = {}
        self._by_beginning: dict[str, list[tuple[Key, Name]]] = {}
        for key, pattern in patterns:
            for spelled in (pattern, pattern.without(prefix)):
                if spelled is not None:
                    self._add(key, spelled)
        # of one key the longest beginning comes first: "model.{*rest}" reads "model.a", and not with the prefix inside
        self._lengths = sorted({len(beginning) for beginning in self._by_beginning}, reverse=True)

    def _add(self, key: Key, pattern: Name) -> None:
        skeletons = _skeletons(pattern)
        if skeletons is None:
            first = pattern.parts[0]
            beginning = first.text if isinstance(first, Literal) else ""
            self._by_beginning.setdefault(beginning, []).append((key, pattern))
            return
        for skeleton in skeletons:
            self._by_skeleton.setdefault(skeleton, []).append((key, pattern))

    def read(self, name: str) -> list[Match]:
        """Every pattern that spells ``name``, each key once, in the order of the keys."""
        found: dict[Key, Match] = {}
        for key, pattern in self._candidates(name):
            if key not in found:
                bindings = pattern.read(name)
                if bindings is not None:
                    found[key] = Match(key, bindings)
        return list(found.values()) if len(found) < 2 else [found[key] for key in sorted(found)]

    def _candidates(self, name: str) -> Sequence[tuple[Key, Name]]:
        candidates = self._by_skeleton.get(_DIGITS.sub("#", name), [])
        for length in self._lengths:
            candidates = candidates + self._by_beginning.get(name[:length], [])
        return candidates


def _skeletons(pattern: Name) -> set[str] | None:
    """The skeletons of what a pattern can spell; None when they cannot be listed."""
    choices: list[list[str]] = []
    for part in pattern.parts:
        match part:
            case Literal(text=text):
                choices.append([text])
            case Decimal():
                choices.append(["0"])
            case Enumerated(spellings=spellings):
                choices.append([one for place in spellings for one in place])
            case Rest():
                return None
    if math.prod(len(one) for one in choices) > MOST_SKELETONS:
        return None
    return {_DIGITS.sub("#", "".join(choice)) for choice in product(*choices)}
