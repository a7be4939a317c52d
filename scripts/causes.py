"""The catalogue of causes and its score: ``make causes``.

python -m scripts.causes --write    # docs/causes.md, from the catalogue
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scripts.causes_page import page

PAGE = Path(__file__).resolve().parent.parent / "docs" / "causes.md"


def main(write: Annotated[bool, typer.Option("--write", help="Write docs/causes.md.")] = False) -> None:
    """Write the page of the catalogue."""
    if write:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
