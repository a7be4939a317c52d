"""``generate``: continue a text; ``--next``: the likeliest next tokens."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from porting.cli import options
from porting.cli.output import LONGEST_TEXT, Screen
from porting.printable import counted

if TYPE_CHECKING:
    from porting.generating import Generated


def generate(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text to continue.")],
    only_next: Annotated[bool, typer.Option("--next", help="Only list the likeliest next tokens.")] = False,
    max_length: options.MaxLength = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", max=options.LARGEST, help="Sample; logits are divided by this.", show_default=False
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", max=options.LARGEST, help="Sample among this many tokens.", show_default=False),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p", max=1.0, help="Sample among the likeliest tokens that sum to this.", show_default=False
        ),
    ] = None,
    seed: options.Seed = 0,
    num_beams: options.NumBeams = 1,
    top: options.TopOfEach = None,
    *,
    model: options.TextOptions,
) -> None:
    """Continue a text: the likeliest token each time, or sampled, or with a beam search.

    --temperature, --top-k or --top-p samples. An encoder-decoder answers the text.

    \b
    Examples:
      porting generate "Once upon a time" --source openai-community/gpt2 --table my_gpt.toml --into my_gpt.py:build
      porting generate "Once upon a time" --source ./gpt --next --top 3
      porting generate "Once upon a time" --source ./gpt --temperature 0.8 --top-p 0.9 --seed 1
      porting generate "Once upon a time" --source ./gpt --num-beams 4 --max-length 60 --html text.html
    """
    with Screen("generate", as_json=model.as_json) as screen:
        from porting.generating import generate as write
        from porting.generating import next_tokens
        from porting.text import NEXT_TOKEN, TARGET_TOKEN

        opened = model.open(NEXT_TOKEN, TARGET_TOKEN)
        if only_next:
            found = next_tokens(text, opened, top=top or 5)
            screen.document({"next": [asdict(one) for one in found.guesses]})
            screen.rows(["", ""], [(f"{one.probability:7.2%}", one.token) for one in found.guesses])
            screen.page(found, model.html)
            screen.next("generate", text, *options.flags(source=model.source), *model.flags)
            return
        written = write(
            text,
            opened,
            max_length=max_length,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            num_beams=num_beams,
            top=top or 5,
        )
        show(screen, written, top)
        screen.page(written, model.html)
        screen.next(*model.to_verify)


def show(screen: Screen, written: Generated, top: int | None) -> None:
    """The text, how it ended, and on request what else stood at each place."""
    screen.document(
        {
            "text": written.text,
            "ids": written.ids,
            "score": written.score,
            "ended": written.ended,
            "tokens": [
                {"token": word.text, "probability": word.probability, "guesses": [asdict(one) for one in step.guesses]}
                for word, step in zip(written.words[-len(written.steps) :], written.steps, strict=True)
            ],
        }
    )
    screen.line((written.result, "bold"), most=LONGEST_TEXT)
    end = "ended by the model" if written.ended else "cut at the maximum length"
    screen.line(f"{counted(len(written.ids), 'new token')}, {end}; log-probability {written.score:.2f}")
    if top is not None:
        new = written.words[-len(written.steps) :]
        rows = [
            (
                word.text,
                f"{word.probability or 0:7.2%}",
                "  ".join(f"{one.token} {one.probability:.0%}" for one in step.guesses),
            )
            for word, step in zip(new, written.steps, strict=True)
        ]
        screen.rows(["token", "", "likeliest"], rows)
