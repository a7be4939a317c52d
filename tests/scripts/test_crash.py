"""What the script that kills conversions takes for a fault of theirs, and what not."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from typing import Any

import pytest

from porting.atomic import publish as real
from scripts.crash import Tally, crash

DISTURBED = 5
"""Which conversion is killed: one undisturbed and three timed ones come before."""


def test_a_kill_behind_the_rename_leaves_a_folder_that_the_next_attempt_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The busier the machine, the more often: the directory is there, and its maker is killed while it tidies up."""
    published = tmp_path / "published"

    def publish(*args: Any, **options: Any) -> None:  # whatever the real one takes
        real(*args, **options)
        with published.open("ab") as file:
            file.write(b".")
        if published.stat().st_size == DISTURBED:
            os.kill(os.getpid(), signal.SIGKILL)

    def sleep(seconds: float) -> None:
        while published.stat().st_size < DISTURBED:
            select.select([], [], [], 0.01)

    monkeypatch.setattr("porting.converting.conversion.publish", publish)
    monkeypatch.setattr("time.sleep", sleep)
    (tmp_path / "work").mkdir()
    assert crash(tmp_path / "work", kills=1, seed=0) == Tally(killed=1, finished=2, interrupted=1)
    assert published.stat().st_size == DISTURBED + 1
