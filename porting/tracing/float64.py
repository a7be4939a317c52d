"""Float64 runs that stay in float64: casts of activations to a lower precision are removed.

A softmax or a norm that is always computed in float32 makes a float64 run only as exact as float32, and hides all
smaller mistakes. Such a cast is only rounding, which the run in the working dtype measures. So in a float64 run an
operation that is asked for a lower precision returns float64, and the module that asked is recorded.

A cast of a buffer that changes no number is left alone, and so are float32 tensors computed from integers: the
frequencies of a rotary embedding are float32 numbers by definition.
"""

from __future__ import annotations

import ctypes
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from porting.printable import text_of
from porting.tracing.torch_modes import DispatchMode, FunctionMode, eagerly

LESS = frozenset({torch.float32, torch.bfloat16, torch.float16})
ITSELF = "the model itself"
"""The name in a report of code that belongs to the model and to none of its submodules."""

LAZY = 0
"""Address of a lazy weight, which has no storage until an operation reads it."""

LoweredOperations = dict[str, dict[str, None]]
"""Path of a module -> the operations in it that were asked for less than float64."""


class _Running(threading.local):
    """The paths of the running modules of a thread; a streamed verification runs several models in turn."""

    def __init__(self) -> None:
        self.names: list[str] = []


_RUNNING = _Running()


def running() -> str:
    """Return the path of the innermost module that is running within :func:`forced_float64`."""
    return _RUNNING.names[-1] if _RUNNING.names else ITSELF


def force_float64(module: nn.Module) -> ForceFloat64:
    """Return the mode in which no activation is cast to less than float64; it can be entered repeatedly."""
    return ForceFloat64({address_of(buffer) for buffer in module.buffers()} | {LAZY})


@contextmanager
def forced_float64(module: nn.Module) -> Iterator[LoweredOperations]:
    """Return a context in which no activation is cast to less than float64, and no operation fails on mixed dtypes.

    Args:
        module: the model, in float64.

    Yields:
        The modules that asked for less than float64, with their operations, as they run.
    """
    names = {part: path or ITSELF for path, part in module.named_modules()}
    mode = force_float64(module)

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
        with eagerly(), _limits_of_float32(), mode, Decomposed():
            yield mode.found


@contextmanager
def _limits_of_float32() -> Iterator[None]:
    """Return a context in which ``torch.finfo(torch.float64)`` has the largest and the lowest number of float32.

    Both hide a token, and code multiplies a float32 mask by the one or stores it in one: the lowest float64 would be
    minus infinity there, and 0 times it no number.
    """
    global _limiting  # noqa: PLW0603  # models run side by side in several threads, and leave in any order
    with _LIMITING:
        _limiting += 1
        torch.finfo = _limits  # type: ignore[misc, assignment]  # called like the class
    try:
        yield
    finally:
        with _LIMITING:
            _limiting -= 1
            if not _limiting:
                torch.finfo = _FINFO  # type: ignore[misc]  # as above


_FINFO = torch.finfo
_LIMITING = threading.Lock()
_limiting = 0


class _Limits:
    """The numbers of ``torch.finfo(torch.float64)`` with another range."""

    def __getattr__(self, name: str) -> object:
        return getattr(_FINFO(torch.float32 if name in {"min", "max"} else torch.float64), name)


def _limits(dtype: torch.dtype | None = None) -> object:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return _Limits() if dtype == torch.float64 else _FINFO(dtype)


class ForceFloat64(DispatchMode):
    """Removes casts to less than float64; made by :func:`force_float64`.

    It is a mode of the dispatcher because torch functions cast internally, as ``F.softmax(scores, dtype=...)`` does.
    """

    def __init__(self, constants: set[int]) -> None:
        super().__init__()
        self.found: LoweredOperations = {}
        self._constants = constants

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`DispatchMode.dispatch`."""
        if torch.is_inference_mode_enabled() and isinstance(func, OpOverload) and func._can_decompose():
            with self:  # under inference_mode, composite operations arrive here
                return func.decompose(*args, **kwargs)
        mask = kwargs.get("attn_mask")
        if func is _FUSED and isinstance(mask, Tensor) and mask.dtype not in {torch.bool, args[0].dtype}:
            kwargs["attn_mask"] = mask.to(args[0].dtype)  # torch 2.13 reads a float32 mask as if it were float64
        less = kwargs.get("dtype")
        if less in LESS and any(self._changed(leaf, less) for leaf in tree_leaves(args)):
            kwargs["dtype"] = torch.float64
            self.found.setdefault(running(), {})[str(func).removesuffix(".default")] = None
        elif func in _MAKERS and less in {None, torch.float32} and any(_large(argument) for argument in args):
            kwargs["dtype"] = torch.float64  # the smallest float64, for a mask, is not in float32's range
        return func(*args, **kwargs)

    def _changed(self, value: object, less: torch.dtype) -> bool:
        """Return whether a value is a float64 activation, or a constant that the lower precision would change."""
        if not isinstance(value, Tensor) or value.dtype != torch.float64:
            return False
        with _disable_current_modes():
            constant = address_of(value) in self._constants
            return not constant or not torch.equal(value.to(less).to(value.dtype).nan_to_num(), value.nan_to_num())


_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

_MAKERS = frozenset({torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default})


def _large(value: object) -> bool:
    return isinstance(value, float) and torch.finfo(torch.float32).max < abs(value) < math.inf


def address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's values; ``LAZY`` for a lazy weight."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a lazy weight
        return LAZY


def is_low_precision(value: object) -> bool:
    """Return whether a value is a floating-point tensor with less precision than float64."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < torch.float64.itemsize


def spelled_operations(found: Mapping[str, Iterable[str]]) -> str:
    """Return modules and their operations in one line; modules that differ only in a number are joined.

    >>> cast = ["aten._to_copy"]
    >>> spelled_operations({"layers.0.attn": cast, "layers.1.attn": cast, "norm": ["aten.pow"]})
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

_GROUPED = frozenset(
    function for function in (getattr(torch, "_grouped_mm", None), getattr(F, "grouped_mm", None)) if function
)


class Decomposed(FunctionMode):
    """Replaces torch functions that refuse float64 or gradients, and casts mixed operands to float64.

    It is a mode of functions because torch refuses before there is an operation to dispatch.
    """

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`FunctionMode.call`."""
        if func in _GROUPED and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            return grouped_mm(*args, **kwargs)
        if func is torch.tensor and _is_rounded(*args, **kwargs):
            kwargs["dtype"] = torch.float64
        if func is F.batch_norm:
            result = _batch_norm(*args, **kwargs)
            if result is not None:
                return result
        try:
            if func in _KEEPS_DTYPE and _all_plain(args) and _all_plain(kwargs.values()) and _is_watched_by_one():
                with torch._C._DisableTorchDispatch():  # ForceFloat64 would leave it as it is, and takes 8 µs for it
                    return func(*args, **kwargs)
            return func(*args, **kwargs)
        except RuntimeError as error:
            dtypes = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            if not _MIXED.search(text_of(error)) or not {torch.float32, torch.float64} <= dtypes:
                raise
            # A constant that the model always makes in float32; in a float32 run the dtypes would agree.
            args, kwargs = tree_map_only(Tensor, _to_float64, (args, kwargs))
            return func(*args, **kwargs)


def _is_rounded(data: object, *, dtype: torch.dtype | None = None, **others: object) -> bool:
    """Whether ``torch.tensor`` is given one number, such as a scale, and rounds it to float32.

    In a float32 run it is the number that the same factor in Python is rounded to there.
    """
    if type(data) is not float or dtype not in {None, torch.float32} or torch.get_default_dtype() != torch.float32:
        return False
    return math.isfinite(data) and ctypes.c_float(data).value not in {data, math.inf, -math.inf}


_KEEPS_DTYPE = frozenset(
    getattr(owner, name)
    for owner, names in (
        (
            Tensor,
            """__add__ __getitem__ __iadd__ __imul__ __matmul__ __mul__ __neg__ __radd__ __rmul__ __sub__ __truediv__
            abs add bmm chunk contiguous cos dim div exp expand expand_as flatten matmul mean mul neg permute pow
            reshape rsqrt sin size split sqrt square squeeze sub t tanh transpose unflatten unsqueeze view""",
        ),
        (
            torch,
            """abs add baddbmm bmm cat chunk cos div erf exp flatten matmul mean mul neg outer permute pow
            repeat_interleave reshape rsqrt sigmoid sin split sqrt square squeeze stack sub t tanh transpose tril triu
            unsqueeze""",
        ),
        (F, "conv1d conv2d dropout embedding gelu layer_norm linear relu sigmoid silu tanh"),
    )
    for name in names.split()
)
"""Functions whose results have the dtype of their operands, if they are not told another one."""


def _all_plain(values: Iterable[object]) -> bool:
    """Return whether there is no dtype among arguments, and no tensor of another class."""
    return all((isinstance(value, tuple | list) and _all_plain(value)) or type(value) in _PLAIN for value in values)


_PLAIN = frozenset({Tensor, nn.Parameter, int, float, bool, str, slice, type(None), type(...)})


def _is_watched_by_one() -> bool:
    """Return whether one mode of the dispatcher is active: ForceFloat64 itself."""
    return bool(torch._C._len_torch_dispatch_stack() == 1)


_MIXED = re.compile(
    r"expected scalar type|mixed dtype|same dtype|should be the same|dtype mismatch|to have the same|but got"
)
"""Torch's errors about operands in float32 and float64."""


def _to_float64(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype == torch.float32 else tensor


def grouped_mm(mat_a: Tensor, mat_b: Tensor, offs: Tensor | None = None, **others: Any) -> Tensor:
    """Compute ``torch.nn.functional.grouped_mm`` as one matrix product for each group.

    Source: the documentation of that function.

    Args:
        mat_a: [n k], rows sorted by group, or [g m k].
        mat_b: [g k m], or [k m] whose columns are sorted by group.
        offs: the end of each group along the sorted axis, [g].
        others: ``bias``, ``out_dtype``.

    >>> a, b = torch.randn(5, 3, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    >>> torch.equal(grouped_mm(a, b, torch.tensor([2, 5])), torch.cat([a[:2] @ b[0], a[2:] @ b[1]]))
    True
    """
    if offs is None:
        result = mat_a @ mat_b
    else:
        ends = [0, *offs.tolist()]
        spans = list(pairwise(ends))
        if mat_a.ndim == 2 and mat_b.ndim == 3:  # axes, as the docstring has them
            parts = [mat_a[start:end] @ matrix for (start, end), matrix in zip(spans, mat_b, strict=True)]
            rest = mat_a.new_zeros(mat_a.shape[0] - ends[-1], mat_b.shape[-1])  # rows of no group
            result = torch.cat([*parts, rest])
        elif mat_a.ndim == 3:  # as above
            result = torch.cat(
                [matrix @ mat_b[:, start:end] for (start, end), matrix in zip(spans, mat_a, strict=True)], 1
            )
        else:
            result = torch.stack([mat_a[:, start:end] @ mat_b[start:end] for start, end in spans])
    bias = others.get("bias")
    return result if bias is None else result + bias


def _batch_norm(  # the signature of torch.nn.functional.batch_norm
    input: Tensor,  # noqa: A002  # torch's own name
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    """Compute a batch norm with gradients for its running statistics; None where torch's own can be used."""
    if training or running_mean is None or running_var is None:
        return None
    if not (running_mean.requires_grad or running_var.requires_grad):
        return None
    shape = [1, -1, *[1] * (input.ndim - 2)]
    result = (input - running_mean.view(shape)) / torch.sqrt(running_var.view(shape) + eps)
    result = result if weight is None else result * weight.view(shape)
    return result if bias is None else result + bias.view(shape)
