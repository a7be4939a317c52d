"""Running the user's tests: they are imported once, and run in a fork of that process for each mistake.

Importing torch takes longer than most tests. The process that has collected the tests waits for requests, forks for
each one, and answers how the child ended. Each child is a process group of its own, which is killed when its run is
over.
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
"""Number of bytes that are read from the end of a run's output."""


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """The result of a run."""

    code: int | None
    seconds: float
    output: str


class SuiteRun:
    """A running command and its output.

    Args:
        printed: the file for its output; a pipe would fill up, or be kept open by processes that it started.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], printed: Path) -> None:
        self._start = time.perf_counter()
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
        """Whether it is still running."""
        return self._process.poll() is None

    @property
    def output(self) -> str:
        """The end of its output so far."""
        with self._printed.open("rb") as file:
            file.seek(max(0, self._printed.stat().st_size - TAIL))
            return file.read().decode("utf-8", "replace")

    def ended(self, timeout: float | None = None) -> SuiteResult:
        """Wait for its end; after ``timeout`` seconds it is killed with all processes that it has started."""
        try:
            code: int | None = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # also after Ctrl-C, which another process group does not receive
            self.stop()
        return SuiteResult(code=code, seconds=time.perf_counter() - self._start, output=self.output)

    def stop(self) -> None:
        """Kill what is left of its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


PAUSE = 0.01
"""Seconds between two checks whether a child has ended."""


class ForkServer:
    """Receives requests in the process that has imported the tests."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._lines = self._socket.makefile("rw", encoding="utf-8")

    def requests(self) -> Iterator[MutationRequest]:
        """Yield, in each child, the request that it was forked for; nothing in the process itself."""
        for line in self._lines:
            message = json.loads(line)
            if "imports" in message:
                _import(message["imports"])
                continue
            start = time.perf_counter()
            child = os.fork()
            if child == 0:
                os.setsid()
                self._socket.close()
                yield MutationRequest.of(message["request"])
                return
            code = _wait(child, message["timeout"])
            self._lines.write(json.dumps({"code": code, "seconds": time.perf_counter() - start}) + "\n")
            self._lines.flush()


def _import(names: Sequence[str]) -> None:
    """Import what the tests import while they run, so that no child has to."""
    for name in names:
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)


def _wait(child: int, timeout: float | None) -> int | None:
    """Return the exit code of a child, None after a timeout; processes that it has started are killed."""
    deadline = None if timeout is None else time.monotonic() + timeout
    timed_out = False
    while not timed_out and os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        timed_out = deadline is not None and time.monotonic() > deadline
        time.sleep(PAUSE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return None if timed_out else os.waitstatus_to_exitcode(status)


class ForkClient:
    """Sends requests to the process that has imported the tests."""

    def __init__(self, running: SuiteRun, listening: socket.socket) -> None:
        self._running = running
        self._lines: TextIO | None = None
        listening.settimeout(0.1)
        while self._lines is None and running.alive:
            with contextlib.suppress(TimeoutError), listening.accept()[0] as connection:
                self._lines = connection.makefile("rw", encoding="utf-8")

    def run(self, request: MutationRequest, timeout: float | None) -> SuiteResult:
        """Run a request in a child; the result of the process itself if it ended before."""
        if self._lines is None:
            return self._running.ended()
        self._lines.write(json.dumps({"request": asdict(request), "timeout": timeout}) + "\n")
        self._lines.flush()
        answer = self._lines.readline()
        return SuiteResult(**json.loads(answer), output=self._running.output) if answer else self._running.ended()

    def close(self) -> None:
        """Send no more requests, which ends the process."""
        if self._lines is not None:
            with contextlib.suppress(BrokenPipeError):
                self._lines.close()

    def prepare(self, imports: Sequence[str]) -> None:
        """Import modules before further forks."""
        if self._lines is not None and imports:
            self._lines.write(json.dumps({"imports": list(imports)}) + "\n")
            self._lines.flush()


def listen(folder: Path) -> socket.socket:
    """Return a listening socket in a folder."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "request"))
    listening.listen(1)
    return listening
