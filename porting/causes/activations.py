"""Activations that differ from the reference's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from porting.causes.cause import Cause, alter, free_parameter
from porting.causes.fitting import FreeParameter, geometric
from porting.causes.functions import ACTIVATIONS, tanh_gelu
from porting.causes.model_parts import Activation, ModelParts
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.tape import Call


def apply_instead(site: Activation, function: Callable[[Tensor], Tensor]) -> Callable[[Values, Call], Tensor]:
    """Return the rewrite that applies another function to the activation's input."""
    return lambda values, call: function(values[site.input])


def is_pooler(site: Activation, model_parts: ModelParts) -> bool:
    """Return whether an activation is applied to one vector per text, [b e], as the tanh of a pooler."""
    return model_parts.tape[site.input].ndim == 2 and site.name == "tanh"


@dataclass(frozen=True, kw_only=True)
class WrongActivation(Cause):
    """Another activation.

    Attributes:
        function: its name in :data:`porting.causes.functions.ACTIVATIONS`.
    """

    function: str

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each activation that is another function."""
        for site in model_parts.activations:
            if site.name != self.function and model_parts.tape[site.input].is_floating_point():
                detail = f"{self.function} where the reference has {site.name or 'another function'}"
                yield alter(site.call, apply_instead(site, ACTIVATIONS[self.function]), detail)


@dataclass(frozen=True, kw_only=True)
class ParametricActivation(Cause):
    """An activation with a number that is solved for.

    Attributes:
        function: the input and the number -> the result.
        says: the function's text, with ``{}`` for the number.
        first, last: the range in which the number is searched.
        rounded: the same function with a constant of few digits beside the number.
    """

    function: Callable[[Tensor, float], Tensor]
    says: str
    first: float
    last: float
    rounded: Callable[[Tensor, float], Tensor] | None = None

    def free_parameters(self, model_parts: ModelParts) -> Iterator[FreeParameter]:
        """Yield the number of each activation but the pooler's."""
        for site in model_parts.activations:
            if not is_pooler(site, model_parts) and model_parts.tape[site.input].is_floating_point():
                detail = f"{self.says} where the reference has {site.name or 'another function'}"
                starts = geometric(self.first, self.last, 6)
                for function in filter(None, (self.function, self.rounded)):
                    yield free_parameter(site.call, partial(_with_number, site, function), detail.format, starts)


def _with_number(site: Activation, function: Callable[[Tensor, float], Tensor], number: float) -> Rewrite:
    return apply_instead(site, lambda value: function(value, number))


class ActivationMissing(Cause):
    """An activation that is missing."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each activation but the pooler's."""
        for site in model_parts.activations:
            if not is_pooler(site, model_parts):
                yield alter(site.call, apply_instead(site, lambda value: value))


class PoolerTanhMissing(Cause):
    """The pooler's tanh is missing."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield the pooler's activation."""
        for site in model_parts.activations:
            if is_pooler(site, model_parts):
                yield alter(site.call, apply_instead(site, lambda value: value))


def _wrong(function: str, looks: str, fix: str) -> WrongActivation:
    what = f"the activation is the {function} and the reference uses another function"
    return WrongActivation(
        name=f"{function} for another activation", what=what, looks=looks, fix=fix, function=function
    )


CAUSES: tuple[Cause, ...] = (
    _wrong(
        "exact GELU",
        "a difference of up to 5e-4 where the reference has the tanh GELU, which atol=1e-3 hides",
        'see hidden_act in the config: F.gelu(x, approximate="tanh") for gelu_new and gelu_pytorch_tanh, '
        "x * torch.sigmoid(1.702 * x) for quick_gelu",
    ),
    _wrong(
        "tanh GELU",
        "a difference of up to 5e-4 where the reference has the exact GELU, which atol=1e-3 hides",
        "F.gelu(x) for hidden_act = gelu",
    ),
    _wrong(
        "quick GELU",
        "a difference of up to 2e-2 from the exact GELU",
        "x * sigmoid(1.702 x) is CLIP's; F.gelu(x) for hidden_act = gelu",
    ),
    _wrong(
        "ReLU",
        "no negative values after the first half of the feed-forward network",
        "use the activation that hidden_act in the config names",
    ),
    _wrong("SiLU", "differences of up to 0.2 from a GELU", "SiLU is also called swish; see hidden_act in the config"),
    _wrong(
        "erf GELU without the root",
        "a difference of up to 0.1 from the exact GELU",
        "0.5 * x * (1 + erf(x / sqrt(2))), not erf(x)",
    ),
    _wrong("squared ReLU", "large differences where activations are large", "see hidden_act: relu2 is the square"),
    _wrong("ELU", "negative values down to -1", "use the activation that hidden_act in the config names"),
    ParametricActivation(
        name="sigmoid GELU of another steepness",
        what="the activation is x * sigmoid(c * x) with a number c that is neither SiLU's 1 nor quick GELU's 1.702",
        looks="differences of up to 0.2 from a GELU",
        fix="see hidden_act: gelu, gelu_new, quick_gelu and silu are different functions",
        function=lambda value, number: value * torch.sigmoid(number * value),
        says="x * sigmoid({} x)",
        first=0.1,
        last=10.0,
    ),
    ParametricActivation(
        name="leaky ReLU for another activation",
        what="the activation is a ReLU with a slope for negative values",
        looks="small negative values after the first half of the feed-forward network",
        fix="use the activation that hidden_act in the config names",
        function=F.leaky_relu,
        says="leaky ReLU of slope {}",
        first=1e-3,
        last=0.9,
    ),
    ParametricActivation(
        name="GELU constant",
        what="the factor of x**3 in the tanh GELU is not 0.044715",
        looks="differences of 1e-5 to 1e-1",
        fix="0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))",
        function=lambda value, number: tanh_gelu(value, cubic=number),
        says="tanh GELU with {} x**3",
        first=1e-3,
        last=10.0,
        rounded=lambda value, number: tanh_gelu(value, cubic=number, factor=0.79788456),  # as it is often copied
    ),
    ParametricActivation(
        name="GELU factor",
        what="the factor within the tanh GELU is not sqrt(2 / pi)",
        looks="differences of 1e-5 to 1e-1",
        fix="0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))",
        function=lambda value, number: tanh_gelu(value, factor=number),
        says="tanh GELU with tanh({} * ...), and not sqrt(2 / pi) = 0.798,",
        first=1e-2,
        last=1e2,
    ),
    ActivationMissing(
        name="activation missing",
        what="the activation is missing",
        looks="large differences; the feed-forward network is linear",
        fix="put the activation between the two linear layers, or after the head's dense layer",
    ),
    PoolerTanhMissing(
        name="pooler tanh missing",
        what="tanh is not applied to the pooled vector",
        looks="pooled values beyond -1 and 1; the layers agree",
        fix="tanh(dense(hidden[:, 0]))",
    ),
)
