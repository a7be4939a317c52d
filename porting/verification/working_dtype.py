"""Why a port computes something else in its working dtype than in float64, where rounding does not explain it.

A cast to float32 is a copy in float64, and in float32 the tensor itself: what is written to it in place is then written
to the input. Other code asks for the dtype, adds the lowest number of one, or overflows. Both passes of the port are
recorded and compared call by call; what is found there is undone in the working dtype, and has to make the port right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from porting.causes.finding import Finding
from porting.causes.line_edits import LineEdit, condition_edits
from porting.causes.step_differences import operation_of
from porting.causes.tape import Call, Recorder, Ref, Tape, is_in_place
from porting.errors import VerifyError
from porting.frames import from_here
from porting.printable import dtype_name
from porting.reporting.outcome import Probe
from porting.tracing.calls import tensors_in
from porting.tracing.code_coverage import Executed, branches_apart
from porting.tracing.measure import APART
from porting.tracing.running import Both, Side
from porting.tracing.torch_modes import FunctionMode
from porting.tracing.trace import Point
from porting.verification.compare import Comparison

IN_PLACE = "tensor changed in place"
IN_PLACE_WHAT = "a step writes to the result of a cast, which in this dtype is the input itself and no copy of it"
IN_PLACE_FIX = "write to a new tensor: x = x * y for x *= y, or clone the result of the cast"

BRANCH = "other code for another dtype"
BRANCH_WHAT = "a condition is decided otherwise in this dtype than in float64"
BRANCH_FIX = "compute the same in every dtype"

NUMBERS = "other numbers in another dtype"
NUMBERS_WHAT = "a step gives other numbers in this dtype than in float64, for the same input, by more than rounding"
NUMBERS_FIX = "look for an overflow, the lowest number of the dtype, and comparisons with small or large constants"

NEAR = 1e-3
"""How far what a step reads may be from its float64 values, relative to the largest, for its result to tell."""

MOST_CASES = 3
"""In so many cases what was found has to make the port right."""

FAILS = (VerifyError, RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)


class InHalf(FunctionMode):
    """Notes whether anything is computed in float16 or bfloat16.

    Attributes:
        found: whether something is.
    """

    found = False

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`FunctionMode.call`."""
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.dtype in (torch.float16, torch.bfloat16):
            self.found = True
        return result


def computes_in_half(port: Side) -> bool:
    """Whether a port computes in float16 or bfloat16 whatever its weights are, so that it rounds much worse."""
    watch = InHalf()
    with watch:
        port.outputs(0)
    return watch.found


class _CopyingCasts(FunctionMode):
    """Copies the results of functions that give back what they are given."""

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`FunctionMode.call`."""
        result = func(*args, **kwargs)
        same = isinstance(result, Tensor) and any(result is one for one in args) and not is_in_place(func)
        return result.clone() if same else result


class _Replaced(FunctionMode):
    """Gives other results of some calls.

    Args:
        results: the number of a call, among those that a tape has -> its result.
    """

    def __init__(self, results: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._results, self._number = results, count()

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`FunctionMode.call`."""
        result = func(*args, **kwargs)
        if not tensors_in(args[0] if func is Tensor.__setitem__ else result):  # it is on no tape
            return result
        number = next(self._number)
        instead = self._results.get(number)
        return result if instead is None or not isinstance(result, Tensor) else instead.to(result.dtype)


@dataclass(frozen=True)
class _Departure:
    """The first call at which the two passes of a port are no longer alike.

    Attributes:
        call: the call, in the working dtype.
        wrote: the call that changed in place what it reads, where that is what differs.
        other: what the float64 pass calls there, where it takes other code.
    """

    call: Call
    wrote: Call | None = None
    other: Call | None = None


def causes_in_working_dtype(
    comparison: Comparison, probes: Sequence[Probe], both: Both, dtype: torch.dtype
) -> list[Finding]:
    """Return why some probes are wrong in a working dtype alone; nothing where no experiment makes them right.

    Args:
        probes: those that are.
    """
    exact, port = both(torch.float64)[1], both(dtype)[1]
    order = sorted(
        range(len(comparison.exact)), key=lambda case: sum(one.numel() for one in port.arguments[case].values())
    )
    wrong = [case for case in order if _wrong(comparison, port, probes, case)]
    if not wrong:
        return []
    search = _Search(comparison, probes, exact, port, wrong[:MOST_CASES], dtype)
    with torch.no_grad():
        return search.found()


@dataclass(frozen=True)
class _Search:
    comparison: Comparison
    probes: Sequence[Probe]
    exact: Side
    port: Side
    cases: Sequence[int]
    dtype: torch.dtype

    def found(self) -> list[Finding]:
        """Return the cause, if what is tried makes the port right in every case."""
        case = self.cases[0]
        try:
            tapes = _tape(self.exact, case), _tape(self.port, case)
        except FAILS:
            return []
        departure = _departure(*tapes)
        name = dtype_name(self.dtype)
        if departure is None:
            return []
        line = _line(departure.call)
        wrote = departure.wrote or _last_written(tapes[1], departure.call)
        if wrote is not None and self._right(lambda case: _CopyingCasts()):
            there = _line(wrote)
            detail = f"at {there}: {line} reads what is written there; in {name} a cast to {name} makes no copy"
            return [self._finding(IN_PLACE, detail, IN_PLACE_WHAT, f"{IN_PLACE_FIX}, at {there}")]
        if departure.other is not None:
            return self._branch(line, _line(departure.other), name)
        if self._right(self._replacing(departure.call)):
            detail = f"{operation_of(departure.call)} gives {_numbers_text(*tapes, departure.call)}, at {line}"
            return [self._finding(NUMBERS, detail, NUMBERS_WHAT, NUMBERS_FIX)]
        return []

    def _branch(self, line: str, other: str, name: str) -> list[Finding]:
        """Return the condition that is decided otherwise, if the port is right when it is decided as in float64."""
        module = self.port.module
        seen = [_executed(side, self.cases[0]) for side in (self.exact, self.port)]
        places = [branch.where for branch in branches_apart([seen[0]], [seen[1]], module)]
        for edit in condition_edits(places):
            if self._right(partial(_made, edit)):
                detail = f"`{edit.old}`, at {edit.place}: {line} runs in {name} and {other or 'nothing'} in float64"
                return [self._finding(BRANCH, detail, BRANCH_WHAT, f"{BRANCH_FIX}; {edit.fix}")]
        return []

    def _replacing(self, call: Call) -> Callable[[int], AbstractContextManager[object]]:
        """Return what makes the context in which a line, in each layer, gives what it gives in float64.

        So do the lines that read what no number of the working dtype can be.
        """

        def context(case: int) -> AbstractContextManager[object]:
            exact, own = _tape(self.exact, case), _tape(self.port, case)
            results, beyond = dict[int, Tensor](), set[Ref]()
            for theirs, ours in zip(_computing(exact), _computing(own), strict=False):
                if _line(theirs) != _line(ours):
                    break
                if _line(ours) != _line(call) and beyond.isdisjoint(ours.reads):
                    continue
                for write, other in zip(ours.writes[:1], theirs.writes[:1], strict=True):
                    value = exact[other]
                    results[ours.number] = value
                    if not torch.equal(value.isfinite(), value.to(own[write].dtype).isfinite()):
                        beyond.add(write)
            return _Replaced(results)

        return context

    def _right(self, context: Callable[[int], AbstractContextManager[object]]) -> bool:
        return not any(_wrong(self.comparison, self.port, self.probes, case, context(case)) for case in self.cases)

    def _finding(self, name: str, detail: str, what: str, fix: str) -> Finding:
        worst = max(probe.off.worst for probe in self.probes if probe.off is not None)
        return Finding(
            name=name,
            detail=detail,
            probes=tuple(probe.port for probe in self.probes),
            difference=worst if math.isfinite(worst) else 1.0,
            residual=0.0,
            what=what,
            fix=fix,
        )


def _made(edit: LineEdit, case: int) -> AbstractContextManager[None]:
    return edit.made()


def _wrong(
    comparison: Comparison,
    port: Side,
    probes: Sequence[Probe],
    case: int,
    around: AbstractContextManager[object] | None = None,
) -> bool:
    """Whether one of some probes is apart from the reference's by more than rounding, in a pass within a context."""
    context = around or nullcontext()
    resting = context.resting if isinstance(context, FunctionMode) else nullcontext
    found: dict[Point, Tensor] = {}

    def visit(point: Point, value: Tensor) -> None:
        with resting():
            found[point] = value.detach().clone()

    try:
        with context:
            port.run(case, visit, wanted=[probe.port for probe in probes])
    except FAILS:
        return True
    errors = [comparison.error_at(case, point, value) for point, value in found.items()]
    return any(one is not None and not one.rms <= APART for one in errors)


def _tape(side: Side, case: int) -> Tape:
    with Recorder(side.module, lines=True) as recorder:
        side.outputs(case)
    return recorder.tape


def _executed(side: Side, case: int) -> Executed:
    seen = Executed(side.module)
    with seen.watched():
        side.outputs(case)
    return seen


def _departure(exact: Tape, own: Tape) -> _Departure | None:
    """Return the first call at which two passes of a port are no longer alike."""
    known: dict[Ref, Ref] = {}
    for theirs, ours in zip(_computing(exact), _computing(own), strict=False):
        if (theirs.name, _line(theirs)) != (ours.name, _line(ours)):
            return _Departure(ours, other=theirs)
        for read, other in zip(ours.reads, theirs.reads, strict=False):
            expected = known.get(_uncast(exact, other))
            actual = _uncast(own, read)
            maker = own.maker(actual)
            if expected is not None and expected != actual and maker is not None and is_in_place(maker.function):
                return _Departure(ours, wrote=maker)
        for write, other in zip(ours.writes, theirs.writes, strict=False):
            known[_uncast(exact, other)] = _uncast(own, write)
        if ours.writes and theirs.writes and _departs(exact, own, theirs, ours):
            return _Departure(ours)
    return None


def _last_written(tape: Tape, call: Call) -> Call | None:
    """Return the last call before another one that changes in place what a cast has given."""
    before = (one for one in reversed(tape.calls[: call.number]) if is_in_place(one.function) and one.reads)
    return next((one for one in before if _uncast(tape, one.reads[0]) != one.reads[0]), None)


CASTS = frozenset({"to", "float", "double", "half", "bfloat16", "type_as", "type", "contiguous", "detach"})
"""Functions that give back what they are given where there is nothing to do."""


def _computing(tape: Tape) -> Iterator[Call]:
    """Yield the calls but for casts, of which there may be others in another dtype."""
    return (call for call in tape.calls if call.name not in CASTS)


def _uncast(tape: Tape, ref: Ref) -> Ref:
    return tape.past(ref, CASTS)[-1]


def _departs(exact: Tape, own: Tape, theirs: Call, ours: Call) -> bool:
    """Whether a call gives other numbers than in float64, for what it reads there too."""
    reads = zip(ours.reads, theirs.reads, strict=False)
    return not _near(exact[theirs.result], own[ours.result]) and all(_near(exact[two], own[one]) for one, two in reads)


def _near(exact: Tensor, own: Tensor) -> bool:
    if exact.shape != own.shape or not own.is_floating_point() or not exact.is_floating_point():
        return exact.shape == own.shape and bool((exact.double() - own.double() == 0).all())
    if not torch.equal(exact.isfinite(), own.isfinite()):
        return False
    kept = exact[exact.isfinite()].double()
    if not kept.numel():
        return True
    return bool((own[own.isfinite()].double() - kept).abs().max() <= NEAR * kept.abs().max())


def _numbers_text(exact: Tape, own: Tape, call: Call) -> str:
    theirs = next(one for one in exact.calls if (_line(one), one.name) == (_line(call), call.name))
    value, other = own[call.result].double().flatten(), exact[theirs.result].double().flatten()
    if value.shape != other.shape:
        return "another shape than in float64"
    apart = (value - other).abs().nan_to_num(nan=math.inf)
    place = int(apart.argmax())
    return f"{float(value[place]):g} where it gives {float(other[place]):g} in float64"


def _line(call: Call) -> str:
    return from_here(call.lines[0]) if call.lines else ""
