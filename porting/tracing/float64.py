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
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from porting.tracing.torch_modes import DispatchMode, FunctionMode, eagerly

LESS = frozenset({torch.float32, torch.bfloat16, torch.float16})
ITSELF = "the model itself"
LAZY = 0
"""In the place of an address: a weight or a buffer that is read where an operation needs it."""

LoweredOperations = dict[str, dict[str, None]]
"""Module -> the operations in it that were asked for less than float64."""


class _Running(threading.local):
    """The modules that are running, in this thread: a streamed verification runs several models in turn."""

    def __init__(self) -> None:
        self.names: list[str] = []


_RUNNING = _Running()


def running() -> str:
    """The innermost module that is running, within :func:`forced_float64`."""
    return _RUNNING.names[-1] if _RUNNING.names else ITSELF


def force_float64(module: nn.Module) -> ForceFloat64:
    """The mode in which nothing computes with less than float64 because it was asked to; it can be entered again."""
    return ForceFloat64({_address(buffer) for buffer in module.buffers()} | {LAZY})


@contextmanager
def forced_float64(module: nn.Module) -> Iterator[LoweredOperations]:
    """Within it nothing computes with less than float64 because it was asked to, or fails because it is float64.

    Args:
        module: the model that is run, in float64.

    Yields:
        Which modules asked for less, of what they had in float64.
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
        with eagerly(), mode, Decomposed():
            yield mode.found


class ForceFloat64(DispatchMode):
    """Takes such casts out; :func:`force_float64` makes it.

    It is a mode of the dispatcher because functions of torch cast inside, as ``F.softmax(scores, dtype=...)`` does.
    """

    def __init__(self, constants: set[int]) -> None:
        super().__init__()
        self.found: LoweredOperations = {}
        self._constants = constants

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`DispatchMode.dispatch`."""
        if torch.is_inference_mode_enabled() and isinstance(func, OpOverload) and func._can_decompose():
            with self:  # a forward under inference_mode: torch sends operations here that are made of others
                return func.decompose(*args, **kwargs)
        less = kwargs.get("dtype")
        if less in LESS and any(self._changed(leaf, less) for leaf in tree_leaves(args)):
            kwargs["dtype"] = torch.float64
            self.found.setdefault(running(), {})[str(func).removesuffix(".default")] = None
        elif func in _MAKERS and less in {None, torch.float32} and any(_large(argument) for argument in args):
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


def spelled_operations(found: Mapping[str, Iterable[str]]) -> str:
    """The modules and their operations in a line; modules that differ in one number only are one.

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
    """Within it a model runs in float64, and has gradients, where torch itself refuses.

    It is a mode apart from :class:`ForceFloat64` because torch refuses before there is an operation to dispatch.
    """

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`FunctionMode.call`."""
        if func in _GROUPED and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            return grouped_mm(*args, **kwargs)
        if func is F.batch_norm:
            found = _batch_norm(*args, **kwargs)
            if found is not None:
                return found
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            every = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            if not _MIXED.search(str(error)) or not {torch.float32, torch.float64} <= every:
                raise
            # a constant that the model makes in float32 whatever its weights are: in float32 they would agree
            args, kwargs = tree_map_only(Tensor, _doubled, (args, kwargs))
            return func(*args, **kwargs)


_MIXED = re.compile(r"expected scalar type|same dtype|should be the same|dtype mismatch|to have the same|but got")
"""What torch says of an operation that is given float32 and float64 at once."""


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype == torch.float32 else tensor


def grouped_mm(mat_a: Tensor, mat_b: Tensor, offs: Tensor | None = None, **others: Any) -> Tensor:
    """What ``torch.nn.functional.grouped_mm`` computes, one matrix product for each group.

    Source: the documentation of that function.

    Args:
        mat_a: [n k], rows sorted by group, or [g m k].
        mat_b: [g k m], or [k m] whose columns are sorted by group.
        offs: [g], where each group ends along the axis that is sorted.
        others: ``bias``, ``out_dtype``.

    >>> a, b = torch.randn(5, 3, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    >>> torch.equal(grouped_mm(a, b, torch.tensor([2, 5])), torch.cat([a[:2] @ b[0], a[2:] @ b[1]]))
    True
    """
    if offs is None:
        found = mat_a @ mat_b
    else:
        ends = [0, *offs.tolist()]
        spans = list(pairwise(ends))
        if mat_a.ndim == 2 and mat_b.ndim == 3:  # axes, as the docstring has them
            parts = [mat_a[start:end] @ matrix for (start, end), matrix in zip(spans, mat_b, strict=True)]
            rest = mat_a.new_zeros(mat_a.shape[0] - ends[-1], mat_b.shape[-1])  # rows of no group
            found = torch.cat([*parts, rest])
        elif mat_a.ndim == 3:  # as above
            found = torch.cat(
                [matrix @ mat_b[:, start:end] for (start, end), matrix in zip(spans, mat_a, strict=True)], 1
            )
        else:
            found = torch.stack([mat_a[:, start:end] @ mat_b[start:end] for start, end in spans])
    bias = others.get("bias")
    return found if bias is None else found + bias


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
    """A batch norm with gradients for its running statistics; None where torch's own does."""
    if training or running_mean is None or running_var is None:
        return None
    if not (running_mean.requires_grad or running_var.requires_grad):
        return None
    shape = [1, -1, *[1] * (input.ndim - 2)]
    found = (input - running_mean.view(shape)) / torch.sqrt(running_var.view(shape) + eps)
    found = found if weight is None else found * weight.view(shape)
    return found if bias is None else found + bias.view(shape)
