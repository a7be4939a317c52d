"""Float64 runs that stay in float64: where a model casts to less whatever its weights are, the cast is taken out.

A softmax or a norm that is always computed in float32 makes a float64 run as exact as float32 there, and hides every
mistake that is smaller.  Such a cast means nothing: it is rounding, and the working dtype's tier measures that.  So in
a float64 run an operation that is asked for less gives float64, and it is said which module asked.

A cast of a buffer that changes no number is left alone, and so is what is made in float32 out of integers: the
frequencies of a rotary embedding are float32 numbers, and mean these.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from porting.tracing.written_out import WrittenOut

LESS = frozenset({torch.float32, torch.bfloat16, torch.float16})
ITSELF = "the model itself"
LAZY = 0
"""In the place of an address: a weight or a buffer that is read where an operation needs it."""

Lifted = dict[str, dict[str, None]]
"""Module -> the operations in it that were asked for less than float64."""


class _Running(threading.local):
    """The modules that are running, in this thread: a streamed verification runs several models in turn."""

    def __init__(self) -> None:
        self.names: list[str] = []


_RUNNING = _Running()


def running() -> str:
    """The innermost module that is running, within :func:`lifted`."""
    return _RUNNING.names[-1] if _RUNNING.names else ITSELF


def lift(module: nn.Module) -> Lift:
    """The mode in which nothing computes with less than float64 because it was asked to; it can be entered again."""
    return Lift({_address(one) for one in module.buffers()} | {LAZY})


@contextmanager
def lifted(module: nn.Module) -> Iterator[Lifted]:
    """Within it nothing computes with less than float64 because it was asked to, or fails because it is float64.

    Args:
        module: the model that is run, in float64.

    Yields:
        Which modules asked for less, of what they had in float64.
    """
    names = {part: path or ITSELF for path, part in module.named_modules()}
    mode = lift(module)

    def enter(part: nn.Module, args: Any) -> None:  # whatever the module is given
        if part in names:
            _RUNNING.names.append(names[part])

    def leave(part: nn.Module, args: Any, output: Any) -> None:  # whatever it returns
        if part in names and _RUNNING.names:
            _RUNNING.names.pop()

    with ExitStack() as undo:
        undo.callback(_RUNNING.names.clear)
        undo.callback(register_module_forward_pre_hook(enter).remove)
        undo.callback(register_module_forward_hook(leave, always_call=True).remove)
        with mode, WrittenOut():
            yield mode.found


class Lift(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type its modes
    """Takes such casts out; :func:`lift` makes it."""

    supports_higher_order_operators = True

    def __init__(self, constants: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.found: Lifted = {}
        self._constants = constants

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # whatever torch's operation gives
        if isinstance(func, HigherOrderOperator):  # flex_attention, say: what is in it is not looked into
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        if torch.is_inference_mode_enabled() and isinstance(func, OpOverload) and func._can_decompose():
            with self:  # a forward under inference_mode: torch sends operations here that are made of others
                return func.decompose(*args, **kwargs)
        less = kwargs.get("dtype")
        if less in LESS and any(self._changed(one, less) for one in tree_leaves(args)):
            kwargs["dtype"] = torch.float64
            self.found.setdefault(running(), {})[str(func).removesuffix(".default")] = None
        elif func in _MAKERS and less in {None, torch.float32} and any(_large(one) for one in args):
            kwargs["dtype"] = torch.float64  # the least number of float64, for a mask, which float32 does not have
        return func(*args, **kwargs)

    def _changed(self, value: object, less: torch.dtype) -> bool:
        """Whether it is a tensor of float64 that is computed with, or a constant that a smaller dtype would change."""
        if not isinstance(value, Tensor) or value.dtype != torch.float64:
            return False
        with _disable_current_modes():
            constant = _address(value) in self._constants
            return not constant or not torch.equal(value.to(less).to(value.dtype).nan_to_num(), value.nan_to_num())


_MAKERS = frozenset({torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default})


def _large(value: object) -> bool:
    return isinstance(value, float) and torch.finfo(torch.float32).max < abs(value) < math.inf


def _address(tensor: Tensor) -> int:
    """Where its values lie."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a weight that is read where it is needed, and is nowhere yet
        return LAZY


def spelled(found: Mapping[str, Iterable[str]]) -> str:
    """The modules and their operations in a line; modules that differ in one number only are one.

    >>> spelled({"layers.0.attn": ["aten._to_copy"], "layers.1.attn": ["aten._to_copy"], "norm": ["aten.pow"]})
    'layers.{0,1}.attn (aten._to_copy), norm (aten.pow)'
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, operations in found.items():
        number = _NUMBER.search(name)
        pattern = f"{name[: number.start()]}{{}}{name[number.end() :]}" if number else name
        groups.setdefault((pattern, ", ".join(operations)), []).append(number.group() if number else "")
    return ", ".join(
        pattern.replace("{}", numbers[0] if len(numbers) == 1 else "{" + ",".join(numbers) + "}") + f" ({operations})"
        for (pattern, operations), numbers in groups.items()
    )


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
