"""What a difference comes from: variants of the reference's own computation, and which of them the module does.

Only what stands between two places is looked at, given the reference's activations, so the variant that is named gives
the module's numbers to the last digits, and none is named that does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from porting.suggesting.layouts import distance
from porting.suggesting.tracing import Unit

EXPLAINED = 1e-9
"""A variant explains a difference if it leaves less than this of it."""

EPSILONS = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "GELU by the error function": F.gelu,
    "GELU by its tanh approximation": lambda x: F.gelu(x, approximate="tanh"),
    "GELU by x * sigmoid(1.702 x)": lambda x: x * torch.sigmoid(1.702 * x),
    "ReLU": F.relu,
    "SiLU": F.silu,
    "squared ReLU": lambda x: F.relu(x).square(),
    "tanh": torch.tanh,
    "leaky ReLU": F.leaky_relu,
    "ELU": F.elu,
    "Mish": F.mish,
    "no function at all": lambda x: x,
}


def norm(unit: Unit, mate: Unit) -> str:
    """What the module's norm does otherwise, in words; empty where no variant does the same."""
    if mate.operand is None:
        return ""
    operand = mate.operand
    bare = _bare(mate)
    if bare is None:
        return ""
    gain, shift = bare
    for eps in EPSILONS:
        for name, value in _variants(operand, eps, centred=mate.centred).items():
            if distance(value * gain + shift, unit.output) <= EXPLAINED:
                said = f": {name}" if name else ""
                theirs = "" if mate.eps is None else f", and the reference's {mate.eps:g}"
                return f"{said}{',' if said else ':'} its eps is {eps:g}{theirs}"
    return ""


def _variants(operand: Tensor, eps: float, *, centred: bool) -> dict[str, Tensor]:
    middle = operand - operand.mean(-1, keepdim=True)
    taken = middle if centred else operand
    square = taken.pow(2).mean(-1, keepdim=True)
    count = operand.shape[-1]
    found = {
        "": taken / (square + eps).sqrt(),
        "eps is added to the deviation and not to the variance": taken / (square.sqrt() + eps),
        "the deviation is the unbiased one": middle / (middle.pow(2).sum(-1, keepdim=True) / (count - 1) + eps).sqrt(),
        "the deviation is the unbiased one, and eps is added to it": middle
        / ((middle.pow(2).sum(-1, keepdim=True) / (count - 1)).sqrt() + eps),
    }
    if centred:
        found["it does not take the mean off"] = operand / (operand.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return found


def _bare(mate: Unit) -> tuple[Tensor, Tensor] | None:
    """The gain and the shift of the reference's norm, from what it gives: two numbers for each feature."""
    if mate.operand is None:
        return None
    eps = mate.eps or 0.0
    rows = _variants(mate.operand, eps, centred=mate.centred)[""].reshape(-1, mate.operand.shape[-1])
    given = mate.output.reshape(-1, mate.operand.shape[-1])
    mean, middle = rows.mean(0), given.mean(0)
    spread = rows - mean
    gain = (spread * (given - middle)).sum(0) / spread.pow(2).sum(0).clamp_min(1e-30)
    return gain, middle - gain * mean


def is_unbiased(unit: Unit | None, mate: Unit) -> bool:
    """Whether the module's norm is smaller than the reference's by Bessel's correction."""
    bare = _bare(mate)
    if unit is None or bare is None or unit.output.numel() != mate.output.numel():
        return False
    gain, shift = bare
    width = mate.output.shape[-1]
    theirs = ((mate.output.reshape(-1, width) - shift) / gain).pow(2).mean().sqrt()
    ours = ((unit.output.reshape(-1, width) - shift) / gain).pow(2).mean().sqrt()
    expected = math.sqrt((width - 1) / width)
    return abs(float(ours / theirs) / expected - 1) < 0.1 * (1 - expected)


def activation(before: Unit, operand: Tensor, theirs: Tensor) -> str:
    """Which function the module has in the place of the reference's, in words; empty where none does the same.

    Args:
        before: the reference's matrix in front of it.
        operand: what the module makes of what that gives.
        theirs: what the reference makes of it.
    """

    def named(value: Tensor) -> str:
        found = (
            name for name, function in ACTIVATIONS.items() if distance(function(before.output), value) <= EXPLAINED
        )
        return next(found, "")

    ours, other = named(operand), named(theirs)
    return f": its activation is {ours}, the reference's {other}" if ours and other and ours != other else ""
