"""The repository's own files, as the guards read them."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Where each importable package really is; `porting/models` and `porting/mappings` are links.
REAL = {"porting.models": ROOT / "models", "porting.mappings": ROOT / "mappings", "porting": ROOT / "porting"}


def files(*folders: str) -> Iterator[Path]:
    """The project's own files below these folders of the root; links to folders are not followed."""
    for folder in folders:
        for place, below, names in os.walk(ROOT / folder):
            below[:] = sorted(name for name in below if name != "__pycache__" and not name.endswith(".egg-info"))
            yield from (Path(place, name) for name in sorted(names))


def modules() -> dict[str, Path]:
    """Every module of the library by its import name, ``porting.models.bert``, with its real file."""
    found = {}
    for package, folder in REAL.items():
        for path in files(str(folder.relative_to(ROOT))):
            if path.suffix == ".py":
                parts = path.relative_to(folder).with_suffix("").parts
                found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


@cache
def parse(path: Path) -> ast.Module:
    """The file's syntax tree, which several tests look through."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """What a module imports, wherever in it: ``torch.nn``, ``porting.errors``; with the line.

    ``from porting import load`` counts as ``porting.load``, since a subpackage can be meant.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module == "porting":
                yield from ((f"porting.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield node.module or "", node.lineno
