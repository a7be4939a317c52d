"""Activations that differ from the reference's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from porting.causes.cause import Cause, alter, alter_each, free_parameter, replace_with
from porting.causes.fitting import FreeParameter, geometric
from porting.causes.functions import ACTIVATIONS, tanh_gelu
from porting.causes.model_parts import Activation, ModelParts
from porting.causes.replay import Alteration, Rewrite


def _is_pooler(site: Activation, model_parts: ModelParts) -> bool:
    """Return whether an activation is applied to one vector per text, [b e], as the tanh of a pooler."""
    return model_parts.tape[site.input].ndim == 2 and site.name == "tanh"


def _poolers(model_parts: ModelParts) -> list[Activation]:
    return [site for site in model_parts.activations if _is_pooler(site, model_parts)]


def _others(model_parts: ModelParts) -> list[Activation]:
    return [site for site in model_parts.activations if not _is_pooler(site, model_parts)]


def _of_floats(model_parts: ModelParts) -> list[Activation]:
    return [site for site in _others(model_parts) if model_parts.tape[site.input].is_floating_point()]


def _left_out(site: Activation) -> Rewrite:
    return replace_with(site.input)


def _with_number(
    says: str, starts: Sequence[float], *functions: Callable[[Tensor, float], Tensor]
) -> Callable[[ModelParts], Iterator[FreeParameter]]:
    """Return the number of each activation but the pooler's.

    Args:
        says: the function's text, with ``{}`` for the number.
        starts: the values that the number is searched from.
        functions: the input and the number -> the result; several if another constant may have few digits.
    """

    def free_parameters(model_parts: ModelParts) -> Iterator[FreeParameter]:
        for site in _of_floats(model_parts):
            detail = f"{says} where the reference has {site.name or 'another function'}"
            for function in functions:
                yield free_parameter(site.call, partial(_applied, site, function), detail.format, starts)

    return free_parameters


def _applied(site: Activation, function: Callable[[Tensor, float], Tensor], number: float) -> Rewrite:
    return replace_with(site.input, lambda value: function(value, number))


def _wrong(function: str, looks: str, fix: str) -> Cause:
    def alterations(model_parts: ModelParts) -> Iterator[Alteration]:
        for site in model_parts.activations:
            if site.name != function and model_parts.tape[site.input].is_floating_point():
                detail = f"{function} where the reference has {site.name or 'another function'}"
                yield alter(site.call, replace_with(site.input, ACTIVATIONS[function]), detail)

    what = f"the activation is the {function} and the reference uses another function"
    return Cause(name=f"{function} for another activation", what=what, looks=looks, fix=fix, alterations=alterations)


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
    Cause(
        name="sigmoid GELU of another steepness",
        what="the activation is x * sigmoid(c * x) with a number c that is neither SiLU's 1 nor quick GELU's 1.702",
        looks="differences of up to 0.2 from a GELU",
        fix="see hidden_act: gelu, gelu_new, quick_gelu and silu are different functions",
        free_parameters=_with_number(
            "x * sigmoid({} x)", geometric(0.1, 10.0, 6), lambda value, number: value * torch.sigmoid(number * value)
        ),
    ),
    Cause(
        name="leaky ReLU for another activation",
        what="the activation is a ReLU with a slope for negative values",
        looks="small negative values after the first half of the feed-forward network",
        fix="use the activation that hidden_act in the config names",
        free_parameters=_with_number("leaky ReLU of slope {}", geometric(1e-3, 0.9, 6), F.leaky_relu),
    ),
    Cause(
        name="GELU constant",
        what="the factor of x**3 in the tanh GELU is not 0.044715",
        looks="differences of 1e-5 to 1e-1",
        fix="0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))",
        free_parameters=_with_number(
            "tanh GELU with {} x**3",
            geometric(1e-3, 10.0, 6),
            lambda value, number: tanh_gelu(value, cubic=number),
            lambda value, number: tanh_gelu(value, cubic=number, factor=0.79788456),  # as it is often copied
        ),
    ),
    Cause(
        name="GELU factor",
        what="the factor within the tanh GELU is not sqrt(2 / pi)",
        looks="differences of 1e-5 to 1e-1",
        fix="0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))",
        free_parameters=_with_number(
            "tanh GELU with tanh({} * ...), and not sqrt(2 / pi) = 0.798,",
            geometric(1e-2, 1e2, 6),
            lambda value, number: tanh_gelu(value, factor=number),
        ),
    ),
    Cause(
        name="activation missing",
        what="the activation is missing",
        looks="large differences; the feed-forward network is linear",
        fix="put the activation between the two linear layers, or after the head's dense layer",
        alterations=alter_each(_others, _left_out),
    ),
    Cause(
        name="pooler tanh missing",
        what="tanh is not applied to the pooled vector",
        looks="pooled values beyond -1 and 1; the layers agree",
        fix="tanh(dense(hidden[:, 0]))",
        alterations=alter_each(_poolers, _left_out),
    ),
)
