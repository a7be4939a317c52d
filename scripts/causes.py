"""The catalogue of causes and its score: ``make causes``.

python -m scripts.causes                       # plant every mistake everywhere, and print the matrix
python -m scripts.causes --only bert_into      # in the pairs whose name has this in it
python -m scripts.causes --faithful 500        # compare faithful ports, and count the false alarms
python -m scripts.causes --write               # with any of these: keep what was found, and write docs/causes.md
"""

from __future__ import annotations

import platform
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from scripts.causes_page import SCORE, page
from scripts.causes_score import Result, faithful, keep, score
from tests.families.pairs import PAIRS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "causes.md"


def main(
    only: Annotated[str, typer.Option("--only", help="Only pairs whose name has this in it; - for none.")] = "",
    comparisons: Annotated[int, typer.Option("--faithful", help="Compare faithful ports so many times.")] = 0,
    write: Annotated[bool, typer.Option("--write", help="Keep what was found, and write docs/causes.md.")] = False,
) -> None:
    """Score the catalogue, count false alarms, write the page."""
    found: dict[str, dict[str, Result]] = {}
    for pair in PAIRS:
        if only in str(pair) and not comparisons:
            found[str(pair)] = score(pair)
            if write:
                keep(SCORE, found, _measured())
            counts = Counter(one.outcome for one in found[str(pair)].values())
            print(f"{pair}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()), flush=True)
            for name, one in found[str(pair)].items():
                if one.outcome not in ("unique", "tie", "no effect") or not one.placed:
                    print(f"    {name}: {one.outcome}{'' if one.placed else ', misplaced'}; said {one.said[:4]}")
    facts = _measured() if found else {}
    if comparisons:
        done, alarms = faithful(comparisons)
        print(f"{done} faithful comparisons, {len(alarms)} false alarms", *alarms, sep="\n")
        facts["faithful"] = {"comparisons": done, "alarms": alarms}
    if write:
        if facts:
            keep(SCORE, found, facts)
        PAGE.write_text(page(), encoding="utf-8")


def _measured() -> dict[str, object]:
    versions = {name: version(name) for name in ("torch", "transformers")}
    return {"measured": {"date": datetime.now(UTC).date().isoformat(), "python": platform.python_version(), **versions}}


if __name__ == "__main__":
    typer.run(main)
