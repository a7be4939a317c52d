"""Both models in training mode, with the same dropout masks: where values are dropped, how many, and what comes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from porting.errors import VerifyError
from porting.reporting.gradient_results import TrainMode
from porting.tracing.dropout import DropoutMask, SameDropout
from porting.tracing.measure import MEANING, error
from porting.tracing.running import Side
from porting.tracing.trace import is_inner
from porting.verification.compare import END, Comparison
from porting.verification.gradients import DOUBLE, Make

CASES = 2
"""The number of batches that are run in training mode."""

ROUNDED = 1e-6
"""Relative to scale: a difference in eval mode that is larger than this is none of rounding."""

GROWN = 16.0
"""How much larger than in eval mode the rounding error in training mode may be."""


def in_training(make: Make, seed: int) -> Make:
    """The same sides in training mode, with masks that depend on the seed alone."""

    def made(dtype: torch.dtype) -> Side:
        side = make(dtype)
        side.module.train()
        side.draws = SameDropout(seed)
        return side

    return made


def compare_training(reference: Make, port: Make, comparison: Comparison) -> TrainMode:
    """Run both sides in training mode and compare their dropout masks, and then every probe end to end in float64.

    Args:
        reference, port: give sides in training mode: see :func:`in_training`.
    """
    theirs, ours = reference(DOUBLE), port(DOUBLE)
    far = max(comparison.differences(END).values(), default=0.0)
    if far > ROUNDED:
        return TrainMode(refused="your model differs in eval mode already")
    bound, worst, where, sites = max(MEANING, GROWN * far), 0.0, "", 0
    for case, pairing in enumerate(comparison.pairings[:CASES]):
        try:
            exact, found = theirs.record(case), ours.record(case)
        except VerifyError as failure:
            return TrainMode(refused=failure.faults[0].message)
        drawn = [one.draws.drawn if one.draws is not None else [] for one in (theirs, ours)]
        sites = max(sites, len(drawn[0]))
        apart = _apart(drawn[0], drawn[1])
        if apart is not None:
            return apart
        shapes = {point: tuple(value.shape) for point, value in found.items()}
        for point, pair in pairing.pairs.items():
            fits = shapes.get(point) == tuple(pair.shape) and all(one in exact for one in pair.sources)
            if not fits or is_inner(point):
                continue
            anchor = pair.anchor(exact, theirs.arguments[case], found[point])
            size = error(found[point], anchor).largest
            if size > bound and not where:
                where = point
            worst = max(worst, size)
    return TrainMode(sites=sites, difference=worst, bound=bound, where=where)


def _apart(reference: Sequence[DropoutMask], port: Sequence[DropoutMask]) -> TrainMode | None:
    """How the dropout of the two differs; None where both draw the same masks."""
    theirs, ours = Counter(one.kind for one in reference), Counter(one.kind for one in port)
    if theirs == ours:
        return None
    if _shares(reference) == _shares(port):
        return TrainMode(
            sites=len(reference),
            refused="both drop out as many values at the same rates, in tensors of other shapes",
        )
    return TrainMode(sites=len(reference), missing=_sites(reference, theirs - ours), added=_sites(port, ours - theirs))


def _shares(draws: Sequence[DropoutMask]) -> dict[float, int]:
    """Rate -> how many values it is applied to."""
    found: Counter[float] = Counter()
    for one in draws:
        found[one.rate] += one.kind[1]
    return dict(found)


def _sites(draws: Sequence[DropoutMask], wanted: Counter[tuple[float, int]]) -> tuple[DropoutMask, ...]:
    """The draws of these kinds, as many of each as are wanted: the last ones, if there are more."""
    left, found = Counter(wanted), []
    for one in reversed(draws):
        if left[one.kind] > 0:
            left[one.kind] -= 1
            found.append(one)
    return tuple(reversed(found))
