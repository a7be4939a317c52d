"""The user's tests are imported once, and run in a copy of that process for each mistake.

Importing torch takes longer than most tests.  The process that has collected the tests waits for orders, forks for
each, and tells how the copy ended. The copy is a process group of its own, and gone when its run is over.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from porting.mutating.orders import Orders
from porting.mutating.process import Ended, Running

PAUSE = 0.01
"""Seconds between two looks at whether a copy has ended."""


class Server:
    """The end in the process that has the tests.

    Args:
        path: of the socket.
    """

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._lines = self._socket.makefile("rw", encoding="utf-8")

    def orders(self) -> Iterator[Orders]:
        """In each copy the orders that it was made for; in the process itself none."""
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
                yield Orders.of(asked["orders"])
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


class Client:
    """The end of who gives the orders.

    Args:
        running: the process that has the tests.
        listening: the socket that it connects to.
    """

    def __init__(self, running: Running, listening: socket.socket) -> None:
        self._running = running
        self._lines: TextIO | None = None
        listening.settimeout(0.1)
        while self._lines is None and running.alive:
            with contextlib.suppress(TimeoutError), listening.accept()[0] as connection:
                self._lines = connection.makefile("rw", encoding="utf-8")

    def run(self, orders: Orders, timeout: float | None) -> Ended:
        """A run in a copy; what became of the process itself where it never got so far."""
        if self._lines is None:
            return self._running.ended()
        self._lines.write(json.dumps({"orders": asdict(orders), "timeout": timeout}) + "\n")
        self._lines.flush()
        answer = self._lines.readline()
        return Ended(**json.loads(answer), said=self._running.said) if answer else self._running.ended()

    def close(self) -> None:
        """Give no more orders: the process ends."""
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
    made.bind(str(folder / "orders"))
    made.listen(1)
    return made
