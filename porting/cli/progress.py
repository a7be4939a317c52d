"""Progress on standard error: a bar on a terminal, lines elsewhere; and questions that pause it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from porting.cli.output import Screen, size
from porting.printable import safe

if TYPE_CHECKING:
    from porting.converting.progress import Progress as State
    from porting.suggesting import Question

EVERY = 2.0
"""Seconds between two lines, or two events."""


@contextmanager
def conversion_progress(screen: Screen) -> Iterator[Callable[[State], None]]:
    """A progress bar for a conversion."""
    if not (screen.as_json or screen.silent) and screen.animated:
        with screen.working("writing") as tell:
            yield lambda state: tell(f"{state.stage}, {_said(state)}", state.bytes, max(1, state.all_bytes))
        return
    last = time.monotonic()

    def write(state: State) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < EVERY:
            return
        last = now
        if screen.as_json:
            screen.document({"event": "progress", **asdict(state), "speed": state.speed, "left": state.left})
        else:
            screen.note(f"{state.stage}: {_said(state)}")

    yield write


def _said(state: State) -> str:
    left = f", {state.left:.0f} s left" if state.left is not None else ""
    return (
        f"{size(state.bytes)} of {size(state.all_bytes)}, {state.speed / 1e9:.2f} GB/s, "
        f"{state.tensors:,} of {state.all_tensors:,} tensors{left}"
    )


class Prompt:
    """Asks on standard error and reads answers from standard input, a line each.

    An empty line, and the end of the input, take the default: so does a command whose input is not a terminal and has
    nothing in it, or cannot be read.

    Attributes:
        silent: take every default without reading an answer: as asked for, or since standard input has ended.
    """

    def __init__(self, screen: Screen, *, defaults: bool = False) -> None:
        self._screen = screen
        self.silent = defaults

    def ask(self, question: Question) -> str:
        """The answer: one of the choices, by name or number, or any text where there are none."""
        with self._screen.resting():
            return self._asked(question)

    def _asked(self, question: Question) -> str:
        note = self._screen.note
        note(f"{question.said} ({question.why})")
        names = list(question.choices)
        for number, name in enumerate(names, 1):
            meaning = f": {question.choices[name]}" if question.choices[name] else ""
            note(f"  {number}  {name}{meaning}{' (default)' if name == question.default else ''}")
        while True:
            answer = "" if self.silent else self._read(question.default)
            if not answer:
                note(f"taken: {question.default}")
                return question.default
            if not names or answer in names:
                return answer
            if answer.isdecimal() and 1 <= int(answer) <= len(names):
                return names[int(answer) - 1]
            note(f"{answer!r} is not one of them: type a number from 1 to {len(names)}, or a name")

    def _read(self, default: str) -> str:
        """A line of the input; empty at its end."""
        out = self._screen.err.file
        out.write(f"[{safe(default)}] > ")
        out.flush()
        try:
            line = sys.stdin.readline() if sys.stdin is not None else ""  # None: it was closed by whoever started us
        except (OSError, ValueError):  # it is a directory, or open for writing only; or its bytes are no text
            line = ""
        if not line.endswith("\n"):
            self.silent = not line  # standard input has ended
            out.write("\n")
        return line.strip()
