"""How faults over many names are reported: one line for similar ones, and the nearest name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from porting.errors import MOST_CHARACTERS, closest, numberless

MOST_HINTS = 20
"""The nearest name is looked up for this many faults: each look compares a name with all candidates."""

MOST_PATTERNS = 500
"""How many names, apart from their numbers, are compared with."""


def listed(names: Sequence[str]) -> str:
    """A name, and how many more there are like it."""
    return repr(names[0]) + (f" and {len(names) - 1} more like it" if len(names) > 1 else "")


def group_alike(names: Iterable[str]) -> list[list[str]]:
    """Names grouped by what they are but for their numbers, so that one fault speaks of twelve layers."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(numberless(name), []).append(name)
    return list(groups.values())


class Nearest:
    """The nearest name, for the first few faults.

    Names that differ in their numbers are compared once, and the one with the same numbers is reported.

    >>> Nearest()("layers.7.wieght", [f"layers.{i}.weight" for i in range(12)])
    "did you mean 'layers.7.weight'?"
    >>> lines = {"layers.7.wieght": "mine.toml:12:1"}
    >>> Nearest().said("layers.7.weight", lines, ["layers.7.weight", "layers.7.height"])
    "mine.toml:12:1 has 'layers.7.wieght': is it this one?"
    >>> Nearest().said("layers.7.height", lines, ["layers.7.weight", "layers.7.height"])
    ''
    """

    def __init__(self) -> None:
        self.left = MOST_HINTS

    def __call__(self, name: str, candidates: Iterable[str]) -> str:
        """The hint at a name that is not there, by what is; empty when nothing is close."""
        if self.left == 0:
            return ""
        self.left -= 1
        found = _nearest(name, candidates)
        return f"did you mean {found!r}?" if found else ""

    def said(self, name: str, lines: Mapping[str, str], alike: Iterable[str]) -> str:
        """The hint at a name that nobody speaks of: the line that says nearly that."""
        if self.left == 0 or not lines:
            return ""
        self.left -= 1
        found = _nearest(name, lines)
        if not found or numberless(_nearest(found, alike)) != numberless(name):
            return ""
        return f"{lines[found] or 'the table'} has {found!r}: is it this one?"


def _nearest(name: str, candidates: Iterable[str]) -> str:
    return closest(name, candidates, MOST_PATTERNS)


def resembles(one: str, other: str) -> bool:
    """Whether one name is the other with a slip or two.

    >>> resembles("layers.0.pooler.", "layers.1.poolr."), resembles("trunk.ids", "trunk.extra")
    (True, False)
    """
    one, other = numberless(one)[:MOST_CHARACTERS], numberless(other)[:MOST_CHARACTERS]
    return difflib.SequenceMatcher(None, one, other).ratio() >= 0.85


def common_front(names: Sequence[str], expected: Iterable[str], prefix: str = "") -> str:
    """The prefix that a wrapper added to all names, such as ``"module."``; empty if that is not the reason.

    >>> common_front(["module.a.w", "module.a.b", "module.c.w"], ["a.w", "a.b"])
    'module.'
    >>> common_front(["module.a.w", "c.w"], ["a.w"])
    ''
    """
    patterns = {numberless(one) for name in expected for one in (name, name.removeprefix(prefix))}
    first = names[0].split(".") if names else []
    for count in range(1, len(first)):
        front = ".".join(first[:count]) + "."
        if not all(name.startswith(front) for name in names):
            return ""
        found = sum(numberless(name.removeprefix(front)) in patterns for name in names)
        if 2 * found > len(names):
            return front
    return ""
