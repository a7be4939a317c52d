"""A number that a port has and the reference has not: solved for, and not guessed from a list.

How far an altered reference is from the port is known, and not on which side it is too large: near the solution the
error is a V over the number, whose tip is found by the secant rule with both signs tried, in a dozen passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from porting.causes.replay import Alteration, Rewrite

STEPS = 25
"""So often is the bracket around a start narrowed at most."""

PATIENCE = 4
"""So often may narrowing fail to help: a V gets smaller each time, and a rounded valley does not."""

STARTS = 2
"""From so many of the best starts the search begins."""

Loss = Callable[[Mapping[int, Rewrite]], tuple[float, float]]
"""How far the reference is from the port when these calls are rewritten: in the root mean square, and at most."""


@dataclass(frozen=True, eq=False)
class Dial:
    """One place at which a number may be another one.

    Attributes:
        where: the module that it is about.
        calls: the numbers of the calls that it rewrites.
        turned: the rewrites for a value of the number.
        detail: what the report says of a value, which it is given as a person would write it.
        starts: values to begin with, in order.
        whole: no value is possible but these.
    """

    where: str
    calls: frozenset[int]
    turned: Callable[[float], Mapping[int, Rewrite]]
    detail: Callable[[str], str]
    starts: Sequence[float]
    whole: bool = False


def geometric(first: float, last: float, per_decade: int) -> tuple[float, ...]:
    """Values from one to another in equal ratios, so many in a decade.

    >>> geometric(1.0, 100.0, 1)
    (1.0, 10.0, 100.0)
    """
    count = round(math.log10(last / first) * per_decade)
    return tuple(first * 10 ** (step / per_decade) for step in range(count + 1))


@dataclass(frozen=True)
class Solution:
    """A value of a number.

    Attributes:
        text: as a person would have written it.
        value: what it is.
    """

    text: str
    value: float

    def at(self, dials: Sequence[Dial]) -> tuple[Alteration, ...]:
        """The alterations with this value at several places."""
        return tuple(
            Alteration(
                where=dial.where, rewrites=dial.turned(self.value), detail=dial.detail(self.text), value=self.value
            )
            for dial in dials
        )


def solved_for(dials: Sequence[Dial], loss: Loss, bound: float) -> Solution | None:
    """The one value, the same at each of several places, that leaves no more than a bound."""

    def gap(value: float) -> tuple[float, float]:
        return loss({number: rewrite for dial in dials for number, rewrite in dial.turned(value).items()})

    def fits(value: float) -> bool:
        return gap(value)[1] <= bound

    first = dials[0]
    if first.whole:
        value = min(first.starts, key=lambda start: gap(start)[1])
        found = Solution(f"{value:+.0f}", value)
    else:
        found = Solution(*as_written(_solve(first.starts, lambda value: gap(value)[0], bound), fits))
    return found if fits(found.value) else None


def _solve(starts: Sequence[float], left: Callable[[float], float], bound: float) -> float:
    """The value at the tip of the V; the best start where there is none."""
    errors = {value: left(value) for value in starts}
    order = sorted(starts, key=errors.__getitem__)
    best = order[0], errors[order[0]]
    for middle in (place for place in order[:STARTS] if math.isfinite(errors[place])):
        best = min(best, _tip(middle, dict(errors), left), key=lambda point: point[1])
        if best[1] <= bound / 10:
            break
    return best[0]


def _tip(middle: float, errors: dict[float, float], left: Callable[[float], float]) -> tuple[float, float]:
    """The best value between the neighbours of one, and its error."""
    stuck = 0
    for _ in range(STEPS):
        order = sorted(errors)
        place = order.index(middle)
        beside = order[max(place - 1, 0) : place + 2]
        here = errors[middle]
        inside = [value for value in _secants(middle, beside, errors) if beside[0] < value < beside[-1]]
        for value in (value for value in inside if value not in errors):
            errors[value] = left(value)
        best = min(inside, key=errors.__getitem__, default=middle)
        if errors[best] > 0.5 * here:  # the secants are of no use yet: halve on both sides
            halves = [(middle + value) / 2 for value in beside if value != middle]
            errors.update({value: left(value) for value in halves if value not in errors})
            best = min([*inside, *halves, middle], key=errors.__getitem__)
        stuck = stuck + 1 if errors[best] > 0.9 * here else 0
        middle = best
        if here == 0 or stuck == PATIENCE:
            break
    return middle, errors[middle]


def _secants(middle: float, beside: Sequence[float], errors: Mapping[float, float]) -> Iterator[float]:
    """Where a V through two of the points has its tip: between them, or beyond."""
    here = errors[middle]
    for other in (value for value in beside if value != middle and math.isfinite(errors[value])):
        there = errors[other]
        if here + there > 0:
            yield middle + (other - middle) * here / (here + there)
        if here != there:
            yield middle + (other - middle) * here / (here - there)


def as_written(value: float, fits: Callable[[float], bool]) -> tuple[str, float]:
    """The simplest number that fits as well, as a person would have written it; the number itself where none does.

    >>> as_written(0.36999999999999, lambda one: abs(one - 0.37) < 1e-9)
    ('0.37', 0.37)
    >>> as_written(0.2041241452, lambda one: abs(one - 24**-0.5) < 1e-9)[0]
    '1 / sqrt(24)'
    """
    for text, simple in _spellings(value):
        if fits(simple):
            return text, simple
    return f"{value:.12g}", value


def _spellings(value: float) -> Iterator[tuple[str, float]]:
    for digits in (1, 2, 3):
        yield _decimal(value, digits)
    for text, of, most in (
        ("{}", 1.0, 1e7),
        ("sqrt({})", 2.0, 1e5),
        ("1 / {}", -1.0, 1e3),
        ("1 / sqrt({})", -2.0, 1e5),
    ):
        whole = round(value**of) if 0.5 < value**of < most else 0
        if whole:
            yield text.format(whole), float(whole) ** (1 / of)
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
