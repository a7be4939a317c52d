"""The plots of a report, as SVG to be put into a page: text stays text, and ink follows the page's own."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from porting.plotting import Axes, Figure, FuncFormatter, LogLocator, LogNorm, Normalize, NullLocator, mpl, style
from porting.printable import safe
from porting.reporting.outcome import Outcome, rows_of
from porting.tracing.measure import ROUNDING, ErrorProfile
from porting.tracing.trace import INNER

LEAST, MOST = 1e-17, 1e12
"""The range of the axis: values outside are drawn at its ends, since zero and infinity have no place on a log axis."""

SERIES = ("#0f7ac2", "#d55e00", "#12936c", "#a8629a")
"""Told apart by those who see few colours, and readable on white and on black."""

_INK, _SOFT = "#010203", "#040506"  # stand-ins: the page puts its own colours in their place
_PAGE = {_INK: "currentColor", _SOFT: "var(--line, #8888)", '"DejaVu Sans"': "inherit", "'DejaVu Sans'": "inherit"}
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "figure.facecolor": "none",
    "grid.color": _SOFT,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.labelcolor": _INK,
    "lines.linewidth": 1.4,
    "text.parse_math": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def growth(report: Outcome) -> str:
    """How the error grows over the depth of the model: float64 above, the working dtypes below; an SVG element."""
    with _drawing():
        panels = 2 if report.noise else 1
        figure = Figure(figsize=(8.2, 2.9 * panels), layout="constrained")
        axes = list(figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0])
        places = range(len(report.probes))
        ends = [_drawn(probe.meaning.end_to_end) for probe in report.probes]
        alone = [_drawn(probe.meaning.isolated) for probe in report.probes]
        bounds = [_drawn(probe.bound.end_to_end) for probe in report.probes]
        axes[0].plot(places, bounds, linestyle="--", color=_INK, linewidth=1, label="bound")
        axes[0].plot(places, ends, color=SERIES[0], label="end to end")
        axes[0].plot(*_dashes(alone), color=SERIES[1], linewidth=2.5, label="isolated")
        axes[0].set_title("float64: difference, relative to the activation's scale")
        if report.noise:
            axes[1].axhline(ROUNDING, linestyle="--", color=_INK, linewidth=1, label="bound")
            for number, tier in enumerate(report.noise):
                color = SERIES[number % len(SERIES)]
                ratios = [_drawn(probe.rounding[tier].end_to_end, 1e-2) for probe in report.probes]
                axes[1].plot(places, ratios, color=color, label=f"{tier}, end to end")
            axes[1].set_title("working dtype: rounding error over the reference's own")
        for plot in axes:
            _logarithmic(plot)
            plot.legend(loc="upper left", fontsize=9, ncols=4, bbox_to_anchor=(0, 1.0))
        _name_rows(axes[-1], report)
        return _as_svg(figure, "growth")


def spread_plot(spread: ErrorProfile, name: str, case: str = "") -> str:
    """Where an activation differs: by position as a picture, by channel as a line; an SVG element.

    Args:
        case: the batch, such as "8 rows of 1 to 24 tokens, padded", by which the axes are named.
    """
    with _drawing(), mpl.rc_context({"axes.grid": False}):
        positions = [[_drawn(value) for value in row] for row in spread.positions]
        channels = [_drawn(value) for value in spread.channels]
        tall = max(0.5, min(2.4, 0.16 * len(positions)))
        figure = Figure(figsize=(8.2, tall + 2.7), layout="constrained")
        above, below = figure.subplots(2, 1, height_ratios=[tall, 1.5])
        down, over, width = math.prod(spread.shape[:-2]), _size(spread.shape, -2), _size(spread.shape, -1)
        picture = above.imshow(
            positions,
            aspect="auto",
            norm=_scale(positions),
            cmap="cividis",
            interpolation="nearest",
            extent=(-0.5, over - 0.5, down - 0.5, -0.5),
        )
        bar = figure.colorbar(picture, ax=above, pad=0.01, format=FuncFormatter(_tick))
        bar.ax.yaxis.set_minor_locator(NullLocator())
        bar.outline.set_visible(False)
        rows, across, depth = _axes(spread.shape, name, case)
        above.set_title(f"by position: {rows} down, {across} across, the largest over {depth}")
        above.set_xticks(_whole(over, 16))
        above.set_yticks(_whole(down, 5))
        edges = [channel * width / len(channels) - 0.5 for channel in range(len(channels) + 1)]
        below.stairs(channels, edges, fill=True, color=SERIES[1], linewidth=0)
        below.set_title(f"by channel: {depth} across, the largest over all else")
        below.set_xlim(-1, width)
        below.set_xticks(_whole(width, 16))
        if isinstance(_scale([channels]), LogNorm):
            below.set_yscale("log")
            below.yaxis.set_minor_locator(NullLocator())
        below.yaxis.set_major_formatter(FuncFormatter(_tick))
        return _as_svg(figure, f"spread {name} {spread.case}")


def _size(shape: Sequence[int], axis: int) -> int:
    return shape[axis] if len(shape) >= -axis else 1


def _axes(shape: Sequence[int], name: str, case: str) -> tuple[str, str, str]:
    """The labels of an activation's axes in a plot: those taken for rows, positions and channels.

    >>> _axes((8, 24, 128), "blocks.0", "8 rows of 1 to 24 tokens, padded")
    ('batch (8)', 'token (24)', 'channel (128)')
    >>> _axes((24, 8, 128), "blocks.0", "8 rows of 1 to 24 tokens, padded")
    ('token (24)', 'batch (8)', 'channel (128)')
    >>> _axes((3, 5, 128), "blocks.0", "8 rows of 1 to 24 tokens, padded")
    ('axis 0 (3)', 'axis 1 (5)', 'axis 2 (128)')
    """
    known: tuple[str, ...] = ()
    rows = re.match(r"(\d+) rows? of (?:\d+ to )?(\d+) tokens", case)
    if len(shape) == 4 and name.endswith(INNER):
        known = ("batch", "head", "query", "key")
    elif len(shape) == 3 and rows and rows[1] != rows[2]:  # otherwise nothing tells rows from tokens
        both = {int(rows[1]): "batch", int(rows[2]): "token"}
        known = (both[shape[0]], both[shape[1]], "channel") if {*shape[:2]} == {*both} else ()
    names = [f"{known[axis] if known else f'axis {axis}'} ({size})" for axis, size in enumerate(shape)]
    lone = "one row"
    return " and ".join(names[:-2]) or lone, names[-2] if len(names) > 1 else lone, names[-1] if names else lone


def _scale(values: Sequence[Sequence[float]]) -> Normalize:
    """Colours from zero on; by order of magnitude where the values span several of them."""
    largest = max(map(max, values))
    smallest = max(min(map(min, values)), largest * 1e-6)
    return LogNorm(smallest, largest) if largest > 30 * smallest else Normalize(0, largest)


def _whole(count: int, most: int) -> range:
    """Places of some of so many."""
    return range(0, count, math.ceil(count / most))


def _tick(value: float, place: int | None = None) -> str:
    """A number on an axis, ``1e-6`` for ``1e-06``."""
    return re.sub(r"e([+-])0*", lambda found: "e-" if found[1] == "-" else "e", f"{value:g}")


@contextmanager
def _drawing() -> Iterator[None]:
    """The same style on every machine, whatever its user's own settings are."""
    with style.context(["default", _STYLE]), warnings.catch_warnings():
        # Text stays text, and the reader's browser has the glyphs that matplotlib's font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        yield


def _drawn(value: float | None, least: float = LEAST) -> float:
    """The value, or a number in its place that a logarithmic axis can show; what was not measured is left out."""
    if value is None:
        return math.nan
    return MOST if math.isnan(value) else min(max(value, least), MOST)


def _dashes(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """A dash at each value, all of them one line with gaps: as marks, they would be most of the file."""
    across = [place for number in range(len(values)) for place in (number - 0.4, number + 0.4, math.nan)]
    return across, [drawn for value in values for drawn in (value, value, math.nan)]


def _logarithmic(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=7))
    axes.yaxis.set_major_formatter(FuncFormatter(_tick))
    axes.yaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    if high < 300 * low:  # so few decades that each needs more than one tick
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
    axes.set_ylim(low, high * (high / low) ** 0.25)  # room for the legend
    axes.margins(x=0.01)


def _name_rows(axes: Axes, report: Outcome) -> None:
    """Ticks where a layer ends, named as in the table; where they are dense, some."""
    numbers = {id(probe): number for number, probe in enumerate(report.probes)}
    ticks: list[tuple[int, str]] = []
    for row in rows_of(report.probes):
        place = max(numbers[id(probe)] for probe in row.probes)
        if not ticks or place - ticks[-1][0] >= len(report.probes) / 28:
            ticks.append((place, safe(_short(row.label))))
    axes.set_xticks([place for place, _ in ticks], [name for _, name in ticks], rotation=35, ha="right")


def _short(label: str, most: int = 22) -> str:
    return label if len(label) <= most else "…" + label[1 - most :]


def _as_svg(figure: Figure, salt: str) -> str:
    """The figure as an element for a page; its ids differ from those of another figure with another salt."""
    written = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": salt}):
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    found = written.getvalue()
    found = found[found.index("<svg") :]
    found = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", found, flags=re.DOTALL)
    found = re.sub(r">\s+<", "><", found)
    found = re.sub(r'<g id="[^"]*"', "<g", found)  # names of groups, the same in every figure
    for stand_in, instead in _PAGE.items():
        found = found.replace(stand_in, instead)
    return found
