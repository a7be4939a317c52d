"""Comparing pieces of two tensors: equal bytes, equal values, or the size and place of the difference."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

EXACT = 2**53
"""Every whole number up to this one is a float64."""

_memcmp = ctypes.CDLL(None).memcmp  # the C library's: it lets other threads run, and is as fast as memory
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True, kw_only=True)
class Odd:
    """The number of elements of a tensor that are not finite.

    Attributes:
        nan: how many are NaN.
        inf: how many are infinite, of either sign.
    """

    nan: int = 0
    inf: int = 0

    def __add__(self, other: Odd) -> Odd:
        return Odd(nan=self.nan + other.nan, inf=self.inf + other.inf)

    def __bool__(self) -> bool:
        return bool(self.nan or self.inf)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The result of comparing elements; the results of a tensor's pieces can be added.

    Attributes:
        same_bytes: whether the dtypes and all bytes are the same.
        unequal: how many elements have other values.  A NaN equals a NaN, and 0.0 equals -0.0.
        beyond: how many of these are further apart than the tolerance.
        largest: the largest distance; infinite where a number stands against NaN or an infinity.
        squares: the sum of the squares of the finite distances.
        at: the place of the largest distance in row-major order, None where nothing differs.
        low, high: the smallest box that holds all that differs: its first and its last corner.
        odd: NaN and infinities of the two sides.
    """

    numel: int = 0
    same_bytes: bool = True
    unequal: int = 0
    beyond: int = 0
    largest: float = 0.0
    squares: float = 0.0
    at: int | None = None
    values: tuple[float | complex | int, float | complex | int] | None = None
    low: tuple[int, ...] = ()
    high: tuple[int, ...] = ()
    odd: tuple[Odd, Odd] = (Odd(), Odd())

    @property
    def rms(self) -> float:
        """The root mean square of the finite distances."""
        return math.sqrt(self.squares / self.numel) if self.numel else 0.0

    def __add__(self, other: Difference) -> Difference:
        further = self if self.at is not None and (other.at is None or self.largest >= other.largest) else other
        return Difference(
            numel=self.numel + other.numel,
            same_bytes=self.same_bytes and other.same_bytes,
            unequal=self.unequal + other.unequal,
            beyond=self.beyond + other.beyond,
            largest=further.largest,
            squares=self.squares + other.squares,
            at=further.at,
            values=further.values,
            low=tuple(map(min, self.low, other.low)) if self.low and other.low else self.low or other.low,
            high=tuple(map(max, self.high, other.high)) if self.high and other.high else self.high or other.high,
            odd=(self.odd[0] + other.odd[0], self.odd[1] + other.odd[1]),
        )


def compare_pieces(
    left: Tensor, right: Tensor, *, start: int, shape: Sequence[int], atol: float = 0.0, rtol: float = 0.0
) -> Difference:
    """Compare the same elements of two tensors.

    Args:
        left, right: the elements in row-major order; 1-D, contiguous, of any dtypes.
        atol, rtol: elements at most ``atol + rtol * abs(right)`` apart are not counted as ``beyond``.
    """
    found = Difference(numel=left.numel())
    if not left.numel():
        return replace(found, same_bytes=left.dtype == right.dtype)
    same = left.dtype == right.dtype and not _memcmp(left.data_ptr(), right.data_ptr(), left.nbytes)
    odd = count_odd(left)
    if same:
        return replace(found, odd=(odd, odd))
    found = replace(found, same_bytes=False, odd=(odd, count_odd(right)))
    x, y = _numbers(left), _numbers(right)
    unequal = ~((x == y) | (x.isnan() & y.isnan()))
    rounded = _rounded(left, x) or _rounded(right, y)
    if rounded:  # whole numbers beyond float64, which Python compares as they are
        unequal |= torch.tensor([a != b for a, b in zip(left.tolist(), right.tolist(), strict=True)])
    if not bool(unequal.any()):
        return found
    distance = (x - y).abs().nan_to_num_(nan=math.inf, posinf=math.inf)
    distance = distance.clamp_(min=1.0) if rounded else distance  # whole numbers that differ
    distance[~unequal] = 0.0
    allowed = atol + rtol * y.abs()
    place = int(distance.argmax())
    low, high = _span(unequal.nonzero().reshape(-1) + start, shape)
    finite = distance[distance.isfinite()]
    return replace(
        found,
        unequal=int(unequal.sum()),
        beyond=int((unequal & ~(distance <= allowed)).sum()),
        largest=float(distance[place]),
        squares=float(finite.dot(finite)),
        at=start + place,
        values=(left[place].item(), right[place].item()),
        low=low,
        high=high,
    )


def count_odd(tensor: Tensor) -> Odd:
    """Count NaN and infinities in a contiguous tensor; both parts of a complex number count."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or not tensor.numel():
        return Odd()
    if tensor.itemsize == 1:  # 8-bit floats have few operations of their own
        tensor = tensor.float()
    least, most = torch.aminmax(tensor)  # one pass, and a NaN among the elements makes both NaN
    if bool(least.isfinite()) and bool(most.isfinite()):
        return Odd()
    return Odd(nan=int(tensor.isnan().sum()), inf=int(tensor.isinf().sum()))


def _numbers(tensor: Tensor) -> Tensor:
    """The elements in float64, which holds every float exactly; complex ones in complex128."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    if tensor.itemsize == 1 and tensor.is_floating_point():
        tensor = tensor.float()
    return tensor.double()


def _rounded(tensor: Tensor, numbers: Tensor) -> bool:
    return tensor.itemsize == 8 and not tensor.is_floating_point() and bool((numbers.abs() >= EXACT).any())


def _span(places: Tensor, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The smallest box that holds these places, counted in row-major order."""
    axes = torch.unravel_index(places, tuple(shape))
    return tuple(int(along.min()) for along in axes), tuple(int(along.max()) for along in axes)
