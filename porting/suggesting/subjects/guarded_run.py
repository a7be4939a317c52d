"""Running the user's code: nothing of the process is different afterwards; what it raises is reported with its line.

Functions of torch that the user's code replaces are put back, since the reference would run them as well.  Past the
limit on time the next module that is run, of either side, is not run.
"""

from __future__ import annotations

import io
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import wraps
from threading import get_ident
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from porting.errors import Code, Fault, PortingError, VerifyError
from porting.frames import is_users, users_line
from porting.printable import text_of
from porting.tracing.devices import is_device_error
from porting.tracing.running import undisturbed
from porting.verification.reference import quiet


class OutOfTime(BaseException):
    """The time is over.  No error: code that catches those, the user's included, is not to catch this."""


PATIENCE = 2.0
"""A search ends after this many times its limit by the clock, even if little was computed in that time."""


class Deadline:
    """The end of so many seconds of this thread's computing: what else a machine runs costs no answer.

    Args:
        seconds: of the processor's time; by the clock it is :data:`PATIENCE` times as many at most.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._computed, self._clock = seconds, time.thread_time(), time.monotonic()

    @property
    def left(self) -> float:
        """How many seconds are left; negative where it is past."""
        computed, passed = time.thread_time() - self._computed, time.monotonic() - self._clock
        return self._seconds - max(computed, passed / PATIENCE)

    @property
    def past(self) -> bool:
        """Whether no time is left."""
        return self.left < 0


@contextmanager
def bounded(until: Deadline) -> Iterator[None]:
    """End what is inside when the time is over.

    Raises:
        OutOfTime: it is over.
    """
    thread = get_ident()

    def look(*_: object) -> None:
        if get_ident() == thread and until.past:
            raise OutOfTime

    hook = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        hook.remove()


STAY = "keep it where its inputs and weights are: device=x.device"
"""The advice for a tensor on another device."""


@contextmanager
def unpatched() -> Iterator[None]:
    """Functions and classes of torch that are replaced inside are put back.

    Raises:
        VerifyError: one that computes was replaced, so that what was compared holds for that one alone.
    """
    kinds = [one for one in vars(nn).values() if isinstance(one, type)]
    before = [(owner, _computing(owner)) for owner in (torch, F, nn, *kinds)]
    replaced: list[str] = []
    try:
        yield
    finally:
        for owner, values in before:
            for name, value in values.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)
                    replaced += [f"{_named(owner)}.{name}"] if name != "reset_parameters" else []
    if replaced:
        message = f"building or running the module replaces {replaced[0]}, for the reference as well"
        hint = "put what computes otherwise into a function or class of your own"
        raise VerifyError(Fault(code=Code.FORWARD_FAILED, message=message, hint=hint))


def _computing(owner: Any) -> dict[str, object]:
    """The functions of a module or a class of layers that compute, and those that draw weights, which many replace."""
    if owner is torch:
        return {name: one for name, one in vars(torch).items() if isinstance(one, BuiltinFunctionType)}
    if isinstance(owner, type):
        return {name: vars(owner)[name] for name in ("forward", "reset_parameters") if name in vars(owner)}
    return {
        name: one for name, one in vars(owner).items() if isinstance(one, type | FunctionType | BuiltinFunctionType)
    }


def _named(owner: Any) -> str:
    return owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__name__}"


P = ParamSpec("P")
R = TypeVar("R")

HELD = 4000
"""How many characters of what the user's code prints are kept."""


@contextmanager
def guarded(seed: int) -> Iterator[None]:
    """Run what is inside as a guest: random states, modes and the process's surroundings are put back.

    What the user's code prints is kept, and written only where it is refused: it is run dozens of times.

    Raises:
        VerifyError: the user's code raised what nothing here understands.
    """
    with (
        _held(),
        _surroundings(),
        unpatched(),
        _randomness(),
        quiet(),
        undisturbed(seed),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            yield
        except PortingError:
            raise
        except Exception as error:  # the user's own code may raise anything; what is not from there goes on
            if not is_users(error):
                raise
            what = (
                "running the module moves data to another device"
                if is_device_error(error)
                else "running the module failed"
            )
            message = f"{what}: {type(error).__name__}: {' '.join(text_of(error).split())}"
            hint = f"at {users_line(error)}"
            raise VerifyError(Fault(code=Code.FORWARD_FAILED, message=message, hint=hint)) from error


def outside(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, which prints to where its caller prints, also if it is called as a guest."""
    out = sys.stdout

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with redirect_stdout(out):
            return function(*args, **kwargs)

    return called


class _End(io.TextIOBase):
    """A stream that keeps its end."""

    def __init__(self) -> None:
        self.kept = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.kept = (self.kept + text)[-HELD:]
        return len(text)


@contextmanager
def _held() -> Iterator[None]:
    """Hold back what is printed inside; if it is refused, write it afterwards, each line once."""
    end = _End()
    try:
        with redirect_stdout(end):
            yield
    except PortingError:
        for line in dict.fromkeys(end.kept.splitlines()):
            sys.stdout.write(f"{line}\n")
        raise


@contextmanager
def _surroundings() -> Iterator[None]:
    """Torch's modes, the folder, where modules are looked for, and the environment."""
    dtype, graded, device = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_default_device()
    strict, lenient = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    folder, path, environment = os.getcwd(), list(sys.path), dict(os.environ)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(graded)
        if torch.get_default_device() != device:
            torch.set_default_device(device)
        torch.use_deterministic_algorithms(strict, warn_only=lenient)
        os.chdir(folder)
        sys.path[:] = path
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)


@contextmanager
def _randomness() -> Iterator[None]:
    """Python's and NumPy's random states; torch's is put back by those who run models."""
    state = random.getstate()
    numpy: Any = sys.modules.get("numpy")  # only who has imported it can have drawn from it
    drawn = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        if drawn is not None:
            numpy.random.set_state(drawn)
