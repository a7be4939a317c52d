"""Whether other weights could make up for a step of the port that differs from the reference's.

A port that scales its scores twice is the reference with other weights; one that takes a sigmoid where the reference
takes a softmax is not, whatever its weights are.  Weights act on a step in two places: matrices and biases behind it
map the features of its result, and those in front of it map the features of what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, permutations, product
from operator import itemgetter
from types import MappingProxyType

import torch
from torch import Tensor

from porting.causes.diverging import MASKED, MOVING, is_moved_weight
from porting.causes.replay import Values
from porting.causes.step_differences import unmoved
from porting.causes.tape import UNFIT, Call, Ref, Tape
from porting.tracing.calls import Kind, kind_of, tensors_in

AFFINE = 1e-9
"""A second difference up to this, relative to the largest value, is rounding."""

SAMPLES = (1.0, 0.6, 1.5, -1.0, -0.4, 2.2, 0.25, -1.7, 0.8, -0.7, 1.2, 3.0)
"""Both sides are given the recorded tensors, and these multiples of them."""

WAVES = tuple((1.5 + 0.7 * number, 0.4 * number) for number in range(16))
"""And sines of their elements, by frequency and phase: of multiples a ReLU gives multiples, which are no new rows."""

SCALES, SHIFT = tuple(2.0**exponent for exponent in range(-2, 5)), 2.0
"""The factors that are tried on what the port's step is given, before the best one is refined, and the largest shift.

A small factor or a large shift makes every smooth function nearly affine, so that weights could do anything."""

REFINED = 16
"""Rounds of the search around the best factor and shift."""

EXACT, NEAR = 1e-3, 2.0
"""A share that is small enough with any factor and shift; the share ``enough`` counts for factors from 1/2 to 2."""

EXCHANGED = 6
"""Orders of a step's operands that are tried."""

ENOUGH, MOST = 2, 8
"""The least and the most rows of numbers for each unknown of an affine map; with fewer it fits whatever is computed."""

RIDGE = 1e-12
"""What is added to the squares of features, relative to their mean: some may be the same or zero."""

_CONTRACTIONS = frozenset({
    Kind.LINEAR, Kind.PRODUCT, Kind.BIASED_PRODUCT, Kind.EINSUM, Kind.ATTENTION, Kind.MULTI_HEAD, Kind.FLEX_ATTENTION,
    Kind.SCORES, Kind.CONTEXT, Kind.EMBEDDING,
})  # fmt: skip
"""Functions in which features meet features: the order of the features decides what they give."""


def multiplied(tape: Tape, call: Call) -> Ref | None:
    """Return the activation that a call multiplies with a matrix of weights, before it was rearranged."""
    weights = [tape[ref] for ref in call.reads if is_moved_weight(tape, ref)]
    found = {ref for ref in call.reads if tape.learned(ref) and not is_moved_weight(tape, ref)}
    return unmoved(tape, found.pop()) if any(map(_is_matrix, weights)) and len(found) == 1 else None


def _is_matrix(weight: Tensor) -> bool:
    """Whether a weight is more than a number for each feature."""
    return max(weight.shape, default=1) < weight.numel()


@dataclass(frozen=True)
class Computation:
    """The calls of one side that compute a tensor from tensors that both sides have.

    Attributes:
        values: the side's values.
        calls: in order; none where the result is one of the operands.
        operands: what they read of both sides' tensors.
        result: the computed tensor.
    """

    values: Values
    calls: tuple[Call, ...]
    operands: frozenset[Ref]
    result: Ref

    def given(
        self,
        change: Callable[[Tensor], Tensor],
        of: Collection[Ref] | None = None,
        instead: Mapping[Ref, Ref] = MappingProxyType({}),
    ) -> Tensor:
        """Return the result with operands changed; scores that are masked stay so.

        Args:
            change: what is done to each.
            of: some of the operands; by default all.
            instead: operands that take the place of others.
        """
        operands = self.operands if of is None else of
        changed = dict(self.values.changed)
        for ref in operands:
            operand = self.values[instead.get(ref, ref)]
            changed[ref] = torch.where(_is_masked(operand), operand, change(operand))
        values = Values(self.values.tape, changed, held=self.values.held, around=self.values.around)
        for call in self.calls:
            values.changed.update(zip(call.writes, tensors_in(values.run(call)), strict=True))
        return values[self.result]

    def is_affine(self) -> bool:
        """Whether the result is an affine function of each operand, as products with tables of positions are."""
        return all(map(self.is_affine_in, self.operands))

    def is_affine_in(self, operand: Ref) -> bool:
        """Whether the result is an affine function of one operand."""
        back, none, once, twice = (self.given(_times(by), [operand]) for by in (-1.0, 0.0, 1.0, 2.0))
        scale = float(once.abs().max())
        bends = (once + back - 2 * none, twice - 2 * once + none)
        return all(float(bend.abs().max()) <= AFFINE * scale for bend in bends)

    def behind_affine(self, *, undone: bool) -> Computation:
        """Return what is computed behind the affine functions that its operands are given to first.

        An operand stands at the place of the result of the last affine function of it alone that has its shape.

        Args:
            undone: leave out functions whose results do not tell what they were given: they take away what all
                features have in common, as centring does.

        Returns:
            The computation; itself where no operand is given to such a function.
        """
        before: dict[Ref, frozenset[Ref]] = {ref: frozenset({ref}) for ref in self.operands}
        last: dict[Ref, Call] = {}
        for call in self.calls:
            read = frozenset[Ref]().union(*(before.get(ref, ()) for ref in call.reads))
            before.update(dict.fromkeys(call.writes, read))
            if len(call.writes) != 1 or len(read) != 1:
                continue
            (operand,), result = read, call.writes[0]
            given = self.values[operand]
            if self.values[result].shape != given.shape or torch.equal(self.values[result], given):
                continue
            function = replace(self, calls=tuple(one for one in self.calls if one.number <= call.number), result=result)
            if function.is_affine_in(operand) and not (undone and function._forgets_what_is_common(operand)):
                last[operand] = call
        if not last or any(call.writes[0] == self.result for call in last.values()):
            return self
        values = {call.writes[0]: self.values[operand] for operand, call in last.items()}
        starts = self.operands | frozenset(values)
        needed, calls = {self.result}, list[Call]()
        for call in reversed(self.calls):
            if needed & set(call.writes) and not starts & set(call.writes):
                calls.insert(0, call)
                needed.update(call.reads)
        changed = {**self.values.changed, **values}
        start = Values(self.values.tape, changed, held=self.values.held, around=self.values.around)
        return Computation(start, tuple(calls), starts & needed, self.result)

    def _forgets_what_is_common(self, operand: Ref) -> bool:
        """Whether an affine function of an operand is the same with one number added to all features."""
        once, more = self.given(_times(1.0), [operand]), self.given(lambda one: one + 1.0, [operand])
        return float((more - once).abs().max()) <= AFFINE * max(float(once.abs().max()), 1.0)


def computed_from(values: Values, result: Ref, shared: Callable[[Ref], bool]) -> Computation | None:
    """Return the calls that compute a tensor from tensors that both sides have.

    Args:
        shared: whether a tensor is one that both sides have.

    Returns:
        The calls; None where a matrix, a table or the order of features has a part in it: weights change these.
    """
    tape, calls, operands, waiting = values.tape, dict[int, Call](), set[Ref](), [result]
    while waiting:
        call = tape.maker(waiting.pop())
        if call is None or kind_of(call.function) in _CONTRACTIONS:
            return None
        calls[call.number] = call
        for ref in call.reads:
            if is_moved_weight(tape, ref) or not tape.learned(ref):
                if _is_matrix(values[ref]):
                    return None
            elif shared(ref):
                operands.add(ref)
            elif call.name in MOVING:
                return None
            elif (maker := tape.maker(ref)) is None or maker.number not in calls:
                waiting.append(ref)
    ordered = tuple(calls[number] for number in sorted(calls))
    return Computation(values, ordered, frozenset(operands), result) if operands else None


def left_by_weights(ours: Computation, theirs: Computation, *, features: Callable[[int], bool], enough: float) -> float:
    """Return the share of what the reference computes that other weights of the port cannot make up for.

    The port's result is mapped to the reference's by the best affine map of the features, as weights behind the step
    do it, and what the step is given is scaled, shifted or centred, as weights in front of it do it.  Where both sides
    are affine functions nothing is claimed: features in another order may do the rest.

    Args:
        ours: how the port computes the result of a step from tensors that both sides have.
        theirs: how the reference computes what it has in its place from the same tensors.
        features: whether an axis of this size may be one of features, which weights act along.
        enough: a share that is small enough for the search to end.

    Returns:
        The share from 0 to 1, in root mean square; 0 where other weights may do it, or nothing can be said.
    """
    try:
        order = _order(ours, theirs)
        if order is None or (ours.is_affine() and theirs.is_affine()):
            return 0.0
        least = 1.0
        for own, other in _starts(ours, theirs):
            wanted = torch.cat([other.given(sample).permute(order) for sample in _samples()])
            axes = [axis for axis in range(1, wanted.ndim) if features(wanted.shape[axis])]
            for near, left in _variants(own, partial(unmapped, wanted=wanted, axes=axes)):
                if left <= (enough if near else EXACT):
                    return 0.0
                least = min(least, left)
        return max(least, enough)
    except UNFIT:  # a step may refuse other numbers
        return 0.0


def _starts(ours: Computation, theirs: Computation) -> Iterator[tuple[Computation, Computation]]:
    """Yield what both sides compute, and what they compute behind affine functions of what they are given.

    Weights in front of a step are multiplied with such a function of the reference, and with the inverse of the port's.
    """
    port = (ours, ours.behind_affine(undone=True))
    reference = (theirs, theirs.behind_affine(undone=False))
    tried: list[tuple[Computation, Computation]] = []
    for pair in product(port, reference):
        if not any(pair[0] is one and pair[1] is other for one, other in tried):
            tried.append(pair)
            yield pair


def _times(by: float) -> Callable[[Tensor], Tensor]:
    return lambda one: one * by


def _samples(then: Callable[[Tensor], Tensor] = lambda one: one) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield what is done to a tensor that both sides have, for each sample; ``then`` is done after it."""

    def wave(frequency: float, phase: float) -> Callable[[Tensor], Tensor]:
        def change(one: Tensor) -> Tensor:
            masked = _is_masked(one)
            size = one[~masked].square().mean().sqrt().clamp_min(1e-30)
            return then(torch.where(masked, one, 2.0 * size * (frequency * one / size + phase).sin()))

        return change

    yield from ((lambda one, by=by: then(one * by)) for by in SAMPLES)
    yield from (wave(*one) for one in WAVES)


def _centred(one: Tensor) -> Tensor:
    return one - one.masked_fill(_is_masked(one), torch.nan).nanmean(-1, keepdim=True)


def _order(ours: Computation, theirs: Computation) -> tuple[int, ...] | None:
    """Return the order of the reference's axes in which what both sides are given is the same, element by element."""
    given = [theirs.values[ref] for ref in theirs.operands]
    for order in permutations(range(theirs.values[theirs.result].ndim)):
        turned = [one.permute(order) if one.ndim == len(order) else one for one in given]
        if all(any(_equal(ours.values[ref], one) for one in turned) for ref in ours.operands):
            return order
    return None


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same numbers; masked scores are the same, whatever number masks them."""
    if one.shape != other.shape or bool((_is_masked(one) != _is_masked(other)).any()):
        return False
    seen = ~_is_masked(one)
    return torch.allclose(one[seen], other[seen], rtol=1e-7, atol=1e-9)


def _is_masked(scores: Tensor) -> Tensor:
    return ~scores.isfinite() | (scores.abs() >= -MASKED)


def _variants(ours: Computation, left: Callable[[Tensor], float]) -> Iterator[tuple[bool, float]]:
    """Yield what is left with a step's operands as other weights would make them, each with whether they are near.

    The operands are exchanged with each other, centred, and scaled and shifted.
    """
    operands = sorted(ours.operands, key=lambda ref: ref.number)

    def with_operands(change: Callable[[Tensor], Tensor], instead: Mapping[Ref, Ref]) -> float:
        return left(torch.cat([ours.given(sample, instead=instead) for sample in _samples(change)]))

    ways: list[tuple[float, Mapping[Ref, Ref]]] = []
    for order in islice(permutations(operands), EXCHANGED):
        instead = dict(zip(operands, order, strict=True))
        if all(ours.values[ref].shape == ours.values[other].shape for ref, other in instead.items()):
            ways.append((with_operands(lambda one: one, instead), instead))
            yield True, ways[-1][0]
    _, nearest = min(ways, key=itemgetter(0))
    yield True, with_operands(_centred, nearest)
    tried: dict[tuple[float, float], float] = {}

    def moved(scale: float, shift: float) -> tuple[bool, float]:
        if (scale, shift) not in tried:
            tried[scale, shift] = with_operands(lambda one: one * scale + shift, nearest)
        return not shift and 1 / NEAR <= scale <= NEAR, tried[scale, shift]

    for scale in SCALES:
        yield moved(scale, 0.0)
    step = 0.5
    for _ in range(REFINED):
        scale, shift = min(tried, key=tried.__getitem__)
        before = tried[scale, shift]
        for other in (scale * 2**step, shift), (scale / 2**step, shift), (scale, shift + step), (scale, shift - step):
            if SCALES[0] <= other[0] <= SCALES[-1] and (
                not other[1] or (abs(other[1]) <= SHIFT and other[0] >= 1 / NEAR)
            ):
                yield moved(*other)
        step = step if min(tried.values()) < before else step / 2


def unmapped(own: Tensor, wanted: Tensor, axes: Sequence[int]) -> float:
    """Return the share of one tensor that no affine map along one of some axes makes of another one of its shape.

    0 where a number is not finite, or where there are too few rows to tell.  Without axes the map is one number.
    """
    if own.shape != wanted.shape or not bool((own.isfinite() & wanted.isfinite()).all()):
        return 0.0
    if not axes:
        return _unmapped(own.reshape(-1, 1), wanted.reshape(-1, 1))
    rows = ([one.movedim(axis, -1).flatten(0, -2) for one in (own, wanted)] for axis in axes)
    return min(_unmapped(*pair) for pair in rows)


def _unmapped(own: Tensor, wanted: Tensor) -> float:
    """Return the share for rows of features [n f]."""
    unknown = own.shape[-1] + 1
    every = max(len(own) // (MOST * unknown), 1)
    if len(own) < ENOUGH * unknown:
        return 0.0
    own, wanted = (one[::every].double() for one in (own, wanted))
    size = float(wanted.square().mean())
    own, wanted = own - own.mean(0), wanted - wanted.mean(0)
    gram = own.T @ own  # many times as fast as a decomposition of the rows, and exact enough for a share
    gram.diagonal().add_(RIDGE * float(gram.diagonal().mean()) + torch.finfo(gram.dtype).tiny)
    solved = torch.linalg.solve(gram, own.T @ wanted)
    return (float((own @ solved - wanted).square().mean()) / size) ** 0.5 if size > 0 else 0.0
