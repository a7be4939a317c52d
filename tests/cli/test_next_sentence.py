"""``fill-mask`` and ``next-sentence``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from porting.text import next_sentence
from tests.cli.conftest import Run


@pytest.mark.parametrize("pair", [("a", "b"), ("I read the book.", "He wrote of trees")])
def test_next_sentence(run: Run, checkpoint: Path, pair: tuple[str, str]) -> None:
    verdict = next_sentence(*pair, checkpoint)
    result = run("next-sentence", *pair, "--source", checkpoint)
    assert result.exit_code == 0, result.stderr
    word, share = ("follows", verdict.follows) if verdict.follows >= 0.5 else ("does not follow", 1 - verdict.follows)
    assert result.stdout.startswith(f"{word}  {share:.2%}  (logits {verdict.logits[0]:.3f}, ")
    assert result.stdout.splitlines()[-1] == "next: porting verify c"
    found = json.loads(run("next-sentence", *pair, "--source", checkpoint, "--json").stdout)
    assert found["verdict"] == word
    assert found["logits"] == pytest.approx(verdict.logits)
