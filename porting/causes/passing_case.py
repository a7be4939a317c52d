"""Compare a case in which port and reference agree with one in which they differ.

In the passing case each step of the port has its counterpart: the step of the reference with the same numbers. The
first step that has them no longer in the failing case is where the port goes wrong, if the port is right with the
counterpart's numbers in their place. And a step that has the reference's numbers in the passing case is no mistake for
being written otherwise than the reference's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from porting.causes.diverging import CLOSE, MOVING, TensorIndex, is_moved_weight, line_of, moments, same_moments
from porting.causes.replay import Around, Values
from porting.causes.step_differences import (
    MAX_LAYOUTS,
    Kind,
    Repair,
    departure_text,
    generic_path,
    layouts,
    lookup_of,
    mask_text,
    operation_of,
    other_rows,
    step_key,
)
from porting.causes.tape import UNFIT, Call, Ref, Tape

MAX_DEPARTED = 3
"""Number of lines whose results are replaced together."""

MAX_STARTS = 12
"""Number of lines that are tried as the first of them."""

BACK = 3
"""How many calls before a step may be what puts its operands in another order: a reversal, and a look-up by it."""

Key = tuple[str, str, str, int]
"""The module, the line, the function and the number of a call among those that have these three in common."""


@dataclass(frozen=True)
class BothTapes:
    """The passes of both sides on one case."""

    port: Tape
    reference: Tape


@dataclass(frozen=True)
class Departure:
    """A step of the port that has its counterpart's numbers in the passing case, and not in the failing one.

    Attributes:
        step: the step, in the failing case.
        counterpart: the call of the reference, in the failing case.
    """

    step: Call
    counterpart: Call


class PassingCase:
    """Compares the steps of a failing case with those of a passing one.

    Args:
        passing, failing: the tapes; those of the port have lines.
        close: how far the same numbers may be apart.
    """

    def __init__(self, passing: BothTapes, failing: BothTapes, *, close: float = CLOSE) -> None:
        self._passing, self._failing = passing, failing
        self._close = close
        self._index = TensorIndex(passing.reference, close=close)
        self._known = TensorIndex(failing.reference, close=close)
        self._own = _by_key(passing.port), _by_key(failing.port)
        self._theirs = _by_key(passing.reference), _by_key(failing.reference)
        self._summed: tuple[dict[Ref, _Numbers], dict[Ref, _Numbers]] = {}, {}  # reading a long pass takes its time
        self._passing_keys, self._keys = ({call.number: key for key, call in one.items()} for one in self._own)

    def excuses(self, step: Call) -> bool:
        """Return whether a step of the failing case has the reference's numbers in the passing case.

        It does not count where it changes nothing there.
        """
        there = self._own[0].get(self._keys.get(step.number, ("", "", "", -1)))
        if there is None or not there.writes:
            return False
        value = self._passing.port[there.result]
        return bool(self._index.like(value)) and not _is_inert(self._passing.port, there)

    def reorders_here_alone(self, step: Call) -> bool:
        """Return whether one of the last calls before a step gives another order in the failing case alone.

        The reversal of a row of one token, say, says nothing of whether it is right.
        """
        reads = [*step.reads]
        for _ in range(BACK):
            makers = [maker for ref in reads if (maker := self._failing.port.maker(ref)) is not None]
            if any(self._is_reordered_here_alone(maker) for maker in makers):
                return True
            reads = [ref for maker in makers for ref in maker.reads]
        return False

    def _is_reordered_here_alone(self, call: Call) -> bool:
        """Return whether a call gives another order in the failing case, and the same in the passing one."""
        there = self._own[0].get(self._keys.get(call.number, ("", "", "", -1)))
        if call.name not in MOVING or there is None or not there.writes:
            return False
        return _gives_what_it_reads(self._passing.port, there) and not _gives_what_it_reads(self._failing.port, call)

    def lacks(self, operation: str, module: str) -> bool:
        """Return whether each call of a function in a module of the reference changes nothing in the passing case."""
        calls = [
            call
            for call in self._passing.reference.calls
            if call.writes and operation_of(call) == operation and call.module == module
        ]
        return all(_is_inert(self._passing.reference, call) for call in calls)

    def departures(self, values: Values) -> Iterator[Departure]:
        """Yield the steps that depart from their counterparts and whose operands are the reference's, in order.

        Args:
            values: the port's values in the failing case.
        """
        for key, step in self._own[1].items():
            counterparts = [found for one in self._counterparts.get(key, ()) if (found := self._theirs[1].get(one))]
            if not counterparts or not step.writes:
                continue
            own = self._own_numbers(step.result, values)
            departs = not any(_alike(own, self._their_numbers(one.result), self._close) for one in counterparts)
            if departs and self._reads_what_is_right(step, values):
                yield Departure(step, counterparts[0])

    def _reads_what_is_right(self, step: Call, values: Values) -> bool:
        """Return whether the activations that a step reads are those of its counterpart: else the mistake is before it.

        The branch before it that a port leaves out on some inputs is one.
        """
        port, there = self._failing.port, self._own[0][self._keys[step.number]]
        for ref, other in zip(step.reads, there.reads, strict=False):
            if not port.learned(ref) or is_moved_weight(port, ref):
                continue
            maker = self._passing.port.maker(other)
            key = None if maker is None or maker.result != other else self._passing_keys[maker.number]
            expected = [
                self._theirs[1][one].result for one in self._counterparts.get(key, ()) if one in self._theirs[1]
            ]
            own = self._own_numbers(ref, values)
            known = any(_alike(own, self._their_numbers(one), self._close) for one in expected)
            if not known and (expected or not self._known.like(values[ref])):
                return False
        return True

    def _own_numbers(self, ref: Ref, values: Values) -> _Numbers:
        """The fingerprint of a tensor of the port in the failing case."""
        if ref in values.changed:
            return _Numbers.of(values[ref])
        if ref not in self._summed[0]:
            self._summed[0][ref] = _Numbers.of(values[ref])
        return self._summed[0][ref]

    def _their_numbers(self, ref: Ref) -> _Numbers:
        """The fingerprint of a tensor of the reference in the failing case."""
        if ref not in self._summed[1]:
            self._summed[1][ref] = _Numbers.of(self._failing.reference[ref])
        return self._summed[1][ref]

    @cached_property
    def _counterparts(self) -> Mapping[Key | None, Sequence[Key]]:
        """The calls of the reference with the numbers of each call of the port, the nearest in the pass first."""
        makers = {ref: key for key, call in self._theirs[0].items() for ref in call.writes[:1]}
        counts = [Counter(key[:3] for key in keys) for keys in (*self._own, *self._theirs)]
        found: dict[Key | None, Sequence[Key]] = {}
        length = len(self._passing.port.calls) or 1, len(self._passing.reference.calls) or 1
        for key, call in self._own[0].items():
            if not call.writes or counts[0][key[:3]] != counts[1][key[:3]]:
                continue
            like = [makers[ref] for ref in self._index.like(self._passing.port[call.result]) if ref in makers]
            like = [one for one in like if counts[2][one[:3]] == counts[3][one[:3]]]
            place = call.number / length[0]
            like.sort(key=lambda one: abs(self._theirs[0][one].number / length[1] - place))
            found[key] = like
        return found


def departed(
    case: PassingCase,
    port: Tape,
    reference: Tape,
    distance: Callable[[Values], float],
    *,
    bound: float,
    until: float,
    around: Around,
) -> list[Repair] | None:
    """Return the steps that depart, if the port is right with the numbers of their counterparts; else None.

    Args:
        port, reference: the tapes of the failing case.
        distance: values of the port -> the distance of its outputs from the reference's.
        bound: the largest distance that rounding explains.
        until: the deadline, by ``time.thread_time``.
        around: the context in which the port's calls are repeated.
    """
    unchanged, found = Values(port, around=around), None
    starts = list(dict.fromkeys(step_key(one.step) for one in case.departures(unchanged)))
    for number, start in enumerate(starts[:MAX_STARTS]):
        values, repairs, key = unchanged, list[Repair](), start
        replaced: dict[Ref, Tensor] = {}
        for _ in range(MAX_DEPARTED):
            for one in [one for one in case.departures(values) if step_key(one.step) == key]:
                own = values[one.step.result]
                value = _laid_out(own, reference[one.counterpart.result])
                if value is not None:
                    rows = _other_rows(one, values, port, reference)
                    repairs.append(rows or _repair(one, own, value))
                    replaced[one.step.result] = value
            if not replaced or time.thread_time() > until:
                break
            values = Values(port, dict(replaced), around=around)
            try:
                values.replay(call for call in port.calls if replaced.keys().isdisjoint(call.writes[:1]))
            except UNFIT:  # the numbers of the counterpart do not fit what follows
                break
            if distance(values) <= bound:
                if any(one.kind is Kind.MASK for one in repairs):  # what is hidden says more than how it is computed
                    return repairs
                found = found or repairs
                break
            left = {step_key(one.step) for one in case.departures(values) if one.step.result not in replaced}
            key = next((one for one in starts[number + 1 :] if one in left), ("", ""))
    return found


def _other_rows(one: Departure, values: Values, port: Tape, reference: Tape) -> Repair | None:
    """Return the difference of two lookups as a repair; None for other steps."""
    ours, theirs = lookup_of(port, one.step), lookup_of(reference, one.counterpart)
    return None if ours is None or theirs is None else other_rows(ours, theirs, values, reference)


def _repair(one: Departure, own: Tensor, value: Tensor) -> Repair:
    """Return the difference of a step from its counterpart as a repair."""
    name, place = operation_of(one.step), generic_path(one.counterpart.module)
    own = own.expand_as(value)
    if hidden := mask_text(own, value) if own.is_floating_point() else "":
        return Repair(Kind.MASK, line_of(one.step), name, f"{name} in {place} {hidden}", one.counterpart.module)
    theirs = operation_of(one.counterpart)
    other = f"{theirs} in {place} of the reference" if theirs != name else f"in {place} of the reference"
    text = departure_text(own, value)
    detail = f"{name} gives other numbers than {other} on these inputs, and the same on others{text}"
    return Repair(Kind.VALUES, line_of(one.step), name, detail, one.counterpart.module)


def _laid_out(own: Tensor, theirs: Tensor) -> Tensor | None:
    """Return the counterpart's numbers in the layout of the port's that has most of them; None where none fits.

    One side may have a row for all where the other has one for each.
    """
    shape = list(own.shape)
    more, rest = divmod(theirs.numel(), max(own.numel(), 1))
    if more > 1 and not rest and 1 in shape:
        shape[shape.index(1)] = more
    elif theirs.numel() < own.numel() and theirs.ndim <= own.ndim:
        try:
            theirs = theirs.expand_as(own)
        except RuntimeError:
            return None
    every = list(islice(layouts(theirs, tuple(shape)), MAX_LAYOUTS))
    best = max(every, key=lambda one: int((one == own).sum()), default=None)
    return None if best is None else best.to(own.dtype).clone()


def _by_key(tape: Tape) -> dict[Key, Call]:
    """Return the calls of a tape, each by what finds it again in another pass."""
    seen: Counter[tuple[str, str, str]] = Counter()
    found: dict[Key, Call] = {}
    for call in tape.calls:
        name = call.module, line_of(call), call.name
        found[*name, seen[name]] = call
        seen[name] += 1
    return found


@dataclass(frozen=True)
class _Numbers:
    """A fingerprint of a tensor's numbers, independent of the layout.

    Attributes:
        moments: None for a tensor in which no two elements differ.
        first: the first element of such a tensor; None where it has none.
    """

    moments: np.ndarray[tuple[int], np.dtype[np.float64]] | None
    first: float | None

    @classmethod
    def of(cls, value: Tensor) -> _Numbers:
        """Make the fingerprint of a tensor."""
        found = moments(value)
        return cls(found, float(value.flatten()[0]) if found is None and value.numel() else None)


def _alike(own: _Numbers, theirs: _Numbers, close: float) -> bool:
    """Return whether two tensors have the same numbers in some layout; constant ones are compared by their number."""
    if own.moments is None or theirs.moments is None:
        same = own.moments is theirs.moments and own.first is not None and theirs.first is not None
        return same and abs((own.first or 0.0) - (theirs.first or 0.0)) <= close
    return bool(same_moments(own.moments, theirs.moments, close))


def _is_inert(tape: Tape, call: Call) -> bool:
    """Return whether a call gives what it reads: a clamp of what is within its bounds, a mask that hides nothing."""
    return call.name not in MOVING and _gives_what_it_reads(tape, call)


def _gives_what_it_reads(tape: Tape, call: Call) -> bool:
    value = tape[call.result]
    return any(tape[ref].shape == value.shape and torch.equal(tape[ref].to(value.dtype), value) for ref in call.reads)
