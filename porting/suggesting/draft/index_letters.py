"""The letters of a table's axes, and the sizes that it has to state for them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from porting.suggesting.draft.layer_patterns import Line
from porting.suggesting.search.matrix_candidates import PARTS

_LETTER = re.compile(r"(?<![a-z_])[a-z](?![a-z])")
_TWINS = {"y": "s", "z": "r", "w": "u"}
"""Letters of a key's rotary pairs beside a query's, and those that do where there is no query."""

_FOLLOW = ("r", "z")
"""The names of the rest of a head once its halves are known."""


def plainer(line: Line) -> Line:
    """The line with the usual letters, where these are free.

    >>> plainer(Line((("k", "(g y z) e"),), (("wk", "(g z y) e"),))).targets
    (('wk', '(g r s) e'),)
    """
    if not all(free not in _letters([line]) for free in _TWINS.values()):
        return line
    return _with_letters(line, _TWINS)


def with_own_parts(lines: Sequence[Line]) -> list[Line]:
    """The lines with another letter for rows in parts, ``(t|_1)``, in each: a part has one size in a whole table.

    >>> words, places = (Line(((one, "(_1|t) e"),), ((one, "(t|_1) e"),)) for one in ("words", "places"))
    >>> [line.targets for line in with_own_parts([words, places])]
    [(('words', '(t|_1) e'),), (('places', '(p|_1) e'),)]
    """
    taken = _letters(lines)
    spare = (one for one in "pxjnlab" if one not in taken)
    found, used = [], False
    for line in lines:
        parted = any("|" in axes and "t" in _LETTER.findall(axes) for _, axes in line.terms)
        own = next(spare, "t") if parted and used else "t"
        used |= parted
        found.append(line if own == "t" else _with_letters(line, {"t": own}))
    return found


def _with_letters(line: Line, letters: Mapping[str, str]) -> Line:
    def renamed(terms: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        return tuple(
            (name, _LETTER.sub(lambda one: letters.get(one.group(), one.group()), axes)) for name, axes in terms
        )

    return replace(line, sources=renamed(line.sources), targets=renamed(line.targets))


def needed(texts: Mapping[str, str], lines: Sequence[Line]) -> dict[str, str]:
    """The sizes that a table has to state: of the indices that it uses, without those that a shape says.

    Args:
        texts: index -> expression, of all that may be used.

    >>> one = Line((("q", "(h s r) e"),), (("wq", "(h r s) e"),))
    >>> needed({"h": "heads", "g": "groups", "s": "2", "r": "width // heads // 2"}, [one])
    {'h': 'heads', 's': '2'}
    """
    named = " ".join(name for line in lines for name, _ in line.terms)
    used = {index: text for index, text in texts.items() if index in _letters(lines) or f"{{{index}}}" in named}
    known = set(used) - set(_FOLLOW)
    for index in _FOLLOW:
        if index in used and all(_follows(index, line, known) for line in lines if index in _letters([line])):
            del used[index]
    return used


def _follows(index: str, line: Line, known: set[str]) -> bool:
    """Whether either side alone has an axis with this index and, besides it, only indices whose sizes are known."""
    for side in (line.sources, line.targets):
        groups = [set(group.split()) for _, axes in side for group in re.findall(r"\(([^()|]*)\)", axes)]
        if not any(index in group <= known | {index} for group in groups):
            return False
    return True


def part_sizes(texts: Mapping[int, str], lines: Sequence[Line], shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """The lines of [sizes] for parts of different sizes, ``(a|b)``: the joined tensor alone does not show them.

    Args:
        texts: number -> the expression for it.
        lines: the table's.
        shapes: of the tensors of both sides.

    >>> one = Line((("q", "a e"), ("k", "b e")), (("qk", "(a|b) e"),))
    >>> part_sizes({8: "width", 4: "groups * size"}, [one], {"q": (8, 8), "k": (4, 8)})
    {'a': 'width', 'b': 'groups * size'}
    """
    found: dict[str, set[int]] = {}
    for name, axes in (term for line in lines for one in line.single for term in one.terms):
        for letter, size in zip(axes.split(), shapes.get(name, ()), strict=False) if "(" not in axes else ():
            found.setdefault(letter, set()).add(size)
    one_size = {letter: min(some) for letter, some in found.items() if letter in PARTS and len(some) == 1}
    return {letter: texts[size] for letter, size in sorted(one_size.items()) if size in texts}


def _letters(lines: Sequence[Line]) -> set[str]:
    return {one for line in lines for _, axes in line.terms for one in _LETTER.findall(axes)}
