"""The indices of a table's axes: as few letters as it can be read with, and the sizes that nothing else says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from porting.suggesting.draft.generalise import Line

_LETTER = re.compile(r"(?<![a-z_])[a-z](?![a-z])")
_TWINS = {"y": "s", "z": "r"}
"""Letters of a key's rotary pairs beside a query's, and those that do where there is no query."""

_FOLLOW = ("r", "z")
"""What remains of a head once its halves are known."""


def plainer(line: Line) -> Line:
    """The line with the usual letters, where these are free.

    >>> plainer(Line((("k", "(g y z) e"),), (("wk", "(g z y) e"),))).targets
    (('wk', '(g r s) e'),)
    """
    if not all(free not in _letters([line]) for free in _TWINS.values()):
        return line

    def renamed(terms: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        return tuple(
            (name, _LETTER.sub(lambda one: _TWINS.get(one.group(), one.group()), axes)) for name, axes in terms
        )

    return replace(line, sources=renamed(line.sources), targets=renamed(line.targets))


def _usual(letter: re.Match[str]) -> str:
    return _TWINS.get(letter.group(), letter.group())


def needed(texts: Mapping[str, str], lines: Sequence[Line]) -> dict[str, str]:
    """The sizes that a table has to state: of the indices that it uses, without those that a shape says.

    Args:
        texts: index -> expression, of all that may be used.
        lines: the table's.

    >>> one = Line((("q", "(h s r) e"),), (("wq", "(h r s) e"),))
    >>> needed({"h": "heads", "g": "groups", "s": "2", "r": "width // heads // 2"}, [one])
    {'h': 'heads', 's': '2'}
    """
    named = " ".join(name for line in lines for name, _ in (*line.sources, *line.targets))
    used = {index: text for index, text in texts.items() if index in _letters(lines) or f"{{{index}}}" in named}
    known = set(used) - set(_FOLLOW)
    for index in _FOLLOW:
        if index in used and all(_follows(index, line, known) for line in lines if index in _letters([line])):
            del used[index]
    return used


def _follows(index: str, line: Line, known: set[str]) -> bool:
    """Whether an axis has this index and, besides it, nothing but indices whose sizes are known."""
    groups = [group for _, axes in (*line.sources, *line.targets) for group in re.findall(r"\(([^()|]*)\)", axes)]
    return any(index in group.split() and set(group.split()) <= known | {index} for group in groups)


def _letters(lines: Sequence[Line]) -> set[str]:
    return {one for line in lines for _, axes in (*line.sources, *line.targets) for one in _LETTER.findall(axes)}
