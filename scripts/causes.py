"""The catalogue of causes and its score: ``make causes``.

python -m scripts.causes                       # plant every mistake everywhere, and print the matrix
python -m scripts.causes --jobs 2 --write      # the whole of it, in two processes
python -m scripts.causes --only bert_into      # in the pairs whose name has this in it
python -m scripts.causes --faithful 500        # compare faithful ports, and count the false alarms
python -m scripts.causes --write               # with any of these: keep what was found, and write docs/causes.md
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer

from scripts.causes_page import SCORE, page
from scripts.causes_score import NONE, TIE, UNIQUE, Result, Scored, faithful, keep, score
from tests.families.pairs import PAIRS, Pair

PAGE = Path(__file__).resolve().parent.parent / "docs" / "causes.md"


def main(
    only: Annotated[str, typer.Option("--only", help="Only pairs whose name has this in it; - for none.")] = "",
    comparisons: Annotated[int, typer.Option("--faithful", help="Compare faithful ports so many times.")] = 0,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="So many processes, each with pairs of its own.")] = 1,
    write: Annotated[bool, typer.Option("--write", help="Keep what was found, and write docs/causes.md.")] = False,
) -> None:
    """Score the catalogue, count false alarms, write the page."""
    found: dict[str, Scored] = {}
    chosen = [pair for pair in PAIRS if only != "-" and only in str(pair) and not comparisons]
    for pair, scored in _scored(chosen, jobs):
        found[str(pair)] = scored
        if write:
            keep(SCORE, found, _measured())
        _tell(f"{pair}, everywhere", scored.everywhere)
        _tell(f"{pair}, in one layer", scored.alone)
    facts = _measured() if found else {}
    if comparisons:
        done, alarms = faithful(comparisons)
        print(f"{done} faithful comparisons, {len(alarms)} false alarms", *alarms, sep="\n")
        facts["faithful"] = {"comparisons": done, "alarms": alarms, "dtypes": "float32, bfloat16 and float16"}
    if write:
        if facts:
            keep(SCORE, found, facts)
        PAGE.write_text(page(), encoding="utf-8")


def _scored(pairs: Sequence[Pair], jobs: int) -> Iterator[tuple[Pair, Scored]]:
    """Each pair with its score, in order; in several processes, which take one pair after the other."""
    if jobs == 1:
        yield from ((pair, score(pair)) for pair in pairs)
        return
    with get_context("spawn").Pool(jobs) as pool:  # torch's threads do not survive a fork
        yield from zip(pairs, pool.imap(score, pairs), strict=True)


def _tell(title: str, cells: Mapping[str, Result]) -> None:
    counts = Counter(cell.outcome for cell in cells.values())
    print(f"{title}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()), flush=True)
    for name, one in cells.items():
        astray = "" if one.placed and one.strict else ", accuses others" if one.placed else ", misplaced"
        if astray or one.outcome not in (UNIQUE, TIE, NONE):
            where = f" in {one.where}" if one.where else ""
            print(f"    {name}{where}: {one.outcome}{astray}; said {one.said[:4]}", flush=True)


def _measured() -> dict[str, object]:
    versions = {name: version(name) for name in ("torch", "transformers")}
    return {"measured": {"date": datetime.now(UTC).date().isoformat(), "python": platform.python_version(), **versions}}


if __name__ == "__main__":
    typer.run(main)
