"""How far an activation is from the float64 reference, what that distance means, and where in it the distance lies."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MEANING = 1e-12
"""In float64 a faithful port agrees to this, relative to the largest activation; a bug of meaning is far above."""

ROUNDING = 4.0
"""In the working dtype a faithful port's error stays below this many times the reference's own."""

TURNED = 1e-3
"""What roundings in float64 that move an activation by more have done is turn a decision (an expert, say)."""

LEAKED = 4.0
"""What arrives of roundings that were made on purpose, times this, is what may arrive of those that a run makes.

Of casts by numpy, sums by numpy and tables of angles the largest that arrived was 1.6 times what was measured.
"""

PIECE = 1 << 15
"""Elements that are measured at once: so few that torch does not share them out among threads, which costs more."""


@dataclass(frozen=True)
class Anchor:
    """A float64 activation of the reference, which everything else is measured from.

    Attributes:
        value: the activation.
        scale: its largest absolute value; 1 when it is all zeros.
        rms: the root of its mean square.
        seen: True at the places that count, of the value's shape; None where all do.
    """

    value: Tensor
    scale: float
    rms: float
    seen: Tensor | None = None

    @classmethod
    def of(cls, value: Tensor, seen: Tensor | None = None) -> Anchor:
        """Measure ``value``."""
        value = value if value.dtype == torch.float64 else value.double()
        largest, squares = _size(value)
        return cls(value, largest or 1.0, math.sqrt(squares / (value.numel() or 1)), seen)


@dataclass(frozen=True)
class Error:
    """How far a value is from its anchor, relative to the anchor's scale; inf when some of it is no number.

    Attributes:
        largest: the largest difference.
        squares: the sum of the squared differences.
        floor: the sum of the anchor's own squares: rounding it once makes half a unit in the last place of its root.
        count: how many elements.
    """

    largest: float
    squares: float
    floor: float
    count: int

    @property
    def rms(self) -> float:
        """The root of the mean square."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


def finite(value: Tensor) -> bool:
    """Whether every element is a number."""
    return math.isfinite(_size(value.double())[0])


def error(value: Tensor, anchor: Anchor) -> Error:
    """How far ``value``, of any dtype and of the anchor's shape, is from it, at the places that count."""
    value = value.detach()
    if anchor.seen is not None:
        value = torch.where(anchor.seen, value, anchor.value.to(value.dtype))
    largest, squares = _size(anchor.value, value)
    count = value.numel()
    floor = (anchor.rms / anchor.scale) ** 2 * count
    return Error(largest / anchor.scale, squares / anchor.scale / anchor.scale, floor, count)


def same_rows(value: Tensor, anchor: Anchor) -> bool:
    """Whether a matrix has the anchor's rows in another order, as experts that are given their tokens sorted have.

    Args:
        value: of the anchor's shape, in float64.
        anchor: what it is measured from.
    """
    if value.ndim != 2 or len(value) < 2 or anchor.seen is not None:
        return False
    value = value.detach()
    direction = torch.randn(value.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours, theirs = (rows[(rows @ direction).argsort()] for rows in (value, anchor.value))
    return bool((ours - theirs).abs().max() <= MEANING * anchor.scale)


def by_position(value: Tensor, anchor: Anchor) -> Tensor | None:
    """The largest difference at each position, the last axis but one, relative to scale; None for fewer than 3 axes."""
    if anchor.value.ndim < 3 or not anchor.value.numel():
        return None
    apart = (value.detach().double() - anchor.value).abs_()
    if anchor.seen is not None:
        apart = torch.where(anchor.seen, apart, 0.0)
    return apart.movedim(-2, 0).flatten(1).amax(1) / anchor.scale


def explains(leaked: Tensor, found: Tensor) -> bool:
    """Whether what arrives of roundings explains the differences at every position, and not the largest one alone.

    A table of angles is exact at position 0 and rounded more and more behind it, so in a causal model its roundings
    grow with the position.  Another mistake is as large at the first positions.

    Args:
        leaked: what arrives of the roundings, by position; a position may have what arrives at one twice as far.
        found: the differences.
    """
    most = leaked.cummax(0).values
    reach = (2 * torch.arange(len(most)) + 1).clamp_max(len(most) - 1)
    return bool((found <= (LEAKED * most[reach]).clamp_min(MEANING)).all())


def pooled(errors: Iterable[Error]) -> Error:
    """The errors of one point over all cases: few numbers in one case say little, and all together more."""
    every = list(errors)
    return Error(
        max((difference.largest for difference in every), default=0.0),
        sum(difference.squares for difference in every),
        sum(difference.floor for difference in every),
        sum(difference.count for difference in every),
    )


def ratio(port: Error, reference: Error, dtype: torch.dtype, doubt: float = 0.0) -> float:
    """``|port - exact| / |reference - exact|``: the worse of the two ratios by maximum and by root mean square.

    Errors below half a unit in the last place of the exact value's scale cannot be told from rounding: the reference's
    error counts as at least that.  Where the reference itself has values that are no numbers, such as an overflow in
    float16, the port can only be as good (1) or better (0).

    Args:
        port, reference: the errors.
        dtype: the working dtype.
        doubt: by how much the exact values may be off themselves: errors below that cannot be told from it either.
    """
    if math.isinf(reference.largest):
        return 1.0 if math.isinf(port.largest) else 0.0
    half_unit = torch.finfo(dtype).eps / 2
    floor = half_unit * math.sqrt(reference.floor / reference.count) if reference.count else 0.0
    if reference.largest and doubt > reference.largest:
        floor = max(floor, reference.rms * doubt / reference.largest)
    pairs = ((port.largest, max(reference.largest, half_unit, doubt)), (port.rms, max(reference.rms, floor)))
    return max(ours / theirs if theirs else (math.inf if ours else 0.0) for ours, theirs in pairs)


def luck(count: int) -> float:
    """The bound of the ratio of two rounding errors that are each known from so many numbers.

    The logarithm of the ratio of two root mean squares over n numbers spreads by 1/sqrt(n); five times that is left to
    luck.  From about 50 numbers on it is ``ROUNDING``.

    >>> luck(10_000), round(luck(10), 1)
    (4.0, 9.7)
    """
    return ROUNDING * max(1.0, math.exp(5 / math.sqrt(count)) / 2) if count else math.inf


def bound(
    port: Error | None,
    reference: Error | None,
    dtype: torch.dtype | None,
    *,
    single: bool,
    leak: float | None = None,
    noise: float = 0.0,
) -> float:
    """The largest difference in float64 that may be rounding.

    Rounding shrinks with the unit roundoff and a bug of meaning does not: what a port is off by in the working dtype,
    times the quotient of the two roundoffs, is what it may be off by in float64.  It matters for values that rounding
    blows up, far down a deep model or in a sum with a large constant; elsewhere the bound is ``MEANING``.

    Args:
        port, reference: the errors in the most precise working dtype; None when there is none.
        dtype: that dtype.
        single: the float64 run computed in a lower precision here, and its rounding is that of the working dtype.
        leak: what arrives here of such roundings, where it was measured; without it they are as large as the
            reference's own in the working dtype.  What is larger than the root of that dtype's roundoff is no rounding
            that arrives, but a decision that it turned (a bucket of distances, say), and excuses nothing.
        noise: how far roundings in float64 move the reference here, where that was measured; more than ``TURNED``
            excuses nothing.
    """
    least = max(MEANING, ROUNDING * noise) if noise <= TURNED else MEANING
    leaked = LEAKED * leak if single and leak is not None else None
    if port is None or reference is None or dtype is None:  # without a working dtype a decision that turned shows, too
        turned = (leaked or 0.0) > torch.finfo(torch.float32).eps ** 0.5
        return least if turned else max(least, leaked or 0.0)
    shrunk = ROUNDING * torch.finfo(torch.float64).eps / torch.finfo(dtype).eps
    explained = [difference.largest * shrunk for difference in (port, reference) if math.isfinite(difference.largest)]
    if single and math.isfinite(reference.largest):
        most = ROUNDING * max(reference.largest, torch.finfo(dtype).eps / 2)
        turned = leak is not None and leak > torch.finfo(dtype).eps ** 0.5
        explained.append(most if leaked is None else min(most, leaked) if turned else leaked)
    return max([least, *explained])


def _size(values: Tensor, less: Tensor | None = None) -> tuple[float, float]:
    """The largest absolute value and the sum of squares of ``values - less``; both inf when some is no number.

    It is taken piece by piece, so that the difference stays in the processor's cache.
    """
    pieces = torch.split(values.reshape(-1), PIECE)
    others = pieces if less is None else torch.split(less.reshape(-1), PIECE)
    largest = squares = 0.0
    if not values.numel():
        return largest, squares
    for piece, other in zip(pieces, others, strict=True):
        apart = piece if less is None else piece - other
        low, high = torch.aminmax(apart)
        root = float(torch.linalg.vector_norm(apart))
        if not math.isfinite(root):  # which a square of a very large number is not either
            return math.inf, math.inf
        largest, squares = max(largest, -float(low), float(high)), squares + root * root
    return largest, squares


MOST_ROWS, MOST_POSITIONS, MOST_CHANNELS = 16, 64, 128
"""More than these are taken together, neighbours by their largest."""


@dataclass(frozen=True, kw_only=True)
class ErrorProfile:
    """The differences of one activation in one case, relative to the activation's scale.

    The axes are those of the port: the last one is called channels (of attention scores it is the keys), the one
    before it positions, and all others together rows.

    Attributes:
        case: the number of the case, from 0.
        shape: the activation's own.
        positions: the largest difference over the channels, by row and position.
        channels: the largest difference over all rows and positions, by channel.
    """

    case: int
    shape: tuple[int, ...]
    positions: tuple[tuple[float, ...], ...]
    channels: tuple[float, ...]


def error_profile(value: Tensor, exact: Tensor, scale: float, case: int) -> ErrorProfile:
    """How ``value - exact`` is spread; both are of one shape, of at least one element.

    Where a value is no number the difference is infinite.
    """
    apart = (value.detach().double() - exact).abs().div(scale).nan_to_num(nan=torch.inf, posinf=torch.inf)
    width = apart.shape[-1] if apart.ndim else 1
    length = apart.shape[-2] if apart.ndim > 1 else 1
    apart = apart.reshape(-1, length, width)
    positions = apart.amax(-1)
    most = (min(len(positions), MOST_ROWS), min(length, MOST_POSITIONS))
    return ErrorProfile(
        case=case,
        shape=tuple(value.shape),
        positions=tuple(tuple(row) for row in F.adaptive_max_pool2d(positions[None], most)[0].tolist()),
        channels=tuple(F.adaptive_max_pool1d(apart.amax((0, 1))[None], min(width, MOST_CHANNELS))[0].tolist()),
    )
