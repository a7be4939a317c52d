"""Attention as a picture: one head as a map of queries by keys, or all heads as a grid of maps."""

from __future__ import annotations

from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING

from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont
from matplotlib.ft2font import FT2Font
from matplotlib.patches import Rectangle
from torch import Tensor

from porting.printable import safe
from porting.seeing.shares import Shares

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

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


def head_picture(attention: Shares, *, layer: int, head: int, token: int | str | None = None) -> bytes:
    """One head as PNG, the tokens along both sides; for short texts with the numbers, in percent.

    Args:
        attention: what is drawn.
        layer, head: the head.
        token: mark the row of this token.

    Raises:
        AttentionError: there is no such layer, head or token.
    """
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

    Args:
        attention: what is drawn.
        layer: the only layer to be drawn; None for all.

    Raises:
        AttentionError: there is no such layer.
    """
    if layer is not None:
        attention.of(layer, 0)
    numbers = range(len(attention.layers)) if layer is None else [layer % len(attention.layers)]
    columns = max(len(attention.layers[number].heads) for number in numbers)
    figure = Figure(figsize=(1.25 * columns + 0.7, 1.25 * len(numbers) + 0.5), layout="constrained", facecolor="white")
    grid = figure.subplots(len(numbers), columns, squeeze=False)
    for row, number in enumerate(numbers):
        heads = attention.layers[number].heads
        for column in range(columns):
            axes = grid[row][column]
            if column >= len(heads):
                axes.set_axis_off()
                continue
            _map(axes, heads[column])
            axes.set_xticks([])
            axes.set_yticks([])
            if row == 0:
                axes.set_title(f"head {column}", color=INK, family=FONT, fontsize=10)
            if column == 0:
                axes.set_ylabel(f"layer {number}", color=INK, family=FONT, fontsize=10)
    return _png(figure)


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
        side.set_color("#8a929c")
    return axes.imshow(values.numpy(), cmap=HEATS, norm=SHADES, interpolation="nearest")


def _png(figure: Figure) -> bytes:
    written = BytesIO()
    figure.savefig(written, format="png", dpi=DOTS, bbox_inches="tight", metadata={"Software": None})
    return written.getvalue()
