"""Casts that count lost values, and whose bits depend on the values alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from porting.loading import INTEGERS
from porting.ops import require_held
from porting.plan.move import Casts

SLICE = 1 << 16
"""Elements of a window whose losses are counted at a time."""


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The number of values that a cast, or a factor, lost in a tensor.

    Attributes:
        infinite: finite values that became infinite, or what a dtype without infinity has instead.
        vanished: values that became zero: they were smaller than all that the new dtype has, its subnormals included.
    """

    infinite: int = 0
    vanished: int = 0

    def __add__(self, other: Losses) -> Losses:
        if other is NONE:
            return self
        return Losses(infinite=self.infinite + other.infinite, vanished=self.vanished + other.vanished)

    def __bool__(self) -> bool:
        return bool(self.infinite or self.vanished)


NONE = Losses()


class CountedCasts(Casts):
    """Casts values and counts the losses; values of the same dtype are copied as bits.

    Attributes:
        losses: what was lost so far.
    """

    def __init__(self) -> None:
        self.losses = NONE

    def put(self, values: Tensor, place: Tensor) -> None:
        """Write values to their place."""
        if values.dtype == place.dtype:
            raw = INTEGERS[values.dtype.itemsize]  # no dtype is too strange to be moved so, and no NaN changes
            place.view(raw).copy_(values.view(raw))
            return
        require_held(values, place.dtype)
        place.copy_(values)
        if values.is_complex() and place.is_complex():
            values, place = torch.view_as_real(values), torch.view_as_real(place)
        if values.is_floating_point() and place.is_floating_point():
            lost = settle(values, place)
            self.losses = self.losses if lost is NONE else self.losses + lost

    def put_window(self, values: Tensor, place: Tensor) -> None:
        """Write a window in slices, since counting takes memory."""
        for start in range(0, len(values), SLICE):
            self.put(values[start : start + SLICE], place[start : start + SLICE])

    def finish(self, computed: Tensor) -> None:
        """Give every NaN the same bits, also where no cast did."""
        if computed.is_complex():
            computed = torch.view_as_real(computed)
        if computed.is_floating_point():
            unify(computed)


@cache
def _marks(dtype: torch.dtype) -> tuple[torch.dtype, int, int, int]:
    """Bit patterns of a float dtype: its integer dtype, the mask without the sign, infinity, and the NaN to use."""
    integers = INTEGERS[dtype.itemsize]
    magnitude = (1 << (8 * dtype.itemsize - 1)) - 1
    infinity, nan = (int(torch.tensor(value, dtype=dtype).view(integers)) & magnitude for value in (math.inf, math.nan))
    return integers, magnitude, infinity, nan


def settle(before: Tensor, after: Tensor) -> Losses:
    """Count what a cast lost, and give every NaN in its result the same bits.

    Which bits a cast gives a NaN depends on the instructions that did it, and so on where a tensor was cut.  One look
    at the smallest and the largest bit pattern of the result shows that it has no NaN and that nothing can have been
    lost, which is nearly always so; only else are elements counted.
    """
    if after.numel() == 0:
        return NONE
    seen = after if after.itemsize > 1 else after.float()
    integers, magnitude, infinity, _ = _marks(seen.dtype)
    least, most = torch.aminmax(seen.view(integers) & magnitude)  # all but the sign: ordered as the values are
    if int(most) > infinity:
        unify(after)
    infinite = max(0, _infinities(after) - _infinities(before)) if int(most) >= infinity else 0
    infinite = infinite if after.itemsize > 1 else _too_large(before, seen, after.dtype)
    vanished = _nonzero(before) - _nonzero(seen) if int(least) == 0 else 0
    return Losses(infinite=infinite, vanished=vanished) if infinite or vanished else NONE


def unify(values: Tensor) -> None:
    """Give every NaN the same bits."""
    integers, _, _, nan = _marks(values.dtype)
    values.view(integers).masked_fill_((values if values.itemsize > 1 else values.float()).isnan(), nan)


def _too_large(before: Tensor, seen: Tensor, dtype: torch.dtype) -> int:
    """How many values are beyond what a dtype of 8 bits rounds to its largest: it may have no infinity for them."""
    limits = torch.finfo(dtype)
    edge = limits.max + limits.eps * 2 ** math.floor(math.log2(limits.max)) / 2
    return int(((before.double().abs() >= edge) & (seen != before.double())).sum())


def _infinities(tensor: Tensor) -> int:
    return int(torch.isinf(tensor if tensor.itemsize > 1 else tensor.float()).sum())


def _nonzero(tensor: Tensor) -> int:
    return int(torch.count_nonzero(tensor if tensor.itemsize > 1 else tensor.float()))
