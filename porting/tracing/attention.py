"""Attention in one spelling, whatever a model calls to compute it: products, masks and a softmax.

This is the one place that knows attention's kernels and their arguments.  Whoever looks at attention enters
:class:`WrittenOut` inside of its own mode, and is then shown ``query @ key.mT``, what is done to the scores,
a softmax, and ``probabilities @ value``, each a call.  What is written out:

- ``scaled_dot_product_attention``, with any mask, ``is_causal``, ``scale`` and ``enable_gqa``;
- ``flex_attention``, with any ``score_mod`` and ``block_mask``;
- ``torch.nn.MultiheadAttention`` and what has it inside, such as ``torch.nn.TransformerEncoderLayer``;
- ``einsum`` of two operands with one axis that is summed over, as ``bqhd,bkhd->bhqk``, and ``baddbmm``;
- ``exp(x) / exp(x).sum()``, ``exp(x - logsumexp(x))`` and ``exp(log_softmax(x))``, which are a softmax.

Not seen: kernels that are no part of torch (xformers, flash-attn), those within a vmap or of nested tensors, an einsum
whose products have several free axes, as those of grouped queries, and a softmax whose steps work in place or that adds
a number to the sum.  Weights that a ``score_mod`` reads are not followed: what it adds counts as a constant.
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
"""What computes scores and probabilities and shows neither."""


class WrittenOut(FunctionMode):
    """Each attention within it is made of products, masks and a softmax, which the modes outside of it see.

    It is a mode because a kernel that was imported by name, or is called by torch itself, is met nowhere else.

    Args:
        by_heads: ``torch.nn.MultiheadAttention`` projects query, key and value each by itself, and has heads of
            [b h s d] always; torch projects them at once, and has [(b h) s d] where it returns its weights.
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
        softmax = self._softmaxes.found(func, args, kwargs)
        if softmax is not None:
            scores, dim = softmax
            return scores.softmax(dim)
        result = func(*args, **kwargs)
        self._softmaxes.see(func, args, kwargs, result)
        return result


def whole(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether all tensors that a kernel is given have one size along each axis, and no vmap shows a slice of them."""
    return all(is_whole(argument) for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor))


def is_whole(value: Tensor) -> bool:
    """The same of one tensor."""
    return not (is_functorch_wrapped_tensor(value) or value.is_nested or value.layout is not torch.strided)


def written_out(
    func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, by_heads: bool = False, dropout: bool = True
) -> Any:  # what the kernel gives
    """What one of the :data:`KERNELS` gives, computed by calls that modes see.

    Args:
        func, args, kwargs: the call.
        by_heads: see :class:`WrittenOut`.
        dropout: with the dropout that the call asks for.
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
    """The scores that ``scaled_dot_product_attention`` computes from these of its arguments, [... q k].

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
    """``scaled_dot_product_attention``."""
    probabilities = _shares(attention_scores(query, key, attn_mask, is_causal, scale, enable_gqa))
    if enable_gqa:
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    if dropout and dropout_p:
        probabilities = F.dropout(probabilities, dropout_p)
    return torch.matmul(probabilities, value)


def _shares(scores: Tensor) -> Tensor:
    """The softmax of a kernel: a row in which every key is masked, which gives NaN, is 0."""
    probabilities = scores.softmax(-1)
    empty = torch.isneginf(scores).all(-1, keepdim=True)
    return probabilities.masked_fill(empty, 0.0) if bool(empty.any()) else probabilities


def _multi_head(*args: Any, by_heads: bool, dropout: bool, **kwargs: Any) -> Any:  # torch's own signature
    """``torch.nn.MultiheadAttention``: torch's own code for it, whose calls no mode is shown otherwise."""
    given = dict(zip(_MULTI_HEAD, args, strict=False)) | kwargs
    if not dropout:
        given["training"] = False
    if not by_heads:
        return _opened()(**given)
    if not given.get("need_weights", True):
        return _opened(_in_projection_packed=_projected)(**given)
    weighed: list[Tensor] = []

    def attend(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, causal: bool
    ) -> Tensor:
        probabilities = attention_scores(query, key, mask, causal).softmax(-1)
        weighed.append(F.dropout(probabilities, dropout_p) if dropout_p else probabilities)
        return torch.matmul(weighed[0], value)

    given |= {"need_weights": False, "is_causal": False}
    context, _ = _opened(_in_projection_packed=_projected, scaled_dot_product_attention=attend)(**given)
    weights = weighed[0].mean(1) if given.get("average_attn_weights", True) else weighed[0]
    return context, weights if given["query"].ndim > 2 else weights.squeeze(0)  # [s b e], or [s e] without a batch


def _projected(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, ...]:
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return tuple(map(F.linear, (query, key, value), weight.chunk(3), biases))


_TORCHS: Any = F.multi_head_attention_forward  # a function that is written in Python, and has its code and globals
_MULTI_HEAD = _TORCHS.__code__.co_varnames


def _opened(**others: Function) -> Function:
    """Torch's own multi-head attention, so that modes see the calls that it makes, and not it alone."""
    names = {**_TORCHS.__globals__, "has_torch_function": lambda given: False, **others}
    return FunctionType(_TORCHS.__code__, names, _TORCHS.__name__, _TORCHS.__defaults__)


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
    """``flex_attention``.  Source: ``math_attention`` in ``torch/_higher_order_ops/flex_attention.py``."""
    with torch._C.DisableTorchFunction():
        _, *others = func(query, key, value, score_mod, block_mask, scale, kernel_options, score_buffers, mask_buffers)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.matmul(query, key.transpose(-2, -1)) * scale
    modified = flex_scores(scores, score_mod, score_buffers)
    if not torch.equal(modified, scores):
        scores = scores + (modified - scores)  # as a sum, which is how a bias is known
    places = torch.zeros(scores.shape, device=scores.device)  # no scores: a mask is made of numbers alone
    allowed = flex_scores(places, block_mask[-1], mask_buffers, masks=True)
    if not bool(allowed.all()):
        scores = scores.masked_fill(allowed.logical_not(), -torch.inf)
    return torch.matmul(_shares(scores), value), *others


def flex_scores(scores: Tensor, change: Function, buffers: tuple[Any, ...], *, masks: bool = False) -> Tensor:
    """What a ``score_mod`` makes of scores [b h q k], or where a ``mask_mod`` lets a query look, [b h q k] of bool.

    Modes see it as one call: what it does with each score by itself, inside of a vmap, is nothing to record.
    """
    if has_torch_function_unary(scores):
        found: Tensor = handle_torch_function(flex_scores, (scores,), scores, change, buffers, masks=masks)
        return found
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # noqa: PLC0415  # takes seconds

    given = () if masks else (0,)
    for places in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        change = torch.vmap(change, in_dims=(*given, *places, *(None for _ in buffers)), out_dims=0)
    numbers = [torch.arange(size, device=scores.device) for size in scores.shape]
    with TransformGetItemToIndex():
        made: Tensor = change(*(() if masks else (scores,)), *numbers, *buffers)
    return made.expand(scores.shape)


def _einsum(equation: Any, *operands: Any) -> Tensor | None:
    """A product of two tensors as a matrix product; None for any other einsum.

    The operand whose free axis comes first in the result is the left one: the query, and the probabilities.
    """
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation or "->" not in equation:
        return None
    inputs, out = equation.replace(" ", "").split("->")
    left, right = inputs.split(",")
    free = [[letter for letter in axes if letter not in other] for axes, other in ((left, right), (right, left))]
    inner = [letter for letter in left if letter in right and letter not in out]
    if any(len(set(axes)) < len(axes) for axes in (left, right)) or sorted(out) != sorted({*left, *right} - {*inner}):
        return None
    if (len(free[0]), len(free[1]), len(inner)) != (1, 1, 1):
        return None
    first, second = operands
    if first.shape[left.index(inner[0])] != second.shape[right.index(inner[0])]:  # one of them is broadcast
        return None
    if out.index(free[1][0]) < out.index(free[0][0]):
        left, right, free, first, second = right, left, free[::-1], second, first
    batch = [letter for letter in out if letter in left and letter in right]
    made = torch.matmul(
        _laid(first, left, [*batch, free[0][0], inner[0]]), _laid(second, right, [*batch, inner[0], free[1][0]])
    )
    return _laid(made, "".join([*batch, free[0][0], free[1][0]]), list(out))


def _laid(tensor: Tensor, axes: str, order: list[str]) -> Tensor:
    places = [axes.index(letter) for letter in order]
    return tensor if places == sorted(places) else tensor.permute(places)


def _baddbmm(bias: Tensor, first: Tensor, second: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = torch.bmm(first, second)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


class Softmaxes:
    """Knows a softmax that is written out, by the calls that lead to it."""

    def __init__(self) -> None:
        self._seen: dict[Kind, Any] = {}  # tensor -> what it was made of; torch does not type these dictionaries

    def see(self, func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """A call was made."""
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
                of = self._known(Kind.LOG_SUM_EXP, args[1] if len(args) > 1 else None)
                if of is not None and of[0] is args[0]:
                    self._keep(Kind.LOG_SOFTMAX, result, of)

    def found(self, func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, int] | None:
        """The scores and the axis of the softmax that a call is the last step of; None where it is none."""
        kind = kind_of(func)
        if kind is Kind.EXP and args:
            found: tuple[Tensor, int] | None = self._known(Kind.LOG_SOFTMAX, args[0])
            return found
        if kind is not Kind.QUOTIENT or len(args) != 2 or kwargs:
            return None
        exp, total = self._known(Kind.EXP, args[0]), self._known(Kind.TOTAL, args[1])
        same = exp is not None and total is not None and self._known(Kind.EXP, total[0]) is exp
        return (exp, total[1]) if same else None

    def _keep(self, kind: Kind, result: Tensor, made_of: object) -> None:
        self._seen.setdefault(kind, WeakTensorKeyDictionary())[result] = made_of

    def _known(self, kind: Kind, tensor: object) -> Any:  # what was kept
        return self._seen[kind].get(tensor) if kind in self._seen and isinstance(tensor, Tensor) else None
