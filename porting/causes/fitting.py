"""Solving for a number that differs between port and reference, such as an eps or a scale.

The distance between the altered reference and the port has no sign. As a function of the number it is V-shaped near the
solution; the secant rule, with both signs tried, finds the tip of the V in about a dozen passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from porting.causes.replay import Alteration, Rewrite

STEPS = 25
"""Largest number of times that the bracket around a start is narrowed."""

PATIENCE = 2
"""Give up after so many narrowings without progress: a V gets smaller each time, a rounded minimum does not."""

TIPS = 2
"""Number of starting values, the best first, about which the tip is searched: of neighbours the better one."""

NEARLY = 1e3
"""A value that leaves so many times the bound may be a simple number that fits, but for its last digits."""

Loss = Callable[[Mapping[int, Rewrite]], tuple[float, float]]
"""Rewrites -> the distance between the altered reference and the port, as (root mean square, maximum)."""


@dataclass(frozen=True, eq=False)
class FreeParameter:
    """A number at one place of the model that is solved for.

    Attributes:
        where: the path of the module.
        calls: the numbers of the calls that are rewritten.
        rewrites: value -> the rewrites with this value.
        detail: the value's text, as a person would write it -> the text of the report.
        starts: values to begin with, in ascending order.
        integer: only the values of ``starts`` are possible.
    """

    where: str
    calls: frozenset[int]
    rewrites: Callable[[float], Mapping[int, Rewrite]]
    detail: Callable[[str], str]
    starts: Sequence[float]
    integer: bool = False


def geometric(first: float, last: float, per_decade: int) -> tuple[float, ...]:
    """Return values from ``first`` to ``last`` in equal ratios.

    >>> geometric(1.0, 100.0, 1)
    (1.0, 10.0, 100.0)
    """
    count = round(math.log10(last / first) * per_decade)
    return tuple(first * 10 ** (step / per_decade) for step in range(count + 1))


@dataclass(frozen=True)
class Solution:
    """A value that was solved for.

    Attributes:
        text: the value as a person would have written it, ``"1 / sqrt(24)"``.
        value: the value as a number.
    """

    text: str
    value: float

    def at(self, parameters: Sequence[FreeParameter]) -> tuple[Alteration, ...]:
        """Return the alterations that set this value at several places."""
        return tuple(
            Alteration(
                where=parameter.where,
                rewrites=parameter.rewrites(self.value),
                detail=parameter.detail(self.text),
                value=self.value,
            )
            for parameter in parameters
        )


def solved_for(parameters: Sequence[FreeParameter], loss: Loss, bound: float) -> Solution | None:
    """Find the value, the same at all places, that brings the reference to the port.

    Args:
        loss: the distance between the altered reference and the port.
        bound: the largest distance that counts as equal.

    Returns:
        The value, or None where none leaves a distance within the bound.
    """

    def gap(value: float) -> tuple[float, float]:
        return loss(
            {number: rewrite for parameter in parameters for number, rewrite in parameter.rewrites(value).items()}
        )

    def fits(value: float) -> bool:
        return gap(value)[1] <= bound

    first = parameters[0]
    if first.integer:
        value = min(first.starts, key=lambda start: gap(start)[1])
        found = Solution(f"{value:+.0f}", value)
    else:
        value = _solve(first.starts, lambda value: gap(value)[0], bound)
        found = Solution(*as_written(value, fits)) if gap(value)[1] <= NEARLY * bound else Solution("", value)
    return found if fits(found.value) else None


def _solve(starts: Sequence[float], error_at: Callable[[float], float], bound: float) -> float:
    """Return the value at the tip of the V, or the best start where there is none."""
    errors = {value: error_at(value) for value in starts}
    tips = [
        value
        for number, value in enumerate(starts)
        if all(errors[value] <= errors[other] for other in starts[max(number - 1, 0) : number + 2])
    ]
    order = sorted(tips or starts, key=errors.__getitem__)
    best = order[0], errors[order[0]]
    for start in (place for place in order[:TIPS] if math.isfinite(errors[place])):
        best = min(best, _tip(start, dict(errors), error_at), key=lambda point: point[1])
        if best[1] <= bound / 10:
            break
    return best[0]


def _tip(middle: float, errors: dict[float, float], error_at: Callable[[float], float]) -> tuple[float, float]:
    """Return the best value between the neighbours of ``middle``, and its error."""
    narrowings_without_progress = 0
    for _ in range(STEPS):
        order = sorted(errors)
        index = order.index(middle)
        bracket = order[max(index - 1, 0) : index + 2]
        error = errors[middle]
        inside = [value for value in _secants(middle, bracket, errors) if bracket[0] < value < bracket[-1]]
        for value in (value for value in inside if value not in errors):
            errors[value] = error_at(value)
        best = min(inside, key=errors.__getitem__, default=middle)
        if errors[best] > 0.5 * error:  # the secants are of no use yet: halve on both sides
            halves = [(middle + value) / 2 for value in bracket if value != middle]
            errors.update({value: error_at(value) for value in halves if value not in errors})
            best = min([*inside, *halves, middle], key=errors.__getitem__)
        narrowings_without_progress = narrowings_without_progress + 1 if errors[best] > 0.9 * error else 0
        middle = best
        if error == 0 or narrowings_without_progress == PATIENCE:
            break
    return middle, errors[middle]


def _secants(middle: float, bracket: Sequence[float], errors: Mapping[float, float]) -> Iterator[float]:
    """Yield the tips of the Vs through two points: between the points, or beyond them."""
    error = errors[middle]
    for neighbour in (value for value in bracket if value != middle and math.isfinite(errors[value])):
        other_error = errors[neighbour]
        if error + other_error > 0:
            yield middle + (neighbour - middle) * error / (error + other_error)
        if error != other_error:
            yield middle + (neighbour - middle) * error / (error - other_error)


def as_written(value: float, fits: Callable[[float], bool]) -> tuple[str, float]:
    """Return the simplest number that still fits, with its text; the number itself where none is simpler.

    >>> as_written(0.36999999999999, lambda number: abs(number - 0.37) < 1e-9)
    ('0.37', 0.37)
    >>> as_written(0.2041241452, lambda number: abs(number - 24**-0.5) < 1e-9)[0]
    '1 / sqrt(24)'
    """
    for text, simple in _spellings(value):
        if fits(simple):
            return text, simple
    return f"{value:.12g}", value


def _spellings(value: float) -> Iterator[tuple[str, float]]:
    for digits in (1, 2, 3):
        yield _decimal(value, digits)
    for text, power, limit in (
        ("{}", 1.0, 1e7),
        ("sqrt({})", 2.0, 1e5),
        ("1 / {}", -1.0, 1e3),
        ("1 / sqrt({})", -2.0, 1e5),
    ):
        whole = round(value**power) if 0.5 < value**power < limit else 0
        if whole:
            yield text.format(whole), float(whole) ** (1 / power)
    for text, squared in (("sqrt({} pi)", value**2 / math.pi), ("sqrt({} / pi)", value**2 * math.pi)):
        whole = round(squared) if 0.5 < squared < 1e3 else 0
        if whole:
            yield (
                text.format(whole),
                math.sqrt(whole * (math.pi if text.endswith(" pi)") and "/" not in text else 1 / math.pi)),
            )
    for digits in range(4, 12):
        yield _decimal(value, digits)


def _decimal(value: float, digits: int) -> tuple[str, float]:
    simple = float(f"{value:.{digits - 1}e}")
    return f"{simple:.12g}", simple
