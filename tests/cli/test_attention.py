"""The command that shows what a model attends to."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import porting
from porting.cli.attention import _shares, _show
from porting.cli.output import Screen
from tests.cli.conftest import Run
from tests.seeing.test_webpage import drawn

SENTENCE = "Return the name of the file."


def test_without_a_head_each_is_shown_by_what_it_attends_to_most(run: Run) -> None:
    lines = run("attention", SENTENCE).stdout.splitlines()
    assert lines[0] == "what '[CLS]', token 0 of 9, attends to most:"
    assert lines[1].split() == ["layer", "head", "0", "head", "1", "head", "2", "head", "3"]
    seen = porting.attention(SENTENCE)
    for number, line in enumerate(lines[2:5]):
        cells = []
        for head in range(4):
            row = seen.of(number, head)[0]
            cells += [seen.tokens[int(row.argmax())], f"{row.max().item():.0%}"]
        assert line.split() == [str(number), *cells]
    assert lines[5] == f"next: porting attention '{SENTENCE}' --html attention.html"


def test_a_head_is_shown_token_by_token(run: Run) -> None:
    lines = run("attention", SENTENCE, "--layer", "1", "--head", "-2", "--from", "file").stdout.splitlines()
    assert lines[0] == "what 'file', token 6 of 9, attends to in layer 1, head 2:"
    seen = porting.attention(SENTENCE)
    for line, token, share in zip(lines[2:11], seen.tokens, seen.of(1, 2)[6].tolist(), strict=True):
        assert line.split() == [token, f"{share:.2%}", *(["#" * round(40 * share)] if round(40 * share) else [])]


def test_the_document_has_the_numbers(run: Run) -> None:
    found = json.loads(run("attention", SENTENCE, "--layer", "2", "--from", "-1", "--json").stdout)
    seen = porting.attention(SENTENCE)
    assert (found["tokens"], found["from"]) == (list(seen.tokens), 8)
    assert [(head["layer"], head["head"]) for head in found["heads"]] == [(2, 0), (2, 1), (2, 2), (2, 3)]
    assert found["heads"][3]["shares"] == pytest.approx(seen.of(2, 3)[8].tolist())


def test_pages_and_pictures_are_written(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named = ["--layer", "1", "--head", "2", "--from", "6"]
    result = run("attention", SENTENCE, *named, "--html", "a.html", "--png", "b.png")
    assert result.stdout.splitlines()[-3:] == ["written: a.html", "written: b.png", "next: porting verify"]
    seen = porting.attention(SENTENCE, porting.embedded_checkpoint())
    assert Path("a.html").read_text(encoding="utf-8") == seen.to_html(layer=1, head=2, token=6)
    assert Path("b.png").read_bytes() == seen.to_png(layer=1, head=2, token=6)
    run("attention", SENTENCE, "--png", "grid.png")
    assert Path("grid.png").read_bytes() == seen.to_png()


def test_another_checkpoint_room_and_module(run: Run, checkpoint: Path) -> None:
    alike = [
        json.loads(run("attention", "the book", "--source", checkpoint, *words, "--json").stdout)["heads"]
        for words in ([], ["--into", "porting.models.bert:Bert"], ["--table", "bert_into_fused"])
    ]
    assert len(alike[0]) == 9
    for other in alike[1:]:
        for one, two in zip(alike[0], other, strict=True):
            assert two["shares"] == pytest.approx(one["shares"], abs=1e-5)


def test_word_pieces_are_taken_as_they_are(run: Run) -> None:
    found = json.loads(run("attention", "[CLS] return 2 [SEP]", "--pieces", "--from", "2", "--json").stdout)
    assert found["tokens"] == ["[CLS]", "return", "2", "[SEP]"]
    assert found["from"] == 2
    by_name = run("attention", "[CLS] return 2 [SEP] 3", "--pieces", "--from", "3").stdout
    assert by_name.startswith("what '3', token 4 of 5, ")  # a token of that spelling comes before its number


def test_of_very_many_heads_the_first_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """A config chooses their number, and a table of 1,024 columns helps nobody."""
    seen = drawn(("a", "b"), 1024)
    with Screen("attention", as_json=False) as screen:
        _show(screen, seen, _shares(seen, None, None, 0), 0)
    shown = capsys.readouterr().out
    assert "head 63" in shown
    assert "head 64" not in shown
    assert "64 of 1024 heads are shown; --head shows any one, --json all of them" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([SENTENCE, "--layer", "3"], "error: there is no layer 3 (there are 3, from 0 to 2) [no-attention]"),
        ([SENTENCE, "--head", "4"], "error: there is no head 4 (there are 4, from 0 to 3) [no-attention]"),
        ([SENTENCE, "--from", "fiel"], "error: the text has no token 'fiel' (did you mean 'file'?) [no-attention]"),
        ([SENTENCE, "--from", "\u00b2"], "error: the text has no token '\u00b2' (it has '[CLS]', "),
        ([" "], "the text is empty (give it some words) [text-refused]"),
        ([SENTENCE, "--html", "no/where.html"], "error: no/where.html: the destination lies in a directory that"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    words: list[str], message: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("attention", *words)
    assert result.exit_code == 2
    assert message in result.stderr
    error, *rest = result.stderr.splitlines()
    code = re.search(r"\[([a-z-]+)\]$", error)
    assert rest == [f"next: porting explain {code[1]}" if code else "next: porting attention --help"]
    assert list(tmp_path.iterdir()) == []
