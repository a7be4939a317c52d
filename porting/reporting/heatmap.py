"""The heat map of a report: layers by probes, every number against its bound."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from porting.reporting.outcome import IMPRECISE, OUTPUT, Outcome, Probe, rows_of
from porting.tracing.measure import luck

DOUBLE = "float64"
ALONE, END = "isolated", "end to end"
VIEWS = {ALONE: "isolated", END: "end_to_end"}

STEPS = (-0.6, -0.3, 0.0, 1.0, 3.0, 6.0)
"""The borders of the levels: decimal logarithms of a number over its bound.  Levels 0 to 2 are within it.

For rounding, whose bound is 4, the first two steps are at 1 and 2 times the reference's own error.
"""


@dataclass(frozen=True, kw_only=True)
class TierError:
    """One number of one probe.

    Attributes:
        tier: ``float64`` or a working dtype.
        view: ``isolated`` or ``end to end``.
        number: the number, None when it was not measured.
        text: the number for a reader; empty when there is none.
        bound: its bound for a reader.
        level: 0 to 6, from far below the bound to far above it.
        above: whether it is above the bound.
    """

    tier: str
    view: str
    number: float | None
    text: str
    bound: str
    level: int
    above: bool


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One probe in the map.

    Attributes:
        number: of the probe in the report.
        probe: what was compared.
        readings: of every tier in every view, in the same order in every cell.
        state: ``guilty``, ``imprecise``, ``passed on`` (it differs and does not do so by itself) or ``same``.
    """

    number: int
    probe: Probe
    readings: tuple[TierError, ...]
    state: str


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """The whole map.

    Attributes:
        tiers: ``float64`` and the working dtypes.
        columns: what is probed within a layer, in the order of execution; lone probes stand in the column of outputs.
        rows: what each row is called, and its cells by column, None where a layer has none.
        tier: the one to show first: where the verdict shows.
        first: the number of the probe to show first, None when all are alike.
    """

    tiers: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]
    tier: str
    first: int | None

    @property
    def cells(self) -> Iterator[Cell]:
        """Every cell, row by row."""
        yield from (cell for _, cells in self.rows for cell in cells if cell)


def heat_map(report: Outcome) -> HeatMap:
    """Lay the probes of a report out."""
    numbers = {id(probe): number for number, probe in enumerate(report.probes)}
    rows = rows_of(report.probes)
    columns = in_order([row.columns for row in rows])
    tiers = (DOUBLE, *report.noise)
    found = []
    for row in rows:
        cells = {
            column: Cell(
                number=numbers[id(probe)], probe=probe, readings=tuple(_readings(probe, tiers)), state=_state(probe)
            )
            for column, probe in zip(row.columns, row.probes, strict=True)
        }
        found.append((row.label, tuple(cells.get(column) for column in columns)))
    accused = report.guilty[0] if report.guilty else report.first_difference
    accused = accused or next((probe for probe in report.probes if probe.imprecise or probe.drifts), None)
    return HeatMap(
        tiers=tiers,
        columns=tuple(columns),
        rows=tuple(found),
        tier=_rounds_worst(report) if report.verdict == IMPRECISE else DOUBLE,
        first=None if accused is None else numbers[id(accused)],
    )


def in_order(rows: Collection[Sequence[str]]) -> list[str]:
    """The columns of all rows, such that each row's own order is kept where the rows agree; outputs are last.

    >>> in_order([["output"], ["query", "context", "output"], ["query", "key", "context", "output"]])
    ['query', 'key', 'context', 'output']
    """
    found: list[str] = []
    for row in rows:
        place = 0
        for column in row:
            if column not in found and column != OUTPUT:
                found.insert(place, column)
            place = found.index(column) + 1 if column in found else len(found)
    return [*found, OUTPUT] if any(OUTPUT in row for row in rows) else found


def spelled(number: float, tier: str) -> str:
    """A number as the map prints it.

    >>> spelled(8.9e-16, "float64"), spelled(1.04, "float32"), spelled(12345.6, "float32"), spelled(0.0, "float64")
    ('9e-16', '1.0', '1e4', '0')
    """
    if not math.isfinite(number):
        return "inf" if number > 0 else str(number)
    if tier != DOUBLE and number < 9999.5:
        return f"{number:.1f}" if number < 99.95 else f"{number:.0f}"
    mantissa, _, exponent = f"{number:.0e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if number else "0"


def level(number: float, bound: float) -> int:
    """How dark a cell is, from its number and its bound.

    >>> [level(number, 4.0) for number in (0.9, 1.5, 3.9, 4.1, 100.0, 1e5, 1e8)]
    [0, 1, 2, 3, 4, 5, 6]
    """
    if not number > 0:
        return 0
    if not math.isfinite(number):
        return len(STEPS)
    share = math.log10(number / bound)
    return sum(share > step for step in STEPS)


def _readings(probe: Probe, tiers: tuple[str, ...]) -> Iterator[TierError]:
    for tier in tiers:
        for view, name in VIEWS.items():
            number: float | None
            if tier == DOUBLE:
                number, bound = getattr(probe.meaning, name), getattr(probe.bound, name)
                limit = f"{bound:.0e}" if bound is not None else ""
            else:
                number, bound = getattr(probe.rounding[tier], name), luck(probe.count)
                limit = f"{bound:.1f}".removesuffix(".0")
            if number is None:
                yield TierError(tier=tier, view=view, number=None, text="", bound="", level=0, above=False)
            else:
                yield TierError(
                    tier=tier,
                    view=view,
                    number=number,
                    text=spelled(number, tier),
                    bound=limit,
                    level=level(number, bound),
                    above=number > bound,
                )


def _state(probe: Probe) -> str:
    if probe.guilty:
        return "guilty"
    if probe.imprecise:
        return "imprecise"
    return "passed on" if probe.differs or probe.drifts else "same"


def _rounds_worst(report: Outcome) -> str:
    worst = {tier: max(probe.rounding[tier].worst for probe in report.probes) for tier in report.noise}
    return max(worst, key=worst.__getitem__, default=DOUBLE)
