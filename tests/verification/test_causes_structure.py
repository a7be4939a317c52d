"""Causes that lie in how parts are put together, planted as their authors would have written them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from porting.models import modern_bert
from porting.verification import Report, verify
from tests.families.pairs import PAIRS
from tests.families.ported import Ported, make
from tests.verification.planted import becomes


def made(name: str, folder: Path) -> Ported:
    return make(next(pair for pair in PAIRS if str(pair) == name), folder)


def verified(ported: Ported, module: nn.Module, longest: int = 24) -> Report:
    return verify(ported.directory, module, table=ported.pair.table, loaded=True, longest=longest)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("pair", "norm_first", "name"),
    [
        ("bert_into_encoder-BertModel", True, "pre-norm for post-norm"),
        ("roberta_prelayernorm_into_encoder-RobertaPreLayerNormModel", False, "post-norm for pre-norm"),
    ],
)
def test_norms_in_the_other_place_are_one_finding(pair: str, norm_first: bool, name: str, tmp_path: Path) -> None:
    """Every projection, norm, activation and layer is guilty, and one cause explains them all."""
    ported = made(pair, tmp_path)
    module: Any = ported.load()  # an encoder
    for layer in module.layers:
        layer.norm_first = norm_first
    report = verified(ported, module)
    (found,) = report.causes
    assert (found.name, found.ties) == (name, ())
    assert set(found.probes) == {probe.port for probe in report.guilty}
    assert found.residual < 1e-12


class GateFirst(modern_bert.GatedFeedForward):
    def forward(self, hidden: Tensor) -> Tensor:
        gate, expanded = self.intermediate(hidden).chunk(2, dim=-1)
        projected: Tensor = self.output(self.activation(expanded) * gate)
        return projected


def pairs(states: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    half = states.shape[-1] // 2
    cosine, sine = (one[:, :half] for one in turn)
    even, odd = states[..., 0::2], states[..., 1::2]
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1).flatten(-2).to(states.dtype)


def gate(patch: pytest.MonkeyPatch, module: Any) -> None:
    for number in range(len(module.bert.layers)):
        becomes(f"bert.layers.{number}.feed_forward", GateFirst)(module)


def rotation(rotate: Callable[..., Tensor]) -> Callable[[pytest.MonkeyPatch, object], None]:
    return lambda patch, module: patch.setattr(modern_bert, "rotate", rotate)


STRUCTURE = (
    "pre-norm for post-norm", "post-norm for pre-norm", "gate and up swapped", "rotary pairing", "rotary missing",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (gate, "gate and up swapped"),
        (rotation(pairs), "rotary pairing"),
        (rotation(lambda states, turn: states), "rotary missing"),
    ],
    ids=["gate", "pairing", "no rotation"],
)
def test_gates_and_rotations(
    plant: Callable[[pytest.MonkeyPatch, object], None], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ported = made("modern_bert-ModernBertForMaskedLM", tmp_path)
    module = ported.load()
    plant(monkeypatch, module)
    report = verified(ported, module)
    assert report.guilty
    assert {cause.name for cause in report.causes} == {name}
