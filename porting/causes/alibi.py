"""Linear biases on attention scores that differ from the reference's: ALiBi (Press et al. 2021, section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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


def _slopes(bias: Tensor, attention: Attention) -> Tensor | None:
    """Return the slope of each head, [h]; None where the bias is in no row linear in the position of the key."""
    heads = attention.heads
    if bias.ndim < 3 or bias.shape[-1] < 3 or heads < 2 or bias.shape[-3] % heads or not bias.is_floating_point():
        return None
    last = bias.double()[..., -1, :].reshape(-1, heads, bias.shape[-1])
    steps = last.diff(dim=-1)  # [b h k-1], of the last query
    for row in steps.unbind():  # a padded one is not linear
        slopes = row[:, 0]
        if torch.allclose(row, slopes[:, None].expand_as(row), rtol=1e-5, atol=1e-9) and bool((slopes != 0).all()):
            return slopes
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
        for detail, change in changes.items():
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
)
