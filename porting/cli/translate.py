"""``translate``: a text through an encoder-decoder."""

from __future__ import annotations

from typing import Annotated

import typer

from porting.cli import options
from porting.cli.generate import show
from porting.cli.output import Screen


def translate(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text to translate.")],
    max_length: options.MaxLength = None,
    num_beams: options.NumBeams = 1,
    top: options.TopOfEach = None,
    *,
    model: options.TextOptions,
) -> None:
    """Translate a text with an encoder-decoder, greedily or with a beam search.

    \b
    Examples:
      porting translate "Good morning." --source ./my-translator
      porting translate "Good morning." --source ./my-translator --num-beams 4 --html translation.html
      porting translate "Good morning." --source ./my-translator --table mine.toml --into my_model.py:build
    """
    with Screen("translate", as_json=model.as_json) as screen:
        from porting.generating import translate as write
        from porting.text import TARGET_TOKEN

        written = write(text, model.open(TARGET_TOKEN), max_length=max_length, num_beams=num_beams, top=top or 5)
        show(screen, written, top)
        screen.page(written, model.html)
        screen.next(*model.to_verify)
