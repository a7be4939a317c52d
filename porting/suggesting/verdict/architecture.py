"""The properties that no weights can change: how many matrices and norms follow each other, and the number of weights.

Neither says which tensor is which.  So both hold where the search came to a part of the table only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from porting.suggesting.draft.table_writer import patterns
from porting.suggesting.search.layouts import distance
from porting.suggesting.search.search_result import CLOSE, SAME, DifferingPlace, SearchResult
from porting.suggesting.subjects.config_fields import Role, config_number
from porting.suggesting.subjects.model_pair import ModelPair
from porting.suggesting.subjects.operation_trace import OperationTrace, Unit, WeightUse
from porting.suggesting.subjects.traced_model import TracedModel
from porting.suggesting.verdict.suggestion import Reason

_STANDING = frozenset({WeightUse.TABLE, WeightUse.OTHER})
"""Weights that meet what no other weight has met: a mask, or positions."""

UNIT, MOST = 0.02, 0.9
"""Rows that a norm made are of length one but for this, which its epsilon takes away: so many of them are looked at."""


@dataclass(frozen=True)
class Place:
    """The place of a matrix in the model.

    Attributes:
        matrices: so many are in front of it on the longest path from the input.
        norms: so many norms are; of several right behind each other only the first counts.  None where not all norms
            are seen.
        fewest: so many norms are on the path with the fewest: a residual connection leads around those of a
            sublayer, and not around those of the residual stream.
    """

    matrices: int
    norms: int | None = None
    fewest: int | None = None

    def __str__(self) -> str:
        norms = "" if self.norms is None else f" and {_count(self.norms, 'norm', 'norms')}"
        if self.norms is not None and self.fewest is not None and self.fewest < self.norms:
            norms = f" and {self.fewest} to {self.norms} norms, depending on the path"
        return f"{_count(self.matrices, 'weight matrix', 'weight matrices')}{norms}"

    @property
    def key(self) -> tuple[int, int, int]:
        """The sort key of places."""
        return self.matrices, self.norms or 0, self.fewest or 0


def _count(number: int, one: str, several: str) -> str:
    return f"{number or 'no'} {one if number == 1 else several}"


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """The matrices of a model that stand in front of something that both models have.

    Attributes:
        places: where each stands; several where it is used several times.
        known: every norm is one that is seen, also those without weights.
    """

    units: tuple[Unit, ...]
    places: Mapping[str, Collection[Place]]
    known: bool


def matrices(trace: OperationTrace, saved: Collection[str], common: Collection[str], words: int) -> Matrices:
    """The matrices of a model, without those of parts that only this model has at its end.

    Args:
        saved: the names of the tensors that a checkpoint holds: what a module computes, such as the frequencies of
            rotary embeddings by which positions are multiplied, is none of its matrices.
        common: the names of the tensors that have a counterpart in the other model.
        words: the size of the vocabulary: a matrix at the end that has as many rows is a head.
    """
    needed: set[int] = set()
    for unit in reversed(trace.units):
        if unit.number in needed or not {*common}.isdisjoint(unit.names):
            needed |= {unit.number, *unit.behind}
    inner = {number for unit in trace.units for number in unit.behind}
    reached: dict[int, Place] = {}
    places: dict[str, set[Place]] = {}
    norms = {unit.number for unit in trace.units if _is_norm(unit)}
    units = []
    for unit in trace.units:
        before = [reached[number].key for number in unit.behind if number in reached]
        if not before and (unit.kind in _STANDING or {*saved}.isdisjoint(unit.names)):
            continue  # angles that are made of positions, distances beside a mask: no way from the input
        most = [max((one[side] for one in before), default=0) for side in (0, 1)]
        here = Place(most[0], most[1], min((one[2] for one in before), default=0))
        matrix = unit.kind is WeightUse.LINEAR and not {*saved}.isdisjoint(unit.weights)
        norm = unit.number in norms and not norms >= unit.behind != frozenset()
        after = Place(here.matrices + matrix, here.key[1] + norm, here.key[2] + norm)
        reached[unit.number] = max(after, reached.get(unit.number, after), key=lambda one: one.key)
        head = unit.number not in inner and unit.output.shape[-1:] == (words,)
        if matrix and unit.number in needed and not head:
            units.append(unit)
            for name in unit.weights:
                if name in saved:
                    places.setdefault(name, set()).add(here)
    return Matrices(units=tuple(units), places=places, known=len(norms) == trace.roots)


def _is_norm(unit: Unit) -> bool:
    """Whether a unit is a norm, and not only a gain: torch's own, or a gain of rows of length one, or divided after."""
    if unit.kind is not WeightUse.NORM or unit.operand is None or not unit.weights:
        return False
    if unit.divided:
        return True
    lengths = unit.operand.double().pow(2).mean(-1).sqrt()
    return unit.eps is not None or float((lengths - 1).abs().flatten().quantile(MOST)) < UNIT


def differs(subjects: ModelPair, found: SearchResult) -> Iterator[Reason]:
    """The differences that show that the module cannot be the reference, whatever its weights are."""
    tables = [*missing_tables(found)]
    yield from tables
    if tables or any(
        one.what == "shared" for one in found.divergences
    ):  # what these are due to, the checkpoint's values decide
        return
    words = config_number(subjects.twin.config, Role.VOCABULARY)
    written = {name for move in found.moves for name in move.writes} | {*found.made}
    read = {name for move in found.moves for name in move.reads}
    every = [{name for unit in trace.units for name in unit.names} for trace in (found.trace, found.reference)]
    sizes = {name: one.numel() for name, one in found.models[0].leaves.items()} if found.models is not None else {}
    others = {name: one.numel() for name, one in subjects.twin.tensors.items()}
    for mine, other in ((written, read), every):  # without what ends one of them, or both as a whole
        ours, theirs = (
            matrices(found.trace, sizes, mine, words),
            matrices(found.reference, others, other, words),
        )
        if not ours.units or not theirs.units:
            return
        ours, theirs = _trimmed(ours, sizes, theirs, others), _trimmed(theirs, others, ours, sizes)
        if _cuts_layers(ours, found.trace) or _cuts_layers(theirs, found.reference):
            continue  # what has no counterpart there may be what was matched wrongly, or built with other sizes
        if _numbers(ours, sizes) == _numbers(theirs, others):
            yield from _placed(ours, theirs, sizes, others)
            return
    yield from _too_few(subjects, found, ours, theirs, sizes, others)


def _cuts_layers(side: Matrices, trace: OperationTrace) -> bool:
    """Whether what a side has behind its last counterpart begins within its layers, and is no head alone."""
    within = {_NUMBER.sub("#", name) for name in side.places}
    names = {name for unit in trace.units if unit.kind is WeightUse.LINEAR for name in unit.weights}
    return any("#" in (kind := _NUMBER.sub("#", name)) and kind in within for name in names - side.places.keys())


_NUMBER = re.compile(r"\d+")


def _numbers(side: Matrices, sizes: Mapping[str, int]) -> int:
    """How many weights the matrices have."""
    return sum(sizes.get(name, 0) for name in side.places)


def _trimmed(one: Matrices, sizes: Mapping[str, int], other: Matrices, others: Mapping[str, int]) -> Matrices:
    """A side without what it has more of at its end, as a pooler; the side as it is where no such end explains it."""
    more = _numbers(one, sizes) - _numbers(other, others)
    depth = {name: max(place.matrices for place in places) for name, places in one.places.items()}
    for least in sorted({*depth.values()}, reverse=True) if more > 0 else ():
        end = {name for name in depth if depth[name] >= least}
        if sum(sizes.get(name, 0) for name in end) == more:
            units = tuple(unit for unit in one.units if end.isdisjoint(unit.weights))
            places = {name: places for name, places in one.places.items() if name not in end}
            return replace(one, units=units, places=places)
    return one


def _placed(ours: Matrices, theirs: Matrices, sizes: Mapping[str, int], others: Mapping[str, int]) -> Iterator[Reason]:
    """As many numbers in matrices, which do not stand behind as many matrices and norms.

    A tensor that holds several matrices counts as these do.  One that is used at several places counts at these
    together, if each of them uses all of it: a part of it could be cut off.
    """
    if not all(_whole(side, numbers) for side, numbers in ((ours, sizes), (theirs, others))):
        return
    known = ours.known and theirs.known
    counts = []
    for side, numbers in ((ours, sizes), (theirs, others)):
        count: Counter[tuple[Place, ...]] = Counter()
        for name, places in side.places.items():
            count[_counted(places, known=known)] += numbers[name]
        counts.append(count)
    mine, other = (count - against for count, against in (counts, counts[::-1]))
    if not mine:
        return
    first = min(mine, key=_key)
    name = next(name for name, places in ours.places.items() if _counted(places, known=known) == first)
    nearest = min(other, key=_key)
    said = (
        f"counted from the input, the module applies {counts[0][first]:,} weights ({name} and what stands beside it) "
        f"after {_listed(first)}, and the checkpoint's model applies {counts[1][first]:,} there: its other "
        f"{other[nearest]:,} come after {_listed(nearest)}"
    )
    yield Reason(kind="structure", said=f"{said}. The operations differ, whatever the weights are", shown=True)


def _whole(side: Matrices, numbers: Mapping[str, int]) -> bool:
    """Whether each tensor that is used at several places is used as a whole there."""
    several = {name for name, places in side.places.items() if len(places) > 1}
    uses = ((unit, name) for unit in side.units for name in unit.weights if name in several)
    return all(len(unit.weights) == 1 and unit.summed * unit.output.shape[-1] == numbers[name] for unit, name in uses)


def _counted(places: Collection[Place], *, known: bool) -> tuple[Place, ...]:
    """The places of a tensor, without the norms where not all of these are seen."""
    return tuple(sorted((place if known else Place(place.matrices) for place in places), key=lambda one: one.key))


def _key(places: tuple[Place, ...]) -> tuple[tuple[int, int, int], ...]:
    return tuple(place.key for place in places)


def _listed(places: tuple[Place, ...]) -> str:
    more = f" and at {len(places) - 1} more places" if len(places) > 1 else ""
    return f"{places[0]}{more}"


def _too_few(
    subjects: ModelPair,
    found: SearchResult,
    ours: Matrices,
    theirs: Matrices,
    sizes: Mapping[str, int],
    others: Mapping[str, int],
) -> Iterator[Reason]:
    """Fewer numbers in the whole module than the reference's matrices have degrees of freedom.

    What weights can be exchanged for without a difference is not counted: a matrix within each head of attention, a
    factor of each feature, a turn of the residual stream, a matrix that can be multiplied into the one before.
    """
    config = subjects.twin.config
    width, heads = config_number(config, Role.HIDDEN), config_number(config, Role.HEADS)
    size = config_number(config, Role.HEAD_SIZE) or (width // heads if heads else 0)
    if not width or not heads:
        return
    lone = {name for unit in theirs.units for name in unit.weights if not _merges(unit, found.reference)}
    free = sum(others[name] for name in lone) - width**2
    for unit in theirs.units:
        out = sum(others[name] for name in unit.weights) // (unit.summed or 1)
        free -= out * size if out <= 3 * heads * size else out
    tables = [
        sum(
            numbers.get(name, 0)
            for name in {
                name for one in trace.units if one.kind in {WeightUse.LOOKUP, WeightUse.TABLE} for name in one.names
            }
        )
        for trace, numbers in ((found.trace, sizes), (found.reference, others))
    ]
    held = _used(found) - min(tables)
    read = {_layer(name) for move in found.moves for name in move.reads}
    lacking = [name for unit in theirs.units for name in unit.weights if unit in found.lacking and _layer(name) in read]
    same = {one.summed for one in ours.units} == {one.summed for one in theirs.units}  # else a size may be a default
    if held < free and lacking and same:
        said = f"your module has no {lacking[0]}: it uses {held} parameters besides its tables,"
        yield Reason(kind="structure", said=f"{said} and the checkpoint's matrices need {free} at least", shown=True)


def missing_tables(found: SearchResult) -> Iterator[Reason]:
    """The tables without which the reference computes what the module does: biases of distances, or positions.

    All tables of the reference that the module has no place for are set to zero, and the reference is run.  Where a
    matrix is given another activation then for the first time, and the module's is given the same, these tables are
    what the module lacks: no other weights make up for what depends on the position of a token.

    Nothing is said where the module has a tensor of zeros that nothing fills: the table may belong there.
    """
    read = {name for move in found.moves for name in move.reads}
    lost = {name for one in found.reference.units if _is_table(one) for name in one.names} - read
    if found.models is None or not lost:
        return
    port, model = found.models
    written = {name for move in found.moves for name in move.writes}
    if any(
        not bool(port.leaves[name].any()) for name in (port.loadable & port.leaves.keys()) - written - found.made.keys()
    ):
        return
    ours = [one for one in port.run().units if one.operand is not None]
    without = {one.number: one.operand for one in _without(model, lost).units}
    for unit in found.reference.units:
        given, other = unit.operand, without.get(unit.number)
        if unit.kind is not WeightUse.LINEAR or given is None or other is None or _same(given, other):
            continue
        at = next((one for one in ours if one.operand is not None and _same(one.operand, other)), None)
        if at is not None and _depends_on_place(given - other):
            names = ", ".join(patterns(sorted(lost), model.leaves.keys() - lost))
            said = f"your module has no {names}: the checkpoint's model gives {at.names[0]} the same without"
            yield Reason(kind="missing table", said=said, shown=True, places=(at.names[0],))
        return


def _without(model: TracedModel, names: Collection[str]) -> OperationTrace:
    """The run of a model with zeros for some tensors."""
    tensors = {name: model.leaves[name] for name in names}
    kept = {name: one.clone() for name, one in tensors.items()}
    with torch.no_grad():
        try:
            for one in tensors.values():
                one.zero_()
            return model.run()
        finally:
            for name, one in tensors.items():
                one.copy_(kept[name])


def _same(one: Tensor, other: Tensor) -> bool:
    return one.numel() == other.numel() and distance(one, other, SAME) <= SAME


def other_axes(one: DifferingPlace, found: SearchResult) -> Reason | None:
    """Two norms of one activation, of which one norms the features of each head and the other those of all; else None.

    The factor of each token is another one then, which no weights make up for.
    """
    ours, theirs = (
        next((unit for unit in trace.units if name in unit.names and unit.kind is WeightUse.NORM), None)
        for trace, name in ((found.trace, one.port), (found.reference, one.reference))
    )
    if ours is None or theirs is None or ours.operand is None or theirs.operand is None:
        return None
    if ours.given is None or theirs.given is None or ours.given.numel() != theirs.given.numel():
        return None
    given = [unit.given.double().flatten().sort().values for unit in (ours, theirs) if unit.given is not None]
    counts = [unit.operand.shape[-1] for unit in (ours, theirs) if unit.operand is not None]
    if counts[0] == counts[1] or distance(given[0], given[1], SAME) > SAME:
        return None
    places = [name.rpartition(".")[0] or name for name in (one.port, one.reference)]
    said = f"{places[0]} is a norm of {counts[0]} features, and the checkpoint's {places[1]} one of {counts[1]}"
    return Reason(kind="norm", said=said, shown=True, places=(one.port,))


def _depends_on_place(apart: Tensor) -> bool:
    """Whether the difference of two activations [... s e] is another one at each position."""
    return float((apart - apart.mean(-2, keepdim=True)).abs().max()) > CLOSE * float(apart.abs().max())


def _used(found: SearchResult) -> int:
    """How many of the module's numbers its forward uses: a matrix that it never reads holds nothing."""
    run = {name for unit in found.trace.units for name in unit.names} - found.trace.idle
    leaves = {} if found.models is None else found.models[0].leaves
    named = {name: one for name, one in leaves.items() if isinstance(one, nn.Parameter)}
    used = {id(named[name]) for name in run & named.keys()}
    single = {id(one): one for one in named.values()}
    return sum(one.numel() for one in single.values() if id(one) in used or one.ndim < 2)


def _is_table(unit: Unit) -> bool:
    return unit.kind in {WeightUse.LOOKUP, WeightUse.TABLE}


def _layer(name: str) -> str:
    """The name up to its first number: of tensors of one layer."""
    found = re.match(r".*?\.\d+(?=\.|$)", name)
    return found.group() if found else ""


def _merges(unit: Unit, trace: OperationTrace) -> bool:
    """Whether a matrix could be multiplied into what stands right before it: another one, or a table."""
    before = [one for one in trace.units if one.number in unit.behind]
    if before and all(map(_is_table, before)):
        return True
    given = unit.operand
    return given is not None and any(
        one.kind is WeightUse.LINEAR and distance(one.output, given, SAME) <= SAME for one in before
    )
