"""Search the sizes with which most of a module's tensors have a shape of the reference's."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, product
from typing import TypeGuard

from torch import nn

from porting.build import Bounds, bounded
from porting.errors import PortingError
from porting.suggesting.subjects.building import (
    SIZES,
    Builder,
    BuiltModule,
    build_for,
    named_fields,
    with_fields,
)
from porting.suggesting.subjects.config_fields import (
    WORDS,
    Role,
    composed_role,
    fields_of,
    normal,
    numbers_by_stage,
    role_of,
)
from porting.target import named_tensors

Shapes = Counter[tuple[int, ...]]
Size = int | tuple[float, ...]
"""A whole number, or one for each stage."""

USUAL = (Role.VOCABULARY, Role.HIDDEN, Role.POSITIONS, Role.SEGMENTS, Role.HEADS, Role.GROUPS, Role.DEPTH, Role.INNER)
"""Sizes that shapes do not tell apart, in the order in which builders ask for them."""

MOST_USUAL = 4
"""How many names of a role may be shortened to their first letters."""

_NO_COUNT = frozenset({Role.HIDDEN, Role.INNER})
"""Sizes that are no number of something, as ``nh`` is."""

ALONE = "a size that nothing else is given"

NEAR = 4
"""A size is tried together with another one where it costs the shapes of so many tensors at most."""

SHORT = 2
"""Names of so many letters mean different sizes in different projects."""

LARGER, SPARE = 64, 1 << 22
"""The largest module that is built with a size on trial, such as a number of layers: so many times as large as the
reference, and so many numbers more."""

MOST_UNUSUAL = 8
"""The number of names for which pairs are tried that may stand for a number other than a size."""

MELS, SOUND_PLACES = "num_mel_bins", "max_source_positions"
"""The fields of a model of sounds: bands, and places that it has after its convolutions."""

MOST_SHOWN = 3
"""The number of other values that are tried to see whether a name changes shapes or makes the builder fail."""

ROUNDS = 12
"""How often each size is searched again, with what was found for the others."""


def _in_one_axis(shapes: Shapes) -> int:
    """How many numbers there are in tensors of one axis."""
    return sum(shape[0] * count for shape, count in shapes.items() if len(shape) == 1)


def every_size(config: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    """The fields that may be sizes, also those of the parts, the usual ones first."""
    for name, value in config.items():
        if is_size(value) and not name.endswith("_id"):
            yield name, value
    for part, fields in config.items():
        if isinstance(fields, Mapping):
            yield from (
                (f"{part}.{name}", one) for name, one in fields.items() if is_size(one) and role_of(name) in SIZES
            )


def is_size(value: object) -> TypeGuard[int]:
    """Whether a value may be the size of an axis or a number of parts."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


@cache
def hinted(name: str) -> Role | None:
    """The role that a name may be short for.

    >>> hinted("npos"), hinted("nseg"), hinted("d")
    (<Role.POSITIONS: 'positions'>, <Role.SEGMENTS: 'segments'>, None)
    """
    stem = re.sub(r"^(num|max|n)?_?", "", normal(name)).rstrip("_")
    stem = stem[:-1] if stem.endswith("s") and len(stem) > 3 else stem
    if len(stem) < 3:
        return None
    words = ((role, part) for role, known in WORDS.items() for word in known for part in word.split("_"))
    return next((role for role, part in words if part.startswith(stem)), None)


@cache
def abbreviated(name: str) -> dict[Role, int]:
    """The roles that a short name may stand for: its letters begin the words of a usual field.

    Returns:
        Role -> the place of that field in the list of the role's names, the most usual of which is the first.

    >>> abbreviated("A"), abbreviated("nh"), abbreviated("heads")
    ({<Role.HEADS: 'heads'>: 0}, {<Role.HEADS: 'heads'>: 1, <Role.DEPTH: 'depth'>: 0}, {})
    """
    letters = normal(name).replace("_", "")
    count = letters[:1] == "n" and len(letters) > 1
    letters = letters[count:]
    if not letters.isalpha() or len(letters) > SHORT:
        return {}
    found: dict[Role, int] = {}
    for role in USUAL:
        for place, field in enumerate(WORDS[role][:MOST_USUAL]):
            words = re.sub(r"^(num|max|n)_", "", field).split("_")
            if "".join(word[0] for word in words).startswith(letters) and not (count and role in _NO_COUNT):
                found.setdefault(role, place)
    return found


_COUNTS = (frozenset({Role.DEPTH}), frozenset({Role.HEADS, Role.GROUPS}))
"""The roles of names of counts, as opposed to widths."""


def counted_roles(name: str) -> frozenset[Role] | None:
    """The roles that a name of a number may have; None for other names, and for letters, which may mean anything."""
    role = None if len(name) <= SHORT else role_of(name) or composed_role(name)
    return next((some for some in _COUNTS if role in some), None)


class SizeFit:
    """A builder, and the shapes that its module's tensors should have; it is built once for each choice of sizes.

    Args:
        into: what builds the module.
        config: of a small model.
        shapes: of the reference's tensors, built with this config.
        taken: fields that names have for certain: others come first.
    """

    def __init__(
        self,
        into: Builder,
        config: Mapping[str, object],
        shapes: Iterable[Sequence[int]],
        taken: Iterable[str] = (),
    ) -> None:
        self._into, self._config, self._taken = into, config, frozenset(taken)
        self._wanted: Shapes = Counter(map(sorted_sizes, shapes))
        tensors, numbers = self._wanted.total(), _total(self._wanted)
        self._within = Bounds(parameters=LARGER * (tensors + 8), nbytes=8 * (LARGER * numbers + SPARE))
        shared = max((math.prod(shape) for shape, count in self._wanted.items() if count > 1), default=0)
        self._totals = {_total(self._wanted), _total(self._wanted) - shared}  # an output layer may be a shared table
        wide = _matrices(self._wanted)
        tied = {math.prod(shape) for shape, count in wide.items() if count > 1}
        self._in_matrices = {_total(wide) - one for one in (0, *tied)}
        self._known: dict[tuple[tuple[str, Size], ...], Shapes | None] = {}
        self._fields: dict[Size, list[str]] = {}
        others: list[tuple[int, str]] = []  # sizes that have no usual name, and the stages' own
        for name, value in config.items():
            if is_size(value) and role_of(name) in SIZES:
                self._fields.setdefault(value, []).append(name)
            elif is_size(value) and not name.endswith("_id"):  # of a token
                others.append((value, name))
            elif isinstance(value, list) and numbers_by_stage(value):
                self._fields.setdefault(tuple(value), []).append(name)
                others += [(one, f"{name}.{stage}") for stage, one in enumerate(value) if is_size(one)]
        others += computed_sizes(config)
        self._unusual: dict[Size, str] = {size: name for size, name in reversed(others) if size not in self._fields}

    def solved(self, names: Sequence[str], asked: Mapping[str, str], *, better: bool) -> dict[str, str] | None:
        """The field for each name; None where nothing can be built, or, if ``better``, where no size is better."""
        least: Size = min((size for size in self._fields if isinstance(size, int)), default=1)
        has = {name: size for name in names for size, fields in self._fields.items() if asked.get(name) in fields}
        values = self._climbed(names, {**dict.fromkeys(names, least), **has})
        best = self._alike(values)
        others = [self._alike({**values, name: size}) for name in names for size in self._fields]
        short = all(self._likely(name, values[name])[1] > -math.inf for name in names)
        if best == -math.inf or (better and not short and best <= min(others, default=best)):
            return None
        fields: dict[str, str] = {}
        for name in names:
            fields[name] = self._field(name, values, set(fields.values()))
        return fields

    def improved(self, names: Sequence[str], asked: Mapping[str, str]) -> dict[str, str]:
        """The fields of the names that fit better than what they have: a field of ``asked``, or their default."""
        has = {name: size for name in names for size, fields in self._fields.items() if asked.get(name) in fields}
        names = [name for name in names if self._shows(name, has)]
        values = self._climbed(names, has)
        for name in names:
            kept = {other: size for other, size in values.items() if other != name}
            kept |= {name: has[name]} if name in has else {}
            if self._score(kept)[:2] >= self._score(values)[:2]:
                values = kept
        fields: dict[str, str] = {}
        for name, size in values.items():
            if has.get(name) != size:
                fields[name] = self._field(name, values, {*self._taken, *fields.values()})
        return fields

    def _climbed(self, names: Sequence[str], values: dict[str, Size]) -> dict[str, Size]:
        """The best sizes, changing one at a time, and two at once where no single one is better."""
        for _ in range(ROUNDS):
            before = values
            for name in names:
                sizes = self._allowed(name)
                values = max(({**values, name: size} for size in sizes), key=self._score, default=values)
            if values != before:
                continue
            near = {name: self._near(name, values) for name in names}
            ways = (
                {**values, one: size, two: other}
                for one, two in combinations(names, 2)
                for size, other in product(near[one], near[two])
            )
            values = max([values, *ways], key=self._score)
            if values == before:
                break
        for name in (one for one in names if counted_roles(one) is None):  # one without a usual name has to be shown
            ways = ({**values, name: size} for size in self._unusual)
            best = max(ways, key=self._alike, default=values)
            alike, usual = self._alike(best), self._alike(values)
            called = self._is_count(name) and not self._likely(name, values[name])[0]
            values = best if alike > usual or (called and alike == usual) else values
        return values

    def _allowed(self, name: str) -> list[Size]:
        """The sizes that a name may mean: a number of layers or heads is none of channels, whatever shapes fit."""
        kind = counted_roles(name)
        if kind is None:
            return list(self._fields)
        return [
            size
            for size, fields in self._fields.items()
            if isinstance(size, tuple) or any(role_of(field) in kind for field in fields)
        ]

    def _shows(self, name: str, values: Mapping[str, Size]) -> bool:
        """Whether a name changes the shapes of what is built: of the many fields of a large config few do."""
        plain = self._built(values)
        return any(
            self._built({**values, name: size}) != plain for size in [*self._fields, *self._unusual][:MOST_SHOWN]
        )

    def _is_count(self, name: str) -> bool:
        """Whether a name asks for a number of positions or patches, of which a config of pictures has none."""
        role = role_of(name) or composed_role(name)
        return role is Role.POSITIONS or "patches" in normal(name)

    def _near(self, name: str, values: Mapping[str, Size]) -> list[Size]:
        """The sizes with which the module is nearly as much like the reference: two tables may have to change rows."""
        least = self._alike(values) - NEAR
        return [size for size in self._allowed(name) if self._alike({**values, name: size}) >= least]

    def _score(self, values: Mapping[str, Size]) -> tuple[tuple[float, bool], int, tuple[tuple[bool, float, int], ...]]:
        """How good sizes are: like the reference first, each field once, and then in the usual order."""
        used = Counter(values.values())
        used.update(size for size, fields in self._fields.items() for field in fields if field in self._taken)
        twice = sum(max(many - len(self._fields.get(size, ())), 0) for size, many in used.items())
        return self._fit(values), -twice, tuple(self._likely(name, size) for name, size in values.items())

    def _called(self, size: Size) -> str:
        """Return a field that has this size."""
        return self._fields[size][0] if size in self._fields else self._unusual[size]

    def _likely(self, name: str, size: Size) -> tuple[bool, float, int]:
        """The evidence for a size besides shapes: the name, and how usual it is to come first."""
        roles = {role for field in self._fields.get(size, ()) if (role := role_of(field)) is not None}
        usual = min((USUAL.index(role) for role in roles if role in USUAL), default=len(USUAL))
        short = abbreviated(name)
        return hinted(name) in roles, -min((short[role] for role in roles if role in short), default=math.inf), -usual

    def _fit(self, values: Mapping[str, Size]) -> tuple[float, bool]:
        """How like the reference the module is, and whether it has as many numbers in all."""
        found = self._built(values)
        return self._alike(values), found is not None and _total(found) in self._totals

    def _alike(self, values: Mapping[str, Size]) -> float:
        return self._surplus(self._built(values))

    def alike(self, fields: Mapping[str, str]) -> float:
        """How many more of the module's tensors have a shape that the reference has than have none."""
        return self._surplus(self._shapes(fields, self._config))

    def unusual(self, ways: Sequence[tuple[str, str]], found: Mapping[str, str]) -> dict[str, str]:
        """The fields with which the module is more like the reference: each tried alone, and in pairs."""
        best, chosen = self._fit_of(found), dict[str, str]()
        if best[1]:  # as many numbers in matrices as the reference: nothing is missing
            return chosen
        pairs = [(one, two) for one, two in combinations(ways[:MOST_UNUSUAL], 2) if one[0] != two[0]]
        for some in [*((one,) for one in ways), *pairs]:
            more = {**chosen, **dict(some)}
            if (fit := self._fit_of({**found, **more})) > best:
                best, chosen = fit, more
        return chosen

    def _fit_of(self, fields: Mapping[str, str]) -> tuple[float, bool]:
        built = self._shapes(fields, self._config)
        return self._surplus(built), built is not None and _total(_matrices(built)) in self._in_matrices

    def missing_numbers(self, fields: Mapping[str, str]) -> float:
        """The difference between module and reference in the number of elements of biases and gains."""
        found = self._shapes(fields, self._config)
        return math.inf if found is None else abs(_in_one_axis(found) - _in_one_axis(self._wanted))

    def _surplus(self, found: Shapes | None) -> float:
        return -math.inf if found is None else 2 * (found & self._wanted).total() - found.total()

    def _built(self, values: Mapping[str, Size]) -> Shapes | None:
        key = tuple(values.items())
        if key not in self._known:
            sizes = {*self._fields, *self._unusual}  # a config that nests its sizes may have none
            fields = {name: self._called(size) for name, size in values.items() if size in sizes}
            self._known[key] = self._shapes(fields, self._config)
        return self._known[key]

    def _field(self, name: str, values: Mapping[str, Size], taken: set[str]) -> str:
        """The field with the size that was found; of several the one that the module takes for that."""
        hint = hinted(name)
        fields = self._fields.get(values[name]) or [self._called(values[name])]
        ways = sorted(fields, key=lambda one: (role_of(one) is not hint, one in taken, role_of(one) not in SIZES))
        deep = [field for field in ways if role_of(field) is Role.DEPTH]
        if len(ways) > 1 and deep:
            ways = deep if self._grows(name, values) else [field for field in ways if field not in deep]
        return ways[0]

    def _grows(self, name: str, values: Mapping[str, Size]) -> bool:
        """Whether one more makes more tensors, as one more layer does."""
        fields = {**{one: self._called(size) for one, size in values.items()}, name: ALONE}
        size = values[name]
        sizes = (size, size + 1) if isinstance(size, int) else (size, (*size, 1))
        one, more = (self._shapes(fields, {**self._config, ALONE: size}) for size in sizes)
        return one is not None and more is not None and more.total() > one.total()

    def _shapes(self, fields: Mapping[str, str], config: Mapping[str, object]) -> Shapes | None:
        """The shapes of the built module; None if it cannot be built."""
        try:
            told = {**named_fields(self._into), **fields}
            with bounded(self._within):
                built: BuiltModule = build_for(with_fields(self._into, told, config), config)
        except PortingError:
            return None
        tensors = (one for _, one in named_tensors(built.module) if not nn.parameter.is_lazy(one))
        return Counter(sorted_sizes(one.shape) for one in tensors if one.ndim)


def sorted_sizes(shape: Iterable[int]) -> tuple[int, ...]:
    """The sizes of a tensor's axes in any order, without those of one element."""
    return tuple(sorted(size for size in shape if size != 1))


def computed_sizes(config: Mapping[str, object]) -> list[tuple[int, str]]:
    """Sizes that no field has and that builders ask for, each with how it is computed."""
    return [*_patches(config), *_frames(config)]


def _patches(config: Mapping[str, object]) -> Iterator[tuple[int, str]]:
    """How many patches an image has, and positions with them: a builder of a ViT may ask for either."""
    image, patch = (next(fields_of(role, config), "") for role in (Role.IMAGE, Role.PATCH))
    sizes = [config.get(image), config.get(patch)]
    if is_size(sizes[0]) and is_size(sizes[1]):
        count = (sizes[0] // sizes[1]) ** 2
        for more in (0, 1, 2):
            yield count + more, f"({image} // {patch}) ** 2" + (f" + {more}" if more else "")


def _frames(config: Mapping[str, object]) -> Iterator[tuple[int, str]]:
    """How many frames a sound has, of which a convolution makes one place of two: the builder may ask for either."""
    places = config.get(SOUND_PLACES)
    if is_size(places) and is_size(config.get(MELS)):
        yield 2 * places, f"2 * {SOUND_PLACES}"


def _matrices(shapes: Shapes) -> Shapes:
    """The shapes of two axes or more: a module may keep tables of its own of one, as of frequencies."""
    return Counter({shape: count for shape, count in shapes.items() if len(shape) > 1})


def _total(shapes: Shapes) -> int:
    """How many numbers tensors of these shapes hold."""
    return sum(math.prod(shape) * count for shape, count in shapes.items())
