"""Torch functions by their role in a model, and norms and activations recognised by what they compute.

A norm such as ``(x - x.mean(-1, keepdim=True)) / torch.sqrt(var + eps)`` may be written in many ways, so its result is
compared with the formulas, for each tensor that it may have been computed from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from porting.causes.tape import Call

ACTIVATION = ("gelu", "relu", "silu", "tanh", "sigmoid")
EMBEDDING = ("embedding",)
SUM = ("add", "__add__", "__radd__", "__iadd__")
SCALING = ("mul", "__mul__", "__rmul__", "div", "__truediv__", "true_divide", "__imul__", "__itruediv__", "multiply")
MASKING = ("masked_fill", "where", "sub", "__sub__", *SUM, *SCALING)
LOWEST = -1e4
"""A number that is added to a score and not above this one hides the key."""
CASTING = ("to", "float", "double", "type_as", "type", "contiguous", "clone", "detach", "view", "reshape")


def factor_of(call: Call) -> float | None:
    """Return the number by which a call multiplies a tensor; None where it does something else."""
    number = next((float(argument) for argument in call.args if isinstance(argument, int | float)), None)
    if call.name not in SCALING or not number:
        return None
    return 1 / number if "div" in call.name else number


def quick_gelu(value: Tensor) -> Tensor:
    """Return ``x sigmoid(1.702 x)``, the GELU of CLIP (Hendrycks and Gimpel 2016, section 2)."""
    return value * torch.sigmoid(1.702 * value)


def tanh_gelu(value: Tensor, *, cubic: float = 0.044715, factor: float = math.sqrt(2 / math.pi)) -> Tensor:
    """Return the tanh approximation of GELU that GPT and early BERT code use (Hendrycks and Gimpel 2016, section 2)."""
    return 0.5 * value * (1 + torch.tanh(factor * (value + cubic * value**3)))


def rootless_gelu(value: Tensor) -> Tensor:
    """Return ``x (1 + erf(x)) / 2``, the exact GELU without the division by ``sqrt(2)``."""
    return 0.5 * value * (1 + torch.erf(value))


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "exact GELU": F.gelu,
    "tanh GELU": tanh_gelu,
    "quick GELU": quick_gelu,
    "ReLU": F.relu,
    "SiLU": F.silu,
    "squared ReLU": lambda value: F.relu(value).square(),
    "ELU": F.elu,
    "erf GELU without the root": rootless_gelu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
"""Activations that are mistaken for one another, by the names of reports."""

LAYER, RMS = "layer", "rms"
"""The kinds of norm: LayerNorm subtracts the mean, RMSNorm does not (Zhang and Sennrich 2019)."""

LARGEST_EPS = 0.1
"""Largest number that can be an eps."""


def layer(value: Tensor, eps: float) -> Tensor:
    """Return ``(x - mean) / sqrt(variance + eps)`` over the last axis."""
    centred = value - value.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)


def rms(value: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean of squares + eps)`` over the last axis."""
    return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)


NORMS: Mapping[str, Callable[[Tensor, float], Tensor]] = {LAYER: layer, RMS: rms}


@dataclass(frozen=True)
class Normed:
    """A recognised norm, before its gain and bias.

    Attributes:
        source: the index of the normed tensor among the candidates.
        kind: ``LAYER`` or ``RMS``.
        eps: its eps, 0 if it has none.
    """

    source: int
    kind: str
    eps: float


def norm_of(result: Tensor, sources: Sequence[Tensor], numbers: Iterable[float]) -> Normed | None:
    """Recognise a result as a norm of one of the tensors that it was computed from.

    Args:
        result: the result, [... n].
        sources: the candidates for the normed tensor, the oldest first.
        numbers: numbers that were added on the way, one of which may be the eps.

    Returns:
        The norm, or None where the result is none.
    """
    if not result.is_floating_point() or result.ndim < 2 or result.shape[-1] < 2:
        return None
    epsilons = [number for number in dict.fromkeys([*numbers, 0.0]) if 0 <= number <= LARGEST_EPS]
    for index, source in enumerate(sources):
        if source.shape == result.shape and source.is_floating_point() and not _close(source, result):
            for kind, formula in NORMS.items():
                fitting = [eps for eps in epsilons if _close(formula(source.double(), eps), result)]
                if fitting:
                    return Normed(index, kind, fitting[0])
    return None


def activation_of(result: Tensor, sources: Sequence[Tensor]) -> tuple[int, str] | None:
    """Recognise a result as an activation of one of the tensors that it was computed from.

    Args:
        sources: the candidates for the activation's input, the oldest first.

    Returns:
        The index of the input and the name of the activation, or None.
    """
    if not result.is_floating_point() or result.numel() < 2:
        return None
    for index, source in enumerate(sources):
        if source.shape == result.shape and source.is_floating_point() and not _close(source, result):
            for name, function in ACTIVATIONS.items():
                if _close(function(source.double()), result):
                    return index, name
    return None


def _close(expected: Tensor, found: Tensor) -> bool:
    """Return whether two tensors are equal up to the rounding of the second."""
    slack = 64 * torch.finfo(found.dtype).eps
    return torch.allclose(expected.double(), found.double(), rtol=slack, atol=slack)
