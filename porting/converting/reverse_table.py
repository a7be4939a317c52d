"""The names and shapes of one side of a table, from those of the other.

A conversion needs no module where the rules alone say what comes out: each rule is read in the direction of the
conversion, and its other side is spelled.  :func:`porting.plan.inferred_source.imagine` does that from the module's
side to the checkpoint's; here the table is turned round for the other direction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from porting.errors import Code, Fault, Message, Option
from porting.limits import charge, combinations
from porting.notation.axes import size_of
from porting.notation.name import Decimal, Literal, Name, Rest
from porting.notation.rule import Pair, Rule
from porting.notation.table import Table
from porting.ops import Content
from porting.origin import ANY_DTYPE
from porting.plan.align import align_table
from porting.plan.config import sizes
from porting.plan.inferred_source import imagine
from porting.plan.leftovers import made_by, present
from porting.plan.matching import Matcher
from porting.plan.plan import LeftOut, PlanError
from porting.plan.recipe import Described, TensorSpec, made_dtype
from porting.target import Slot


def reversed_table(table: Table) -> Table:
    """Exchange the sides of a table's rules; of a fold the first source is kept, which has the sum's shape."""
    rules = tuple(_turned(rule) for rule in table.rules)
    return replace(table, rules=rules, prefix=table.target_prefix, target_prefix=table.prefix)


def _turned(rule: Rule) -> Rule:
    pairs = (Pair(pair.target, pair.target_piece, pair.source, pair.source_piece) for pair in rule.pairs)
    kept = tuple(pair for pair in pairs if not rule.fold or pair.target == 0)
    targets = rule.sources[:1] if rule.fold else rule.sources
    return replace(
        rule,
        sources=rule.targets,
        targets=targets,
        pairs=kept,
        fold=False,
        besides=rule.besides[::-1],
        turned=not rule.turned,
    )


def places_of(table: Table, tensors: Mapping[str, Described], config: Mapping[str, object]) -> dict[str, Slot]:
    """The port's tensors that the rules make of a checkpoint's."""
    known, faults = sizes(table, config)
    if faults:
        raise PlanError(faults)
    shapes = imagine(reversed_table(table), tensors, known)
    shapes |= _made_shapes(table, shapes, known)
    aligned = align_table(table, tensors, shapes, known)
    dtypes = {name: made_dtype(step, tensors) for step in aligned.steps for name in step.targets}
    kinds = {Content("arange"): torch.int64, Content("causal"): torch.bool}
    made = {name: make.value for name, make in made_by(table, shapes).items() if isinstance(make.value, Content)}
    dtypes = {name: kinds[value] for name, value in made.items() if value in kinds} | dtypes
    return {
        name: Slot(name=name, shape=shape, dtype=dtypes.get(name, ANY_DTYPE), parameter=True, built=False, same_as=name)
        for name, shape in shapes.items()
    }


def _made_shapes(table: Table, places: Mapping[str, Shape], known: Mapping[str, int]) -> dict[str, Shape]:
    """The tensors that [make] adds without a module: one for each index that the other names have."""
    found: dict[str, Shape] = {}
    faults = []
    stored = sum(map(math.prod, places.values()))  # a copy is no more than what is stored already
    copied = 0
    made_names = Matcher(((make.term.name, make) for make in table.makes), table.target_prefix)
    for make in table.makes:
        name = make.term.name
        counted = [_index_values(name, index, places, known) for index in name.indices]
        if isinstance(make.value, Name) and all(counted):
            for values in combinations(counted, where=make.where):
                bindings = dict(zip(name.indices, values, strict=True))
                other = present(make.value, bindings, table.target_prefix, places)
                if other not in places and made_names.read(other):
                    message = f"{name.spell(bindings)!r} is to equal {other!r}, which no rule writes"
                    raise PlanError(Fault(code=Code.SHAPE_MISMATCH, where=make.where, message=message))
                if other in places:
                    found[name.spell(bindings)] = places[other]
                    more = math.prod(places[other])
                    copied += more
                    charge("made", ELEMENT * min(more, max(copied - stored, 0)), where=make.where)
            continue
        extents = None if make.term.axes is None else [size_of(axis, known) for axis in make.term.axes]
        if unknown := [index for index, values in zip(name.indices, counted, strict=True) if not values]:
            message = f"without a module nothing says which numbers {unknown[0]} has in '{make.term}'"
            given = f'give a range, {{{unknown[0]}:0..11}}, or their count in [sizes]: {unknown[0]} = "..."; or pass '
            faults.append(
                Fault(code=Code.SIZE_UNKNOWN, where=make.where, message=message, hint=Message(given, Option("into")))
            )
            continue
        if extents is None or None in extents:
            message = f"without a module the shape of '{make.term}' is not known"
            hint = Message(f'state it: "{name} [a]", with the size of a in [sizes]; or pass ', Option("into"))
            faults.append(Fault(code=Code.SIZE_UNKNOWN, where=make.where, message=message, hint=hint))
            continue
        shape = tuple(size for size in extents if size is not None)
        for values in combinations(counted, where=make.where):
            charge("made", ELEMENT * math.prod(shape), where=make.where)
            found[name.spell(dict(zip(name.indices, values, strict=True)))] = shape
    if faults:
        raise PlanError(faults)
    return {name: shape for name, shape in found.items() if name not in places}


ELEMENT = 4
"""Bytes that an element of a tensor made by [make] counts, whatever its dtype."""


def _index_values(name: Name, index: str, places: Iterable[str], known: Mapping[str, int]) -> Sequence[int]:
    """The values of an index: all its spellings, what [sizes] says, those that names beside it have, or its range."""
    size = name.enumerations.get(index) or known.get(index)
    if size:
        return range(size)
    place = next(number for number, part in enumerate(name.parts) if getattr(part, "index", "") == index)
    following = name.parts[place + 1 :]
    ends = (Literal(following[0].text[:1]), Rest("rest")) if following and isinstance(following[0], Literal) else ()
    stem = Name((*name.parts[: place + 1], *ends))
    part = name.parts[place]
    if isinstance(part, Decimal) and part.high is not None:
        beside = Name((*name.parts[:place], part.bounded(0, None), *ends))
        if not any(beside.read(one) is not None for one in places):
            return range(part.low, part.high + 1)
    found = {bindings[index] for place in places if (bindings := stem.read(place)) is not None}
    return sorted(value for value in found if isinstance(value, int))


Shape = tuple[int, ...]


def as_places(table: Table, tensors: Mapping[str, Described]) -> tuple[dict[str, Slot], tuple[LeftOut, ...]]:
    """Take the tensors of a checkpoint in the port's layout for the places of a module."""
    matcher = Matcher(((tie.name, tie) for tie in table.ties), table.target_prefix)
    places: dict[str, Slot] = {}
    same: list[LeftOut] = []
    for name, tensor in tensors.items():
        tie = matcher.first(name)
        other = name
        if tie is not None:
            other = present(tie.line.with_, tie.bindings, table.target_prefix, tensors)
            same.append(LeftOut(name=name, reason="tied in the table", equals=other))
        places[name] = Slot(
            name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, parameter=True, built=False, same_as=other
        )
    return places, tuple(same)


def sources_of(
    table: Table, places: Mapping[str, Slot], config: Mapping[str, object], recorded: Mapping[str, Described] | None
) -> dict[str, Described]:
    """The tensors that a port is converted back to: the recorded ones, else those that the rules name.

    Each gets the dtype of the port's tensor that it is made of.

    Args:
        recorded: the checkpoint's tensors that a record names; None without a record.
    """
    known, faults = sizes(table, config)
    if faults:
        raise PlanError(faults)
    wanted = {name: slot for name, slot in places.items() if slot.same_as == name}
    if recorded is None:
        source_shapes = imagine(table, wanted, known)
    else:
        source_shapes = {name: tuple(tensor.shape) for name, tensor in recorded.items()}
    aligned = align_table(table, source_shapes, places, known)
    dtypes = {name: places[step.targets[0]].dtype for step in aligned.steps for name in step.sources}
    if recorded is not None:  # what the port does not hold goes with the rest where that was cast
        became = {recorded[name].dtype: dtype for name, dtype in dtypes.items()}
        dtypes = {**{name: became.get(tensor.dtype, tensor.dtype) for name, tensor in recorded.items()}, **dtypes}
    return {name: TensorSpec(shape=shape, dtype=dtypes.get(name, ANY_DTYPE)) for name, shape in source_shapes.items()}
