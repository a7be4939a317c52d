"""Write transformers' handling of a checkpoint as a table."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from porting.errors import Code, Fault
from porting.notation.faults import NotationError, TableError
from porting.notation.name import Name
from porting.notation.table import Table, parse_table
from porting.plan.recipe import Described
from porting.registries import REGISTRY
from porting.registries.conversions import Conversion, Loading, loading
from porting.registries.layout import Axis, Part, Source, factors
from porting.registries.patterns import COUNT, Spelling, Wording, rules

LETTERS = "abcdefgh"
"""Indices of whole axes."""


def imported(
    name: str,
    config: Mapping[str, object],
    tensors: Mapping[str, Described] | None = None,
    *,
    ported: Mapping[str, Described] | None = None,
) -> Table:
    """The table of an entry of transformers' registry for one checkpoint.

    Args:
        config: the checkpoint's config; empty for the usual one of the entry.
        tensors: its tensors; None for those that transformers itself would save.
        ported: the tensors that transformers makes of them, where only they are there.

    >>> table = imported("transformers:mixtral", {"model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 2})
    >>> print(next(rule for rule in table.rules if "moe.gate" in str(rule)))
    layers.{i}.block_sparse_moe.gate.weight = layers.{i}.mlp.gate.weight
    """
    return parse_table(imported_text(name, config, tensors, ported=ported), where=name)


def imported_text(
    name: str,
    config: Mapping[str, object],
    tensors: Mapping[str, Described] | None = None,
    *,
    ported: Mapping[str, Described] | None = None,
) -> str:
    """The text of :func:`imported`'s table; its arguments and errors."""
    return written(loading(name.removeprefix(REGISTRY), config, tensors, ported=ported), name)


def written(found: Loading, name: str) -> str:
    """The text of the table for what transformers does with a checkpoint."""
    every = [worded(one) for one in found.conversions]
    sizes = {name: size for one in every for name, size in one.sizes}
    lines = [
        f"# Made from the registry of transformers, for one checkpoint of {found.architecture}.",
        "",
        "[mapping]",
        f"name = {json.dumps(name)}",
        f'description = "the tensors of {found.architecture} as transformers holds them in memory"',
        "by_name = true",
        "",
    ]
    if sizes:
        lines += ["[sizes]", *(f"{one} = {value}" for one, value in sorted(sizes.items())), ""]
    made = list(rules(every))
    lines += ["[tensors]"]
    lines += [f"{_quoted(one[0])} = {_quoted(other[0])}" for one, other in made if len(one) == len(other) == 1]
    lines += [""]
    for title, names, reason in (
        ("drop", found.unread, "the model does not have it"),
        ("fresh", found.untrained, "the checkpoint does not have it"),
    ):
        if names:
            alone = [Wording((Spelling.of(_checked(one)),), (), ("",)) for one in names]
            lines += [f"[{title}]", *(f"{_quoted(one)} = {_quoted(reason)}" for (one,), _ in rules(alone)), ""]
    if found.ties:
        lines += ["[ties]", *(f"{_quoted(one)} = {_quoted(other)}" for one, other in found.ties.items()), ""]
    for sources, targets in made:
        if len(sources) > 1 or len(targets) > 1:
            lines += ["[[rule]]", f"source = {_listed(sources)}", f"target = {_listed(targets)}", ""]
    return "\n".join(lines)


def worded(conversion: Conversion) -> Wording:
    """One conversion as a rule for its names."""
    terms = [one for source in conversion.sources for one in _terms(source)]
    sources = tuple(spelling for spelling, _ in terms)
    targets = tuple(Spelling.of(_checked(name)) for name in conversion.targets)
    every = [*(axes for _, axes in terms), *conversion.targets.values()]
    if len(every) == 2 and sources[0].count < 0 and _alike(every[0], every[1]):
        return Wording(sources, targets, ("", ""))
    sides = (every[: len(sources)], every[len(sources) :])
    read, made = ({id(part) for axes in side for part in _indices(axes)} for side in sides)
    read |= {id(part) for source in conversion.sources if source.count for part in _indices([(source.count,)])}
    if read != made:
        message = f"{conversion.sources[0].names[0]!r} is not all of what becomes {next(iter(conversion.targets))!r}"
        hint = "elements are left out or repeated, which is nothing that both directions of a rule say"
        raise TableError(Fault(code=Code.REGISTRY_REFUSED, message=message, hint=hint))
    _require_order(conversion)
    counts = [source.count for source in conversion.sources if source.count is not None]
    namer = _Namer(every, len(sources), counts)
    axes = tuple(namer.written(one) for one in every)
    return Wording(sources, targets, axes, tuple(sorted(namer.sizes.items())))


def _require_order(conversion: Conversion) -> None:
    """Rows of one element that an axis is cut into have no index: the targets have to stand in their order."""
    for source in conversion.sources:
        for rows in _rows(source.axes):
            found = [id(part) for axes in conversion.targets.values() for axis in axes for part in axis]
            if [one for one in found if one in rows] != rows:
                message = f"single rows of {source.names[0]!r} change their order"
                hint = "rules pair rows in the order in which they stand"
                raise TableError(Fault(code=Code.REGISTRY_REFUSED, message=message, hint=hint))


def _rows(axes: Sequence[Axis]) -> Iterator[list[int]]:
    """For each concatenation, its segments of one element; none where there is only one."""
    for axis in axes:
        for part in factors(axis):
            if part.segments is not None:
                rows = [id(segment[0]) if segment else 0 for segment in part.segments if not factors(segment)]
                if len(rows) > 1:
                    yield rows
                yield from _rows(part.segments)


def _indices(axes: Sequence[Axis]) -> Iterator[Part]:
    """The indices in axes, those inside of concatenations included."""
    for axis in axes:
        for part in factors(axis):
            if part.segments is None:
                yield part
            else:
                yield from _indices(part.segments)


def _alike(one: Sequence[Axis], other: Sequence[Axis]) -> bool:
    return [factors(axis) for axis in one] == [factors(axis) for axis in other]


def _terms(source: Source) -> list[tuple[Spelling, tuple[Axis, ...]]]:
    for name in source.names:
        _checked(name)
    spelling = Spelling.of(source.names[0]) if source.count is None else Spelling.counted(source.names)
    if spelling is not None:
        return [(spelling, source.axes)]
    if source.count is not None:
        source.count.segments = ((),) * len(source.names)  # names that no index counts: each is a row of its own
    return [(Spelling.of(name), source.axes) for name in source.names]


def _checked(name: str) -> str:
    """A name that a table can hold."""
    try:
        Name.parse(name)
    except NotationError as error:
        message = f"{name!r} is not a name that a table can hold: {error}"
        raise TableError(Fault(code=Code.BAD_NAME, message=message, hint="rename it in the checkpoint")) from error
    return name


class _Namer:
    """Names for the indices of one rule.

    One that is a whole axis on both sides is a letter: its size stands in the shapes.  Of another the name says the
    size, which [sizes] repeats: so the same name has the same size in the whole table.

    Args:
        terms: the axes of each term, of the sources first.
        sources: how many terms are sources.

    Attributes:
        sizes: the sizes that no shape tells, by the index's name.
    """

    def __init__(self, terms: Sequence[Sequence[Axis]], sources: int, counts: Sequence[Part]) -> None:
        self.sizes: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._used: dict[int, int] = defaultdict(int)
        self._counts = {id(one) for part in counts for one in factors((part,))}
        alone = [
            {
                id(inner[0])
                for term in side
                for axis in term
                if len(inner := factors(axis)) == 1 and inner[0].segments is None
            }
            for side in (terms[:sources], terms[sources:])
        ]
        self._whole = alone[0] & alone[1]

    def written(self, axes: Sequence[Axis]) -> str:
        """The axes of a term as they stand in a table."""
        return f" [{' '.join(self._axis(axis) for axis in axes)}]"

    def _axis(self, axis: Axis) -> str:
        parts = [self._part(part) for part in factors(axis)]
        return parts[0] if len(parts) == 1 else f"({' '.join(parts)})" if parts else "1"

    def _part(self, part: Part) -> str:
        if part.segments is not None:
            return f"({'|'.join(' '.join(map(self._part, factors(one))) or '1' for one in part.segments)})"
        if id(part) not in self._names:
            self._names[id(part)] = self._new(part)
        return self._names[id(part)]

    def _new(self, part: Part) -> str:
        if id(part) in self._counts:
            return COUNT
        if id(part) in self._whole:
            self._used[0] += 1
            return LETTERS[self._used[0] - 1] if self._used[0] <= len(LETTERS) else f"y{self._used[0]}"
        self._used[part.size] += 1
        name = f"s{part.size}" + (f"v{self._used[part.size]}" if self._used[part.size] > 1 else "")
        self.sizes[name] = part.size
        return name


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _listed(terms: Sequence[str]) -> str:
    return _quoted(terms[0]) if len(terms) == 1 else f"[{', '.join(map(_quoted, terms))}]"
