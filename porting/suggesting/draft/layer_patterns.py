"""Combine the rules of the single layers into the few that a person would have written.

Numbers that vary together become an index: ``layer.0 = blocks.0`` and ``layer.1 = blocks.1`` are ``layer.{i} =
blocks.{i}``; ``layer.1 = layers.2`` after ``layer.0 = layers.0`` makes ``layer.{i} = layers.{2*i}``.  A weight and its
bias that go the same way are one line, and so are query, key and value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, pairwise
from types import MappingProxyType

from porting.notation.name import Name
from porting.suggesting.search.layouts import CandidateRule, Shapes
from porting.suggesting.search.name_similarity import meanings, parted, pattern, words
from porting.suggesting.search.search_result import GUESS

_NUMBER = re.compile(r"\{[^{}]*\}|\d+")
"""A number, or a placeholder, whose numbers are its own."""

Terms = tuple[tuple[str, str], ...]
"""Patterns of names with their axes."""


@dataclass(frozen=True)
class Line:
    """A rule as a table writes it.

    Attributes:
        sources, targets: patterns of names with their axes, ``(pattern, "(h d) e")``.
        copies: each target is given the whole source.
        fold, fill: as in a table.
        constants: its scale and its offset, as in a table.
        proven: it was chosen among several by what it computes.
        reads, writes: the tensors of the twin that it stands for.
        parts: the lines of single layers that it was made of; none for one of these.
    """

    sources: Terms
    targets: Terms
    copies: bool = False
    fold: bool = False
    fill: float | None = None
    constants: Mapping[str, str] = field(default_factory=dict, hash=False)
    why: str = ""
    proven: bool = False
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    parts: tuple[Line, ...] = ()

    @property
    def terms(self) -> Terms:
        """The terms of both sides."""
        return (*self.sources, *self.targets)

    @property
    def single(self) -> tuple[Line, ...]:
        """The lines of single layers."""
        return self.parts or (self,)

    @property
    def short(self) -> bool:
        """Whether it can be a line of [tensors]."""
        plain = not self.fold and self.fill is None and not self.constants
        return len(self.sources) == 1 and (len(self.targets) == 1 or self.copies) and plain


def lines(
    moves: Iterable[CandidateRule],
    stacked: Mapping[str, tuple[str, int]] = MappingProxyType({}),
    shapes: Shapes = MappingProxyType({}),
) -> list[Line]:
    """The rules of a table for these moves, in order of execution.

    Args:
        stacked: see :class:`TracedModel`.
        shapes: of the module's tensors.
    """
    single = [
        Line(
            tuple((one.pattern, one.axes) for one in move.sources),
            tuple((one.pattern, one.axes) for one in move.targets),
            copies=move.copies,
            fold=move.fold,
            fill=move.fill,
            constants=move.constants,
            why=move.why,
            proven=move.proven,
            reads=move.reads,
            writes=move.writes,
        )
        for move in moves
    ]
    counted = _stacked(_counted(single), stacked, shapes)
    paired = _merged(counted, "w", _weight_and_bias)
    return _told_apart(_merged(paired, "p", _projections))


def _stacked(
    some: Sequence[Line], stacked: Mapping[str, tuple[str, int]], shapes: Mapping[str, Sequence[int]]
) -> list[Line]:
    """The lines with those into slices of a parameter as lines into it: its first axis counts layers, or is ``p``."""
    found: list[Line] = []
    slices: dict[str, list[tuple[str, Line]]] = {}
    for line in some:
        if len(line.targets) > 1 or not line.writes or not all(one in stacked for one in line.writes):
            found.append(line)
            continue
        plain = " ".join(_AXES[: len(shapes[line.writes[0]])])
        sources = tuple((name, axes or plain) for name, axes in line.sources)
        name, axes = line.targets[0]
        path, _, last = name.rpartition(".")
        outer, _, number = path.rpartition(".")
        whole = f"{outer}.{last}" if outer else last
        slices.setdefault(whole, []).append((number, replace(line, sources=sources, targets=((name, axes or plain),))))
    for whole, parts in slices.items():
        first = stacked[parts[0][1].writes[0]][0]
        count = sum(name == first for name, _ in stacked.values())
        number, line = parts[0]
        if (
            number == "{i}"
            and len(parts) == 1
            and all("{i}" in name for name, _ in line.sources)
            and not _uses(line, "i")
        ):
            made: Line | None = replace(line, targets=((whole, f"i {line.targets[0][1]}"),))
        else:
            made = _rows(whole, parts, count)
        found += [line for _, line in parts] if made is None else [made]
    return found


def _rows(whole: str, parts: Sequence[tuple[str, Line]], count: int) -> Line | None:
    """The line that fills a parameter from its slices: those of layers one after the other, vectors before or behind.

    Args:
        whole: the parameter.
        parts: the lines into its slices, with what their numbers are: ``"0"``, ``"{i}"``, ``"{2*i+1}"``.
        count: how many slices it has.
    """
    numbers = [_SLICES.fullmatch(number) for number, _ in parts]
    lines_ = [line for _, line in parts]
    if not all(numbers) or any(len(line.sources) > 1 or _uses(line, "i") for line in lines_):
        return None
    told = [(found, line) for found, line in zip(numbers, lines_, strict=True) if found is not None]
    fixed = {int(found["number"]): line for found, line in told if not found["index"]}
    each = {int(found["shift"] or 0): line for found, line in told if found["index"]}
    steps = {int(found["factor"] or 1) for found, _ in told if found["index"]}
    if not each:
        ordered = [fixed[at] for at in sorted(fixed)]
        merged = _enumerated(ordered) if len(fixed) == count else None
        return None if merged is None else replace(merged, targets=((whole, f"p {merged.targets[0][1]}"),))
    before = min(each)
    rows = [*range(before), *range(before + len(each) * len(each[before].writes), count)]
    whole_layers = steps == {len(each)} and sorted(each) == [*range(before, before + len(each))]
    if not whole_layers or sorted(fixed) != rows or not all("{i}" in line.sources[0][0] for line in each.values()):
        return None
    layers = _enumerated([each[at] for at in sorted(each)]) if len(each) > 1 else each[before]
    if layers is None or len({line.targets[0][1] for line in lines_}) > 1:
        return None
    ordered = [*(fixed[at] for at in rows if at < before), layers, *(fixed[at] for at in rows if at >= before)]
    parted = ["1" if line is not layers else "i p" if len(each) > 1 else "i" for line in ordered]
    first = "i" if parted == ["i"] else f"({'|'.join(parted)})"
    sources = tuple(line.sources[0] for line in ordered)
    return _as_one(ordered, sources, ((whole, f"{first} {lines_[0].targets[0][1]}"),))


_SLICES = re.compile(r"\{(?:(?P<factor>\d+)\*)?(?P<index>i)(?:\+(?P<shift>\d+))?\}|(?P<number>\d+)")


def _enumerated(some: Sequence[Line]) -> Line | None:
    """Lines into slices as one whose sources are enumerated by ``p``; its target's name is left as it is."""
    if not all(_mergeable(line, "p") for line in some):
        return None
    told = [replace(line, targets=((f"t.{at}", line.targets[0][1]),)) for at, line in enumerate(some)]
    return _joined(told, "p") if len(some) > 1 else None


def _uses(line: Line, index: str) -> bool:
    """Whether an axis of a line has this index."""
    return any(re.search(rf"\b{index}\b", axes) for _, axes in line.terms)


def fill_slices(moves: Sequence[CandidateRule], stacked: Mapping[str, tuple[str, int]], shapes: Shapes) -> bool:
    """Whether a table can say what fills the slices of parameters: those of all layers, or all of one parameter.

    Args:
        moves: the rules that fill them.
        stacked: see :class:`TracedModel`.
        shapes: of the module's tensors.
    """
    some = [line for line in lines(moves, stacked, shapes) if any(one in stacked for one in line.writes)]
    return not any(
        name_pattern(name).fullmatch(one) for line in some for name, _ in line.targets for one in line.writes
    )


_AXES = "oefmnp"
"""Letters for axes that are only counted."""


def _told_apart(found: Sequence[Line]) -> list[Line]:
    """A counted ``{i}`` spelled out as ``{i:0,1,2}`` where a number besides these is another line's.

    Where the index is computed with, as in ``{2*i}``, that cannot be written: it is a line for each layer then.
    """
    read = [name for line in found for name in line.reads]
    written = [name for line in found for name in line.writes]
    told: list[Line] = []
    for line in found:
        others = ([one for one in read if one not in line.reads], [one for one in written if one not in line.writes])
        told += _spelled_out(line, *others)
    return told


def _spelled_out(line: Line, read: Sequence[str], written: Sequence[str]) -> tuple[Line, ...]:
    """The line, or what it has to be where others read or write these names."""
    for index in "pijkl":
        sides = [
            [shape for name, _ in terms if (shape := _Shape.of(name, index)) is not None]
            for terms in (line.sources, line.targets)
        ]
        shapes = [*sides[0], *sides[1]]
        if not any(
            shape.matches(one)
            for some, names in zip(sides, (read, written), strict=True)
            for shape in some
            for one in names
        ):
            continue
        if any(shape.factor != 1 or shape.shift for shape in shapes):
            return line.single
        mine = (shape.number(one) for shape in shapes for one in (*line.reads, *line.writes))
        values = sorted({value for value in mine if value is not None})
        if not values:
            return line.single
        plain, spelled = f"{{{index}}}", f"{{{index}:{','.join(map(str, values))}}}"
        line = replace(
            line,
            sources=tuple((name.replace(plain, spelled), axes) for name, axes in line.sources),
            targets=tuple((name.replace(plain, spelled), axes) for name, axes in line.targets),
        )
    return (line,)


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """The form of a pattern's names, with ``{2*i+1}`` in it as factor and shift."""

    text: re.Pattern[str]
    factor: int
    shift: int

    @classmethod
    def of(cls, name: str, index: str) -> _Shape | None:
        """Make the form of a pattern with one counted index; None where it has none."""
        computed = re.search(rf"\{{(?:(\d+)\*)?{index}([+-]\d+)?\}}", name)
        if computed is None:
            return None
        parts = re.split(r"(\{[^{}]*\})", name)
        text = "".join(r"(\d+)" if one == computed.group() else _placeholder(one, "[^.]+") for one in parts)
        return cls(text=re.compile(text), factor=int(computed.group(1) or 1), shift=int(computed.group(2) or 0))

    def number(self, name: str) -> int | None:
        """The number that stands in a name in the index's place; None where the pattern does not match."""
        found = self.text.fullmatch(name)
        return int(found.group(1)) if found else None

    def matches(self, name: str) -> bool:
        """Whether the pattern stands for a name, with any index from 0 on."""
        number = self.number(name)
        return number is not None and number >= self.shift and (number - self.shift) % self.factor == 0


def _placeholder(part: str, index: str = r"\d+") -> str:
    """The regular expression for a part of a pattern; ``index``: for an index whose spellings it does not say.

    Those of ``{p}`` may stand on the rule's other side, and be words.
    """
    if not part.startswith("{"):
        return re.escape(part)
    if part.startswith("{0x"):
        return re.escape(Name.parse(part).spell({}))
    spellings = part[1:-1].partition(":")[2]
    some = f"(?:{'|'.join(map(re.escape, re.split('[,/]', spellings)))})" if spellings else index
    return ".+" if part.startswith("{*") else some


@cache
def name_pattern(name: str) -> re.Pattern[str]:
    """The regular expression of a pattern's names: an index is a number, an enumerated one is one of its spellings.

    >>> bool(name_pattern("h.{i}.{w:weight,bias}").fullmatch("h.11.bias")), bool(name_pattern("h.{*rest}").match("g.0"))
    (True, False)
    """
    return re.compile("".join(map(_placeholder, re.split(r"(\{[^{}]*\})", name))))


def indexed(names: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Tuples of names with the numbers that vary together made an index.

    Of pairs no two stand for one name: ``{i}`` is spelled out where a number besides those is another pair's.

    >>> indexed([("h.0.ln", "b.0.n"), ("h.1.ln", "b.1.n"), ("ln_f", "norm")])
    [('h.{i}.ln', 'b.{i}.n'), ('ln_f', 'norm')]

    >>> indexed([("conv.0", "b.0"), ("conv.1", "b.3"), ("h.0", "b.1"), ("h.1", "b.2")])
    [('conv.{i}', 'b.{3*i}'), ('h.0', 'b.1'), ('h.1', 'b.2')]
    """
    plain = [
        Line(
            tuple((one, "") for one in some[:1]), tuple((one, "") for one in some[1:]), reads=some[:1], writes=some[1:]
        )
        for some in names
    ]
    return [tuple(name for name, _ in line.terms) for line in _told_apart(_counted(plain))]


def joined(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pairs of names of which some differ in query, key and value alone, these as one.

    >>> joined([("h.q [b t o]", "b.query [t b o]"), ("h.k [b t o]", "b.key [t b o]"), ("ln", "norm")])
    [('h.{p:q,k} [b t o]', 'b.{p:query,key} [t b o]'), ('ln', 'norm')]

    >>> joined([("h.q", "b.0"), ("h.k", "b.1"), ("h.o", "b.2")])[0]
    ('h.{p:q,k}', 'b.{p:0,1}')
    """
    single = []
    for left, right in pairs:
        (ours, _, axes), (theirs, _, others) = left.partition(" ["), right.partition(" [")
        single.append(Line(((ours, axes),), ((theirs, others),), reads=(ours,), writes=(theirs,)))
    found = [(*line.sources[0], *line.targets[0]) for line in _told_apart(_merged(single, "p", _projections))]
    return [
        (ours + (f" [{axes}" if axes else ""), theirs + (f" [{others}" if others else ""))
        for ours, axes, theirs, others in found
    ]


def _counted(single: Sequence[Line]) -> list[Line]:
    groups: dict[object, list[Line]] = {}
    for line in single:
        key = (tuple((_blank(name), axes) for name, axes in line.terms), line.fold, line.fill, *line.constants.items())
        groups.setdefault(key, []).append(line)
    return [line for group in groups.values() for line in _explain(group)]


def _blank(name: str) -> str:
    return _NUMBER.sub(lambda found: found.group() if found.group().startswith("{") else "#", name)


def _numbers(line: Line) -> list[int]:
    return [int(found) for name, _ in line.terms for found in _NUMBER.findall(name) if not found.startswith("{")]


def _explain(group: list[Line]) -> list[Line]:
    """The group as one line with an index; as several where one index cannot explain it."""
    if len(group) == 1:
        return group
    columns = list(zip(*(_numbers(line) for line in group), strict=True))
    varying = [place for place, column in enumerate(columns) if len(set(column)) > 1]
    for base in varying:
        count = _places(columns[base])
        spelled = {place: _affine(count, columns[place]) for place in varying} if count else {}
        if spelled and all(spelled.values()) and not _twice(group[0], varying):
            return [_spelled(group, {place: text for place, text in spelled.items() if text})]
    staged = _by_stage(group, columns, varying)
    if staged is not None:
        return [_spelled(group, staged)]
    alike = len({columns[place] for place in varying}) == 1 and len({*columns[varying[0]]}) == len(group)
    if alike and not _twice(group[0], varying):  # some layers, not equally far apart, of the same numbers on both sides
        index = f"{{i:{','.join(map(str, sorted(columns[varying[0]])))}}}"
        return [_spelled(group, dict.fromkeys(varying, index))]
    for place in _inner_first(group, varying):  # another number tells two rows of layers apart
        parts: dict[int, list[Line]] = {}
        for line, value in zip(group, columns[place], strict=True):
            parts.setdefault(value, []).append(line)
        if 1 < len(parts) < len(group):
            return [line for part in parts.values() for line in _explain(part)]
    return group


def _twice(line: Line, varying: Sequence[int]) -> bool:
    """Whether two of the varying numbers stand in one name, where an index may stand once: stage 1's block 1."""
    return any(len({*side} & {*varying}) > 1 for side in _sides(line))


def _by_stage(group: Sequence[Line], columns: Sequence[Sequence[int]], varying: Sequence[int]) -> dict[int, str] | None:
    """Two indices for blocks that are numbered within numbered stages; None where two cannot explain the numbers.

    The stages may have different numbers of blocks.  Both names need both numbers, and the number of a block stands by
    itself: in ``h.1.ln_2`` the second number tells norms apart.
    """
    glued = _glued(group[0])
    sides = _sides(group[0])
    for stage, block in combinations(varying, 2):
        outer, inner = (_ranks(columns[place]) for place in (stage, block))
        pairs = {*zip(outer, inner, strict=True)}
        within = [sorted(two for one, two in pairs if one == number) for number in {*outer}]
        if len(pairs) < len(group) or any(numbers != [*range(len(numbers))] for numbers in within):
            continue
        spelled: dict[int, str] = {}
        of_block = set()
        for place in varying:
            text = _affine(outer, columns[place])
            if not text:
                text = _affine(inner, columns[place]).replace("i", "j")
                of_block.add(place)
            spelled[place] = text
        places = [sorted({*side} & {*varying}) for side in sides]  # the stage's number stands in front of the block's
        both = all(len(pair) == 2 and pair[0] not in of_block and pair[1] in of_block for pair in places)
        if all(spelled.values()) and both and not any(glued[place] for place in of_block):
            return spelled
    return None


def _ranks(column: Sequence[int]) -> list[int]:
    """Each number's rank among those that occur, from 0."""
    steps = sorted(set(column))
    return [steps.index(one) for one in column]


def _sides(line: Line) -> list[range]:
    """The places of the numbers of each name."""
    counts = [sum(not found.startswith("{") for found in _NUMBER.findall(name)) for name, _ in line.terms]
    return [range(sum(counts[:side]), sum(counts[: side + 1])) for side in range(len(counts))]


def _places(column: Sequence[int]) -> list[int]:
    """Each number's place among them, from 0; nothing where they are not all different and equally far apart."""
    steps = sorted(set(column))
    apart = {after - before for before, after in pairwise(steps)}
    return [steps.index(one) for one in column] if len(steps) == len(column) and len(apart) == 1 else []


def _inner_first(group: Sequence[Line], varying: Sequence[int]) -> list[int]:
    """The numbers of which a layer has several before those that count layers: ``ln_1`` before ``h.1``."""
    glued = _glued(group[0])
    return sorted(varying, key=lambda place: (not glued[place], -place))


def _glued(line: Line) -> list[bool]:
    """Whether each number stands after a letter or an underscore: ``ln_1``."""
    return [
        found.start() > 0 and name[found.start() - 1] != "."
        for name, _ in line.terms
        for found in _NUMBER.finditer(name)
        if not found.group().startswith("{")
    ]


def _affine(base: Sequence[int], other: Sequence[int]) -> str:
    """``{i}``, ``{i+1}`` or ``{2*i+1}`` if the others follow from the base so; else nothing."""
    first, second = next((a, b) for a in range(len(base)) for b in range(len(base)) if base[a] != base[b])
    factor, rest = divmod(other[second] - other[first], base[second] - base[first])
    shift = other[first] - factor * base[first]
    if rest or factor < 1 or any(b != factor * a + shift for a, b in zip(base, other, strict=True)):
        return ""
    left = "i" if factor == 1 else f"{factor}*i"
    return f"{{{left}{shift:+d}}}" if shift else f"{{{left}}}"


def _spelled(group: Sequence[Line], places: dict[int, str]) -> Line:
    counter = iter(range(10_000))

    def spell(name: str) -> str:
        def one(found: re.Match[str]) -> str:
            if found.group().startswith("{"):
                return found.group()
            return places.get(next(counter), found.group())

        return _NUMBER.sub(one, name)

    sides = (group[0].sources, group[0].targets)
    return _as_one(group, *(tuple((spell(name), axes) for name, axes in side) for side in sides))


def _as_one(some: Sequence[Line], sources: Terms, targets: Terms) -> Line:
    """Several lines as one with these terms."""
    return replace(
        some[0],
        sources=sources,
        targets=targets,
        proven=any(line.proven for line in some),
        why=_why(some),
        reads=tuple(name for line in some for name in line.reads),
        writes=tuple(name for line in some for name in line.writes),
        parts=tuple(one for line in some for one in line.single),
    )


def _why(some: Sequence[Line]) -> str:
    """The evidence for lines that become one: a guess if any is one, else that of the first proven line."""
    guess = next((line.why for line in some if line.why == GUESS), "")
    return guess or next((line.why for line in some if line.proven), some[0].why)


def _weight_and_bias(one: str, other: str) -> bool:
    stem, _, last = one.rpartition(".")
    other_stem, _, other_last = other.rpartition(".")
    return stem == other_stem and {*meanings(last), *meanings(other_last)} == {"weight", "bias"}


def _projections(one: str, other: str) -> bool:
    wanted = {"query", "key", "value"}
    ours, theirs = meanings(one), meanings(other)
    apart = ours ^ theirs
    return len(ours & wanted) == len(theirs & wanted) == 1 and apart <= wanted and bool(apart)


def _merged(found: Sequence[Line], index: str, belong: Callable[[str, str], bool]) -> list[Line]:
    """Lines that differ in one part of either name, as one line with an enumerated index."""
    result: list[Line] = []
    rest = list(found)
    while rest:
        first = rest.pop(0)
        together = [first]
        if _mergeable(first, index):
            for line in list(rest):
                near = _mergeable(line, index) and belong(first.sources[0][0], line.sources[0][0])
                if near and _same_layers(line, first) and _joined([*together, line], index) is not None:
                    together.append(line)
        merged = _joined(together, index) if len(together) > 1 else None
        if merged is None:
            result.append(first)
            continue
        for line in together[1:]:
            rest.remove(line)
        result.append(merged)
    return result


def _same_layers(line: Line, other: Line) -> bool:
    """Whether two lines stand for the same numbers on one side: on the other, numbers may tell query and key apart."""
    sides = (
        [{tuple(_NUMBER.findall(one.sources[0][0])) for one in some.single} for some in (line, other)],
        [{tuple(_NUMBER.findall(one.targets[0][0])) for one in some.single} for some in (line, other)],
    )
    return any(one == two for one, two in sides)


def _mergeable(line: Line, index: str) -> bool:
    free = not (_uses(line, index) or any(f"{{{index}" in name for name, _ in line.terms))
    return line.short and not line.copies and free


def _joined(some: Sequence[Line], index: str) -> Line | None:
    sides = []
    for terms in ([line.sources[0] for line in some], [line.targets[0] for line in some]):
        names, axes = [name for name, _ in terms], terms[0][1]
        if any(other != axes for _, other in terms):
            return None
        parts = _split(names)
        if parts is None:
            return None
        before, middles, after = parts
        merged = pattern(middles, index)
        whole = merged.startswith("{") and merged.endswith("}") and merged.count("{") == 1
        if not whole or before[-1:] == "}" or after[:1] == "{":
            return None
        sides.append(((f"{before}{merged}{after}", axes),))
    return _as_one(some, *sides)


def _split(names: Sequence[str]) -> tuple[str, list[str], str] | None:
    """The common beginning, the differing parts and the common end; None when a placeholder is among what differs."""
    before, middles, after = parted([words(name) for name in names])
    if not all(middles) or any("{" in one for one in middles) or len(set(middles)) < len(middles):
        return None
    return before, middles, after
