"""Infer a module's sizes from shapes: which field a builder means, and what it computes from one."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, product
from types import MappingProxyType
from typing import TypeGuard

from torch import nn

from porting.build import Bounds, bounded
from porting.errors import PortingError
from porting.suggesting.subjects.building import (
    SIZES,
    Builder,
    BuiltModule,
    build_for,
    defaults_of,
    named_fields,
    shapes_for,
    with_fields,
)
from porting.suggesting.subjects.config_fields import (
    WORDS,
    Role,
    composed_role,
    config_number,
    fields_of,
    normal,
    numbers_by_stage,
    parts_of,
    ratio,
    role_of,
    stage_field,
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

COMPUTED = (Role.INNER, Role.VOCABULARY, Role.PATCH)
"""Sizes that modules compute from others, or have as a constant."""

FOLLOWED = (Role.DEPTH, Role.HEADS, Role.GROUPS, Role.IMAGE, Role.LABELS)
"""Numbers on which others depend, as on the width: a module that has one of these as a constant is met with all of the
checkpoint's sizes."""

LAYERS = "layer_types"

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


def solved_sizes(
    into: Builder,
    names: Sequence[str],
    config: Mapping[str, object],
    shapes: Iterable[Sequence[int]],
    *,
    asked: Mapping[str, str] = MappingProxyType({}),
    better: bool = False,
) -> dict[str, str] | None:
    """The fields that a builder means by names that say nothing.

    Each name is given each whole number of the config in turn; the one with which most of the module's tensors have a
    shape of the reference's is meant, and then the one with which it has as many numbers in all, which tells sizes of
    fused tensors.  Of several, as for the number of heads, it is the one that the name is short for, or that nothing
    else takes: whoever proves the table will see whether it is right.

    Args:
        into: what builds the module.
        config: of a small model, whose sizes are different from one another where they can be.
        shapes: of the reference's tensors, built with this config.
        asked: the fields of the builder's other names.  Those of a letter or two may have been misunderstood.
        better: only sizes that shapes tell, as with others fewer of the module's tensors have a shape of the
            reference's, or that the name is short for.

    Returns:
        The field for each name, and for each other one of a letter or two; None where the module cannot be built with
        any.
    """
    told = named_fields(into)
    short = {name: field for name, field in asked.items() if len(name) <= SHORT and name not in told}
    taken = [field for name, field in asked.items() if name not in short]
    return _Sizes(into, config, shapes, taken).solved([*short, *names], short, better=better)


def better_sizes(
    into: Builder, built: BuiltModule, config: Mapping[str, object], shapes: Iterable[Sequence[int]]
) -> dict[str, str]:
    """The fields for names that may have been misunderstood.

    These are names of a letter or two, two names that were given one field, and defaults that no field replaced.

    What they have is replaced only if more of the module's tensors have a shape of the reference's then, or if the
    module has as many numbers as the reference then and has not without.

    Args:
        into: what builds the module.
        built: what it built, with what it asked for and the defaults that it kept.
        config: of a small model.
        shapes: of the reference's tensors, built with this config.

    Returns:
        The better field for each of these names that has one.
    """
    asked, told = built.asked, named_fields(into)
    names = [name for name, field in asked.items() if len(name) <= SHORT and role_of(field) in SIZES]
    names += [name for name, value in built.kept.items() if _is_size(value) or numbers_by_stage(value)]
    names += [name for name in _doubtful(asked) if name not in names]
    names = [name for name in names if name not in told]
    taken = {field for name, field in asked.items() if name not in names}
    sizes = _Sizes(into, config, shapes, taken)
    found = sizes.improved(names, asked) if names else {}
    found |= sizes.unusual(_unusual_sizes(built, config, {*found, *told}), found)
    covered = {role_of(field) for field in {**asked, **found}.values()}
    for name in built.kept.keys() - found.keys() - told.keys():  # no shape tells of heads: letters may
        roles = [role for role in abbreviated(name) if role not in covered]
        field = next(fields_of(roles[0], config), None) if len(roles) == 1 and _is_size(built.kept[name]) else None
        if field is not None and sizes.alike({**found, name: field}) >= sizes.alike(found):
            found[name] = field
    return found


_SMALL = (Role.STATE, Role.STEP_RANK, Role.KERNEL)
"""Small sizes that a checkpoint and a small model may have in another order."""

_SHAPELESS = (Role.HEADS, Role.HEAD_SIZE)
"""Sizes of which a module asks for one, and which no shape shows where heads stand in one tensor."""


def sizes_by_default(
    into: Builder,
    asked: Mapping[str, str],
    config: Mapping[str, object],
    shapes: Iterable[Sequence[int]],
    checkpoint: Mapping[str, object],
) -> dict[str, str]:
    """The fields for names that shapes do not explain, by the defaults of a builder that is made for the checkpoint.

    It is made for it where most of the sizes that it is given are its defaults.  A default that it kept is the
    checkpoint's number of heads or their size, if it has the value, no name was given either, and the name says nothing
    else.  And a name whose
    default is another field's, which no name has by its own default, means that one, unless the name says what it was
    given for.  No fewer of the module's tensors may have a shape of the reference's then.

    Args:
        into: what builds the module.
        asked: what it asks for -> the config's field that it got.
        config: of a small model.
        shapes: of the reference's tensors, built with this config.
        checkpoint: the checkpoint's config.
    """
    defaults = {name: one for name, one in defaults_of(into).items() if _is_size(one)}
    computed = [{text: size for size, text in _computed_sizes(one)} for one in (checkpoint, config)]
    theirs, own = ({**dict(_every_size(one)), **more} for one, more in zip((checkpoint, config), computed, strict=True))
    right = {name for name, value in defaults.items() if name in asked and theirs.get(asked[name]) == value}
    wrong = [name for name in defaults if name in asked and name not in right]
    if len(right) <= len(wrong):
        return {}
    sizes = _Sizes(into, config, shapes)
    if (before := sizes.alike({})) > -math.inf:  # else some name is misunderstood, whatever it says
        given = {asked[name] for name in right}
        told = {name for name in wrong if _role(asked[name]) in {role_of(name), composed_role(name)} - {None}}
        wrong = [name for name in wrong if name not in told or asked[name] in given]
    left = {field for name, field in asked.items() if name not in wrong}
    usual = {one for one in theirs if one in computed[0] or _role(one) in {*SIZES, *_SMALL}}
    free = [one for one in theirs if one in own and one in usual - left]
    found: dict[str, str] = {}
    for name in [*wrong, *(one for one in defaults if one not in asked)]:
        same = [one for one in free if theirs[one] == defaults[name] and one not in found.values()]
        says = {role_of(name), composed_role(name)} - {None, Role.GROUPS, *_SHAPELESS}
        if name not in asked:
            covered = {_role(one) for one in (*left, *found.values())}
            open_ = () if says or covered & {*_SHAPELESS} else _SHAPELESS
            same = sorted((one for one in same if _role(one) in open_), key=lambda one: open_.index(_role(one)))
        roles, parts = [role_of(name), composed_role(name)], parts_of(name)
        same.sort(key=lambda one: (_role(one) not in roles, not {*parts} & {*parts_of(one)}))
        found |= {name: same[0]} if same else {}
    return found if found and -math.inf < sizes.alike(found) >= before else {}


def _role(field: str) -> Role | None:
    """The role of a field, which may stand in a part of the config."""
    return role_of(field.rpartition(".")[2])


def _doubtful(asked: Mapping[str, str]) -> list[str]:
    """The names that were given one field with others, and may mean another size: ``hidden_size`` beside ``dim``.

    Two texts may well have one vocabulary, and the two sides of a square are one size.
    """
    sides = Counter((_side(name), field) for name, field in asked.items())
    given = Counter(field for _, field in sides)
    return [
        name
        for name, field in asked.items()
        if given[field] > 1 and role_of(field.rpartition(".")[2]) in SIZES - {Role.VOCABULARY}
    ]


_SIDES = frozenset({"height", "width", "h", "w", "rows", "cols", "columns", "x", "y"})


def _side(name: str) -> str:
    """The name of a size without the word for one of the two sides that have it.

    >>> _side("patch_height") == _side("patch_width"), _side("image_height") == _side("patch_height")
    (True, False)
    """
    words = normal(name).split("_")
    return "_".join("side" if word in _SIDES else word for word in words) if len(words) > 1 else name


def _unusual_sizes(built: BuiltModule, config: Mapping[str, object], known: Collection[str]) -> list[tuple[str, str]]:
    """Other meanings of names besides a field that is a size, each with a field.

    A multiple that sizes are rounded up to is 1 where none are, and so is the number of groups in multi-query
    attention, whatever a config calls the number of its key heads.  What a builder has a factor for is a ratio.  The
    width of a feed-forward part may hold its gate as well, or be what the gated one is two thirds of.
    """
    kept = [(name, value) for name, value in built.kept.items() if name not in known]
    found = [(name, field) for name, one in kept if type(one) is float and (field := ratio(config, whole=False))]
    found += [(name, "1") for name, one in kept if _is_size(one)]
    for name, field in built.asked.items():
        if name not in known and role_of(field) is Role.GROUPS:
            found.append((name, "1"))
        elif name not in known and (
            role_of(field) is Role.INNER or field in {ratio(config), ratio(config, whole=False)}
        ):
            found += [(name, f"2 * {field}"), (name, f"3 * {field} // 2")]
            found += [(name, f"{field} // 2")] if role_of(field) is Role.INNER else []
    return found


def better_switches(
    into: Builder, names: Sequence[str], config: Mapping[str, object], shapes: Iterable[Sequence[int]]
) -> dict[str, str]:
    """The values of switches that are off, where they should be on: ``{"qkv_bias": "true"}``.

    Something is there where more of the module's tensors have a shape of the reference's with it than without, or
    where its biases and gains come nearer to as many numbers as the reference's have: one side may have them in one.
    """
    sizes = _Sizes(into, config, shapes)
    found: dict[str, str] = {}
    for name in names:
        more = {**found, name: "true"}
        if sizes.alike(more) > sizes.alike(found) or sizes.missing_numbers(more) < sizes.missing_numbers(found):
            found[name] = "true"
    return found


def _in_one_axis(shapes: Shapes) -> int:
    """How many numbers there are in tensors of one axis."""
    return sum(shape[0] * count for shape, count in shapes.items() if len(shape) == 1)


def untold(into: Builder, names: Iterable[str], config: Mapping[str, object], within: Bounds) -> list[str]:
    """The names of a builder whose fields are guesses: no shape changes with them, and no name says what they mean.

    Args:
        into: with the fields that were found for the names.
        config: of a small model.
    """
    given = named_fields(into)
    found: list[str] = []
    for name in names:
        field = given.get(name, "")
        if (
            hinted(name) is not None
            or abbreviated(name)
            or role_of(name) is not None
            or not _is_size(config.get(field))
        ):
            continue
        other = next((one for one, size in _every_size(config) if size != config[field]), None)
        try:
            ways = [with_fields(into, {**given, name: one}, config) for one in (field, other) if one is not None]
            shapes = [shapes_for(way, config, within) for way in ways]
        except PortingError:
            continue
        if len(shapes) > 1 and shapes[0] == shapes[1]:
            found.append(name)
    return found


def own_sizes(
    into: Builder,
    config: Mapping[str, object],
    small: nn.Module,
    twin: Mapping[str, object],
    within: Bounds,
    rows: Collection[tuple[int, int]] = (),
) -> dict[str, int]:
    """The fields of the config that a module computes from others, and what it makes of them with a twin's sizes.

    A module may round a multiple of its width up, or have a constant number of words, and so have the checkpoint's
    sizes with the checkpoint's width alone.  It is built with the checkpoint's sizes as well, without values and with
    the twin's depth: where an axis has the size of a field there, and none of these has the twin's, the module has a
    size of its own.

    Args:
        within: how large the module may become.
        rows: of each tensor, the rows that the checkpoint's has and the twin's.  A table of positions may have some
            more than the config says.

    Returns:
        Field -> the size that the module has there with the twin's config; fields that it follows are left out.
    """
    deep = {name: twin[name] for name in config if name in twin and (role_of(name) is Role.DEPTH or name == LAYERS)}
    try:
        real = shapes_for(into, {**config, **deep}, within)
    except PortingError:
        return {}
    ours = {name: tuple(one.shape) for name, one in named_tensors(small) if not nn.parameter.is_lazy(one)}
    known = {name: len(shape) for name, shape in real.items() if name in ours and len(ours[name]) == len(shape)}
    axes = [(real[name][axis], ours[name][axis]) for name, count in known.items() for axis in range(count)]
    pairs = ((name, config[name], twin.get(name)) for name in config)
    sizes = {name: (theirs, mine) for name, theirs, mine in pairs if _is_size(theirs) and _is_size(mine)}
    found, width = {}, config_number(config, Role.HIDDEN)
    staged = stage_field(Role.HIDDEN, config) is not None  # what stands alone is the width of the stem then
    for name, (size, follows) in sizes.items():
        if role_of(name) is Role.POSITIONS:
            more = {theirs - size for theirs, mine in rows if theirs != mine and theirs - size == mine - follows}
            seen = {mine - count for count in more for theirs, mine in axes if theirs == size + count}
            if len(seen) == 1 and follows not in seen:
                found[name] = seen.pop()
            continue
        if role_of(name) in FOLLOWED or size == follows or (size == width and not staged):
            continue
        seen = {mine for theirs, mine in axes if theirs == size}
        # Two of them may be fused, as the gate with what it opens.
        seen = seen or {mine // 2 for theirs, mine in axes if theirs == 2 * size and mine % 2 == 0}
        others = {mine for theirs, mine in sizes.values() if theirs == size}
        own = seen - others
        constant = own == {size}  # a part may have it whatever it is given, and another one follow
        if constant or (len(own) == 1 and follows not in seen and role_of(name) in COMPUTED):
            found[name] = own.pop()
    return found


def told_apart(
    into: Builder,
    asked: Mapping[str, str],
    config: Mapping[str, object],
    shapes: Iterable[Sequence[int]],
    twin: Mapping[str, object],
    within: Bounds,
) -> dict[str, str]:
    """The fields for names that were given one field, where the checkpoint's own shapes tell another.

    A small model may have two sizes alike that the checkpoint has not, as the width of a tower and what both are
    projected to.

    Args:
        asked: what the builder asked for, for the small model.
        config: the checkpoint's.
        shapes: of its tensors.
        twin: the small model's config, whose depth is enough.
        within: how large the module may become, without values.
    """
    names = [name for name in _doubtful(asked) if not _number(name)]
    if not names:  # a number of layers is the size of no axis
        return {}
    wanted: Shapes = Counter(map(_sizes, shapes))
    axes = {size for shape in wanted for size in shape}
    sizes = {name: one for name, one in _every_size(config) if one in axes}
    deep = {name: twin[name] for name in config if name in twin and (role_of(name) is Role.DEPTH or name == LAYERS)}

    def alike(fields: Mapping[str, str]) -> float:
        told = {**named_fields(into), **fields}
        try:
            built = shapes_for(with_fields(into, told, config), {**config, **deep}, within)
        except PortingError:
            return -math.inf
        found: Shapes = Counter(_sizes(shape) for shape in built.values() if shape)
        return 2 * (found & wanted).total() - found.total()

    found: dict[str, str] = {}
    for name in names:
        ways = [found, *({**found, name: field} for field in sizes if field != asked[name])]
        found = max(ways, key=alike)  # the first of equals
    return found


def _every_size(config: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    """The fields that may be sizes, also those of the parts, the usual ones first."""
    for name, value in config.items():
        if _is_size(value) and not name.endswith("_id"):
            yield name, value
    for part, fields in config.items():
        if isinstance(fields, Mapping):
            yield from (
                (f"{part}.{name}", one) for name, one in fields.items() if _is_size(one) and role_of(name) in SIZES
            )


def _is_size(value: object) -> TypeGuard[int]:
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


_NUMBERS = (frozenset({Role.DEPTH}), frozenset({Role.HEADS, Role.GROUPS}))
"""The roles of names of counts, as opposed to widths."""


def _number(name: str) -> frozenset[Role] | None:
    """The roles that a name of a number may have; None for other names, and for letters, which may mean anything."""
    role = None if len(name) <= SHORT else role_of(name) or composed_role(name)
    return next((some for some in _NUMBERS if role in some), None)


class _Sizes:
    def __init__(
        self,
        into: Builder,
        config: Mapping[str, object],
        shapes: Iterable[Sequence[int]],
        taken: Iterable[str] = (),
    ) -> None:
        self._into, self._config, self._taken = into, config, frozenset(taken)
        self._wanted: Shapes = Counter(map(_sizes, shapes))
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
            if _is_size(value) and role_of(name) in SIZES:
                self._fields.setdefault(value, []).append(name)
            elif _is_size(value) and not name.endswith("_id"):  # of a token
                others.append((value, name))
            elif isinstance(value, list) and numbers_by_stage(value):
                self._fields.setdefault(tuple(value), []).append(name)
                others += [(one, f"{name}.{stage}") for stage, one in enumerate(value) if _is_size(one)]
        others += _computed_sizes(config)
        self._unusual: dict[Size, str] = {size: name for size, name in reversed(others) if size not in self._fields}

    def solved(self, names: Sequence[str], asked: Mapping[str, str], *, better: bool) -> dict[str, str] | None:
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
        for name in (one for one in names if _number(one) is None):  # one without a usual name has to be shown
            ways = ({**values, name: size} for size in self._unusual)
            best = max(ways, key=self._alike, default=values)
            alike, usual = self._alike(best), self._alike(values)
            called = self._is_count(name) and not self._likely(name, values[name])[0]
            values = best if alike > usual or (called and alike == usual) else values
        return values

    def _allowed(self, name: str) -> list[Size]:
        """The sizes that a name may mean: a number of layers or heads is none of channels, whatever shapes fit."""
        kind = _number(name)
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
        return Counter(_sizes(one.shape) for one in tensors if one.ndim)


def _sizes(shape: Iterable[int]) -> tuple[int, ...]:
    """The sizes of a tensor's axes in any order, without those of one element."""
    return tuple(sorted(size for size in shape if size != 1))


def _computed_sizes(config: Mapping[str, object]) -> list[tuple[int, str]]:
    """Sizes that no field has and that builders ask for, each with how it is computed."""
    return [*_patches(config), *_frames(config)]


def _patches(config: Mapping[str, object]) -> Iterator[tuple[int, str]]:
    """How many patches an image has, and positions with them: a builder of a ViT may ask for either."""
    image, patch = (next(fields_of(role, config), "") for role in (Role.IMAGE, Role.PATCH))
    sizes = [config.get(image), config.get(patch)]
    if _is_size(sizes[0]) and _is_size(sizes[1]):
        count = (sizes[0] // sizes[1]) ** 2
        for more in (0, 1, 2):
            yield count + more, f"({image} // {patch}) ** 2" + (f" + {more}" if more else "")


def _frames(config: Mapping[str, object]) -> Iterator[tuple[int, str]]:
    """How many frames a sound has, of which a convolution makes one place of two: the builder may ask for either."""
    places = config.get(SOUND_PLACES)
    if _is_size(places) and _is_size(config.get(MELS)):
        yield 2 * places, f"2 * {SOUND_PLACES}"


def _matrices(shapes: Shapes) -> Shapes:
    """The shapes of two axes or more: a module may keep tables of its own of one, as of frequencies."""
    return Counter({shape: count for shape, count in shapes.items() if len(shape) > 1})


def _total(shapes: Shapes) -> int:
    """How many numbers tensors of these shapes hold."""
    return sum(math.prod(shape) * count for shape, count in shapes.items())
