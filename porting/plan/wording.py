"""How faults over many names are told: one line for those that are alike, and the nearest name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from porting.errors import Fault

MOST_HINTS = 20
"""The nearest name is looked up for this many faults: each look compares a name with all candidates."""

MOST_PATTERNS = 500
"""So many names, their numbers aside, are compared with."""

MOST_CHARACTERS = 200
"""So much of a name is compared: comparing takes the product of two lengths."""

_NUMBER = re.compile(r"(?<![^.'\"])[0-9]+(?![^.'\"])")


def alike(faults: Iterable[Fault]) -> list[Fault]:
    """The faults, those that differ only in the numbers within names told once and counted.

    >>> from porting.errors import Code
    >>> layers = [Fault(code=Code.NO_SOURCE, message=f"'layers.{i}.bias' is missing") for i in range(12)]
    >>> print(*alike(layers))
    'layers.0.bias' is missing (and 11 more like it) [no-source]
    """
    groups: dict[tuple[str, str, str], list[Fault]] = {}
    for fault in faults:
        key = (fault.code, _numberless(fault.where), _numberless(fault.message))
        groups.setdefault(key, []).append(fault)
    return [_counted(group) for group in groups.values()]


def _counted(group: list[Fault]) -> Fault:
    if len(group) == 1:
        return group[0]
    more = f"and {len(group) - 1} more like it"
    hint = group[0].hint
    return replace(group[0], hint=f"{more}; {hint}" if hint else more)


def listed(names: Sequence[str]) -> str:
    """A name, and how many more there are like it."""
    return repr(names[0]) + (f" and {len(names) - 1} more like it" if len(names) > 1 else "")


def group_alike(names: Iterable[str]) -> list[list[str]]:
    """Names grouped by what they are but for their numbers, so that one fault speaks of twelve layers."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_numberless(name), []).append(name)
    return list(groups.values())


class Nearest:
    """The nearest name, for the first few faults.

    Names that differ in their numbers are compared once, and the one with the same numbers is told.

    >>> Nearest()("layers.7.wieght", [f"layers.{i}.weight" for i in range(12)])
    "did you mean 'layers.7.weight'?"
    """

    def __init__(self) -> None:
        self.left = MOST_HINTS

    def __call__(self, name: str, candidates: Iterable[str]) -> str:
        """The hint; empty when nothing is close."""
        if self.left == 0:
            return ""
        self.left -= 1
        patterns: dict[str, list[str]] = {}
        for candidate in candidates:
            pattern = _numberless(candidate)[:MOST_CHARACTERS]
            if pattern in patterns or len(patterns) < MOST_PATTERNS:
                patterns.setdefault(pattern, []).append(candidate)
        close = difflib.get_close_matches(_numberless(name)[:MOST_CHARACTERS], list(patterns), n=1, cutoff=0.6)
        if not close:
            return ""
        numbers = _NUMBER.findall(name)
        same = (one for one in patterns[close[0]] if _NUMBER.findall(one) == numbers)
        return f"did you mean {next(same, patterns[close[0]][0])!r}?"


def _numberless(name: str) -> str:
    return _NUMBER.sub("#", name)
