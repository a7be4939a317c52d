"""Commands that read text: ``fill-mask`` and ``next-sentence``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from porting.cli import options
from porting.cli.screen import Screen

Text = Annotated[str, typer.Argument(metavar="TEXT", help="The text, with [MASK] in the place of each word to guess.")]
PairText = Annotated[str | None, typer.Option("--pair", help="A second segment, which follows the text.")]
Top = Annotated[int, typer.Option("--top", min=1, help="How many guesses for each mask.")]
First = Annotated[str, typer.Argument(metavar="FIRST", help="A sentence.")]
Second = Annotated[str, typer.Argument(metavar="SECOND", help="Another, which may follow it or not.")]


def fill_mask(
    text: Text,
    source: options.SourceOption = None,
    pair: PairText = None,
    top: Top = 5,
    table: options.TableName = None,
    trust: options.Trust = False,
    as_json: options.Json = False,
) -> None:
    """Guess masked words with the handwritten model and the checkpoint's own tokenizer.

    \b
    Examples:
      porting fill-mask "Return the [MASK] of the list."
      porting fill-mask "Paris is the [MASK] of [MASK]." --top 3 --source google-bert/bert-base-uncased
      porting fill-mask "I accessed the bank account." --pair "We play soccer at the [MASK] of the river."
    """
    with Screen("fill-mask", as_json=as_json) as screen:
        from porting.text import fill_mask as guess

        options.builder(None, trust=trust)
        blanks = guess(text, options.where(source), pair=pair, top=top, table=table, trust=trust)
        screen.document([asdict(blank) for blank in blanks])
        for blank in blanks:
            screen.line(f"word piece {blank.position}:")
            screen.rows(["", ""], [(f"  {one.probability:7.2%}", one.token) for one in blank.guesses])
        screen.next("verify", *options.again(source), *options.given(table=table, trust=trust))


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
        verdict = judge(first, second, options.where(source), table=table, trust=trust)
        follows = verdict.follows >= 0.5
        screen.document({**asdict(verdict), "verdict": "follows" if follows else "does not follow"})
        share = verdict.follows if follows else 1 - verdict.follows
        logits = ", ".join(f"{one:.3f}" for one in verdict.logits)
        screen.line(("follows" if follows else "does not follow", "bold"), f"  {share:.2%}  (logits {logits})")
        screen.next("verify", *options.again(source), *options.given(table=table, trust=trust))
