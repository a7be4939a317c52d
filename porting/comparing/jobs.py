"""Jobs over tensors in a few threads, with the time of small ones counted.

:func:`map_jobs` gives results in their order; of :func:`work` the first failure stops all threads.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from threading import Event, Lock, Thread
from typing import Generic, TypeVar

from porting.limits import SMALL, spending

SPAN = 1 << 25
"""Bytes of a tensor that are one job of a thread."""

THREADS = 2
"""A disk is read as fast by two threads as by more."""

BATCH = 256
"""Small jobs that a thread gets at once, since handing over one takes longer than doing it."""

PATIENCE = 0.1
"""Seconds between two reports of the progress."""

Job = TypeVar("Job")
Result = TypeVar("Result")
Owned = TypeVar("Owned")


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


class _Lanes(Generic[Owned]):
    """Jobs divided into one lane for each thread, of about equal cost and in their order.

    So neighbours are done by one thread, one after the other, and two threads are seldom in one file: the system lets
    only one of them write to it at a time.  A thread that has nothing left takes from the far end of the fullest part.
    """

    def __init__(self, jobs: Sequence[tuple[int, Callable[[Owned], object]]], count: int) -> None:
        self._lock = Lock()
        self._lanes: list[deque[tuple[int, Callable[[Owned], object]]]] = [deque() for _ in range(count)]
        self._left = [0] * count
        total, before = sum(cost for cost, _ in jobs), 0
        for cost, job in jobs:
            number = min(count - 1, (2 * before + cost) * count // (2 * total)) if total else 0
            self._lanes[number].append((cost, job))
            self._left[number] += cost
            before += cost

    def take(self, number: int) -> tuple[int, Callable[[Owned], object]] | None:
        """Take the next job of a thread, with its cost; None if there is none left."""
        with self._lock:
            fullest = max(range(len(self._lanes)), key=lambda lane: (self._left[lane], len(self._lanes[lane])))
            lane = number if self._lanes[number] else fullest
            if not self._lanes[lane]:
                return None
            cost, job = self._lanes[lane].popleft() if lane == number else self._lanes[lane].pop()
            self._left[lane] -= cost
            return cost, job


def work(
    jobs: Iterable[tuple[int, Callable[[Owned], object]]],
    owners: Sequence[Callable[[], Owned]],
    look: Callable[[], None] = lambda: None,
    stop: Event | None = None,
) -> None:
    """Run all jobs in several threads, neighbours in their order; whatever ends this, no thread is at work after it.

    Args:
        jobs: the cost of each, in bytes, and the job, which is given what its thread owns.
        owners: one for each thread; called in it, gives what the thread owns.
        look: called in this thread while the others work.
        stop: set when jobs need not be finished, so that a long one can end early.
    """
    lanes: _Lanes[Owned] = _Lanes(list(jobs), len(owners))
    stop = stop if stop is not None else Event()
    failures: list[BaseException] = []
    seconds = [0.0] * len(owners)  # of processor time that small jobs took, by thread
    counted = 0.0

    def run(number: int, make: Callable[[], Owned]) -> None:
        try:
            owned = make()
            while not stop.is_set() and (taken := lanes.take(number)) is not None:
                cost, job = taken
                begun = time.thread_time()
                job(owned)
                if cost < SMALL:
                    seconds[number] += time.thread_time() - begun
        except BaseException as error:  # noqa: BLE001  # raised again in the thread that called work()
            failures.append(error)
            stop.set()

    threads = [Thread(target=run, args=arguments, daemon=True) for arguments in enumerate(owners)]
    with one_thread_each():
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(PATIENCE)
                    look()
                    with spending() as budget:
                        budget.spend(sum(seconds) - counted)
                    counted = sum(seconds)
        finally:
            _end(threads, stop)
    if failures:
        raise failures[0]


def _end(threads: Sequence[Thread], stop: Event) -> None:
    """Wait for threads, also when another signal comes.

    They write to files that are closed next, and the descriptor of a closed file may soon be that of another one.
    """
    interruptions: list[BaseException] = []
    while not stop.is_set() or any(thread.is_alive() for thread in threads):  # one that never started is not
        try:
            stop.set()
            for thread in threads:
                if thread.is_alive():
                    thread.join()
        except BaseException as error:  # noqa: BLE001  # raised again below
            interruptions.append(error)
    if interruptions:
        raise interruptions[0]
