"""The clock that limits on time go by in tests: what this process computed, whatever else the machine does."""

from __future__ import annotations

import importlib
import time
from types import SimpleNamespace

import pytest

LIMITED = (
    "porting.suggesting.pipeline",
    "porting.suggesting.search.search",
    "porting.suggesting.search.search_state",
    "porting.suggesting.subjects.guarded_run",
    "porting.verification.accepted_inputs",
)
"""The modules that stop after so many seconds of the day.  What goes by the processor's time already is not here."""


SEARCHING = (
    "porting.causes.cause_matching",
    "porting.causes.passing_case",
    "porting.causes.repairs",
    "porting.verification.cause_search",
    "porting.verification.fixes",
)
"""The modules that look for causes, each for so many seconds of the processor's time."""

SLOWER = 2.0
"""A machine that is so many times slower than a developer's names the same causes in a test, later."""


class Clock:
    """Seconds of processor time; a test may set it ahead."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        """What :func:`time.monotonic` is replaced with."""
        return time.process_time() + self.ahead


clock = Clock()


def install(patch: pytest.MonkeyPatch) -> None:
    """Have the modules go by this clock."""
    stand_in = SimpleNamespace(monotonic=clock.monotonic)
    slow = SimpleNamespace(thread_time=lambda: time.thread_time() / SLOWER)
    for names, one in ((LIMITED, stand_in), (SEARCHING, slow)):
        for name in names:
            patch.setattr(importlib.import_module(name), "time", one)
