"""``classify``: the labels of a text."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from porting.cli import options
from porting.cli.output import Screen


def classify(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text.")],
    pair: options.PairText = None,
    top: Annotated[
        int, typer.Option("--top", min=1, max=options.LARGEST, help="How many labels, the likeliest first.")
    ] = 5,
    *,
    model: options.TextOptions,
) -> None:
    """Classify a text: the labels of the checkpoint's config with their probabilities.

    The page also shows what the model attends to.

    \b
    Examples:
      porting classify "A wonderful film." --source ./my-classifier
      porting classify "A wonderful film." --source ./my-classifier --html class.html
      porting classify "It rains." --pair "The street is wet." --source ./my-classifier --top 3
      porting classify "A wonderful film." --source ./my-classifier --table my_bert.toml --into my_bert.py:build
    """
    with Screen("classify", as_json=model.as_json) as screen:
        from porting.seeing import classify as judge
        from porting.text import CLASSES

        found = judge(text, model.open(CLASSES), pair=pair)
        shown = found.guesses[:top]
        screen.document({"label": found.label, "labels": [asdict(one) for one in shown], "logits": found.logits})
        screen.rows(["", ""], [(f"{one.probability:7.2%}", one.token) for one in shown])
        screen.page(found, model.html)
        if model.html is None:
            words = options.flags(pair=pair, source=model.source)
            screen.next("classify", text, *words, *model.flags, "--html", "class.html")
        else:
            screen.next(*model.to_verify)
