"""``fill-mask`` and ``next-sentence``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from porting.text import fill_mask
from tests.cli.conftest import Run
from tests.small_checkpoint import TRUNK, write_checkpoint


def test_fill_mask_lists_the_guesses_of_each_mask(run: Run, checkpoint: Path) -> None:
    result = run("fill-mask", "I [MASK] the [MASK].", "--source", checkpoint, "--top", "3")
    assert result.exit_code == 0, result.stderr
    expected = []
    for blank in fill_mask("I [MASK] the [MASK].", checkpoint, top=3):
        expected += [f"token {blank.position}:"]
        expected += [f"{guess.probability:.2%} {guess.token}" for guess in blank.guesses]
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines == [*expected, "next: porting verify c"]


def test_fill_mask_of_a_pair_as_json(run: Run, checkpoint: Path) -> None:
    result = run("fill-mask", "the bank", "--pair", "the [MASK]", "--source", checkpoint, "--json", "--top", "2")
    (blank,) = json.loads(result.stdout)
    (expected,) = fill_mask("the bank", checkpoint, pair="the [MASK]", top=2)
    assert blank["position"] == expected.position == 5
    assert [guess["token"] for guess in blank["guesses"]] == [guess.token for guess in expected.guesses]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fill-mask", "no mask here", "--source", "c"], "write [MASK] in the place of a word) [no-mask]"),
        (["fill-mask", "[MASK]", "--source", "trunk"], "no BertForMaskedLM head: it lacks 'cls.predictions.bias'"),
        (["next-sentence", "a", "b", "--source", "trunk"], "no BertForNextSentencePrediction head"),
        (["fill-mask", "[MASK]", "--source", "mute"], "the checkpoint has no tokenizer"),
        (["fill-mask", "the [MASK]" * 30, "--source", "c"], "the model has 24 positions (shorten the text)"),
        (["fill-mask", "", "--source", "c"], "the text is empty"),
        (["fill-mask", "[MASK]", "--source", "nowhere/at/all"], "nowhere/at/all"),
        (["fill-mask", "[MASK]", "--source", "c", "--table", "bret"], "did you mean 'bert'?"),
    ],
)
def test_what_cannot_be_read_is_one_line(run: Run, checkpoint: Path, words: list[str], message: str) -> None:
    write_checkpoint(Path("trunk"), parts=(TRUNK,), architecture="BertModel")
    write_checkpoint(Path("mute"), tokenizer="")
    result = run(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["error", "next"]


@pytest.mark.parametrize(
    "words", [["fill-mask", "Return the [MASK] of the list."], ["next-sentence", "Open it.", "Read it."]]
)
def test_without_a_source_the_embedded_checkpoint_reads(run: Run, words: list[str]) -> None:
    result = run(*words)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.splitlines()[-1] == "next: porting verify"
