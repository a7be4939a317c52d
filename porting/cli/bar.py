"""How far a conversion has come, on standard error: a bar on a terminal, lines elsewhere, events with ``--json``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn

from porting.cli.screen import Screen, size

if TYPE_CHECKING:
    from porting.converting import Progress as State

EVERY = 2.0
"""Seconds between two lines, or two events."""


@contextmanager
def watching(screen: Screen) -> Iterator[Callable[[State], None]]:
    """What a conversion tells how far it has come."""
    if not (screen.as_json or screen.silent or not screen.err.is_terminal or screen.err.is_dumb_terminal):
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"))
        with Progress(*columns, console=screen.err, transient=True) as bar:
            task = bar.add_task("writing", total=None, said="")

            def draw(state: State) -> None:
                total = max(1, state.all_bytes)
                bar.update(task, description=state.stage, completed=state.bytes, total=total, said=_said(state))

            yield draw
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
