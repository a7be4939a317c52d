"""Running jobs in several threads; the first failure stops all of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from threading import Event, Lock, Thread
from typing import Generic, TypeVar

from porting.comparing.jobs import one_thread_each
from porting.limits import SMALL, spending

PATIENCE = 0.1
"""Seconds between two reports of the progress."""

Owned = TypeVar("Owned")


Job = Callable[[Owned], object]


class _Lanes(Generic[Owned]):
    """Jobs divided into one lane for each thread, of about equal cost and in their order.

    So neighbours are done by one thread, one after the other, and two threads are seldom in one file: the system lets
    only one of them write to it at a time.  A thread that has nothing left takes from the far end of the fullest part.
    """

    def __init__(self, jobs: Sequence[tuple[int, Job[Owned]]], count: int) -> None:
        self._lock = Lock()
        self._lanes: list[deque[tuple[int, Job[Owned]]]] = [deque() for _ in range(count)]
        self._left = [0] * count
        total, before = sum(cost for cost, _ in jobs), 0
        for cost, job in jobs:
            number = min(count - 1, (2 * before + cost) * count // (2 * total)) if total else 0
            self._lanes[number].append((cost, job))
            self._left[number] += cost
            before += cost

    def take(self, number: int) -> tuple[int, Job[Owned]] | None:
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
    jobs: Iterable[tuple[int, Job[Owned]]],
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
