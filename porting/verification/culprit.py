"""Naming the cause: the reference altered on its tape, and compared with what the port computed in isolation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from porting.causes import dropout
from porting.causes.anatomy import Anatomy
from porting.causes.catalogue import CATALOGUE, ROUNDING
from porting.causes.functions import SOFTMAX
from porting.causes.naming import APART, Finding, Gap, Mark, Search
from porting.causes.replay import Stage
from porting.causes.tape import Recorder, Ref, Tape
from porting.reporting.outcome import Probe
from porting.tracing.lift import lift
from porting.tracing.measure import Anchor, error
from porting.tracing.running import Side
from porting.tracing.trace import ARROW, INNER, Point, Trace, split
from porting.verification.compare import Comparison
from porting.verification.pairing import Pairing

Both = Callable[[torch.dtype], tuple[Side, Side]]
"""Makes the reference and the port in a dtype."""


def name_causes(
    comparison: Comparison,
    probes: Sequence[Probe],
    both: Both,
    dtypes: Sequence[torch.dtype],
    *,
    seconds: float = math.inf,
) -> tuple[Finding, ...]:
    """Why the guilty probes differ, and why the imprecise ones round worse.

    Args:
        comparison: what was measured.
        probes: its probes.
        both: makes the two sides.
        dtypes: the working dtypes.
        seconds: the search ends after so long, and what it did not come to stays unknown.

    Returns:
        A finding for each cause; empty when no probe is guilty or imprecise.
    """
    until = time.monotonic() + seconds
    found: list[Finding] = []
    guilty = [probe for probe in probes if probe.guilty]
    if guilty:
        for sight in _shortest_first(comparison, *both(torch.float64)):
            found += sight.why([probe for probe in guilty if not _explained(probe, found)], probes, until)
            if all(_explained(probe, found) for probe in guilty):
                break
    imprecise = [probe for probe in probes if probe.imprecise]
    if imprecise and dtypes:
        dtype = min(dtypes, key=lambda one: torch.finfo(one).eps)
        sight = _shortest_first(comparison, *both(dtype))[0]
        found += sight.why_worse(imprecise)
    return tuple(found)


def _explained(probe: Probe, found: Sequence[Finding]) -> bool:
    return any(probe.port in one.probes for one in found)


def _shortest_first(comparison: Comparison, reference: Side, port: Side) -> list[_Sight]:
    """The cases, those of several rows first, for one row cannot show padding, and those that a search found last."""
    last = len(reference.arguments) if comparison.found_from is None else comparison.found_from

    def weight(case: int) -> tuple[bool, bool, int]:
        given = reference.arguments[case].values()
        lone = all(value.shape[:1] == (1,) for value in given)
        return case >= last, lone, sum(value.numel() for value in given)

    cases = sorted(range(len(reference.arguments)), key=weight)
    return [_Sight(comparison, reference, port, case) for case in cases]


@dataclass(frozen=True)
class _Sight:
    """One case in one dtype: the reference's tape, and what the port computed at each probe from exact values."""

    comparison: Comparison
    reference: Side
    port: Side
    case: int

    def why(self, guilty: Sequence[Probe], probes: Sequence[Probe], until: float = math.inf) -> list[Finding]:
        """The causes of the differences that this case shows."""
        marks = {probe.port: self._mark(probe.port, probe) for probe in probes if probe.port in self._values}
        shown = [one for one in guilty if one.port in marks and marks[one.port].difference > marks[one.port].bound]
        random = any(probe.random for probe in shown)
        found = self._silenced([marks[probe.port] for probe in shown]) if random else []
        named = {point for one in found for point in one.probes}
        search = Search(
            anatomy=self._anatomy,
            stage=self._stage,
            causes=CATALOGUE,
            distance=lambda mark, altered: self._distance(mark.name, altered),
            target=lambda mark: self._target(mark.name),
            innocent=[marks[probe.port] for probe in probes if not probe.guilty and probe.port in marks],
            until=until,
        )
        return found + search.find([marks[probe.port] for probe in shown if probe.port not in named])

    def why_worse(self, imprecise: Sequence[Probe]) -> list[Finding]:
        """The causes of the larger rounding errors."""
        marks = [self._mark(probe.port, None) for probe in imprecise if probe.port in self._values]
        search = Search(
            anatomy=self._anatomy,
            stage=self._stage,
            causes=ROUNDING,
            distance=lambda mark, altered: self._distance(mark.name, altered),
        )
        return search.find(marks)

    def _mark(self, point: Point, probe: Probe | None) -> Mark:
        bound = 0.0 if probe is None else probe.bound.isolated or 0.0
        sources = self._pairing.pairs[point].sources
        return Mark(name=point, sources=sources, gap=self._distance(point, {}), bound=bound)

    def _silenced(self, marks: Sequence[Mark]) -> list[Finding]:
        """The probes that are right when the port's dropout is off."""
        silence = dropout.Silence()
        quiet = self._isolated(silence)
        left = {mark.name: self._distance(mark.name, {}, quiet).largest for mark in marks}
        cured = [mark for mark in marks if left[mark.name] <= mark.bound]
        if not cured:
            return []
        return [
            Finding(
                name=dropout.NAME,
                detail=silence.detail,
                probes=tuple(mark.name for mark in cured),
                difference=max(mark.difference for mark in cured),
                residual=max(left[mark.name] for mark in cured),
                what=dropout.WHAT,
                fix=dropout.FIX,
            )
        ]

    def _distance(self, point: Point, altered: Mapping[str, Tensor], values: Trace | None = None) -> Gap:
        """How far the port's value is from the reference's, some of whose activations are altered."""
        own = (values or self._values)[point]
        one, anchor, exact = self._pairing.pairs[point], self._anchors[point], self._exact
        if not bool(torch.isfinite(own).all()):
            return APART
        if any(exact[name].shape != value.shape for name, value in altered.items()):
            return APART
        changed = {**exact, **{name: value.double() for name, value in altered.items()}}
        expected = one.carry(changed, own.double()) if altered or not one.whole else anchor.value
        far = error(own, Anchor(expected, anchor.scale, anchor.rms))
        return Gap(far.largest, far.rms)

    def _target(self, point: Point) -> Tensor | None:
        """The port's value, laid out as the reference's is; None where that has more to it."""
        one, value = self._pairing.pairs[point], self._values[point]
        if len(one.sources) != 1 or not one.whole or value.numel() != self._exact[one.sources[0]].numel():
            return None
        exact = self._exact[one.sources[0]]
        places = torch.arange(exact.numel(), dtype=torch.float64).view_as(exact)
        there = one.carry({one.sources[0]: places}).flatten().long()
        return torch.empty_like(exact).flatten().index_copy(0, there, value.double().flatten()).view_as(exact)

    @property
    def _pairing(self) -> Pairing:
        return self.comparison.pairings[self.case]

    @property
    def _anchors(self) -> Mapping[Point, Anchor]:
        return self.comparison.anchors[self.case]

    @property
    def _exact(self) -> Mapping[Point, Tensor]:
        return self.comparison.exact[self.case]

    @cached_property
    def _values(self) -> Trace:
        return self._isolated(nullcontext())

    def _isolated(self, around: AbstractContextManager[object]) -> Trace:
        """What the port computes at each probe when it is given the exact values at those before."""
        found: Trace = {}
        pairs, exact = self._pairing.pairs, self._exact

        def visit(point: Point, value: Tensor) -> Tensor | None:
            if point not in pairs:
                return None
            found[point] = value.detach().clone()
            return pairs[point].carry(exact, value.double()).to(value.dtype, copy=True)

        with around:
            self.port.run(self.case, visit, wanted=list(pairs))
        return found

    @cached_property
    def _stage(self) -> Stage:
        exact, compared = self._exact, self._pairing.compared
        with Recorder(self.reference.module) as recorder:

            def visit(point: Point, value: Tensor) -> Tensor | None:
                recorder.mark(point, value)
                if value.dtype == torch.float64 or _inner(point):  # the exact values are its own, or as good
                    return None
                return recorder.stand_in(exact[point].to(value.dtype, copy=True))

            self.reference.run(self.case, visit, wanted=compared)
        marks = recorder.tape.marks
        read = {point: _read_for(recorder.tape, ref) for point, ref in marks.items()}
        if not self.reference.lifted:
            return Stage(recorder.tape, read)
        exactly = lift(self.reference.module)  # as it was recorded
        return Stage(recorder.tape, read, lambda: exactly)

    @cached_property
    def _anatomy(self) -> Anatomy:
        return Anatomy(self._stage.tape, self.reference.arguments[self.case])


def _inner(point: Point) -> bool:
    return split(point)[0].partition(ARROW)[2] in INNER


def _read_for(tape: Tape, ref: Ref) -> Ref:
    """What the model goes on with: a marked value itself, or the scores that a softmax reads for those shown."""
    if tape.users(ref):
        return ref
    behind = (one for call in islice(tape.before(ref), 4) for one in call.reads)
    return next((one for one in behind if any(user.name in SOFTMAX for user in tape.users(one))), ref)
