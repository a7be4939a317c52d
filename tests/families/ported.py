"""One pair made real: a small checkpoint with every parameter drawn, and loading it through the table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import porting
from porting.checkpoint import Checkpoint, open_checkpoint
from porting.notation.rule import Rule
from porting.notation.table import Table
from porting.tables import find_table
from tests.families.pairs import Pair


def inexact(rule: Rule) -> bool:
    """Whether a rule rounds, so that its source does not come back bit for bit: it says so itself."""
    return not rule.exact


@dataclass(frozen=True)
class Ported:
    """A pair with its checkpoint."""

    pair: Pair
    directory: Path

    @property
    def table(self) -> Table:
        return find_table(self.pair.table, {})

    @property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(self.directory)

    def load(self) -> nn.Module:
        return porting.load(self.directory, table=self.pair.table)


def make(pair: Pair, directory: Path) -> Ported:
    """Write the checkpoint, in float32, as checkpoints are."""
    kind: Any = getattr(transformers, pair.architecture)  # one of transformers' classes
    torch.manual_seed(0)
    model = kind(kind.config_class(**pair.fields))
    draw(model)
    model.save_pretrained(directory)
    return Ported(pair, directory)


def draw(model: nn.Module, *, seed: int = 0, spread: float = 0.2) -> None:
    """Draw every parameter as training might have left it: no zero bias, no gain of one, no flat attention."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        stored = model.state_dict().keys()  # of the buffers those that are saved: a bias, say
        buffers = [(name, one) for name, one in model.named_buffers() if name in stored and one.is_floating_point()]
        for name, parameter in (*model.named_parameters(), *buffers):
            if parameter.requires_grad or name in dict(buffers):  # a frozen parameter is a table that is computed
                gain = parameter.ndim == 1 and name.endswith("weight")
                noise = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
                parameter.copy_((1.0 if gain else 0.0) + spread * noise)
