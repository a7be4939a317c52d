"""Experiments on whole passes that show why a port differs: other inputs, each row alone, copies for each module.

Each is held against every case, also those that no cause was looked for in: it explains a difference if nothing but
rounding is left in all of them.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from porting.causes.finding import Finding
from porting.causes.input_changes import InputChange, input_changes
from porting.errors import VerifyError
from porting.frames import current_line, from_here
from porting.reporting.outcome import Probe
from porting.tracing.running import Side
from porting.tracing.torch_modes import FunctionMode
from porting.tracing.trace import is_inner, is_returned, output_of
from porting.verification.cause_case import END, CauseCase

ACTIVE = 1e-6
"""A change that moves the reference by less than this, relative to scale, is not told from none."""

SHOWN_IN = 2
"""In so many cases a change has to explain a difference at least."""

EXPERIMENTING = 8.0
"""Seconds for all experiments."""

ROWS, ROWS_WHAT = "rows that depend on one another", "a row of a batch is computed with what belongs to other rows"
ROWS_FIX = "keep the axis of rows in each step: no [0], no [:1], and no sum or number over the whole batch"

ELSEWHERE, ELSEWHERE_WHAT = "another value returned", "the port returns what the reference has at another place"
ELSEWHERE_FIX = "return the value that the reference returns; of its states the first is the first layer's input"

IN_PLACE = "tensor changed in place"
IN_PLACE_WHAT = "a module writes to a tensor that it was given, and later modules or calls read what it wrote"
IN_PLACE_FIX = (
    "write to a copy: x = x + y for x += y, x.masked_fill() for x.masked_fill_(), x.clone() before x[...] = y"
)


def experiment(
    cases: Sequence[CauseCase], probes: Sequence[Probe], *, padding: int | None, until: float
) -> list[Finding]:
    """Return what accounts for all differences in all cases, as a finding; nothing where no experiment does.

    Args:
        cases: all that there are, those in which something differs first.
        padding: the token id of padding; None where nothing is known of it.
        until: the deadline, by ``time.thread_time``.
    """
    until = min(until, time.thread_time() + EXPERIMENTING)
    far = [_end_to_end(case) for case in cases]
    wrong = [case for case, left in zip(cases, far, strict=True) if left > _bound(case, probes)]
    if len(wrong) < min(SHOWN_IN, len(cases)):
        return []
    found = _copied(cases, wrong, probes, until)
    found = found or _returned_elsewhere(cases, probes)
    found = found or _with_other_inputs(cases, wrong, probes, padding, until)
    return found or _each_row_alone(cases, wrong, probes, until)


def _end_to_end(case: CauseCase) -> float:
    """How far the port is off in a case."""
    return case.apart({}).largest


def _bound(case: CauseCase, probes: Sequence[Probe]) -> float:
    """What rounding explains of a case's outputs."""
    return max((probe.bound.end_to_end or 0.0 for probe in probes if probe.port in case.outputs), default=0.0) or END


def _finding(probes: Sequence[Probe], left: float, name: str, detail: str, what: str, fix: str) -> Finding:
    guilty = [probe for probe in probes if probe.guilty]
    return Finding(
        name=name,
        detail=detail,
        probes=tuple(probe.port for probe in guilty),
        difference=max((probe.meaning.isolated or probe.meaning.end_to_end for probe in guilty), default=0.0),
        residual=left,
        what=what,
        fix=fix,
    )


# ---------------------------------------------------------------------------------------------------- other inputs


@torch.no_grad()
def _with_other_inputs(
    cases: Sequence[CauseCase], wrong: Sequence[CauseCase], probes: Sequence[Probe], padding: int | None, until: float
) -> list[Finding]:
    """Return the change of the inputs with which the reference computes what the port does, in every case."""
    given = [case.reference.arguments[case.case] for case in cases]
    names = dict.fromkeys(name for one in given for name, value in one.items() if value.ndim)
    taken, optional = _arguments_of(cases[0].reference.module)
    fitting: list[tuple[InputChange, float]] = []
    norms = _norms_of(cases[0].reference.module, given)
    for change in input_changes(names, [name for name in names if name in optional], taken, padding, norms):
        if time.thread_time() > until:
            break
        left = _explains(change, cases, wrong, probes)
        if left is not None:
            fitting.append((change, left))
    if not fitting:
        return []
    change, left = fitting[0]
    found = _finding(probes, left, change.name, change.detail, change.what, change.fix)
    return [found]


def _explains(
    change: InputChange, cases: Sequence[CauseCase], wrong: Sequence[CauseCase], probes: Sequence[Probe]
) -> float | None:
    """The difference that is left in all cases with a change of the inputs; None where it does not explain them."""
    largest, active = 0.0, 0
    for number, case in enumerate(_first(wrong, cases)):
        inputs = change.change(case.reference.arguments[case.case])
        differs = number < len(wrong)
        if inputs is None:
            if differs:
                return None
            continue
        try:
            altered = case.reference_given(inputs)
        except VerifyError:
            if differs:
                return None
            continue
        left = case.apart_from(altered)
        if not left <= _bound(case, probes):
            return None
        largest, active = max(largest, left), active + (differs and case.moved(altered) > ACTIVE)
    return largest if active >= min(SHOWN_IN, len(cases)) else None


def _first(wrong: Sequence[CauseCase], cases: Sequence[CauseCase]) -> list[CauseCase]:
    """The cases, those in which something differs first."""
    known = {id(case) for case in wrong}
    return [*wrong, *(case for case in cases if id(case) not in known)]


MOST_NORMS = 2
"""How many norms are tried on embeddings that are given."""


def _norms_of(module: nn.Module, given: Sequence[Mapping[str, Tensor]]) -> dict[str, nn.Module]:
    """The first norms of a module that embeddings could go through."""
    widths = {one["inputs_embeds"].shape[-1] for one in given if "inputs_embeds" in one}
    found = {}
    for path, part in module.named_modules():
        held = [tuple(one.shape) for one in part.parameters()]
        if held and {*held} <= {(width,) for width in widths} and not [*part.children()]:
            found[path] = part
    return dict(islice(found.items(), MOST_NORMS))


def _arguments_of(module: nn.Module) -> tuple[list[str], list[str]]:
    """The arguments of a module's forward, and those that have a default."""
    taken = inspect.signature(module.forward).parameters
    return [*taken], [name for name, one in taken.items() if one.default is not one.empty]


# ---------------------------------------------------------------------------------------- another value is returned


def _returned_elsewhere(cases: Sequence[CauseCase], probes: Sequence[Probe]) -> list[Finding]:
    """Return that outputs are other values of the reference, if each guilty probe is such an output."""
    guilty = [probe for probe in probes if probe.guilty]
    if not guilty or not all(is_returned(probe.port) and not is_inner(probe.port) for probe in guilty):
        return []
    said = []
    bound = max(probe.bound.end_to_end or 0.0 for probe in probes)  # what is returned may come from behind roundings
    for probe in guilty:
        shown = [case for case in cases if probe.port in case.outputs]
        places = [case.returned_elsewhere(probe.port, bound) for case in shown]
        everywhere = [place for place in places[0] if all(place in one for one in places)] if places else []
        if len(places) < SHOWN_IN or not everywhere:
            return []
        said.append(f"{output_of(probe.port) or 'the output'} is {everywhere[0]}")
    return [_finding(probes, 0.0, ELSEWHERE, f"{', '.join(said)} of the reference", ELSEWHERE_WHAT, ELSEWHERE_FIX)]


# -------------------------------------------------------------------------------------------------- each row alone


def _each_row_alone(
    cases: Sequence[CauseCase], wrong: Sequence[CauseCase], probes: Sequence[Probe], until: float
) -> list[Finding]:
    """Return that rows depend on one another, if the port is right for each row alone."""
    largest, several = 0.0, 0
    for case in wrong:
        rows = case.rows
        if rows < 2 or time.thread_time() > until:
            return []
        try:
            left = case.left_in(case.port_in_rows())
        except (VerifyError, RuntimeError):
            return []
        if not left <= _bound(case, probes):
            return []
        largest, several = max(largest, left), several + 1
    if several < SHOWN_IN:
        return []
    return [_finding(probes, largest, ROWS, "each row by itself is right", ROWS_WHAT, ROWS_FIX)]


# -------------------------------------------------------------------------------------------- copies of what is given


def _copied(
    cases: Sequence[CauseCase], wrong: Sequence[CauseCase], probes: Sequence[Probe], until: float
) -> list[Finding]:
    """Return that a tensor is changed in place, if the port is right where each module gets copies of its arguments."""
    watch = _Writes(wrong[0].port.module)
    with watch.attached(), watch:
        _outputs(wrong[0].port, wrong[0].case)
    if not watch.lines:
        return []
    largest = 0.0
    for case in _first(wrong, cases):
        if time.thread_time() > until:
            return []
        with copying(case.port.module):
            try:
                left = case.left_in(case.port.keep(case.case))
            except (VerifyError, RuntimeError):
                return []
        if not left <= _bound(case, probes):
            return []
        largest = max(largest, left)
    detail = f"at {', '.join(watch.lines)}: with copies of its arguments for each module, your model is right"
    return [_finding(probes, largest, IN_PLACE, detail, IN_PLACE_WHAT, IN_PLACE_FIX)]


def _outputs(side: Side, case: int) -> None:
    with torch.no_grad():
        try:
            side.outputs(case)
        except VerifyError:
            return


@contextmanager
def copying(module: nn.Module) -> Iterator[None]:
    """Within it each part of a module is called with copies of the tensors that it is given."""

    def hook(part: nn.Module, args: Any, kwargs: Any) -> Any:  # whatever it is given
        return _copies(args), _copies(kwargs)

    with ExitStack() as stack:
        for path, part in module.named_modules():
            if path:
                stack.callback(part.register_forward_pre_hook(hook, prepend=True, with_kwargs=True).remove)
        yield


def _copies(value: Any) -> Any:  # whatever is nested
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (tuple, list):
        return type(value)(_copies(one) for one in value)
    if type(value) is dict:
        return {key: _copies(one) for key, one in value.items()}
    return value


class _Writes(FunctionMode):
    """Notes the lines that write to tensors which a part of a module was given.

    Attributes:
        lines: ``file:line`` of the user's code.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self._given: dict[int, Tensor] = {}
        self.lines: dict[str, None] = {}

    def attached(self) -> AbstractContextManager[object]:
        """Return a context in which the tensors are noted that parts are given."""

        def hook(part: nn.Module, args: Any, kwargs: Any) -> None:  # whatever it is given
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor):
                    self._given[value.untyped_storage().data_ptr()] = value

        stack = ExitStack()
        for path, part in self._module.named_modules():
            if path:
                stack.callback(part.register_forward_pre_hook(hook, prepend=True, with_kwargs=True).remove)
        return stack

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`FunctionMode.call`."""
        first = args[0] if args and isinstance(args[0], Tensor) and not args[0].is_inference() else None
        version = None if first is None else first._version
        result = func(*args, **kwargs)
        if first is not None and first._version != version and first.untyped_storage().data_ptr() in self._given:
            self.lines[from_here(current_line())] = None
        return result
