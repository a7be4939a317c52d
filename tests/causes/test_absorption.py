"""Whether other weights could make up for a step, for pairs of functions of which that is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.causes.absorption import Computation, computed_from, left_by_weights, unmapped
from porting.causes.replay import Values
from porting.causes.tape import Recorder, Ref

Function = Callable[..., Tensor]
ENOUGH = 0.02


def side(layers: nn.ModuleList, x: Tensor, function: Function) -> tuple[Computation | None, list[Ref]]:
    """A function of what some layers make, as one side computes it, and the layers' results."""
    with Recorder(layers) as recorder:
        made = [layer(x) for layer in layers]
        for number, one in enumerate(made):
            recorder.mark(str(number), one)
        recorder.mark("out", function(*made))
    tape = recorder.tape
    shared = [tape.marks[str(number)] for number in range(len(made))]
    return computed_from(Values(tape), tape.marks["out"], shared.__contains__), shared


def left(ours: Function, theirs: Function, *, inputs: int = 1, masks: Sequence[float] = (), rows: int = 96) -> float:
    """What weights cannot make up for.

    Args:
        rows: how many rows of features both are given.
        masks: the numbers that hide some of what the functions are given, in the port and in the reference.
    """
    generator = torch.Generator().manual_seed(0)
    layers = nn.ModuleList(nn.Linear(6, 8) for _ in range(inputs)).double()
    with torch.no_grad():
        for one in layers.parameters():
            one.copy_(torch.randn(one.shape, generator=generator, dtype=torch.float64))
        x = torch.randn(4, rows // 4, 6, generator=generator, dtype=torch.float64)
        masked = [nn.ModuleList(nn.Sequential(one, Masked(number)) for one in layers) for number in masks]
        (port, _), (reference, _) = (
            side(some, x, function) for some, function in zip(masked or [layers, layers], (ours, theirs), strict=True)
        )
        if port is None or reference is None:
            return 0.0
        return left_by_weights(port, reference, features=lambda size: size == 8, enough=ENOUGH)


TABLE = torch.randn(24, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param(lambda u: 0.9 * u, lambda u: u.clone(), id="a factor"),
        pytest.param(lambda u: u + 1.0, lambda u: u.clone(), id="a shift"),
        pytest.param(lambda u: u.tanh() * 0.5 + 0.5, torch.sigmoid, id="tanh and sigmoid"),
        pytest.param(lambda u: (3.0 * u).softmax(-1), lambda u: u.softmax(-1), id="a temperature"),
        pytest.param(lambda u: u * torch.sigmoid(1.702 * u), F.silu, id="a scaled SiLU"),
        pytest.param(lambda u: F.rms_norm(u, (8,)), lambda u: F.layer_norm(u, (8,)), id="RMSNorm of centred features"),
        pytest.param(lambda u: F.relu(u - 1) + 1, F.relu, id="ReLU around another number"),
        pytest.param(lambda u: u * TABLE, lambda u: u * TABLE.flip(-1), id="a table in another order"),
        pytest.param(lambda u: F.gelu(u, approximate="tanh"), F.gelu, id="the tanh approximation"),
        pytest.param(lambda u: u.flip(-1), lambda u: u.clone(), id="features in another order"),
        pytest.param(lambda u: F.gelu(u.cumsum(-1)), F.gelu, id="sums of the first features"),
        pytest.param(F.gelu, lambda u: F.gelu(u.cumsum(-1)), id="sums of the reference's first features"),
        pytest.param(lambda u: F.gelu(u + u.mean(-1, keepdim=True)), F.gelu, id="the mean added"),
        pytest.param(lambda u: (u * TABLE[0]).softmax(-1), lambda u: u.softmax(-1), id="a factor for each feature"),
    ],
)
def test_weights_may_make_up_for_it(ours: Function, theirs: Function) -> None:
    assert left(ours, theirs) == 0.0


def test_sums_in_one_of_two_projections_are_made_up_for() -> None:
    assert left(lambda u, v: F.silu(u.cumsum(-1)) * v, lambda u, v: F.silu(u) * v, inputs=2) == 0.0


def test_exchanged_projections_are_made_up_for() -> None:
    assert left(lambda u, v: F.silu(v) * u, lambda u, v: F.silu(u) * v, inputs=2) == 0.0


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param(torch.sigmoid, lambda u: u.softmax(-1), id="sigmoid for softmax"),
        pytest.param(F.relu, F.silu, id="ReLU for SiLU"),
        pytest.param(lambda u: F.normalize(u, dim=-1), lambda u: u.clone(), id="normalised"),
        pytest.param(lambda u: u.clone(), F.gelu, id="no activation"),
        pytest.param(lambda u: F.relu(u).square(), F.gelu, id="squared ReLU for GELU"),
        pytest.param(lambda u: F.layer_norm(u, (8,)), lambda u: u.clone(), id="a norm too many"),
        pytest.param(lambda u: F.gelu(u - u.mean(-1, keepdim=True)), F.gelu, id="centred"),
        pytest.param(lambda u: F.rms_norm(u - u.mean(-1, keepdim=True), (8,)), lambda u: F.rms_norm(u, (8,)), id="LN"),
        pytest.param(lambda u: F.gelu(u * torch.sin(3 * u.cumsum(-1))), F.gelu, id="sums and the features"),
        pytest.param(lambda u: u / u.abs().sum(-1, keepdim=True), lambda u: u.softmax(-1), id="shares of the sum"),
    ],
)
def test_no_weights_make_up_for_it(ours: Function, theirs: Function) -> None:
    assert left(ours, theirs) > ENOUGH


def test_a_gate_of_another_function_is_not_made_up_for() -> None:
    assert left(lambda u, v: torch.sigmoid(u) * v, lambda u, v: F.silu(u) * v, inputs=2) > ENOUGH


class Masked(nn.Module):
    """Hides every third score behind a number."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(torch.arange(x.shape[-1]) % 3 == 0, self.number)


@pytest.mark.parametrize("number", [-1e9, -torch.inf])
def test_scores_that_are_masked_are_the_same_whatever_number_masks_them(number: float) -> None:
    assert left(torch.sigmoid, lambda u: u.softmax(-1), masks=(-torch.inf, number)) > ENOUGH
    assert left(lambda u: u.softmax(-1), lambda u: u.softmax(-1), masks=(-torch.inf, number)) == 0.0


def test_too_few_rows_say_nothing() -> None:
    own, wanted = torch.randn(2, 5, 40), torch.randn(2, 5, 40)
    assert unmapped(own, wanted, [2]) == 0.0
    assert unmapped(own, wanted, [1]) > 0.0
    assert unmapped(own, own.log(), [1]) == 0.0  # not a number


def test_a_relu_too_many_is_seen_on_few_rows() -> None:
    """Of multiples of one row it gives multiples, which say nothing new."""
    assert left(F.relu, lambda u: u.clone(), rows=4) > ENOUGH
