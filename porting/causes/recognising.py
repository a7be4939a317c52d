"""Norms and activations that are written out by hand, known by what they compute.

Somebody's ``(x - x.mean(-1, keepdim=True)) / torch.sqrt(var + eps)`` is a LayerNorm, whatever its steps are: its result
is compared with the formulas, for each tensor that went into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from porting.causes.functions import ACTIVATIONS

LAYER, RMS = "layer", "rms"
"""The two norms: with the mean taken off, and without (Zhang and Sennrich 2019)."""

LARGEST_EPS = 0.1
"""A larger number is no eps."""


def layer(value: Tensor, eps: float) -> Tensor:
    """``(x - mean) / sqrt(variance + eps)``."""
    centred = value - value.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)


def rms(value: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean of squares + eps)``."""
    return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)


NORMS: Mapping[str, Callable[[Tensor, float], Tensor]] = {LAYER: layer, RMS: rms}


@dataclass(frozen=True)
class Normed:
    """What a norm gives before its gain and bias.

    Attributes:
        source: the number of the tensor that was normed, among those that were offered.
        kind: which norm.
        eps: its eps; 0 where none shows.
    """

    source: int
    kind: str
    eps: float


def norm_of(result: Tensor, sources: Sequence[Tensor], numbers: Iterable[float]) -> Normed | None:
    """Which norm of which tensor a result is, or None.

    Args:
        result: [... n].
        sources: tensors that it was made from, the oldest first.
        numbers: those that were added on the way, one of which may be the eps.
    """
    if not result.is_floating_point() or result.ndim < 2 or result.shape[-1] < 2:
        return None
    epsilons = [number for number in dict.fromkeys([*numbers, 0.0]) if 0 <= number <= LARGEST_EPS]
    for place, source in enumerate(sources):
        if source.shape == result.shape and source.is_floating_point() and not _alike(source, result):
            for kind, formula in NORMS.items():
                close = [eps for eps in epsilons if _alike(formula(source.double(), eps), result)]
                if close:
                    return Normed(place, kind, close[0])
    return None


def activation_of(result: Tensor, sources: Sequence[Tensor]) -> tuple[int, str] | None:
    """Which activation of which tensor a result is: the tensor's number and the activation's name, or None."""
    if not result.is_floating_point() or result.numel() < 2:
        return None
    for place, source in enumerate(sources):
        if source.shape == result.shape and source.is_floating_point() and not _alike(source, result):
            for name, function in ACTIVATIONS.items():
                if _alike(function(source.double()), result):
                    return place, name
    return None


def _alike(expected: Tensor, found: Tensor) -> bool:
    """Up to the rounding of what was found."""
    slack = 64 * torch.finfo(found.dtype).eps
    return torch.allclose(expected.double(), found.double(), rtol=slack, atol=slack)
