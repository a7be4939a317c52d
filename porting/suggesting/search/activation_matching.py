"""Find the corresponding places of two models: activations and rules are compared.

A norm that divides by the unbiased deviation is recognised too: a table can take that into the gain.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from dataclasses import replace
from itertools import permutations, product

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from porting.suggesting.search.feature_permutation import FeatureOrder
from porting.suggesting.search.layouts import CandidateRule, Shapes, distance, element_axes
from porting.suggesting.search.name_similarity import blank
from porting.suggesting.search.search_result import SAME
from porting.suggesting.subjects.operation_trace import OperationTrace, Unit, WeightUse
from porting.suggesting.subjects.sampler import BATCH


def normed(unit: Unit) -> Tensor:
    """A norm's operand as its gain meets it: centred, if the norm does that, and of length one."""
    if unit.operand is None:
        return torch.empty(0)
    known = _NORMED.setdefault(unit.operand, {})
    key = unit.centred, 0 if unit.operand.is_inference() else unit.operand._version
    if key not in known:
        value = unit.operand - unit.operand.mean(-1, keepdim=True) if unit.centred else unit.operand
        known[key] = value / value.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
    return known[key]


_NORMED: MutableMapping[Tensor, dict[tuple[bool, int], Tensor]] = WeakTensorKeyDictionary()
"""A cache by operand, as long as it is kept: each is compared with those of all layers many times."""


def kind_of_norm(unit: Unit) -> str:
    """What torch calls the norm that a unit is: its statistics are over features, groups of channels or the data.

    Returns:
        Nothing for a gain that multiplies what was not normed, as the scale of a layer.
    """
    if unit.kind is WeightUse.NORM and unit.weights and unit.operand is not None:
        if (
            unit.given is not None
            and not (unit.operation or unit.divided)
            and distance(unit.given, unit.operand, SAME) <= SAME
        ):
            return ""
        return "LayerNorm" if float(normed(unit).mean(-1).abs().max()) <= SAME else "RMSNorm"
    return next((kind for part, kind in _NORM_OPERATIONS.items() if part in unit.operation), "")


_NORM_OPERATIONS = {"batch_norm": "BatchNorm", "group_norm": "GroupNorm", "instance_norm": "InstanceNorm"}


def is_other_norm(unit: Unit, mate: Unit) -> bool:
    """Whether two norms are given the same and count over something else: a GroupNorm or a LayerNorm for an RMSNorm."""
    kinds = {kind_of_norm(unit), kind_of_norm(mate)}
    if "" in kinds or len(kinds) == 1:
        return False
    given = [[one for one in (norm.given, norm.operand) if one is not None] for norm in (unit, mate)]
    return any(apart(ours, theirs, SAME) <= SAME for ours, theirs in product(*given))


def laid_as(unit: Unit, mate: Unit) -> Tensor | None:
    """What a norm gives, in the layout of another's that is given the same: channels are the second axis or the last.

    Returns:
        The mate's output, of the shape of the unit's; None where they are given something else.
    """
    for ours, theirs in product(_operands(unit), _operands(mate)):
        for turn in ((0, 0), (-1, 1), (1, -1)) if theirs.ndim > 2 else ((0, 0),):
            if ours.numel() == theirs.numel() and _close(theirs.movedim(*turn).reshape(ours.shape), ours):
                return mate.output.movedim(*turn).reshape(unit.output.shape)
    return None


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape are equal but for rounding in float64."""
    return bool(torch.allclose(one, other, rtol=0, atol=SAME * float(other.abs().max())))


def _operands(unit: Unit) -> list[Tensor]:
    """What a norm is given, in the layout of its output; the operand is normed already where that is done by hand."""
    known = [one for one in (unit.given, unit.operand) if one is not None]
    known += [one.movedim(1, -1) for one in known if one.ndim > 2]
    return [one for one in known if one.shape == unit.output.shape]


def shared(one: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Two activations at the positions that both have: all of them, or the first or the last of the longer's.

    A module may norm every position where the reference norms one, or fill rows up to a length of its own.
    """
    if one.numel() == other.numel():
        yield one, other
        return
    turned = one.numel() < other.numel()
    longer, shorter = (other, one) if turned else (one, other)
    width = longer.shape[-1] if longer.ndim else 0
    single = any(value.ndim == 3 and len(value) == 1 for value in (one, other))  # for a module that takes one row
    count = 1 if single else BATCH
    rows, left = divmod(shorter.numel(), count * width or 1)
    if longer.ndim not in {2, 3} or left or not rows or longer.numel() % (count * width):
        return
    for batch in (0, 1):
        value = longer.reshape((count, -1, width) if batch == 0 else (-1, count, width))
        if longer.ndim == 3 and longer.shape != value.shape:
            continue
        for start in (0, value.shape[1 - batch] - rows):
            some = value.narrow(1 - batch, start, rows)
            yield (shorter, some) if turned else (some, shorter)


def apart(one: Tensor, other: Tensor, bound: float = math.inf) -> float:
    """The distance of two activations, whatever their layouts, at the positions that both have.

    Args:
        bound: more than this need not be known exactly.
    """
    return min((distance(a, b, bound) for a, b in shared(one, other)), default=math.inf)


def scores_behind(
    group: Sequence[Unit], mates: Sequence[Unit], ours: OperationTrace, theirs: OperationTrace
) -> Iterator[tuple[Tensor, Tensor]]:
    """The scores of the attention behind some weights, of both sides, wherever neither masks them.

    First what the softmax of both is given, then what queries and keys make, before anything is added to it: the first
    product of two activations with as many numbers.
    """
    if len(mates) <= 1:
        return
    places = [(max(one.number for one in units), trace) for units, trace in ((group, ours), (mates, theirs))]
    given = [[value for number, value in trace.scores if number > last] for last, trace in places]
    size = next((found[0].numel() for found in given if found), None)
    products = [
        [one for number, one in trace.products if number > last and one.numel() == size] for last, trace in places
    ]
    for own, wanted in ((mine[0], likewise[0]) for mine, likewise in (given, products) if mine and likewise):
        if own.numel() == wanted.numel():
            one, other = own.double().reshape(wanted.shape), wanted.double()
            kept = (one.abs() < MASKED) & (other.abs() < MASKED)
            if bool(kept.any()):
                yield one[kept], other[kept]


def has_scores(group: Sequence[Unit], mates: Sequence[Unit], ours: OperationTrace, theirs: OperationTrace) -> bool:
    """Whether the attention behind some weights has the reference's scores, but for a factor of all of them.

    So query and key are known although what comes behind differs, as with another mask.
    """
    return any(_proportional(*scores) for scores in scores_behind(group, mates, ours, theirs))


def _proportional(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal but for a positive factor of all numbers."""
    left, right = (value / (float(value.pow(2).mean().sqrt()) or 1.0) for value in (one, other))
    return float((left - right).abs().max()) <= SAME


MASKED = 1e4
"""The size from which on a score is a mask's."""


def whole(one: Unit, other: Unit) -> bool:
    """Whether two units are given activations of one size, and not one of them some positions of the other's."""
    return one.operand is not None and other.operand is not None and one.operand.numel() == other.operand.numel()


def skips(unit: Unit, norm: Unit) -> bool:
    """Whether a matrix of the module is given what the reference gives to a norm: the norm is not there."""
    if norm.kind is not WeightUse.NORM or unit.kind is WeightUse.NORM or unit.operand is None or norm.operand is None:
        return False
    return distance(unit.operand, norm.operand, SAME) <= SAME


def same_activation(one: Unit, other: Unit) -> bool:
    """Whether two units are given the same activation."""
    if one.operand is None or other.operand is None:
        return one is other
    if one.kind is WeightUse.NORM or other.kind is WeightUse.NORM:
        return one is other
    return distance(one.operand, other.operand, SAME) <= SAME


def vector(move: CandidateRule, ours: Shapes, theirs: Shapes) -> CandidateRule:
    """A move of one axis between shapes that have axes of one element besides, or have it split: [h d] of [(h d)].

    >>> from porting.suggesting.search.layouts import single_rule
    >>> [str(vector(single_rule("n", "g"), {"g": shape}, {"n": (6,)})) for shape in ((1, 6), (2, 3))]
    ['n [e] = g [1 e]', 'n [(o e)] = g [o e]']
    >>> str(vector(single_rule("A_log", "decay"), {"decay": (2, 3)}, {"A_log": (3, 2)}))
    'A_log [o e] = decay [e o]'
    """
    sides = [[size for size in shape if size > 1] for shape in (theirs[move.reads[0]], ours[move.writes[0]])]
    counts = [len(side) for side in sides]
    if sorted(counts) == [1, 2] and math.prod(sides[0]) == math.prod(sides[1]):
        return move.along(*("(o e)" if count == 1 else "o e" for count in counts))
    if counts == [2, 2] and sides[0] == sides[1][::-1]:
        return move.along("o e", "e o")
    return move.along(element_axes(theirs[move.reads[0]]), element_axes(ours[move.writes[0]]))


def laid_out(one: Tensor, other: Tensor, basis: FeatureOrder) -> bool:
    """Whether two activations hold the same numbers with nothing but their axes in another order, split or merged.

    Equal numbers in any order are not enough: features backwards are another activation.
    """
    sources = [other, basis.turned(other)] if basis.theirs and other.shape[-1] % 2 == 0 else [other]
    return any(
        _close(value.permute(order).reshape(like.shape), like)
        for source in sources
        for value, like in ((source, one), (one, source))
        for order in permutations(range(value.ndim))
    )


def alike(value: Tensor, like: Tensor, *orders: FeatureOrder) -> Tensor:
    """A value in the shape of another: batch, sequence or heads first, in the nearest of these orders of its features.

    Where one has fewer positions than the other, those that both have are taken, and the other's own stay as they are.
    """
    if value.numel() != like.numel():
        made = like.clone()
        pairs = [(other, alike(one, other, *orders)) for one, other in shared(value, made)]
        if pairs:
            place, put = min(pairs, key=lambda both: float((both[0] - both[1]).pow(2).sum()))
            place.copy_(put)
        return made
    options = []
    for one in (value, *(order.turned(value) for order in orders if order.theirs)):
        options.append(one.reshape(like.shape))
        if value.ndim == 4:
            options.append(one.transpose(1, 2).reshape(like.shape))
        if value.ndim in {2, 3} and value[..., 0].numel() % BATCH == 0:
            rows = one.reshape(BATCH, -1, value.shape[-1])
            options.append(rows.transpose(0, 1).reshape(like.shape))

    return min(options, key=lambda one: float((one - like).pow(2).sum()))


def with_heads_in_turn(value: Tensor, like: Tensor, counts: Collection[int]) -> Tensor:
    """An activation of the shape of another, with a feature of each head in turn where that is clearly nearer to it.

    A contraction of two axes, as ``einsum("btnh,nhd->btd")``, flattens heads and their features in an order of its own.

    Args:
        counts: how many heads there may be, or features in one.
    """

    def far(one: Tensor) -> float:
        return float((one - like).pow(2).sum())

    fitting = [count for count in counts if 1 < count < value.shape[-1] and value.shape[-1] % count == 0]
    turned = (value.reshape(*value.shape[:-1], count, -1).transpose(-1, -2).flatten(-2) for count in fitting)
    nearest = min(turned, key=far, default=value)
    return nearest if far(nearest) < CLEARLY * far(value) else value


CLEARLY = 0.1
"""Squared, and of the distance in the reference's own order: so near is an operand whose features lie otherwise."""


def order_of(unit: Unit, mate: Unit, *orders: FeatureOrder) -> FeatureOrder:
    """The order of its features in which a unit is given the reference's operand: its own if no other is nearer."""
    plain = FeatureOrder()
    ours, theirs = (normed(one) if one.kind is WeightUse.NORM else one.operand for one in (unit, mate))
    if ours is None or theirs is None or ours.numel() != theirs.numel():
        return plain

    def apart(order: FeatureOrder) -> float:
        return float((alike(order.turned(theirs), ours) - ours).pow(2).sum())

    nearest = min((plain, *orders), key=apart)
    return nearest if apart(nearest) < CLEARLY * apart(plain) else plain


def explained(move: CandidateRule, why: str, *, proven: bool, scale: str = "", offset: str = "") -> CandidateRule:
    """The move with what decided it, and with another scale or offset if one is given."""
    return replace(move, why=why, proven=proven, scale=scale or move.scale, offset=offset or move.offset)


def habit(move: CandidateRule) -> str:
    """A move without the numbers of its names: what is the same in every layer."""
    return blank(str(move)) + str(move.constants or "")


def extents(names: Sequence[str], shapes: Shapes) -> list[list[int]]:
    """The sizes of some tensors, whatever their order."""
    return [sorted(shapes[name]) for name in names if name in shapes]


def first_part(some: Sequence[Unit], units: Sequence[Unit]) -> list[Unit]:
    """The units of the first one's part.

    The keys and values of every decoder layer are given the same activation, what the encoder returns.  They are
    distinguished by what is computed from them: a part ends at the first matrix whose operand comes from the part.

    Args:
        some: units that are given one activation, in order of execution.
    """
    wanted = {id(one) for one in some}
    made = {some[0].number}
    found = [some[0]]
    for one in units[units.index(some[0]) + 1 :]:
        if one.behind & made:
            if one.kind is WeightUse.LINEAR:
                break
            made.add(one.number)
        elif id(one) in wanted:
            made.add(one.number)
            found.append(one)
    return found


def element_count(some: Sequence[Unit], shapes: Shapes) -> int:
    """How many numbers the matrices have together."""
    return sum(math.prod(shapes[name]) for one in some for name in one.weights)


def is_unbiased(unit: Unit | None, mate: Unit) -> bool:
    """Whether the module's norm is smaller than the reference's by Bessel's correction, and in each row by the same.

    Another eps makes rows of little variance smaller than others, and by chance as much on average.
    """
    bare = _bare(mate)
    if unit is None or bare is None or unit.output.numel() != mate.output.numel():
        return False
    gain, shift = bare
    width = mate.output.shape[-1]
    sides = [((one.output.reshape(-1, width) - shift) / gain).pow(2).mean(-1).sqrt() for one in (unit, mate)]
    expected = math.sqrt((width - 1) / width)
    off = ((sides[0] / sides[1]) / expected - 1) / (1 - expected)
    return abs(float(off.mean())) < 0.1 and float(off.abs().max()) < 0.2


def gains_agree(one: Unit | None, other: Unit, bound: float) -> bool:
    """Whether two norms multiply each feature by the same, whatever their eps is and whether they take off the mean."""
    sides = [None if unit is None else _bare(unit) for unit in (one, other)]
    gains = [side[0] for side in sides if side is not None]
    return len(gains) == 2 and apart(gains[0], gains[1], bound) <= bound


def _bare(mate: Unit) -> tuple[Tensor, Tensor] | None:
    """The gain and the shift of the reference's norm, from what it gives: two numbers for each feature."""
    if mate.operand is None:
        return None
    operand = mate.operand - mate.operand.mean(-1, keepdim=True) if mate.centred else mate.operand
    normed = operand / (operand.pow(2).mean(-1, keepdim=True) + (mate.eps or 0.0)).sqrt()
    rows, given = normed.reshape(-1, operand.shape[-1]), mate.output.reshape(-1, operand.shape[-1])
    if rows.shape != given.shape:  # what is taken for the norm's output goes on with more of it
        return None
    mean, middle = rows.mean(0), given.mean(0)
    spread = rows - mean
    gain = (spread * (given - middle)).sum(0) / spread.pow(2).sum(0).clamp_min(1e-30)
    return gain, middle - gain * mean


def same_places(port: OperationTrace, reference: OperationTrace, ours: Shapes, theirs: Shapes) -> dict[str, str]:
    """The tensors that are at one place of two runs: of one shape, behind the same ones, and in one order.

    Args:
        ours, theirs: the tensors that are asked about, with their shapes.

    Returns:
        A name of the port -> one of the reference.
    """
    places = _places(reference, theirs)
    found: dict[str, str] = {}
    for key, some in _places(port, ours).items():
        if len(some) == len(places.get(key, ())):
            found.update(zip(some, places[key], strict=True))
    return found


def _places(trace: OperationTrace, shapes: Shapes) -> dict[object, list[str]]:
    """The tensors of a run by their shape and the shapes of what is right behind, in the order of the run."""
    units = {unit.number: unit for unit in reversed(trace.units)}
    found: dict[object, list[str]] = {}
    seen: set[str] = set()
    for unit in trace.units:
        before = sorted(str(shapes.get(units[one].names[0])) for one in unit.behind if one in units)
        for name in unit.names:
            if name in shapes and name not in seen:
                seen.add(name)
                found.setdefault((shapes[name], *before), []).append(name)
    return found
