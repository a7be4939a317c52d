"""What the steps of a model that runs do to attention's scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from porting.causes.events import Scores
from porting.tracing.calls import Kind, kind_of

SAME: set[Callable[..., Any]] = {
    Tensor.to,
    Tensor.float,
    Tensor.double,
    Tensor.contiguous,
    Tensor.type_as,
    F.dropout,
    F.linear,
}
VIEWS: set[Callable[..., Any]] = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten, torch.unflatten}
BEND: set[Callable[..., Any]] = {torch.tanh, Tensor.tanh, F.tanh}


def stepped(scores: Scores, func: Callable[..., Any], rest: list[Any], result: Tensor) -> Scores | None:
    """The scores after a step that gives ``result``, None when it is no step that attention takes."""
    kind, other = kind_of(func), rest[0] if rest else None
    if kind in (Kind.TIMES, Kind.QUOTIENT) and isinstance(other, int | float):
        return scores.times(other if kind is Kind.TIMES else 1 / other)
    if func in BEND and scores.bias is None and not scores.cap:
        return replace(scores, cap=1.0)
    if kind is Kind.SUM and isinstance(other, Tensor):
        return scores.added(other)
    if kind is Kind.FILL and isinstance(other, Tensor):
        return scores.closed(~other)
    if func in VIEWS and result.shape[-2:] == (scores.query.shape[-2], scores.key.shape[-2]):
        return scores.viewed(result.shape)
    shifts = kind is Kind.DIFFERENCE and isinstance(other, Tensor) and other.shape[-1:] == (1,)  # a row by one number
    return scores if shifts or func in SAME else None
