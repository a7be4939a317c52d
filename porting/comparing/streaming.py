"""Reading tensors in pieces that fit a processor's cache, in a few threads, with fixed memory."""

from __future__ import annotations

from threading import local

import torch
from torch import Tensor

from porting.checkpoint import Checkpoint
from porting.plan.move import Window, compute
from porting.plan.recipe import Recipe
from porting.staging import PIECE, BufferParts, MoveReader

TURNED = 1 << 23
"""Bytes of a window of a transposed tensor: longer ones read longer runs, and take more memory."""


class Reader:
    """Reads windows of a checkpoint's tensors into memory of its own, for one thread; each overwrites the last."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._reader = MoveReader(checkpoint)
        self._memory = torch.empty(TURNED, dtype=torch.uint8)

    def length(self, recipe: Recipe) -> int:
        """The bytes of a window; longer ones for a transposed tensor, so that its source is read in longer runs."""
        moves = (part.copy for copy in recipe.copies for part in self._reader.moves(copy))
        return PIECE if all(copy.source_strides[-1:] in ((), (1,)) for copy in moves) else TURNED

    def window(self, recipe: Recipe, start: int, stop: int) -> Tensor:
        """Read the elements from ``start`` to ``stop`` of a tensor that is made of the checkpoint's."""
        return compute(recipe, Window.of_row(start, stop), self._reader.read, take=BufferParts(self._memory))


class Readers(local):
    """A reader for each thread."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.mine = Reader(checkpoint)
