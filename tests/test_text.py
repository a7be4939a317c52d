"""Text through the handwritten model gives what transformers gives on the same checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from porting.errors import Code, PortingError
from porting.text import Blank, TextError, fill_mask, next_sentence, open_text_model
from tests.small_checkpoint import MLM, NSP, TRUNK, WORDS, tensors, write_checkpoint

TEXT, PAIR = "I accessed the [MASK] account.", "We play soccer at the [MASK] of the river!"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "c")


def reference(folder: Path, architecture: str, text: str, pair: str | None) -> Any:  # Any: as transformers types it
    """What transformers computes, with its own tokenizer and its own model."""
    import transformers

    tokenizer = transformers.BertTokenizer(vocab={word: number for number, word in enumerate(WORDS)})
    model = getattr(transformers, architecture).from_pretrained(folder).eval()
    with torch.no_grad():
        return model(**tokenizer(text, pair, return_tensors="pt"))


@pytest.mark.parametrize("pair", [None, PAIR])
@pytest.mark.parametrize("form", ["tokenizer.json", "vocab.txt"])
def test_the_guesses_are_those_of_transformers(tmp_path: Path, pair: str | None, form: str) -> None:
    folder = write_checkpoint(tmp_path / "c", tokenizer=form)
    blanks = fill_mask(TEXT, folder, pair=pair, top=4)
    logits = reference(folder, "BertForPreTraining", TEXT, pair).prediction_logits
    assert [blank.position for blank in blanks] == ([4] if pair is None else [4, 13])
    for blank in blanks:
        best = torch.softmax(logits[0, blank.position].double(), dim=-1).topk(4)
        assert [guess.token for guess in blank.guesses] == [WORDS[number] for number in best.indices]
        assert [guess.probability for guess in blank.guesses] == pytest.approx(best.values.tolist(), rel=1e-4)


def test_the_verdict_is_that_of_transformers(checkpoint: Path) -> None:
    verdict = next_sentence("I read the book.", "He wrote of trees", checkpoint)
    logits = reference(
        checkpoint, "BertForPreTraining", "I read the book.", "He wrote of trees"
    ).seq_relationship_logits[0]
    assert verdict.logits == pytest.approx(logits.tolist(), rel=1e-4)
    assert verdict.follows == pytest.approx(torch.softmax(logits, dim=-1)[0].item(), rel=1e-4)
    swapped = next_sentence("He wrote of trees", "I read the book.", checkpoint)
    assert abs(swapped.follows - verdict.follows) > 1e-3


def test_two_segments_are_not_one_long_text(checkpoint: Path) -> None:
    apart = fill_mask("the bank", checkpoint, pair="of the [MASK]")[0].guesses[0]
    together = fill_mask("the bank of the [MASK]", checkpoint)[0].guesses[0]
    assert apart.probability != pytest.approx(together.probability, rel=1e-2)


def assert_alike(first: Sequence[Blank], other: Sequence[Blank]) -> None:
    """The same but for rounding, which may differ with the alignment of a mapped file."""
    assert [blank.position for blank in first] == [blank.position for blank in other]
    for mine, theirs in zip(first, other, strict=True):
        assert [guess.token for guess in mine.guesses] == [guess.token for guess in theirs.guesses]
        probabilities = [guess.probability for guess in theirs.guesses]
        assert [guess.probability for guess in mine.guesses] == pytest.approx(probabilities, rel=1e-5)


def test_a_checkpoint_in_half_precision_is_read_in_float32(tmp_path: Path) -> None:
    halves = {name: tensor.bfloat16() for name, tensor in tensors().items()}
    folder = write_checkpoint(tmp_path / "half", values=halves)
    model = open_text_model(folder)
    assert {parameter.dtype for parameter in model.module.parameters()} == {torch.float32}
    rounded = {name: tensor.float() for name, tensor in halves.items()}
    same = write_checkpoint(tmp_path / "rounded", values=rounded)
    assert_alike(fill_mask(TEXT, folder), fill_mask(TEXT, same))


def test_masked_words_need_no_other_head(tmp_path: Path, checkpoint: Path) -> None:
    alone = write_checkpoint(tmp_path / "mlm", parts=(TRUNK, MLM), architecture="BertForMaskedLM")
    assert_alike(fill_mask(TEXT, alone), fill_mask(TEXT, checkpoint))


def test_the_next_sentence_needs_no_other_head(tmp_path: Path, checkpoint: Path) -> None:
    alone = write_checkpoint(tmp_path / "nsp", parts=(TRUNK, NSP), architecture="BertForNextSentencePrediction")
    assert next_sentence("a", "b", alone).logits == pytest.approx(next_sentence("a", "b", checkpoint).logits)


def test_more_guesses_than_words_are_all_words(checkpoint: Path) -> None:
    (blank,) = fill_mask(TEXT, checkpoint, top=1000)
    assert isinstance(blank, Blank)
    assert sorted(guess.token for guess in blank.guesses) == sorted(WORDS)
    assert sum(guess.probability for guess in blank.guesses) == pytest.approx(1)
    assert len({guess.probability for guess in blank.guesses}) > len(WORDS) // 2


def change(folder: Path, **fields: object) -> Path:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(fields))
    return folder


def refusal(code: Code, message: str, call: Any, *arguments: Any, **options: Any) -> None:
    with pytest.raises(PortingError, match=message) as caught:
        call(*arguments, **options)
    (fault,) = caught.value.faults
    assert fault.code == code
    assert fault.hint, "it says what to do"
    assert "\n" not in str(fault)


def test_a_text_without_a_mask(checkpoint: Path) -> None:
    refusal(
        Code.NO_MASK,
        r"the text has no \[MASK\].*\(write \[MASK\] in the place of a word\)",
        fill_mask,
        "the",
        checkpoint,
    )
    refusal(Code.NO_MASK, r"the text has no \[MASK\]", fill_mask, "the [mask]", checkpoint)


def test_a_vocabulary_without_a_mask(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", tokenizer="vocab.txt")
    (folder / "vocab.txt").write_text("\n".join("hole" if word == "[MASK]" else word for word in WORDS))
    refusal(Code.NO_MASK, "has no token for a masked word", fill_mask, TEXT, folder)


@pytest.mark.parametrize(
    ("parts", "architecture", "call", "lacks"),
    [
        ((TRUNK,), "BertModel", fill_mask, r"no BertForMaskedLM head: it lacks 'cls\.predictions\.bias'"),
        ((TRUNK, NSP), "BertForNextSentencePrediction", fill_mask, "no BertForMaskedLM head"),
        ((TRUNK,), "BertModel", next_sentence, r"it lacks 'cls\.seq_relationship\.weight'"),
        ((TRUNK, MLM), "BertForMaskedLM", next_sentence, "no BertForNextSentencePrediction head"),
    ],
)
def test_a_checkpoint_without_the_head(
    tmp_path: Path, parts: tuple[str, ...], architecture: str, call: Any, lacks: str
) -> None:
    folder = write_checkpoint(tmp_path / "c", parts=parts, architecture=architecture)
    arguments = (TEXT, folder) if call is fill_mask else ("a", "b", folder)
    refusal(Code.NO_HEAD, lacks, call, *arguments)


def test_a_table_without_such_an_architecture(tmp_path: Path, checkpoint: Path) -> None:
    table = tmp_path / "own.toml"
    table.write_text(
        '[mapping]\nname = "own"\n[architectures]\nOwn = "porting.models.bert:Bert"\n[tensors]\n"a" = "b"\n'
    )
    refusal(
        Code.NO_HEAD, "table 'own' has no model for this: .* ends in ForMaskedLM.* are ", fill_mask, TEXT, checkpoint,
        table=table,
    )  # fmt: skip


def test_a_checkpoint_without_a_tokenizer(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", tokenizer="")
    refusal(Code.NO_TOKENIZER, "the checkpoint has no tokenizer", fill_mask, TEXT, folder)


def test_a_text_that_is_too_long(checkpoint: Path) -> None:
    message = "the text has 25 tokens, the model has 24 positions"
    refusal(Code.TEXT_TOO_LONG, message, fill_mask, "[MASK] " * 23, checkpoint)
    assert len(fill_mask("[MASK] " * 22, checkpoint)) == 22


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["hello"] = 4000
    (folder / "tokenizer.json").write_text(json.dumps(content))
    message = "numbers tokens up to 4000 here, config.json has vocab_size = 40"
    refusal(Code.TOKENIZER_MISMATCH, message, fill_mask, "hello [MASK]", folder)


def test_more_segments_than_the_model_knows(tmp_path: Path) -> None:
    segments = {"bert.embeddings.token_type_embeddings.weight": torch.randn(1, 24)}
    folder = write_checkpoint(tmp_path / "c", change={"type_vocab_size": 1}, values=segments)
    assert fill_mask(TEXT, folder)
    message = "numbers segments up to 1 here, config.json has type_vocab_size = 1"
    refusal(Code.TOKENIZER_MISMATCH, message, next_sentence, "a", "b", folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the text is empty"),
        (" \n", "the text is empty"),
        ("[MASK] \udcff", "the text is not UTF-8"),
        ("[CLS] the [MASK] [SEP]", r"the text spells out '\[CLS\]', which the tokenizer adds by itself"),
        ("the [MASK] [SEP] a", r"spells out '\[SEP\]'.*pass what follows \[SEP\] as the second text"),
    ],
)
def test_a_text_that_cannot_be_meant(checkpoint: Path, text: str, message: str) -> None:
    refusal(Code.TEXT_REFUSED, message, fill_mask, text, checkpoint)
    refusal(Code.TEXT_REFUSED, message, next_sentence, "a", text, checkpoint)


@pytest.mark.parametrize("top", [0, -1])
def test_no_guess_at_all(checkpoint: Path, top: int) -> None:
    with pytest.raises(TextError, match=f"top is {top}, and at least 1 is expected"):
        fill_mask(TEXT, checkpoint, top=top)
