"""Running one side of a comparison: seen, timed, with torch as nobody has set it, and with its failures explained."""

from __future__ import annotations

import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor, nn

from porting.errors import Code, Fault, Message, Option, VerifyError
from porting.frames import is_users, signature_of, users_line
from porting.printable import safe
from porting.tracing.activations import Activations
from porting.tracing.conditions import Conditions
from porting.tracing.dropout import SameDropout
from porting.tracing.float64 import LoweredOperations, forced_float64
from porting.tracing.torch_modes import KeptGraph, eagerly
from porting.tracing.trace import Point, SeeingError, Trace, Visit, leaves, trace

SMALL = 1 << 23
"""Parameters: the passes of a smaller model are not faster with two threads than with one."""


@contextmanager
def undisturbed(seed: int) -> Iterator[None]:
    """Whatever the caller has switched on or off; torch's random state and threads are as before afterwards."""
    threads = torch.get_num_threads()
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        torch.manual_seed(seed)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def limit_threads(elements: int) -> None:
    """Use one thread for a small model, until :func:`undisturbed` ends.

    Threads that share such small operations mostly wait for one another, on busy cores for ten times as long.

    Args:
        elements: the number of parameters.
    """
    if elements < SMALL:
        torch.set_num_threads(1)


def versions() -> dict[str, str]:
    """Of Python and of the packages that take part."""
    packages = ("porting", "torch", "transformers", "safetensors")
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its source, on the path and not installed
        return "not installed"


def peak() -> int:
    """The largest resident size of the process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass
class Clock:
    """How long the forward passes took, in seconds, without what was done to see into them; and how many there were."""

    seconds: float = 0.0
    passes: int = 0


@dataclass(kw_only=True)
class Side:
    """One of the two models, ready to be run on every case.

    Attributes:
        title: what it is called in messages.
        module: the model.
        arguments: for each case its forward arguments by name; a name that is a number is a position.
        wanted: the points to see.
        clock: is told of every pass.
        lifted: which modules asked for less than float64 in a run in float64, where they get float64.
        written: the arguments that a pass wrote to; each pass is given copies.
        draws: replaces random numbers, for a model in training mode; None in eval mode.
        autocast: the dtype that torch.autocast casts to around each pass; None without autocast.
        conditions: is told of the conditions on tensors that each pass meets; None to leave them alone.
        renames: :meth:`run` shows what is returned under other names.
        seed: torch's generator is seeded with it before each pass, so that two models that draw the same random numbers
            in the same order get the same ones; afterwards the generator is as before.  None to leave it alone.
        drew: whether a pass with a seed drew random numbers from it.
        lifting: in float64, casts to less are taken out; False where both sides are known to have none, since watching
            for one costs several times the pass of a small model.
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
        """One forward pass.

        Args:
            case: the number of the case.
            visit, ran: as in :func:`porting.tracing.trace.trace`.
            wanted: the points to see, if not all.
            gradients: let values have their gradient graph.
            isolated: the visitor puts the exact values in place; a recording shows the run where that was done.

        Raises:
            VerifyError: the model fails.
        """

        def work(call: Callable[[nn.Module], object]) -> float:
            with KeptGraph() if gradients else torch.no_grad():
                points = self.wanted if wanted is None else wanted
                return trace(self.module, call, points, visit, ran, spelled_out=self.spelled_out)

        self._guarded(case, work)

    def outputs(
        self,
        case: int,
        *,
        around: Callable[[], AbstractContextManager[object]] = torch.no_grad,
    ) -> object:
        """What one forward pass returns, with nothing in the way that looks into it.

        Args:
            case: the number of the case.
            around: the mode of autograd that it runs in: ``torch.no_grad``, ``torch.enable_grad`` ...

        Raises:
            VerifyError: the model fails.
        """
        returned: list[object] = []

        def work(call: Callable[[nn.Module], object]) -> float:
            with around():
                returned.append(call(self.module))
            return 0.0

        self._guarded(case, work)
        return returned[0]

    def returned(self, case: int) -> dict[str, Tensor]:
        """The tensors that a pass returns, by the names that :func:`porting.tracing.trace.leaves` gives them.

        Raises:
            VerifyError: the model fails.
        """
        return leaves(self.outputs(case))

    @property
    def places(self) -> list[Point]:
        """Every point that can be seen besides what the model returns: its modules' outputs."""
        return [path for path, _ in self.module.named_modules() if path]

    def _guarded(self, case: int, work: Callable[[Callable[[nn.Module], object]], float]) -> None:
        """Do the work of a pass on copies of the inputs; explain its failure, and note which inputs it wrote to."""
        with self._seeded():  # before the first operation: who watches the pass takes what changes later for drawn
            self._explained(case, work)

    def _explained(self, case: int, work: Callable[[Callable[[nn.Module], object]], float]) -> None:
        arguments = self.arguments[case]
        given = {name: value.clone() for name, value in arguments.items()}
        places = [value for name, value in given.items() if name.isdigit()]
        names = {name: value for name, value in given.items() if not name.isdigit()}
        begun = time.perf_counter()
        try:
            exact = self.lifting and any(parameter.dtype == torch.float64 for parameter in self.module.parameters())
            nothing: nullcontext[LoweredOperations] = nullcontext({})
            drawn = self.draws.again() if self.draws is not None else nullcontext()
            watched = self.conditions or nullcontext()
            casting = torch.autocast("cpu", dtype=self.autocast, enabled=self.autocast is not None)
            lifted = forced_float64(self.module) if exact else nothing
            with watched, drawn, casting, eagerly(), lifted as found:
                seen = work(lambda module: module(*places, **names))
        except VerifyError:
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
            if isinstance(error, IndexError) or "out of bounds" in str(error) or "out of range" in str(error):
                hint += Message("; if a row is too long for it, ", Option("longest"), " makes shorter ones")
            elif any("mask" in name for name in arguments):
                hint += " and how a mask: -> bool, -> padding or -> additive"
            raise VerifyError(Fault(code=Code.FORWARD_FAILED, message=message, hint=hint)) from error
        for name, value in given.items():
            if not _unchanged(value, arguments[name]):
                self.written[name] = None
        for name, operations in found.items():
            self.lifted.setdefault(name, {}).update(operations)
        self.clock.seconds += time.perf_counter() - begun - seen
        self.clock.passes += 1

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Within it torch's generator starts from the seed."""
        if self.seed is None:
            yield
            return
        before = torch.get_rng_state()
        begun = torch.default_generator.manual_seed(self.seed).get_state()
        try:
            yield
            self.drew = self.drew or not torch.equal(begun, torch.get_rng_state())
        finally:
            torch.set_rng_state(before)

    def record(self, case: int, *, ran: Callable[[str], None] | None = None, after: Visit | None = None) -> Trace:
        """One forward pass; copies of all its activations, which the model cannot change afterwards.

        Args:
            case: the number of the case.
            ran: as in :func:`porting.tracing.trace.trace`.
            after: is given each activation when it has been recorded, and may return another to go on with.
        """
        found: Trace = {}

        def visit(point: Point, value: Tensor) -> Tensor | None:
            found[point] = value.detach().clone(memory_format=torch.contiguous_format)
            return after(point, value) if after else None

        self.run(case, visit, ran=ran)
        return found

    def keep(self, case: int, *, after: Visit | None = None) -> Activations:
        """As :meth:`record`, for activations that may be too large for memory."""
        found = Activations()

        def visit(point: Point, value: Tensor) -> Tensor | None:
            found[point] = value
            return after(point, value) if after else None

        self.run(case, visit)
        return found


def _unchanged(value: Tensor, before: Tensor) -> bool:
    """Whether a tensor that a forward was given still holds what it did."""
    return value.shape == before.shape and torch.equal(value.nan_to_num(), before.nan_to_num())


def _described(arguments: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(value.shape)}" for name, value in arguments.items())


def failure_reason(failure: VerifyError) -> str:
    """Why a forward failed, in one line: the exception that it raised, without the list of its arguments."""
    cause = failure.__cause__
    return failure.faults[0].message if cause is None else safe(_exception_line(cause))


def _exception_line(error: BaseException) -> str:
    """The type of an exception and the first line of its message."""
    first, *_ = [*str(error).strip().splitlines(), ""]
    return f"{type(error).__name__}: {first}"
