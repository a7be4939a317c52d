"""Finding the line of the user's own code that a message should name."""

from __future__ import annotations

import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import dropwhile
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

HERE = str(Path(__file__).parent)
_INSTALLED = tuple({sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib", "scripts")})
_MODELS = f"{HERE}/models/"
"""The modules of this library: what is proven is their code, as it is the user's in a module of the user's."""


def users_line(error: BaseException) -> str:
    """``file:line`` of the innermost frame of an error in the user's code; of the innermost frame if there is none."""
    return _innermost([(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)])


def current_line() -> str:
    """``file:line`` of the user's code that is running now."""
    return _innermost(_running())


def current_lines() -> tuple[str, ...]:
    """``file:line`` of each running frame of the user's code that this library called, the innermost first."""
    frames = _running()
    inside = dropwhile(lambda frame: not frame[0].startswith(HERE), frames)
    own = [frame for frame in inside if _is_own(frame[0])] or [frame for frame in frames if _is_own(frame[0])][-1:]
    return tuple(f"{file}:{line}" for file, line in reversed(own))


def _running() -> list[tuple[str, int | None]]:
    """The file and the line of each running frame, the innermost last.

    Without the text of the lines, which :func:`traceback.extract_stack` reads: each step of a recorded run is asked for
    its frames.
    """
    found: list[tuple[str, int | None]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]


@cache
def _is_own(file: str) -> bool:
    if file.startswith(_MODELS):
        return True
    return not file.startswith((HERE, *_INSTALLED)) and Path(file).is_file()


def _innermost(frames: Sequence[tuple[str, int | None]]) -> str:
    file, line = ([inner for inner in frames if _is_own(inner[0])] or frames)[-1]
    return f"{file}:{line}"


def from_here(place: str) -> str:
    """A file, or ``file:line``, relative to the current directory."""
    path = Path(place)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else place


def is_users(error: BaseException) -> bool:
    """Whether any frame of the error is the user's own code."""
    place = users_line(error)
    return not place.startswith((HERE, *_INSTALLED)) and Path(place.rpartition(":")[0]).is_file()


def is_installed(file: str) -> bool:
    """Whether a file is part of Python or of an installed package."""
    return file.startswith(_INSTALLED)


def is_users_module(module: ModuleType | None) -> bool:
    """Whether a module is the user's own: of a file that is not installed, or of an interactive session."""
    file = getattr(module, "__file__", None)
    if file is None:
        return getattr(module, "__name__", "") == "__main__"
    return not (is_installed(file) or file.startswith(f"{HERE}/"))  # this library, where it is not installed either


def _undecorated(function: Callable[..., object]) -> Callable[..., object]:
    """The function inside of decorators and partial calls."""
    while isinstance(function, partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, partial) else inspect.unwrap(function)
    return function


def place_of(made: object) -> str:
    """``file:line`` of a function, a class or a module's forward; empty if there is none."""
    made = _undecorated(made) if callable(made) else made
    code = getattr(made, "__code__", None) or getattr(getattr(made, "__func__", None), "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    try:
        kind = made if isinstance(made, type) else type(made)
        return f"{inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]}"
    except (TypeError, OSError):  # built in, or typed into a shell
        return ""


def signature_of(function: Callable[..., object]) -> str:
    """A function's arguments and its place, ``(ids, mask=None) at model.py:12``."""
    inner = _undecorated(function)
    code = getattr(inner, "__code__", None) or getattr(getattr(inner, "__func__", None), "__code__", None)
    try:
        spelled = [
            str(parameter.replace(annotation=parameter.empty))
            for parameter in inspect.signature(function).parameters.values()
        ]
    except (TypeError, ValueError):  # some callables written in C have no signature
        return ""
    where = f" at {code.co_filename}:{code.co_firstlineno}" if code is not None else ""
    return f"({', '.join(spelled)}){where}"


def users_attribute(value: object, name: str, default: Any = None) -> Any:
    """Return an attribute of an object of the user's; the default also where looking for it raises something else.

    A config that is a dictionary may raise ``KeyError`` for an attribute: ``__getattr__ = dict.__getitem__``.
    """
    try:
        return getattr(value, name, default)
    except Exception:  # noqa: BLE001  # __getattr__ and properties are the user's code, which may raise anything
        return default
