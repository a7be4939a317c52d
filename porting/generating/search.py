"""Searching for a continuation of a row of tokens: the likeliest token each time, a drawn one, or several beams.

The whole row is run at each step, so a model needs no cache.  With the same settings the tokens are those of
transformers' ``generate``.  Papers: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration" (top-p);
Fan et al. 2018, "Hierarchical Neural Story Generation" (top-k); Wu et al. 2016, section 7 (beams, length penalty).

>>> def always_one_more(rows):
...     return torch.nn.functional.one_hot((rows[:, -1] + 1) % 5, 5).float() * 9
>>> found = one_by_one(always_one_more, [0], Settings(ends=(4,)), longest=8, draw=likeliest, top=1)
>>> [step.token for step in found.steps]
[1, 2, 3, 4]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from porting.generating.settings import Settings

NextLogits = Callable[[Tensor], Tensor]
"""A function of rows of tokens [n t]: the logits of the token that follows each, [n v]."""

Draw = Callable[[Tensor], tuple[Tensor, int]]
"""A function of scores [v]: the probabilities [v], float64, and the token that was chosen by them."""


@dataclass(frozen=True)
class Step:
    """One token that was added.

    Attributes:
        probability: what it was chosen with, 0 to 1.
        best: the ids of the likeliest tokens there and their probabilities, the likeliest first.
    """

    token: int
    probability: float
    best: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Continuation:
    """The tokens that were added to a row.

    Attributes:
        score: the log-probability of all of them, of a beam divided by its length to the power of the length penalty.
    """

    steps: tuple[Step, ...] = ()
    score: float = 0.0

    @property
    def tokens(self) -> list[int]:
        """Their ids."""
        return [one.token for one in self.steps]


def likeliest(scores: Tensor) -> tuple[Tensor, int]:
    """The token of the highest score."""
    return scores.double().softmax(-1), int(scores.argmax())


def sampler(
    *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None, generator: torch.Generator
) -> Draw:
    """Draw from the distribution that the scores become.

    Args:
        temperature: the scores are divided by it.
        top_k: only so many of the likeliest tokens are drawn.
        top_p: only the likeliest tokens are drawn whose probabilities first sum to this much.
        generator: of the random numbers.
    """

    def draw(scores: Tensor) -> tuple[Tensor, int]:
        scores = scores.double()
        scores = (scores - scores.max()) / temperature  # the likeliest one stays 0, however small the temperature is
        if top_k is not None:
            scores = scores.masked_fill(scores < scores.topk(min(top_k, len(scores))).values[-1], -torch.inf)
        if top_p is not None:
            ordered, places = scores.sort(descending=True)
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            scores = scores.index_fill(0, places[before >= top_p], -torch.inf)
        probabilities = scores.softmax(-1)
        return probabilities, int(torch.multinomial(probabilities, 1, generator=generator))

    return draw


def one_by_one(
    next_logits: NextLogits, row: Sequence[int], settings: Settings, *, longest: int, draw: Draw, top: int
) -> Continuation:
    """Add one token after another.

    Args:
        next_logits: runs the model.
        settings: rules, and the tokens that end the row.
        draw: chooses each: :func:`likeliest` or a :func:`sampler`.
        top: how many of the likeliest tokens each step keeps.
    """
    found = Continuation()
    while len(row) + len(found.steps) < longest:
        rows = torch.tensor([[*row, *found.tokens]])
        scores = settings.ruled(rows, next_logits(rows), prompt=len(row), longest=longest)[0]
        if not bool((scores > -torch.inf).any()):  # the rules leave nothing
            break
        probabilities, token = draw(scores)
        found = _with(found, token, probabilities, _best(probabilities, top))
        if token in settings.ends:
            break
    return found


def beams(
    next_logits: NextLogits, row: Sequence[int], settings: Settings, *, longest: int, count: int, top: int
) -> tuple[Continuation, ...]:
    """Keep the likeliest beginnings at each step, and the best of those that ended.

    Returns:
        At most ``count``, the best first.
    """
    open_: list[Continuation] = [Continuation()]
    ended: list[Continuation] = []
    reach = max(2, 1 + len(settings.ends)) * count  # should all of the best end, others go on
    while open_:
        rows = torch.tensor([[*row, *one.tokens] for one in open_])  # [n t]
        scores = next_logits(rows).float().log_softmax(-1)  # [n v]
        scores = settings.ruled(rows, scores, prompt=len(row), longest=longest)
        total = scores + torch.tensor([[one.score] for one in open_])
        likely, places = total.flatten().topk(min(reach, total.numel()))
        probabilities = scores.double().exp()
        best = [_best(one, top) for one in probabilities]
        length = rows.shape[1] + 1
        longer: list[Continuation] = []
        for rank, (score, place) in enumerate(zip(likely.tolist(), places.tolist(), strict=True)):
            parent, token = divmod(place, scores.shape[1])
            ends = token in settings.ends or length >= longest
            if rank >= count and (ends or len(longer) == count):
                continue
            one = _with(open_[parent], token, probabilities[parent], best[parent], score)
            if ends:
                ended.append(_normal(one, settings, len(one.steps)))
            elif score > -torch.inf:
                longer.append(one)
        ended = sorted(ended, key=lambda one: -one.score)[:count]
        open_ = longer[:count]
        if len(ended) == count and open_ and not _hopeful(open_[0], ended, settings, longest - len(row)):
            break
    return tuple(ended)


def _hopeful(best: Continuation, ended: Sequence[Continuation], settings: Settings, most: int) -> bool:
    """Whether a beginning may still become better than one of those that ended."""
    if settings.early_stopping:
        return False
    never = settings.early_stopping is None and settings.length_penalty > 0
    return _normal(best, settings, most if never else len(best.steps)).score > ended[-1].score


def _normal(one: Continuation, settings: Settings, length: int) -> Continuation:
    """The same with its log-probability divided by the length to a power."""
    return Continuation(one.steps, one.score / length**settings.length_penalty)


def _with(
    before: Continuation,
    token: int,
    probabilities: Tensor,
    best: tuple[tuple[int, float], ...],
    score: float | None = None,
) -> Continuation:
    """A token more."""
    chosen = float(probabilities[token])
    total = before.score + float(probabilities[token].log()) if score is None else score
    return Continuation((*before.steps, Step(token, chosen, best)), total)


def _best(probabilities: Tensor, top: int) -> tuple[tuple[int, float], ...]:
    best = probabilities.topk(min(top, len(probabilities)))
    return tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
