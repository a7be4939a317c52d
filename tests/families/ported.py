"""One pair made real: a small checkpoint with every parameter drawn, loaded through the table, with inputs for both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import porting
from porting.checkpoint import Checkpoint, open_checkpoint
from porting.notation.rule import Rule
from porting.notation.table import Table
from porting.plan.config import effective
from porting.tables import find_table
from porting.verify import Case
from porting.verify.inputs import make_cases
from porting.verify.reference import choices
from tests.families.pairs import Pair


def inexact(rule: Rule) -> bool:
    """Whether a rule rounds, so that its source does not come back bit for bit: it says so itself."""
    return rule.fold or rule.scale is not None


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

    def cases(self) -> list[Case]:
        """Batches of what the table's [inputs] takes: a room without segments is compared on texts of one segment."""
        taken = {str(rule.sources[0].key) for rule in self.table.inputs}
        config = effective(self.table, self.checkpoint.config)
        longest = int(str(config["max_position_embeddings"])) - self.pair.first_position
        made = make_cases(config, seed=0, longest=longest, choices=choices(self.pair.architecture))
        return [Case(case.name, {**self._kept(case.inputs, taken), **self._positions(case.inputs)}) for case in made]

    @staticmethod
    def _kept(inputs: Mapping[str, Tensor], taken: set[str]) -> dict[str, Tensor]:
        return {name: value for name, value in inputs.items() if name in taken or not taken}

    def _positions(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not self.pair.first_position:
            return {}
        ids = inputs["input_ids"]
        return {"position_ids": (torch.arange(ids.shape[-1]) + self.pair.first_position).expand_as(ids)}


def make(pair: Pair, directory: Path) -> Ported:
    """Write the checkpoint.

    It is in float32, as checkpoints are, unless the table sums or scales: what is rounded to float32 cannot agree to
    1e-12, and that it is right is shown in float64.
    """
    kind: Any = getattr(transformers, pair.architecture)  # one of transformers' classes
    torch.manual_seed(0)
    model = kind(kind.config_class(**pair.fields))
    draw(model)
    rounds = any(inexact(rule) for rule in find_table(pair.table, {}).rules)
    model.to(torch.float64 if rounds else torch.float32).save_pretrained(directory)
    return Ported(pair, directory)


def draw(model: nn.Module, *, seed: int = 0, spread: float = 0.2) -> None:
    """Draw every parameter as training might have left it: no zero bias, no gain of one, no flat attention."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:  # a frozen one is a table that is computed
                gain = parameter.ndim == 1 and name.endswith("weight")
                noise = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
                parameter.copy_((1.0 if gain else 0.0) + spread * noise)
