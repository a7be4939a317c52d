"""Where a difference lies, in few numbers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from porting.loading import load
from porting.models.bert_heads import BertForPreTraining
from porting.tracing.measure import MEANING
from porting.tracing.spread import MOST_CHANNELS, MOST_POSITIONS, MOST_ROWS, spread_of
from porting.verification import verify
from porting.verification.compare import MOST_SPREADS
from porting.verification.inputs import LENGTHS
from tests.verification.planted import BUGS, FAR_FROM_ZERO


def test_the_largest_by_position_and_by_channel() -> None:
    exact = torch.randn(2, 3, 4, dtype=torch.float64)
    value = exact.clone()
    value[1, 2, 0] += 3.0
    value[1, 2, 3] -= 6.0
    value[0, 1, 3] += 1.5
    found = spread_of(value, exact, 3.0, 1)
    assert (found.case, found.shape) == (1, (2, 3, 4))
    assert torch.allclose(torch.tensor(found.positions), torch.tensor([[0, 0.5, 0], [0, 0, 2.0]]))
    assert found.channels == pytest.approx((1.0, 0.0, 0.0, 2.0))


@pytest.mark.parametrize("shape", [(), (5,), (3, 5), (40, 2, 70, 300)])
def test_it_is_small_whatever_the_shape(shape: tuple[int, ...]) -> None:
    exact = torch.randn(shape, dtype=torch.float64)
    value = exact + torch.rand(shape)
    found = spread_of(value, exact, 1.0, 0)
    assert found.shape == shape
    assert len(found.positions) <= MOST_ROWS
    assert len(found.positions[0]) <= MOST_POSITIONS
    assert len(found.channels) <= MOST_CHANNELS
    assert max(map(max, found.positions)) == max(found.channels) == pytest.approx(float((value - exact).abs().max()))


def test_what_is_no_number_is_infinitely_far() -> None:
    found = spread_of(torch.tensor([1.0, math.nan, 3.0]), torch.tensor([1.0, 2.0, 3.0]), 1.0, 0)
    assert found.channels == (0.0, math.inf, 0.0)


def test_a_report_tells_where_the_first_guilty_modules_differ(checkpoint: Path) -> None:
    bugs = {bug.name: bug for bug in BUGS}
    model = load(checkpoint)
    assert isinstance(model, BertForPreTraining)
    bugs["value bias dropped"].plant(model)
    bugs["mask inverted"].plant(model)
    bugs["LayerNorm eps 1e-5 everywhere"].plant(model)
    report = verify(checkpoint, model, loaded=True, dtypes=())
    told = [probe for probe in report.probes if probe.spreads]
    assert len(report.guilty) > MOST_SPREADS
    assert told == list(report.guilty[:MOST_SPREADS])
    bias = load(checkpoint).get_parameter("bert.layers.1.attention.value.bias").detach().abs().double()
    (value,) = [probe for probe in told if probe.port.endswith("attention.value")]
    spread = value.spreads[0]  # of the first batch; others were found
    assert max(max(one.channels) for one in value.spreads) == value.meaning.isolated
    assert spread.shape == (8, 24, len(bias))
    channels = torch.tensor(spread.channels, dtype=torch.float64)
    assert torch.allclose(channels / channels.max(), bias / bias.max())  # a dropped bias is the same at every position
    token = torch.arange(24) < torch.tensor(LENGTHS)[:, None]  # nothing is compared where padding is
    assert torch.allclose(torch.tensor(spread.positions, dtype=torch.float64), channels.max() * token)


def test_a_difference_that_is_rounding_is_not_spread_out(checkpoint: Path) -> None:
    model = load(checkpoint)
    assert isinstance(model, BertForPreTraining)
    FAR_FROM_ZERO.plant(model)
    report = verify(checkpoint, model, loaded=True)
    assert any((probe.meaning.isolated or 0.0) > MEANING for probe in report.probes)
    assert [probe.port for probe in report.probes if probe.spreads] == []
