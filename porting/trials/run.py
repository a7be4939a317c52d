"""Running the trials: both forwards on each batch in float64, what they return compared, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from porting.errors import VerifyError
from porting.notation.table import Table
from porting.tracing.measure import error, finite
from porting.tracing.running import Side, failure_reason
from porting.tracing.trace import INNER, ROOT, Point, is_returned, output_of, select, split
from porting.trials.battery import Trial
from porting.trials.inputs import Case
from porting.trials.padding import FEW_TOKENS, kept
from porting.trials.pairing import pair
from porting.trials.scope import Kind, Result, Status

MakeSide = Callable[[Case], Side]
"""Makes one side in float64, ready to run one case."""


def returned_only(table: Table) -> Table:
    """The table with the probes of what the port returns alone."""
    given = [rule for rule in table.probes if rule.targets[0].output not in INNER]
    return replace(table, probes=tuple(rule for rule in given if str(rule.targets[0].name) == ROOT))


def run_trial(
    trial: Trial,
    table: Table,
    sizes: Mapping[str, int],
    reference: MakeSide,
    port: MakeSide,
    differs: Callable[[float], bool],
    *,
    plainly: bool = False,
) -> Result:
    """Run both forwards on one batch and compare what they return.

    Args:
        table: with the probes of what is returned: see :func:`returned_only`.
        sizes: of indices, from the table's [sizes].
        reference, port: make the sides in float64.
        differs: whether outputs that are so far apart, relative to scale, are other ones.
        plainly: neither side is known to cast to less than float64, so nothing has to watch for it.  What differs or
            fails so is run again with casts taken out and float64 as the default dtype.
    """
    if plainly:
        found = _once(trial, table, sizes, reference, port, differs, plainly=True)
        if found.status is Status.SAME:
            return found
    return _once(trial, table, sizes, reference, port, differs, plainly=False)


def _once(
    trial: Trial,
    table: Table,
    sizes: Mapping[str, int],
    reference: MakeSide,
    port: MakeSide,
    differs: Callable[[float], bool],
    *,
    plainly: bool,
) -> Result:
    inputs = trial.case.inputs
    rows, length = _extent(inputs)

    def result(status: Status, difference: float | None = None, said: str = "") -> Result:
        return Result(
            kind=trial.kind,
            what=trial.what,
            batch=trial.case.name,
            status=status,
            difference=difference,
            rows=rows,
            length=length,
            said=said,
            written=tuple(written),
        )

    written: dict[str, None] = {}
    failed = ""
    theirs: dict[Point, Tensor] = {}
    try:
        side = reference(trial.case)
        theirs = _outputs(side, plainly=plainly)
        given = side.arguments[0]
        theirs = {point: one for point, one in theirs.items() if finite(kept(one, given, point))}
    except VerifyError as error_:
        failed = failure_reason(error_)
    if not theirs and not trial.past:
        return result(Status.REFERENCE_FAILED, said=failed or "some of its values are not numbers")
    try:
        mine = port(trial.case)
        written = mine.written
        ours = _outputs(mine, plainly=plainly)
    except VerifyError as error_:
        same = trial.past and not theirs
        return result(Status.SAME if same else Status.PORT_FAILED, said=failure_reason(error_))
    if not theirs:
        return result(Status.REFERENCE_FAILED, said=failed)
    try:
        pairing = pair(table, _shapes(theirs), _shapes(ours), sizes)
    except VerifyError as error_:
        empty = is_empty(ours)
        return result(Status.SAME) if empty else result(Status.DIFFERS, torch.inf, said=failure_reason(error_))
    if pairing.other_shapes and not is_empty(ours):
        return result(Status.DIFFERS, torch.inf, said=pairing.other_shapes[0])
    worst = 0.0
    for point, one in pairing.pairs.items():
        worst = max(worst, error(ours[point], one.anchor(theirs, given, ours[point])).largest)
    return result(Status.DIFFERS if differs(worst) else Status.SAME, worst)


def is_empty(values: Mapping[Point, Tensor]) -> bool:
    """Whether there is no number at all, as of all but the first place in rows of one."""
    return not any(one.numel() for one in values.values())


def _outputs(side: Side, *, plainly: bool) -> dict[Point, Tensor]:
    """What a side returns, and what else of it is compared with the other's outputs."""
    side = replace(side, lifting=not plainly)
    if side.renames or any(not is_returned(point) for point in side.wanted):
        return side.record(0)
    output = side.outputs(0)
    found = {point: select(output, output_of(point)) for point in side.wanted}
    return {point: one.detach() for point, one in found.items() if one is not None}


def _shapes(trace: Mapping[Point, Tensor]) -> dict[Point, tuple[int, ...]]:
    return {point: tuple(one.shape) for point, one in trace.items() if split(point)[1] == 1}


def _extent(inputs: Mapping[str, Tensor]) -> tuple[int, int]:
    """Rows and tokens of a batch; without tokens the length is 0."""
    ids = [one for one in inputs.values() if not one.is_floating_point() and one.ndim > 1]
    rows = max((len(one) for one in inputs.values() if one.ndim), default=0)
    return rows, max((one.shape[-1] for one in ids), default=0)


def to_place(results: Sequence[Result], trials: Sequence[Trial], most: int) -> list[Case]:
    """The batches of differing trials that are run again with all probes, to find where: small ones, of each kind.

    Where the shapes differ there are no numbers to compare.
    """
    pairs = zip(results, trials, strict=True)
    differing = [(one, trial) for one, trial in pairs if one.status is Status.DIFFERS and not one.said]
    differing.sort(  # several rows say more than one, and in rows of few tokens many functions agree
        key=lambda pair: (pair[0].rows == 1, 0 < pair[0].length <= max(FEW_TOKENS), pair[0].rows * pair[0].length)
    )
    chosen: dict[Kind, Case] = {}
    single = [pair for pair in differing if pair[0].kind is not Kind.COMBINED]
    for one, trial in single or differing:  # a batch that varies one property says more
        chosen.setdefault(one.kind, trial.case)
    return list(chosen.values())[:most]
