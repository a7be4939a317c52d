"""Linear biases on attention scores that differ from the reference's: ALiBi (Press et al. 2021, section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from porting.causes.cause import Cause, alter, combine, free_parameter, replace_with
from porting.causes.fitting import FreeParameter, geometric
from porting.causes.functions import SUM
from porting.causes.model_parts import ModelParts
from porting.causes.replay import Alteration, Rewrite
from porting.causes.tape import Call, Ref, Tape


@dataclass(frozen=True, eq=False)
class Biases:
    """The linear biases of an attention.

    Attributes:
        call: the sum of the scores and the biases.
        scores, bias: its two summands.
        slopes: the difference of the bias between neighbouring keys, [h].
        where: the path of the attention's module.
    """

    call: Call
    scores: Ref
    bias: Ref
    slopes: Tensor
    where: str

    @property
    def steepest(self) -> float:
        """The exponent of the smallest slope: 8 in the paper, where slopes are 2^(-8 / n) to 2^-8."""
        return -math.log2(float(self.slopes.abs().min()))

    def with_slopes(self, change: Callable[[Tensor], Tensor]) -> Rewrite:
        """Return the rewrite of the sum with other slopes."""
        ratio = (change(self.slopes) / self.slopes)[:, None, None]
        return combine(self.scores, self.bias, lambda scores, bias: scores + ratio.to(bias) * bias)


def linear_biases(model_parts: ModelParts) -> Iterator[Biases]:
    """Yield the linear biases of each attention."""
    tape = model_parts.tape
    for attention in model_parts.attentions:
        for call in attention.steps:
            constants = [ref for ref in call.reads if not tape.learned(ref)]
            slopes = _slopes(tape, constants[0]) if call.name in SUM and len(constants) == 1 else None
            if slopes is not None:
                yield Biases(
                    call, next(ref for ref in call.reads if tape.learned(ref)), constants[0], slopes, attention.where
                )


def _slopes(tape: Tape, ref: Ref) -> Tensor | None:
    """Return the slope of each head, [h]; None where the bias is not linear in the key's position."""
    bias = tape[ref]
    if bias.ndim < 3 or bias.shape[-1] < 3 or bias.shape[-3] < 2 or not bias.is_floating_point():
        return None
    rows = bias.double().flatten(0, -4)[0] if bias.ndim > 3 else bias.double()  # [h q k]
    steps = rows[:, -1].diff(dim=-1)  # [h k-1]
    slopes = steps[:, 0]
    linear = torch.allclose(steps, slopes[:, None].expand_as(steps), rtol=1e-5, atol=1e-9)
    return slopes if linear and bool((slopes != 0).all()) else None


class BiasesMissing(Cause):
    """The linear biases are missing."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield the linear biases of each attention."""
        for biases in linear_biases(model_parts):
            yield alter(biases.call, replace_with(biases.scores), where=biases.where)


class BiasesNegated(Cause):
    """The linear biases have the opposite sign."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield the linear biases of each attention."""
        for biases in linear_biases(model_parts):
            yield alter(biases.call, biases.with_slopes(torch.neg), where=biases.where)


class OtherSlopes(Cause):
    """Linear biases with other slopes."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield the linear biases of each attention with slopes in reverse order, and beginning at 1."""
        changes = {
            "the heads' slopes are in the other order": lambda slopes: slopes.flip(0),
            "the slopes begin at 1": lambda slopes: slopes / slopes.abs().max(),
        }
        for biases in linear_biases(model_parts):
            for detail, change in changes.items():
                yield alter(biases.call, biases.with_slopes(change), detail, where=biases.where)

    def free_parameters(self, model_parts: ModelParts) -> Iterator[FreeParameter]:
        """Yield the exponent, and a common factor, of each attention's slopes."""
        for biases in linear_biases(model_parts):
            detail = f"they fall to 2^-{{}} where the reference has 2^-{biases.steepest:.6g}".format
            yield free_parameter(
                biases.call, partial(_with_exponent, biases), detail, geometric(0.5, 50.0, 6), where=biases.where
            )
            detail = "they are multiplied by {}".format
            yield free_parameter(
                biases.call, partial(_multiplied, biases), detail, geometric(1e-3, 1e3, 3), where=biases.where
            )


def _with_exponent(biases: Biases, steepest: float) -> Rewrite:
    return biases.with_slopes(lambda slopes: slopes.sign() * slopes.abs() ** (steepest / biases.steepest))


def _multiplied(biases: Biases, factor: float) -> Rewrite:
    return biases.with_slopes(lambda slopes: slopes * factor)


CAUSES: tuple[Cause, ...] = (
    BiasesMissing(
        name="ALiBi missing",
        what="no linear bias is added to the scores",
        looks="the difference grows with the position; the model does not depend on the order of tokens",
        fix="add slope * (key - query) to the scores before the softmax, in every layer",
    ),
    BiasesNegated(
        name="ALiBi of the other sign",
        what="the linear bias grows with the distance instead of falling",
        looks="distant positions get the most attention",
        fix="slope * (key - query): 0 for the token itself, negative for earlier ones",
    ),
    OtherSlopes(
        name="ALiBi slopes",
        what="the linear bias has different slopes",
        looks="the difference grows with the position",
        fix="2^(-8 (h + 1) / n) for n heads, a power of two; see alibi_bias_max in the config",
    ),
)
