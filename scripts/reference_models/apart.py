"""Work on one model at a time, each in a process of its own: its memory is given back, and its end ends no other."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import TypeVar

import transformers.models.bert.modeling_bert  # noqa: F401  # what all models share is imported once, before processes part

from scripts.reference_models.proving import SECONDS

Result = TypeVar("Result")
Job = tuple[str, str]


def apart(jobs: Iterable[Job], run: Callable[[str, str], Result]) -> Iterator[tuple[Job, Result | None, str, float]]:
    """Do each job in a process of its own, one after the other.

    Args:
        jobs: the arguments of ``run``.
        run: what is done; its result is sent back by pickling.

    Yields:
        The job, its result (None where the process ended without one), how it ended, and the seconds that it took.
    """
    context = multiprocessing.get_context("fork")  # torch and transformers are imported once
    for job in jobs:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_send, args=(theirs, run, job), daemon=True)
        begun = time.monotonic()
        process.start()
        theirs.close()
        result: Result | None = None
        if ours.poll(10 * SECONDS):
            try:
                result = ours.recv()
            except EOFError:
                result = None
        process.kill()
        process.join()
        yield job, result, f"the process ended ({process.exitcode})", round(time.monotonic() - begun, 1)


def _send(pipe: Connection, run: Callable[[str, str], object], job: Job) -> None:
    pipe.send(run(*job))
