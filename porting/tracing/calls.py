"""The kinds of torch functions, and the order of their arguments: one table for all code that observes calls.

A model may call the same function in several ways: ``F.softmax(scores, -1)``, ``F.softmax(dim=-1, input=scores)``,
``scores.softmax(-1)``. :func:`kind_of` returns the kind of function, and :func:`in_order` puts the arguments in the
order of its signature.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._pytree import tree_map

Function = Callable[..., Any]


class Kind(StrEnum):
    """The role of a torch function in a model."""

    LINEAR = "linear"
    NORM = "norm"  # a layer norm
    RMS = "rms"  # an RMSNorm
    EMBEDDING = "embedding"
    ACTIVATION = "activation"
    DROPOUT = "dropout"
    POOL = "pool"  # a part of a tensor
    SUM = "sum"
    DIFFERENCE = "difference"
    TIMES = "times"
    QUOTIENT = "quotient"
    FILL = "fill"
    PRODUCT = "product"  # of two tensors, such as query and key
    BIASED_PRODUCT = "biased product"
    EINSUM = "einsum"
    EXP = "exp"
    TOTAL = "total"
    LOG_SUM_EXP = "log sum exp"
    SOFTMAX = "softmax"
    LOG_SOFTMAX = "log softmax"
    ATTENTION = "attention"  # of query, key and value
    MULTI_HEAD = "multi-head attention"  # with its projections
    FLEX_ATTENTION = "flex attention"
    SCORES = "scores"  # attention's softmax and product, which no function is by itself
    CONTEXT = "context"


_TABLE: tuple[tuple[Kind, str, tuple[Function, ...]], ...] = (
    (Kind.LINEAR, "input weight bias", (F.linear,)),
    (Kind.NORM, "input normalized_shape weight bias eps", (F.layer_norm, torch.layer_norm)),
    (Kind.RMS, "input normalized_shape weight eps", (F.rms_norm, torch.rms_norm)),
    (Kind.EMBEDDING, "input weight", (F.embedding,)),
    (Kind.ACTIVATION, "input", (F.gelu, F.relu, F.silu, F.tanh, torch.tanh, torch.relu, Tensor.tanh, Tensor.relu)),
    (Kind.DROPOUT, "input p training inplace", (F.dropout,)),
    (Kind.DROPOUT, "input p train", (torch.dropout,)),
    (Kind.SUM, "input other", (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)),
    (Kind.TIMES, "input other", (torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)),
    (Kind.QUOTIENT, "input other", (torch.div, torch.true_divide, Tensor.div, Tensor.true_divide, Tensor.__truediv__)),
    (Kind.FILL, "input mask value", (torch.masked_fill, Tensor.masked_fill)),
    (Kind.POOL, "input index", (Tensor.__getitem__,)),
    (Kind.POOL, "input dim index", (Tensor.select,)),
    (Kind.PRODUCT, "input other", (torch.matmul, Tensor.matmul, Tensor.__matmul__)),
    (Kind.PRODUCT, "input mat2", (torch.bmm, Tensor.bmm)),
    (Kind.BIASED_PRODUCT, "input batch1 batch2", (torch.baddbmm, Tensor.baddbmm)),
    (Kind.EINSUM, "", (torch.einsum, torch.functional.einsum)),
    (Kind.SOFTMAX, "input dim _stacklevel dtype", (F.softmax,)),
    (Kind.SOFTMAX, "input dim dtype", (torch.softmax, Tensor.softmax, torch.special.softmax)),
    (Kind.LOG_SOFTMAX, "input dim _stacklevel dtype", (F.log_softmax,)),
    (Kind.LOG_SOFTMAX, "input dim dtype", (torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax)),
    (Kind.EXP, "input", (torch.exp, Tensor.exp)),
    (Kind.LOG_SUM_EXP, "input dim keepdim", (torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp)),
    (Kind.DIFFERENCE, "input other", (torch.sub, torch.subtract, Tensor.sub, Tensor.subtract, Tensor.__sub__)),
    (Kind.TOTAL, "input dim keepdim", (torch.sum, Tensor.sum)),
    (Kind.ATTENTION, "query key value attn_mask dropout_p is_causal", (F.scaled_dot_product_attention,)),
    (Kind.MULTI_HEAD, "", (F.multi_head_attention_forward,)),
)  # fmt: skip

_KINDS: Mapping[Function, Kind] = {function: kind for kind, _, functions in _TABLE for function in functions}
_NAMES: Mapping[Function, tuple[str, ...]] = {
    function: tuple(names.split()) for _, names, functions in _TABLE if names for function in functions
}


def kind_of(function: Function) -> Kind | None:
    """Return the kind of a torch function; None for any other function."""
    if isinstance(function, HigherOrderOperator):
        return Kind.FLEX_ATTENTION if function.__name__ == "flex_attention" else None
    return _KINDS.get(function)


def in_order(
    function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put a call's arguments in the order of the function's signature.

    Returns:
        The positional arguments, extended by named ones up to the first that is missing, and the remaining named ones.

    >>> in_order(F.softmax, (), {"dim": -1, "input": 7})
    ((7, -1), {})
    """
    rest = dict(kwargs)
    if not rest:
        return args, rest
    positional = list(args)
    for name in argument_names(function)[len(args) :]:
        if name not in rest:
            break
        positional.append(rest.pop(name))
    return tuple(positional), rest


def argument(
    function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, default: Any = None
) -> Any:  # whatever the function takes
    """Return an argument by its name, whether it was passed by position or by name."""
    place = argument_names(function).index(name) if name in argument_names(function) else len(args)
    return args[place] if place < len(args) else kwargs.get(name, default)


def changed(
    function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], **replacements: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace arguments of a call by name."""
    names = argument_names(function)[: len(args)]
    positional = [replacements.get(name, value) for name, value in zip(names, args, strict=False)]
    rest = {name: value for name, value in replacements.items() if name not in names}
    return (*positional, *args[len(names) :]), {**kwargs, **rest}


@cache
def argument_names(function: Function) -> tuple[str, ...]:
    """Return the names of the arguments that can be passed by position."""
    if function in _NAMES:
        return _NAMES[function]
    if not inspect.isfunction(inspect.unwrap(function)):  # a function written in C has no signature
        return ()
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return tuple(name for name, parameter in inspect.signature(function).parameters.items() if parameter.kind is either)


def tensors_in(tree: object) -> list[Tensor]:
    """Return the tensors in arguments or results of a torch function, in order.

    They may be in tuples, lists and dictionaries, in one another. Torch's own tree functions take several times as long
    as the small operations that are watched.

    >>> one, two = torch.zeros(1), torch.ones(1)
    >>> tensors_in(([one, 3], {"bias": two, "eps": None})) == [one, two]
    True
    """
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: object, found: list[Tensor]) -> None:
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    for part in parts:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, list | tuple | dict):
            _collect(part, found)


def with_leaves(change: Callable[[Any], Any], tree: Any) -> Any:  # arguments or results, whatever is in them
    """Replace what is in arguments or results of a torch function: torch's ``tree_map``, for less.

    It takes several times as long as the small operations that are watched.

    Args:
        change: is given all that is not a tuple, list or dictionary.

    >>> with_leaves(lambda leaf: leaf if leaf is None else leaf + 1, ([1, 3], {"bias": 2, "eps": None}))
    ([2, 4], {'bias': 3, 'eps': None})
    """
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([with_leaves(change, part) for part in tree])
    if kind is dict:
        return {name: with_leaves(change, part) for name, part in tree.items()}
    if kind is not torch.Size and isinstance(tree, tuple | list | dict | deque):  # named results, ordered dictionaries
        return tree_map(change, tree)
    return change(tree)
