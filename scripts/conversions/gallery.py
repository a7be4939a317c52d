"""The conversions that there are, and the page that lists them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.conversions import (
    diffusers_cases,
    inference_cases,
    litgpt_cases,
    quantised_cases,
    tensorflow_cases,
    timm_cases,
    torchtune_cases,
    training_cases,
    transformers_cases,
)
from scripts.conversions.case import Case, Maker
from scripts.conversions.trial import EXACT, Outcome

MAKERS: tuple[Maker, ...] = (
    *litgpt_cases.CASES,
    *torchtune_cases.CASES,
    *timm_cases.CASES,
    *diffusers_cases.CASES,
    *transformers_cases.CASES,
    *tensorflow_cases.CASES,
    *quantised_cases.CASES,
    *training_cases.CASES,
    *inference_cases.CASES,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conversions.md"
REQUIREMENTS = Path(__file__).parent / "requirements.txt"

TEXT = """# Real conversions

Conversions of public projects, each written as a table and carried out in both directions against the project's own
code on a small random checkpoint. `make conversions SOURCES=FOLDER ARGS=--write` installs that code into a folder of
yours and writes this page; nothing of it is part of porting.

*Forward*: `porting convert --derive` of the checkpoint equals, bit for bit, what the project's functions make of it:
the same names, shapes, dtypes and values. *Back*: `porting convert --reverse` of what the project made, without a
record of where it came from, equals the checkpoint. *Their back*: the same equals what the project's own way back
makes, where it has one. Lines are those of the functions that convert, in both directions where a project has both, and
those of the table, without empty ones and comments. A function that serves several conversions counts in each.
Functions are run without the libraries that their projects import for something else; a remark names what stands for
something that they compute with.

The checkpoints are made up: names and layouts are the project's, sizes are small, values are random. They hold what the
functions read; a converted model was not run. The tables were written with the project's code at hand.

{summary}

| project | conversion | table | their lines | ours | forward | back | their back |
|---|---|---|---:|---:|---|---|---|
{rows}
{remarks}"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the page.

    Attributes:
        case: the conversion.
        outcome: what came of it.
        version: of the project.
    """

    case: Case
    outcome: Outcome
    version: str


def render(rows: Sequence[Row]) -> str:
    """The page."""
    exact = sum(row.outcome.verdict == EXACT for row in rows)
    part = sum(row.outcome.verdict == "in part" for row in rows)
    lines = sum(row.case.lines for row in rows), sum(row.outcome.lines for row in rows)
    summary = (
        f"{len(rows)} conversions: {exact} are exact in both directions, {part} in part, {len(rows) - exact - part} "
        f"are different. {lines[0]} lines of code are {lines[1]} lines of tables."
    )
    notes = [f"- **{row.case.table}**: {note}" for row in rows for note in _notes(row)]
    return TEXT.format(
        summary=summary,
        rows="\n".join(map(_row, rows)),
        remarks="\n## Remarks\n\n" + "\n".join(notes) + "\n" if notes else "",
    )


def _row(row: Row) -> str:
    case, one = row.case, row.outcome
    file = f"[{case.table}](../scripts/conversions/tables/{case.table}.toml)"
    found = [_word(text) for text in (one.forward, one.back, one.own_back)]
    return (
        f"| {case.project} {row.version} | {case.title} | {file} | {case.lines} | {one.lines} | {' | '.join(found)} |"
    )


def _word(found: str) -> str:
    return {EXACT: "exact", "": "-"}.get(found, found.partition(" ")[0].rstrip(":"))


def _notes(row: Row) -> list[str]:
    one = row.outcome
    texts = [row.case.remark] if row.case.remark else []
    for label, found in (("forward", one.forward), ("back", one.back), ("their back", one.own_back)):
        texts += [f"{label}: {found}" for _ in (1,) if found not in ("", EXACT)]
    return texts
