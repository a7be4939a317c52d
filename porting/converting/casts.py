"""Casts that count what they lose."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Losses:
    """What a cast, or a factor, did to the elements of a tensor.

    Attributes:
        infinite: finite values that became infinite.
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


def can_lose(dtype: torch.dtype, to: torch.dtype) -> bool:
    """Whether a value of ``dtype`` can become infinite or zero in ``to``."""
    if not (dtype.is_floating_point and to.is_floating_point):
        return False
    mine, other = torch.finfo(dtype), torch.finfo(to)
    return mine.max > other.max or mine.smallest_normal * mine.eps < other.smallest_normal * other.eps


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@cache
def _marks(dtype: torch.dtype) -> tuple[torch.dtype, int, int]:
    """Of a floating-point dtype the integers as wide, the bits that are not the sign, and those of infinity."""
    integers = _INTEGERS[dtype.itemsize]
    return integers, torch.iinfo(integers).max, int(torch.tensor(float("inf"), dtype=dtype).view(integers))


def losses(before: Tensor, after: Tensor) -> Losses:
    """What was lost between two tensors of the same shape.

    One look at the smallest and the largest bit pattern of the result shows that nothing can have been lost, which is
    nearly always so; only else are elements counted.
    """
    if after.numel() == 0:
        return NONE
    seen = after if after.itemsize > 1 else after.float()
    integers, magnitude, beyond = _marks(seen.dtype)
    least, most = torch.aminmax(seen.view(integers) & magnitude)  # all but the sign: ordered as the values are
    infinite = _infinities(after) - _infinities(before) if int(most) >= beyond else 0
    vanished = int(torch.count_nonzero(before)) - int(torch.count_nonzero(seen)) if int(least) == 0 else 0
    return Losses(infinite=infinite, vanished=vanished) if infinite or vanished else NONE


def _infinities(tensor: Tensor) -> int:
    return int(torch.isinf(tensor if tensor.itemsize > 1 else tensor.float()).sum())
