"""Write the limits and the list in docs/hostile-inputs.md from the rows of tests/security, which are what is tested.

python -m scripts.security_page
"""

from __future__ import annotations

from dataclasses import fields
from itertools import groupby
from pathlib import Path

from porting.limits import UNITS, Limits
from tests.security.lists import ALL
from tests.security.rows import Proof

PAGE = Path(__file__).resolve().parents[1] / "docs" / "hostile-inputs.md"
LIMITS, END_OF_LIMITS = "<!-- the limits, from porting/limits.py -->\n", "<!-- end of the limits -->\n"
BEGIN, END = "<!-- the list, from tests/security -->\n", "<!-- end of the list -->\n"


def limited() -> str:
    """The table of limits in Markdown."""
    lines = ["| unit | at most | what is charged |", "|---|---|---|"]
    lines += [f"| `{field.name}` | {field.default:,} | {UNITS[field.name]} |" for field in fields(Limits)]
    return "\n".join(lines).replace(",", " ") + "\n"


def listed() -> str:
    """The list in Markdown: a table for each part."""
    parts = dict.fromkeys(row.of for row in ALL)
    ordered = sorted(ALL, key=lambda row: list(parts).index(row.of))
    lines = [f"{len(ALL)} inputs.", ""]
    for part, rows in groupby(ordered, key=lambda row: row.of):
        lines += [f"### {part}", "", "| input | exit | message or result |", "|---|---|---|"]
        for row in rows:
            told = row.told or "read as it is"
            where = f" ({row.test.rpartition('/')[2]})" if isinstance(row, Proof) else ""
            lines.append(f"| {cell(row.what)} | {row.code} | {cell(told)}{cell(where)} |")
        lines.append("")
    return "\n".join(lines)


def cell(text: str) -> str:
    """A text inside a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def written(page: str) -> str:
    """The page with its limits and its list as they should be."""
    for begin, end, text in ((LIMITS, END_OF_LIMITS, limited()), (BEGIN, END, listed())):
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n{text}\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
