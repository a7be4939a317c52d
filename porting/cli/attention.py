"""``attention``: what each head of a model attends to in a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from porting.cli import options
from porting.cli.output import Screen

if TYPE_CHECKING:
    from porting.seeing import Attention

MOST_HEADS = 64
"""Columns of the table."""

MOST_LAYERS = 6
"""Rows of the table."""


def _numbered(part: str) -> Any:  # typer's own class is not public
    """The option that says which layer or head is meant."""
    words = f"The {part}, from 0; -1 is the last."
    most = options.LARGEST
    return typer.Option(f"--{part}", min=-most, max=most, help=words, show_default="all")


def attention(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text.")],
    pair: options.PairText = None,
    pieces: Annotated[
        bool,
        typer.Option(
            "--pieces", help="TEXT is already tokenized: tokens separated by spaces, special tokens included."
        ),
    ] = False,
    layer: Annotated[int | None, _numbered("layer")] = None,
    head: Annotated[int | None, _numbered("head")] = None,
    token: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TOKEN",
            help="The token that attends: its number, or its spelling.",
            show_default="0; the last where that sees itself alone",
        ),
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", help="Write a picture: the head that is named, or the grid of all.")
    ] = None,
    *,
    model: options.TextOptions,
) -> None:
    """Show what each head attends to in a text.

    Without --head: the token that each head attends to most. With --head: the share that it gives to each token. For
    your own model give --table and --into.

    \b
    Examples:
      porting attention "Return the name of the file."
      porting attention "Return the name of the file." --layer 1 --head 2 --from file
      porting attention "Return the name of the file." --html attention.html
      porting attention "Return the name of the file." --layer 1 --head 2 --png head.png
      porting attention "He sat on the river bank." --source google-bert/bert-base-uncased --png grid.png
    """
    with Screen("attention", as_json=model.as_json) as screen:
        from porting.atomic import check_page, write_file
        from porting.seeing import attention as see

        check_page(png, ".png")
        seen = see(text.split() if pieces else text, model.open(), pair=pair)
        number = token and token not in seen.tokens and token.isascii() and token.removeprefix("-").isdecimal()
        place = seen.place(int(token) if token and number else token)
        shares = _shares(seen, layer, head, place)
        files: dict[Path, bytes] = {}
        if model.html is not None:
            files[model.html] = seen.to_html(layer=layer, head=head, token=place).encode()
        if png is not None:
            files[png] = seen.to_png(layer=layer, head=head, token=place)
        for path, content in files.items():
            write_file(path, content)
            screen.made(path)
        screen.document(
            {
                "model": seen.model,
                "tokens": seen.tokens,
                "from": place,
                "heads": [{"layer": one, "head": other, "shares": values} for (one, other), values in shares.items()],
                "files": [str(path) for path in files],
            }
        )
        _show(screen, seen, shares, place)
        for path in files:
            screen.line(f"written: {path}")
        if model.html is None:
            same = options.flags(pair=pair, pieces=pieces, source=model.source)
            screen.next("attention", text, *same, *model.flags, "--html", "attention.html")
        else:
            screen.next(*model.to_verify)


def _shares(seen: Attention, layer: int | None, head: int | None, place: int) -> dict[tuple[int, int], list[float]]:
    """The shares that the token gives to each token, in each of the chosen heads."""
    count = len(seen.layers)
    layers = range(count) if layer is None else [layer % count if -count <= layer < count else layer]
    found = {}
    for number in layers:
        chosen = seen.of(number, 0 if head is None else head)  # says what is wrong with the numbers
        heads = seen.layers[number].heads
        for other in range(len(heads)) if head is None else [head % len(heads)]:
            found[number, other] = (chosen if head is not None else heads[other])[place].tolist()
    return found


def _show(screen: Screen, seen: Attention, shares: dict[tuple[int, int], list[float]], place: int) -> None:
    what = f"what {seen.tokens[place]!r}, token {place} of {len(seen.tokens)}, attends to"
    if len(shares) == 1:
        (((layer, head), values),) = shares.items()
        screen.line(f"{what} in layer {layer}, head {head}:")
        rows = [
            (token, f"{share:7.2%}", "#" * round(40 * share)) for token, share in zip(seen.tokens, values, strict=True)
        ]
        screen.rows(["token", "share", ""], rows)
        return
    screen.line(f"{what} most:")
    every_layer = sorted({layer for layer, _ in shares})
    layers = every_layer[:MOST_LAYERS]
    every = sorted({head for _, head in shares})
    heads = every[:MOST_HEADS]
    screen.rows(
        ["layer", *(f"head {head}" for head in heads)],
        [
            [str(layer), *(_most(seen, shares[layer, head]) if (layer, head) in shares else "" for head in heads)]
            for layer in layers
        ],
        right=["layer"],
    )
    cut = [
        f"{len(some)} of {len(all_)} {what} are shown; {flag} shows any one, --json all of them"
        for some, all_, what, flag in ((layers, every_layer, "layers", "--layer"), (heads, every, "heads", "--head"))
        if len(all_) > len(some)
    ]
    if cut:
        screen.line("; ".join(cut))


def _most(seen: Attention, values: list[float]) -> str:
    place = max(range(len(values)), key=values.__getitem__)
    return f"{seen.tokens[place]} {values[place]:.0%}"
