"""Mistakes in attention, as they are planted: other scores, and another context."""

from __future__ import annotations

from collections.abc import Callable
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
        made = scores.query @ scores.key.mT * (scores.scale * factor(scores))
        return scores.masked(made if scores.bias is None else made + scores.bias)

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
    """Another axis."""
    return lambda event: SKIP if event.args[0].ndim < -axis else F.softmax(event.args[0], dim=axis)


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
    if scores.bias is None or not scores.bias.any():
        return None
    return scores.masked(scores.query @ scores.key.mT * scores.scale)


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
