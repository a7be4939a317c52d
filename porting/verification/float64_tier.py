"""The float64 tier as a whole: the reference, the port, and the batches that show more than the first ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from porting.errors import VerifyError
from porting.notation.table import Table
from porting.reporting.outcome import Unseen
from porting.tracing.running import Clock, Side
from porting.trials.explore import Explored
from porting.trials.inputs import Case
from porting.trials.scope import Scope
from porting.verification.batch_search import Found, search
from porting.verification.batches import Batches, that_fits
from porting.verification.compare import Comparison
from porting.verification.coverage import Observer, Reach, reached
from porting.verification.functions import has_parts
from porting.verification.references import LiveReference, Reference, port_side
from porting.verification.rounding_propagation import measure_leaks


@dataclass(frozen=True, kw_only=True)
class Float64Comparison:
    """The results of the float64 passes besides the differences.

    Attributes:
        shares: weight -> the share of its elements that a probe saw.
        rows: weight -> its rows of which no probe saw anything, where it has other rows.
        unseen: what could not be seen of the weights.
        reach: how far the inputs got in the port's code.
    """

    shares: dict[str, float]
    rows: dict[str, tuple[int, ...]]
    unseen: tuple[Unseen, ...]
    reach: Reach
    searched: Found
    scope: Scope = Scope()  # noqa: RUF009  # it is frozen


Explore = Callable[[Side, Sequence[Case]], Explored]
"""Runs the trials: the port in float64, and the cases that both sides have run on."""


def in_fitting_rows(
    theirs: Reference, batch: Batches, make: Callable[[int], Batches], cases: list[Case], run: Callable[[], object]
) -> Batches:
    """Run the reference; if it has fewer positions than the longest row, a shorter row is made.

    Args:
        make: makes the batches with another longest row.
        cases: those of the batches, as the reference takes them; they are replaced where they have to be.
        run: runs the reference on the cases.

    Returns:
        The batches that fit; where these are others than the given ones, the reference has not run on them.

    Raises:
        VerifyError: the reference fails, and not for the length of a row.
    """
    try:
        run()
    except VerifyError:
        if not isinstance(theirs, LiveReference) or not batch.more or (fit := that_fits(theirs, batch, make)) is batch:
            raise
        cases[:] = [theirs.taken(case) for case in fit.cases]
        return fit
    return batch


def anchored(
    comparison: Comparison,
    reference: Callable[[], Side],
    theirs: Reference,
    batch: Batches,
    make: Callable[[int], Batches],
    cases: list[Case],
) -> Batches:
    """Run the reference in float64, :func:`in_fitting_rows`, and tell the comparison all that it computes.

    Raises:
        VerifyError: as there.
    """
    fitting = in_fitting_rows(theirs, batch, make, cases, lambda: comparison.anchor(reference()))
    if fitting is not batch:
        comparison.exact.clear()
        comparison.anchor(reference())
    return fitting


def compare_in_float64(
    comparison: Comparison,
    reference: Callable[[], Side],
    theirs: Reference,
    port: Side,
    table: Table,
    batch: Batches,
    cases: list[Case],
    seed: int,
    explore: Explore | None = None,
) -> Float64Comparison:
    """Run the port in float64, look for batches that show more, and run both sides on these.

    Args:
        comparison: what was anchored in the reference.
        reference, theirs, batch: as for :func:`anchored`.
        port: in float64.
        table: its [inputs].
        cases: those that are found are added.
        seed: of the linear functions that are differentiated.
        explore: runs the trials; those that differ become cases.
    """
    observer = Observer(port.module, seed)

    def compare_more(more: Sequence[Case]) -> Side:
        """Run both sides on more cases; returns the port on all of them."""
        comparison.found_from = comparison.found_from or len(cases)
        cases.extend(theirs.taken(one) if isinstance(theirs, LiveReference) else one for one in more)
        wider = port_side(port.module, torch.float64, table, cases, port.clock)
        _anchor_more(comparison, reference, theirs, table, cases, port.clock)
        comparison.meaning(wider, observer)
        return wider

    comparison.meaning(port, observer)
    found = Found()
    if isinstance(theirs, LiveReference) and batch.more is not None:
        found = search(batch, table, theirs, port, comparison, observer)
    if found.cases:
        port = compare_more(found.cases)
    if comparison.lowers:
        live = reference if isinstance(theirs, LiveReference) else None
        comparison.measure = partial(measure_leaks, comparison, live, port)
        comparison.measure_if_needed()
    explored = Explored(scope=Scope()) if explore is None else explore(port, cases)
    if explored.cases:
        port = compare_more(explored.cases)
        comparison.measure_if_needed()
    return Float64Comparison(
        shares=observer.shares(),
        rows=observer.rows(),
        unseen=observer.unseen,
        reach=reached(port, comparison.executed, comparison.conditions, comparison.ran, comparison.tried),
        searched=found,
        scope=explored.scope,
    )


def _anchor_more(
    comparison: Comparison,
    reference: Callable[[], Side],
    theirs: Reference,
    table: Table,
    cases: list[Case],
    clock: Clock,
) -> None:
    """Run the reference on more cases, beside the port in float64: the weights of a large one are cast one by one."""
    terms = [term for rule in table.compared for term in rule.sources]
    lean = theirs.lean(torch.float64, terms, table.prefix, cases, clock) if has_parts(theirs) else None
    if lean is not None:
        try:
            comparison.anchor(lean)
        except VerifyError:  # it may do with its weights what only plain tensors can: then with all of them
            pass
        else:
            return
    comparison.anchor(reference())
