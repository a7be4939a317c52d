"""A norm that divides by the unbiased deviation: a table can take that into the gain."""

from __future__ import annotations

import math

from torch import Tensor

from porting.suggesting.subjects.tracing import Unit


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


def _bare(mate: Unit) -> tuple[Tensor, Tensor] | None:
    """The gain and the shift of the reference's norm, from what it gives: two numbers for each feature."""
    if mate.operand is None:
        return None
    operand = mate.operand - mate.operand.mean(-1, keepdim=True) if mate.centred else mate.operand
    normed = operand / (operand.pow(2).mean(-1, keepdim=True) + (mate.eps or 0.0)).sqrt()
    rows, given = normed.reshape(-1, operand.shape[-1]), mate.output.reshape(-1, operand.shape[-1])
    mean, middle = rows.mean(0), given.mean(0)
    spread = rows - mean
    gain = (spread * (given - middle)).sum(0) / spread.pow(2).sum(0).clamp_min(1e-30)
    return gain, middle - gain * mean
