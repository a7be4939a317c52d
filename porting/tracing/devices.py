"""Running a model on the CPU whatever device its code names.

Models are compared on the CPU, in float64. Code that says ``device = "cuda" if torch.cuda.is_available() else "cpu"``,
``x.cuda()`` or ``torch.arange(n, device=self.device)`` would leave it, so inside :func:`on_cpu` those calls are made
for the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from porting.errors import PortingError
from porting.printable import text_of
from porting.tracing.torch_modes import Call, redirecting

P = ParamSpec("P")
R = TypeVar("R")

_NAMED = re.compile(r"(cuda|mps|xpu|npu|hpu|tpu|mtia|privateuseone)(:\d+)?")
"""A device, as a string."""

_TYPED = re.compile(r"torch\.(cuda|mps|xpu|npu|hpu)\.(?=\w+Tensor$)")
"""The type of a tensor on a device, for :meth:`torch.Tensor.type`."""

_MOVING = frozenset({getattr(Tensor, name) for name in ("cuda", "xpu", "hpu", "mtia") if hasattr(Tensor, name)})

_ABOUT = re.compile(
    r"CUDA|NVIDIA|HIP|XPU|(?<![a-z])(cuda|mps|xpu|npu|hpu|tpu)(?![a-z])|accelerator device"
    r"|same device|on the expected device|different devices"
)

_CPU = torch.device("cpu")

_wanted = 0
"""How many calls that failed over a device are being repeated on the CPU."""


def is_device_error(error: BaseException) -> bool:
    """Whether torch complains of a device: one that it lacks here, or two that meet.

    >>> is_device_error(AssertionError("Torch not compiled with CUDA enabled"))
    True
    >>> is_device_error(RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu!"))
    True
    >>> is_device_error(ValueError("a barracuda"))
    False
    """
    return isinstance(error, AssertionError | RuntimeError | TypeError | ValueError) and bool(
        _ABOUT.search(text_of(error))
    )


def redirected(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """A call as it is made on the CPU.

    >>> redirected(torch.zeros, (2,), {"device": "cuda"})[2]
    {'device': device(type='cpu')}
    """
    if function is torch.device or getattr(function, "__name__", "") == "__get__":  # no call: a shape, say
        return function, args, dict(kwargs)
    if function in _MOVING:
        return Tensor.cpu, args[:1], {}
    if function is Tensor.to and len(args) > 1 and type(args[1]) is int:  # the number of a GPU
        args = (args[0], _CPU, *args[2:])
    changed = {name: _on_cpu(value) for name, value in kwargs.items()}
    if type(changed.get("device")) is int:
        changed["device"] = _CPU
    return function, tuple(_on_cpu(value) for value in args), changed


def _on_cpu(value: Any) -> Any:  # whatever a torch function is given
    if isinstance(value, Tensor):
        if not torch.accelerator.is_available():
            return value
        with torch._C.DisableTorchFunction():  # asking for a tensor's device is a call of a torch function
            return value if value.device.type in {"cpu", "meta"} else value.cpu()
    if isinstance(value, torch.device):
        return value if value.type in {"cpu", "meta"} else _CPU
    if isinstance(value, str):
        return _CPU if _NAMED.fullmatch(value) else _TYPED.sub("torch.", value)
    if type(value) in {tuple, list} and any(isinstance(one, Tensor) for one in value):
        return type(value)(_on_cpu(one) for one in value)
    return value


@contextmanager
def on_cpu(*, always: bool = False) -> Iterator[None]:
    """Return a context in which torch's functions compute on the CPU, whatever default device the caller has set.

    Args:
        always: also where nothing failed over a device yet: every call takes some microseconds longer.
    """
    default = torch.get_default_device()
    elsewhere = default.type not in {"cpu", "meta"}
    if not (always or _wanted or elsewhere):
        yield
        return
    if elsewhere:
        torch.set_default_device("cpu")
    try:
        with redirecting(redirected):
            yield
    finally:
        if elsewhere:
            torch.set_default_device(default)


def repeated_on_cpu(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, called once more inside :func:`on_cpu` if it fails over a device that its code names."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        global _wanted  # noqa: PLW0603  # modes are global, too
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if _wanted or not any(map(_is_about_devices, _chain(error))):
                raise
        _wanted += 1
        try:
            return function(*args, **kwargs)
        finally:
            _wanted -= 1

    return called


def or_on_cpu(call: Callable[[], R]) -> R:
    """The result of a call, made on the CPU where it fails over a device that it names."""
    try:
        return call()
    except Exception as error:
        if not any(map(_is_about_devices, _chain(error))):
            raise
    with on_cpu(always=True):
        return call()


def _is_about_devices(error: BaseException) -> bool:
    return is_device_error(error) or (isinstance(error, PortingError) and bool(_ABOUT.search(str(error))))


def _chain(error: BaseException) -> list[BaseException]:
    """An error and those that it was raised from; one may have been raised from itself."""
    found = [error]
    while found[-1].__cause__ is not None and found[-1].__cause__ not in found:
        found.append(found[-1].__cause__)
    return found
