"""The search for inputs finds what the first batches hide, tells what it did, and what nothing could show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from porting.models import BertConfig, BertForPreTraining
from porting.models.bert import BertEmbeddings
from porting.verification import Case, batch_search, verify
from porting.verification.coverage import Observer, unseen
from tests.families.pairs import PAIRS
from tests.families.ported import make
from tests.small_checkpoint import write_checkpoint
from tests.verification.flags import complete_but_for_flags


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("searched") / "bert")


class AtLength(BertEmbeddings):
    """Right but for rows of one length."""

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        embedded = super().forward(input_ids, token_type_ids, position_ids)
        if input_ids.shape[1] == 19:
            embedded = embedded * 1.01
        return embedded


class AtRows(BertEmbeddings):
    """Right but for batches of many rows."""

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        embedded = super().forward(input_ids, token_type_ids, position_ids)
        if len(input_ids) > 20:
            embedded = embedded + 0.01
        return embedded


class WithoutTypes(BertEmbeddings):
    """Takes the other segment where nobody says which."""

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        if token_type_ids is None:
            token_type_ids = torch.ones_like(input_ids)
        return super().forward(input_ids, token_type_ids, position_ids)


def with_embeddings(kind: type[BertEmbeddings]) -> Callable[[BertConfig], BertForPreTraining]:
    def build(config: BertConfig) -> BertForPreTraining:
        model = BertForPreTraining(config=config)
        model.bert.embeddings.__class__ = kind
        return model

    return build


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        (AtLength, "1 row of 19 tokens"),
        (AtRows, "21 rows of 4 tokens"),
        (WithoutTypes, "2 rows of 7 tokens without token_type_ids"),
    ],
)
def test_a_mistake_that_the_first_batches_hide_is_found(
    checkpoint: Path, kind: type[BertEmbeddings], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = verify(checkpoint, with_embeddings(kind), causes=False)
    assert case in report.cases
    assert report.verdict == "different"
    assert [probe.port for probe in report.guilty] == ["bert.embeddings"]
    monkeypatch.setattr(batch_search, "BUDGET", 0)
    blind = verify(checkpoint, with_embeddings(kind), causes=False, trials=False)
    assert blind.faithful  # and what it had not seen is said
    assert any("if " in one.condition and "embeddings" not in one.function for one in blind.not_taken)


@pytest.mark.slow
def test_it_says_what_it_did_and_does_the_same_again(checkpoint: Path) -> None:
    reports = [verify(checkpoint, seed=3) for _ in range(2)]
    first, again = reports
    assert (first.cases, first.search, first.probes) == (again.cases, again.search, again.probes)
    assert first.cases[-1] == "2 rows of 7 tokens without token_type_ids"
    assert first.search.startswith(
        "2 more batches were tried on the port, and kept for what they show: 2 rows of 7 tok"
    )
    assert first.search in " ".join(first.details().split())
    assert complete_but_for_flags(first)
    assert not any("token_type_ids is None" in one.condition for one in first.not_taken)


@pytest.mark.slow
def test_units_that_no_row_has_switched_on_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is a rectifier over the first token of each row; the search gives it more first tokens."""
    pair = next(pair for pair in PAIRS if str(pair) == "distilbert-DistilBertForSequenceClassification")
    source = make(pair, tmp_path).directory
    found = verify(source, causes=False)
    monkeypatch.setattr(batch_search, "BUDGET", 0)
    blind = verify(source, causes=False)
    shares = [one.shown.activation["classifier.weight"] for one in (blind, found)]
    assert shares[0] < shares[1]
    assert "16 rows of 2 to 17 tokens, padded" in found.cases
    assert blind.search == ""


@pytest.mark.parametrize(("reached", "more"), [(10, False), (0, True), (60, True)])
def test_a_batch_is_worth_comparing_for_a_first_element_or_for_many(reached: int, more: bool) -> None:
    """Of a weight of 1000 elements so many are reached already; the batch reaches 20 others, or 100 where it is 60."""
    module = nn.Linear(1000, 1, bias=False).double()
    observer = Observer(module, seed=0)
    reaches = torch.zeros(1000, dtype=torch.float64)
    reaches[:reached] = 1.0
    observer.see(module.weight @ reaches, 1.0)
    further = torch.zeros(1000, dtype=torch.float64)
    further[reached : reached + (100 if reached == 60 else 20)] = 1.0
    assert observer.gain(module.weight @ further) is more
    assert not observer.gain(module.weight @ further)  # what is hoped for is hoped for once
    assert observer.shares() == ({"weight": reached / 1000} if reached else {})


@pytest.mark.slow
def test_the_budget_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_search, "BUDGET", 1)
    report = verify(write_checkpoint(tmp_path / "bert"), with_embeddings(AtLength), causes=False)
    assert report.search.startswith("1 more batch was tried on the port, and ")


class Needs(BertForPreTraining):
    """Says that the token types may be left out, and they may not."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> object:  # type: ignore[override]  # fewer arguments
        if token_type_ids is None:
            raise RuntimeError("it needs them")
        return super().forward(input_ids, attention_mask, token_type_ids)


@pytest.mark.slow
def test_a_default_that_fails_is_told(checkpoint: Path) -> None:
    report = verify(checkpoint, lambda config: Needs(config=config), causes=False)
    assert report.faithful
    (said,) = report.warnings
    assert said.startswith("without token_type_ids, for which its forward has a default, the port fails where the ")
    assert said.endswith("reference does not: RuntimeError: it needs them")


@dataclass
class Sizes:
    vocab_size: int = 20
    max_position_embeddings: int = 12
    pad_token_id: int = 1


class Counted(nn.Module):
    """Its positions are counted from two: a row may have ten tokens, and the config promises twelve."""

    def __init__(self, config: Sizes | None = None) -> None:
        super().__init__()
        self.config = config or Sizes()
        self.word, self.position = nn.Embedding(20, 6), nn.Embedding(12, 6)
        self.out = nn.Linear(6, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        places = torch.arange(input_ids.shape[1]) + 2
        summed: Tensor = self.out(self.word(input_ids) + self.position(places))
        return summed


def test_a_row_that_is_too_long_for_the_reference_is_made_shorter() -> None:
    torch.manual_seed(0)
    report = verify(reference=Counted(), into=Counted)
    assert report.faithful, str(report)
    assert report.cases[0] == "8 rows of 1 to 10 tokens, padded"
    assert not any(str(one).startswith("position") for one in report.unseen)  # longer rows are none
    assert report.shown.rows == {"position.weight": (0, 1)}
    assert "nothing of rows 0-1 of position.weight was shown at work" in report.details()


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("sliding_window", 64, True),
        ("local_attention", 24, True),
        ("sliding_window", 20, False),
        ("sliding_window", None, False),
    ],
)
def test_a_window_that_no_row_is_longer_than_is_not_shown(field: str, value: object, said: bool) -> None:
    case = Case("one", {"input_ids": torch.arange(24)[None]})
    words = f"the window's edge ({field} = {value}, and rows of at most 24 tokens)"
    assert (words in map(str, unseen([case], {field: value}))) == said
    assert words not in map(str, unseen([case], {field: value, f"use_{field}": False}))
