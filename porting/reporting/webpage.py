"""A report as a page for a browser, and as what a notebook shows of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from markupsafe import Markup
from rich.text import Text

from porting.pages.page import render_page, render_part
from porting.reporting.figures import growth, spread_plot
from porting.reporting.gradient_text import gradient_lines
from porting.reporting.heatmap import Cell, heat_map
from porting.reporting.outcome import Outcome, rows_of
from porting.reporting.terminal import (
    cause_lines,
    culprit_lines,
    mark,
    other_lines,
    shown_lines,
    summary_lines,
    verdict_lines,
)

MOST_DRAWN = 3
"""The number of guilty modules for which a picture shows where they differ."""

_CLASSES = {"green": "good", "yellow": "warn", "red": "bad", "dim": "faint"}

Line = list[tuple[str, str]]
"""A line of text in pieces, each with its class, which may be empty."""


def report_page(report: Outcome) -> str:
    """The page: the verdict, the heat map, the growth of the error, the culprits, and what was not shown."""
    values = {
        **_words(report),
        "date": datetime.now(tz=UTC).date().isoformat(),
        "map": heat_map(report),
        "growth": _element(growth(report)) if report.probes else "",
        "spreads": list(_spreads(report)),
        "partial": sorted((share, name) for name, share in report.shown.activation.items() if share < 1),
        "facts": _facts(report),
        "explained": {point: cause for cause in report.causes for point in cause.probes if cause.name},
    }
    return render_page("report.html", values, styles=["report.css"], scripts=["report.js"])


def report_part(report: Outcome) -> str:
    """A part of a page: the verdict, a row for each layer, and the culprit."""
    found = heat_map(report)
    rows = [
        {"label": row.label, "numbers": list(_worst(cells)), "said": mark(row).plain}
        for row, (_, cells) in zip(rows_of(report.probes), found.rows, strict=True)
    ]
    return render_part("report_part.html", {**_words(report, verbose=False), "rows": rows, "map": found})


def _worst(cells: Sequence[Cell | None]) -> Iterator[tuple[str, bool]]:
    """For each tier and view of a row: the largest number, and whether any is above its bound."""
    for readings in zip(*(cell.readings for cell in cells if cell), strict=True):
        largest = max(readings, key=lambda reading: -1.0 if reading.number is None else reading.number)
        yield largest.text, any(reading.above for reading in readings)


def _words(report: Outcome, *, verbose: bool = True) -> dict[str, object]:
    """The texts of the terminal, for the page; without ``verbose`` the scope is counted and not listed."""
    first, *scope = verdict_lines(report, verbose=verbose)
    word = report.verdict.upper()
    return {
        "report": report,
        "verdict": word,
        "tone": _class(str(first.spans[0].style)) if first.spans else "",
        "sentence": first.plain.removeprefix(word).strip(),
        "numbers": [_pieces(line) for line in (*summary_lines(report), *scope)],
        "culprits": [_pieces(line) for line in culprit_lines(report)],
        "causes": [_pieces(line) for line in cause_lines(report.causes)],
        "learned": [_pieces(line) for line in gradient_lines(report.learned)],
        "observed": [_pieces(line) for line in shown_lines(report)],
        "others": [_pieces(line) for line in other_lines(report)],
    }


def _pieces(line: Text) -> Line:
    """A line of the terminal's: its pieces with their styles as classes."""
    whole = _class(str(line.style))
    pieces: Line = []
    place = 0
    for span in line.spans:
        pieces += [
            (line.plain[place : span.start], whole),
            (line.plain[span.start : span.end], _class(str(span.style))),
        ]
        place = span.end
    pieces.append((line.plain[place:], whole))
    return [(text, name) for text, name in pieces if text]


def _class(style: str) -> str:
    """``bold red`` -> ``strong bad``."""
    words = style.split()
    return " ".join([*(["strong"] if "bold" in words else []), *(_CLASSES[word] for word in words if word in _CLASSES)])


def _spreads(report: Outcome) -> Iterator[tuple[str, str, tuple[int, ...], Markup]]:
    for probe in [probe for probe in report.guilty if probe.spreads][:MOST_DRAWN]:
        for spread in probe.spreads:
            case = report.cases[spread.case] if spread.case < len(report.cases) else ""
            yield probe.port, case, spread.shape, _element(spread_plot(spread, probe.port, case))


def _element(drawn: str) -> Markup:
    return Markup(drawn)  # noqa: S704  # matplotlib wrote it and escapes the texts in it


def _facts(report: Outcome) -> dict[str, str]:
    cost = report.cost
    return {
        "reference": report.reference,
        "port": report.port,
        "table": report.table,
        "checkpoint": report.source,
        "inputs": "; ".join(report.cases),
        **({"search": report.search} if report.search else {}),
        "seed": str(report.seed),
        "forward passes": f"{cost.passes} in {cost.forwards:.1f} s",
        "with all comparisons": f"{cost.total:.1f} s, {cost.ratio:.1f} times the forward passes",
        "loading": f"{cost.loading:.1f} s",
        "memory": f"{cost.memory / 1e9:.1f} GB at most",
        **report.environment,
    }
