"""Attention as a picture: one head as a map of queries by keys, or all heads as a grid of maps."""

from __future__ import annotations

from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from porting.plotting import Figure, FT2Font, LinearSegmentedColormap, PowerNorm, Rectangle, findfont
from porting.printable import safe
from porting.seeing.attention_data import Shares

if TYPE_CHECKING:
    from collections.abc import Sequence

    from porting.plotting import Axes, AxesImage

INK, HEAT, DEEP = "#1b1f24", "#f5a33b", "#7a3300"
HEATS = LinearSegmentedColormap.from_list("heat", ["#ffffff", HEAT, DEEP])
SHADES = PowerNorm(0.5, vmin=0, vmax=1)
"""The same in every head: the square root of the share."""

FONT = "DejaVu Sans"
"""It comes with matplotlib, so a picture is the same everywhere."""

LONGEST = 18
"""Characters of a token that a label has room for."""

DOTS = 150
"""Dots per inch."""

CELL, GAP = 120, 10
"""Dots from one map of a grid to the next, and how many of them are between the two."""

MOST_COLUMNS, MOST_MAPS = 64, 400
"""Maps in a grid: a picture of 24 layers of 16 heads is one of 2,000 by 3,000 dots."""

EDGE = "#8a929c"
_EDGE = bytes.fromhex(EDGE[1:])


def head_picture(attention: Shares, *, layer: int, head: int, token: int | str | None = None) -> bytes:
    """One head as PNG, the tokens along both sides; for short texts with the numbers, in percent."""
    values = attention.of(layer, head)
    count = len(attention.tokens)
    labels = [label(one) for one in attention.tokens]
    size = max(3.2, 0.34 * count) + 0.085 * max(map(len, labels))
    figure = Figure(figsize=(min(size + 1.0, 40), min(size + 0.5, 40)), layout="constrained", facecolor="white")
    axes = figure.subplots()
    image = _map(axes, values)
    axes.set_xticks(range(count), labels, rotation=90, parse_math=False, family=FONT, color=INK, fontsize=10)
    axes.set_yticks(range(count), labels, parse_math=False, family=FONT, color=INK, fontsize=10)
    axes.tick_params(length=0)
    axes.set_xlabel("is attended to", color=INK, family=FONT)
    axes.set_ylabel("attends", color=INK, family=FONT)
    title = f"layer {layer % len(attention.layers)}, head {head % len(attention.layers[layer].heads)}"
    axes.set_title(title, color=INK, family=FONT, fontsize=12)
    if token is not None:
        place = attention.place(token)
        frame = Rectangle((-0.5, place - 0.5), count, 1, fill=False, edgecolor=INK, linewidth=2, clip_on=False)
        axes.add_patch(frame)
    if count <= 20:
        for row, shares in enumerate(values.tolist()):
            for column, share in enumerate(shares):
                if share >= 0.005:
                    text, colour = f"{100 * share:.0f}", ink_on(share)
                    axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colour, family=FONT)
    bar = figure.colorbar(image, ax=axes, shrink=0.7, pad=0.02, ticks=[0, 0.05, 0.25, 0.5, 1])
    bar.ax.tick_params(labelsize=9, labelcolor=INK, length=0)
    bar.outline.set_visible(False)
    return _png(figure)


def grid_picture(attention: Shares, *, layer: int | None = None) -> bytes:
    """All heads as PNG: a row of maps for each layer.

    Of many heads the first :data:`MOST_MAPS` are drawn, and a line below says which; a head that is named is drawn by
    :func:`head_picture`.
    """
    if layer is not None:
        attention.of(layer, 0)
    numbers = range(len(attention.layers)) if layer is None else [layer % len(attention.layers)]
    heads = max(len(attention.layers[number].heads) for number in numbers)
    columns = min(heads, MOST_COLUMNS)
    drawn = numbers[: max(1, MOST_MAPS // columns)]
    # One image with all maps: an Axes for each takes 30 ms.
    image = np.full((CELL * len(drawn), CELL * columns, 4), 255, dtype=np.uint8)
    for row, number in enumerate(drawn):
        for column, values in enumerate(attention.layers[number].heads[:columns]):
            image[CELL * row + GAP : CELL * (row + 1), CELL * column + GAP : CELL * (column + 1)] = _map_pixels(values)
    left, above, below = 60, 30, 30
    size = image.shape[1] + left + GAP, image.shape[0] + above + below
    figure = Figure(figsize=(size[0] / DOTS, size[1] / DOTS), dpi=DOTS, facecolor="white")
    figure.figimage(image, xo=left, yo=below)
    middle = (CELL + GAP) / 2
    style: dict[str, Any] = {
        "color": INK,
        "family": FONT,
        "fontsize": 8,
        "ha": "center",
        "va": "center",
        "transform": None,
    }
    for column in range(columns):
        figure.text(left + CELL * column + middle, size[1] - above / 2, f"head {column}", **style)
    for row, number in enumerate(drawn):
        height = size[1] - above - CELL * row - middle
        figure.text(left - 15, height, f"layer {number}", rotation=90, **style)
    if heads > columns or len(numbers) > len(drawn):
        some = f"the first {columns} of {heads} heads, {len(drawn)} of {len(numbers)} layers"
        figure.text(left + GAP, below / 2, some, **style | {"ha": "left"})
    return _png(figure, tight=False)


def _map_pixels(values: Tensor) -> np.ndarray:
    """A head's map [q k] in a frame, [side side 4]: the nearest value at each pixel."""
    side = CELL - GAP
    places = np.arange(side - 2) * len(values) // (side - 2)
    shades = np.asarray(SHADES(values.numpy()[places[:, None], places]))
    pixels = np.full((side, side, 4), [*_EDGE, 255], dtype=np.uint8)
    pixels[1:-1, 1:-1] = HEATS(shades, bytes=True)
    return pixels


def ink_on(share: float) -> str:
    """Black or white, whichever is read more easily on the colour of a share (WCAG 2.2, contrast ratio)."""
    light = luminance(HEATS(float(SHADES(share)))[:3])
    return "#000000" if (light + 0.05) / 0.05 >= 1.05 / (light + 0.05) else "#ffffff"


def luminance(colour: Sequence[float]) -> float:
    """The relative luminance of red, green and blue, each 0 to 1 (WCAG 2.2)."""
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def label(token: str) -> str:
    """A token as the picture can write it: what cannot be seen, and what its font lacks, is spelled out."""
    known = _letters()
    seen = "".join(one if ord(one) in known else one.encode("unicode_escape").decode("ascii") for one in safe(token))
    return seen if len(seen) <= LONGEST else f"{seen[: LONGEST - 1]}…"


@cache
def _letters() -> frozenset[int]:
    return frozenset(FT2Font(findfont(FONT)).get_charmap())


def _map(axes: Axes, values: Tensor) -> AxesImage:
    for side in axes.spines.values():
        side.set_color(EDGE)
    return axes.imshow(values.numpy(), cmap=HEATS, norm=SHADES, interpolation="nearest")


def _png(figure: Figure, *, tight: bool = True) -> bytes:
    written = BytesIO()
    figure.savefig(written, format="png", dpi=DOTS, bbox_inches="tight" if tight else None, metadata={"Software": None})
    return written.getvalue()
