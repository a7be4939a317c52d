"""The two tiers: float64 for meaning, a working dtype for rounding; each end to end and isolated.

Nothing but the float64 reference is kept: what the port computes is measured where it is computed, and forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from porting.errors import Code, Fault, VerifyError
from porting.notation.table import Table
from porting.printable import dtype_name
from porting.reporting.outcome import Probe, View
from porting.tracing.activations import Activations
from porting.tracing.code_coverage import Executed
from porting.tracing.conditions import Conditions
from porting.tracing.float64 import spelled_operations
from porting.tracing.measure import (
    APART,
    MEANING,
    QUIET,
    SHRINKS,
    Anchor,
    Error,
    ErrorProfile,
    bound,
    by_position,
    error,
    error_profile,
    explains,
    finite,
    numbers,
    pooled,
    ratio,
    same_rows,
)
from porting.tracing.provenance import ProvenanceRecorder, Segment
from porting.tracing.running import Side, failure_reason
from porting.tracing.trace import INNER, ROOT, Point, Trace, is_returned, like
from porting.trials.padding import kept
from porting.trials.pairing import Pair, Pairing, pair
from porting.verification.coverage import Observer

Errors = dict[Point, list[Error]]

Placed = tuple[str, Point, int]
"""A view, a point and the number of a case."""


@dataclass
class Tier:
    """The errors of both sides in one working dtype, by the port's point, pooled over the cases.

    Attributes:
        dtype: in which the values are rounded: of the weights, or the one that autocast casts to.
        autocast: both ran with float32 weights under torch.autocast.
        port, reference: view -> point -> the error there.
    """

    dtype: torch.dtype
    autocast: bool = False
    port: dict[str, dict[Point, Error]] = field(default_factory=dict)
    reference: dict[str, dict[Point, Error]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """``"float32"``, or ``"autocast bfloat16"``."""
        return f"{'autocast ' if self.autocast else ''}{dtype_name(self.dtype)}"


END, ALONE = "end_to_end", "isolated"

SHARE = 64
"""Tables that are rounded differently are apart by no less than this part of what one rounding of them comes to."""

SATURATED = 0.05
"""A rounding error of the reference in the working dtype, relative to scale, that may be as large as it can get."""

SMALL = 1e-7
"""A difference in float64 below which rounding is a possible explanation, in a module that amplifies it."""

DRAWS = "the reference draws random numbers in eval mode: each pass of both sides starts from the same generator state"

MOST_MISFITS = 3
"""How many lines of [probes] that do not fit are named."""

MOST_SPREADS = 8
"""The number of guilty probes, from the first, for which the report tells where their differences lie."""


class Comparison:
    """The measurements of a port, for each side and each dtype.

    Args:
        table: its [probes].
        sizes: of indices, from [sizes]; kept.
        lowered: what is known of a reference that was recorded: point -> operations in less than float64 before it.

    Attributes:
        exact: the float64 activations of the reference, for each case.
        pairings: for each case, which point of the port is compared with what.
        anchors: for each case, the float64 activations in the port's layout.
        ran: the port's modules that ran in float64, of those with weights of their own or without parts.
        warnings: what happened in the runs and should be known.
        notes: what computes in less than float64 in a run in float64.
        leaks: view -> point -> what arrives there of the roundings that the float64 runs make all the same; None where
            that was not measured.
        leaked: the same by position.
        measure: measures both, which takes as long as several passes of each side; None where no side rounds in a
            float64 run, and once it was called.
        own_leaks: point -> how far the reference's own roundings move it there, in isolation; empty where that was not
            measured.
        rounded_alike: both sides go on with the same rounded numbers in the batches compared here, so ``leaks`` are 0.
        of_angles: the points at which a module by itself is the reference's with its cosines and sines.
        found_from: the number of the first case that a search found; None where there is none.
        lifted: a side asked for less than float64 somewhere, and got it all the same.
        tried: the port's arguments that trials gave.
        other_shapes: the cases in which an output of the port has another shape than the reference's, and how.
        reference_draws: the reference draws random numbers in eval mode.
        noise64: by view how far roundings in float64 move the reference at each point, where that was measured.
        padded: the port's points that differ at padded places alone, and by how much.
        written: the arguments that either side wrote to, by its title.
        no_numbers: what the reference returns that has NaN or infinite values in some case, where it is not
            compared.
        in_half: the port may compute in float16 or bfloat16 whatever its weights are; False once a pass has shown that
            it does not.
        executed: which of the port's own instructions ran in float64; None before it did.
        conditions: how the conditions on tensors in its code turned out in float64; None before it did.
    """

    def __init__(
        self, table: Table, sizes: Mapping[str, int], lowered: Mapping[Point, tuple[str, ...]] | None = None
    ) -> None:
        self._table = table
        self.sizes = sizes
        self.exact: list[Mapping[Point, Tensor]] = []
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.in_half = True
        self._misfits: dict[str, str] = {}
        self.ran: set[str] = set()
        self.pairings: list[Pairing] = []
        self.anchors: list[Mapping[Point, Anchor]] = []
        self._meaning: dict[str, dict[Point, float]] = {END: {}, ALONE: {}}
        self._spans: dict[Point, Segment] = {}
        self._spreads: dict[Point, list[ErrorProfile]] = {}
        self._lowered = {point: Segment(lowered=operations) for point, operations in (lowered or {}).items()}
        self._tiers: list[Tier] = []
        self.executed: Executed | None = None
        self.conditions: Conditions | None = None
        self.leaks: Mapping[str, Mapping[Point, float]] | None = None
        self.leaked: Mapping[Placed, Tensor] = {}
        self.measure: Callable[[], None] | None = None
        self.own_leaks: Mapping[Point, float] = {}
        self.rounded_alike = False
        self.of_angles: Collection[Point] = ()
        self._positions: dict[Placed, Tensor] = {}
        self.noise64: Mapping[str, Mapping[Point, float]] = {END: {}, ALONE: {}}
        self.found_from: int | None = None
        self.lifted = False
        self.reference_draws = False
        self.tried: set[str] = set()
        self.other_shapes: dict[int, str] = {}
        self.padded: dict[Point, float] = {}
        self.written: dict[str, dict[str, None]] = {}
        self.no_numbers: dict[Point, None] = {}
        ends = [rule for rule in table.compared if any(str(one.name) == ROOT for one in rule.targets)]
        self._ends = {str(one.key) for rule in ends for one in rule.sources if one.output not in INNER}
        self._given: list[Mapping[str, Tensor]] = []

    def anchor(self, reference: Side) -> None:
        """Run the reference in float64, in the cases that are new; everything is measured from what it computes."""
        for case in range(len(self.exact), len(reference.arguments)):
            watch = ProvenanceRecorder()

            def cut(point: Point, value: Tensor, watch: ProvenanceRecorder = watch) -> None:
                span = watch.cut()
                if span.lowered:
                    self._lowered[point] = span

            with watch:
                found = reference.keep(case, after=cut)
            given = reference.arguments[case]
            self._given[case:] = [given]
            broken = [point for point, value in found.items() if not finite(kept(value, given, point))]
            for point in broken:
                if point in self._ends:
                    self.no_numbers[point] = None
                # nothing is computed from what is returned, so that its other elements can be compared
                if point in self._ends and is_returned(point) and bool(numbers(found[point]).any()):
                    self._warn(f"the reference's {point} has NaN or infinite values, they are not compared")
                    continue
                del found[point]
                self._warn(f"the reference's {point} has NaN or infinite values, it is not compared")
            if broken and not found:
                message = f"all values of the reference are NaN or infinite, on {_spelled_shapes(given)}"
                hint = "porting check names the weights that hold NaN or infinities; the inputs may hold some, too"
                raise VerifyError(Fault(code=Code.NO_PROBES, where=self._table.where, message=message, hint=hint))
            self.exact.append(found)
        self._tell_lowered()
        self._told("the reference", reference)
        if reference.drew:
            self.reference_draws = True
            self._warn(DRAWS)

    def _tell_lowered(self) -> None:
        if self._lowered:
            named = ", ".join(f"{point} ({', '.join(span.lowered)})" for point, span in self._lowered.items())
            self._note(f"the reference computes in less than float64 whatever its weights are, before {named}")

    def meaning(self, port: Side, observer: Observer) -> None:
        """Run the port in float64, end to end and isolated, in the cases that the reference has run in since."""
        self.executed = self.executed or Executed(port.module)
        self.conditions = port.conditions = self.conditions or Conditions(port.module)
        for case, exact in list(enumerate(self.exact))[len(self.pairings) :]:
            with self.executed.watched():
                found = port.keep(case)
            pairing = self._paired_in(case, exact, found)
            anchors = Anchors(pairing.pairs, exact, partial(_measured, exact, self._given[case]))
            differences: dict[Point, float] = {}
            shuffled: dict[Point, Pair] = {}
            for point, one in pairing.pairs.items():
                value = found.pop(point)
                anchor = _anchored(one, anchors[point], exact, value)
                far = differences[point] = error(value, anchor).largest
                if far > MEANING:
                    self._place(END, point, case, value, anchor)
                if far > MEANING and same_rows(value, anchor):
                    shuffled[point] = one
                if anchor.seen is not None and not anchor.holes and far <= MEANING:
                    everywhere = error(value, replace(anchor, seen=None)).largest
                    if everywhere > MEANING:
                        self.padded[point] = max(self.padded.get(point, 0.0), everywhere)
            del found
            pairing = self._without(shuffled, pairing, differences)
            if pairing.other_shapes:
                self.other_shapes[case] = pairing.other_shapes[0]
            self.pairings.append(pairing)
            self.anchors.append(anchors)
            for point in pairing.pairs:
                self._meaning[END][point] = max(self._meaning[END].get(point, 0.0), differences[point])
            self._isolated(port, case, observer)
            observer.rest()
        self._told("the port", port)

    def _told(self, title: str, side: Side) -> None:
        """Say which modules asked for less than float64 and got it all the same."""
        self.written.setdefault(title, {}).update(side.written)
        self.lifted = self.lifted or bool(side.lifted)
        if side.lifted:
            named = spelled_operations(side.lifted)
            self._note(f"{title} casts to less than float64 in {named}: the float64 run leaves these casts out")

    def _isolated(self, port: Side, case: int, observer: Observer | None) -> None:
        """Run the port given the exact values at its probes; without an observer no gradients are taken."""
        pairing = self.pairings[case]
        watch = ProvenanceRecorder()

        def visit(point: Point, value: Tensor) -> Tensor | None:
            span = watch.cut(value)
            before = self._spans.get(point, Segment())
            self._spans[point] = Segment(
                tuple(dict.fromkeys((*before.modules, *span.modules))),
                tuple(dict.fromkeys((*before.lowered, *span.lowered))),
                span.random or before.random,
            )
            anchor = self._anchor_of(case, point, value)
            if anchor is None:
                return None
            far = error(value, anchor).largest
            self._meaning[ALONE][point] = max(self._meaning[ALONE].get(point, 0.0), far)
            if far > MEANING:
                self._place(ALONE, point, case, value, anchor)
                shown = value if anchor.seen is None else torch.where(anchor.seen, value, anchor.value)
                found = error_profile(shown, anchor.value, anchor.scale, case)
                self._spreads.setdefault(point, []).append(found)
            if observer is not None:
                counted = value if anchor.seen is None else torch.where(anchor.seen, value, 0.0)
                observer.see(pairing.pairs[point].compared(counted), anchor.scale)
            watch.cut()  # what was done here is none of the model's
            return watch.put(like(anchor.value, value))

        wanted = list(pairing.pairs)
        try:
            with watch:
                port.run(case, visit, wanted=wanted, ran=self.ran.add, gradients=observer is not None)
        except VerifyError as failure:  # some operations have no backward pass
            if observer is None:
                raise
            watch = ProvenanceRecorder()
            with watch:
                port.run(case, visit, wanted=wanted, ran=self.ran.add)
            observer.fails(failure_reason(failure))

    def _without(self, shuffled: Mapping[Point, Pair], pairing: Pairing, differences: Mapping[Point, float]) -> Pairing:
        """Leave points out that have the reference's rows in another order, where what is computed next is the same.

        Experts may be given their tokens in any order.  Such an activation cannot take the place of another.
        """
        kept: dict[Point, Pair] = {}
        same = False
        for point, one in reversed(list(pairing.pairs.items())):
            if same and point in shuffled:
                self._misfits[point] = f"it has the rows of the reference's {' + '.join(one.sources)} in another order"
                continue
            same = differences[point] <= MEANING
            kept[point] = one
        return replace(pairing, pairs={point: kept[point] for point in pairing.pairs if point in kept})

    def _place(self, view: str, point: Point, case: int, value: Tensor, anchor: Anchor) -> None:
        """Keep how a difference is spread over the positions."""
        found = by_position(value, anchor)
        if found is not None:
            self._positions[view, point, case] = found

    def _unexplained(self, view: str, point: Point) -> bool:
        """Whether what arrives of roundings at a point does not explain the difference at some position."""
        for case in range(len(self.pairings)):
            found, leaked = self._positions.get((view, point, case)), self.leaked.get((view, point, case))
            if found is not None and leaked is not None and not explains(leaked, found):
                return True
        return False

    def _paired_in(self, case: int, exact: Mapping[Point, Tensor], found: Mapping[Point, Tensor]) -> Pairing:
        """Pair as :meth:`paired` does; a mismatch is reported with the shapes of the batch."""
        try:
            pairing = self.paired(exact, found)
        except VerifyError as error:
            given = _spelled_shapes(self._given[case])
            raise VerifyError(
                replace(one, hint=one.hint or f"in the batch of {given}") if one.code is Code.SHAPE_MISMATCH else one
                for one in error.faults
            ) from error
        self._misfits = {**pairing.misfits, **self._misfits}
        return pairing

    def paired(self, exact: Mapping[Point, Tensor], found: Mapping[Point, Tensor]) -> Pairing:
        """Pair the port's points with the reference's, in a case that is not compared here."""
        return pair(self._table, _shapes(exact), _shapes(found), self.sizes)

    def rounding(self, reference: Side, port: Side, dtype: torch.dtype) -> None:
        """Run both in a working dtype, end to end and isolated: both sides go on with the exact values, rounded.

        Args:
            reference, port: the sides, with weights of that dtype, or both of them under autocast.
            dtype: the working dtype.
        """
        tier = Tier(dtype, autocast=port.autocast is not None)
        for view in (END, ALONE):
            ours: Errors = {}
            theirs: Errors = {}
            for case in range(len(self.exact)):
                self.measure_reference(reference, case, view == ALONE, theirs)
                self._measure_port(port, case, view == ALONE, ours)
            tier.port[view] = {point: pooled(errors) for point, errors in ours.items()}
            tier.reference[view] = {point: pooled(errors) for point, errors in theirs.items()}
        self._tiers.append(tier)

    def _measure_port(self, port: Side, case: int, alone: bool, errors: Errors) -> None:
        def visit(point: Point, value: Tensor) -> Tensor | None:
            anchor = self._anchor_of(case, point, value)
            if anchor is None:
                return None
            errors.setdefault(point, []).append(error(value, anchor))
            return like(anchor.value, value) if alone else None

        port.run(case, visit, wanted=list(self.pairings[case].pairs))

    def error_at(self, case: int, point: Point, value: Tensor) -> Error | None:
        """The error of one of the port's values; None where it is not compared."""
        anchor = self._anchor_of(case, point, value)
        return None if anchor is None else error(value, anchor)

    def _anchor_of(self, case: int, point: Point, value: Tensor) -> Anchor | None:
        """The exact values that one of the port's is measured against; None where it is not compared."""
        one = self.pairings[case].pairs.get(point)
        if one is None or not one.fits(value):
            return None
        return _anchored(one, self.anchors[case][point], self.exact[case], value)

    def stand_in(self, case: int, point: Point, value: Tensor) -> Tensor | None:
        """The value that replaces the port's own in an isolated run."""
        anchor = self._anchor_of(case, point, value)
        return None if anchor is None else like(anchor.value, value)

    def measure_reference(
        self,
        reference: Side,
        case: int,
        alone: bool,
        errors: Errors,
        placed: Callable[[Point, Tensor], None] | None = None,
    ) -> None:
        """The reference's errors at the port's points: each is measured as soon as all that makes it up is there.

        Args:
            reference: the reference.
            case: the number of the case.
            alone: it goes on with the exact values.
            errors: are added to.
            placed: is given how the error of a point is spread over the positions.
        """
        pairing, anchors, exact = self.pairings[case], self.anchors[case], self.exact[case]
        waiting: dict[Point, set[Point]] = {point: set(one.sources) for point, one in pairing.pairs.items()}
        needed: dict[Point, list[Point]] = {}
        for point, sources in waiting.items():
            for source in sources:
                needed.setdefault(source, []).append(point)
        held: Trace = {}
        handed = _HandedOn()

        def visit(source: Point, value: Tensor) -> Tensor | None:
            if source not in needed or value.shape != exact[source].shape:
                return None  # a router that rounds sends other numbers of tokens to an expert
            held[source] = own = handed.own(value.detach())
            for point in needed[source]:
                waiting[point].discard(source)
                if not waiting[point]:
                    value_ = pairing.pairs[point].carry(held)
                    errors.setdefault(point, []).append(error(value_, anchors[point]))
                    found = by_position(value_, anchors[point]) if placed is not None else None
                    if placed is not None and found is not None:
                        placed(point, found)
            for past in [past for past in held if not any(waiting[point] for point in needed[past])]:
                del held[past]
            if source in held:  # it waits for others, and must not change meanwhile
                held[source] = held[source].clone()
            return handed.put(like(exact[source], value), own) if alone else None

        reference.run(case, visit, wanted=pairing.compared, isolated=alone)

    def probes(self) -> Iterator[Probe]:
        """Every probe with all that was measured at it, in the reference's order of execution."""
        finest = self._finest()
        pairs = {point: one for pairing in self.pairings for point, one in pairing.pairs.items()}
        lowered = False
        spread = 0
        for point, one in pairs.items():
            span = self._spans.get(point, Segment())
            here = bool(span.lowered) or any(source in self._lowered for source in one.sources)
            here = here or self._arrives(point)
            lowered = lowered or here
            bounds = {
                view: bound(
                    finest.port[view].get(point) if finest else None,
                    finest.reference[view].get(point) if finest else None,
                    finest.dtype if finest else None,
                    single=doubtful and self.measure is None,
                    leak=self.leaks[view].get(point) if self.leaks is not None else None,
                    noise=self.noise64[view].get(point, 0.0),
                )
                for view, doubtful in ((END, lowered), (ALONE, here))
            }
            for view, most in bounds.items():
                if self._meaning[view].get(point, 0.0) <= most and self._unexplained(view, point):
                    bounds[view] = MEANING
            probe = Probe(
                reference=" + ".join(one.sources),
                port=point,
                meaning=View(end_to_end=self._meaning[END][point], isolated=self._meaning[ALONE].get(point)),
                bound=View(end_to_end=bounds[END], isolated=bounds[ALONE]),
                count=finest.port[END][point].count if finest and point in finest.port[END] else 0,
                rounding={tier.name: _ratios(tier, point, self._doubt(point, bounds)) for tier in self._tiers},
                off=None if self.in_half else View(end_to_end=self._off(point, END), isolated=self._off(point, ALONE)),
                span=span.modules,
                lowered=span.lowered,
                leak=self._leak(point) if here else None,
                random=span.random and not self.reference_draws,
            )
            if probe.guilty and spread < MOST_SPREADS:
                probe, spread = replace(probe, spreads=tuple(self._spreads[point])), spread + 1
            yield probe

    def unsettled(self) -> bool:
        """Whether a difference is so small, or float32 so noisy, that the float64 noise has to be measured."""
        finest = self._finest()
        errors = finest.reference[END].values() if finest else ()
        if any(one.largest > SATURATED for one in errors):
            return True
        return any(MEANING < far < SMALL for view in (END, ALONE) for far in self._meaning[view].values())

    def _finest(self) -> Tier | None:
        return min(self._tiers, key=lambda tier: torch.finfo(tier.dtype).eps, default=None)

    def breaks(self) -> bool:
        """Whether the port is apart from the reference in a working dtype by more than rounding explains."""
        return any(self._off(point, END) for tier in self._tiers for point in tier.port[END])

    def _off(self, point: Point, view: str) -> float:
        """How far the port is apart there in a working dtype, if no rounding comes to it; else 0.

        A difference that is as much smaller in float64 as its unit roundoff is rounding, however large.
        """
        off, exact = 0.0, self._meaning[view].get(point, 0.0)
        for tier in self._tiers:
            ours, theirs = tier.port[view].get(point), tier.reference[view].get(point)
            if tier.autocast or ours is None or theirs is None or theirs.largest > QUIET or ours.rms <= APART:
                continue
            shrunk = ours.rms * torch.finfo(torch.float64).eps / torch.finfo(tier.dtype).eps
            if exact < SHRINKS * shrunk:
                off = max(off, ours.largest if math.isfinite(ours.largest) else math.inf)
        return off

    def _doubt(self, point: Point, bounds: Mapping[str, float]) -> dict[str, float]:
        """The error of the exact values where the reference rounds in float64: the port's difference there."""
        far = {view: self._meaning[view].get(point, 0.0) for view in (END, ALONE)}
        return {view: one if self.reference_lowers and one <= bounds[view] else 0.0 for view, one in far.items()}

    def _arrives(self, point: Point) -> bool:
        """Whether roundings that are made elsewhere explain a difference here, though no probe carries them.

        A table of angles is read in each layer.  Where two sides round it differently, they are apart by about what
        one rounding comes to; what is far smaller is another mistake.
        """
        leak = self.leaks[ALONE].get(point, 0.0) if self.leaks is not None else 0.0
        least = min(leak, self.own_leaks.get(point, leak))
        return leak > 0.0 and (self._meaning[ALONE].get(point, 0.0) >= least / SHARE or point in self.of_angles)

    def measure_if_needed(self, *, differs: bool = False) -> None:
        """Measure what arrives of roundings, unless that was done or no difference can be one of theirs.

        Args:
            differs: something that is not compared at probes differs.
        """
        if self.measure is None:
            return
        if differs or any(far > MEANING for view in (END, ALONE) for far in self._meaning[view].values()):
            measure, self.measure = self.measure, None
            measure()

    def smaller_than_leaks(self) -> bool:
        """Whether a difference of a module by itself is far smaller than what arrives of roundings."""
        leaks = self.leaks[ALONE] if self.leaks is not None else {}
        return any(MEANING < far < leaks.get(point, 0.0) / SHARE for point, far in self._meaning[ALONE].items())

    def _leak(self, point: Point) -> View | None:
        if self.leaks is None or point not in self.leaks[END]:
            return None
        return View(end_to_end=self.leaks[END][point], isolated=self.leaks[ALONE].get(point))

    def differs_in(self, point: Point) -> set[int]:
        """The cases in which a point differs in isolation."""
        return {profile.case for profile in self._spreads.get(point, ())}

    def differences(self, view: str) -> Mapping[Point, float]:
        """The largest difference in float64 at each of the port's points, in one view."""
        return self._meaning[view]

    @property
    def lowers(self) -> bool:
        """Whether a side computes in less than float64 somewhere, whatever its weights are."""
        return self.reference_lowers or self.port_lowers

    @property
    def reference_lowers(self) -> bool:
        """Whether the reference does."""
        return bool(self._lowered)

    @property
    def port_lowers(self) -> bool:
        """Whether the port does."""
        return any(span.lowered for span in self._spans.values())

    @property
    def noise(self) -> dict[str, float]:
        """The reference's own largest rounding error end to end, relative to scale, by dtype."""
        return {
            tier.name: max((one.largest for one in tier.reference[END].values()), default=0.0) for tier in self._tiers
        }

    @property
    def working(self) -> tuple[str, ...]:
        """The working dtypes that were compared, ``"autocast bfloat16"`` among them."""
        return tuple(tier.name for tier in self._tiers)

    @property
    def skipped(self) -> tuple[Point, ...]:
        """Points without a counterpart that was reached."""
        return tuple(
            dict.fromkeys(point for pairing in self.pairings for point in pairing.skipped if point not in pairing.pairs)
        )

    @property
    def misfits(self) -> list[str]:
        """Probes that were skipped since they do not fit, the first lines of the table with the shapes."""
        found = [f"a probe was skipped: {where}: {said}" for where, said in self._misfits.items()]
        more = [f"{len(found) - MOST_MISFITS} more lines of [probes] do not fit"] if len(found) > MOST_MISFITS else []
        return [*found[:MOST_MISFITS], *more]

    def _note(self, words: str) -> None:
        if words not in self.notes:
            self.notes.append(words)

    def _warn(self, words: str) -> None:
        if words not in self.warnings:
            self.warnings.append(words)


class _HandedOn:
    """A module's own result, where it returns the exact value that replaced the output of its last part.

    A layer that ends with its norm returns the norm's output.  In an isolated run that output is the exact value, and
    by it the layer would seem to make no rounding error: the port, where only the layer is seen, would look worse.
    """

    def __init__(self) -> None:
        self._put = self._own = _NOWHERE
        self._version = 0

    def put(self, value: Tensor, own: Tensor) -> Tensor:
        """The value that the run goes on with; ``own`` is what was computed, which :meth:`own` gives for it."""
        self._put, self._own, self._version = value, own, value._version
        return value

    def own(self, value: Tensor) -> Tensor:
        """The module's own result if ``value`` is the last replacement, else ``value`` itself."""
        put = self._put
        same = value.data_ptr() == put.data_ptr() and value.shape == put.shape and value.stride() == put.stride()
        return self._own if same and value.numel() and put._version == self._version else value


def _spelled_shapes(inputs: Mapping[str, Tensor]) -> str:
    """The inputs with their shapes."""
    return ", ".join(f"{name} {list(one.shape)}" for name, one in inputs.items())


def _ratios(tier: Tier, point: Point, doubt: Mapping[str, float]) -> View:
    def of(view: str) -> float | None:
        ours, theirs = tier.port[view].get(point), tier.reference[view].get(point)
        return None if ours is None or theirs is None else ratio(ours, theirs, tier.dtype, doubt[view])

    return View(end_to_end=of(END) or 0.0, isolated=of(ALONE))


def _anchored(one: Pair, anchor: Anchor, exact: Mapping[Point, Tensor], own: Tensor | None) -> Anchor:
    """The anchor, with the port's own values in the parts that have no counterpart."""
    if one.whole or own is None:
        return anchor
    return anchor.having(one.carry(exact, own.double()))


class Anchors(Mapping[Point, Anchor]):
    """The anchors of a case, at the port's points; those of activations that lie in a file are made when asked for.

    Args:
        make: measures the anchor of a pair.
    """

    def __init__(
        self, pairs: Mapping[Point, Pair], exact: Mapping[Point, Tensor], make: Callable[[Pair], Anchor]
    ) -> None:
        self._pairs, self._exact, self._make = pairs, exact, make
        self._known: dict[Point, Anchor] = {}
        self._lazy = isinstance(exact, Activations) and exact.stored

    def __getitem__(self, point: Point) -> Anchor:
        known = self._known.get(point)
        if known is None:
            found = self._make(self._pairs[point])
            self._known[point] = replace(found, value=_NOWHERE) if self._lazy else found
            return found
        return known.having(self._pairs[point].carry(self._exact)) if self._lazy else known

    def __iter__(self) -> Iterator[Point]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)


def _measured(exact: Mapping[Point, Tensor], given: Mapping[str, Tensor], one: Pair) -> Anchor:
    return one.anchor(exact, given)


_NOWHERE = torch.empty(0, dtype=torch.float64)


def _shapes(trace: Mapping[Point, Tensor]) -> dict[Point, tuple[int, ...]]:
    if isinstance(trace, Activations):
        return trace.shapes()
    return {point: tuple(value.shape) for point, value in trace.items()}


Progress = Callable[[str, int, int], None]
