"""Training mode: the same dropout masks on both sides, where values are dropped, and what comes out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting import verify
from porting.reporting.report import Report
from porting.tracing.dropout import SameDropout
from tests.families.pairs import PAIRS
from tests.families.ported import make

RATE, ATTENTION = 0.1, 0.2


class Reference(nn.Module):
    """One layer of attention with dropout after the embeddings, in attention, and before the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"vocab_size": 40, "hidden_size": 8, "max_position_embeddings": 16}
        self.tokens = nn.Embedding(40, 8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.first, self.second, self.third = nn.Dropout(RATE), nn.Dropout(ATTENTION), nn.Dropout(RATE)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        weights: Tensor = self.second((query @ key.transpose(-1, -2) / 2).softmax(-1))
        context: Tensor = weights @ value
        return context.transpose(1, 2).flatten(2)

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.first(self.tokens(input_ids))
        out: Tensor = self.third(self.out(self.attend(x)))
        return x + out


class Fused(Reference):
    """Torch's fused attention, and dropout as a function."""

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        rate = ATTENTION if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, dropout_p=rate).transpose(1, 2).flatten(2)


class ByHand(Reference):
    """A mask that is drawn and multiplied by hand."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        x = self.drop(x)
        return x + self.drop(self.out(self.attend(x)))

    def drop(self, x: Tensor) -> Tensor:
        return x * torch.empty_like(x).bernoulli_(1 - RATE) / (1 - RATE) if self.training else x


class NotScaled(ByHand):
    """As by hand, without the division by the share that is kept."""

    def drop(self, x: Tensor) -> Tensor:
        return x * torch.empty_like(x).bernoulli_(1 - RATE) if self.training else x


class Misplaced(Reference):
    """The last dropout after the sum and not before it."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.first(self.tokens(input_ids))
        return F.dropout(x + self.out(self.attend(x)), RATE, self.training)


def other_rate() -> Reference:
    port = Reference()
    port.second.p = 0.3
    return port


def without() -> Reference:
    port = Reference()
    port.third = nn.Identity()  # type: ignore[assignment]  # that is the mistake
    return port


def trained(port: nn.Module) -> Report:
    return verify(reference=Reference(), into=port, loaded=True, training=True, trials=False, causes=False)


@pytest.mark.parametrize("kind", [Reference, Fused, ByHand])
def test_other_code_for_the_same_dropout_is_faithful(kind: type[Reference]) -> None:
    report = trained(kind())
    assert report.faithful, str(report)
    assert report.learned is not None
    assert report.learned.training is not None
    assert report.learned.training.sites == 3
    assert report.learned.dropout == ()  # it was on when the gradients were compared
    text = " ".join(report.details().split())
    assert "training mode: 3 dropout places with the same rates" in text
    assert "not run: autocast" in text


@pytest.mark.parametrize("kind", [NotScaled, Misplaced])
def test_what_is_dropped_wrongly_is_different(kind: type[Reference]) -> None:
    report = trained(kind())
    assert report.verdict == "different"
    assert "with the same dropout masks it is off by" in " ".join(report.details().split())
    eval_only = verify(reference=Reference(), into=kind(), loaded=True, gradients=True, trials=False, causes=False)
    assert eval_only.faithful


def test_another_rate_and_a_missing_place_are_named() -> None:
    rate = " ".join(str(trained(other_rate())).split())
    assert "the reference drops 20 % of [8, 2, 16, 16] in second" in rate
    assert "your model drops 30 % of [8, 2, 16, 16] in second" in rate
    missing = trained(without())
    assert missing.verdict == "different"
    assert "the reference drops 10 % of [8, 16, 8] in third" in " ".join(missing.details().split())


CLASSES = (
    "BertForSequenceClassification",
    "RobertaForMaskedLM",
    "DistilBertForMaskedLM",
    "BartForConditionalGeneration",
)


@pytest.mark.few(3)
@pytest.mark.parametrize("architecture", CLASSES)
def test_shipped_families_train_as_transformers_does(architecture: str, tmp_path: Path) -> None:
    pair = next(one for one in PAIRS if one.architecture == architecture)
    ported = make(pair, tmp_path / "checkpoint")
    report = verify(ported.directory, table=pair.table, training=True, trials=False, causes=False)
    assert report.faithful, str(report)
    assert report.learned is not None
    assert report.learned.training is not None
    assert report.learned.training.same_masks
    assert report.learned.training.sites > 3


def test_masks_depend_on_the_seed_and_the_place_alone() -> None:
    value = torch.ones(4, 50)

    def drawn(seed: int, dtype: torch.dtype) -> list[Tensor]:
        mode = SameDropout(seed)
        with mode.again():
            return [F.dropout(value.to(dtype), 0.5) != 0 for _ in range(2)]

    first, second = drawn(0, torch.float32)
    assert not torch.equal(first, second)
    again = drawn(0, torch.float64)
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])
    assert not torch.equal(first, drawn(1, torch.float32)[0])
    assert 0.35 < float(first.double().mean()) < 0.65
