"""Distances, and what they mean."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from porting.loading import load
from porting.models.bert_heads import BertForPreTraining
from porting.tracing.measure import (
    MEANING,
    MOST_CHANNELS,
    MOST_POSITIONS,
    MOST_ROWS,
    PIECE,
    ROUNDING,
    Anchor,
    Error,
    bound,
    error,
    error_profile,
    finite,
    luck,
    pooled,
    ratio,
    same_rows,
)
from porting.trials.inputs import LENGTHS
from porting.verification import verify
from porting.verification.compare import MOST_SPREADS
from tests.verification.planted import BUGS, FAR_FROM_ZERO


def test_rows_that_are_slightly_off_are_in_no_other_order() -> None:
    value = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    value[2] = value[0]
    anchor = Anchor.of(value)
    assert same_rows(value[[1, 0, 2]] + 1e-9, anchor)
    assert not same_rows(value + 1e-9, anchor)
    assert not same_rows(value[[2, 1, 0]] + 1e-9, anchor)  # rows that are equal are in any order


def test_a_distance_is_relative_to_the_anchors_scale() -> None:
    anchor = Anchor.of(torch.tensor([3.0, -10.0, 1.0], dtype=torch.float64))
    assert anchor.scale == 10.0
    assert anchor.rms == pytest.approx(math.sqrt(110 / 3))
    far = error(torch.tensor([3.0, -10.5, 1.0], dtype=torch.float64), anchor)
    assert far.largest == pytest.approx(0.05)
    assert far.rms == pytest.approx(0.05 / math.sqrt(3))
    assert far.count == 3


def test_large_activations_are_measured_to_their_end() -> None:
    values = torch.randn(3, PIECE, dtype=torch.float64)
    values[-1, -1] = 50.0
    anchor = Anchor.of(values)
    assert anchor.scale == 50.0
    other = values.clone()
    other[-1, -1] = 0.0
    assert error(other, anchor).largest == 1.0
    assert error(other.mT.contiguous().mT, anchor).largest == 1.0
    assert anchor.rms == pytest.approx(float(values.square().mean().sqrt()))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_infinitely_far(value: float) -> None:
    anchor = Anchor.of(torch.ones(4))
    broken = torch.tensor([1.0, 1.0, value, 1.0])
    assert error(broken, anchor).largest == math.inf
    assert not finite(broken)
    assert finite(torch.ones(3, dtype=torch.long))


def test_zeros_have_a_scale_of_one() -> None:
    anchor = Anchor.of(torch.zeros(3))
    assert error(torch.zeros(3), anchor) == Error(0.0, 0.0, 0.0, 3)
    assert error(torch.tensor([0.0, 1e-3, 0.0]), anchor).largest == pytest.approx(1e-3)
    assert error(torch.zeros(0, 3), Anchor.of(torch.zeros(0, 3))).largest == 0.0


def test_the_ratio_is_the_worse_of_two() -> None:
    ours, theirs = Error(8e-4, 4e-6, 100.0, 100), Error(4e-4, 1e-8, 100.0, 100)
    assert ratio(ours, theirs, torch.float32) == pytest.approx(20.0)
    assert ratio(theirs, theirs, torch.float32) == 1.0


def test_less_than_half_a_unit_counts_as_half_a_unit() -> None:
    eps = torch.finfo(torch.float32).eps
    exact = Error(0.0, 0.0, 100.0, 100)
    assert ratio(Error(eps / 2, 100 * (eps / 2) ** 2, 100.0, 100), exact, torch.float32) == pytest.approx(1.0)
    assert ratio(Error(eps * 3, 0.0, 100.0, 100), exact, torch.float32) == pytest.approx(6.0)


def test_where_the_reference_overflows_the_port_can_be_no_worse() -> None:
    over, fine = Error(math.inf, math.inf, 1.0, 1), Error(1e-3, 1e-6, 1.0, 1)
    assert ratio(over, over, torch.float16) == 1.0
    assert ratio(fine, over, torch.float16) == 0.0
    assert ratio(over, fine, torch.float16) == math.inf


def test_cases_are_pooled() -> None:
    assert pooled([Error(0.1, 2.0, 3.0, 4), Error(0.3, 1.0, 1.0, 1)]) == Error(0.3, 3.0, 4.0, 5)


def test_few_numbers_are_left_to_luck() -> None:
    """The bound for n numbers holds in a million draws of two equally good models, and is four for many."""
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 4, 10, 18):
        draws = torch.randn(2, 20_000, count, generator=generator).square().mean(-1).sqrt()
        assert float((draws[0] / draws[1] > luck(count)).double().mean()) < (1e-2 if count < 4 else 1e-3)
    assert luck(60) == luck(10**6) == ROUNDING
    assert luck(10) > luck(18) > ROUNDING


def test_the_bound_of_meaning_follows_what_rounding_explains() -> None:
    small, large = Error(1e-7, 0.0, 1.0, 1), Error(5e-2, 0.0, 1.0, 1)
    quotient = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    assert bound(None, None, None, single=False) == MEANING
    assert bound(small, small, torch.float32, single=False) == MEANING
    assert bound(large, small, torch.float32, single=False) == pytest.approx(4 * 5e-2 * quotient)
    assert bound(large, small, torch.float32, single=True) == pytest.approx(4e-7)
    assert bound(Error(math.inf, math.inf, 1.0, 1), small, torch.float32, single=False) == MEANING


@pytest.mark.parametrize("size", [5e-5, 1e-6, 1e-9])
def test_a_bug_of_meaning_does_not_explain_itself(size: float) -> None:
    """It is as large in float32 as in float64, so that its bound is far below it."""
    assert bound(Error(size, 0.0, 1.0, 1), Error(1e-7, 0.0, 1.0, 1), torch.float32, single=False) < size / 100


def test_the_largest_by_position_and_by_channel() -> None:
    exact = torch.randn(2, 3, 4, dtype=torch.float64)
    value = exact.clone()
    value[1, 2, 0] += 3.0
    value[1, 2, 3] -= 6.0
    value[0, 1, 3] += 1.5
    found = error_profile(value, exact, 3.0, 1)
    assert (found.case, found.shape) == (1, (2, 3, 4))
    assert torch.allclose(torch.tensor(found.positions), torch.tensor([[0, 0.5, 0], [0, 0, 2.0]]))
    assert found.channels == pytest.approx((1.0, 0.0, 0.0, 2.0))


@pytest.mark.parametrize("shape", [(), (5,), (3, 5), (40, 2, 70, 300)])
def test_it_is_small_whatever_the_shape(shape: tuple[int, ...]) -> None:
    exact = torch.randn(shape, dtype=torch.float64)
    value = exact + torch.rand(shape)
    found = error_profile(value, exact, 1.0, 0)
    assert found.shape == shape
    assert len(found.positions) <= MOST_ROWS
    assert len(found.positions[0]) <= MOST_POSITIONS
    assert len(found.channels) <= MOST_CHANNELS
    assert max(map(max, found.positions)) == max(found.channels) == pytest.approx(float((value - exact).abs().max()))


def test_what_is_no_number_is_infinitely_far_in_a_profile() -> None:
    found = error_profile(torch.tensor([1.0, math.nan, 3.0]), torch.tensor([1.0, 2.0, 3.0]), 1.0, 0)
    assert found.channels == (0.0, math.inf, 0.0)


def test_a_report_tells_where_the_first_guilty_modules_differ(checkpoint: Path) -> None:
    bugs = {bug.name: bug for bug in BUGS}
    model = load(checkpoint)
    assert isinstance(model, BertForPreTraining)
    bugs["value bias dropped"].plant(model)
    bugs["mask inverted"].plant(model)
    bugs["LayerNorm eps 1e-5 everywhere"].plant(model)
    report = verify(checkpoint, model, loaded=True, dtypes=(), causes=False)
    told = [probe for probe in report.probes if probe.spreads]
    assert len(report.guilty) > MOST_SPREADS
    assert told == list(report.guilty[:MOST_SPREADS])
    bias = load(checkpoint).get_parameter("bert.layers.1.attention.value.bias").detach().abs().double()
    (value,) = [probe for probe in told if probe.port.endswith("attention.value")]
    spread = value.spreads[0]  # of the first batch; others were found
    assert max(max(spread.channels) for spread in value.spreads) == value.meaning.isolated
    assert spread.shape == (8, 24, len(bias))
    channels = torch.tensor(spread.channels, dtype=torch.float64)
    assert torch.allclose(channels / channels.max(), bias / bias.max())  # a dropped bias is the same at every position
    token = torch.arange(24) < torch.tensor(LENGTHS)[:, None]  # nothing is compared where padding is
    assert torch.allclose(torch.tensor(spread.positions, dtype=torch.float64), channels.max() * token)


@pytest.mark.slow
def test_a_difference_that_is_rounding_is_not_spread_out(checkpoint: Path) -> None:
    model = load(checkpoint)
    assert isinstance(model, BertForPreTraining)
    FAR_FROM_ZERO.plant(model)
    report = verify(checkpoint, model, loaded=True, causes=False)
    assert any((probe.meaning.isolated or 0.0) > MEANING for probe in report.probes)
    assert [probe.port for probe in report.probes if probe.spreads] == []
