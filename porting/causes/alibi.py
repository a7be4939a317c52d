"""Linear biases on attention scores that differ from the reference's: ALiBi (Press et al. 2021, section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from porting.causes.attention import Attention
from porting.causes.cause import Cause, alter, combine, free_parameter, replace_with
from porting.causes.fitting import FreeParameter, geometric
from porting.causes.functions import SUM
from porting.causes.model_parts import ModelParts
from porting.causes.replay import Alteration, Rewrite
from porting.causes.tape import Call, Ref


@dataclass(frozen=True, eq=False)
class Biases:
    """The linear biases of an attention.

    Attributes:
        call: the sum of the scores and the biases.
        scores, bias: its two summands.
        slopes: the difference of the bias between neighbouring keys, [h].
        size: the width of a head.
        where: the path of the attention's module.
    """

    call: Call
    scores: Ref
    bias: Ref
    slopes: Tensor
    size: int
    where: str

    @property
    def steepest(self) -> float:
        """The exponent of the smallest slope: 8 in the paper, where slopes are 2^(-8 / n) to 2^-8."""
        return -math.log2(float(self.slopes.abs().min()))

    def with_slopes(self, change: Callable[[Tensor], Tensor]) -> Rewrite:
        """Return the rewrite of the sum with other slopes."""
        ratio = change(self.slopes) / self.slopes

        def rewritten(scores: Tensor, bias: Tensor) -> Tensor:
            own = ratio.to(scores).repeat(bias.shape[-3] // len(ratio))  # the batch may be joined with the heads
            return scores + own[:, None, None] * bias

        return combine(self.scores, self.bias, rewritten)

    def at(self, positions: Tensor) -> Rewrite:
        """Return the rewrite of the sum with biases of keys at other positions, [b k] or [1 k]."""

        def rewritten(scores: Tensor, bias: Tensor) -> Tensor:
            own = self.slopes.to(scores)[None, :, None, None] * positions.to(scores)[:, None, None, :]
            if scores.ndim == 3:  # the batch is joined with the heads
                own = own.expand(len(scores) // len(self.slopes), -1, -1, -1).flatten(0, 1)
            return scores + own

        return combine(self.scores, self.bias, rewritten)


def linear_biases(model_parts: ModelParts) -> Iterator[Biases]:
    """Yield the linear biases of each attention."""
    tape = model_parts.tape
    for attention in model_parts.attentions:
        for call in attention.steps:
            constants = [ref for ref in call.reads if not tape.learned(ref)]
            slopes = _slopes(tape[constants[0]], attention) if call.name in SUM and len(constants) == 1 else None
            if slopes is not None:
                scores = next(ref for ref in call.reads if tape.learned(ref))
                yield Biases(call, scores, constants[0], slopes, attention.size, attention.where)


SAME = 1e-6
"""Relative difference of slopes that are the same but for rounding."""


def _slopes(bias: Tensor, attention: Attention) -> Tensor | None:
    """Return the slope of each head, [h]; None where the bias is in no row linear in the position of the key."""
    heads = attention.heads
    if bias.ndim < 3 or bias.shape[-1] < 3 or heads < 2 or bias.shape[-3] % heads or not bias.is_floating_point():
        return None
    last = bias.double()[..., -1, :].reshape(-1, heads, bias.shape[-1])
    for steps in last.diff(dim=-1).unbind():  # [h k-1], of the last query of a row
        moved = (steps[0] != 0).nonzero().flatten()
        if not len(moved) or not bool((steps[:, moved[0]] != 0).all()):
            continue
        least = steps.abs().masked_fill(steps == 0, torch.inf).amin(-1)
        counts = steps / least[:, None]  # positions may be counted around padding
        if torch.allclose(counts, counts[:1].round().expand_as(counts), rtol=1e-5, atol=1e-5):
            return least * steps[:, moved[0]].sign()
    return None


def _bias_missing(model_parts: ModelParts) -> Iterator[Alteration]:
    for biases in linear_biases(model_parts):
        yield alter(biases.call, replace_with(biases.scores), where=biases.where)


def _bias_negated(model_parts: ModelParts) -> Iterator[Alteration]:
    for biases in linear_biases(model_parts):
        yield alter(biases.call, biases.with_slopes(torch.neg), where=biases.where)


def _other_slopes(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield the linear biases of each attention with slopes of other heads, beginning at 1, and scaled."""
    for biases in linear_biases(model_parts):
        heads = len(biases.slopes)
        changes: dict[str, Callable[[Tensor], Tensor]] = {
            "the heads' slopes are in the other order": lambda slopes: slopes.flip(0),
            "the slopes begin at 1": lambda slopes: slopes / slopes.abs().max(),
            "they are added before the scores are scaled": partial(_scaled, size=biases.size),
        }
        below = 2 ** (heads.bit_length() - 1)
        for count in {heads, below, 2 * below} if heads != below else ():
            text = f"they are 2^(-8 (h + 1) / {count}) for {heads} heads, which is not a power of two"
            changes[text] = partial(_of_heads, count=count)
        for text, between in _BETWEEN.items() if heads != below else ():
            changes[text] = partial(_of_two_counts, between=between)
            changes[f"{text}, in descending order"] = partial(_of_two_counts, between=between, descending=True)
        known: list[Tensor] = []
        for detail, change in changes.items():
            slopes = change(biases.slopes)
            if not any(torch.allclose(slopes, one, rtol=SAME) for one in known):
                known.append(slopes)
                yield alter(biases.call, biases.with_slopes(change), detail, where=biases.where)


def _solved_slopes(model_parts: ModelParts) -> Iterator[FreeParameter]:
    """Yield the exponent, and a common factor, of each attention's slopes."""
    for biases in linear_biases(model_parts):
        exponent = f"they fall to 2^-{{}} where the reference has 2^-{biases.steepest:.6g}"
        for rewrite, detail, starts in (
            (partial(_with_exponent, biases), exponent, geometric(0.5, 50.0, 6)),
            (partial(_multiplied, biases), "they are multiplied by {}", geometric(1e-3, 1e3, 3)),
        ):
            yield free_parameter(biases.call, rewrite, detail.format, starts, where=biases.where)


def _with_exponent(biases: Biases, steepest: float) -> Rewrite:
    return biases.with_slopes(lambda slopes: slopes.sign() * slopes.abs() ** (steepest / biases.steepest))


def _multiplied(biases: Biases, factor: float) -> Rewrite:
    return biases.with_slopes(lambda slopes: slopes * factor)


def _scaled(slopes: Tensor, *, size: int) -> Tensor:
    return slopes / math.sqrt(size)


def _of_heads(slopes: Tensor, *, count: int) -> Tensor:
    """Return the slopes of the first heads of so many."""
    places = torch.arange(1, len(slopes) + 1, dtype=slopes.dtype)
    return slopes.sign() * 2.0 ** (-8 * places / count)


_BETWEEN: Mapping[str, Callable[[int, int], tuple[range, range]]] = {
    "those of n heads, then every second one of 2 n": lambda n, more: (range(1, n + 1), range(1, 2 * more, 2)),
    "those of n heads, then the first ones of 2 n": lambda n, more: (range(1, n + 1), range(1, more + 1)),
    "those of n heads, then every second one of 2 n from its second": lambda n, more: (
        range(1, n + 1),
        range(2, 2 * more + 1, 2),
    ),
    "those of n heads, then the ones of 2 n behind them": lambda n, more: (range(1, n + 1), range(n + 1, n + more + 1)),
    "every second one of 2 n heads, then those of n": lambda n, more: (range(0), range(1, n + more + 1)),
}
"""The slopes of more heads than n, a power of two: the numbers of those of n heads, and of those of 2 n."""


def _of_two_counts(
    slopes: Tensor, *, between: Callable[[int, int], tuple[range, range]], descending: bool = False
) -> Tensor:
    """Return slopes of which some are those of n heads, a power of two, and some those of 2 n."""
    below = 2 ** (len(slopes).bit_length() - 1)
    few, many = between(below, len(slopes) - below)
    steps = [8 * place / below for place in few] + [8 * place / (2 * below) for place in many]
    if not few:  # as in MPT: those of 2 n heads, every second one first
        every = [8 * place / (2 * below) for place in range(1, 2 * below + 1)]
        steps = [*every[1::2], *every[::2]][: len(slopes)]
    made = 2.0 ** -torch.tensor(steps, dtype=slopes.dtype)
    return slopes.sign() * (made.sort(descending=True).values if descending else made)


def _counted_otherwise(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield the linear biases over all places, and over the places that the mask keeps."""
    mask = model_parts.inputs.get("attention_mask")
    for biases in linear_biases(model_parts):
        bias = model_parts.tape[biases.bias]
        width = bias.shape[-1]
        places = torch.arange(width)[None]
        ways = {"all places are counted": places}
        if mask is not None and mask.ndim == 2 and mask.shape[-1] == width:
            kept = (mask != 0).long()
            ways["places that the mask keeps are counted"] = (kept.cumsum(-1) - 1) * kept
            ways["places that the mask of the first row keeps are counted"] = ((kept.cumsum(-1) - 1) * kept)[:1]
        for detail, positions in ways.items():
            yield alter(biases.call, biases.at(positions), detail, where=biases.where)


CAUSES: tuple[Cause, ...] = (
    Cause(
        name="ALiBi missing",
        what="no linear bias is added to the scores",
        looks="the difference grows with the position; the model does not depend on the order of tokens",
        fix="add slope * (key - query) to the scores before the softmax, in every layer",
        alterations=_bias_missing,
    ),
    Cause(
        name="ALiBi of the other sign",
        what="the linear bias grows with the distance instead of falling",
        looks="distant positions get the most attention",
        fix="slope * (key - query): 0 for the token itself, negative for earlier ones",
        alterations=_bias_negated,
    ),
    Cause(
        name="ALiBi slopes",
        what="the linear bias has different slopes",
        looks="the difference grows with the position",
        fix="2^(-8 (h + 1) / n) for n heads, a power of two, and those of 2 n heads between them for more; "
        "see alibi_bias_max in the config",
        alterations=_other_slopes,
        free_parameters=_solved_slopes,
    ),
    Cause(
        name="ALiBi of other positions",
        what="the linear bias counts the positions of keys otherwise: around padding, or not",
        looks="no difference in a batch without padding; a constant one, which softmax ignores, where it is in front",
        fix="see whether the reference builds the bias from the attention mask, as BLOOM does, or from all places",
        alterations=_counted_otherwise,
    ),
)
