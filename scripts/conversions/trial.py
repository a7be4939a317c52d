"""Carrying a conversion out through its table, there and back, and comparing with what the project's code made."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from porting import convert, open_checkpoint, read_table
from porting.errors import PortingError
from scripts.conversions.case import Case, Tensors

TABLES = Path(__file__).parent / "tables"

EXACT = "exact"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a conversion.

    Attributes:
        forward: "exact", or what is different.
        back: the same of the way back, from the project's output alone.
        own_back: the same against the project's own way back; empty where it has none.
        lines: of our table, without empty ones and comments.
    """

    forward: str
    back: str
    own_back: str
    lines: int

    @property
    def verdict(self) -> str:
        """One of "exact", "in part" and "different"."""
        if self.forward != EXACT:
            return "different"
        return EXACT if self.back == EXACT and self.own_back in ("", EXACT) else "in part"


def try_case(case: Case) -> Outcome:
    """Convert the checkpoint, and what the project made of it back, each without a record of the other."""
    file = TABLES / f"{case.table}.toml"
    lines = [
        line for line in file.read_text(encoding="utf-8").splitlines() if line.strip() and not line.startswith("#")
    ]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _write(root / "source", case.source, case.config)
        _write(root / "made", case.made, case.config)
        forward = _compared(file, root / "source", root / "ours", case.made)
        back = _compared(file, root / "made", root / "back", case.source, reverse=True)
        own = ""
        if case.returned is not None:
            own = _compared(file, root / "made", root / "own", case.returned, reverse=True)
    return Outcome(forward=forward, back=back, own_back=own, lines=len(lines))


def _write(folder: Path, tensors: Tensors, config: object) -> None:
    folder.mkdir()
    stored = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _compared(table: Path, source: Path, target: Path, expected: Tensors, *, reverse: bool = False) -> str:
    try:
        convert(source, target, read_table(table), reverse=reverse, derive=not reverse)
    except PortingError as error:
        return f"refused: {error.faults[0] if error.faults else error}"
    written = open_checkpoint(target)
    found = {name: written.read(name) for name in written.tensors}
    lacking, more = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if lacking or more:
        parts = [f"without {', '.join(lacking)}"] if lacking else []
        parts += [f"with {', '.join(more)}"] if more else []
        return "; ".join(parts)
    different = [name for name, tensor in expected.items() if not _same(found[name], tensor)]
    return f"different: {', '.join(different)}" if different else EXACT


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(found, expected)
