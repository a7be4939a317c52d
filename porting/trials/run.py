"""Running the trials: both forwards on each batch in float64, what they return compared, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from porting.errors import VerifyError
from porting.notation.table import Table
from porting.printable import dtype_name
from porting.tracing.measure import error, finite, numbers
from porting.tracing.running import Side, failure_reason
from porting.tracing.trace import INNER, ROOT, Point, is_returned, output_of, select, split
from porting.trials.inputs import Case
from porting.trials.padding import DECODER_MASK, FEW_TOKENS, MASK, TOKENS, kept
from porting.trials.pairing import Pair, Pairing, pair
from porting.trials.scope import Kind, Result, Status
from porting.trials.trial import Trial

MakeSide = Callable[[Case], Side]
"""Makes one side in float64, ready to run one case."""

Differs = Callable[[float, Case], bool]
"""Whether outputs that are so far apart on a batch, relative to scale, are other ones."""


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
    differs: Differs,
    *,
    plainly: bool = False,
    working: Working | None = None,
) -> Result:
    """Run both forwards on one batch and compare what they return.

    Args:
        table: with the probes of what is returned: see :func:`returned_only`.
        sizes: of indices, from the table's [sizes].
        reference, port: make the sides in float64.
        differs: whether outputs that are so far apart on a batch, relative to scale, are other ones.
        plainly: neither side is known to cast to less than float64, so nothing has to watch for it.  What differs or
            fails so is run again with casts taken out and float64 as the default dtype.
        working: both sides in the dtype that users run; what agrees in float64 is run in it too.
    """
    if plainly:
        found = _once(trial, table, sizes, reference, port, differs, plainly=True, working=working)
        if found.status is Status.SAME:
            return found
    return _once(trial, table, sizes, reference, port, differs, plainly=False, working=working)


def _once(
    trial: Trial,
    table: Table,
    sizes: Mapping[str, int],
    reference: MakeSide,
    port: MakeSide,
    differs: Differs,
    *,
    plainly: bool,
    working: Working | None,
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
        theirs = {point: one for point, one in theirs.items() if _any_number(kept(one, given, point))}
    except VerifyError as error_:
        failed = failure_reason(error_)
    if not theirs and not trial.past:
        return result(Status.REFERENCE_FAILED, said=failed or NO_NUMBERS)
    try:
        mine = port(trial.case)
        written = mine.written
        ours = _outputs(mine, plainly=plainly)
    except VerifyError as error_:
        same = trial.past and not theirs
        return result(Status.SAME if same else Status.PORT_FAILED, said=failure_reason(error_))
    if not theirs:
        return result(Status.REFERENCE_FAILED, said=failed)
    pairing, said = None, ""
    try:
        pairing = pair(table, _shapes(theirs), _shapes(ours), sizes)
        said = pairing.other_shapes[0] if pairing.other_shapes and not is_empty(ours) else ""
    except VerifyError as error_:
        said = "" if is_empty(ours) else failure_reason(error_)
    if pairing is None and not said:  # there is nothing to compare
        return result(Status.SAME)
    found = result(Status.DIFFERS, torch.inf, said=said)
    if pairing is not None and not said:
        off, what = _apart(trial, pairing, theirs, ours, given, differs, working)
        status, why = Status.SAME, ""
        if differs(off, trial.case) or what != trial.what:
            status = Status.DIFFERS
        elif not all(finite(kept(one, given, point)) for point, one in theirs.items()):
            status, why = Status.REFERENCE_FAILED, NO_NUMBERS  # the other values are compared, and it is not counted
        found = replace(result(status, off, said=why), what=what)
    if found.status is Status.DIFFERS and _has_another_shape_alone(trial.case, theirs, reference, plainly=plainly):
        return result(Status.REFERENCE_FAILED, said=OTHER_ALONE)
    return found


def _apart(
    trial: Trial,
    pairing: Pairing,
    theirs: Mapping[Point, Tensor],
    ours: Mapping[Point, Tensor],
    given: Mapping[str, Tensor],
    differs: Differs,
    working: Working | None,
) -> tuple[float, str]:
    """The largest difference of the outputs, and its trial; where float64 agrees, that of the working dtype."""
    worst = 0.0
    for point, one in pairing.pairs.items():
        worst = max(worst, error(ours[point], one.anchor(theirs, given, ours[point])).largest)
    off = None if working is None or differs(worst, trial.case) else working.apart(trial, pairing.pairs, theirs, given)
    if working is None or off is None:
        return worst, trial.what
    return off, f"{trial.what}, in {dtype_name(working.dtype)}"


def _has_another_shape_alone(case: Case, theirs: Mapping[Point, Tensor], reference: MakeSide, *, plainly: bool) -> bool:
    """Whether the reference gives a row by itself another shape than in a batch, as RWKV does for rows of one token.

    Scores of each text with each picture have another shape for rows of any length, and are compared.
    """
    rows, length = _extent(case.inputs)
    if rows < 2 or not length:
        return False

    def changes(inputs: Mapping[str, Tensor], whole: Mapping[Point, Tensor]) -> bool:
        first = {name: one[:1] if one.ndim and len(one) == rows else one for name, one in inputs.items()}
        alone = _outputs(reference(Case(f"{case.name}, the first row", first)), plainly=plainly)
        return any(
            one.ndim and alone[point].shape[1:] != one.shape[1:] for point, one in whole.items() if point in alone
        )

    try:
        if not changes(case.inputs, theirs):
            return False
        longer = {
            name: torch.cat([one, one], -1) if one.ndim > 1 and one.shape[-1] == length else one
            for name, one in case.inputs.items()
        }
        return not changes(longer, _outputs(reference(Case(f"{case.name}, twice as long", longer)), plainly=plainly))
    except VerifyError:
        return False


OTHER_ALONE = "it gives a row by itself another shape"
"""The reason why a batch with other shapes does not count as a difference."""


def _any_number(value: Tensor) -> bool:
    """Whether there is anything to compare; of an empty tensor the shape is."""
    return not value.numel() or bool(numbers(value).any())


NO_NUMBERS = "some of its values are not numbers"
"""The reason why a batch on which the rest agrees is not counted."""

WORKING = 1e-3
"""A port that is off by less in its working dtype is not looked at any further: it may be rounding."""

BEYOND = 16.0
"""A difference above this many times the reference's own rounding error in that dtype is not a rounding error."""


@dataclass(frozen=True, kw_only=True)
class Working:
    """Both sides in the dtype that users run, where code may take another way than in float64.

    Attributes:
        port, reference: make the sides.
        usual: how far the port is off on the first batches, whose probes say so: a port that rounds more everywhere is
            not another one.
    """

    port: MakeSide
    reference: MakeSide
    dtype: torch.dtype
    usual: float = 0.0

    def apart(
        self, trial: Trial, pairs: Mapping[Point, Pair], theirs: Mapping[Point, Tensor], given: Mapping[str, Tensor]
    ) -> float | None:
        """The port's difference on a batch, if rounding does not explain it; None if it does.

        Args:
            pairs: of the port's outputs, in float64.
            theirs: what the reference returns in float64, and ``given`` what it was given.
        """
        if trial.past:
            return None
        anchors = {point: one.anchor(theirs, given) for point, one in pairs.items()}
        try:
            ours = _outputs(self.port(trial.case), plainly=True)
            if not all(point in ours and one.fits(ours[point]) for point, one in pairs.items()):
                return torch.inf
            off = max((error(ours[point].double(), one).largest for point, one in anchors.items()), default=0.0)
            if off <= max(WORKING, BEYOND * self.usual):
                return None
            rounded = {point: one.double() for point, one in _outputs(self.reference(trial.case), plainly=True).items()}
            values = {point: one.carry(rounded) for point, one in pairs.items()}
        except (VerifyError, KeyError):  # the first batches tell what fails in this dtype
            return None
        rounding = max((error(values[point], one).largest for point, one in anchors.items()), default=0.0)
        if math.isnan(rounding) or off <= BEYOND * rounding:  # the reference's own numbers overflow in this dtype
            return None
        return torch.inf if math.isnan(off) else off


def is_empty(values: Mapping[Point, Tensor]) -> bool:
    """Whether there is no number at all, as of all but the first place in rows of one."""
    return not any(one.numel() for one in values.values())


def _outputs(side: Side, *, plainly: bool) -> dict[Point, Tensor]:
    """The outputs of a side, and other values that are compared with the other side's outputs."""
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


def to_place(
    results: Sequence[Result], trials: Sequence[Trial], most: int, differs: Callable[[Trial], bool]
) -> list[Case]:
    """The batches of differing trials that are run again with all probes, to find where: small ones, of each kind.

    Where the shapes differ there are no numbers to compare.  Rows that begin with padding are left out where the others
    differ too: in a causal model their first queries have no key, and ports and references fill these rows differently.

    Args:
        differs: runs a trial, and says whether the outputs differ.
    """
    pairs = zip(results, trials, strict=True)
    differing = [(one, trial) for one, trial in pairs if one.status is Status.DIFFERS and not one.said]
    differing.sort(  # several rows say more than one, and in rows of few tokens many functions agree
        key=lambda pair: (pair[0].rows == 1, 0 < pair[0].length <= max(FEW_TOKENS), pair[0].rows * pair[0].length)
    )
    of_kind: dict[Kind, list[Trial]] = {}
    single = [pair for pair in differing if pair[0].kind is not Kind.COMBINED]
    for one, trial in single or differing:  # a batch that varies one property says more
        of_kind.setdefault(one.kind, []).append(trial)
    chosen = [of_kind[kind][:SHORTENED] for kind in list(of_kind)[:most]]
    begun = [case for some in chosen if (case := _begun(some, differs)) is not None]
    return begun or [some[0].case for some in chosen]


SHORTENED = 6
"""The number of differing batches of a kind whose rows that begin with a token are tried by themselves."""


def _begun(trials: Sequence[Trial], differs: Callable[[Trial], bool]) -> Case | None:
    """The first of the batches that differs in its rows that begin with a token; these rows alone."""
    for trial in trials:
        masks = [one for name, one in trial.case.inputs.items() if name in (MASK, DECODER_MASK) and one.ndim == TOKENS]
        begun = torch.stack([one[:, 0] != 0 for one in masks]).all(0) if masks else torch.ones(1, dtype=torch.bool)
        if begun.all():
            return trial.case
        inputs = {name: one[begun] if len(one) == len(begun) else one for name, one in trial.case.inputs.items()}
        shorter = Case(f"{trial.case.name}, rows that begin with a token", inputs)
        if begun.any() and differs(replace(trial, case=shorter)):
            return shorter
    return None
