"""Running one side of a comparison under fixed settings of torch, observing its values and explaining its failures."""

from __future__ import annotations

import platform
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from porting.errors import Code, Fault, Message, Option, VerifyError
from porting.frames import is_users, signature_of, users_line
from porting.printable import package_versions, safe, text_of
from porting.tracing.activations import Activations
from porting.tracing.conditions import Conditions
from porting.tracing.devices import on_cpu
from porting.tracing.dropout import SameDropout
from porting.tracing.float64 import LoweredOperations, forced_float64
from porting.tracing.torch_modes import KeptGraph, eagerly
from porting.tracing.trace import EndOfPass, Point, SeeingError, Trace, Visit, leaves, split, trace

SMALL = 1 << 23
"""Number of parameters below which several threads are not faster than one."""


@contextmanager
def undisturbed(seed: int) -> Iterator[None]:
    """Return a context on the CPU with default settings of torch and a seed.

    Random state and threads are restored afterwards.
    """
    with (
        restored_threads(),
        on_cpu(),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        torch.manual_seed(seed)
        yield


def limit_threads(elements: int) -> None:
    """Use one thread for a small model, until :func:`undisturbed` or :func:`restored_threads` ends.

    Threads that share small operations mostly wait for one another, on busy cores ten times as long.
    """
    if elements < SMALL:
        torch.set_num_threads(1)


@contextmanager
def restored_threads() -> Iterator[None]:
    """Return a context after which torch has as many threads as before."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter."""
    packages = ("porting", "torch", "transformers", "safetensors")
    return {"python": platform.python_version(), **package_versions(packages)}


def peak() -> int:
    """Return the largest resident size of the process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass
class Clock:
    """The duration of the forward passes in seconds, without observing them, and their number."""

    seconds: float = 0.0
    passes: int = 0


@dataclass(kw_only=True)
class Side:
    """One of the two models, with its inputs for every case.

    Attributes:
        arguments: for each case the forward arguments by name; a name that is a number is a position.
        clock: counts the passes and their time.
        lifted: the modules that asked for less than float64 in a float64 run, and got float64.
        written: the arguments that a pass has changed in place; each pass gets copies.
        draws: the random numbers of dropout in training mode; None in eval mode.
        autocast: the dtype of torch.autocast around each pass; None without autocast.
        conditions: records the conditions on tensors; None to record none.
        renames: :meth:`run` shows outputs under other names.
        seed: the seed of torch's generator for each pass, so that two models that draw random numbers in the same order
            get the same ones; the generator is restored afterwards. None to leave it alone.
        drew: whether a pass with a seed has drawn random numbers.
        lifting: remove casts to less than float64 in a float64 run; False if both sides are known to have none, since
            watching for them costs several times the pass of a small model.
        spelled_out: as in :func:`porting.tracing.trace.trace`.
    """

    title: str
    module: nn.Module
    arguments: Sequence[Mapping[str, Tensor]]
    wanted: Sequence[Point]
    clock: Clock = field(default_factory=Clock)
    lifted: LoweredOperations = field(default_factory=dict)
    written: dict[str, None] = field(default_factory=dict)
    draws: SameDropout | None = None
    autocast: torch.dtype | None = None
    conditions: Conditions | None = None
    renames: bool = False
    seed: int | None = 0
    drew: bool = False
    lifting: bool = True
    spelled_out: bool = False

    def run(
        self,
        case: int,
        visit: Visit,
        *,
        wanted: Sequence[Point] | None = None,
        ran: Callable[[str], None] | None = None,
        gradients: bool = False,
        isolated: bool = False,
    ) -> None:
        """Run one forward pass.

        Args:
            visit, ran: as in :func:`porting.tracing.trace.trace`.
            wanted: the points to observe; by default those of the side.
            isolated: the visitor substitutes the exact values; a recorded side then shows its isolated run.

        Raises:
            VerifyError: the model's forward fails.
        """
        points, visit = self.wanted if wanted is None else wanted, self.visitor(visit)
        values = self.values(case, isolated=isolated)
        if values is not None:
            names = {split(point)[0] for point in points}
            for point, value in values:
                if split(point)[0] in names:
                    visit(point, value)
            return

        def work(call: Callable[[nn.Module], object]) -> float:
            with KeptGraph() if gradients else torch.no_grad():
                return trace(self.module, call, points, visit, ran, spelled_out=self.spelled_out)

        self._seeded_pass(case, work)

    def visitor(self, visit: Visit) -> Visit:
        """Return the function that a pass calls with each value, for the one that was given to :meth:`run`."""
        return visit

    def values(self, case: int, *, isolated: bool) -> Iterable[tuple[Point, Tensor]] | None:
        """Return the values of a pass that is not observed inside of a module, at all points; None for a module."""
        return None

    def outputs(
        self,
        case: int,
        *,
        around: Callable[[], AbstractContextManager[object]] = torch.no_grad,
    ) -> object:
        """Return the result of one forward pass without observing it.

        Args:
            around: makes the context of the pass: ``torch.no_grad``, ``torch.enable_grad`` ...

        Raises:
            VerifyError: the model fails.
        """
        returned: list[object] = []

        def work(call: Callable[[nn.Module], object]) -> float:
            with around():
                returned.append(call(self.module))
            return 0.0

        self._seeded_pass(case, work)
        return returned[0]

    def returned(self, case: int) -> dict[str, Tensor]:
        """Return the tensors of a pass's result, by the names of :func:`porting.tracing.trace.leaves`.

        Raises:
            VerifyError: the model fails.
        """
        return leaves(self.outputs(case))

    @property
    def places(self) -> list[Point]:
        """All points that can be observed besides the model's own outputs: the outputs of its modules."""
        return [path for path, _ in self.module.named_modules() if path]

    def _seeded_pass(self, case: int, work: Callable[[Callable[[nn.Module], object]], float]) -> None:
        """Do the work of a pass with torch's generator seeded before it."""
        with self._seeded():  # before the first operation; later changes of the state count as draws
            self._pass(case, work)

    def _pass(self, case: int, work: Callable[[Callable[[nn.Module], object]], float]) -> None:
        arguments = self.arguments[case]
        copies = {name: value.clone() for name, value in arguments.items()}
        positional = [value for name, value in copies.items() if name.isdigit()]
        named = {name: _as_taken(value) for name, value in copies.items() if not name.isdigit()}
        start = time.perf_counter()
        try:
            exact = self.lifting and any(parameter.dtype == torch.float64 for parameter in self.module.parameters())
            unlifted: nullcontext[LoweredOperations] = nullcontext({})
            drawing = self.draws.again() if self.draws is not None else nullcontext()
            watching = self.conditions or nullcontext()
            casting = torch.autocast("cpu", dtype=self.autocast, enabled=self.autocast is not None)
            lifted = forced_float64(self.module) if exact else unlifted
            with watching, drawing, casting, eagerly(), lifted as found:
                observing = work(lambda module: module(*positional, **named))
        except (VerifyError, EndOfPass):
            raise
        except SeeingError as error:
            message = f"an activation of {self.title} cannot be compared: {error}"
            hint = "this is a fault of porting, and none of a model: please report it"
            raise VerifyError(Fault(code=Code.FORWARD_FAILED, message=message, hint=hint)) from error
        except Exception as error:  # the user's own forward may raise anything
            message = f"{self.title} failed on {_described(arguments)}: {_exception_line(error)}"
            takes = "" if is_users(error) else signature_of(self.module.forward)
            where = f"its forward takes {takes}" if takes else f"at {users_line(error)}"
            hint = f"{where}; [inputs] says which arguments it is given"
            if isinstance(error, IndexError) or any(one in text_of(error) for one in ("out of bounds", "out of range")):
                hint += Message("; if a row is too long for it, ", Option("longest"), " makes shorter ones")
            elif any("mask" in name for name in arguments):
                hint += " and how a mask: -> bool, -> padding or -> additive"
            raise VerifyError(Fault(code=Code.FORWARD_FAILED, message=message, hint=hint)) from error
        for name, value in copies.items():
            if not _is_unchanged(value, arguments[name]):
                self.written[name] = None
        for name, operations in found.items():
            self.lifted.setdefault(name, {}).update(operations)
        self.clock.seconds += time.perf_counter() - start - observing
        self.clock.passes += 1

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Return a context in which torch's generator starts from the seed."""
        if self.seed is None:
            yield
            return
        state = torch.get_rng_state()
        start = torch.default_generator.manual_seed(self.seed).get_state()
        try:
            yield
            self.drew = self.drew or not torch.equal(start, torch.get_rng_state())
        finally:
            torch.set_rng_state(state)

    def record(self, case: int, *, after: Visit | None = None) -> Trace:
        """Run one forward pass and return copies of its activations.

        Args:
            case: the number of the case.
            after: called with each recorded activation; may return another value to continue with.
        """
        activations: Trace = {}

        def visit(point: Point, value: Tensor) -> Tensor | None:
            activations[point] = value.detach().clone(memory_format=torch.contiguous_format)
            return after(point, value) if after else None

        self.run(case, visit)
        return activations

    def keep(self, case: int, *, after: Visit | None = None) -> Activations:
        """Run one forward pass and return its activations, which may be too large for memory."""
        activations = Activations()

        def visit(point: Point, value: Tensor) -> Tensor | None:
            activations[point] = value
            return after(point, value) if after else None

        self.run(case, visit)
        return activations


def _as_taken(value: Tensor) -> Tensor | bool:
    """An argument as a forward takes it: a flag is a bool."""
    return bool(value) if value.dtype == torch.bool and not value.ndim else value


def _is_unchanged(value: Tensor, before: Tensor) -> bool:
    """Return whether a tensor that a forward was given still has its values."""
    return value.shape == before.shape and torch.equal(value.nan_to_num(), before.nan_to_num())


def _described(arguments: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(value.shape)}" for name, value in arguments.items())


def failure_reason(failure: VerifyError) -> str:
    """Why a forward failed, in one line: the exception that it raised, without the list of its arguments."""
    cause = failure.__cause__
    return failure.faults[0].message if cause is None else safe(_exception_line(cause))


def _exception_line(error: BaseException) -> str:
    """The type of an exception and the first line of its message."""
    first, *_ = [*text_of(error).strip().splitlines(), ""]
    return f"{type(error).__name__}: {first}"


Both = Callable[[torch.dtype], tuple[Side, Side]]
"""Makes the reference and the port in a dtype."""
