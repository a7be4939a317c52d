"""Steps that all processes take or none: what one of them cannot do, none of them goes on from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from porting.checkpoint.errors import CheckpointError
from porting.errors import Code, Fault, PortingError

News = TypeVar("News")


class Crew:
    """The processes of the default group; one where there is none.

    Attributes:
        rank, count: which process this is, and of how many.
        path: what they work on, for messages.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        alone = not dist.is_initialized()
        self.rank, self.count = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())

    def gather(self, news: News) -> list[News]:
        """What each process says."""
        if self.count == 1:
            return [news]
        heard: list[News] = [news] * self.count
        dist.all_gather_object(heard, news)
        return heard

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step; it is over when every process has done it.

        Raises:
            PortingError: this process could not do it.
            CheckpointError: another one could not.
        """
        caught: Exception | None = None
        try:
            yield
        except (PortingError, OSError) as error:
            caught = error
        said = self.gather("" if caught is None else f"{caught}")
        if caught is not None:
            raise caught
        for rank, one in enumerate(said):
            if one:
                line = one.splitlines()[0]
                message = f"nothing was written, since process {rank} could not go on: {line}"
                raise CheckpointError(Fault(code=Code.WRITE_FAILED, where=str(self.path), message=message))
