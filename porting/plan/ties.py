"""Tensors under several names: what the table says of them, what the module does and what the checkpoint did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from porting.errors import Code, Fault
from porting.notation.name import Bindings, Name
from porting.notation.table import Table, Tie
from porting.plan.align import Alignment
from porting.plan.matching import Matcher
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
