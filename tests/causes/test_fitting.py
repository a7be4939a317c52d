"""A number that is solved for: found from afar, spelled as a person would, and not found where there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest

from porting.causes.fitting import FreeParameter, Solution, as_written, geometric, solved_for
from porting.causes.replay import Rewrite


def parameter_of(
    starts: tuple[float, ...], *, integer: bool = False
) -> tuple[FreeParameter, Callable[[Mapping[int, Rewrite]], float]]:
    """A free parameter, and a function that tells for which value its rewrites were made."""
    values: dict[int, float] = {}

    def rewrites_for(value: float) -> Mapping[int, Rewrite]:
        rewrite: Rewrite = lambda values, call: None  # noqa: E731  # only its identity counts
        values[id(rewrite)] = value
        kept.append(rewrite)
        return {0: rewrite}

    kept: list[Rewrite] = []
    parameter = FreeParameter("layer.0", frozenset({0}), rewrites_for, "it is {}".format, starts, integer)
    return parameter, lambda rewrites: values[id(rewrites[0])]


@pytest.mark.parametrize("truth", [3e-6, 1e-12, 2.7182818e-7, 0.0123, 0.37])
@pytest.mark.parametrize("bend", [0.0, 0.9])
def test_the_tip_of_a_v_is_found(truth: float, bend: float) -> None:
    """Also where its sides are bent, as those of most errors are."""
    parameter, value_of = parameter_of(geometric(1e-14, 10.0, 1))
    tries = []

    def loss(rewrites: Mapping[int, Rewrite]) -> tuple[float, float]:
        value = value_of(rewrites)
        tries.append(value)
        apart = abs(value - truth) / (value + truth)
        error = apart * (1 + bend * math.sin(3 * apart))
        return error, 2 * error

    found = solved_for([parameter], loss, 1e-10)
    assert found is not None
    assert found.value == pytest.approx(truth, rel=1e-9)
    assert float(found.text) == pytest.approx(truth, rel=1e-9)
    assert len(tries) < 100


def test_what_no_value_explains_is_not_solved() -> None:
    parameter, value_of = parameter_of(geometric(1e-3, 1e3, 1))
    tries = []

    def loss(rewrites: Mapping[int, Rewrite]) -> tuple[float, float]:
        tries.append(rewrites)
        error = 0.1 + abs(math.log(value_of(rewrites) / 7))
        return error, error

    assert solved_for([parameter], loss, 1e-12) is None
    assert len(tries) < 250


def test_a_whole_number_is_one_of_those_that_are_possible() -> None:
    parameter, value_of = parameter_of(tuple(float(step) for step in range(-20, 21)), integer=True)
    found = solved_for([parameter], lambda rewrites: (0.0, abs(value_of(rewrites) - 17)), 0.0)
    assert found == Solution("+17", 17.0)
    (alteration,) = found.at([parameter])
    assert (alteration.where, alteration.detail) == ("layer.0", "it is +17")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.125, "0.125"),
        (1e-5, "1e-05"),
        (1 / 3, "1 / 3"),
        (24**0.5, "sqrt(24)"),
        (500000.0, "500000"),
        (0.44715, "0.44715"),
    ],
)
def test_a_number_is_spelled_as_a_person_would(value: float, text: str) -> None:
    found, simple = as_written(value * (1 + 1e-13), lambda parameter: math.isclose(parameter, value, rel_tol=1e-12))
    assert found == text
    assert simple == pytest.approx(value, rel=1e-15)
