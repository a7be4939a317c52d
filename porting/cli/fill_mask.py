"""``fill-mask``: guess masked words."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from porting.cli import options
from porting.cli.output import Screen

Text = Annotated[str, typer.Argument(metavar="TEXT", help="The text, with [MASK] in the place of each word to guess.")]

Top = Annotated[int, typer.Option("--top", min=1, help="How many guesses for each mask.")]


def fill_mask(
    text: Text,
    source: options.SourceOption = None,
    pair: options.PairText = None,
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
        blanks = guess(text, options.checkpoint_source(source), pair=pair, top=top, table=table, trust=trust)
        screen.document([asdict(blank) for blank in blanks])
        for blank in blanks:
            screen.line(f"word piece {blank.position}:")
            screen.rows(["", ""], [(f"  {one.probability:7.2%}", one.token) for one in blank.guesses])
        screen.next("verify", *options.source_argument(source), *options.flags(table=table, trust=trust))
