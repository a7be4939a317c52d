"""A checkpoint, its port and the table between them, as directories."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import own


@dataclass
class Pair:
    """A checkpoint in its own layout, the same in the layout of a module, and what leads from one to the other."""

    source: Path
    port: Path
    table: Path

    def write(self, tensors: dict[str, Tensor]) -> Path:
        """Writes the port anew."""
        self.port.mkdir(exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self.port / "model.safetensors")
        (self.port / "config.json").write_bytes((self.source / "config.json").read_bytes())
        return self.port


def ported(source: Path, table: Path) -> dict[str, Tensor]:
    """What the loaded module holds, tied tensors once: the engine's other path, whole tensors at a time."""
    state = own.filled(source, table).state_dict()
    return {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in state.items()
        if name != "decoder.weight"
    }


def columns_first(tensor: Tensor) -> Tensor:
    """The same values, a matrix laid out column by column."""
    return tensor.T.contiguous().T if tensor.ndim == 2 else tensor


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """A rename, a fusion, a transposition, a fold, a scale, a dropped part and a tie."""
    found = Pair(own.write(tmp_path / "source"), tmp_path / "port", own.table(tmp_path))
    found.write(ported(found.source, found.table))
    return found
