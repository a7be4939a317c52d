"""Runs of the user's tests: they are imported once, and run in a copy of that process for each mistake.

Importing torch takes longer than most tests.  The process that has collected the tests waits for requests, forks for
each, and tells how the copy ended.  The copy is a process group of its own, and gone when its run is over.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self, TextIO

from porting.mutating.messages import MutationRequest

TAIL = 20_000
"""So many bytes of what a run has printed are read: its end."""


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """How a run ended.

    Attributes:
        code: its exit code; None when it was stopped for its time.
        seconds: that it took.
        said: the end of what it printed.
    """

    code: int | None
    seconds: float
    said: str


class SuiteRun:
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

    def ended(self, timeout: float | None = None) -> SuiteResult:
        """Wait for it; after so many seconds it is stopped, and all that it has started with it."""
        try:
            code: int | None = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # also after Ctrl-C, which a group of its own does not get
            self.stop()
        return SuiteResult(code=code, seconds=time.perf_counter() - self._begun, said=self.said)

    def stop(self) -> None:
        """End what is left of its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


PAUSE = 0.01
"""Seconds between two looks at whether a copy has ended."""


class ForkServer:
    """The end in the process that has the tests.

    Args:
        path: of the socket.
    """

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._lines = self._socket.makefile("rw", encoding="utf-8")

    def requests(self) -> Iterator[MutationRequest]:
        """In each copy the request that it was made for; in the process itself none."""
        for line in self._lines:
            asked = json.loads(line)
            if "imports" in asked:
                _import(asked["imports"])
                continue
            begun = time.perf_counter()
            child = os.fork()
            if child == 0:
                os.setsid()
                self._socket.close()
                yield MutationRequest.of(asked["request"])
                return
            code = _wait(child, asked["timeout"])
            self._lines.write(json.dumps({"code": code, "seconds": time.perf_counter() - begun}) + "\n")
            self._lines.flush()


def _import(names: Sequence[str]) -> None:
    """What the tests import while they run, so that no copy has to."""
    for name in names:
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)


def _wait(child: int, timeout: float | None) -> int | None:
    """The exit code of a copy; None when it was stopped for its time. What it has started is ended with it."""
    until = None if timeout is None else time.monotonic() + timeout
    late = False
    while not late and os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        late = until is not None and time.monotonic() > until
        time.sleep(PAUSE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return None if late else os.waitstatus_to_exitcode(status)


class ForkClient:
    """The end of who sends the requests.

    Args:
        running: the process that has the tests.
        listening: the socket that it connects to.
    """

    def __init__(self, running: SuiteRun, listening: socket.socket) -> None:
        self._running = running
        self._lines: TextIO | None = None
        listening.settimeout(0.1)
        while self._lines is None and running.alive:
            with contextlib.suppress(TimeoutError), listening.accept()[0] as connection:
                self._lines = connection.makefile("rw", encoding="utf-8")

    def run(self, request: MutationRequest, timeout: float | None) -> SuiteResult:
        """A run in a copy; what became of the process itself where it never got so far."""
        if self._lines is None:
            return self._running.ended()
        self._lines.write(json.dumps({"request": asdict(request), "timeout": timeout}) + "\n")
        self._lines.flush()
        answer = self._lines.readline()
        return SuiteResult(**json.loads(answer), said=self._running.said) if answer else self._running.ended()

    def close(self) -> None:
        """Send no more requests: the process ends."""
        if self._lines is not None:
            with contextlib.suppress(BrokenPipeError):
                self._lines.close()

    def prepare(self, imports: Sequence[str]) -> None:
        """Have modules imported before further copies are made."""
        if self._lines is not None and imports:
            self._lines.write(json.dumps({"imports": list(imports)}) + "\n")
            self._lines.flush()


def listen(folder: Path) -> socket.socket:
    """A socket in a folder."""
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(folder / "request"))
    made.listen(1)
    return made
