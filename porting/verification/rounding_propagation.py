"""How far the remaining rounding errors of a float64 run propagate, and the tolerances that follow.

What remains in float32 in a float64 run (a table of angles, a way round through numpy) is moved by its own roundings,
and what arrives at each probe is measured: more than that, times a factor for luck, is not rounding of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from porting.errors import VerifyError
from porting.reporting.outcome import Probe
from porting.tracing.angle_tables import SAME, AnglesReplaced, AnglesSeen, angle_columns, buffers_replaced, with_columns
from porting.tracing.measure import MEANING, by_position, error
from porting.tracing.rounding_noise import RoundedNumbers, RoundingNoise, WithoutRounding
from porting.tracing.running import Both, Side
from porting.tracing.trace import Point, Trace
from porting.verification.compare import ALONE, END, Comparison, Errors, Placed

SEEDS = (1, 2)
"""Random draws of the rounding errors; the one with the larger effect counts."""


def measure_leaks(comparison: Comparison, reference: Callable[[], Side] | None, port: Side) -> None:
    """Measure the propagated rounding errors of each side that makes some, and pass their sum to the comparison.

    Args:
        comparison: what was compared in float64.
        reference: makes the reference in float64; None for one that cannot be run.
        port: in float64.
    """
    both = comparison.reference_lowers and comparison.port_lowers
    if both and reference is not None and _rounded_alike(comparison, reference(), port):
        points = {point for pairing in comparison.pairings for point in pairing.pairs}
        comparison.leaks = {END: dict.fromkeys(points, 0.0), ALONE: dict.fromkeys(points, 0.0)}
        comparison.rounded_alike = True
        return
    found: dict[str, dict[Point, float]] = {END: {}, ALONE: {}}
    leaked: dict[Placed, Tensor] = {}
    if comparison.reference_lowers and reference is not None:
        side = reference()
        own: dict[Placed, Tensor] = {}
        _add(found, lambda seed, alone: _of_reference(comparison, side, seed, alone=alone, positions=own))
        leaked = own
    if comparison.port_lowers:
        other: dict[Placed, Tensor] = {}
        _add(found, lambda seed, alone: _of_port(comparison, port, seed, alone=alone, positions=other))
        leaked = {
            one: leaked[one] + other[one] if one in leaked and one in other else (leaked | other)[one]
            for one in {*leaked, *other}
        }
    comparison.leaks, comparison.leaked = found, leaked
    if comparison.reference_lowers and reference is not None and comparison.smaller_than_leaks():
        comparison.own_leaks = _own(comparison, reference())
        comparison.of_angles = _of_angles(comparison, reference(), port)


def _rounded_alike(comparison: Comparison, reference: Side, port: Side) -> bool:
    """Whether both sides go on with the same rounded numbers: then no rounding of theirs is a difference.

    Two tables of angles that were made alike are the same number by number, and hide nothing.
    """
    for case, pairing in enumerate(comparison.pairings):
        theirs = _rounded_numbers(reference, case, list(pairing.compared))
        ours = _rounded_numbers(port, case, list(pairing.pairs))
        if theirs is None or ours is None or not torch.equal(theirs, ours):
            return False
    return True


def _rounded_numbers(side: Side, case: int, wanted: Sequence[Point]) -> Tensor | None:
    """The numbers in less than float64 that a side goes on with, see :class:`RoundedNumbers`; None if too many."""
    with RoundedNumbers() as rounded:
        side.run(case, lambda point, value: None, wanted=wanted)
    return rounded.numbers if rounded.complete else None


def rounded_alike(reference: Side, port: Side) -> bool:
    """Whether two sides go on with the same rounded numbers in a batch; they have that batch alone."""
    theirs, ours = (_rounded_numbers(side, 0, side.wanted) for side in (reference, port))
    return theirs is not None and ours is not None and torch.equal(theirs, ours)


def rounding_apart(reference: Side, port: Side) -> float:
    """How far the outputs of a batch are moved by what both sides round in a run in float64.

    Args:
        reference, port: with that batch alone, and what they return as the points to observe.

    Returns:
        The sum for both sides, relative to the largest value of an output.
    """
    moved = 0.0
    for side in (reference, port):
        clean = side.record(0)
        runs = []
        for seed in SEEDS:
            with RoundingNoise(seed):
                noisy = side.record(0)
            runs.append(max((_moved(noisy[point], value) for point, value in clean.items()), default=0.0))
        moved += max(runs)
    return moved


def _moved(value: Tensor, clean: Tensor) -> float:
    """The largest change of a number, relative to the largest of them; those that are not finite are left out."""
    known = torch.isfinite(clean) & torch.isfinite(value)
    scale = float(clean[known].abs().max()) if bool(known.any()) else 0.0
    return float((value[known] - clean[known]).abs().max()) / scale if scale else 0.0


def measure_float64_noise(comparison: Comparison, reference: Callable[[], Side]) -> None:
    """Measure how far float64 rounding errors propagate in the reference, and pass the result to the comparison.

    Errors in a working dtype tell it, unless they are as large as the values: a deep network with weights that were
    never trained may blow a rounding up a billion times.

    Args:
        comparison: what was compared in float64.
        reference: makes the reference in float64.
    """
    found: dict[str, dict[Point, float]] = {END: {}, ALONE: {}}
    side = reference()

    def measured(seed: int, alone: bool) -> dict[Point, float]:
        return _of_reference(comparison, side, seed, alone=alone, exact=True)

    _add(found, measured)
    comparison.noise64 = found


def _own(comparison: Comparison, reference: Side) -> dict[Point, float]:
    """The reference's own rounding error, against a run without roundings; empty if it cannot run without."""
    errors: Errors = {}
    try:
        for case in range(len(comparison.exact)):
            with WithoutRounding():
                comparison.measure_reference(reference, case, True, errors, lambda point, found: None)
    except VerifyError:  # some operations are given float32 and float64 then
        return {}
    return _largest(errors)


def _of_angles(comparison: Comparison, reference: Side, port: Side) -> set[Point]:
    """The points at which a port by itself is the reference once it has the reference's cosines and sines.

    Two tables that were rounded almost alike are apart by much less than what all their roundings come to.
    """
    far: dict[Point, float] = {}
    for case, pairing in enumerate(comparison.pairings):
        with AnglesSeen() as seen:
            reference.run(case, lambda point, value: None, wanted=list(pairing.compared))
        columns = angle_columns(seen.found)
        if columns is None:
            return set()

        def compare(point: Point, value: Tensor, case: int = case) -> Tensor | None:
            anchor = comparison.anchors[case].get(point)
            if anchor is not None and anchor.value.shape == value.shape:
                far[point] = max(far.get(point, 0.0), error(value, anchor).largest)
            return comparison.stand_in(case, point, value)

        with buffers_replaced(port.module, columns), AnglesReplaced(columns):
            port.run(case, compare, wanted=[point for point in pairing.pairs if point in comparison.anchors[case]])
    return {point for point, largest in far.items() if largest <= MEANING}


@contextmanager
def reference_angles(comparison: Comparison, probes: Sequence[Probe], both: Both) -> Iterator[Callable[[Both], Both]]:
    """While this lasts, the port has the reference's cosines and sines, if its own are those but for their rounding.

    What a mistake does to the outputs is not hidden by the roundings then, nor is what explains it.

    Args:
        both: makes the two sides.

    Yields:
        What is to be done to all that makes the two sides.
    """
    rounded = any(probe.leak is not None or probe.lowered for probe in probes)
    differs = any(probe.guilty or probe.differs for probe in probes) and not any(probe.imprecise for probe in probes)
    columns: Tensor | None = None
    computed = held = False
    if rounded and differs:
        reference, port = both(torch.float64)
        longest = max(range(len(comparison.exact)), key=lambda case: _tokens(reference, case))
        pairing = comparison.pairings[longest]
        seen = []
        for side, wanted in ((reference, pairing.compared), (port, pairing.pairs)):
            with AnglesSeen() as angles:
                side.run(longest, lambda point, value: None, wanted=list(wanted))
            seen.append(angles.found)
        columns = angle_columns(seen[0])
        computed = columns is not None and _rounded_otherwise(seen[1], columns)
        held = columns is not None and _rounded_otherwise(port.module.buffers(), columns)
    with ExitStack() as stack:

        def same(makes: Both) -> Both:
            def sides(dtype: torch.dtype) -> tuple[Side, Side]:
                reference, port = makes(dtype)
                if columns is not None and held and dtype is torch.float64:
                    stack.enter_context(buffers_replaced(port.module, columns))
                return reference, port

            return sides

        if columns is not None and computed:
            stack.enter_context(AnglesReplaced(columns))
        yield same


def _rounded_otherwise(tables: Iterable[Tensor], columns: Tensor) -> bool:
    """Whether a table has these columns, except for rounding."""
    made = (with_columns(one, columns) for one in tables)
    return any(one is not None and one[1] > SAME for one in made)


def _tokens(side: Side, case: int) -> int:
    return max((one.shape[-1] for one in side.arguments[case].values() if one.ndim), default=0)


def _add(found: dict[str, dict[Point, float]], measured: Callable[[int, bool], Mapping[Point, float]]) -> None:
    for view, points in found.items():
        runs = [measured(seed, view == ALONE) for seed in SEEDS]
        for point in dict.fromkeys(point for run in runs for point in run):
            points[point] = points.get(point, 0.0) + max(run.get(point, 0.0) for run in runs)


def _of_reference(
    comparison: Comparison,
    reference: Side,
    seed: int,
    *,
    alone: bool,
    exact: bool = False,
    positions: dict[Placed, Tensor] | None = None,
) -> dict[Point, float]:
    errors: Errors = {}
    for case in range(len(comparison.exact)):

        def placed(point: Point, found: Tensor, case: int = case) -> None:
            if positions is not None:
                _larger(positions, (ALONE if alone else END, point, case), found)

        with RoundingNoise(seed, exact=exact):
            comparison.measure_reference(reference, case, alone, errors, placed)
    return _largest(errors)


def _largest(errors: Errors) -> dict[Point, float]:
    """The largest error at each point, of the cases in which the reference computes numbers there.

    A row of padding alone gives NaN in the scores of some models.
    """
    far = {point: [one.largest for one in many if not math.isnan(one.largest)] for point, many in errors.items()}
    return {point: max(several) for point, several in far.items() if several}


def _larger(positions: dict[Placed, Tensor], key: Placed, found: Tensor) -> None:
    """Keep the larger of two roundings at each position."""
    known = positions.get(key)
    positions[key] = found if known is None or known.shape != found.shape else torch.maximum(known, found)


def _of_port(
    comparison: Comparison, port: Side, seed: int, *, alone: bool, positions: dict[Placed, Tensor]
) -> dict[Point, float]:
    """Against the port itself, so that a mistake of its own is not a part of it."""
    found: dict[Point, float] = {}
    for case, pairing in enumerate(comparison.pairings):
        clean: Trace = {}
        anchors = comparison.anchors[case]

        def keep(point: Point, value: Tensor, clean: Trace = clean, case: int = case) -> Tensor | None:
            if point in comparison.anchors[case]:  # another call of a module that is compared once is not
                clean[point] = value.detach().clone()
            return comparison.stand_in(case, point, value) if alone else None

        def compare(point: Point, value: Tensor, clean: Trace = clean, case: int = case) -> Tensor | None:
            if point in clean and clean[point].shape == value.shape:  # a router may send other tokens to an expert
                anchor = replace(comparison.anchors[case][point], value=clean.pop(point).double(), rms=0.0)
                found[point] = max(found.get(point, 0.0), error(value, anchor).largest)
                spread = by_position(value, anchor)
                if spread is not None:
                    _larger(positions, (ALONE if alone else END, point, case), spread)
            return comparison.stand_in(case, point, value) if alone else None

        wanted = [point for point in pairing.pairs if point in anchors]
        port.run(case, keep, wanted=wanted)
        with RoundingNoise(seed):
            port.run(case, compare, wanted=wanted)
    return found
