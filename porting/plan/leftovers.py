"""Tensors that no step uses: a source is dropped with a reason, a target is tied or new; everything else is a fault."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from porting.errors import Code, Fault, Message, Option, Wording, numberless
from porting.limits import combinations
from porting.notation.axes import Mismatch, solve_all
from porting.notation.faults import NotationError
from porting.notation.name import Bindings, Name
from porting.notation.rule import Rule, Term
from porting.notation.table import Drop, Make, Table, Tie
from porting.ops import Content
from porting.plan.align import Alignment, Lone
from porting.plan.fault_grouping import MOST_HINTS, MOST_PATTERNS, Nearest, common_front, group_alike, listed, resembles
from porting.plan.matching import Matcher
from porting.plan.plan import LeftOut
from porting.plan.recipe import Described, Recipe
from porting.printable import dtype_name
from porting.target import Slot


def present(name: Name, bindings: Bindings, prefix: str, names: Mapping[str, object]) -> str:
    """The name as it is spelled here: with the prefix, or without it."""
    bare = name.without(prefix)
    without = "" if bare is None else bare.spell(bindings)
    return without if without in names else name.spell(bindings)


def resolve_ties(table: Table, alignment: Alignment, places: Mapping[str, Slot]) -> tuple[dict[str, str], list[Fault]]:
    """Target names that share the storage of another, which is written, and where table and module disagree on that."""
    written = {name for step in alignment.steps for name in step.targets}
    written |= {name for lone in alignment.unsourced for name in lone.names}
    anchors = _anchors(places, written)
    matcher = Matcher(((tie.name, tie) for tie in table.ties), table.target_prefix)
    fresh = Matcher(((line.name, line) for line in table.fresh), table.target_prefix)
    tied: dict[str, str] = {}
    faults: list[Fault] = []
    for name, slot in places.items():
        tie = matcher.first(name)
        if tie is not None:
            tied[name] = present(tie.line.with_, tie.bindings, table.target_prefix, places)
            faults += _declared(tie.line, name, tied[name], places, written)
            continue
        anchor = anchors[slot.same_as]
        computed = not slot.parameter and anchor not in written  # whether it is shared is the module's matter
        if anchor == name or (computed and fresh.read(name)):
            continue
        if name in written:
            message = f"{anchor!r} and {name!r} are one tensor in the module, and both are written"
            hint = "list one in [ties], and drop its source as equal to the other's"
        else:
            message = f"{name!r} is the same tensor as {anchor!r} in the module, and the table does not say so"
            hint = f'add to [ties]: "{name}" = "{anchor}"'
            tied[name] = anchor
        faults.append(Fault(code=Code.TIE_MISMATCH, where=table.where, message=message, hint=hint))
    return tied, faults


def _anchors(places: Mapping[str, Slot], written: set[str]) -> dict[str, str]:
    """For each tensor of the module, the name that stands for it: the first that is written, else the first."""
    anchors: dict[str, str] = {}
    for name, slot in places.items():
        if name in written and anchors.get(slot.same_as) not in written:
            anchors[slot.same_as] = name
        anchors.setdefault(slot.same_as, name)
    return anchors


def _declared(tie: Tie, name: str, other: str, places: Mapping[str, Slot], written: set[str]) -> Iterator[Fault]:
    if other not in places:
        message = f"{name!r} is tied to {other!r}, which the module does not have"
        yield Fault(code=Code.TIE_MISMATCH, where=tie.where, message=message)
    elif places[other].same_as != places[name].same_as:
        message = f"{name!r} and {other!r} are tied in the table and two tensors in the module"
        hint = f"share them in the module, or write {name!r} by a rule"
        yield Fault(code=Code.TIE_MISMATCH, where=tie.where, message=message, hint=hint)
    elif name in written:
        message = f"{name!r} is tied to {other!r} and written by a rule as well"
        yield Fault(code=Code.WRITTEN_TWICE, where=tie.where, message=message, hint="take the rule or the tie away")


def parted(shared: Sequence[Iterable[str]], alignment: Alignment, places: Mapping[str, Slot]) -> Iterator[Fault]:
    """Warnings: tensors that share their storage in the checkpoint and go to different tensors of the module."""
    goes = {name: places[step.targets[0]].same_as for step in alignment.steps for name in step.sources}
    for group in shared:
        homes: dict[str, str] = {}
        for name in sorted(group):
            if name in goes:
                homes.setdefault(goes[name], name)
        if len(homes) > 1:
            (home, first), (other, second), *_ = homes.items()
            message = (
                f"{first!r} and {second!r} are one tensor in the checkpoint, {home!r} and {other!r} two in the module"
            )
            hint = "they start equal and part in training; share them in the module to keep them one"
            yield Fault(code=Code.TIE_MISMATCH, where=first, message=message, hint=hint)


COUNTS = re.compile(r"layer|block|depth|expert")
"""Parts of the names of config fields that say how often something is repeated."""


def leave_out(
    table: Table,
    alignment: Alignment,
    sources: Mapping[str, Described],
    config: Mapping[str, object],
    near: Nearest,
    unsaved: Mapping[str, str],
) -> tuple[tuple[LeftOut, ...], list[Fault]]:
    """Source tensors that are dropped, and a fault for each that nothing accounts for."""
    matcher = Matcher(((drop.name, drop) for drop in table.drops), table.prefix)
    faults: list[Fault] = []
    left_out: list[LeftOut] = []

    def dropped(name: str) -> bool:
        found = matcher.first(name)
        if found is not None:
            drop = found.line
            equals = "" if drop.equals is None else present(drop.equals, found.bindings, table.prefix, sources)
            left = LeftOut(name=name, reason=drop.reason, equals=equals)
            left_out.append(left)
            faults.extend(_unequal(left, sources, near))
        return found is not None

    missed = dict(alignment.absent["source"])
    missed |= _said((lone.rule, lone.rule.sources, lone.bindings) for lone in alignment.unsourced)
    missed |= _said((rule, rule.sources, {}) for rule in alignment.idle if not rule.rest)
    idle = idle_drops(table, sources)
    sources_of = [term.key for rule in table.rules for term in rule.sources]
    strays = [name for name in alignment.unread if not dropped(name)]
    front = common_front(strays, missed, table.prefix)
    if front:
        message = f"{listed(strays)} of the checkpoint: no rule reads it, and {front!r} stands before the table's names"
        hint = "save the model without what wraps it; of a distributed checkpoint pass DIRECTORY/NAME"
        faults.append(Fault(code=Code.UNREAD_TENSOR, where=table.where, message=message, hint=hint))
    for place, names in enumerate(group_alike([] if front else strays)):
        message = f"{listed(names)} {list(sources[names[0]].shape)} of the checkpoint: no rule reads it"
        hint = _padded(names[0], sources_of) if place < MOST_HINTS else ""
        hint = hint or near.said(names[0], missed, strays)
        hint = hint or (_nearly_dropped(names[0], idle[:MOST_PATTERNS]) if place < MOST_HINTS else "")
        hint = hint or "map it in [tensors], or list it in [drop] with a reason"
        faults.append(Fault(code=Code.UNREAD_TENSOR, where=table.where, message=message, hint=hint))
    free = [*alignment.unwritten, *(name for lone in alignment.unsourced for name in lone.names)]
    written = {name: step.rule for step in alignment.steps for name in step.targets}
    for lones, names in _by_rule(alignment.unplaced, dropped):
        twice = next((name for lone in lones for name in lone.expected if name in written), None)
        if twice is not None:  # as of a line of [rest], whose target another rule has
            message = f"{listed(names)} -> {twice!r}, which the rule at {written[twice].where} writes already"
            hint = "write one of them under another name, or list the one that is not wanted in [drop]"
            faults.append(Fault(code=Code.WRITTEN_TWICE, where=lones[0].rule.where, message=message, hint=hint))
            continue
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
    matcher = Matcher(((drop.name, drop) for drop in table.drops), table.prefix)
    used = {id(match.line) for name in names for match in matcher.read(name)}
    return [drop for drop in table.drops if id(drop) not in used]


def _said(terms: Iterable[tuple[Rule, Sequence[Term], Bindings]]) -> dict[str, str]:
    """The names that terms spell, where an index has no value at its number 0, each with its rule's place."""
    found: dict[str, str] = {}
    for rule, sides, bindings in terms:
        for term in sides:
            free = [index for index in term.key.indices if index not in bindings]
            for values in combinations([range(rule.enumerations.get(index, 1)) for index in free], where=rule.where):
                found[term.key.spell({**bindings, **dict(zip(free, values, strict=True))})] = rule.where
    return found


def _padded(name: str, patterns: Sequence[Name]) -> str:
    """The pattern that would read a name if it wrote its numbers with as many zeros in front, as a hint."""
    for pattern in patterns[:MOST_PATTERNS]:
        again = pattern.padded_as(name)
        if again is not None:
            return f"the table has '{pattern}', and the zeros in front of its numbers are others: write '{again}'"
    return ""


def _nearly_dropped(name: str, idle: Iterable[Drop]) -> str:
    for drop in idle:
        stem, rest, _ = str(drop.name).partition("{*")
        head = ".".join([*name.split(".")[: stem.count(".")], ""]) if rest else name
        if resembles(stem, head):
            return f"{drop.where or 'the table'} has '{drop.name}': is it this one?"
    return ""


def _unequal(left: LeftOut, sources: Mapping[str, Described], near: Nearest) -> Iterator[Fault]:
    """Faults that show, before values are read, that a dropped tensor cannot equal the tensor named in its line."""
    if not left.equals:
        return
    if left.equals not in sources:
        content = Content.parse(left.equals)
        wrong = "" if content is None else content.fault(sources[left.name].shape, sources[left.name].dtype)
        if wrong:
            message = f"{left.name!r} {list(sources[left.name].shape)} cannot equal {left.equals!r}: {wrong}"
            yield Fault(code=Code.DROP_DIFFERS, where=left.name, message=message, hint="give a reason instead")
        if content is not None:
            return
        message = f"{left.name!r} is dropped because it equals {left.equals!r}, which the checkpoint does not have"
        hint = near(left.equals, [name for name in sources if name != left.name])
        yield Fault(code=Code.NO_SOURCE, where=left.name, message=message, hint=hint)
        return
    mine, other = sources[left.name], sources[left.equals]
    found, expected = ((tuple(one.shape), dtype_name(one.dtype)) for one in (mine, other))
    if found != expected:
        message = (
            f"{left.name!r} {list(found[0])} {found[1]} is dropped because it equals {left.equals!r}, "
            f"and that is {list(expected[0])} {expected[1]}"
        )
        yield Fault(code=Code.DROP_DIFFERS, where=left.name, message=message, hint="map it in [tensors] instead")


def differs(left: LeftOut, tensors: Container[str]) -> Fault:
    """The fault of a tensor that cannot be left out: it does not hold the value that the table states."""
    if left.made:
        said = left.equals if Content.parse(left.equals) is not None else f"that it equals {left.equals}"
        message = f"[make] says {said}, and its values are others"
        anew = Wording(python="export it with anew=True", command="convert it without the table's line in [make]")
        hint: str = Message("no checkpoint has a place for them: map it in [tensors] and ", anew, ", or set it back")
        return Fault(code=Code.MADE_DIFFERS, where=left.name, message=message, hint=hint)
    message = f"was to be dropped because it equals {left.equals!r}, and it does not"
    hint = "a module that ties them cannot hold this checkpoint" if left.equals in tensors else ""
    return Fault(code=Code.DROP_DIFFERS, where=left.name, message=message, hint=hint)


def copies_differ(source: str, one: Sequence[str], other: Sequence[str]) -> Fault:
    """The fault of a source tensor that comes back from several targets which do not give the same."""
    first, second = (" and ".join(map(repr, names)) for names in (one, other))
    message = f"it would be made of {first}, and of {second} as well, and their values differ"
    hint = "the checkpoint has one tensor for them: set them equal, or give the checkpoint a tensor for each"
    return Fault(code=Code.COPIES_DIFFER, where=source, message=message, hint=hint)


@dataclass(frozen=True, kw_only=True)
class Unfilled:
    """The target tensors that no step writes.

    Attributes:
        new: parameters that keep the module's own initialisation, which the caller accepts.
        made: those whose content the table gives, each with its line.
    """

    new: tuple[str, ...]
    computed: tuple[str, ...]
    made: Mapping[str, Make]
    faults: list[Fault]


def renew(
    table: Table,
    alignment: Alignment,
    targets: Mapping[str, Slot],
    tied: Mapping[str, str],
    config: Mapping[str, object],
    near: Nearest,
    *,
    allowed: bool,
) -> Unfilled:
    """Sort the targets that no step writes: made, drawn anew, tied, or faults."""
    matcher = Matcher(((fresh.name, fresh) for fresh in table.fresh), table.target_prefix)
    making = Matcher(((make.term.name, make) for make in table.makes), table.target_prefix)
    new: list[str] = []
    computed: list[str] = []
    made: dict[str, Make] = {}
    faults: list[Fault] = []

    def is_accounted(name: str) -> bool:
        lines = [match.line for match in making.read(name)]
        if len(lines) > 1:
            message = f"{name!r} is made by this line and by that at {lines[1].where}"
            hint = "make one pattern narrower, or take one line away"
            faults.append(Fault(code=Code.WRITTEN_TWICE, where=lines[0].where, message=message, hint=hint))
        if lines:
            made[name] = lines[0]
            return True
        found = bool(matcher.read(name))
        if found:
            (new if targets[name].parameter else computed).append(name)
        return found

    homeless = dict(alignment.absent["target"])
    homeless |= _said((lone.rule, lone.rule.targets, lone.bindings) for lone in alignment.unplaced)
    homeless |= _said((rule, rule.targets, {}) for rule in alignment.idle if not rule.rest)
    strays = [name for name in alignment.unwritten if name not in tied and not is_accounted(name)]
    if strays:
        homeless |= {make.term.name.spell(dict.fromkeys(make.term.name.indices, 0)): make.where for make in table.makes}
    targets_of = [term.key for rule in table.rules for term in rule.targets]
    for place, names in enumerate(group_alike(strays)):
        message = f"{listed(names)} {list(targets[names[0]].shape)} of the module: nothing writes it"
        hint = _padded(names[0], targets_of) if place < MOST_HINTS else ""
        hint = hint or near.said(names[0], homeless, strays)
        hint = hint or "map it in [tensors], or list it in [ties], [make] or [fresh]"
        faults.append(Fault(code=Code.UNWRITTEN_PARAMETER, where=table.where, message=message, hint=hint))
    free = [*alignment.unread, *(name for lone in alignment.unplaced for name in lone.names)]
    for lones, names in _by_rule(alignment.unsourced, is_accounted):
        expected = " and ".join(map(repr, lones[0].expected))
        message = f"{expected} -> {listed(names)} {list(targets[names[0]].shape)}: the checkpoint does not have it"
        hint = _miscounted(lones[0], alignment, config) or near(lones[0].expected[0], free)
        hint = hint or "list the module's parameter in [make] or [fresh] if a checkpoint may lack it"
        faults.append(Fault(code=Code.NO_SOURCE, where=lones[0].rule.where, message=message, hint=hint))
    if new and not allowed:
        message = f"the checkpoint has nothing for {', '.join(listed(names) for names in group_alike(new))}"
        hint = Message(Option("fresh", True), " keeps the module's own initialisation there")
        faults.append(Fault(code=Code.FRESH_NOT_ALLOWED, where=table.where, message=message, hint=hint))
    return Unfilled(new=tuple(new), computed=tuple(computed), made=made, faults=faults)


def make_recipes(
    made: Mapping[str, Make],
    targets: Mapping[str, Described],
    dtypes: Mapping[str, torch.dtype],
    config: Mapping[str, object],
    known: Mapping[str, int],
    table: Table,
    recipe_of: Callable[[str], Recipe | None],
) -> tuple[tuple[Recipe, ...], list[Fault]]:
    """How the targets that the table gives the content of come about, and what does not fit.

    Args:
        made: their names, each with its line of [make].
        config: the config, as :func:`porting.plan.config.effective` gives it.
        known: the sizes that [sizes] gives.
        recipe_of: how another target comes about, for one that equals it; None for one that nothing writes.
    """
    found: list[Recipe] = []
    faults: list[Fault] = []
    for name, make in made.items():
        shape = tuple(targets[name].shape)
        if isinstance(make.value, Name):
            bindings = make.term.name.read(name) or make.term.name.read(f"{table.target_prefix}{name}") or {}
            other = present(make.value, bindings, table.target_prefix, targets)
            copied = _copied(name, other, shape, targets, recipe_of)
            if isinstance(copied, Recipe):
                found.append(copied)
            else:
                code = Code.SHAPE_MISMATCH if other in targets else Code.NO_TARGET
                faults.append(Fault(code=code, where=make.where, message=f"{name!r} {list(shape)} {copied}"))
            continue
        try:
            content = content_of(make, config)
            _require_shape(make, shape, known)
        except NotationError as error:
            faults.append(Fault(code=error.code, where=make.where, message=str(error), hint=error.hint))
            continue
        except Mismatch as error:
            message = f"{name!r} {list(shape)}: {error}, in '{make.term}'"
            faults.append(Fault(code=Code.SHAPE_MISMATCH, where=make.where, message=message))
            continue
        wrong = content.fault(shape, dtypes[name])
        if wrong:
            message = f"{name!r} {list(shape)} cannot be {content}: {wrong}"
            faults.append(Fault(code=Code.SHAPE_MISMATCH, where=make.where, message=message))
        found.append(Recipe(name=name, shape=shape, work=dtypes[name], dtype=dtypes[name], content=content))
    return tuple(found), faults


def _copied(
    name: str,
    other: str,
    shape: tuple[int, ...],
    targets: Mapping[str, Described],
    recipe_of: Callable[[str], Recipe | None],
) -> Recipe | str:
    """How a target comes about that equals another one; else why it cannot."""
    if other not in targets:
        return f"is to equal {other!r}, which the module does not have"
    if tuple(targets[other].shape) != shape:
        return f"is to equal {other!r}, and that is {list(targets[other].shape)}"
    recipe = recipe_of(other)
    if recipe is None:
        return f"is to equal {other!r}, which no rule writes"
    return replace(recipe, name=name, equals=other)


def made_by(table: Table, names: Iterable[str]) -> dict[str, Make]:
    """The names whose content a table gives, each with its line of [make]."""
    matcher = Matcher(((make.term.name, make) for make in table.makes), table.target_prefix)
    return {name: found.line for name in names if (found := matcher.first(name)) is not None}


def content_of(make: Make, config: Mapping[str, object]) -> Content:
    """The content that a line of [make] gives under a config."""
    if isinstance(make.value, Content):
        return make.value
    if isinstance(make.value, Name):
        raise TypeError(f"{make.value} is another tensor, and no content")
    try:
        return Content(word=make.word, number=float(make.value.evaluate(config)))
    except NotationError as error:
        raise NotationError(error.code, f"'{make.term}' = {make.value.text!r}: {error}", hint=error.hint) from error


def _require_shape(make: Make, shape: tuple[int, ...], known: Mapping[str, int]) -> None:
    """Raises: Mismatch when a tensor has another shape than the table states."""
    axes = make.term.axes
    if axes is None:
        return
    if len(axes) != len(shape):
        raise Mismatch(f"the table states {len(axes)} axes, and it has {len(shape)}")
    solve_all(list(zip(axes, shape, strict=True)), dict(known))


def _by_rule(lones: Iterable[Lone], accounted: Callable[[str], bool]) -> Iterator[tuple[list[Lone], list[str]]]:
    """For each rule, the lone applications with names that nothing accounts for, and these names."""
    groups: dict[tuple[int, str], tuple[list[Lone], list[str]]] = {}
    for lone in lones:
        names = [name for name in lone.names if not accounted(name)]
        if names:
            alike = numberless(names[0]) if lone.rule.rest else ""  # such a rule names all sorts of tensors
            found = groups.setdefault((id(lone.rule), alike), ([], []))
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
