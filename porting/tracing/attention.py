"""Writing attention out as products, masks and a softmax, whichever kernel a model calls.

Only this module knows attention's kernels and their arguments. A mode that inspects attention enters
:class:`WrittenOut` inside of itself, and then sees ``query @ key.mT``, the calls on the scores, a softmax, and
``probabilities @ value``. Written out are:

- ``scaled_dot_product_attention``, with any mask, ``is_causal``, ``scale`` and ``enable_gqa``;
- ``flex_attention``, with any ``score_mod`` and ``block_mask``;
- ``torch.nn.MultiheadAttention`` and modules that contain it, such as ``torch.nn.TransformerEncoderLayer``;
- ``einsum`` of two operands with one summed axis, such as ``bqhd,bkhd->bhqk``, and ``baddbmm``;
- a softmax computed as ``exp(x) / exp(x).sum()``, ``exp(x - logsumexp(x))`` or ``exp(log_softmax(x))``.

Not recognised are kernels outside of torch (xformers, flash-attn), kernels inside a vmap or on nested tensors, einsums
with several free axes, as for grouped queries, and a softmax computed in place or with a number added to the sum. The
weights that a ``score_mod`` reads are not tracked: what it adds counts as a constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.weak import WeakTensorKeyDictionary

from porting.tracing.calls import Function, Kind, kind_of
from porting.tracing.torch_modes import FunctionMode

KERNELS = frozenset({Kind.ATTENTION, Kind.MULTI_HEAD, Kind.FLEX_ATTENTION})
"""Kernels that compute scores and probabilities inside one call."""


class WrittenOut(FunctionMode):
    """Replaces attention kernels by products, masks and a softmax, which outer modes see.

    It is a mode because kernels may be imported by name, or called by torch itself.

    Args:
        by_heads: let ``torch.nn.MultiheadAttention`` project query, key and value separately, with heads of
            [b h s d]; torch projects them at once, and has heads of [(b h) s d] when it returns weights.
    """

    def __init__(self, *, by_heads: bool = False) -> None:
        super().__init__()
        self._by_heads = by_heads
        self._softmaxes = Softmaxes()

    def call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`FunctionMode.call`."""
        kind = kind_of(func)
        if kind in KERNELS and whole(args, kwargs):
            with self:  # torch's own attention calls another kernel
                return written_out(func, args, kwargs, by_heads=self._by_heads)
        if kind is Kind.EINSUM:
            made = _einsum(*args)
            return func(*args, **kwargs) if made is None else made
        if kind is Kind.BIASED_PRODUCT and kwargs.keys() <= {"beta", "alpha"}:
            return _baddbmm(*args, **kwargs)
        softmax = self._softmaxes.recognised(func, args, kwargs)
        if softmax is not None:
            scores, dim = softmax
            return scores.softmax(dim)
        result = func(*args, **kwargs)
        self._softmaxes.see(func, args, kwargs, result)
        return result


def whole(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether all tensors of a call are plain tensors, as of :func:`is_whole`."""
    return all(is_whole(argument) for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor))


def is_whole(value: Tensor) -> bool:
    """Return whether a tensor is dense and strided, and not inside a vmap."""
    return not (is_functorch_wrapped_tensor(value) or value.is_nested or value.layout is not torch.strided)


def written_out(
    func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, by_heads: bool = False, dropout: bool = True
) -> Any:  # what the kernel gives
    """Compute one of the :data:`KERNELS` by calls that modes see.

    Args:
        func, args, kwargs: the kernel's call.
        by_heads: see :class:`WrittenOut`.
        dropout: whether dropout is applied as the call asks.
    """
    match kind_of(func):
        case Kind.ATTENTION:
            return _attention(*args, **kwargs, dropout=dropout)
        case Kind.MULTI_HEAD:
            return _multi_head(*args, **kwargs, by_heads=by_heads, dropout=dropout)
        case _:
            return _flex_attention(func, *args, **kwargs)


def attention_scores(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute the scores of ``scaled_dot_product_attention``, [... q k], from its arguments.

    Source: the reference implementation in the documentation of that function.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = torch.matmul(query, key.transpose(-2, -1)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril().logical_not()
        scores = scores.masked_fill(later, -torch.inf)
    if attn_mask is None:
        return scores
    if attn_mask.dtype == torch.bool:
        return scores.masked_fill(attn_mask.logical_not(), -torch.inf)
    return scores + attn_mask


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    dropout: bool,
) -> Tensor:
    """Compute ``scaled_dot_product_attention``."""
    probabilities = _probabilities(attention_scores(query, key, attn_mask, is_causal, scale, enable_gqa))
    if enable_gqa:
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    if dropout and dropout_p:
        probabilities = F.dropout(probabilities, dropout_p)
    return torch.matmul(probabilities, value)


def _probabilities(scores: Tensor) -> Tensor:
    """Compute the softmax of a kernel, with 0 in rows whose keys are all masked, where softmax gives NaN."""
    probabilities = scores.softmax(-1)
    empty = torch.isneginf(scores).all(-1, keepdim=True)
    return probabilities.masked_fill(empty, 0.0) if bool(empty.any()) else probabilities


def _multi_head(*args: Any, by_heads: bool, dropout: bool, **kwargs: Any) -> Any:  # torch's own signature
    """Compute ``torch.nn.MultiheadAttention`` by torch's own code, whose calls modes cannot see otherwise."""
    arguments = dict(zip(_MULTI_HEAD, args, strict=False)) | kwargs
    if not dropout:
        arguments["training"] = False
    if not by_heads:
        return _torch_code()(**arguments)
    if not arguments.get("need_weights", True):
        return _torch_code(_in_projection_packed=_project)(**arguments)
    probabilities_of: list[Tensor] = []

    def attend(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, causal: bool
    ) -> Tensor:
        probabilities = attention_scores(query, key, mask, causal).softmax(-1)
        probabilities_of.append(F.dropout(probabilities, dropout_p) if dropout_p else probabilities)
        return torch.matmul(probabilities_of[0], value)

    arguments |= {"need_weights": False, "is_causal": False}
    context, _ = _torch_code(_in_projection_packed=_project, scaled_dot_product_attention=attend)(**arguments)
    weights = probabilities_of[0].mean(1) if arguments.get("average_attn_weights", True) else probabilities_of[0]
    return context, weights if arguments["query"].ndim > 2 else weights.squeeze(0)  # [s b e], or [s e] without a batch


def _project(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, ...]:
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return tuple(map(F.linear, (query, key, value), weight.chunk(3), biases))


_TORCH_MULTI_HEAD: Any = F.multi_head_attention_forward  # a Python function, with code and globals
_MULTI_HEAD = _TORCH_MULTI_HEAD.__code__.co_varnames


def _torch_code(**others: Function) -> Function:
    """Return torch's own multi-head attention with its calls visible to modes.

    Args:
        others: functions that replace global names of its code.
    """
    names = {**_TORCH_MULTI_HEAD.__globals__, "has_torch_function": lambda given: False, **others}
    return FunctionType(_TORCH_MULTI_HEAD.__code__, names, _TORCH_MULTI_HEAD.__name__, _TORCH_MULTI_HEAD.__defaults__)


def _flex_attention(
    func: Function,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Function,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_buffers: tuple[Any, ...] = (),
    mask_buffers: tuple[Any, ...] = (),
) -> tuple[Tensor, ...]:
    """Compute ``flex_attention``. Source: ``math_attention`` in ``torch/_higher_order_ops/flex_attention.py``."""
    with torch._C.DisableTorchFunction():
        _, *others = func(query, key, value, score_mod, block_mask, scale, kernel_options, score_buffers, mask_buffers)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.matmul(query, key.transpose(-2, -1)) * scale
    modified = flex_scores(scores, score_mod, score_buffers)
    if not torch.equal(modified, scores):
        scores = scores + (modified - scores)  # as a sum, by which a bias is recognised
    places = torch.zeros(scores.shape, device=scores.device)  # a mask is computed from indices alone
    allowed = flex_scores(places, block_mask[-1], mask_buffers, masks=True)
    if not bool(allowed.all()):
        scores = scores.masked_fill(allowed.logical_not(), -torch.inf)
    return torch.matmul(_probabilities(scores), value), *others


def flex_scores(scores: Tensor, change: Function, buffers: tuple[Any, ...], *, masks: bool = False) -> Tensor:
    """Apply a ``score_mod`` to scores [b h q k], or compute where a ``mask_mod`` shows a key, [b h q k] of bool.

    Modes see one call, since what happens to single scores inside a vmap cannot be recorded.
    """
    if has_torch_function_unary(scores):
        result: Tensor = handle_torch_function(flex_scores, (scores,), scores, change, buffers, masks=masks)
        return result
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # noqa: PLC0415  # takes seconds

    score_axis = () if masks else (0,)
    for in_dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        change = torch.vmap(change, in_dims=(*score_axis, *in_dims, *(None for _ in buffers)), out_dims=0)
    numbers = [torch.arange(size, device=scores.device) for size in scores.shape]
    with TransformGetItemToIndex():
        changed: Tensor = change(*(() if masks else (scores,)), *numbers, *buffers)
    return changed.expand(scores.shape)


def _einsum(equation: Any, *operands: Any) -> Tensor | None:
    """Compute a product of two tensors as a matrix product; None for any other einsum.

    The left operand is the one whose free axis comes first in the result: the query, or the probabilities.
    """
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation or "->" not in equation:
        return None
    inputs, out = equation.replace(" ", "").split("->")
    left, right = inputs.split(",")
    free = [[letter for letter in axes if letter not in other] for axes, other in ((left, right), (right, left))]
    summed = [letter for letter in left if letter in right and letter not in out]
    if any(len(set(axes)) < len(axes) for axes in (left, right)) or sorted(out) != sorted({*left, *right} - {*summed}):
        return None
    if (len(free[0]), len(free[1]), len(summed)) != (1, 1, 1):
        return None
    first, second = operands
    if first.shape[left.index(summed[0])] != second.shape[right.index(summed[0])]:  # one of them is broadcast
        return None
    if out.index(free[1][0]) < out.index(free[0][0]):
        left, right, free, first, second = right, left, free[::-1], second, first
    batch = [letter for letter in out if letter in left and letter in right]
    product = torch.matmul(
        _permuted(first, left, [*batch, free[0][0], summed[0]]),
        _permuted(second, right, [*batch, summed[0], free[1][0]]),
    )
    return _permuted(product, "".join([*batch, free[0][0], free[1][0]]), list(out))


def _permuted(tensor: Tensor, axes: str, order: list[str]) -> Tensor:
    places = [axes.index(letter) for letter in order]
    return tensor if places == sorted(places) else tensor.permute(places)


def _baddbmm(bias: Tensor, first: Tensor, second: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = torch.bmm(first, second)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


class Softmaxes:
    """Recognises a softmax that is written out, by the calls that lead to it."""

    def __init__(self) -> None:
        self._seen: dict[Kind, Any] = {}  # tensor -> its operands; torch does not type these dictionaries

    def see(self, func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note a call."""
        kind = kind_of(func)
        if not isinstance(result, Tensor) or not args:
            return
        match kind:
            case Kind.EXP:
                self._keep(kind, result, args[0])
            case Kind.TOTAL | Kind.LOG_SUM_EXP | Kind.LOG_SOFTMAX:
                dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
                dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
                if isinstance(dim, int):
                    self._keep(kind, result, (args[0], dim))
            case Kind.DIFFERENCE:
                operands = self._known(Kind.LOG_SUM_EXP, args[1] if len(args) > 1 else None)
                if operands is not None and operands[0] is args[0]:
                    self._keep(Kind.LOG_SOFTMAX, result, operands)

    def recognised(self, func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, int] | None:
        """Return the scores and the axis of the softmax whose last step a call is; None where it is none."""
        kind = kind_of(func)
        if kind is Kind.EXP and args:
            recognised: tuple[Tensor, int] | None = self._known(Kind.LOG_SOFTMAX, args[0])
            return recognised
        if kind is not Kind.QUOTIENT or len(args) != 2 or kwargs:
            return None
        exp, total = self._known(Kind.EXP, args[0]), self._known(Kind.TOTAL, args[1])
        same = exp is not None and total is not None and self._known(Kind.EXP, total[0]) is exp
        return (exp, total[1]) if same else None

    def _keep(self, kind: Kind, result: Tensor, operands: object) -> None:
        self._seen.setdefault(kind, WeakTensorKeyDictionary())[result] = operands

    def _known(self, kind: Kind, tensor: object) -> Any:  # what was kept
        return self._seen[kind].get(tensor) if kind in self._seen and isinstance(tensor, Tensor) else None
