"""Write the list in docs/hostile-inputs.md from the rows of tests/security, which are what is tested.

python -m scripts.security_page
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from tests.security.lists import ALL
from tests.security.rows import Proof

PAGE = Path(__file__).resolve().parents[1] / "docs" / "hostile-inputs.md"
BEGIN, END = "<!-- the list, from tests/security -->\n", "<!-- end of the list -->\n"


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
    """The page with its list as it should be."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{listed()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
