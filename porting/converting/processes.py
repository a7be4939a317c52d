"""Processes that share a conversion: they use one file system, and exchange digests and nothing larger.

Tensors never pass between them.  ``torchrun`` starts them and ends all when one dies; what they wrote until then stays,
and the same command goes on from there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from porting.errors import Code, Fault, PortingError, RankError
from porting.printable import told

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup as ProcessGroupOfTorch

Value = TypeVar("Value")


@dataclass(frozen=True)
class Failure:
    """The message of a process that cannot go on, sent in place of the value that the others wait for.

    Attributes:
        reason: why, in a line.
    """

    reason: str


class ProcessGroup:
    """The processes of ``torch.distributed`` that share a conversion; this one alone where there are not several.

    Small Python objects pass between them, by a group of its own on gloo: the default one may be a group of GPUs.

    Args:
        alone: whether this process works alone, whatever the group.

    Attributes:
        size: how many there are.
        informed: whether the others were told that this process failed.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self.informed = False
        self.rank, self.size = (0, 1) if alone else ranks()
        if self.size > 1:
            import torch.distributed as dist  # noqa: PLC0415  # a heavy import, needed only for several processes

            self._group = dist.new_group(backend="gloo")

    def gather(self, value: Value) -> list[Value]:
        """Exchange a value: wait for all processes, and return the value of each in the order of their ranks."""
        if self.size == 1:
            return [value]
        message, hint = "another process of this conversion has ended", "; the same command goes on from here"
        found = gathered(value, self._group, where=f"rank {self.rank}", message=message, hint=hint)
        _require_all(found, self.rank)
        return found


def ranks() -> tuple[int, int]:
    """The number of this process in the default group of ``torch.distributed``, and how many there are."""
    import torch.distributed as dist  # noqa: PLC0415  # as above

    initialized = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if initialized else (0, 1)


def gathered(
    value: Value, group: ProcessGroupOfTorch | None, *, where: str, message: str, hint: str = ""
) -> list[Value]:
    """The value of each process of a group, the default one if None."""
    import torch.distributed as dist  # noqa: PLC0415  # as above

    found = [value] * dist.get_world_size(group)
    try:
        dist.all_gather_object(found, value, group=group)
    except RuntimeError as error:
        message = f"{message}: {str(error).strip().splitlines()[-1][:120]}"
        hint = f"its own message says why{hint}"
        raise RankError(Fault(code=Code.RANK_LOST, where=where, message=message, hint=hint)) from error
    return found


def _require_all(found: Sequence[object], own_rank: int) -> None:
    failed = {rank: answer for rank, answer in enumerate(found) if isinstance(answer, Failure) and rank != own_rank}
    if failed and not isinstance(found[own_rank], Failure):
        raise RankError(
            Fault(
                code=Code.RANK_LOST,
                where=f"rank {rank}",
                message=f"it could not go on, so that no process did: {failure.reason}",
                hint="mend that; the same command begins anew or goes on from here",
            )
            for rank, failure in failed.items()
        )


@contextmanager
def shared_failures(group: ProcessGroup) -> Iterator[None]:
    """Send a failure of this process to the others, which raise it where they wait for this process next.

    When this returns all of them wait or have ended, so that nothing that they use may be removed before.  Of blocks in
    each other the innermost one sends it.
    """
    try:
        yield
    except RankError:
        raise  # it came from another process: all know
    except Exception as error:  # any error: the other processes are informed, and it is raised again
        if group.informed:
            raise
        group.informed = True
        with suppress(RankError):
            group.gather(Failure(str(error).partition("\n")[0] if isinstance(error, PortingError) else told(error)))
        raise


@contextmanager
def all_or_none(group: ProcessGroup) -> Iterator[None]:
    """Run a step that each process does by itself, and go on only if all of them could."""
    with shared_failures(group):
        yield
    group.gather(None)


@contextmanager
def torchrun_group() -> Iterator[ProcessGroup]:
    """The processes that ``torchrun`` describes in the environment, if it does; else this process alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        yield ProcessGroup(alone=True)
        return
    import torch.distributed as dist  # noqa: PLC0415  # as above

    def ended(number: int, frame: object) -> None:
        message = "this process got a signal to end, which torchrun sends when another process has ended"
        hint = "the message of the other one says why; the same command goes on from here"
        raise RankError(Fault(code=Code.RANK_LOST, where=where, message=message, hint=hint))

    where = f"rank {os.environ['RANK']}"
    unset = "start all of them with torchrun; for this process alone, run `unset WORLD_SIZE RANK`"
    if int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"]):
        message = f"RANK is {os.environ['RANK']} and WORLD_SIZE {os.environ['WORLD_SIZE']}; ranks are counted from 0"
        raise RankError(Fault(code=Code.RANK_LOST, where=where, message=message, hint=unset))
    try:
        dist.init_process_group("gloo")
    except (OSError, RuntimeError, ValueError) as error:
        message = f"torch.distributed does not find the other processes: {told(error)}"
        raise RankError(Fault(code=Code.RANK_LOST, where=where, message=message, hint=unset)) from error
    before = signal.signal(signal.SIGTERM, ended)
    try:
        yield ProcessGroup()
    except BaseException:
        # The reason is about to be printed.  torchrun kills half a minute later what does not end by itself.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    else:
        signal.signal(signal.SIGTERM, before)
    finally:
        dist.destroy_process_group()


def shares(costs: Sequence[int], size: int) -> list[list[int]]:
    """Divide jobs among processes by cost: the largest first, each to the process with the least work.

    Returns:
        For each process the numbers of its jobs.

    >>> shares([5, 1, 4, 3, 3], 2)
    [[0, 4], [2, 3, 1]]
    """
    found: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for job in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        least = loads.index(min(loads))
        found[least].append(job)
        loads[least] += costs[job]
    return found


def same_everywhere(values: Iterable[object]) -> None:
    """Require that all processes are about to do the same."""
    values = list(values)
    different = [str(rank) for rank, value in enumerate(values) if value != values[0]]
    if different:
        message = f"rank {', '.join(different)} would convert something else than rank 0"
        hint = "give all of them the same files, table and options, on one shared file system"
        raise RankError(Fault(code=Code.RANK_LOST, message=message, hint=hint))


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
