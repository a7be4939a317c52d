"""Attention with linear biases: a bias that falls with the distance (Press et al. 2021, section 3)."""

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
    """Linear biases.

    Attributes:
        call: the sum of the scores and the biases.
        scores, bias: its two sides.
        slopes: by what the bias rises from one key to the next [h].
        where: the attention's module.
    """

    call: Call
    scores: Ref
    bias: Ref
    slopes: Tensor
    where: str

    @property
    def steepest(self) -> float:
        """The last head's exponent: 8 in the paper, where slopes are 2^(-8 / n) to 2^-8."""
        return -math.log2(float(self.slopes.abs().min()))

    def turned(self, change: Callable[[Tensor], Tensor]) -> Rewrite:
        """The biases with other slopes."""
        ratio = (change(self.slopes) / self.slopes)[:, None, None]
        return combine(self.scores, self.bias, lambda scores, bias: scores + ratio.to(bias) * bias)


def linear_biases(model_parts: ModelParts) -> Iterator[Biases]:
    """Those of each attention."""
    tape = model_parts.tape
    for attention in model_parts.attentions:
        for call in attention.steps:
            rest = [ref for ref in call.reads if not tape.learned(ref)]
            slopes = _slopes(tape, rest[0]) if call.name in SUM and len(rest) == 1 else None
            if slopes is not None:
                yield Biases(
                    call, next(ref for ref in call.reads if tape.learned(ref)), rest[0], slopes, attention.where
                )


def _slopes(tape: Tape, ref: Ref) -> Tensor | None:
    """By head what is added from one key to the next, where that is the same for all keys."""
    bias = tape[ref]
    if bias.ndim < 3 or bias.shape[-1] < 3 or bias.shape[-3] < 2 or not bias.is_floating_point():
        return None
    rows = bias.double().flatten(0, -4)[0] if bias.ndim > 3 else bias.double()  # [h q k]
    steps = rows[:, -1].diff(dim=-1)  # [h k-1]
    slopes = steps[:, 0]
    straight = torch.allclose(steps, slopes[:, None].expand_as(steps), rtol=1e-5, atol=1e-9)
    return slopes if straight and bool((slopes != 0).all()) else None


class BiasesMissing(Cause):
    """None."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each attention that has some."""
        for biases in linear_biases(model_parts):
            yield alter(biases.call, replace_with(biases.scores), where=biases.where)


class BiasesBackwards(Cause):
    """Of the other sign."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each attention that has some."""
        for biases in linear_biases(model_parts):
            yield alter(biases.call, biases.turned(torch.neg), where=biases.where)


class Slopes(Cause):
    """Other slopes."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each attention that has some: in another order, and the same for all heads."""
        ways = {
            "the heads' slopes are in the other order": lambda slopes: slopes.flip(0),
            "the slopes begin at 1": lambda slopes: slopes / slopes.abs().max(),
        }
        for biases in linear_biases(model_parts):
            for detail, way in ways.items():
                yield alter(biases.call, biases.turned(way), detail, where=biases.where)

    def free_parameters(self, model_parts: ModelParts) -> Iterator[FreeParameter]:
        """Each attention that has some: of another base, and all by a factor."""
        for biases in linear_biases(model_parts):
            detail = f"they fall to 2^-{{}} where the reference has 2^-{biases.steepest:.6g}".format
            yield free_parameter(
                biases.call, partial(_based, biases), detail, geometric(0.5, 50.0, 6), where=biases.where
            )
            detail = "they are multiplied by {}".format
            yield free_parameter(
                biases.call, partial(_times, biases), detail, geometric(1e-3, 1e3, 3), where=biases.where
            )


def _based(biases: Biases, steepest: float) -> Rewrite:
    return biases.turned(lambda slopes: slopes.sign() * slopes.abs() ** (steepest / biases.steepest))


def _times(biases: Biases, factor: float) -> Rewrite:
    return biases.turned(lambda slopes: slopes * factor)


CAUSES: tuple[Cause, ...] = (
    BiasesMissing(
        name="ALiBi missing",
        what="no linear bias is added to the scores",
        looks="the first positions agree best; the model does not see the order of words",
        fix="add slope * (key - query) to the scores before the softmax, in every layer",
    ),
    BiasesBackwards(
        name="ALiBi of the other sign",
        what="the linear bias rises with the distance",
        looks="what is far away is seen best",
        fix="slope * (key - query): 0 for the token itself, and less for what comes before it",
    ),
    Slopes(
        name="ALiBi slopes",
        what="the linear bias has other slopes",
        looks="the first positions agree best, the last ones least",
        fix="2^(-8 (h + 1) / n) for n heads, a power of two; see alibi_bias_max in the config",
    ),
)
