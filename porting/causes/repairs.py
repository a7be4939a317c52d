"""Repairing the port: the results of wrong steps are replaced by the reference's until port and reference agree.

If the port then returns what the reference returns, it is wrong in these steps and in nothing else. This needs no entry
of the catalogue. The difference of each step is read off the two calls: another function, number, or tensor, or the
same tensor in another order.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations, islice, takewhile

import torch
from torch import Tensor

from porting.causes.absorption import Computation, computed_from, left_by_weights, multiplied
from porting.causes.diverging import CLOSE, MOVING, Region, TensorIndex
from porting.causes.linear import linears
from porting.causes.passing_case import PassingCase, departed
from porting.causes.replay import Around, Values
from porting.causes.step_differences import (
    MAX_LAYOUTS,
    Kind,
    Repair,
    StepComparison,
    generic_path,
    layouts,
    lookup_of,
    operation_of,
    same_but_rounded,
    step_key,
    unmoved,
)
from porting.causes.tape import UNFIT, Call, Ref, Tape

MAX_STEPS = 96
"""Largest number of repaired steps."""

MAX_LINES = 3
"""Largest number of wrong lines that are reported; a port with more is a different model."""

MAX_DISTANCE = 24
"""Number of steps of the reference, per starting point, among which a counterpart is searched."""

MAX_TRIED = 40
"""Number of tensors of the reference that are tried as a replacement of one result."""

MAX_FRONTIER = 6
"""Number of steps with known operands that are tried at once."""

MAX_PASSED = 4
"""Number of times in a row that the search passes over steps that cannot be repaired."""

ENOUGH_TRIED = 4
"""Number of tensors that are tried before the best one so far is taken."""


WRITTEN = frozenset({
    Kind.FUNCTION, Kind.TENSOR, Kind.ORDER, Kind.UNUSED, Kind.EXTRA, Kind.LEFT_OUT, Kind.MOVED, Kind.EXCHANGED,
    Kind.GATED, Kind.SEQUENCE,
})  # fmt: skip
"""Differences of how the steps are written, which are the same in all cases that come to them."""

REORDERING = frozenset({Kind.ORDER, Kind.SEQUENCE})
"""Differences that may be undone by weights in another order."""

ABSORBED = 0.02
"""Other weights may make up for a step of which they leave no more than this share."""

LAYERS_TRIED = 2
"""Number of layers in which other weights are tried for one mistake."""


@dataclass(frozen=True)
class RepairSet:
    """Steps whose repair turns the port into the reference.

    Attributes:
        residual: the distance of the outputs that is left.
        left: computes :attr:`beyond_weights`, which takes longer than the repair; by default it is 0.
    """

    repairs: tuple[Repair, ...]
    residual: float
    left: Callable[[], float] = float

    @cached_property
    def beyond_weights(self) -> float:
        """The share of a step's result that other weights cannot make up for; 0 where nothing is known."""
        with torch.no_grad():
            return self.left()

    @property
    def lines(self) -> list[str]:
        """The lines of the repaired steps, ``file:line``."""
        return list(dict.fromkeys(repair.line for repair in self.repairs if repair.line))

    @property
    def keys(self) -> set[tuple[Kind, str, str]]:
        """The different mistakes; one mistake may occur in several layers."""
        return {repair.key for repair in self.repairs}


@dataclass(frozen=True)
class _Replacement:
    """A replacement for a step's result.

    Attributes:
        step: the step of the port.
        value: the replacement.
        source: the tensor of the reference that it was made from; None where it is an operand of the step.
        reader: the step that reads the result, and the reference's, where it is a constant that differs.
    """

    step: Call
    value: Tensor
    source: Ref | None
    reader: tuple[Call, Call] | None = None


@dataclass(frozen=True)
class _Attempt:
    """A repair of all that differs, before it is known whether other weights could do the same.

    Attributes:
        described: each repair with the replacement that it describes.
        values, region: the port's values with the replacements, and what is unknown then.
    """

    found: RepairSet
    described: tuple[tuple[Repair, _Replacement], ...]
    values: Values
    region: Region


class RepairSearch:
    """Replaces the results of the port's wrong steps, from the first on, until port and reference agree.

    Args:
        port, reference: the tapes of two end-to-end passes; the port's has lines.
        goals: the port's compared values, with their counterparts.
        distance: values of the port -> the distance of its outputs from the reference's.
        bound: the largest distance that rounding explains.
        until: the deadline, by ``time.thread_time``.
        around: the context in which the port's calls are repeated.
        close: how far apart the same numbers may be, where one side rounds some of them.
        passing: a case in which both sides agree, compared with this one; None where there is none.
    """

    def __init__(
        self,
        port: Tape,
        reference: Tape,
        goals: Mapping[Ref, Sequence[Ref]],
        distance: Callable[[Values], float],
        *,
        bound: float,
        until: float,
        around: Around = nullcontext,
        close: float = CLOSE,
        passing: PassingCase | None = None,
    ) -> None:
        self._passing = passing
        self._port, self._reference = port, reference
        self._distance, self._bound, self._until = distance, bound, until
        self._index = TensorIndex(reference, close=close)
        self._weights = TensorIndex(reference, weights=True)
        self._linears = {linear.call.number: linear for linear in linears(reference)}
        self._unchanged = Values(port, around=around)
        made = {ref for call in port.calls for ref in call.writes}
        self._weight_sizes = {size for ref in port.weights for size in port[ref].shape}
        self._input_sizes = {
            size for ref in port.refs if ref not in port.weights and ref not in made for size in port[ref].shape
        }
        self._whole_region = Region(port, reference, self._index, goals, self._unchanged)

    def find(self) -> list[RepairSet] | None:
        """Return the sets of few steps that explain all differences, without steps that need no repair.

        None where constants that are rounded otherwise are all that differs.
        """
        found: list[_Attempt] = []
        for allow_extra in (True, False):
            if found and not (
                self._leaves_first_wrong(found[0])
                or any(repair.kind in (Kind.EXTRA, Kind.MOVED) for repair in found[0].found.repairs)
            ):
                break  # it would find the same
            attempt = self._attempt(allow_extra=allow_extra)
            while attempt is not None and len(attempt.found.keys) > 1:
                steps = dict.fromkeys(repair.step for repair in attempt.found.repairs)
                others = (self._attempt(allow_extra=allow_extra, skipped=step) for step in steps)
                size = len(attempt.found.keys)
                smaller = next((other for other in others if other is not None and len(other.found.keys) < size), None)
                if smaller is None:
                    break
                attempt = smaller
            if attempt is not None and not attempt.found.repairs:
                return None
            found += [] if attempt is None else [attempt]
        return [replace(one.found, left=partial(self._left_by_weights, one)) for one in found]

    def _leaves_first_wrong(self, attempt: _Attempt) -> bool:
        """Whether a repair makes up for the first wrong steps behind them, where the reference's numbers come in."""
        first = min((each.step.number for _, each in attempt.described), default=0)
        return first > self._first_wrong_step(self._whole_region)

    def departing(self) -> list[RepairSet]:
        """Return the steps that give the reference's numbers in the passing case alone, if they explain everything."""
        if self._passing is None:
            return []
        steps = departed(
            self._passing,
            self._port,
            self._reference,
            self._distance,
            bound=self._bound,
            until=self._until,
            around=self._unchanged.around,
        )
        return [] if steps is None else [RepairSet(tuple(steps), 0.0)]

    def _attempt(self, *, allow_extra: bool, skipped: tuple[str, str] | None = None) -> _Attempt | None:
        """Repair the port step by step; None where a few steps are not enough.

        Args:
            allow_extra: try to leave a step out altogether; this often fits where it was not the mistake.
            skipped: the line and operation of a step that is not repaired.
        """
        self._allow_extra, self._skipped = allow_extra, skipped
        self._values, self._region = self._unchanged, self._whole_region
        replacements = self._replacements = list[_Replacement]()
        while self._distance(self._values) > self._bound:
            replacement = self._next_replacement()
            if replacement is None or len(replacements) == MAX_STEPS:
                return None
            replacements = self._replacements = self._needed(replacements, replacement)
        replacements = self._without_chance(replacements)
        replacements.sort(key=lambda replacement: replacement.step.number)
        comparison = self._comparison()
        described = [
            (
                comparison.repair(each.step, each.value, each.source)
                if each.reader is None
                else comparison.constant(*each.reader, self._unchanged[each.step.result], each.value),
                each,
            )
            for each in replacements
            if each.reader is None or not same_but_rounded(self._unchanged[each.step.result], each.value)
        ]
        repairs = _moved(_merged([repair for repair, _ in described]))
        swapped = self._swapped_parts(replacements, repairs)
        repairs = repairs if swapped is None else [swapped]
        few = len({repair.line for repair in repairs}) <= MAX_LINES
        if self._passing is not None and any(map(self._is_excused, replacements, repairs)):
            return None
        if not few:
            return None
        found = RepairSet(tuple(repairs), self._distance(self._values))
        return _Attempt(found, tuple(described), self._values, self._region)

    def _left_by_weights(self, attempt: _Attempt) -> float:
        """Return the largest share of a step's result that other weights cannot make up for, of a few of each kind."""
        self._values, self._region = attempt.values, attempt.region
        tried: Counter[tuple[Kind, str, str]] = Counter()
        left = 0.0
        for repair, replacement in attempt.described:
            if left > ABSORBED or repair.kind in REORDERING or tried[repair.key] == LAYERS_TRIED:
                continue
            tried[repair.key] += 1
            left = max(left, self._left_of(replacement))
        return left

    def _left_of(self, replacement: _Replacement) -> float:
        """Return the share of one step's result that other weights cannot make up for; 0 where it is not known."""
        step, values, theirs = replacement.step, self._values, Values(self._reference)
        result, source = step.result, replacement.source
        call = None if source is None else self._comparison().maker(source)
        met = None if call is None else multiplied(self._reference, call)
        if met is not None and (own := multiplied(self._port, step)) is not None:
            result, source = own, met  # what meets the matrix differs
        like = {
            ref: [*self._region.counterparts_of(ref)]
            for call in (step, *self._port.before(result))
            for ref in call.reads
            if self._port.learned(ref)
        }
        ours = computed_from(values, result, lambda ref: bool(like.get(ref)))
        if ours is None:
            return 0.0
        if source is None:
            same = (ref for ref in ours.operands if values[ref].shape == replacement.value.shape)
            place = next((ref for ref in same if torch.equal(values[ref], replacement.value)), None)
            instead = None if place is None else Computation(values, (), frozenset((place,)), place)
        else:
            shared = {other for ref in ours.operands for other in like[ref]}
            instead = computed_from(theirs, source, shared.__contains__)
        if instead is None:
            return 0.0
        return left_by_weights(ours, instead, features=self._is_feature_size, enough=ABSORBED)

    def _is_feature_size(self, size: int) -> bool:
        """Whether an axis of this size may be one of features: not where only the port's inputs have such an axis."""
        return size > 1 and (size in self._weight_sizes or size not in self._input_sizes)

    def _is_excused(self, replacement: _Replacement, repair: Repair) -> bool:
        """Whether a passing case shows that a step is right as it is written: what it reads is not."""
        passing = self._passing
        if passing is None or repair.kind not in WRITTEN or not passing.excuses(replacement.step):
            return False
        if repair.kind is Kind.ORDER and passing.reorders_here_alone(replacement.step):
            return False
        return not repair.missing or not passing.lacks(repair.missing, repair.where)

    def _swapped_parts(self, replacements: Sequence[_Replacement], repairs: Sequence[Repair]) -> Repair | None:
        """Return two parts of a layer that run in the opposite order than in the reference; None where none do.

        The part that runs first in the port has to read what the other part reads in the reference. Both steps have to
        be what the reference has there: the same function, with the same weights.
        """
        comparison = self._comparison()
        pairs = zip(repairs, replacements, strict=False)
        wrong_tensors = [
            (repair, replacement.step, call)
            for repair, replacement in pairs
            if repair.kind is Kind.TENSOR and replacement.source is not None
            if (call := comparison.maker(replacement.source)) is not None
            and comparison.is_counterpart(replacement.step, call)
        ]
        for (repair, step, ours), (_, _, theirs) in combinations(wrong_tensors, 2):
            read = {like for ref in step.reads for like in self._index.like(self._values[ref])}
            if theirs.number < ours.number and not read.isdisjoint(theirs.reads):
                first, second = _different_parts(ours.module, theirs.module)
                if first and second:
                    names = generic_path(first), generic_path(second)
                    names = names if names[0] != names[1] else (first, second)
                    detail = f"{names[0]} runs before {names[1]}"
                    return replace(repair, kind=Kind.SEQUENCE, detail=detail, where=first)
        return None

    def _comparison(self) -> StepComparison:
        return StepComparison(self._port, self._reference, self._index, self._weights, self._values, self._region)

    def _next_replacement(self) -> _Replacement | None:
        """Return a replacement for the first step that can be repaired.

        Some steps have no counterpart, because the reference does in one step what the port does in several.
        """
        passed: set[Ref] = set()
        for _ in range(MAX_PASSED):
            steps = list(islice(self._region.steps(passed), MAX_FRONTIER))
            for step in steps:
                replacement = None if step_key(step) == self._skipped else self._repair(step)
                if replacement is not None:
                    return replacement
            passed.update(ref for step in steps for ref in step.writes)
        return None

    def _needed(self, replacements: Sequence[_Replacement], last: _Replacement) -> list[_Replacement]:
        """Drop replacements that are no longer needed now that another step is replaced.

        Those on the way to the last one stay, because its replacement hides whether they are needed.
        """
        needed = [*replacements, last]
        on_the_way = {call.number for call in self._port.before(last.step.result)}
        for replacement in reversed(replacements):
            if replacement.step.number in on_the_way or time.thread_time() > self._until:
                continue
            rest = [other for other in needed if other is not replacement]
            try:
                values = self._with_all(rest)
            except UNFIT:  # without it what follows fits no longer
                continue
            region = self._region.with_values(values)
            if self._first_wrong_step(region) >= self._first_wrong_step(self._region):
                needed, self._values, self._region = rest, values, region
        return needed

    def _without_chance(self, replacements: list[_Replacement]) -> list[_Replacement]:
        """Drop steps too many that another layer does as well, unrepaired, where the rest explains everything."""
        runs = Counter(step_key(call) for call in self._port.calls)
        for each in replacements:
            rest = [other for other in replacements if other is not each]
            alike = [other for other in replacements if step_key(other.step) == step_key(each.step)]
            if each.source is None and rest and len(alike) < runs[step_key(each.step)]:
                try:
                    values = self._with_all(rest)
                except UNFIT:
                    continue
                if self._distance(values) <= self._bound:
                    self._values, self._region = values, self._region.with_values(values)
                    return self._without_chance(rest)
        return replacements

    def _with_all(self, replacements: Sequence[_Replacement]) -> Values:
        """Return the port's values with the results of several steps replaced."""
        values = self._unchanged
        ordered = sorted(replacements, key=lambda replacement: replacement.step.number)
        ends = [*(replacement.step.number for replacement in ordered[1:]), None]
        for replacement, last in zip(ordered, ends, strict=True):
            values = self._with_replacement(values, replacement, last)
        return values

    def _first_wrong_step(self, region: Region) -> int:
        """Return the number of the first step that differs from the reference's."""
        return next((step.number for step in region.steps()), len(self._port.calls))

    def _repair(self, step: Call) -> _Replacement | None:
        """Replace a step's result by a tensor of the reference, if port and reference then agree further."""
        furthest, best = step.number, None
        if self._comparison().has_own_weights(step):
            return None
        kept = {replacement.step for replacement in self._replacements}
        for tried, replacement in enumerate(self._candidates(step)):
            if time.thread_time() > self._until:
                return None
            try:
                values = self._with_replacement(self._values, replacement, kept=kept)
            except UNFIT:  # it does not fit there
                continue
            region = self._region.with_values(values)
            next_wrong = self._first_wrong_step(region)
            if next_wrong > furthest:
                furthest, best = next_wrong, (replacement, values, region)
            if best and (tried >= ENOUGH_TRIED or best[0].reader):
                break
        if best is None:
            return None
        replacement, self._values, self._region = best
        return replacement

    def _with_replacement(
        self, values: Values, replacement: _Replacement, last: int | None = None, kept: Collection[Call] = ()
    ) -> Values:
        """Return the values with a step's result replaced, up to a later step or to the end; some calls keep theirs."""
        step = replacement.step
        changed = Values(self._port, {**values.changed, step.result: replacement.value}, around=values.around)
        changed.replay(call for call in self._port.calls[step.number + 1 : last] if call not in kept)
        return changed

    def _candidates(self, step: Call) -> Iterator[_Replacement]:
        """Yield what may replace a step's result, or a constant that it reads, the likeliest first."""
        yield from self._constants(step)
        shape = tuple(self._values[step.result].shape)
        dtype = self._values[step.result].dtype
        for ref in self._operands_of(step) if self._allow_extra else ():  # the step itself may be the mistake
            if self._values[ref].shape == shape and ref not in self._port.weights:
                yield _Replacement(step, self._values[ref].to(dtype), None)
        for ref in islice(self._likely_counterparts(step), MAX_TRIED):
            for result in self._with_and_without_bias(step, ref):
                if result.numel() != math.prod(shape):  # rows for each row of the batch, where the port has one for all
                    yield _Replacement(step, result.to(dtype), ref)
                for value in islice(layouts(result, shape), MAX_LAYOUTS):
                    yield _Replacement(step, value.to(dtype), ref)

    def _constants(self, step: Call) -> Iterator[_Replacement]:
        """Yield constants of the reference in the place of one that a step reads, such as the cosines of positions.

        It is replaced where it is made, for all steps that read it.
        """
        activations = [*self._reference_operands(step)]
        for ref in step.reads:
            source = unmoved(self._port, ref)
            made, own = self._port.maker(source), self._values[source]
            if made is None or self._port.learned(ref) or not own.is_floating_point() or self._index.like(own):
                continue
            for call in (call for known in activations for call in self._users(known)):
                for other in call.reads if operation_of(call) == operation_of(step) else ():
                    theirs = self._reference[unmoved(self._reference, other)]
                    if not self._reference.learned(other) and theirs.is_floating_point():
                        pairs = zip(own.shape, theirs.shape, strict=False)  # one side may have a row for all
                        shape = tuple(map(max, pairs)) if own.ndim == theirs.ndim else tuple(own.shape)
                        for value in islice(layouts(theirs, shape), MAX_LAYOUTS):
                            yield _Replacement(made, value.to(own.dtype), other, (step, call))

    def _with_and_without_bias(self, step: Call, ref: Ref) -> Iterator[Tensor]:
        """Yield a result of the reference, before it without its bias, which a port may add separately."""
        call = self._reference.maker(ref)
        linear = None if call is None else self._linears.get(call.number)
        if linear is not None and linear.bias is not None and operation_of(step) == "matmul":
            yield self._reference[ref] - self._reference[linear.bias]
        yield self._reference[ref]

    def _likely_counterparts(self, step: Call) -> Iterator[Ref]:
        """Yield results of the reference: of calls with the step's weights or operands, then of later calls."""
        seen: set[Ref] = set()
        shape = tuple(self._values[step.result].shape)
        one_for_all = lookup_of(self._port, step) is not None

        def fresh(ref: Ref) -> bool:
            value = self._reference[ref]
            fits = value.numel() == math.prod(shape) or (one_for_all and _widens(shape, tuple(value.shape)))
            good = ref not in seen and value.is_floating_point() and fits
            seen.add(ref)
            return good and ref not in self._reference.weights

        by_weight = [call for ref in self._comparison().weights_of(step) for call in self._users(ref)]
        by_operand = [call for ref in self._reference_operands(step) for call in self._users(ref)]
        direct_calls = [*by_weight, *by_operand]
        same = [call for call in direct_calls if operation_of(call) == operation_of(step)]
        for call in (*same, *direct_calls):
            yield from (ref for ref in call.writes if fresh(ref))
        pending, steps = list(direct_calls), 0
        while pending and steps < MAX_DISTANCE * max(len(direct_calls), 1):
            call = pending.pop(0)
            steps += 1
            for ref in call.writes:
                if fresh(ref):
                    yield ref
                pending += [user for user in self._users(ref) if user not in pending]

    def _users(self, ref: Ref) -> Iterator[Call]:
        """Yield the calls that compute something from a tensor, past calls that only rearrange it."""
        for call in self._reference.users(ref):
            if call.name in MOVING:
                for write in call.writes:
                    yield from self._users(write)
            else:
                yield call

    def _reference_operands(self, step: Call) -> Iterator[Ref]:
        """Yield the reference's tensors with the numbers of a step's operands."""
        for ref in self._operands_of(step):
            yield from self._region.counterparts_of(ref)

    def _operands_of(self, step: Call) -> list[Ref]:
        """Return the known activations that a step reads, directly or through steps that are not known."""
        operands, pending, seen = [], list(step.reads), set(step.reads)
        while pending:
            ref = pending.pop(0)
            if not self._port.learned(ref):
                continue
            call = self._port.maker(ref)
            if ref not in self._region.lost or call is None:
                operands.append(ref)
                continue
            pending += [read for read in call.reads if read not in seen]
            seen.update(call.reads)
        return operands


def _widens(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether a tensor of one shape may be broadcast to another one, which has more elements."""
    ends = zip(shape[::-1], other[::-1], strict=False)
    fits = len(shape) <= len(other) and all(one in (1, wide) for one, wide in ends)
    return fits and math.prod(other) > math.prod(shape)


def _merged(repairs: Sequence[Repair]) -> list[Repair]:
    """Merge repairs that tell of the same missing step, which several later steps would have read."""
    missing: dict[tuple[Kind, str], Repair] = {}
    for repair in repairs:
        if repair.kind is Kind.LEFT_OUT:
            missing.setdefault((repair.kind, repair.detail), repair)
    return [
        replace(repair, line=known.line, operation=known.operation)
        if (known := missing.get((repair.kind, repair.detail))) is not None
        else repair
        for repair in repairs
    ]


def _moved(repairs: Sequence[Repair]) -> list[Repair]:
    """Merge repairs of a missing and of an extra step into that of one step in another place."""
    left_out = {repair.missing: repair for repair in repairs if repair.kind is Kind.LEFT_OUT}
    extra = {repair.operation: repair for repair in repairs if repair.kind is Kind.EXTRA}
    if len(repairs) != len(left_out) + len(extra) or not left_out or left_out.keys() != extra.keys():
        return list(repairs)
    return [
        replace(
            extra[operation],
            kind=Kind.MOVED,
            detail=f"{repair.detail} there, and done here",
            where=repair.where,
        )
        for operation, repair in left_out.items()
    ]


def _different_parts(first: str, second: str) -> tuple[str, str]:
    """Return the parts in which two paths differ, below their common module; empty where a path is that module."""
    ours, theirs = first.split("."), second.split(".")
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))))
    return tuple(".".join(path[: shared + 1]) if len(path) > shared else "" for path in (ours, theirs))  # type: ignore[return-value]
