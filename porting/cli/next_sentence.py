"""``next-sentence``: judge whether one sentence follows another."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from porting.cli import options
from porting.cli.output import Screen

First = Annotated[str, typer.Argument(metavar="FIRST", help="A sentence.")]
Second = Annotated[str, typer.Argument(metavar="SECOND", help="Another, which may follow it or not.")]


def next_sentence(
    first: First,
    second: Second,
    source: options.SourceOption = None,
    table: options.TableName = None,
    trust: options.Trust = False,
    as_json: options.Json = False,
) -> None:
    """Judge whether one sentence follows another, with the handwritten model and the checkpoint's own tokenizer.

    \b
    Examples:
      porting next-sentence "Open the file." "Read its first line."
      porting next-sentence "He opened the door." "Penguins cannot fly." --source google-bert/bert-base-uncased
    """
    with Screen("next-sentence", as_json=as_json) as screen:
        from porting.text import next_sentence as judge

        options.builder(None, trust=trust)
        verdict = judge(first, second, options.checkpoint_source(source), table=table, trust=trust)
        follows = verdict.follows >= 0.5
        screen.document({**asdict(verdict), "verdict": "follows" if follows else "does not follow"})
        share = verdict.follows if follows else 1 - verdict.follows
        logits = ", ".join(f"{one:.3f}" for one in verdict.logits)
        screen.line(("follows" if follows else "does not follow", "bold"), f"  {share:.2%}  (logits {logits})")
        screen.next("verify", *options.source_argument(source), *options.flags(table=table, trust=trust))
