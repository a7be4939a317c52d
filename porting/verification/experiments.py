"""Experiments on whole passes that show why a port differs: other inputs, each row alone, copies for each module.

Each is tried in the smallest case in which something differs, and goes on to the next one while it explains what is
seen: it is the cause if nothing but rounding is left in every case, also in those of other kinds.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cached_property
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
from porting.tracing.trace import Point, is_inner, is_returned, output_of
from porting.verification.cause_case import END, CauseCase

ACTIVE = 1e-6
"""A change that moves the reference by less than this, relative to scale, is not told from none."""

SHOWN_IN = 2
"""In so many cases a change has to explain a difference at least."""

MOST_PASSES = 80
"""After so many passes no other experiment begins; one that explains what is seen goes on to the last case."""

ROWS, ROWS_WHAT = "rows that depend on one another", "a row of a batch is computed with what belongs to other rows"
ROWS_FIX = "keep the axis of rows in each step: no [0], no [:1], and no sum or number over the whole batch"

ELSEWHERE, ELSEWHERE_WHAT = "another value returned", "the port returns what the reference has at another place"
ELSEWHERE_FIX = "return the value that the reference returns; of its states the first is the first layer's input"

IN_PLACE = "tensor changed in place"
IN_PLACE_WHAT = "a module writes to a tensor that it was given, and later modules or calls read what it wrote"
IN_PLACE_FIX = (
    "write to a copy: x = x + y for x += y, x.masked_fill() for x.masked_fill_(), x.clone() before x[...] = y"
)


class Experiments:
    """The experiments of one search.

    Args:
        cases: the first cases.
        wide: cases of other kinds, in which only what explains the first ones is tried.
        probes: all of them, with their bounds.
        padding: the token id of padding; None where nothing is known of it.
    """

    def __init__(
        self,
        cases: Sequence[CauseCase],
        wide: Iterable[CauseCase],
        probes: Sequence[Probe],
        *,
        padding: int | None,
    ) -> None:
        self._first, self._wide, self._probes, self._padding = cases, wide, probes, padding
        self._guilty = [probe for probe in probes if probe.guilty]
        self._clock = cases[0].port.clock
        self._last = self._clock.passes + MOST_PASSES

    @torch.no_grad()
    def changed_in_place(self) -> list[Finding]:
        """Return that a tensor is changed in place, if the port is right with copies of its arguments for each module.

        It takes a pass where no module writes to what it is given.
        """
        wrong = self._wrong[0] if self._wrong else None
        if wrong is None:
            return []
        watch = _Writes(wrong.port.module)
        with watch.attached(), watch:
            _outputs(wrong.port, wrong.case)
        if not watch.lines:
            return []
        largest = 0.0
        for case in self._cases():
            with copying(case.port.module):
                try:
                    left = case.left_in(case.port.keep(case.case))
                except (VerifyError, RuntimeError):
                    return []
            if not left <= self._bound(case):
                return []
            largest = max(largest, left)
        detail = f"at {', '.join(watch.lines)}: with copies of its arguments for each module, your model is right"
        return [self._finding(largest, IN_PLACE, detail, IN_PLACE_WHAT, IN_PLACE_FIX)]

    @torch.no_grad()
    def explaining(self, until: float) -> list[Finding]:
        """Return what accounts for all differences in all cases, as a finding; nothing where no experiment does.

        Args:
            until: the deadline of the search, by ``time.thread_time``.
        """
        if len(self._wrong) < min(SHOWN_IN, len(self._first)):
            return []
        self._last = self._clock.passes + MOST_PASSES
        return self._returned_elsewhere() or self._with_other_inputs(until) or self._each_row_alone()

    @cached_property
    def _wrong(self) -> list[CauseCase]:
        """Those of the first cases in which something that is returned differs, the smallest first."""
        return sorted((case for case in self._first if self._differs(case)), key=lambda case: case.size)

    def _cases(self) -> Iterator[CauseCase]:
        """All cases, those in which something differs first, and those of other kinds last."""
        known = {id(case) for case in self._wrong}
        yield from self._wrong
        yield from (case for case in self._first if id(case) not in known)
        yield from self._wide

    def _differs(self, case: CauseCase) -> bool:
        return case.end_to_end_difference > self._bound(case)

    def _bound(self, case: CauseCase) -> float:
        """What rounding explains of a case's outputs."""
        ends = (probe.bound.end_to_end or 0.0 for probe in self._probes if probe.port in case.outputs)
        return max(ends, default=0.0) or END

    @property
    def _is_spent(self) -> bool:
        return self._clock.passes >= self._last

    def _finding(self, left: float, name: str, detail: str, what: str, fix: str) -> Finding:
        guilty = self._guilty
        return Finding(
            name=name,
            detail=detail,
            probes=tuple(probe.port for probe in guilty),
            difference=max((probe.meaning.isolated or probe.meaning.end_to_end for probe in guilty), default=0.0),
            residual=left,
            what=what,
            fix=fix,
        )

    def _with_other_inputs(self, until: float) -> list[Finding]:
        """Return the change of the inputs with which the reference computes what the port does, in every case."""
        module = self._first[0].reference.module
        given = [case.reference.arguments[case.case] for case in self._first]
        names = dict.fromkeys(name for one in given for name, value in one.items() if value.ndim)
        taken, optional = _arguments_of(module)
        norms = _norms_of(module, given)
        changes = input_changes(names, [name for name in names if name in optional], taken, self._padding, norms)
        for change in changes:
            if self._is_spent or time.thread_time() > until:
                break
            left = self._left_with(change)
            if left is not None:
                return [self._finding(left, change.name, change.detail, change.what, change.fix)]
        return []

    def _left_with(self, change: InputChange) -> float | None:
        """The difference that is left in all cases with a change of the inputs; None where it does not explain them."""
        largest, active = 0.0, 0
        for case in self._cases():
            inputs = change.change(case.reference.arguments[case.case])
            differs = self._differs(case)
            altered: Mapping[Point, Tensor] | None = None
            if inputs is not None:
                with suppress(VerifyError):
                    altered = case.reference_given(inputs)
            if altered is None:
                if differs:
                    return None
                continue
            left = case.apart_from(altered)
            if not left <= self._bound(case):
                return None
            largest, active = max(largest, left), active + (differs and case.moved(altered) > ACTIVE)
        return largest if active >= min(SHOWN_IN, len(self._first)) else None

    def _returned_elsewhere(self) -> list[Finding]:
        """Return that outputs are other values of the reference, if each guilty probe is such an output."""
        guilty = self._guilty
        if not guilty or not all(is_returned(probe.port) and not is_inner(probe.port) for probe in guilty):
            return []
        said = []
        bound = max(probe.bound.end_to_end or 0.0 for probe in self._probes)  # it may come from behind roundings
        for probe in guilty:
            everywhere: list[str] | None = None
            shown = 0
            for case in self._cases():
                if probe.port in case.outputs:
                    places = case.returned_elsewhere(probe.port, bound)
                    everywhere = [one for one in (places if everywhere is None else everywhere) if one in places]
                    shown += 1
                    if not everywhere:
                        return []
            if shown < SHOWN_IN or not everywhere:
                return []
            said.append(f"{output_of(probe.port) or 'the output'} is {everywhere[0]}")
        return [self._finding(0.0, ELSEWHERE, f"{', '.join(said)} of the reference", ELSEWHERE_WHAT, ELSEWHERE_FIX)]

    def _each_row_alone(self) -> list[Finding]:
        """Return that rows depend on one another, if the port is right for each row alone."""
        largest, several = 0.0, 0
        for case in () if self._is_spent else self._cases():
            if not self._differs(case):
                continue
            if case.rows < 2:
                return []
            try:
                left = case.left_in(case.port_in_rows())
            except (VerifyError, RuntimeError):
                return []
            if not left <= self._bound(case):
                return []
            largest, several = max(largest, left), several + 1
        if several < SHOWN_IN:
            return []
        return [self._finding(largest, ROWS, "each row by itself is right", ROWS_WHAT, ROWS_FIX)]


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
