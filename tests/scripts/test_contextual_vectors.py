"""The table of contextual vectors, on a small BERT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from porting.text import TextError, open_text_model
from scripts.contextual_vectors import SENTENCES, WORD, main, picture, similarities
from tests.small_checkpoint import CONFIG, TRUNK, WORDS, tensors, write_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "c")


def reference(folder: Path, sentence: str) -> tuple[list[str], Any]:
    """The word pieces and the hidden states that transformers computes."""
    import transformers

    tokenizer: Any = transformers.BertTokenizer(vocab={word: number for number, word in enumerate(WORDS)})
    model: Any = transformers.BertModel.from_pretrained(folder)  # Any: as transformers types both; in eval mode
    inputs = tokenizer(sentence, return_tensors="pt")
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states
    return tokenizer.convert_ids_to_tokens(inputs["input_ids"][0]), states


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(one @ other / (one.norm() * other.norm()))


def test_the_cosines_are_those_of_transformers(checkpoint: Path) -> None:
    rows = similarities(open_text_model(checkpoint), WORD, SENTENCES)
    vectors = []
    for sentence in SENTENCES:
        tokens, states = reference(checkpoint, sentence)
        place = tokens.index(WORD)
        vectors.append((states[1][0, place], states[3][0, place]))
    static = tensors()["bert.embeddings.word_embeddings.weight"][WORDS.index(WORD)]
    expected = [
        (0, 1, cosine(static, vectors[0][0]), cosine(static, vectors[0][1])),
        (1, 2, cosine(vectors[0][0], vectors[1][0]), cosine(vectors[0][1], vectors[1][1])),
        (1, 3, cosine(vectors[0][0], vectors[2][0]), cosine(vectors[0][1], vectors[2][1])),
    ]
    assert [(row.one, row.other) for row in rows] == [one[:2] for one in expected]
    assert [(row.first, row.last) for row in rows] == [pytest.approx(one[2:], abs=1e-5) for one in expected]


def test_a_word_of_several_pieces_is_their_mean(checkpoint: Path) -> None:
    sentence = "We played at the river."
    (row,) = similarities(open_text_model(checkpoint), "PLAYED", [sentence])
    tokens, states = reference(checkpoint, sentence)
    places = [tokens.index("play"), tokens.index("##ed")]
    ids = [WORDS.index("play"), WORDS.index("##ed")]
    static = tensors()["bert.embeddings.word_embeddings.weight"][ids].mean(dim=0)
    assert row.last == pytest.approx(cosine(static, states[3][0, places].mean(dim=0)), abs=1e-5)


def test_the_word_is_not_a_part_of_another(checkpoint: Path) -> None:
    model = open_text_model(checkpoint)
    whole = similarities(model, "the", ["into the book", "the sun"])
    assert whole[1].first < 0.999
    with pytest.raises(TextError, match=r"the word 'count' is not in the sentence 'I accessed the bank account\.'"):
        similarities(model, "count", SENTENCES)


def test_the_picture_has_every_layer(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row, *_ = similarities(open_text_model(checkpoint), WORD, SENTENCES)
    assert len(row.layers) == CONFIG["num_hidden_layers"] + 1
    main(["--source", str(checkpoint), "--png", str(tmp_path / "vectors.png")])
    drawn = (tmp_path / "vectors.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    assert "cosine of 'bank'" in capsys.readouterr().out
    fewer = similarities(open_text_model(checkpoint), WORD, SENTENCES[:2])
    assert picture(fewer, WORD, SENTENCES[:2]) != drawn


def test_the_script_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path / "trunk", parts=(TRUNK,), architecture="BertModel")
    main(["--source", str(folder)])
    lines = capsys.readouterr().out.splitlines()
    rows = similarities(open_text_model(folder), WORD, SENTENCES)
    assert lines[:3] == [f"{number}  {sentence}" for number, sentence in enumerate(SENTENCES, 1)]
    assert lines[4].split() == ["cosine", "of", "'bank'", "layer", "1", "layer", str(CONFIG["num_hidden_layers"])]
    assert lines[5].split() == ["static", "-", "sentence", "1", f"{rows[0].first:.3f}", f"{rows[0].last:.3f}"]
    assert lines[7].split() == ["sentence", "1", "-", "sentence", "3", f"{rows[2].first:.3f}", f"{rows[2].last:.3f}"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--word", "soccer"], "the word 'soccer' is not in the sentence 'I accessed the bank account.'"),
        (["--source", "nowhere/at/all"], "nowhere/at/all: no such file"),
    ],
)
def test_what_cannot_be_shown_is_one_line(checkpoint: Path, words: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(["--source", str(checkpoint), *words])
