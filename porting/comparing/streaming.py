"""Going through tensors in pieces that fit a processor's cache, on a few threads: what is held at once is fixed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from threading import local
from typing import TypeVar

import torch
from torch import Tensor

from porting.checkpoint import Checkpoint
from porting.plan.clipping import window
from porting.plan.copies import Copy
from porting.plan.move import Window, compute
from porting.plan.recipe import Recipe
from porting.staging import Staging, bytes_of
from porting.stored import Stored, stored

PIECE = 1 << 20
"""Bytes of a tensor that are looked at together; longer pieces fall out of the cache."""

TURNED = 1 << 23
"""Bytes of a window of a tensor that is transposed: longer ones read longer runs of its source, and hold more."""

KNOWN = 1 << 12
"""Moves of which is remembered where their sources lie."""

SPAN = 1 << 25
"""Bytes of a tensor that one thread goes through before it takes the next."""

THREADS = 2
"""A disk is read as fast by two threads as by more."""

Job = TypeVar("Job")
Result = TypeVar("Result")


def spans(numel: int, itemsize: int, length: int = SPAN) -> Iterator[tuple[int, int]]:
    """The elements of a tensor, cut into spans of ``length`` bytes; one empty span where there is no element."""
    step = max(length // itemsize, 1)
    yield from ((start, min(start + step, numel)) for start in range(0, max(numel, 1), step))


class Reader:
    """Reads windows of a checkpoint's tensors into memory of its own, each over the one before; for one thread.

    Args:
        checkpoint: the checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._staging = Staging(PIECE)
        self._memory = torch.empty(TURNED, dtype=torch.uint8)
        self._stored: dict[Copy, tuple[Stored, ...]] = {}

    def length(self, recipe: Recipe) -> int:
        """Bytes of a window: of a tensor that is turned so many that its source is read in runs of some length."""
        moves = [one.copy for copy in recipe.copies for one in self._moves(copy)]
        return PIECE if all(copy.source_strides[-1:] in ((), (1,)) for copy in moves) else TURNED

    def window(self, recipe: Recipe, start: int, stop: int) -> Tensor:
        """The elements from ``start`` to ``stop`` of a tensor as it comes about from the checkpoint's.

        Args:
            recipe: how it comes about.
            start, stop: the window, no longer than :meth:`length`.

        Raises:
            CheckpointError: they cannot be read; a file that changed since it was opened is not.
        """
        moves = [one for copy in recipe.copies for one in self._moves(copy)]
        found = self._run(recipe, moves, start, stop)
        if found is None:
            found = self._computed(recipe, start, stop)
        for one in moves:
            one.file.require_unchanged()
        return found

    def _run(self, recipe: Recipe, moves: Sequence[Stored], start: int, stop: int) -> Tensor | None:
        """A window that is one run of a file, read straight into its place; None when it is not."""
        dtype = recipe.dtype
        plain = len(moves) == 1 and not recipe.arithmetic and dtype != torch.bool
        if not plain or self._checkpoint.tensors[moves[0].copy.source].dtype != dtype:
            return None
        parts = list(window(moves[0].copy, start, stop))
        if len(parts) != 1 or not parts[0].contiguous or parts[0].numel != stop - start:
            return None
        found = self._memory[: (stop - start) * dtype.itemsize].view(dtype)
        at = moves[0].extent.start + parts[0].source_offset * dtype.itemsize
        moves[0].file.read_into(bytes_of(found), at)
        return found

    def _computed(self, recipe: Recipe, start: int, stop: int) -> Tensor:
        """A window whose elements are sorted out in this memory; what is computed in float64 takes more beside it."""
        rooms = [self._memory]

        def take(count: int, dtype: torch.dtype) -> Tensor:
            nbytes = count * dtype.itemsize
            room = rooms.pop() if rooms else torch.empty(nbytes, dtype=torch.uint8)
            return room[:nbytes].view(dtype)

        read = partial(self._read, start=start, stop=stop)
        return compute(recipe, Window.of_row(start, stop), read, take=take)

    def _read(self, copy: Copy, start: int, stop: int) -> Iterator[tuple[Tensor, Copy]]:
        dtype = self._checkpoint.tensors[copy.source].dtype
        for one in self._moves(copy):
            yield from self._staging.read(one, dtype, start, stop)

    def _moves(self, copy: Copy) -> tuple[Stored, ...]:
        if copy not in self._stored:
            if len(self._stored) >= KNOWN:
                self._stored.clear()
            self._stored[copy] = tuple(stored(copy, self._checkpoint))
        return self._stored[copy]


class Readers(local):
    """Readers of which each thread has its own.

    Args:
        checkpoint: what they read.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.mine = Reader(checkpoint)


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Keep torch from splitting the work on a piece: the pieces themselves are shared out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def each(jobs: Iterable[Job], work: Callable[[Job], Result], *, threads: int = THREADS) -> Iterator[Result]:
    """The results of the jobs, in their order; a few of them are under way at a time.

    Args:
        jobs: what is to be done; taken one by one.
        work: does one.
        threads: how many are done at a time.
    """
    remaining = iter(jobs)
    with one_thread_each(), ThreadPoolExecutor(threads) as pool:
        under_way = [pool.submit(work, job) for job in islice(remaining, 2 * threads)]
        try:
            while under_way:
                yield under_way.pop(0).result()
                under_way += [pool.submit(work, job) for job in islice(remaining, 1)]
        finally:
            for one in under_way:
                one.cancel()


def nbytes(checkpoint: Checkpoint, names: Sequence[str]) -> int:
    """The bytes of some of a checkpoint's tensors."""
    return sum(checkpoint.tensors[name].nbytes for name in names)
