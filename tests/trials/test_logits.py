"""The logits of a user's module are found by the table's probes, by name and by shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import porting
from porting.trials.logits import LogitsError, LogitsReader, Wanted
from tests.generating import checkpoints, scratch
from tests.small_checkpoint import WORDS, write_checkpoint

TEXT = "the [MASK] of the river"
BERT = scratch.BERT_TABLE.replace("[tensors]\n", scratch.HEADS_TABLE.partition("[drop]")[0].lstrip(), 1)
BERT += "[drop]" + scratch.HEADS_TABLE.partition("[drop]")[2]
TRUNK = BERT.replace('"cls.seq_relationship.{w:weight,bias}" = "follows.{w:weight,bias}"\n', "") + (
    '"cls.seq_relationship.{*rest}" = "no use for it"\n[ties]\n"turn_to.weight" = "tok.weight"\n'
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "c")


def reference(folder: Path, *texts: str) -> Any:  # Any: as transformers types it
    encoding = transformers.BertTokenizer(vocab={word: number for number, word in enumerate(WORDS)})
    with torch.no_grad():
        model: Any = transformers.BertForPreTraining.from_pretrained(folder)
        return model.eval()(**encoding(*texts, return_tensors="pt"))


def test_a_scratch_encoder_guesses_as_the_reference(checkpoint: Path) -> None:
    (blank,) = porting.fill_mask(TEXT, checkpoint, into=scratch.build_bert, table=BERT)
    best = torch.softmax(reference(checkpoint, TEXT).prediction_logits[0, blank.position], -1).topk(5)
    assert [guess.token for guess in blank.guesses] == [WORDS[number] for number in best.indices]
    assert [guess.probability for guess in blank.guesses] == pytest.approx(best.values.tolist(), rel=1e-4)


def test_a_scratch_encoder_judges_sentences_as_the_reference(checkpoint: Path) -> None:
    texts = ("I read the book.", "the river bank")
    verdict = porting.next_sentence(*texts, checkpoint, into=scratch.build_bert, table=BERT)
    logits = reference(checkpoint, *texts).seq_relationship_logits[0]
    assert verdict.logits == pytest.approx(logits.tolist(), rel=1e-4)


def test_a_scratch_classifier_that_returns_probabilities(tmp_path: Path) -> None:
    folder = checkpoints.classifier(tmp_path / "c")
    table = scratch.BERT_TABLE.replace(
        "[inputs]", '"classifier.{w:weight,bias}" = "classes.{w:weight,bias}"\n\n[inputs]'
    )
    encoding = transformers.BertTokenizer(vocab={word: number for number, word in enumerate(WORDS)})
    with torch.no_grad():
        model: Any = transformers.BertForSequenceClassification.from_pretrained(folder)
        shares = model.eval()(**encoding("I read the book.", return_tensors="pt")).logits[0].softmax(-1).tolist()
    for mine in ({}, {"into": scratch.build_classifier, "table": table}):
        found = porting.classify("I read the book.", folder, **mine)  # type: ignore[arg-type]  # as it takes them
        named = {guess.token: guess.probability for guess in found.guesses}
        assert [named[label] for label in ("bad", "so so", "good")] == pytest.approx(shares, rel=1e-4)
        assert found.label == ("bad", "so so", "good")[shares.index(max(shares))]
        assert found.attention is not None
        assert [len(layer.heads) for layer in found.attention.layers] == [3, 3]
        assert f"Class: {found.label}" in found.to_html()


def test_a_model_that_returns_no_logits_is_told_which_line_is_missing(checkpoint: Path) -> None:
    with pytest.raises(LogitsError) as caught:
        porting.fill_mask(TEXT, checkpoint, into=scratch.build_trunk, table=TRUNK)
    assert "Trunk returns one tensor [1, 7, 24], and none of it can be the logits, [b s v] = [1, 7, 40]" in str(
        caught.value
    )
    line = '". -> prediction_logits" = "turn_to"'
    assert f"if 'turn_to' is the logits, add to [probes] the line {line}" in str(caught.value)
    blanks = porting.fill_mask(TEXT, checkpoint, into=scratch.build_trunk, table=f"{TRUNK}\n[probes]\n{line}\n")
    assert len(blanks) == 1


class Returns(torch.nn.Module):
    """Gives back what it was made with."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    def forward(self) -> object:
        return self.value


def read(value: object, *, probes: str = "", last: bool = False, **wanted: Any) -> torch.Tensor:  # Any: as Wanted's
    table = porting.parse_table(f'[mapping]\nname = "x"\n[tensors]\n"a" = "b"\n[probes]\n{probes}')
    reader = LogitsReader(Returns(value), table, "a model")
    return reader.read({}, Wanted(axes="b s v", shape=wanted.pop("shape", (2, 3, 5)), last=last, **wanted))


LOGITS = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "value",
    [
        LOGITS,
        (LOGITS, None),
        (torch.randn(2, 3, 8), LOGITS),
        {"loss": torch.tensor(1.0), "logits": LOGITS, "other": LOGITS + 1},
        LOGITS.transpose(0, 1),
        LOGITS.transpose(1, 2),
        LOGITS.reshape(6, 5),
        [{"deep": (LOGITS,)}],
        {"lm_logits": LOGITS, "other": LOGITS + 1},
    ],
)
def test_whatever_the_layout_the_logits_are_found(value: object) -> None:
    torch.testing.assert_close(read(value), LOGITS)


def test_the_last_position_alone_is_enough_where_only_that_is_asked_for() -> None:
    for value in (LOGITS[:, -1], LOGITS[:, [-1]]):
        torch.testing.assert_close(read(value, last=True)[:, -1], LOGITS[:, -1])
        with pytest.raises(LogitsError):
            read(value)


def test_a_probe_decides_between_outputs() -> None:
    both = {"one": LOGITS, "two": LOGITS + 1}
    with pytest.raises(LogitsError, match="several tensors"):
        read(both)
    torch.testing.assert_close(read(both, probes='". -> logits" = ". -> two"'), LOGITS + 1)
    torch.testing.assert_close(
        read({"x": LOGITS.transpose(0, 1)}, probes='". -> logits [b s v]" = ". -> x [s b v]"'), LOGITS
    )


def test_a_padded_vocabulary_needs_a_name() -> None:
    padded = torch.cat([LOGITS, LOGITS], -1)
    torch.testing.assert_close(read({"logits": padded}), padded)
    with pytest.raises(LogitsError):
        read(padded)


def test_a_probe_of_something_else_is_not_taken_for_the_logits() -> None:
    pooled = torch.randn(1, 24)
    with pytest.raises(LogitsError, match="none of it can be the logits"):
        read((torch.randn(1, 3, 24), pooled), probes='"bert.pooler" = ". -> 1"', shape=(1, 2))
    logits = torch.randn(1, 2)
    assert torch.equal(read((pooled, logits), probes='"bert.pooler" = ". -> 0"', shape=(1, 2)), logits)


def test_probabilities_become_logits_of_the_same_softmax() -> None:
    torch.testing.assert_close(read(LOGITS.softmax(-1)).softmax(-1), LOGITS.softmax(-1))
    torch.testing.assert_close(read(LOGITS.log_softmax(-1)).softmax(-1), LOGITS.softmax(-1))
