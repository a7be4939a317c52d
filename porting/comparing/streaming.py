"""Going through tensors in pieces that fit a processor's cache, on a few threads: what is held at once is fixed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from porting.checkpoint import Checkpoint
from porting.plan.move import Read
from porting.plan.recipe import Recipe
from porting.sharding.filling import compute_box
from porting.sharding.layout import Box
from porting.sharding.ranges import Ranges

PIECE = 1 << 20
"""Bytes of a tensor that are looked at together; longer pieces fall out of the cache."""

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


def rows(checkpoint: Checkpoint) -> Read:
    """Gives a checkpoint's tensors with all elements in a row: views of the mapped file, remembered while in use."""
    known: dict[str, Tensor] = {}

    def read(name: str) -> Tensor:
        if name not in known:
            known[name] = checkpoint.read(name).reshape(-1)
        return known[name]

    return read


def elements(recipe: Recipe, start: int, stop: int, checkpoint: Checkpoint, read: Read) -> Tensor:
    """The elements from ``start`` to ``stop`` of a tensor as it comes about from a checkpoint's.

    Args:
        recipe: how it comes about.
        start, stop: the window, in row-major order.
        checkpoint: the checkpoint.
        read: gives its tensors, from :func:`rows`: used for those that are views of a mapped file.  Of others, such as
            the chunks of a distributed checkpoint, the window alone is read.
    """
    if all(checkpoint.maps(copy.source) for copy in recipe.copies):
        return recipe.window(start, stop, read)
    row = replace(recipe, shape=(recipe.numel,))
    return compute_box(row, Box((start,), (stop - start,), (0,)), recipe.dtype, Ranges(checkpoint))


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
