"""Mixtures of experts computed densely: a pass makes the same calls whatever experts the tokens are sent to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

FIELDS = ("num_experts", "down_proj", "has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "_apply_gate")
"""Attributes of experts in transformers whose implementation can be chosen (its ``use_experts_implementation``)."""


@contextmanager
def dense_experts(model: nn.Module, tokens: int, limit: int) -> Iterator[bool]:
    """A context in which each expert of a mixture takes all tokens, and those that are not sent to it count nothing.

    Args:
        tokens: how many tokens it is given.
        limit: bytes of a tensor that this makes; nothing is changed where it may be larger.

    Yields:
        Whether anything was changed.
    """
    found: list[Any] = [part for part in model.modules() if all(hasattr(part, name) for name in FIELDS)]
    widest = max((_up(part).nbytes * tokens // max(min(_up(part).shape[1:]), 1) for part in found), default=0)
    if widest > limit:
        found = []
    try:
        for part in found:
            part.forward = partial(_all_experts, part)
        yield bool(found)
    finally:
        for part in found:
            del part.forward


def _up(part: Any) -> Tensor:  # as dense_experts has found it
    weight: Tensor = part.gate_up_proj if part.has_gate else part.up_proj
    return weight


def _all_experts(part: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' sum.

    Args:
        part: the experts, with weights [n o i], or [n i o] where they are transposed.
        hidden_states: [t i].
        top_k_index, top_k_weights: the experts that each token is sent to and their shares, [t k].

    Returns:
        [t i].
    """
    name = "gate_up_proj" if part.has_gate else "up_proj"
    inner = _linear(part, name, hidden_states.expand(part.num_experts, *hidden_states.shape))
    inner = part._apply_gate(inner) if part.has_gate else part.act_fn(inner)  # for subclasses
    outer = _linear(part, "down_proj", inner)
    if part.has_post_expert_norm:
        outer = part.post_expert_norm(outer)
    shares = top_k_weights.new_zeros(len(hidden_states), part.num_experts).scatter(1, top_k_index, top_k_weights)
    return (outer * shares.T[..., None].to(outer.dtype)).sum(0)


def _linear(part: Any, name: str, x: Tensor) -> Tensor:
    """The linear layers of all experts: [n t i] -> [n t o]."""
    weight: Tensor = getattr(part, name)
    found = torch.bmm(x, weight if part.is_transposed else weight.mT)
    return found + getattr(part, f"{name}_bias")[:, None] if part.has_bias else found
