"""Mistakes in attention, as they are planted: other scores, and another context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from porting.causes.events import Action, Event, Scores

SKIP: Any = NotImplemented


def with_scores(change: Callable[[Scores], Tensor | None]) -> Action:
    """The softmax of other scores."""

    def action(event: Event) -> Any:
        made = None if event.scores is None else change(event.scores)
        if made is None:
            return SKIP
        return F.softmax(made, dim=-1)

    return action


def query_for_key(scores: Scores) -> Tensor | None:
    """Rows for columns."""
    if scores.query.shape != scores.key.shape:
        return None
    return scores.masked((scores.key @ scores.query.mT) * scores.scale + (0 if scores.bias is None else scores.bias))


def times(factor: Callable[[Scores], float]) -> Callable[[Scores], Tensor | None]:
    """The product by a factor."""

    def change(scores: Scores) -> Tensor | None:
        return scores.masked(replace(scores, scale=scores.scale * factor(scores)).product())

    return change


def columns(scores: Scores) -> Tensor | None:
    """The keys that any query looks at, [... 1 k]; None where there is no padding or no mask of its own."""
    if scores.allowed is None or scores.mixed:
        return None
    kept = scores.allowed.any(-2, keepdim=True)
    return None if bool(kept.all()) else kept


def triangle(scores: Scores) -> Tensor:
    """No looking ahead, [q k]."""
    return torch.ones(scores.query.shape[-2], scores.key.shape[-2]).tril().bool()


def ahead(scores: Scores) -> bool:
    """Whether no query looks ahead."""
    if scores.allowed is None or scores.query.shape[-2] != scores.key.shape[-2]:
        return False
    return not bool((scores.allowed & ~triangle(scores)).any())


def shut(scores: Scores, made: Tensor, open_: Tensor) -> Tensor:
    """Nothing but what is open."""
    return torch.where(open_, made, torch.full_like(made, torch.finfo(made.dtype).min / 2))


def unpadded(scores: Scores) -> Tensor | None:
    """The padding is looked at."""
    if columns(scores) is None or scores.allowed is None:
        return None
    if ahead(scores):
        return shut(scores, scores.product(), triangle(scores))
    near = scores.allowed.flatten(0, -3).any(0) if scores.allowed.ndim > 2 else scores.allowed
    return shut(scores, scores.product(), near)


def upside_down(scores: Scores) -> Tensor | None:
    """The padding, and nothing else."""
    kept = columns(scores)
    if kept is None:
        return None
    made = scores.product() + torch.where(kept, -1e4, 0.0)
    return shut(scores, made, triangle(scores)) if ahead(scores) else made


def by_mask(join: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Scores], Tensor | None]:
    """The mask as a number that is multiplied or added."""

    def change(scores: Scores) -> Tensor | None:
        kept = columns(scores)
        if kept is None:
            return None
        made = join(scores.product(), kept.to(scores.query.dtype))
        return shut(scores, made, triangle(scores)) if ahead(scores) else made

    return change


def rows_masked(scores: Scores) -> Tensor | None:
    """The padding's rows."""
    kept = columns(scores)
    if kept is None or ahead(scores) or scores.query.shape[-2] != scores.key.shape[-2]:
        return None
    return scores.product() + torch.where(kept, 0.0, -1e30).mT


def both_ways(scores: Scores) -> Tensor | None:
    """Looking ahead."""
    if not ahead(scores) or scores.allowed is None:
        return None
    return shut(scores, scores.product(), scores.allowed.any(-2, keepdim=True))


def one_way(scores: Scores) -> Tensor | None:
    """Not looking ahead."""
    if ahead(scores) or scores.query.shape[-2] != scores.key.shape[-2]:
        return None
    return shut(scores, scores.masked(), triangle(scores))


def masked_late(event: Event) -> Any:
    """The mask on the probabilities."""
    scores = event.scores
    free = None if scores is None else unpadded(scores)
    kept = None if scores is None else columns(scores)
    return SKIP if free is None or kept is None else free.softmax(-1) * kept


def softmax_over(axis: int) -> Action:
    """Another axis; axis 1 is that of the heads, where there is one."""

    def action(event: Event) -> Any:
        scores = event.args[0] if event.scores is None else event.scores.masked()  # finite, so that no row is of NaN
        return SKIP if scores.ndim < (4 if axis > 0 else -axis) else F.softmax(scores, dim=axis)

    return action


def shifted(constant: float) -> Callable[[Scores], Tensor | None]:
    """``1.0 - mask * -constant``."""

    def change(scores: Scores) -> Tensor | None:
        kept = columns(scores)
        if kept is None:
            return None
        made = scores.product() + (1.0 - kept.to(scores.query.dtype) * -constant)
        return shut(scores, made, triangle(scores)) if ahead(scores) else made

    return change


def unbiased(scores: Scores) -> Tensor | None:
    """No learned bias."""
    if scores.bias is None or not scores.bias.any() or rises(scores):
        return None
    return scores.masked(scores.query @ scores.key.mT * scores.scale)


def rises(scores: Scores) -> bool:
    """Whether the bias is linear: it rises by the same from each key to the next."""
    bias = scores.bias
    if bias is None or bias.ndim < 3 or bias.shape[-3] < 2 or bias.shape[-1] < 3 or scores.mixed:
        return False
    steps = bias[..., -1, :].diff(dim=-1)
    return bool(steps.any()) and torch.allclose(steps, steps[..., :1].expand_as(steps), rtol=1e-4, atol=1e-6)


def sloped(factor: float) -> Callable[[Scores], Tensor | None]:
    """The linear bias by a factor."""

    def change(scores: Scores) -> Tensor | None:
        if scores.bias is None or not rises(scores):
            return None
        return scores.masked(scores.query @ scores.key.mT * scores.scale + factor * scores.bias)

    return change


def capped(scores: Scores) -> Tensor | None:
    """A soft cap of 2."""
    return None if scores.cap else scores.masked(2.0 * torch.tanh(scores.product() / 2.0))


def uncapped(scores: Scores) -> Tensor | None:
    """No soft cap."""
    return scores.masked(replace(scores, cap=0.0).product()) if scores.cap else None


def shared(heads: Tensor) -> Tensor | None:
    """Heads [b h s d] of which each was repeated, repeated as a whole; None where none was."""
    count = heads.shape[1] if heads.ndim == 4 else 0
    for times in (divisor for divisor in range(2, count) if count % divisor == 0):
        alone = heads[:, ::times]
        if torch.equal(heads, alone.repeat_interleave(times, 1)):
            return alone.repeat(1, times, 1, 1)
    return None


def keys_tiled(scores: Scores) -> Tensor | None:
    """The keys of other groups."""
    key = shared(scores.key)
    return None if key is None else scores.masked(replace(scores, key=key).product())


def values_tiled(event: Event) -> Any:
    """The values of other groups."""
    value = shared(event.args[1])
    return SKIP if value is None else event.args[0] @ value


def heads(change: Callable[[Tensor], Tensor]) -> Action:
    """The context [b h s d], so that what is then made of it is otherwise."""

    def action(event: Event) -> Any:
        made = event.run()
        return SKIP if made.ndim != 4 else change(made)

    return action


def untransposed(context: Tensor) -> Tensor:
    """What, put together rightly, is what reshaping at once would have given."""
    batch, count, length, size = context.shape
    return context.reshape(batch, length, count, size).transpose(1, 2)


def shuffled(context: Tensor) -> Tensor:
    """What, put together as (h d), is (d h)."""
    batch, count, length, size = context.shape
    mixed = context.permute(0, 2, 3, 1).reshape(batch, length, count, size)
    return mixed.transpose(1, 2)
