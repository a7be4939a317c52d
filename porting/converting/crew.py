"""Jobs done by several threads; the first failure stops them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TypeVar

import torch

PATIENCE = 0.1
"""Seconds between two looks at how far the work has come."""

Owned = TypeVar("Owned")


def work(
    jobs: Iterable[tuple[int, Callable[[Owned], None]]],
    owners: Iterable[Callable[[], Owned]],
    look: Callable[[], None],
) -> None:
    """Do all jobs, the most costly first.

    Args:
        jobs: the cost of each, in bytes, and the job, which is given what its thread owns.
        owners: one for each thread; called in it, gives what the thread owns.
        look: called in this thread while the others work.

    Raises:
        BaseException: what the first job that failed raised; jobs that had not begun then are not begun.
    """
    queue: SimpleQueue[Callable[[Owned], None]] = SimpleQueue()
    for _, job in sorted(jobs, key=lambda one: -one[0]):
        queue.put(job)
    stop = Event()
    failures: list[BaseException] = []

    def run(make: Callable[[], Owned]) -> None:
        torch.set_num_threads(1)  # a piece is too small to be shared; the threads are here
        try:
            owned = make()
            while not stop.is_set():
                queue.get_nowait()(owned)
        except Empty:
            return
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            failures.append(error)
            stop.set()

    before = torch.get_num_threads()
    threads = [Thread(target=run, args=(make,), daemon=True) for make in owners]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(PATIENCE)
                look()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        torch.set_num_threads(before)
    if failures:
        raise failures[0]
