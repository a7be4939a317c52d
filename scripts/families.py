"""Every family in every module that a table brings it into, proven: ``make families``.

    python -m scripts.families                          # the grid of verdicts; exit status 1 unless all are faithful
    python -m scripts.families bert bert_into_encoder   # some tables
    python -m scripts.families --write                  # docs/families.md, from the tables

Each pair of ``tests/families/pairs.py`` gets a small checkpoint with every parameter drawn, and is verified against
transformers on it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table as Grid
from rich.text import Text

from porting.errors import PortingError
from porting.reporting.outcome import APPROXIMATE, DIFFERENT, FAITHFUL, IMPRECISE
from porting.reporting.report import Report
from porting.tables import find_table
from porting.tracing.measure import MEANING, ROUNDING
from porting.verification import verify
from scripts.families_page import family, modules, page, tables
from tests.families.pairs import PAIRS, Pair
from tests.families.ported import make

PAGE = Path(__file__).resolve().parent.parent / "docs" / "families.md"
REFUSED = "refused"
_STYLES = {FAITHFUL: "green", IMPRECISE: "yellow", APPROXIMATE: "yellow", DIFFERENT: "bold red", REFUSED: "bold red"}
_WORST_LAST = list(_STYLES)
_CELL = 15  # characters of a column with the space beside it


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What came of a pair.

    Attributes:
        pair: the pair.
        family, module: its place in the grid.
        verdict: the report's, or ``"refused"``.
        meaning: the largest difference in float64, relative to the activation's scale.
        rounding: the largest rounding error over the reference's own.
        explained: whether the difference is above the bound, and no larger than rounding explains.
        said: for a pair that is not faithful, why.
    """

    pair: Pair
    family: str
    module: str
    verdict: str
    meaning: float = 0.0
    rounding: float = 0.0
    explained: bool = False
    said: str = ""


def prove(pair: Pair, module: str) -> Proof:
    """Make the pair's checkpoint, port it and verify the port."""
    home = family(find_table(pair.table, {}))
    try:
        with tempfile.TemporaryDirectory(prefix="porting-family-") as folder:
            report = verify(make(pair, Path(folder)).directory, table=pair.table)
    except PortingError as error:
        return Proof(pair=pair, family=home, module=module, verdict=REFUSED, said=str(error))
    return Proof(
        pair=pair,
        family=home,
        module=module,
        verdict=report.verdict,
        meaning=max(probe.meaning.worst for probe in report.probes),
        rounding=max(view.worst for probe in report.probes for view in probe.rounding.values()),
        explained=any(probe.meaning.worst > MEANING for probe in report.probes) and report.verdict != DIFFERENT,
        said=_why(report),
    )


def _why(report: Report) -> str:
    if report.faithful:
        return ""
    named = (
        report.guilty or report.imprecise or tuple(probe for probe in report.probes if probe.differs or probe.drifts)
    )
    return ", ".join([*(probe.port for probe in named), *report.shown.differing])


def grids(proofs: Sequence[Proof], width: int) -> Iterator[Grid]:
    """Families by modules, in as many grids as the width asks for; none has a family without a module in it.

    A cell holds the worst of its pairs: the verdict, and below it the float64 difference and the rounding ratio.
    """
    columns = _neighbours(proofs)
    label = max(len(proof.family) for proof in proofs) + 2
    fits = max((width - label) // _CELL, 1)
    for start in range(0, len(columns), fits):
        shown = columns[start : start + fits]
        grid = Grid(box=None, pad_edge=False, padding=(0, 2, 1, 0), header_style="bold")
        grid.add_column("family", no_wrap=True, min_width=label - 2)
        for module in shown:
            grid.add_column(module.replace("_", " "), min_width=_CELL - 2, max_width=_CELL - 2, vertical="top")
        for name in dict.fromkeys(proof.family for proof in proofs if proof.module in shown):
            own = [proof for proof in proofs if proof.family == name]
            grid.add_row(name, *(_cell([proof for proof in own if proof.module == module]) for module in shown))
        yield grid


def _neighbours(proofs: Sequence[Proof]) -> list[str]:
    """The modules, those that share a family next to each other."""
    order: dict[str, None] = {}
    for proof in proofs:
        waiting = [proof.module]
        while waiting:
            module = waiting.pop(0)
            if module not in order:
                order[module] = None
                hosted = {proof.family for proof in proofs if proof.module == module}
                waiting += [proof.module for proof in proofs if proof.family in hosted]
    return list(order)


def _cell(proofs: Sequence[Proof]) -> Text:
    if not proofs:
        return Text()
    verdict = max((proof.verdict for proof in proofs), key=_WORST_LAST.index)
    if verdict == REFUSED:
        return Text(verdict, _STYLES[verdict])
    meaning, rounding = max(proof.meaning for proof in proofs), max(proof.rounding for proof in proofs)
    difference = f"{meaning:.0e}" if meaning else "0"
    mark = "*" if any(proof.explained for proof in proofs) else " "
    return Text.assemble((verdict, _STYLES[verdict]), f"\n{difference}{mark} {rounding:.1f}x")


def proven(pairs: Iterable[Pair], console: Console) -> list[Proof]:
    """Every pair's proof, with a progress bar on a terminal."""
    pairs = list(pairs)
    module_of = modules([*tables(), *(find_table(pair.table, {}) for pair in pairs)])
    bar = track(pairs, "proving", console=console, transient=True, disable=not console.is_terminal)
    return [prove(pair, module_of[find_table(pair.table, {}).name]) for pair in bar]


def show(pairs: Iterable[Pair], out: Console, progress: Console) -> bool:
    """Print the grid, its legend and what is wrong; whether every pair is faithful."""
    proofs = proven(pairs, progress)
    for grid in grids(proofs, out.width):
        out.print(grid)
        out.print()
    faithful = [proof for proof in proofs if proof.verdict == FAITHFUL]
    out.print(f"A cell has the worst of its checkpoints: the verdict, the difference in float64 (bound {MEANING:.0e})")
    out.print(f"and the rounding error over the reference's own (bound {ROUNDING:.0f}, more where few are compared).")
    if any(proof.explained for proof in proofs):
        out.print("* no more than rounding explains: a part is computed in less than float64 whatever its weights are.")
    for proof in proofs:
        if proof.verdict != FAITHFUL:
            out.print(Text.assemble((f"{proof.verdict}: ", _STYLES[proof.verdict]), f"{proof.pair}: {proof.said}"))
    out.print(f"{len(faithful)} of {len(proofs)} checkpoints are computed faithfully")
    return len(faithful) == len(proofs)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="tables; all when none is named")] = None,
    write: Annotated[bool, typer.Option("--write", help="write docs/families.md from the tables instead")] = False,
) -> None:
    """Prove every family in every module, and print the verdicts."""
    if write:
        PAGE.write_text(page(), encoding="utf-8")
        print(f"wrote {PAGE.name}")
        return
    known = {pair.table for pair in PAIRS}
    if unknown := sorted(set(names or ()) - known):
        raise typer.BadParameter(f"no pair has the table {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers does not type it
    torch.set_num_threads(1)  # the models are small: more threads wait for each other
    out, progress = Console(highlight=False), Console(stderr=True)
    if not show((pair for pair in PAIRS if not names or pair.table in names), out, progress):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
