"""Jobs over tensors in a few threads, in their order, with the time of small ones counted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

from porting.limits import SMALL, spending

SPAN = 1 << 25
"""Bytes of a tensor that are one job of a thread."""

THREADS = 2
"""A disk is read as fast by two threads as by more."""

BATCH = 256
"""Small jobs that a thread gets at once, since handing over one takes longer than doing it."""

Job = TypeVar("Job")
Result = TypeVar("Result")


def spans(numel: int, itemsize: int, length: int = SPAN) -> Iterator[tuple[int, int]]:
    """Cut the elements of a tensor into spans of ``length`` bytes; one empty span if there is no element."""
    step = max(length // itemsize, 1)
    yield from ((start, min(start + step, numel)) for start in range(0, max(numel, 1), step))


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Keep torch from using threads of its own: the pieces are divided among threads."""
    torch = sys.modules.get("torch")  # jobs that only read bytes do not need it
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def map_jobs(
    jobs: Iterable[Job], work: Callable[[Job], Result], nbytes: Callable[[Job], int], *, threads: int = THREADS
) -> Iterator[Result]:
    """Run jobs in a few threads; yields their results in order.

    Small jobs are handed to a thread many at a time, and the time that they take is counted.
    """
    remaining = _batches(jobs, nbytes)

    def done(batch: list[Job]) -> tuple[list[Result], float]:
        begun = time.thread_time()
        results = [work(job) for job in batch]
        return results, time.thread_time() - begun if nbytes(batch[0]) < SMALL else 0.0

    with spending() as budget, one_thread_each(), ThreadPoolExecutor(threads) as pool:
        under_way = [pool.submit(done, batch) for batch in islice(remaining, 2 * threads)]
        try:
            while under_way:
                results, seconds = under_way.pop(0).result()
                under_way += [pool.submit(done, batch) for batch in islice(remaining, 1)]
                budget.spend(seconds)
                yield from results
        finally:
            for future in under_way:
                future.cancel()


def _batches(jobs: Iterable[Job], nbytes: Callable[[Job], int]) -> Iterator[list[Job]]:
    """Batches of neighbouring small jobs, up to :data:`BATCH`; every other job alone."""
    batch: list[Job] = []
    for job in jobs:
        small = nbytes(job) < SMALL
        if batch and (not small or len(batch) == BATCH):
            yield batch
            batch = []
        if small:
            batch.append(job)
        else:
            yield [job]
    if batch:
        yield batch
