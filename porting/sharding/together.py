"""Steps that all processes take or none: what one of them cannot do, none of them goes on from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from porting.errors import Code, Fault, PortingError

News = TypeVar("News")


class RankError(PortingError):
    """Another process could not do its part."""


class Crew:
    """The processes of the default group; one where there is none.

    Attributes:
        rank, count: which process this is, and of how many.
        where: what they work on, for messages.
        undone: what has not happened when one of them could not go on.
    """

    def __init__(self, where: str, undone: str, *, alone: bool = False) -> None:
        self.where = where
        self.undone = undone
        alone = alone or not dist.is_available() or not dist.is_initialized()
        self.rank, self.count = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())

    def gather(self, news: News) -> list[News]:
        """What each process says.

        Raises:
            RankError: one of them has ended.
        """
        if self.count == 1:
            return [news]
        gathered: list[News] = [news] * self.count
        try:
            dist.all_gather_object(gathered, news)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1][:120]
            message = f"{self.undone}, since another process has ended: {reason}"
            hint = "its own message says why"
            raise RankError(Fault(code=Code.RANK_LOST, where=self.where, message=message, hint=hint)) from error
        return gathered

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step; it is over when every process has done it.

        Raises:
            Exception: this process could not do it.
            RankError: another one could not; says which, and why.
        """
        caught: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001  # whatever it is, the others wait to hear of it
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
