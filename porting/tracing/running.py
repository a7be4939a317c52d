"""Running one side of a comparison: seen, timed, and with its failures explained."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from porting.errors import Code, Fault, option
from porting.frames import is_users, signature_of, users_line
from porting.tracing.faults import VerifyError
from porting.tracing.kept_graph import KeptGraph
from porting.tracing.lift import Lifted, lifted
from porting.tracing.trace import Point, Trace, Visit, trace


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
    """

    title: str
    module: nn.Module
    arguments: Sequence[Mapping[str, Tensor]]
    wanted: Sequence[Point]
    clock: Clock = field(default_factory=Clock)
    lifted: Lifted = field(default_factory=dict)

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
        arguments = self.arguments[case]
        places = [value for name, value in arguments.items() if name.isdigit()]
        names = {name: value for name, value in arguments.items() if not name.isdigit()}
        begun = time.perf_counter()
        try:
            exact = any(one.dtype == torch.float64 for one in self.module.parameters())
            nothing: nullcontext[Lifted] = nullcontext({})
            with KeptGraph() if gradients else torch.no_grad(), lifted(self.module) if exact else nothing as found:
                seen = trace(
                    self.module,
                    lambda module: module(*places, **names),
                    self.wanted if wanted is None else wanted,
                    visit,
                    ran,
                )
        except VerifyError:
            raise
        except Exception as error:  # the user's own forward may raise anything
            message = f"{self.title} failed on {_described(arguments)}: {type(error).__name__}: {_first_line(error)}"
            takes = "" if is_users(error) else signature_of(self.module.forward)
            where = f"its forward takes {takes}" if takes else f"at {users_line(error)}"
            hint = f"{where}; [inputs] says which arguments it is given"
            if isinstance(error, IndexError) or "out of bounds" in str(error) or "out of range" in str(error):
                hint += f"; if a row is too long for it, {option('longest')} makes shorter ones"
            elif any("mask" in name for name in arguments):
                hint += " and how a mask: -> bool, -> padding or -> additive"
            raise VerifyError(Fault(code=Code.FORWARD_FAILED, message=message, hint=hint)) from error
        for name, operations in found.items():
            self.lifted.setdefault(name, {}).update(operations)
        self.clock.seconds += time.perf_counter() - begun - seen
        self.clock.passes += 1

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


def _described(arguments: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(value.shape)}" for name, value in arguments.items())


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
