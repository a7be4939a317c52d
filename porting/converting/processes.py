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
from typing import Protocol, TypeVar, cast

from porting.errors import Code, Fault, RankError

Value = TypeVar("Value")


@dataclass(frozen=True)
class Failure:
    """What a process that cannot go on sends in place of the value that the others wait for.

    Attributes:
        reason: why, in a line.
    """

    reason: str


class ProcessGroup(Protocol):
    """The processes that share a conversion.

    Attributes:
        rank: the number of this one.
        size: how many there are.
    """

    rank: int
    size: int

    def gather(self, value: Value) -> list[Value]:
        """Exchange a value: wait for all processes, and return the value of each in the order of their ranks."""
        ...  # pragma: no cover


class SingleProcess:
    """A group of this process alone."""

    rank, size = 0, 1

    def gather(self, value: Value) -> list[Value]:
        """Return the only value."""
        return [value]


class DistributedProcesses:
    """The processes of ``torch.distributed``.

    Small Python objects pass between them, by a group of its own on gloo: the default one may be a group of GPUs.
    """

    def __init__(self) -> None:
        import torch.distributed as dist  # noqa: PLC0415  # a heavy import, needed only for several processes

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo")

    def gather(self, value: Value) -> list[Value]:
        """Exchange a value with the other processes.

        Raises:
            RankError: a process has ended, or could not go on; says which, and why.
        """
        import torch.distributed as dist  # noqa: PLC0415  # as above

        found: list[Value | None] = [None] * self.size
        try:
            dist.all_gather_object(found, value, group=self._group)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1][:120]
            message = f"another process of this conversion has ended: {reason}"
            hint = "its own message says why; the same command goes on from here"
            raise RankError(
                Fault(code=Code.RANK_LOST, where=f"rank {self.rank}", message=message, hint=hint)
            ) from error
        _require_all(found, self.rank)
        return cast("list[Value]", found)  # each process has put its value into its place


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
    """Send a failure of this process to the others, which raise it where they wait for this process next."""
    try:
        yield
    except RankError:
        raise  # it came from another process: all know
    except Exception as error:  # any error: the other processes are informed, and it is raised again
        with suppress(RankError):
            group.gather(Failure(f"{error}".partition("\n")[0] or type(error).__name__))
        raise


@contextmanager
def all_or_none(group: ProcessGroup) -> Iterator[None]:
    """Run a step that each process does by itself, and go on only if all of them could."""
    with shared_failures(group):
        yield
    group.gather(None)


def current_group() -> ProcessGroup:
    """The processes of ``torch.distributed``, if it is initialized with several; else this process alone."""
    import torch.distributed as dist  # noqa: PLC0415  # as above

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return DistributedProcesses()
    return SingleProcess()


@contextmanager
def torchrun_group() -> Iterator[ProcessGroup]:
    """The processes that ``torchrun`` describes in the environment, if it does; else this process alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        yield SingleProcess()
        return
    import torch.distributed as dist  # noqa: PLC0415  # as above

    def ended(number: int, frame: object) -> None:
        message = "this process was told to end, as torchrun does when another one has ended"
        hint = "the message of the other one says why; the same command goes on from here"
        raise RankError(Fault(code=Code.RANK_LOST, where=f"rank {os.environ['RANK']}", message=message, hint=hint))

    dist.init_process_group("gloo")
    before = signal.signal(signal.SIGTERM, ended)
    try:
        yield current_group()
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

    Args:
        costs: the cost of each job.
        size: the number of processes.

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
    """Require that all processes are about to do the same.

    Raises:
        RankError: they see different inputs, tables or options.
    """
    values = list(values)
    different = [str(rank) for rank, value in enumerate(values) if value != values[0]]
    if different:
        message = f"rank {', '.join(different)} would convert something else than rank 0"
        hint = "give all of them the same files, table and options, on one shared file system"
        raise RankError(Fault(code=Code.RANK_LOST, message=message, hint=hint))
