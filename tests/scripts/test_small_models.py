"""The small models of README's gallery: their numbers in words, and that what is trained is loaded and speaks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import porting
from scripts.small_models import (
    LARGEST,
    LENGTH,
    NOUNS,
    SHOWN,
    classifiers,
    english,
    french,
    known_id,
    sentences,
    text_rows,
    translator,
    writer,
)


@pytest.mark.parametrize(
    ("number", "in_english", "in_french"),
    [
        (0, "zero", "zéro"),
        (16, "sixteen", "seize"),
        (17, "seventeen", "dix sept"),
        (21, "twenty one", "vingt et un"),
        (71, "seventy one", "soixante et onze"),
        (77, "seventy seven", "soixante dix sept"),
        (80, "eighty", "quatre vingts"),
        (81, "eighty one", "quatre vingt un"),
        (99, "ninety nine", "quatre vingt dix neuf"),
        (100, "one hundred", "cent"),
        (200, "two hundred", "deux cents"),
        (1001, "one thousand one", "mille un"),
        (4312, "four thousand three hundred twelve", "quatre mille trois cent douze"),
    ],
)
def test_numbers_in_words(number: int, in_english: str, in_french: str) -> None:
    assert english(number) == in_english
    assert french(number) == in_french


def test_no_two_numbers_have_the_same_words() -> None:
    for words in (english, french):
        assert len({words(number) for number in range(LARGEST)}) == LARGEST


@pytest.mark.slow
def test_the_corpus_becomes_rows_of_sentences_between_a_start_and_an_end() -> None:
    tokenizer = Tokenizer.from_file(str(porting.embedded_checkpoint() / "tokenizer.json"))
    start, end = known_id(tokenizer, "[CLS]"), known_id(tokenizer, "[SEP]")
    rows = text_rows(tokenizer, end)
    assert rows.shape[1] == LENGTH
    assert rows[0, 0] == start
    tokens = rows.flatten().tolist()
    after_end = [following for token, following in pairwise(tokens) if token == end]
    assert set(after_end) == {start}
    assert tokens.count(start) == len(after_end) + 1


@pytest.mark.slow
@pytest.mark.timeout(300)  # two trainings of a few steps, and transformers' import
def test_what_a_few_steps_make_is_loaded_and_speaks(tmp_path: Path) -> None:
    translator(tmp_path / "translator", steps=3)
    assert porting.translate("two hundred one", tmp_path / "translator", max_length=5).ids
    writer(tmp_path / "writer", steps=2)
    assert porting.generate("return the", tmp_path / "writer", max_length=8).ids


def test_no_noun_of_the_training_set_is_held_out() -> None:
    learnt, held_out = sentences(0, held_out=False), sentences(0, held_out=True)
    words = {word.strip(".") for text, _ in learnt for word in text.split()}
    unknown = {noun for _, nouns in NOUNS.values() for noun in nouns}
    assert not words & unknown
    assert all(unknown & {word.strip(".") for word in text.split()} for text, _ in held_out)
    assert {label for _, label in learnt} == {label for _, label in held_out} == set(NOUNS)
    assert any(noun in SHOWN for noun in unknown)


@pytest.mark.slow
def test_a_classifier_from_each_start_has_a_page_with_its_label(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    classifiers(tmp_path / "made", epochs=1, draws=1)
    lines = capsys.readouterr().out.splitlines()
    for folder, table in (("bert", "bert"), ("per-head", "bert_into_encoder"), ("nothing", "bert")):
        answer = porting.classify(SHOWN, tmp_path / "made" / folder, table=table)
        page = (tmp_path / "made" / f"{folder}.html").read_text(encoding="utf-8")
        assert f"<h1>Class: {answer.label}</h1>" in page
        assert 'id="attention"' in page
        (line,) = [line for line in lines if line.startswith(f"from {folder}: ")]
        assert f"{answer.label} {answer.guesses[0].probability:.0%}" in line
