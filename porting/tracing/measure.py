"""Measuring how far an activation is from the float64 reference, and how much of that can be rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

MEANING = 1e-12
"""Tolerance in float64, relative to the largest activation; a port that computes another function is far above it."""

ROUNDING = 4.0
"""Tolerance in the working dtype, as a multiple of the reference's own rounding error."""

APART = 0.01
"""Root mean square of the differences, relative to scale, that no rounding of a dtype comes to in which the reference
makes errors below :data:`QUIET`."""

QUIET = 1e-4
"""The largest error of a reference in a working dtype in which a port's larger error may be no rounding."""

SHRINKS = 0.01
"""The share of a difference in the working dtype, scaled by the unit roundoffs, that float64 shows of a rounding."""

TURNED = 1e-3
"""The largest effect of float64 rounding: beyond it a decision has changed, such as the choice of an expert."""

LEAKED = 4.0
"""Tolerance for propagated rounding errors, as a multiple of what was measured with added noise.

For casts by numpy, sums by numpy and tables of angles, the largest propagated error was 1.6 times the measured one.
"""

PIECE = 1 << 15
"""Number of elements that are measured at once; too few for torch to use several threads, which would be slower."""


@dataclass(frozen=True)
class Anchor:
    """A float64 activation of the reference, from which distances are measured.

    Attributes:
        scale: its largest absolute value; 1 if all elements are 0.
        rms: its root mean square.
        seen: True at the elements that are compared, of the value's shape; None if all are.
        holes: the reference's value has elements that are not numbers; they are not compared, and are zeros here.
    """

    value: Tensor
    scale: float
    rms: float
    seen: Tensor | None = None
    holes: bool = False

    @classmethod
    def of(cls, value: Tensor, seen: Tensor | None = None) -> Anchor:
        """Make an anchor of a value."""
        value = value if value.dtype == torch.float64 else value.double()
        largest, squares = _size(value)
        holes = not math.isfinite(largest)
        if holes:
            number = numbers(value)
            value, seen = torch.where(number, value, 0.0), number if seen is None else number & seen
            largest, squares = _size(value)
        return cls(value, largest or 1.0, math.sqrt(squares / (value.numel() or 1)), seen, holes)

    def having(self, value: Tensor) -> Anchor:
        """The same anchor with another value, measured as before."""
        return replace(self, value=torch.where(numbers(value), value, 0.0) if self.holes else value)


@dataclass(frozen=True)
class Error:
    """The distance of a value from its anchor, relative to the anchor's scale; inf if any element is not finite.

    Attributes:
        floor: the sum of the anchor's own squares, relative to its scale.
    """

    largest: float
    squares: float
    floor: float
    count: int

    @property
    def rms(self) -> float:
        """The root mean square of the differences."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


LARGEST = 1e150
"""Numbers above it are taken for infinite: their squares overflow in float64."""


def numbers(value: Tensor) -> Tensor:
    """The mask of a value's elements that can be compared: those that are finite and not enormous."""
    return value.abs() < LARGEST


def finite(value: Tensor) -> bool:
    """Return whether every element is finite."""
    return math.isfinite(_size(value.double())[0])


def error(value: Tensor, anchor: Anchor) -> Error:
    """Measure the distance of a value from its anchor.

    Args:
        value: of the anchor's shape, in any dtype.

    Returns:
        The distance over the elements that are compared.
    """
    value = value.detach()
    if anchor.seen is not None:
        value = torch.where(anchor.seen, value, anchor.value.to(value.dtype))
    largest, squares = _size(anchor.value, value)
    count = value.numel()
    floor = (anchor.rms / anchor.scale) ** 2 * count
    return Error(largest / anchor.scale, squares / anchor.scale / anchor.scale, floor, count)


def same_rows(value: Tensor, anchor: Anchor) -> bool:
    """Return whether a value has the anchor's rows in another order: tokens sorted by expert, a batch sorted by length.

    Args:
        value: of the anchor's shape, in float64: a matrix, or the rows of a batch [b ...].
    """
    if value.ndim > 2:
        return _same_batch(value.detach(), anchor)
    if value.ndim != 2 or len(value) < 2 or anchor.seen is not None:
        return False
    value = value.detach()
    direction = torch.randn(value.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours, theirs = (rows[(rows @ direction).argsort()] for rows in (value, anchor.value))
    return bool((ours - theirs).abs().max() <= MEANING * anchor.scale)


def _same_batch(value: Tensor, anchor: Anchor) -> bool:
    """Whether the rows of a batch are the anchor's in another order, at the places of each that are not padding.

    Rows that are close to the anchor's in its own order are in no other one: something else is different.
    """

    def alike(one: int, row: int) -> bool:
        seen = slice(None) if anchor.seen is None else anchor.seen[row]
        off = (value[one] - anchor.value[row])[seen].abs()
        return not off.numel() or bool(off.max() <= ALIKE * anchor.scale)

    rows = range(len(value))
    if all(alike(row, row) for row in rows):
        return False
    free = [*rows]
    for row in rows:
        found = next((one for one in free if alike(one, row)), None)
        if found is None:
            return False
        free.remove(found)
    return True


ALIKE = 1e-6
"""Rows that are closer, relative to scale, are the same one, whatever dtype is used inside."""


def by_position(value: Tensor, anchor: Anchor) -> Tensor | None:
    """Return the largest difference at each position (the second last axis), or None for fewer than 3 axes."""
    if anchor.value.ndim < 3 or not anchor.value.numel():
        return None
    difference = (value.detach().double() - anchor.value).abs_()
    if anchor.seen is not None:
        difference = torch.where(anchor.seen, difference, 0.0)
    return difference.movedim(-2, 0).flatten(1).amax(1) / anchor.scale


def explains(leaked: Tensor, found: Tensor) -> bool:
    """Return whether propagated rounding errors explain the difference at every position, not only the largest one.

    A table of angles is exact at position 0 and less exact at later ones, so in a causal model its rounding errors grow
    with the position. Other mistakes are as large at the first positions.

    Args:
        leaked: the measured rounding errors, by position; each may be as large as that at twice the position.
        found: the differences, by position.
    """
    largest = leaked.cummax(0).values
    reach = (2 * torch.arange(len(largest)) + 1).clamp_max(len(largest) - 1)
    return bool((found <= (LEAKED * largest[reach]).clamp_min(MEANING)).all())


def pooled(errors: Iterable[Error]) -> Error:
    """Combine the errors of one point over all cases, since a case with few elements says little."""
    all_errors = list(errors)
    return Error(
        max((difference.largest for difference in all_errors), default=0.0),
        sum(difference.squares for difference in all_errors),
        sum(difference.floor for difference in all_errors),
        sum(difference.count for difference in all_errors),
    )


def ratio(port: Error, reference: Error, dtype: torch.dtype, doubt: float = 0.0) -> float:
    """Return ``|port - exact| / |reference - exact|``, the larger of the ratios by maximum and by root mean square.

    The reference's error counts as at least half a unit in the last place of the exact value's scale, since smaller
    errors cannot be told from rounding. If the reference has values that are not finite, such as an overflow in
    float16, the port can only be as good (1) or better (0).

    Args:
        doubt: the possible error of the exact values themselves, below which errors do not count either.
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
    """Return the largest ratio of two rounding errors that chance explains, each measured on so many elements.

    The logarithm of the ratio of two root mean squares over n elements has a standard deviation of 1/sqrt(n); five
    times that is tolerated. From about 50 elements on the result is ``ROUNDING``.

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
    """Return the largest difference in float64 that rounding explains.

    Rounding errors shrink with the unit roundoff, and mistakes do not. So the error in the working dtype, times the
    quotient of the two roundoffs, is tolerated in float64. That matters where rounding errors grow large, deep in a
    model or in a sum with a large constant; elsewhere the result is ``MEANING``.

    Args:
        port, reference: the errors in the most precise working dtype; None if there is none.
        single: the float64 run computed in a lower precision here, and rounds as in the working dtype.
        leak: the measured error that propagates to here from such rounding; None if it was not measured, and then the
            reference's error in the working dtype is tolerated. An error above the square root of that dtype's roundoff
            comes from a changed decision, such as a bucket of distances, and is not tolerated.
        noise: the measured effect of float64 rounding on the reference here; one above ``TURNED`` is not tolerated.
    """
    tolerance = max(MEANING, ROUNDING * noise) if noise <= TURNED else MEANING
    leaked = LEAKED * leak if single and leak is not None else None
    if port is None or reference is None or dtype is None:  # without a working dtype
        changed_decision = single and leak is not None and leak > torch.finfo(torch.float32).eps ** 0.5
        return tolerance if changed_decision else max(tolerance, leaked or 0.0)
    factor = ROUNDING * torch.finfo(torch.float64).eps / torch.finfo(dtype).eps
    explained = [difference.largest * factor for difference in (port, reference) if math.isfinite(difference.largest)]
    if single and math.isfinite(reference.largest):
        largest = ROUNDING * max(reference.largest, torch.finfo(dtype).eps / 2)
        changed_decision = leak is not None and leak > torch.finfo(dtype).eps ** 0.5
        explained.append(largest if leaked is None else min(largest, leaked) if changed_decision else leaked)
    return max([tolerance, *explained])


def _size(values: Tensor, less: Tensor | None = None) -> tuple[float, float]:
    """Return the largest absolute value and the sum of squares of ``values - less``; both inf if any is not finite.

    It is computed by pieces, so that the difference stays in the processor's cache.
    """
    pieces = torch.split(values.reshape(-1), PIECE)
    others = pieces if less is None else torch.split(less.reshape(-1), PIECE)
    largest = squares = 0.0
    if not values.numel():
        return largest, squares
    for piece, other in zip(pieces, others, strict=True):
        difference = piece if less is None else piece - other
        low, high = torch.aminmax(difference)
        root = float(torch.linalg.vector_norm(difference))
        if not math.isfinite(root):  # a square may overflow, too
            return math.inf, math.inf
        largest, squares = max(largest, -float(low), float(high)), squares + root * root
    return largest, squares


MOST_ROWS, MOST_POSITIONS, MOST_CHANNELS = 16, 64, 128
"""Largest numbers of entries of a profile; of more, neighbours are joined by their maximum."""


@dataclass(frozen=True, kw_only=True)
class ErrorProfile:
    """How the differences of one activation in one case are distributed, relative to its scale.

    The port's last axis is called channels (for attention scores these are keys), the axis before it positions, and all
    others together rows.

    Attributes:
        case: the number of the case, from 0.
        positions: the largest difference over the channels, by row and position.
        channels: the largest difference over all rows and positions, by channel.
    """

    case: int
    shape: tuple[int, ...]
    positions: tuple[tuple[float, ...], ...]
    channels: tuple[float, ...]


def error_profile(value: Tensor, exact: Tensor, scale: float, case: int) -> ErrorProfile:
    """Return how ``value - exact`` is distributed; both have the same shape and at least one element.

    The difference of an element that is not finite is infinite.
    """
    difference = (value.detach().double() - exact).abs().div(scale).nan_to_num(nan=torch.inf, posinf=torch.inf)
    width = difference.shape[-1] if difference.ndim else 1
    length = difference.shape[-2] if difference.ndim > 1 else 1
    difference = difference.reshape(-1, length, width)
    positions = difference.amax(-1)
    size = (min(len(positions), MOST_ROWS), min(length, MOST_POSITIONS))
    return ErrorProfile(
        case=case,
        shape=tuple(value.shape),
        positions=tuple(tuple(row) for row in F.adaptive_max_pool2d(positions[None], size)[0].tolist()),
        channels=tuple(F.adaptive_max_pool1d(difference.amax((0, 1))[None], min(width, MOST_CHANNELS))[0].tolist()),
    )
