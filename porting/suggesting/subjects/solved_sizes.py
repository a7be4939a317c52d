"""Infer a module's sizes from shapes: which field a builder means, and what it computes from one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from torch import nn

from porting.build import Bounds
from porting.errors import PortingError
from porting.suggesting.subjects.building import (
    SIZES,
    Builder,
    BuiltModule,
    defaults_of,
    named_fields,
    shapes_for,
    with_fields,
)
from porting.suggesting.subjects.config_fields import (
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
from porting.suggesting.subjects.size_fit import (
    SHORT,
    Shapes,
    SizeFit,
    abbreviated,
    computed_sizes,
    counted_roles,
    every_size,
    hinted,
    is_size,
    sorted_sizes,
)
from porting.target import named_tensors

COMPUTED = (Role.INNER, Role.VOCABULARY, Role.PATCH)
"""Sizes that modules compute from others, or have as a constant."""

FOLLOWED = (Role.DEPTH, Role.HEADS, Role.GROUPS, Role.IMAGE, Role.LABELS)
"""Numbers on which others depend, as on the width: a module that has one of these as a constant is met with all of the
checkpoint's sizes."""

LAYERS = "layer_types"


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
    return SizeFit(into, config, shapes, taken).solved([*short, *names], short, better=better)


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
    names += [name for name, value in built.kept.items() if is_size(value) or numbers_by_stage(value)]
    names += [name for name in _doubtful(asked) if name not in names]
    names = [name for name in names if name not in told]
    taken = {field for name, field in asked.items() if name not in names}
    sizes = SizeFit(into, config, shapes, taken)
    found = sizes.improved(names, asked) if names else {}
    found |= sizes.unusual(_unusual_sizes(built, config, {*found, *told}), found)
    covered = {role_of(field) for field in {**asked, **found}.values()}
    for name in built.kept.keys() - found.keys() - told.keys():  # no shape tells of heads: letters may
        roles = [role for role in abbreviated(name) if role not in covered]
        field = next(fields_of(roles[0], config), None) if len(roles) == 1 and is_size(built.kept[name]) else None
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
    defaults = {name: one for name, one in defaults_of(into).items() if is_size(one)}
    computed = [{text: size for size, text in computed_sizes(one)} for one in (checkpoint, config)]
    theirs, own = ({**dict(every_size(one)), **more} for one, more in zip((checkpoint, config), computed, strict=True))
    right = {name for name, value in defaults.items() if name in asked and theirs.get(asked[name]) == value}
    wrong = [name for name in defaults if name in asked and name not in right]
    if len(right) <= len(wrong):
        return {}
    sizes = SizeFit(into, config, shapes)
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

    Two texts may well have one vocabulary, and the two sides of a square are one size.  But a number of tokens beside
    a name that speaks of a vocabulary may be the length of a row: ``n_token`` beside ``n_vocab``.
    """
    sides = Counter((_side(name), field) for name, field in asked.items())
    given = Counter(field for _, field in sides)
    twice = [(name, field) for name, field in asked.items() if given[field] > 1]
    named = {field for name, field in twice if _VOCABULARY in normal(name)}
    return [
        name
        for name, field in twice
        if (role := role_of(field.rpartition(".")[2])) in SIZES
        if role is not Role.VOCABULARY or (field in named and _VOCABULARY not in normal(name))
    ]


_VOCABULARY = "voc"
"""Part of every name that means a vocabulary and nothing else."""


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
    found += [(name, "1") for name, one in kept if is_size(one)]
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
    sizes = SizeFit(into, config, shapes)
    found: dict[str, str] = {}
    for name in names:
        more = {**found, name: "true"}
        if sizes.alike(more) > sizes.alike(found) or sizes.missing_numbers(more) < sizes.missing_numbers(found):
            found[name] = "true"
    return found


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
        if hinted(name) is not None or abbreviated(name) or role_of(name) is not None or not is_size(config.get(field)):
            continue
        other = next((one for one, size in every_size(config) if size != config[field]), None)
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
    sizes = {name: (theirs, mine) for name, theirs, mine in pairs if is_size(theirs) and is_size(mine)}
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
    names = [name for name in _doubtful(asked) if not counted_roles(name)]
    if not names:  # a number of layers is the size of no axis
        return {}
    wanted: Shapes = Counter(map(sorted_sizes, shapes))
    axes = {size for shape in wanted for size in shape}
    sizes = {name: one for name, one in every_size(config) if one in axes}
    deep = {name: twin[name] for name in config if name in twin and (role_of(name) is Role.DEPTH or name == LAYERS)}

    def alike(fields: Mapping[str, str]) -> float:
        told = {**named_fields(into), **fields}
        try:
            built = shapes_for(with_fields(into, told, config), {**config, **deep}, within)
        except PortingError:
            return -math.inf
        found: Shapes = Counter(sorted_sizes(shape) for shape in built.values() if shape)
        return 2 * (found & wanted).total() - found.total()

    found: dict[str, str] = {}
    for name in names:
        ways = [found, *({**found, name: field} for field in sizes if field != asked[name])]
        found = max(ways, key=alike)  # the first of equals
    return found
