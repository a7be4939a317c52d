"""``next-sentence``: judge whether one sentence follows another."""

from __future__ import annotations

from typing import Annotated

import typer

from porting.cli import options
from porting.cli.output import Screen


def next_sentence(
    first: Annotated[str, typer.Argument(metavar="FIRST", help="A sentence.")],
    second: Annotated[str, typer.Argument(metavar="SECOND", help="Another, which may follow it or not.")],
    *,
    model: options.TextOptions,
) -> None:
    """Predict whether one sentence follows another, with the bundled model or your own.

    \b
    Examples:
      porting next-sentence "Open the file." "Read its first line."
      porting next-sentence "Open the file." "Read it." --html verdict.html
      porting next-sentence "Open the file." "Read it." --table my_bert.toml --into my_bert.py:build
      porting next-sentence "He opened the door." "Penguins cannot fly." --source google-bert/bert-base-uncased
    """
    with Screen("next-sentence", as_json=model.as_json) as screen:
        from porting.text import NEXT_SENTENCE
        from porting.text import next_sentence as judge

        verdict = judge(first, second, model.open(NEXT_SENTENCE))
        follows = verdict.follows >= 0.5
        word = "follows" if follows else "does not follow"
        screen.document({"follows": verdict.follows, "logits": verdict.logits, "verdict": word})
        share = verdict.follows if follows else 1 - verdict.follows
        logits = ", ".join(f"{one:.3f}" for one in verdict.logits)
        screen.line((word, "bold"), f"  {share:.2%}  (logits {logits})")
        screen.page(verdict, model.html)
        screen.next(*model.to_verify)
