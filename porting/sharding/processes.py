"""Steps of several processes: if a process fails in a step, all of them raise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from porting.converting.processes import gathered, ranks
from porting.errors import Code, Fault, RankError

Value = TypeVar("Value")


class Processes:
    """The processes of the default group of ``torch.distributed``; this process alone where there is no group.

    Args:
        undone: what has not happened if a process fails, such as ``"nothing was loaded"``.
        alone: whether this process works alone, whatever the group.

    Attributes:
        rank, count: the number of this process, and how many there are.
    """

    def __init__(self, where: str, undone: str, *, alone: bool = False) -> None:
        self.where = where
        self.undone = undone
        self.rank, self.count = (0, 1) if alone else ranks()

    def gather(self, value: Value) -> list[Value]:
        """Exchange a value: return that of each process, in the order of their ranks."""
        if self.count == 1:
            return [value]
        message = f"{self.undone}, since another process has ended"
        return gathered(value, None, where=self.where, message=message)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step, which is over when every process has done it."""
        caught: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001  # whatever it is, the others wait for this process
            caught = error
        failures = self.gather("" if caught is None else f"{caught}" or type(caught).__name__)
        if caught is not None:
            raise caught
        faults = []
        for rank, failure in enumerate(failures):
            if failure:
                message = f"{self.undone}, since process {rank} could not go on: {failure.splitlines()[0]}"
                faults.append(Fault(code=Code.RANK_LOST, where=self.where, message=message))
        if faults:
            raise RankError(faults)
