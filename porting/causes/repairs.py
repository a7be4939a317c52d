"""Repairing the port: a step that leaves the reference is given what the reference has there, until nothing is left.

When what the port then returns is the reference's, the port is wrong in these steps and in nothing else, whatever kind
of mistake they are: no entry of the catalogue is needed.  What distinguishes each step from the reference's is read
off the two calls: another function, another number, another tensor, the same tensor in another order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import combinations, islice, takewhile

from torch import Tensor
from torch.utils._pytree import tree_leaves

from porting.causes.diverging import MOVING, Numbers, Region, line_of
from porting.causes.linear import linears
from porting.causes.replay import Around, Values
from porting.causes.step_differences import LAYOUTS, Kind, Repair, Steps, laid_out, spelled, word
from porting.causes.tape import Call, Ref, Tape

STEPS = 96
"""So many steps are repaired at most."""

LINES = 3
"""A cause is at so many lines of the port; one that leaves the reference at more is another model."""

NEAR = 24
"""A step may stand for so many steps of the reference."""

TRIED = 40
"""So many tensors of the reference are tried in the place of a step's result."""

FRONTIER = 6
"""Of so many steps that are given what the reference has, each is tried."""

PASSED = 4
"""Over so many steps in a row that cannot be repaired the search goes on."""

SURE = 4
"""So many tensors are tried before the one that is best so far is taken."""


@dataclass(frozen=True)
class Way:
    """A way in which the port becomes the reference.

    Attributes:
        repairs: the steps that have to be repaired, in order.
        left: how far what the port returns is then from what the reference returns.
    """

    repairs: tuple[Repair, ...]
    left: float

    @property
    def keys(self) -> set[tuple[Kind, str, str]]:
        """Each mistake once."""
        return {step_repair.key for step_repair in self.repairs}


@dataclass(frozen=True)
class _Given:
    """What a step is given in the place of its result."""

    step: Call
    value: Tensor
    theirs: Ref | None


def repair(
    port: Tape,
    reference: Tape,
    goals: Mapping[Ref, Sequence[Ref]],
    left: Callable[[Values], float],
    *,
    bound: float,
    until: float,
    around: Around = nullcontext,
) -> list[Way]:
    """Give the port's steps what the reference has, from the first that leaves it on, until none is left.

    Args:
        port, reference: the two passes, each end to end; the port's with lines.
        goals: the port's values that are compared, and what they are compared with.
        left: how far what the port returns with these values is from what the reference returns.
        bound: what rounding leaves of that.
        until: when to give up, by ``time.thread_time``.
        around: what the port's calls are made again in.

    Returns:
        The ways in which a few steps account for all, each without the steps that need not be repaired.
    """
    repairing = _Repairing(port, reference, goals, left, bound, until, around)
    ways = []
    for extra in (True, False):
        way = repairing.way(extra=extra)
        while way is not None and len(way.keys) > 1:
            steps = dict.fromkeys(step_repair.step for step_repair in way.repairs)
            fewer = (repairing.way(extra=extra, but=step) for step in steps)
            simpler = next(
                (candidate for candidate in fewer if candidate is not None and len(candidate.keys) < len(way.keys)),
                None,
            )
            if simpler is None:
                break
            way = simpler
        ways += [] if way is None else [way]
    return ways


class _Repairing:
    """The search for the steps; what does not depend on the steps is made once."""

    def __init__(
        self,
        port: Tape,
        reference: Tape,
        goals: Mapping[Ref, Sequence[Ref]],
        left: Callable[[Values], float],
        bound: float,
        until: float,
        around: Around,
    ) -> None:
        self._port, self._reference = port, reference
        self._left, self._bound, self._until = left, bound, until
        self._numbers = Numbers(reference)
        self._weights = Numbers(reference, weights=True)
        self._linears = {linear.call.number: linear for linear in linears(reference)}
        self._unchanged = Values(port, around=around)
        self._first = Region(port, reference, self._numbers, goals, self._unchanged)

    def way(self, *, extra: bool, but: tuple[str, str] | None = None) -> Way | None:
        """The steps with which the port becomes the reference; None where few steps do not.

        Args:
            extra: a step may be left out altogether; that often fits where it is not what was done.
            but: the line and operation of a step that is not repaired.
        """
        self._extra, self._but = extra, but
        self._values, self._region = self._unchanged, self._first
        given: list[_Given] = []
        while self._left(self._values) > self._bound:
            repaired = self._next_repaired()
            if repaired is None or len(given) == STEPS:
                return None
            given = self._needed(given, repaired)
        given.sort(key=lambda mismatch: mismatch.step.number)
        found = _merged([self._steps().repair(mismatch.step, mismatch.value, mismatch.theirs) for mismatch in given])
        found = _moved(found)
        turned = self._sequence(given, found)
        found = found if turned is None else [turned]
        few = len({step_repair.line for step_repair in found}) <= LINES
        return Way(tuple(found), self._left(self._values)) if few else None

    def _sequence(self, given: Sequence[_Given], found: Sequence[Repair]) -> Repair | None:
        """Two parts that run in another order than the reference's; None where none do.

        The one that comes first in the port has to read what the other one reads in the reference.
        """
        steps = self._steps()
        tensors = [(told, mismatch) for mismatch, told in zip(given, found, strict=False) if told.kind is Kind.TENSOR]
        places = [
            (told, tensor.step, call)
            for told, tensor in tensors
            if tensor.theirs is not None and (call := steps.maker(tensor.theirs)) is not None
        ]
        for (told, step, ours), (_, _, theirs) in combinations(places, 2):
            read = {like for ref in step.reads for like in self._numbers.like(self._values[ref])}
            if theirs.number < ours.number and not read.isdisjoint(theirs.reads):
                ours_part, two = _parts(ours.module, theirs.module)
                if ours_part and two:
                    names = (
                        [spelled(ours_part), spelled(two)] if spelled(ours_part) != spelled(two) else [ours_part, two]
                    )
                    return replace(
                        told, kind=Kind.SEQUENCE, detail=f"{names[0]} runs before {names[1]}", where=ours_part
                    )
        return None

    def _steps(self) -> Steps:
        return Steps(self._port, self._reference, self._numbers, self._weights, self._values, self._region)

    def _next_repaired(self) -> _Given | None:
        """The first step that can be repaired; some have no counterpart, as a part of what is one step there."""
        passed: set[Ref] = set()
        for _ in range(PASSED):
            steps = list(islice(self._region.steps(passed), FRONTIER))
            for step in steps:
                repaired = None if (line_of(step), word(step)) == self._but else self._repair(step)
                if repaired is not None:
                    return repaired
            passed.update(ref for step in steps for ref in step.writes)
        return None

    def _needed(self, given: Sequence[_Given], last: _Given) -> list[_Given]:
        """Without those that need not be repaired now that another step is: a sum in another order, say.

        What is before the last one on the way to it stays: whether it is needed cannot be seen behind it.
        """
        needed = [*given, last]
        before = {call.number for call in self._port.before(last.step.result)}
        for mismatch in reversed(given):
            if mismatch.step.number in before or time.thread_time() > self._until:
                continue
            rest = [other for other in needed if other is not mismatch]
            values = self._unchanged
            for number, other in enumerate(rest):
                values = self._given(values, other, rest[number + 1].step.number if number + 1 < len(rest) else None)
            region = self._region.with_values(values)
            if self._next(region) >= self._next(self._region):
                needed, self._values, self._region = rest, values, region
        return needed

    def _next(self, region: Region) -> int:
        """The number of the first step that is not the reference's."""
        return next((step.number for step in region.steps()), len(self._port.calls))

    def _repair(self, step: Call) -> _Given | None:
        """Give a step what the reference has in its place, if the port then goes on as the reference does."""
        furthest, best = step.number, None
        if self._steps().has_own_weights(step):
            return None
        for number, (value, theirs) in enumerate(self._instead(step)):
            if time.thread_time() > self._until:
                return None
            mismatch = _Given(step, value, theirs)
            try:
                values = self._given(self._values, mismatch)
            except (RuntimeError, IndexError, ValueError, TypeError):  # it does not fit there
                continue
            region = self._region.with_values(values)
            further = self._next(region)
            if further > furthest:
                furthest, best = further, (mismatch, values, region)
            if best and number >= SURE:
                break
        if best is None:
            return None
        mismatch, self._values, self._region = best
        return mismatch

    def _given(self, values: Values, mismatch: _Given, last: int | None = None) -> Values:
        """The values when a step gives something else, up to a later step or to the end."""
        changed = Values(self._port, {**values.changed, mismatch.step.result: mismatch.value}, around=values.around)
        self._play(changed, mismatch.step, last)
        return changed

    def _play(self, values: Values, step: Call, last: int | None) -> None:
        """Go on from a step."""
        for call in self._port.calls[step.number + 1 : last]:
            if any(read in values.changed for read in call.reads):
                made = [leaf for leaf in tree_leaves(values.run(call)) if isinstance(leaf, Tensor)]
                values.changed.update(zip(call.writes, made, strict=True))

    def _instead(self, step: Call) -> Iterator[tuple[Tensor, Ref | None]]:
        """What may stand in the place of a step's result: tensors of the reference, the likeliest first."""
        shape = tuple(self._values[step.result].shape)
        dtype = self._values[step.result].dtype
        for ref in self._given_to(step) if self._extra else ():  # the step itself may be too much
            if self._values[ref].shape == shape and ref not in self._port.weights:
                yield self._values[ref].to(dtype), None
        for ref in islice(self._theirs(step), TRIED):
            for whole in self._with_and_without_bias(step, ref):
                for value in islice(laid_out(whole, shape), LAYOUTS):
                    yield value.to(dtype), ref

    def _with_and_without_bias(self, step: Call, ref: Ref) -> Iterator[Tensor]:
        """A result; where a port's product may add the bias in a step of its own, first what it is without."""
        call = self._reference.maker(ref)
        linear = None if call is None else self._linears.get(call.number)
        if linear is not None and linear.bias is not None and word(step) == "matmul":
            yield self._reference[ref] - self._reference[linear.bias]
        yield self._reference[ref]

    def _theirs(self, step: Call) -> Iterator[Ref]:
        """Results of the reference: of calls with the step's weights, and of what it does with the step's operands."""
        seen: set[Ref] = set()
        numel = self._values[step.result].numel()

        def fresh(ref: Ref) -> bool:
            value = self._reference[ref]
            good = ref not in seen and value.is_floating_point() and value.numel() == numel
            seen.add(ref)
            return good and ref not in self._reference.weights

        by_weight = [call for ref in self._steps().weights_of(step) for call in self._users(ref)]
        by_operand = [call for ref in self._operands(step) for call in self._users(ref)]
        direct = [*by_weight, *by_operand]
        same = [call for call in direct if word(call) == word(step)]
        for call in (*same, *direct):
            yield from (ref for ref in call.writes if fresh(ref))
        waiting, steps = list(direct), 0
        while waiting and steps < NEAR * max(len(direct), 1):
            call = waiting.pop(0)
            steps += 1
            for ref in call.writes:
                if fresh(ref):
                    yield ref
                waiting += [user for user in self._users(ref) if user not in waiting]

    def _users(self, ref: Ref) -> Iterator[Call]:
        """The calls that compute something of a tensor, wherever it is moved."""
        for call in self._reference.users(ref):
            if call.name in MOVING:
                for write in call.writes:
                    yield from self._users(write)
            else:
                yield call

    def _operands(self, step: Call) -> Iterator[Ref]:
        """The reference's tensors that have the numbers of a step's operands."""
        for ref in self._given_to(step):
            yield from self._region.through(ref)

    def _given_to(self, step: Call) -> list[Ref]:
        """The activations that the reference has and that a step is given, at once or by steps that it has not."""
        found, waiting, seen = [], list(step.reads), set(step.reads)
        while waiting:
            ref = waiting.pop(0)
            if not self._port.learned(ref):
                continue
            call = self._port.maker(ref)
            if ref not in self._region.lost or call is None:
                found.append(ref)
                continue
            waiting += [read for read in call.reads if read not in seen]
            seen.update(call.reads)
        return found


def _merged(found: Sequence[Repair]) -> list[Repair]:
    """Repairs of which several tell of one step that is left out, because several steps read what it would give."""
    first: dict[tuple[Kind, str], Repair] = {}
    for step_repair in found:
        if step_repair.kind is Kind.LEFT_OUT:
            first.setdefault((step_repair.kind, step_repair.detail), step_repair)
    return [
        replace(step_repair, line=known.line, operation=known.operation)
        if (known := first.get((step_repair.kind, step_repair.detail))) is not None
        else step_repair
        for step_repair in found
    ]


def _moved(found: Sequence[Repair]) -> list[Repair]:
    """Repairs in which a step that is left out and one that is too many are one that is done in another place."""
    left_out = {step_repair.missing: step_repair for step_repair in found if step_repair.kind is Kind.LEFT_OUT}
    extra = {step_repair.operation: step_repair for step_repair in found if step_repair.kind is Kind.EXTRA}
    if len(found) != len(left_out) + len(extra) or not left_out or left_out.keys() != extra.keys():
        return list(found)
    return [
        replace(
            extra[operation],
            kind=Kind.MOVED,
            detail=f"{step_repair.detail} there, and done here",
            where=step_repair.where,
        )
        for operation, step_repair in left_out.items()
    ]


def _parts(first: str, two: str) -> tuple[str, str]:
    """The two parts of the module that both are in; empty where one is that module."""
    ours, theirs = first.split("."), two.split(".")
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))))
    return tuple(".".join(path[: shared + 1]) if len(path) > shared else "" for path in (ours, theirs))  # type: ignore[return-value]
