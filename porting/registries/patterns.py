"""Rules that differ only in the numbers of their names, written once with indices in the place of these numbers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

_NUMBER = re.compile(r"(?<![^.])(0|[1-9][0-9]{0,8})(?![^.])")
"""A number between dots, as names of layers and experts have it."""

INDICES = "ijklmnop"
"""Indices of names, the outermost first."""

COUNT = "x"
"""The index of a name that is an axis on the other side."""


@dataclass(frozen=True)
class Spelling:
    """A name with the numbers in it apart: text, number, text, ..., text.

    Attributes:
        texts: what stands between the numbers, and around them.
        count: which of the numbers is the first of those that an index counts; -1 for none.
        length: how many it counts.
    """

    texts: tuple[str, ...]
    numbers: tuple[int, ...]
    count: int = -1
    length: int = 1

    @classmethod
    def of(cls, name: str) -> Spelling:
        """The spelling of one name.

        >>> Spelling.of("layers.3.weight").numbers
        (3,)
        """
        pieces = _NUMBER.split(name)
        return cls(tuple(pieces[::2]), tuple(int(one) for one in pieces[1::2]))

    @classmethod
    def counted(cls, names: Sequence[str]) -> Spelling | None:
        """The spelling of names that count one of their numbers upwards, one by one; None where they do not.

        >>> Spelling.counted(["e.0.w", "e.1.w"]).count, Spelling.counted(["q", "k"])
        (0, None)
        """
        every = [cls.of(name) for name in names]
        first = every[0]
        if any(one.texts != first.texts for one in every):
            return None
        columns = [n for n, value in enumerate(first.numbers) if any(one.numbers[n] != value for one in every)]
        if len(columns) != 1:
            return None
        column = columns[0]
        if [one.numbers[column] for one in every] != [first.numbers[column] + n for n in range(len(every))]:
            return None
        return cls(first.texts, first.numbers, column, len(every))

    @property
    def fixed(self) -> tuple[object, ...]:
        """All but the numbers that may become indices."""
        base = self.numbers[self.count] if self.count >= 0 else 0
        return self.texts, self.count, self.length, base

    def written(self, placeholders: Sequence[str]) -> str:
        """The name with something else in the place of its numbers."""
        return "".join(a + b for a, b in zip(self.texts, (*placeholders, ""), strict=True))


@dataclass(frozen=True)
class Wording:
    """A rule for single names.

    Attributes:
        axes: what stands behind each name, of the sources first.
        sizes: the sizes of indices that no shape tells.
    """

    sources: tuple[Spelling, ...]
    targets: tuple[Spelling, ...]
    axes: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def names(self) -> tuple[Spelling, ...]:
        """The names of both sides."""
        return (*self.sources, *self.targets)

    @property
    def sided(self) -> Iterator[tuple[int, Spelling]]:
        """The names with their side: 0 for a source, 1 for a target."""
        yield from ((0, one) for one in self.sources)
        yield from ((1, one) for one in self.targets)

    @property
    def kind(self) -> tuple[object, ...]:
        """The properties that rules share if they can be written as one."""
        return len(self.sources), tuple(one.fixed for one in self.names), self.axes, self.sizes


Place = tuple[int, int]
"""A number in a rule: which name, and which of its numbers."""


@dataclass(frozen=True)
class Pattern:
    """Rules that are written as one.

    Attributes:
        group: the rules for single names; all of one kind.
        indices: the numbers that an index stands for: which index, and how much more than it the number is.
    """

    group: tuple[Wording, ...]
    indices: Mapping[Place, tuple[int, int]]

    def values(self, place: Place) -> list[int]:
        """The values of the index at a place, in the rules of the group."""
        term, number = place
        shift = self.indices[place][1]
        return [one.names[term].numbers[number] - shift for one in self.group]

    def spots(self) -> Iterator[tuple[str, int, int, int]]:
        """For each number of a source that is an index: the text before it, the shift, the index and its value."""
        for (term, number), (index, shift) in self.indices.items():
            for one in self.group:
                if term < len(one.sources):
                    name = one.names[term]
                    numbers = map(str, name.numbers[:number])
                    before = "".join(a + b for a, b in zip(name.texts, (*numbers, ""), strict=False))
                    yield before, shift, index, name.numbers[number] - shift


Taken = Mapping[tuple[int, tuple[str, ...]], set[tuple[int, ...]]]
"""The numbers that occur, for each side and each spelling without its numbers."""


def rules(every: Sequence[Wording]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The rules with placeholders, those that differ in numbers only once: the terms of each side.

    Every rule reads and writes the names of its group and no others.
    """
    groups: dict[object, list[Wording]] = defaultdict(list)
    taken: dict[tuple[int, tuple[str, ...]], set[tuple[int, ...]]] = defaultdict(set)
    for one in every:
        groups[one.kind].append(one)
        for side, name in one.sided:
            taken[side, name.texts].add(name.numbers)
    patterns = [one for group in groups.values() for one in _patterns(tuple(group), taken)]
    gaps = _gaps(patterns)
    for pattern in patterns:
        first = pattern.group[0]
        listed = {index for before, shift, index, _ in pattern.spots() if (before, shift) in gaps}
        terms = []
        for term, (side, name) in enumerate(first.sided):
            places = [(term, number) for number in range(len(name.numbers))]
            spelled = name.written([_placeholder(pattern, one, listed, taken, side) for one in places])
            terms.append(spelled + first.axes[term])
        yield tuple(terms[: len(first.sources)]), tuple(terms[len(first.sources) :])


def _placeholder(pattern: Pattern, place: Place, listed: set[int], taken: Taken, side: int) -> str:
    """The placeholder for one number of a name."""
    term, number = place
    name = pattern.group[0].names[term]
    value = name.numbers[number]
    if number == name.count:
        others = {numbers[number] for numbers in taken[side, name.texts]} - {value}
        bounds = f":{value}..{value + name.length - 1}" if others else ""
        return f"{{{COUNT}{f'+{value}' if value else ''}{bounds}}}"
    if place not in pattern.indices:
        return str(value)
    index, shift = pattern.indices[place]
    if index in listed:
        spelled = sorted({one + shift for one in pattern.values(place)})
        return f"{{{INDICES[index]}:{','.join(map(str, spelled))}}}"
    return f"{{{INDICES[index]}{f'+{shift}' if shift else ''}}}"


def _gaps(patterns: Iterable[Pattern]) -> set[tuple[str, int]]:
    """The places at which an index leaves a number out: there its values are listed, since a table counts from 0."""
    found: dict[tuple[str, int], set[int]] = defaultdict(set)
    for pattern in patterns:
        for before, shift, _, value in pattern.spots():
            found[before, shift].add(value)
    return {place for place, values in found.items() if len(values) <= max(values)}


def _patterns(group: tuple[Wording, ...], taken: Taken) -> Iterator[Pattern]:
    """Rules of one kind as one pattern, or each as it is where there is none that is right for all."""
    indices = _indices(group)
    if indices is not None and _exact(group, indices, taken):
        yield Pattern(group, indices)
    else:
        yield from (Pattern((one,), {}) for one in group)


def _indices(group: Sequence[Wording]) -> dict[Place, tuple[int, int]] | None:
    """The numbers that differ within a group, as indices that every name has; None where that cannot be.

    Two numbers that differ by a constant are one index.
    """
    first = group[0]
    steps: dict[tuple[int, ...], list[tuple[Place, int]]] = defaultdict(list)
    for term, name in enumerate(first.names):
        for number in range(len(name.numbers)):
            values = [one.names[term].numbers[number] for one in group]
            if len(set(values)) > 1:
                steps[tuple(value - values[0] for value in values)].append(((term, number), values[0]))
    if not steps or len(steps) > len(INDICES):
        return None
    found: dict[Place, tuple[int, int]] = {}
    for index, columns in enumerate(steps.values()):
        if {term for (term, _), _ in columns} != set(range(len(first.names))):
            return None
        least = min(value for _, value in columns)
        found |= {place: (index, value - least) for place, value in columns}
    return found


def _exact(group: Sequence[Wording], indices: Mapping[Place, tuple[int, int]], taken: Taken) -> bool:
    """Whether the names that a pattern reads are those of its group, on both sides."""
    for term, (side, name) in enumerate(group[0].sided):
        ours = {one.names[term].numbers for one in group}
        for numbers in taken[side, name.texts] - ours:
            values: dict[int, set[int]] = defaultdict(set)
            for number, value in enumerate(numbers):
                index, shift = indices.get((term, number), (-1 - number, name.numbers[number]))
                values[index].add(value - shift)
            fixed = all(one == {0} for index, one in values.items() if index < 0)
            if fixed and all(len(one) == 1 for one in values.values()):
                return False
    return True
