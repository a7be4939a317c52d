"""One run of the user's tests: a process group of its own, which is gone when the run is over, however it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

TAIL = 20_000
"""So many bytes of what a run has printed are read: its end."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended.

    Attributes:
        code: its exit code; None when it was stopped for its time.
        seconds: that it took.
        said: the end of what it printed.
    """

    code: int | None
    seconds: float
    said: str


class Running:
    """A command that runs, and what it has printed.

    Args:
        words: the command.
        environment: its environment.
        printed: the file that keeps what it prints: a pipe would fill, or be held open by what it started.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], printed: Path) -> None:
        self._begun = time.perf_counter()
        self._printed = printed
        with printed.open("wb") as file:
            self._process = subprocess.Popen(  # noqa: S603  # pytest, with what the user typed
                list(words),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    @property
    def said(self) -> str:
        """The end of what it has printed."""
        with self._printed.open("rb") as file:
            file.seek(max(0, self._printed.stat().st_size - TAIL))
            return file.read().decode("utf-8", "replace")

    def ended(self, timeout: float | None = None) -> Ended:
        """Wait for it; after so many seconds it is stopped, and all that it has started with it."""
        try:
            code: int | None = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # also after Ctrl-C, which a group of its own does not get
            self.stop()
        return Ended(code=code, seconds=time.perf_counter() - self._begun, said=self.said)

    def stop(self) -> None:
        """End what is left of its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
