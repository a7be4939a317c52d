"""Which of a port's own instructions ran: what no input reached has not been compared with anything.

Own is the code of the user's files, of the package that the model's class is of, and of the library's handwritten
models; torch, what else is installed and the engine are not.  Instructions are seen and not lines, so that both arms of
``a if b else c`` are told apart.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from torch import nn

from porting.frames import is_installed

MODELS = "porting.models"
"""The one part of the library that may be somebody's port."""

_ENGINE = MODELS.partition(".")[0]


@dataclass
class Ran:
    """One function that was entered.

    Attributes:
        code: its code.
        globals: where it looks names up.
        offsets: those of its instructions that ran.
    """

    code: CodeType
    globals: dict[str, Any] = field(repr=False)
    offsets: set[int] = field(default_factory=set)


class Executed:
    """Gathers, over several passes, which instructions of a port's own functions ran.

    Args:
        module: the port.

    Attributes:
        functions: those that were entered.
    """

    def __init__(self, module: nn.Module) -> None:
        self.functions: list[Ran] = []
        self._package = type(module).__module__.partition(".")[0]
        self._known: dict[int, Ran | None] = {}
        self._codes: list[CodeType] = []  # what is known by its id must live on

    def lacks(self, other: Executed) -> bool:
        """Whether another has instructions that ran and did not here."""
        return any(one.offsets - self._offsets(one) for one in other.functions)

    def add(self, other: Executed) -> None:
        """Take over what ran in another."""
        for one in other.functions:
            here = self._known.get(id(one.code))
            if here is None:
                self._codes.append(one.code)
                here = self._known[id(one.code)] = Ran(one.code, one.globals)
                self.functions.append(here)
            here.offsets |= one.offsets

    def _offsets(self, one: Ran) -> set[int]:
        here = self._known.get(id(one.code))
        return set() if here is None else here.offsets

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within it, in this thread, the port's code is watched.  Who watched before waits until it is over."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def would_watch(self, name: str, code: CodeType) -> bool:
        """Whether code of the module of that import path is watched, or would be if its source were there."""
        outermost = name.partition(".")[0]
        return outermost != "torch" and (
            not linecache.getlines(code.co_filename) or is_own(name, code.co_filename, self._package)
        )

    def _enter(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if id(code) not in self._known:
            self._codes.append(code)
            own = is_own(str(frame.f_globals.get("__name__", "")), code.co_filename, self._package)
            ran = self._known[id(code)] = Ran(code, frame.f_globals) if own else None
            if ran is not None:
                self.functions.append(ran)
        ran = self._known[id(code)]
        if ran is None:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        offsets = ran.offsets

        def step(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
            if event == "opcode":
                offsets.add(frame.f_lasti)
            return step

        return step


def is_own(name: str, file: str, package: str) -> bool:
    """Whether code belongs to a port.

    Args:
        name: the import path of the code's module.
        file: where its source is.
        package: the outermost package of the port's class.
    """
    outermost = name.partition(".")[0]
    if outermost == _ENGINE:
        return name == MODELS or name.startswith(f"{MODELS}.")
    if outermost == "torch" or not linecache.getlines(file):
        return False
    return outermost == package or not is_installed(file)
