"""Computed positions that are not the reference's: sinusoids."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from porting.causes.anatomy import Anatomy
from porting.causes.cause import Cause, after, other
from porting.causes.replay import Alteration


class SinusoidLayout(Cause):
    """Sines and cosines in halves, or one by one."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Each table of positions that was computed and not learned."""
        for one in anatomy.embeddings:
            values = anatomy.tape[one.call.result]
            if one.role == "positions" and values.shape[-1] % 2 == 0 and sinusoidal(anatomy.tape[one.weight]):
                yield other(one.call, after(halves_to_pairs), "in pairs, not in halves")
                yield other(one.call, after(pairs_to_halves), "in halves, not in pairs")


def sinusoidal(table: Tensor) -> bool:
    """Whether the rows of a table are sines and cosines: each of the same length, and 0s and 1s alone in the first."""
    lengths = table.square().sum(-1)
    first = table[0]
    return bool(torch.allclose(lengths, lengths[:1].expand_as(lengths), rtol=1e-4)) and bool(
        ((first - first.round()).abs() < 1e-6).all()
    )


def halves_to_pairs(value: Tensor) -> Tensor:
    """[... (k d)] -> [... (d k)], k = sine, cosine."""
    return value.reshape(*value.shape[:-1], 2, -1).mT.flatten(-2)


def pairs_to_halves(value: Tensor) -> Tensor:
    """[... (d k)] -> [... (k d)], k = sine, cosine."""
    return value.reshape(*value.shape[:-1], -1, 2).mT.flatten(-2)


CAUSES: tuple[Cause, ...] = (
    SinusoidLayout(
        name="sinusoid layout",
        what="sines and cosines stand in halves where the reference has them one by one, or the other way round",
        looks="the position table differs by an order of its channels",
        fix="the paper interleaves them; tensor2tensor and what is descended from it have all sines first",
    ),
)
