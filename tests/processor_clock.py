"""Limits on time in tests: a machine that is slow, or has other work, decides none."""

from __future__ import annotations

import importlib
import time
from types import SimpleNamespace

import pytest

from porting.suggesting.subjects import guarded_run

SEARCHING = (
    "porting.causes.cause_matching",
    "porting.causes.passing_case",
    "porting.causes.repairs",
    "porting.verification.cause_search",
    "porting.verification.experiments",
    "porting.verification.fixes",
)
"""The modules that look for causes, each for so many seconds of the processor's time."""

SLOWER = 2.0
"""A machine that is so many times slower than a developer's names the same causes in a test, later."""

PATIENCE = 20.0
"""By the clock, a search may take so many times the processor's time that is its limit."""


def install(patch: pytest.MonkeyPatch) -> None:
    """Have the modules go by these limits."""
    slow = SimpleNamespace(thread_time=lambda: time.thread_time() / SLOWER)
    for name in SEARCHING:
        patch.setattr(importlib.import_module(name), "time", slow)
    patch.setattr(guarded_run, "PATIENCE", PATIENCE)
