"""Draft a table that accounts for every tensor of the checkpoint and of the module, from the result of a search."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from porting.checkpoint import Checkpoint
from porting.loading import same_bits
from porting.notation.field import held, spellings, value_of
from porting.notation.name import may_stand, spelled
from porting.notation.reading import EQUALS
from porting.notation.table import parse_table
from porting.plan.align import align
from porting.plan.matching import Matcher
from porting.suggesting.draft.index_letters import needed, part_sizes, plainer, with_own_parts
from porting.suggesting.draft.layer_patterns import (
    Line,
    Terms,
    indexed,
    lines,
    name_pattern,
)
from porting.suggesting.draft.probes import at_depth, first_difference, ordered, probes, returned_probes
from porting.suggesting.draft.table_writer import TableDraft, dropped, patterns, write
from porting.suggesting.draft.unmapped import Unmapped, leftover
from porting.suggesting.search.attention_layouts import Heads, sizes
from porting.suggesting.search.matrix_candidates import SOFTMAX_IGNORES
from porting.suggesting.search.name_similarity import numbered
from porting.suggesting.search.search_result import SearchResult
from porting.suggesting.subjects.building import fixed_value
from porting.suggesting.subjects.config_fields import (
    NESTED,
    SHARE,
    Role,
    config_number,
    fields_of,
    role_of,
    rotated,
)
from porting.suggesting.subjects.model_pair import ModelPair
from porting.suggesting.subjects.twin import Twin
from porting.target import named_tensors, slots

_COUNTED = "a buffer of whole numbers, of which nothing is learned"
_NO_PLACE, _NONE = "the module does not have it", "the checkpoint has none"
_OPEN = "no counterpart was found"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The indices whose sizes no shape shows.

    Attributes:
        values: index -> its size in the twin.
        texts: index -> what [sizes] says.
    """

    values: Mapping[str, int]
    texts: Mapping[str, str]


def heads_of(config: Mapping[str, object]) -> Heads | None:
    """How attention is cut up; None where the config does not say."""
    count, width = config_number(config, Role.HEADS), config_number(config, Role.HIDDEN)
    groups = 1 if _one_key(config) else config_number(config, Role.GROUPS) or count
    size = config_number(config, Role.HEAD_SIZE) or (width // count if count else 0)
    return Heads(count, groups, size, rotated(config, size)) if count and size and not count % groups else None


def _one_key(config: Mapping[str, object]) -> bool:
    """Whether all heads share a key by a switch, as Falcon's and GPT-BigCode's configs have it.

    In Falcon's newer form a field counts the groups, and the switch, which is on by default, says nothing.
    """
    return config.get("multi_query") is True and config.get("new_decoder_architecture") is not True


def sizes_of(config: Mapping[str, object]) -> Sizes:
    """Heads, groups of them, and what else the rules of attention count, from the config's fields."""
    values: dict[str, int] = {"c": 3, "s": 2}
    texts: dict[str, str] = {"c": "3", "s": "2"}
    cut = heads_of(config)
    if cut is None:
        return Sizes(values=values, texts=texts)
    heads, groups = (next(fields_of(role, config), "") for role in (Role.HEADS, Role.GROUPS))
    groups = "1" if _one_key(config) else groups if groups and cut.groups != cut.count else heads
    width = _head_size(config, cut)
    count = next(fields_of(Role.ROTATED, config), f"{width} * {spellings(SHARE)[0]}")
    pairs = f"{count if cut.partly else width} // 2"
    values |= {"h": cut.count, **sizes(cut)}
    texts |= dict.fromkeys("uw", f"{width} - {pairs} * 2") if cut.partly else {}
    texts |= {"h": heads, "g": groups, "q": _ratio(heads, groups), "k": "1", "v": "1"}
    texts |= {"y": "2", "r": pairs, "z": pairs}
    return Sizes(values=values, texts=texts)


def _ratio(heads: str, groups: str) -> str:
    """The expression for how many heads share a key."""
    return "1" if groups == heads else heads if groups == "1" else f"{heads} // {groups}"


def _head_size(config: Mapping[str, object], cut: Heads) -> str:
    """The expression for the features of a head."""
    size, hidden, heads = (next(fields_of(role, config), "") for role in (Role.HEAD_SIZE, Role.HIDDEN, Role.HEADS))
    return f"{hidden} // {heads}" if config_number(config, Role.HIDDEN) == cut.count * cut.width else size


def _projected(small: Mapping[str, object], config: Mapping[str, object]) -> dict[int, str]:
    """How many rows a projection of all heads has in the twin, and of all groups: with the expression for it."""
    cut, own, texts = heads_of(small), heads_of(config), sizes_of(config).texts
    if cut is None or own is None:
        return {}
    size = _head_size(config, own)
    every = size.removesuffix(f" // {texts['h']}") if "//" in size else f"{size} * {texts['h']}"
    return {cut.groups * cut.width: f"{size} * {texts['g']}", cut.count * cut.width: every}


def scales_of(config: Mapping[str, object]) -> list[str]:
    """Constants that embeddings are multiplied by: the root of the width, and its inverse."""
    width = next(fields_of(Role.HIDDEN, config), None)
    return [] if width is None else [f"{width} ** -0.5", f"{width} ** 0.5"]


def draft(
    subjects: ModelPair, found: SearchResult, name: str, head: Iterable[str], *, close: bool
) -> tuple[TableDraft, list[Line], list[Unmapped]]:
    """The table for the twin: everything that is read, written, left out, tied or new.

    Args:
        head: comments for its beginning.
        close: also compare activations that differ a little.

    Returns:
        The draft, its lines, and the tensors of both sides that have no counterpart.
    """
    twin, module = subjects.twin, subjects.built.module
    port = found.models[0] if found.models is not None else None
    stacked = {} if port is None else port.stacked
    made = with_own_parts([plainer(line) for line in lines(found.moves, stacked, {} if port is None else port.shapes)])
    held = {
        **{name: tuple(one.shape) for name, one in twin.tensors.items()},
        **{name: slot.shape for name, slot in slots(module).items()},
    }
    parts = part_sizes(_projected(twin.config, subjects.config), made, held)
    used = {one for move in found.moves for one in move.reads}
    written = {stacked.get(one, (one, 0))[0] for move in found.moves for one in move.writes}
    makes = {stacked.get(one, (one, 0))[0]: content for one, content in found.made.items()}
    drops, copies = _left_out(subjects, used | set(found.ignored_biases) | _counts(twin))
    drops |= dict.fromkeys(_told_once(found.ignored_biases), SOFTMAX_IGNORES)
    fresh, ties, rest = _unwritten(module, written | set(makes))
    tied = {name: other for name, other in found.seconds.items() if spelled(name) in fresh}
    fresh |= {
        spelled(name): f"tie it to {other}: the checkpoint has one tensor for both" for name, other in tied.items()
    }
    shapes = {name: slot.shape for name, slot in slots(module).items() if name in rest}
    counts = _counts(twin) - used
    drops |= dict.fromkeys(patterns(sorted(counts), [one for one in twin.tensors if one not in counts]), _COUNTED)
    known = {*used, *copies, *found.ignored_biases, *counts}
    unused = [name for name in twin.tensors if name not in known]
    several = found.trace.returned  # the model itself is not a module with one output then
    # A layer with weights that stands in a list several times has one path here; an activation has all of its names.
    own = {path for path, _ in module.named_modules()}
    everywhere = module.named_modules(remove_duplicate=False)
    own |= {path for path, part in everywhere if next(part.parameters(), None) is None}
    own = {path for path in own if spelled(path) == path}  # a point may be a pattern; others are not compared
    if subjects.way.by_row:  # its parts see one row where the reference's see a batch
        own = {""}
    ours = {path: one for path, one in found.trace.modules.items() if path in own and (path or not several)}
    biased = any(one.what == "bias" for one in found.divergences)  # one that the checkpoint has may be zero there
    whole = not (found.lacking or rest or biased)
    compared = probes(ours, found.reference.modules, found.moves, loose=close, whole=whole, basis=found.basis)
    if first := first_difference(found, ours, compared):
        compared = ordered([*compared, *first], found.reference.modules)
    returned = returned_probes(several, found.reference.returned, found.reference.modules, compared)
    unmapped = leftover(shapes, twin.tensors, found, unused)
    if any(one.near for one in unmapped):  # what is left on either side may belong together
        drops, fresh = (
            {name: _OPEN if said in {_NO_PLACE, _NONE} else said for name, said in some.items()}
            for some in (drops, fresh)
        )
    return (
        TableDraft(
            name=name,
            description=f"{twin.architecture} into {type(module).__name__}",
            head=tuple(head),
            prefix=twin.prefix,
            config=_config(subjects.built.read),
            constants={
                name: value for name, one in subjects.built.read.items() if (value := fixed_value(one)) is not None
            },
            require=_required(subjects),
            sizes=needed({**sizes_of(subjects.config).texts, **parts}, made),
            lines=made,
            drops=drops,
            copies=copies,
            ties=ties,
            makes=_makes(makes),
            fresh=fresh,
            inputs=_inputs((*subjects.way.rules, *subjects.way.more)),
            arguments=subjects.built.constants,
            probes=compared,
            returned=returned,
        ),
        made,
        unmapped,
    )


def _makes(made: Mapping[str, str]) -> dict[str, str]:
    """The lines of [make], one for all layers where these hold the same."""
    others = {name: word.removeprefix(EQUALS) for name, word in made.items() if word.startswith(EQUALS)}
    layers = {name: other for name, other in others.items() if LAYER.sub("#", name) == LAYER.sub("#", other)}
    rest = {name: other for name, other in others.items() if name not in layers}
    single = {name: other for name, other in rest.items() if list(rest.values()).count(other) == 1}
    shared = {name: other for name, other in rest.items() if name not in single}
    copies = [*indexed([(spelled(a), spelled(b)) for a, b in single.items()]), *_generally(shared)]
    for first in dict.fromkeys(layers.values()):  # a rule writes the first one, and comes before [make]
        names = [first, *(name for name, other in layers.items() if other == first)]
        copies += [(one, spelled(first)) for one in _told_once(names) if one != spelled(first)]
    patterns = {name: f"{EQUALS}{other}" for name, other in copies}
    for word in dict.fromkeys(word for name, word in made.items() if name not in others):
        names = [name for name, one in made.items() if one == word]
        some = _told_once(names)
        patterns |= dict.fromkeys(map(spelled, names) if patterns.keys() & set(some) else some, word)
    return patterns


def _inputs(rules: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The lines of [inputs], without axes where these are the reference's own."""
    plain = []
    for theirs, ours in rules:
        left, _, axes = theirs.partition(" [")
        right, _, others = ours.partition(" [")
        plain.append((left, right) if axes == others else (theirs, ours))
    return plain


def _config(asked: Mapping[str, str]) -> dict[str, str]:
    """The checkpoint's fields, each with what the builder calls it; several names as ``dim/width``."""
    names: dict[str, list[str]] = {}
    for ours, theirs in asked.items():
        if fixed_value(theirs) is not None:
            continue
        names.setdefault(NESTED.get(theirs, theirs), []).append(ours)
    return {theirs: "/".join(some) for theirs, some in names.items()}


def _required(subjects: ModelPair) -> dict[str, list[object]]:
    """The fields that the module does not ask for and that change what is computed: they are as in this checkpoint."""
    asked = set(subjects.built.read.values())
    found: dict[str, list[object]] = {}
    for field, value in subjects.config.items():
        fixed = role_of(field) in {Role.ACTIVATION, Role.EPS} or field in NESTED
        if fixed and field not in asked and isinstance(value, str | float):
            found[NESTED.get(field, field)] = [value]
    return found


def _left_out(subjects: ModelPair, used: set[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The twin's tensors that no rule reads: copies of others, and parts that the module does not have."""
    tensors = subjects.twin.tensors
    copies: dict[str, str] = {}
    left = []
    for name in (one for one in tensors if one not in used):
        twin = next((one for one in used if same_bits(tensors[one], tensors[name])), None)
        if twin is not None:
            copies[name] = twin
        else:
            left.append(name)
    drops = dict.fromkeys(patterns(left, [one for one in tensors if one not in left]), _NO_PLACE)
    return drops, copies


def _counts(twin: Twin) -> set[str]:
    """The file's names of buffers of whole numbers: how many batches a norm has seen, or the positions one by one."""
    whole = (name for name, one in twin.reference.named_buffers() if one.dtype == torch.int64)
    return {twin.files[name] for name in whole if name in twin.files}


def _unwritten(module: nn.Module, written: set[str]) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """The module's tensors that no rule writes: buffers that it computes, other names of what is written, the rest."""
    fresh: dict[str, str] = {}
    ties: dict[str, str] = {}
    places = slots(module)
    first = {places[name].same_as: name for name in written if name in places}
    buffers, rest = [], []
    for name, slot in places.items():
        if name in written:
            continue
        if slot.same_as in first:
            ties[name] = first[slot.same_as]
        elif not slot.parameter:
            buffers.append(name)
            first[slot.same_as] = name
        else:
            rest.append(name)
            first[slot.same_as] = name  # another name of it is declared tied to it
    others = [name for name in places if name not in (*buffers, *rest)]
    ties = dict(_generally(ties))
    fresh |= dict.fromkeys(_told_once(buffers), "a buffer, which the module computes")
    fresh |= dict.fromkeys(patterns(rest, [*others, *buffers]), _NONE)
    return fresh, ties, rest


def _generally(ties: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Names that are another's tensor: those of all layers at once, where that is one tensor or one of each layer."""
    single = {name: other for name, other in ties.items() if list(ties.values()).count(other) == 1}
    yield from ((name, other) for name, other in indexed([(spelled(a), spelled(b)) for a, b in single.items()]))
    ties = {name: other for name, other in ties.items() if name not in single}
    for anchor in dict.fromkeys(ties.values()):
        names = [name for name, other in ties.items() if other == anchor]
        made = _told_once(names)
        own = any(name_pattern(one).fullmatch(anchor) for one in made)
        yield from dict.fromkeys(map(spelled, names) if own else made, spelled(anchor)).items()


def _told_once(names: Iterable[str]) -> list[str]:
    return [one[0] for one in indexed([(spelled(name),) for name in names])]


def _for_deeper(line: Line, unread: Collection[str], read: Collection[str] = ()) -> Line:
    """The line of one layer, written for the layers behind it too, which the twin is too small to have.

    In the first layer of ModernBERT there is no norm in front of attention, and the twin has two layers.

    Args:
        unread: the checkpoint's tensors that no line reads.
        read: those that some line reads, which the line may not read in a layer behind as well.
    """
    terms = (*line.sources, *line.targets)
    numbers = {number for pattern, _ in terms for number in LAYER.findall(pattern)}
    if len(numbers) != 1 or any("{i" in pattern or len(LAYER.findall(pattern)) != 1 for pattern, _ in terms):
        return line
    index = {0: "{i}"}.get(number := int(numbers.pop()), f"{{i+{number}}}")

    def counted(some: Terms) -> Terms:
        return tuple((LAYER.sub(index, pattern), axes) for pattern, axes in some)

    behind = [name_pattern(LAYER.sub(str(number + 1), pattern)) for pattern, _ in line.sources]
    if not all(any(map(one.fullmatch, unread)) and not any(map(one.fullmatch, read)) for one in behind):
        return line
    return replace(line, sources=counted(line.sources), targets=counted(line.targets))


LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
"""The number of a layer in a name."""


def onto(made: TableDraft, checkpoint: Checkpoint, subjects: ModelPair) -> TableDraft:
    """The table, checked against the checkpoint: older spellings, tensors that the twin does not have, defaults."""
    older = [_older(line, checkpoint) for line in made.lines]
    read = [name_pattern(pattern) for line in older for pattern, _ in line.sources]
    unmatched = {name for name in checkpoint.tensors if not any(one.fullmatch(name) for one in read)}
    older = [_for_deeper(line, unmatched, checkpoint.tensors.keys() - unmatched) for line in older]
    again = replace(made, lines=older)
    table = parse_table(write(again), where="suggested")
    shapes = {name: tuple(info.shape) for name, info in checkpoint.tensors.items()}
    ours = {name: tuple(one.shape) for name, one in named_tensors(subjects.built.module)}
    unread = align(table.rules, shapes, ours, prefix=table.prefix).unread
    matcher = Matcher(((drop.name, drop) for drop in table.drops), table.prefix)
    left = [name for name in unread if not matcher.read(name)]
    drops, copies = dict(made.drops), dict(made.copies)
    ranges = [name for name in left if all(map(may_stand, name)) and _is_range(checkpoint, name)]
    copies |= dict.fromkeys(_told_once(ranges), "arange")
    rest = [name for name in left if name not in ranges]
    for name in [one for one in rest if all(map(may_stand, one))]:
        same = next(
            (one for one in checkpoint.tensors if one != name and one not in left and _copy(checkpoint, one, name)),
            None,
        )
        if same is not None:
            copies[name] = spelled(same)
            rest.remove(name)
    known = [name for name in checkpoint.tensors if name not in rest]
    deeper = {numbered(name) for name in subjects.twin.tensors}  # of a layer that the twin is too small to have
    open_, unused = ([one for one in rest if (numbered(one) in deeper) is also] for also in (True, False))
    drops |= dict.fromkeys(dropped(open_, [*known, *unused]), _OPEN)
    drops |= dict.fromkeys(dropped(unused, [*known, *open_]), f"{subjects.twin.architecture} does not use it")
    defaults = {
        field: value_of(subjects.config, field)
        for field in made.config
        if not held(checkpoint.config, field) and isinstance(value_of(subjects.config, field), int | float | str | bool)
    }
    required = {field: values for field, values in made.require.items() if held(checkpoint.config, field)}
    share = held(checkpoint.config, SHARE) or str(value_of(subjects.config, SHARE))
    depths = (config_number(subjects.twin.config, Role.DEPTH), config_number(subjects.config, Role.DEPTH))
    behind = partial(_behind_layers, _stacks(older), *depths)
    return replace(
        again,
        lines=[replace(line, targets=tuple((behind(name), axes) for name, axes in line.targets)) for line in older],
        sizes={index: text.replace(spellings(SHARE)[0], share) for index, text in made.sizes.items()},
        makes={behind(name): _content(value, behind) for name, value in made.makes.items()},
        fresh={behind(name): why for name, why in made.fresh.items()},
        ties={behind(name): behind(other) for name, other in made.ties.items()},
        drops=drops,
        copies=copies,
        defaults=defaults,
        require=required,
        probes=[(theirs, behind(ours)) for theirs, ours in at_depth(made.probes, *depths)],
        returned=at_depth(made.returned, *depths),
    )


_INDEX = re.compile(r"(?P<stem>[^{}]*)\{(?:(?P<factor>\d+)\*)?[ijkl](?:\+(?P<shift>\d+))?\}")


def _stacks(made: Iterable[Line]) -> dict[str, tuple[int, int]]:
    """The lists that layers stand in, by what is in front of the number, with the number's factor and shift."""
    found = (_INDEX.match(name) for line in made for name, _ in line.targets)
    return {one["stem"]: (int(one["factor"] or 1), int(one["shift"] or 0)) for one in found if one is not None}


def _behind_layers(stacks: Mapping[str, tuple[int, int]], twins: int, depth: int, name: str) -> str:
    """The name of a part that stands behind the layers in one list with them, where there are more layers.

    >>> _behind_layers({"": (1, 1)}, 2, 12, "3.ln.weight"), _behind_layers({"": (1, 1)}, 2, 12, "0.emb.weight")
    ('13.ln.weight', '0.emb.weight')
    """
    for stem, (factor, shift) in stacks.items():
        number = re.match(r"\d+(?=[. ]|$)", name.removeprefix(stem)) if name.startswith(stem) else None
        if number is not None and int(number[0]) > factor * (twins - 1) + shift:
            moved = int(number[0]) + factor * (depth - twins)
            return f"{stem}{moved}{name[len(stem) + number.end() :]}"
    return name


def _content(value: str, behind: Callable[[str], str]) -> str:
    """The content that [make] gives a tensor; another tensor's name is of the same depth."""
    return f"{EQUALS}{behind(value.removeprefix(EQUALS))}" if value.startswith(EQUALS) else value


def _older(line: Line, checkpoint: Checkpoint) -> Line:
    """A norm's line with the spelling of older files, if this is one."""
    name, axes = line.sources[0]
    if not any(one.endswith((".gamma", ".beta")) for one in checkpoint.tensors) or len(line.sources) > 1:
        return line
    if "{w:weight,bias}" not in name:
        return line
    stem = re.sub(r"\{[^{}]*\}", "", name.partition("{w:")[0]).rstrip(".").rpartition(".")[2]
    if not any(f"{stem}.gamma" in one for one in checkpoint.tensors):
        return line
    return replace(line, sources=((name.replace("{w:weight,bias}", "{w:weight/gamma,bias/beta}"), axes),))


def _is_range(checkpoint: Checkpoint, name: str) -> bool:
    info = checkpoint.tensors[name]
    if info.dtype.is_floating_point or info.dtype == torch.bool:
        return False
    value = checkpoint.read(name)
    return bool((value == torch.arange(value.shape[-1] if value.ndim else 1)).all())


def _copy(checkpoint: Checkpoint, one: str, name: str) -> bool:
    mine, other = checkpoint.tensors[one], checkpoint.tensors[name]
    same = tuple(mine.shape) == tuple(other.shape) and mine.dtype == other.dtype and len(mine.shape) > 0
    return same and same_bits(checkpoint.read(one), checkpoint.read(name))
