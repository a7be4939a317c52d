"""The first step of a port whose result the reference does not have, with its line."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from porting.causes.cause_matching import differing_places
from porting.causes.diverging import Divergence, Kind, TensorIndex, divergence, moments
from porting.causes.tape import Recorder
from tests.causes.wrong_ports import FAMILIES, Wrong, verified
from tests.verification.conftest import one_thread

pytestmark = pytest.mark.few(2)

__all__ = ["one_thread"]  # a fixture that is used by all

CLAMPED = "scores = (q @ k.transpose(-2, -1)).clamp(-0.1, 0.1) * (1.0 / math.sqrt(k.size(-1)))"
STEPS = {
    "a step that no entry of the catalogue knows": (
        Wrong("gpt2", {"scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))": CLAMPED}),
        "clamp",
        "mul",
    ),
    "a mask": (Wrong("gpt2", {"causal = torch.ones(s, s).tril()": "causal = torch.ones(s, s).tril(1)"}), "", ""),
    "another tensor": (
        Wrong("bert", {"self.intermediate(attended), attended": "self.intermediate(x), attended"}),
        "linear",
        "linear",
    ),
    "another order": (
        Wrong("llama", {"k = k.repeat_interleave(HEADS // SHARED, dim=1)": "k = k.repeat(1, HEADS // SHARED, 1, 1)"}),
        "matmul",
        "",
    ),
    "a step left out": (Wrong("vit", {"return x + self.position_embeddings": "return x"}), "", ""),
}


def lines_of(wrong: Wrong) -> set[int]:
    """The lines of the edited file that are not the port's."""
    path = Path(importlib.import_module(f"tests.causes.ports.{wrong.family}").__file__ or "")
    source = path.read_text(encoding="utf-8")
    found: set[int] = set()
    for old, new in wrong.changes.items():
        place = source.index(old)
        source = source.replace(old, new)
        first = source[:place].count("\n") + 1
        found.update(range(first, first + new.count("\n") + 1))
    return found


def told(found: Divergence) -> set[int]:
    """The numbers of the lines that the report names."""
    places = [found.line, found.also, *found.callers, found.moved.line if found.moved else ""]
    return {int(place.rpartition(":")[2]) for place in places if place}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [name for name in STEPS if name != "a step left out"])
def test_the_line_is_told(name: str) -> None:
    wrong, operation, instead = STEPS[name]
    report = verified(wrong, causes=0.01)  # the catalogue has no say in it
    found = report.divergence
    assert found
    assert found.kind == Kind.STEP
    assert found.step
    assert told(found) & lines_of(wrong), found
    assert not operation or found.step.operation == operation
    assert not instead or instead in {step.operation for step in found.instead}
    assert f"first step that differs: {found.step.operation} at {found.line}" in report.details()


@pytest.mark.slow
@pytest.mark.parametrize("probes", [r"\.", ".*"])
def test_it_needs_no_probe_in_between(probes: str) -> None:
    wrong, operation, _ = STEPS["a step that no entry of the catalogue knows"]
    wrong = Wrong(wrong.family, wrong.changes, probes=probes, inner=False)
    found = verified(wrong, causes=0.01).divergence
    assert found
    assert found.step
    assert (found.step.operation, told(found) >= lines_of(wrong)) == (operation, True)


def test_a_step_left_out_is_what_the_reference_has_elsewhere() -> None:
    report = verified(Wrong("bert", {"torch.tanh(self.dense(x[:, 0]))": "self.dense(x[:, 0])"}), causes=0.01)
    found = report.divergence
    assert found
    assert found.kind == Kind.ELSEWHERE
    assert [step.operation for step in found.instead] == ["tanh"]
    assert "it is what the reference has at another place, before tanh in" in report.details()


def test_an_output_in_another_order() -> None:
    wrong = Wrong(
        "bert",
        {"context.transpose(1, 2).reshape(b, s, HIDDEN)": "context.transpose(1, 2).flip(2).reshape(b, s, HIDDEN)"},
    )
    found = verified(wrong, causes=0.01).divergence
    assert found
    assert found.kind == Kind.ORDER or (found.moved and found.moved.shape == found.moved.expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_faithful_port_has_none(name: str) -> None:
    assert verified(Wrong(name, {}), trials=False).divergence is None


class Doubled(nn.Module):
    """``tanh`` of a linear map; the port halves it first, doubles it again, and adds the half by mistake."""

    def __init__(self, *, port: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.port = port

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if not self.port:
            return y.tanh()
        half = y * 0.5
        return (half * 2 + half).tanh()


def test_what_leads_back_to_the_reference_is_no_mistake() -> None:
    reference, port, x = Doubled(port=False), Doubled(port=True), torch.randn(3, 5, 4, dtype=torch.float64)
    port.load_state_dict(reference.state_dict())
    tapes = []
    for module in (reference, port):
        with Recorder(module, lines=True) as recorder:
            recorder.mark("out", module(x))
        tapes.append(recorder.tape)
    theirs, ours = tapes
    found = divergence(ours, theirs, "out", ours.marks["out"], [theirs.marks["out"]])
    assert found
    assert found.step
    assert (found.step.operation, found.code) == ("add", "return (half * 2 + half).tanh()")
    assert [step.operation for step in found.instead] == ["tanh"]


class Watched(nn.Module):
    """It asks of its scores where they are infinite, which no mistake changes."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4), factor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.factor
        y = y.masked_fill(torch.eye(4, dtype=torch.bool), -torch.inf)
        return y.softmax(-1).masked_fill(torch.isneginf(y), 0.0)


def test_a_comparison_says_nothing_of_what_it_reads() -> None:
    reference, port, x = Watched(1.0), Watched(0.5), torch.randn(3, 4, 4)
    port.load_state_dict(reference.state_dict())
    tapes = []
    for module in (reference.double(), port.double()):
        with Recorder(module, lines=True) as recorder:
            recorder.mark("out", module(x.double()))
        tapes.append(recorder.tape)
    theirs, ours = tapes
    found = divergence(ours, theirs, "out", ours.marks["out"], [theirs.marks["out"]])
    assert found
    assert found.step
    assert found.step.operation == "mul"


def test_numbers_are_recognised_in_any_layout() -> None:
    value = torch.randn(2, 5, 6, dtype=torch.float64)
    again = (value.mT, value.flip(1), value.reshape(10, 6), value[:, None].expand(2, 3, 5, 6))
    known = moments(value)
    assert known is not None
    for repeated in again:
        found = moments(repeated)
        assert found is not None
        np.testing.assert_allclose(found[:5], known[:5], rtol=1e-12, atol=0)
    other = moments(value * (1 + 1e-6))
    assert other is not None
    assert not np.allclose(other, known, rtol=1e-8, atol=0)


def test_masked_scores_count_alike_whatever_the_number() -> None:
    scores = torch.randn(2, 2, 5, 5, dtype=torch.float64)
    hidden = torch.ones(5, 5).triu(1).bool()
    found = [moments(scores.masked_fill(hidden, lowest)) for lowest in (-1e4, -1e9, float("-inf"))]
    assert found[0] is not None
    assert all(value is not None and np.array_equal(value, found[0]) for value in found)


def test_a_mask_of_the_largest_float_gives_statistics_without_a_warning() -> None:
    value = torch.tensor([0.5, -2.0, torch.finfo(torch.float64).max], dtype=torch.float64)
    assert moments(value) is not None
    with Recorder(nn.Identity()) as recorder:
        capped = value * 1.0
    assert TensorIndex(recorder.tape).like(capped) == []


def apart_at(*index: Any) -> str:
    """Make two tensors that differ at an index, and return the sentence about it.

    Three indices are of hidden states [b s e], four of attention scores [b h q k].
    """
    value = torch.randn(*((3, 6, 8) if len(index) == 3 else (3, 2, 6, 6)), dtype=torch.float64)
    other = value.clone()
    other[index] += 0.5
    return differing_places(value, other, 1e-12)


def test_where_what_nothing_explains_differs_is_said() -> None:
    every = slice(None)
    assert apart_at(every, slice(2, None), every) == "it differs only at positions 2 to 5 of 6"
    assert apart_at(1, every, every) == "it differs only at rows 1 of 3"
    assert apart_at(every, every, [1, 6]) == "it differs only at features 1, 6 of 8"
    assert apart_at(every, every, every, slice(0, 2)) == "it differs only at keys 0, 1 of 6"
    assert apart_at(every, every, every) == ""
    value = torch.randn(3, 6, 8)
    assert differing_places(value, value * (1 + 1e-14), 1e-12) == ""
    assert differing_places(value, value[:2], 1e-12) == ""


class Scaled(nn.Module):
    """A sum of embeddings that are scaled, and of what a norm makes of them: the norm takes the factor out again."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear, self.after, self.factor = nn.Linear(4, 4), nn.Linear(4, 4), factor

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.factor
        size = y.pow(2).sum(-1, keepdim=True).sqrt()
        found: Tensor = y + self.after(y / size)
        return found


class Distances(nn.Module):
    """A bias for each pair of positions, by their distance."""

    def __init__(self, sign: int) -> None:
        super().__init__()
        self.linear, self.rows, self.sign = nn.Linear(4, 4), nn.Embedding(9, 4), sign

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(4)
        apart = places[None, :] - places[:, None] if self.sign > 0 else places[:, None] - places[None, :]
        bias = self.rows(apart + 4)
        found: Tensor = (bias + self.linear(x)[:, :, None]).tanh()
        return found


class Gated(nn.Module):
    """Two linear layers, with an activation between them or without."""

    def __init__(self, *, active: bool) -> None:
        super().__init__()
        self.first, self.second, self.active = nn.Linear(4, 4), nn.Linear(4, 4), active

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.active:
            y = nn.functional.gelu(y)
        y = y.transpose(1, 2)
        found: Tensor = self.second(y).tanh()
        return found


PAIRS = {
    "a factor before a norm": (Scaled(1.0), Scaled(1.5), "y = self.linear(x) * self.factor"),
    "the sign of a distance": (Distances(1), Distances(-1), "apart = places"),
    "a step left out": (Gated(active=True), Gated(active=False), "y = self.first(x)"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_line_is_the_one_at_fault_and_not_the_next(name: str) -> None:
    reference, port, code = PAIRS[name]
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    port.load_state_dict(reference.state_dict())
    x = torch.randn(3, 4, 4, dtype=torch.float64)
    tapes = []
    for module in (reference.double(), port.double()):
        with Recorder(module, lines=True) as recorder:
            recorder.mark("out", module(x))
        tapes.append(recorder.tape)
    theirs, ours = tapes
    found = divergence(ours, theirs, "out", ours.marks["out"], [theirs.marks["out"]])
    assert found
    assert found.code.startswith(code), found
    assert (found.behind == "linear") == (name == "a step left out")
