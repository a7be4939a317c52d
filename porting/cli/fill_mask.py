"""``fill-mask``: guess masked words."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from porting.cli import options
from porting.cli.output import Screen

LINES = 9
"""How many lines of guesses are shown without --top."""


def fill_mask(
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="The text, with [MASK] in place of each word to fill in.")
    ],
    pair: options.PairText = None,
    top: Annotated[
        int | None,
        typer.Option(
            "--top",
            min=1,
            max=options.LARGEST,
            help="How many guesses for each mask.",
            show_default="5, fewer where masks are many",
        ),
    ] = None,
    *,
    model: options.TextOptions,
) -> None:
    """Fill in masked words, with the bundled model or your own, and the checkpoint's tokenizer.

    \b
    Examples:
      porting fill-mask "Return the [MASK] of the list."
      porting fill-mask "Return the [MASK] of the list." --html guesses.html
      porting fill-mask "Return the [MASK]." --table my_bert.toml --into my_bert.py:build
      porting fill-mask "Paris is the [MASK] of [MASK]." --top 3 --source google-bert/bert-base-uncased
      porting fill-mask "I accessed the bank account." --pair "We play soccer at the [MASK] of the river."
    """
    with Screen("fill-mask", as_json=model.as_json) as screen:
        from porting.text import MASKED_WORDS
        from porting.text import fill_mask as guess

        blanks = guess(text, model.open(MASKED_WORDS), pair=pair, top=top or 5)
        screen.document([asdict(blank) for blank in blanks])
        many = top is None and 2 * len(blanks) > LINES
        most = top or min(5, LINES // len(blanks) - 1)
        if many:
            likeliest = [(one.position, one.guesses[0]) for one in blanks[: LINES - 1]]
            first = [(f"token {place}:", f"{one.probability:7.2%}  {one.token}") for place, one in likeliest]
            screen.rows(["", ""], first)
            if len(blanks) > len(first):
                screen.line(f"and {len(blanks) - len(first)} more masks; --top 1 shows all")
        for blank in () if many else blanks:
            screen.line(f"token {blank.position}:")
            screen.rows(["", ""], [(f"  {one.probability:7.2%}", one.token) for one in blank.guesses[:most]])
        screen.page(blanks, model.html)
        screen.next(*model.to_verify)
