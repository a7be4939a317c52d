"""What the steps of a model that runs do to attention's scores."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from porting.causes.events import Scores

SUM: set[Callable[..., Any]] = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
BEND: set[Callable[..., Any]] = {torch.tanh, Tensor.tanh, F.tanh}
SAME: set[Callable[..., Any]] = {
    Tensor.to,
    Tensor.float,
    Tensor.double,
    Tensor.contiguous,
    Tensor.type_as,
    F.dropout,
    F.linear,
}
_TIMES: set[Callable[..., Any]] = {Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul}
_OVER: set[Callable[..., Any]] = {Tensor.div, Tensor.__truediv__, torch.div}
_FILL: set[Callable[..., Any]] = {Tensor.masked_fill, torch.masked_fill}


def is_product(equation: Any, *operands: Any) -> bool:
    """Whether an einsum is attention's: ``bhqd,bhkd->bhqk`` or ``bhqk,bhkd->bhqd``."""
    found = re.fullmatch(r"(\w+)(\w)(\w),\1(\w)(\w)->\1\2(\w)", str(equation).replace(" ", ""))
    if found is None or len(operands) != 2:
        return False
    inner, one, two, out = found.group(3, 4, 5, 6)
    return (two == inner and out == one) or (one == inner and out == two)


def stepped(scores: Scores, func: Callable[..., Any], rest: list[Any]) -> Scores | None:
    """The scores after a step, None when it is no step that attention takes."""
    if func in _TIMES and rest and isinstance(rest[0], int | float):
        return scores.times(rest[0])
    if func in _OVER and rest and isinstance(rest[0], int | float):
        return scores.times(1 / rest[0])
    if func in BEND and scores.bias is None and not scores.cap:
        return replace(scores, cap=1.0)
    if func in SUM and rest and isinstance(rest[0], Tensor):
        return scores.added(rest[0])
    if func in _FILL and rest and isinstance(rest[0], Tensor):
        return scores.closed(~rest[0])
    return scores if func in SAME else None


def mask_of(padding: Tensor | None, mask: Tensor | None, heads: Tensor) -> Tensor | None:
    """One additive mask [b 1 q k] of the two that ``torch.nn.MultiheadAttention`` takes, True or low = ignore."""
    found: Tensor | None = None
    for one, shape in ((padding, (heads.shape[0], 1, 1, -1)), (mask, None)):
        if one is None:
            continue
        low = torch.finfo(heads.dtype).min / 4
        added = torch.zeros(one.shape, dtype=heads.dtype).masked_fill(one, low) if one.dtype == torch.bool else one
        if shape is not None:
            added = added.view(shape)
        elif added.ndim == 3:  # [(b h) q k]
            added = added.view(heads.shape[0], heads.shape[1], *added.shape[1:])
        found = added if found is None else found + added
    return None if found is None else found.clamp_min(torch.finfo(heads.dtype).min / 2)
