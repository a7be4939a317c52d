"""Planting mistakes in attention: other scores, or another context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from porting.causes.events import Action, Event, Scores

NOT_APPLICABLE: Any = NotImplemented


def with_scores(change: Callable[[Scores], Tensor | None]) -> Action:
    """Replace the softmax by that of other scores.

    Args:
        change: the parts of the scores -> the masked scores, or None where the mistake does not apply.
    """

    def action(event: Event) -> Any:
        result = None if event.scores is None else change(event.scores)
        if result is None:
            return NOT_APPLICABLE
        return F.softmax(result, dim=-1)

    return action


def query_for_key(scores: Scores) -> Tensor | None:
    """Exchange query and key."""
    if scores.query.shape != scores.key.shape:
        return None
    return scores.masked((scores.key @ scores.query.mT) * scores.scale + (0 if scores.bias is None else scores.bias))


def product_times(factor: Callable[[Scores], float]) -> Callable[[Scores], Tensor | None]:
    """Multiply the product of query and key by a factor."""

    def change(scores: Scores) -> Tensor | None:
        return scores.masked(replace(scores, scale=scores.scale * factor(scores)).product())

    return change


def shown_keys(scores: Scores) -> Tensor | None:
    """Return the keys that any query sees, [... 1 k]; None where there is no padding, or no mask of its own."""
    if scores.allowed is None or scores.mixed:
        return None
    shown = scores.allowed.any(-2, keepdim=True)
    return None if bool(shown.all()) else shown


def lower_triangle(scores: Scores) -> Tensor:
    """Return where a key is not after the query, [q k] of bool."""
    return torch.ones(scores.query.shape[-2], scores.key.shape[-2]).tril().bool()


def is_causal(scores: Scores) -> bool:
    """Return whether no query sees later keys."""
    if scores.allowed is None or scores.query.shape[-2] != scores.key.shape[-2]:
        return False
    return not bool((scores.allowed & ~lower_triangle(scores)).any())


def hide_others(product: Tensor, shown: Tensor) -> Tensor:
    """Hide all keys that are not shown."""
    return torch.where(shown, product, torch.full_like(product, torch.finfo(product.dtype).min / 2))


def without_padding_mask(scores: Scores) -> Tensor | None:
    """Show padding."""
    if shown_keys(scores) is None or scores.allowed is None:
        return None
    if is_causal(scores):
        return hide_others(scores.product(), lower_triangle(scores))
    near = scores.allowed.flatten(0, -3).any(0) if scores.allowed.ndim > 2 else scores.allowed
    return hide_others(scores.product(), near)


def inverted_padding_mask(scores: Scores) -> Tensor | None:
    """Show only padding."""
    shown = shown_keys(scores)
    if shown is None:
        return None
    result = scores.product() + torch.where(shown, -1e4, 0.0)
    return hide_others(result, lower_triangle(scores)) if is_causal(scores) else result


def combined_with_mask(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Scores], Tensor | None]:
    """Multiply or add the mask as a number."""

    def change(scores: Scores) -> Tensor | None:
        shown = shown_keys(scores)
        if shown is None:
            return None
        result = combine(scores.product(), shown.to(scores.query.dtype))
        return hide_others(result, lower_triangle(scores)) if is_causal(scores) else result

    return change


def mask_on_queries(scores: Scores) -> Tensor | None:
    """Mask the rows of padding instead of the columns."""
    shown = shown_keys(scores)
    if shown is None or is_causal(scores) or scores.query.shape[-2] != scores.key.shape[-2]:
        return None
    return scores.product() + torch.where(shown, 0.0, -1e30).mT


def without_causal_mask(scores: Scores) -> Tensor | None:
    """Show later keys."""
    if not is_causal(scores) or scores.allowed is None:
        return None
    return hide_others(scores.product(), scores.allowed.any(-2, keepdim=True))


def with_causal_mask(scores: Scores) -> Tensor | None:
    """Hide later keys."""
    if is_causal(scores) or scores.query.shape[-2] != scores.key.shape[-2]:
        return None
    return hide_others(scores.masked(), lower_triangle(scores))


def mask_after_softmax(event: Event) -> Any:
    """Apply the mask to the probabilities."""
    scores = event.scores
    unmasked = None if scores is None else without_padding_mask(scores)
    shown = None if scores is None else shown_keys(scores)
    return NOT_APPLICABLE if unmasked is None or shown is None else unmasked.softmax(-1) * shown


def softmax_over(axis: int) -> Action:
    """Take the softmax over another axis; axis 1 is that of the heads, if there is one."""

    def action(event: Event) -> Any:
        scores = event.args[0] if event.scores is None else event.scores.masked()  # finite, so that no row is of NaN
        return NOT_APPLICABLE if scores.ndim < (4 if axis > 0 else -axis) else F.softmax(scores, dim=axis)

    return action


def mask_precedence(constant: float) -> Callable[[Scores], Tensor | None]:
    """Add ``1.0 - mask * -constant``, in which the parentheses are missing."""

    def change(scores: Scores) -> Tensor | None:
        shown = shown_keys(scores)
        if shown is None:
            return None
        result = scores.product() + (1.0 - shown.to(scores.query.dtype) * -constant)
        return hide_others(result, lower_triangle(scores)) if is_causal(scores) else result

    return change


def without_score_bias(scores: Scores) -> Tensor | None:
    """Leave the learned bias out."""
    if scores.bias is None or not scores.bias.any() or has_linear_bias(scores):
        return None
    return scores.masked(scores.query @ scores.key.mT * scores.scale)


def has_linear_bias(scores: Scores) -> bool:
    """Return whether the bias is linear: it rises by the same number from each key to the next."""
    bias = scores.bias
    if bias is None or bias.ndim < 3 or bias.shape[-3] < 2 or bias.shape[-1] < 3 or scores.mixed:
        return False
    steps = bias[..., -1, :].diff(dim=-1)
    return bool(steps.any()) and torch.allclose(steps, steps[..., :1].expand_as(steps), rtol=1e-4, atol=1e-6)


def linear_bias_times(factor: float) -> Callable[[Scores], Tensor | None]:
    """Multiply the linear bias by a factor."""

    def change(scores: Scores) -> Tensor | None:
        if scores.bias is None or not has_linear_bias(scores):
            return None
        return scores.masked(scores.query @ scores.key.mT * scores.scale + factor * scores.bias)

    return change


def with_cap(scores: Scores) -> Tensor | None:
    """Cap the scores softly at 2."""
    return None if scores.cap else scores.masked(2.0 * torch.tanh(scores.product() / 2.0))


def without_cap(scores: Scores) -> Tensor | None:
    """Leave the soft cap out."""
    return scores.masked(replace(scores, cap=0.0).product()) if scores.cap else None


def tiled(with_context: Tensor) -> Tensor | None:
    """Return heads [b h s d] that were repeated one by one as if repeated as a whole; None where none was repeated."""
    count = with_context.shape[1] if with_context.ndim == 4 else 0
    for product_times in (divisor for divisor in range(2, count) if count % divisor == 0):
        unrepeated = with_context[:, ::product_times]
        if torch.equal(with_context, unrepeated.repeat_interleave(product_times, 1)):
            return unrepeated.repeat(1, product_times, 1, 1)
    return None


def keys_tiled(scores: Scores) -> Tensor | None:
    """Use the keys of other groups."""
    key = tiled(scores.key)
    return None if key is None else scores.masked(replace(scores, key=key).product())


def values_tiled(event: Event) -> Any:
    """Use the values of other groups."""
    value = tiled(event.args[1])
    return NOT_APPLICABLE if value is None else event.args[0] @ value


def with_context(change: Callable[[Tensor], Tensor]) -> Action:
    """Replace the context, [b h s d]."""

    def action(event: Event) -> Any:
        result = event.run()
        return NOT_APPLICABLE if result.ndim != 4 else change(result)

    return action


def not_transposed(context: Tensor) -> Tensor:
    """Return the context that, joined rightly, equals a reshape without transposition."""
    batch, count, length, size = context.shape
    return context.reshape(batch, length, count, size).transpose(1, 2)


def merged_wrongly(context: Tensor) -> Tensor:
    """Return the context that, joined as (h d), has the channels in the order (d h)."""
    batch, count, length, size = context.shape
    mixed = context.permute(0, 2, 3, 1).reshape(batch, length, count, size)
    return mixed.transpose(1, 2)
