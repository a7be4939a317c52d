"""Roundings made on purpose: only where something is computed in less than float64, and as large as it rounds."""

from __future__ import annotations

import torch
from torch import Tensor

from porting.tracing.measure import MEANING, Error, bound, ratio
from porting.tracing.rounding_noise import RoundingNoise

UNIT = torch.finfo(torch.float32).eps


def moved(seed: int = 0) -> Tensor:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    values[::10] = 0.0
    with RoundingNoise(seed):
        result = values.double().float() * 2.0
    return (result.double() / 2 - values.double()) / values.double().abs().clamp_min(1e-30)


def test_a_result_moves_by_a_rounding_or_two_and_a_zero_not_at_all() -> None:
    apart = moved()
    assert bool((apart[::10] == 0).all())
    assert UNIT < float(apart.abs().max()) <= 2.5 * UNIT  # its input by one, and itself by one, each of them rounded
    assert float((apart != 0).double().mean()) > 0.5


def test_the_same_seed_makes_the_same_roundings() -> None:
    assert torch.equal(moved(), moved())
    assert not torch.equal(moved(), moved(seed=1))


def test_what_is_exact_is_left_alone() -> None:
    exact, single = torch.randn(50, dtype=torch.float64), torch.randn(50)
    with RoundingNoise(0):
        assert torch.equal(exact * 3, exact.clone() * 3)
        assert torch.equal(single.view(5, 10).flatten(), single)
        assert torch.equal(single.double(), single.to(torch.float64))
        assert torch.equal(single.double().float(), single)  # a cast that changes no number
        assert torch.equal(torch.arange(50).float(), torch.arange(50, dtype=torch.float32))
        assert not torch.equal(exact.float().double(), exact)
        single.mul_(1.0)
    assert bool(torch.isfinite(single).all())


def test_a_mask_is_not_rounded() -> None:
    """Or a token that is seen would be hidden: (1 - 0.9999999) times the lowest number is far below every score."""
    mask = torch.tensor([1, 1, 0])
    lowest = torch.finfo(torch.float32).min
    with RoundingNoise(0):
        assert ((1.0 - mask.float()) * lowest).tolist() == [0.0, 0.0, lowest]
        large = torch.full((50,), 1e9)
        assert not torch.equal(large + 0.0, large), "every number as large is whole, and rounded"


def errors(largest: float) -> Error:
    return Error(largest, largest**2, 1.0, 1)


def test_the_bound_is_what_arrives_times_four_and_no_decision_that_turned() -> None:
    port, reference = errors(1e-7), errors(1e-7)
    assert bound(port, reference, torch.float32, single=True) == 4e-7
    assert bound(port, reference, torch.float32, single=True, leak=1e-9) == 4e-9
    assert bound(port, reference, torch.float32, single=True, leak=1e-5) == 4e-5
    assert bound(port, reference, torch.float32, single=True, leak=0.1) == 4e-7
    assert bound(port, reference, torch.float32, single=False, leak=1e-5) == MEANING
    assert bound(None, None, None, single=True, leak=1e-9) == 4e-9


def test_errors_below_what_the_exact_values_are_off_by_cannot_be_told_apart() -> None:
    assert ratio(errors(1e-5), errors(1e-7), torch.float32) > 80
    assert ratio(errors(1e-5), errors(1e-7), torch.float32, 2e-5) < 1
