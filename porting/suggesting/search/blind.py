"""Biases that nothing sees: a key's moves all scores of a query by the same number, which softmax takes away again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from porting.suggesting.search.finding import SAME
from porting.suggesting.search.layouts import distance
from porting.suggesting.subjects.side import Side

BLIND = "softmax cannot see it: it moves all scores of a query by the same number"


def is_blind(side: Side, biases: Sequence[str], weights: Sequence[str]) -> bool:
    """Whether a model returns the same whatever these biases are, and something else with other weights.

    It is tried out: with keys that are rotated, or that something else reads as well, a bias shows.

    Args:
        side: the model; its values are as before when this returns.
        biases, weights: a matrix's.
    """
    base = [one for one in side.run().outputs if one.is_floating_point()]

    def moves(names: Sequence[str]) -> bool:
        kept = {name: side.leaves[name].detach().clone() for name in names}
        generator = torch.Generator().manual_seed(0)
        try:
            for name, value in kept.items():
                noise = torch.randn(value.shape, dtype=torch.float64, generator=generator)
                side.leaves[name].data.copy_(value + 0.5 * noise)
            other = [one for one in side.run().outputs if one.is_floating_point()]
        finally:
            for name, value in kept.items():
                side.leaves[name].data.copy_(value)
        return any(distance(one, two) > SAME for one, two in zip(base, other, strict=True))

    return bool(base and biases and weights) and not moves(biases) and moves(weights)
