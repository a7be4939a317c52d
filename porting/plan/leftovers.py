"""What no step touches: a source tensor is dropped with a reason, a target tensor is tied or new, or it is a fault."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from porting.errors import Code, Fault, option
from porting.limits import combinations
from porting.notation.name import Bindings
from porting.notation.rule import Rule, Term
from porting.notation.table import Drop, Table
from porting.plan.align import Alignment, Lone
from porting.plan.fault_grouping import MOST_HINTS, MOST_PATTERNS, Nearest, common_front, group_alike, listed, resembles
from porting.plan.matching import Match, Matcher
from porting.plan.plan import LeftOut
from porting.plan.recipe import Described
from porting.plan.ties import present
from porting.target import Slot

COUNTS = re.compile(r"layer|block|depth|expert")
"""What the names of fields have in them that say how often a part is repeated."""

CONTENTS = ("arange", "zeros")
"""What a dropped tensor may equal besides another tensor."""


def leave_out(
    table: Table,
    alignment: Alignment,
    sources: Mapping[str, Described],
    config: Mapping[str, object],
    near: Nearest,
    unsaved: Mapping[str, str],
) -> tuple[tuple[LeftOut, ...], list[Fault]]:
    """Source tensors that are dropped, and a fault for each that nothing accounts for.

    Args:
        table, alignment, sources, config, near: as in :func:`porting.plan.check.check`.
        unsaved: tensors of the module that are not in its state, and what would put them there.
    """
    matcher = Matcher((((number, 0), drop.name) for number, drop in enumerate(table.drops)), table.prefix)
    faults: list[Fault] = []
    left_out: list[LeftOut] = []

    def dropped(name: str) -> bool:
        matches = matcher.read(name)
        if matches:
            left = _left(table, name, matches[0], sources)
            left_out.append(left)
            faults.extend(_unequal(left, sources, near))
        return bool(matches)

    missed = dict(alignment.absent["source"])
    missed |= _said((lone.rule, lone.rule.sources, lone.bindings) for lone in alignment.unsourced)
    missed |= _said((rule, rule.sources, {}) for rule in alignment.idle)
    idle = idle_drops(table, sources)
    strays = [name for name in alignment.unread if not dropped(name)]
    front = common_front(strays, missed, table.prefix)
    if front:
        message = f"{listed(strays)} of the checkpoint: no rule reads it, and {front!r} stands before the table's names"
        hint = "save the model without what wraps it; of a distributed checkpoint pass DIRECTORY/NAME"
        faults.append(Fault(code=Code.UNREAD_TENSOR, where=table.where, message=message, hint=hint))
    for place, names in enumerate(group_alike([] if front else strays)):
        message = f"{listed(names)} {list(sources[names[0]].shape)} of the checkpoint: no rule reads it"
        hint = near.said(names[0], missed, strays)
        hint = hint or (_nearly_dropped(names[0], idle[:MOST_PATTERNS]) if place < MOST_HINTS else "")
        hint = hint or "map it in [tensors], or list it in [drop] with a reason"
        faults.append(Fault(code=Code.UNREAD_TENSOR, where=table.where, message=message, hint=hint))
    free = [*alignment.unwritten, *(name for lone in alignment.unsourced for name in lone.names)]
    for lones, names in _by_rule(alignment.unplaced, dropped):
        expected = " and ".join(map(repr, lones[0].expected))
        message = f"{listed(names)} {list(sources[names[0]].shape)} -> {expected}: the module does not have it"
        kept = unsaved.get(lones[0].expected[0])
        hint = f"it keeps such a tensor, but not as a part of its state: {kept}" if kept else ""
        hint = hint or _miscounted(lones[0], alignment, config) or near(lones[0].expected[0], free)
        hint = hint or "list it in [drop] with a reason if the module has no such part"
        faults.append(Fault(code=Code.NO_TARGET, where=lones[0].rule.where, message=message, hint=hint))
    return tuple(left_out), faults


def idle_drops(table: Table, names: Iterable[str]) -> list[Drop]:
    """The lines of [drop] that match nothing in a checkpoint."""
    matcher = Matcher((((number, 0), drop.name) for number, drop in enumerate(table.drops)), table.prefix)
    used = {match.key[0] for name in names for match in matcher.read(name)}
    return [drop for number, drop in enumerate(table.drops) if number not in used]


def _said(terms: Iterable[tuple[Rule, Sequence[Term], Bindings]]) -> dict[str, str]:
    """The names that terms spell, where an index has no value at its number 0, each with its rule's place."""
    found: dict[str, str] = {}
    for rule, sides, bindings in terms:
        for term in sides:
            free = [index for index in term.key.indices if index not in bindings]
            for values in combinations([range(rule.enumerations.get(index, 1)) for index in free], where=rule.where):
                found[term.key.spell({**bindings, **dict(zip(free, values, strict=True))})] = rule.where
    return found


def _nearly_dropped(name: str, idle: Iterable[Drop]) -> str:
    for drop in idle:
        stem, rest, _ = str(drop.name).partition("{*")
        head = ".".join([*name.split(".")[: stem.count(".")], ""]) if rest else name
        if resembles(stem, head):
            return f"{drop.where or 'the table'} has '{drop.name}': is it this one?"
    return ""


def _left(table: Table, name: str, match: Match, sources: Mapping[str, Described]) -> LeftOut:
    drop = table.drops[match.key[0]]
    equals = "" if drop.equals is None else present(drop.equals, match.bindings, table.prefix, sources)
    return LeftOut(name=name, reason=drop.reason, equals=equals)


def _unequal(left: LeftOut, sources: Mapping[str, Described], near: Nearest) -> Iterator[Fault]:
    """What shows without reading that a dropped tensor does not equal what it is said to equal."""
    if not left.equals or left.equals in CONTENTS:
        return
    if left.equals not in sources:
        message = f"{left.name!r} is dropped because it equals {left.equals!r}, which the checkpoint does not have"
        hint = near(left.equals, [name for name in sources if name != left.name])
        yield Fault(code=Code.NO_SOURCE, where=left.name, message=message, hint=hint)
        return
    mine, other = sources[left.name], sources[left.equals]
    found, expected = ((tuple(one.shape), str(one.dtype).removeprefix("torch.")) for one in (mine, other))
    if found != expected:
        message = (
            f"{left.name!r} {list(found[0])} {found[1]} is dropped because it equals {left.equals!r}, "
            f"and that is {list(expected[0])} {expected[1]}"
        )
        yield Fault(code=Code.DROP_DIFFERS, where=left.name, message=message, hint="map it in [tensors] instead")


def renew(
    table: Table,
    alignment: Alignment,
    targets: Mapping[str, Slot],
    tied: Mapping[str, str],
    config: Mapping[str, object],
    near: Nearest,
    *,
    allowed: bool,
) -> tuple[tuple[str, ...], tuple[str, ...], list[Fault]]:
    """Parameters that are new, buffers that the module computes, and a fault for each target that nothing writes."""
    matcher = Matcher((((number, 0), fresh.name) for number, fresh in enumerate(table.fresh)), table.target_prefix)
    new: list[str] = []
    computed: list[str] = []
    faults: list[Fault] = []

    def is_new(name: str) -> bool:
        found = bool(matcher.read(name))
        if found:
            (new if targets[name].parameter else computed).append(name)
        return found

    homeless = dict(alignment.absent["target"])
    homeless |= _said((lone.rule, lone.rule.targets, lone.bindings) for lone in alignment.unplaced)
    homeless |= _said((rule, rule.targets, {}) for rule in alignment.idle)
    strays = [name for name in alignment.unwritten if name not in tied and not is_new(name)]
    for names in group_alike(strays):
        message = f"{listed(names)} {list(targets[names[0]].shape)} of the module: nothing writes it"
        hint = near.said(names[0], homeless, strays) or "map it in [tensors], or list it in [ties] or [fresh]"
        faults.append(Fault(code=Code.UNWRITTEN_PARAMETER, where=table.where, message=message, hint=hint))
    free = [*alignment.unread, *(name for lone in alignment.unplaced for name in lone.names)]
    for lones, names in _by_rule(alignment.unsourced, is_new):
        expected = " and ".join(map(repr, lones[0].expected))
        message = f"{expected} -> {listed(names)} {list(targets[names[0]].shape)}: the checkpoint does not have it"
        hint = _miscounted(lones[0], alignment, config) or near(lones[0].expected[0], free)
        hint = hint or "list the module's parameter in [fresh] if a checkpoint may lack it"
        faults.append(Fault(code=Code.NO_SOURCE, where=lones[0].rule.where, message=message, hint=hint))
    if new and not allowed:
        message = f"the checkpoint has nothing for {', '.join(listed(names) for names in group_alike(new))}"
        hint = f"{option('fresh', True)} keeps the module's own initialisation there"
        faults.append(Fault(code=Code.FRESH_NOT_ALLOWED, where=table.where, message=message, hint=hint))
    return tuple(new), tuple(computed), faults


def _by_rule(lones: Iterable[Lone], accounted: Callable[[str], bool]) -> Iterator[tuple[list[Lone], list[str]]]:
    """For each rule, the lone applications with names that nothing accounts for, and these names."""
    groups: dict[int, tuple[list[Lone], list[str]]] = {}
    for lone in lones:
        names = [name for name in lone.names if not accounted(name)]
        if names:
            found = groups.setdefault(id(lone.rule), ([], []))
            found[0].append(lone)
            found[1].extend(names)
    yield from groups.values()


def _miscounted(lone: Lone, alignment: Alignment, config: Mapping[str, object]) -> str:
    """The config field that says how many layers there are, when the two sides have different numbers of them."""
    applied = [step.bindings for step in alignment.steps if step.rule is lone.rule]
    theirs = [*applied, *(one.bindings for one in alignment.unplaced if one.rule is lone.rule)]
    ours = [*applied, *(one.bindings for one in alignment.unsourced if one.rule is lone.rule)]
    for index in lone.bindings:
        checkpoint, module = (
            max((value + 1 for one in side if isinstance(value := one.get(index), int)), default=0)
            for side in (theirs, ours)
        )
        if not checkpoint or not module or checkpoint == module:
            continue  # a rule that one side does not know at all is misspelled, not miscounted
        fields = [
            f"{field} = {value}" for field, value in config.items() if value == module and not isinstance(value, bool)
        ]
        if fields:
            said = [one for one in fields if COUNTS.search(one)] or fields  # others have the same number by chance
            return f"config.json has {' and '.join(said)}, and the checkpoint has {checkpoint}"
    return ""
