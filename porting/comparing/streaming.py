"""Reading tensors in pieces that fit a processor's cache, in a few threads, with fixed memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from threading import local

import torch
from torch import Tensor

from porting.checkpoint import Checkpoint
from porting.plan.clipping import window
from porting.plan.copies import Copy
from porting.plan.move import Window, compute
from porting.plan.recipe import Recipe
from porting.staging import Staging, Stored, bytes_of, stored

PIECE = 1 << 20
"""Bytes of a tensor that are processed together; longer pieces exceed the cache."""

TURNED = 1 << 23
"""Bytes of a window of a transposed tensor: longer ones read longer runs, and take more memory."""

KNOWN = 1 << 12
"""Moves whose sources' places are cached."""


class Reader:
    """Reads windows of a checkpoint's tensors into memory of its own, for one thread; each overwrites the last.

    Args:
        checkpoint: the checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._staging = Staging(PIECE)
        self._memory = torch.empty(TURNED, dtype=torch.uint8)
        self._bytes = bytes_of(self._memory)
        self._stored: dict[Copy, tuple[Stored, ...]] = {}

    def length(self, recipe: Recipe) -> int:
        """The bytes of a window; longer ones for a transposed tensor, so that its source is read in longer runs."""
        if _as_it_is(recipe):
            return PIECE
        moves = [part.copy for copy in recipe.copies for part in self._moves(copy)]
        return PIECE if all(copy.source_strides[-1:] in ((), (1,)) for copy in moves) else TURNED

    def window(self, recipe: Recipe, start: int, stop: int) -> Tensor:
        """Read the elements from ``start`` to ``stop`` of a tensor that is made of the checkpoint's.

        Args:
            recipe: how it is made.
            start, stop: the window, no longer than :meth:`length`.

        Raises:
            CheckpointError: they cannot be read; a file that changed since it was opened is not.
        """
        if stop - start == recipe.numel and _as_it_is(recipe):
            found = self._whole(recipe)
            if found is not None:
                return found
        moves = [part for copy in recipe.copies for part in self._moves(copy)]
        found = self._run(recipe, moves, start, stop)
        if found is None:
            found = self._computed(recipe, start, stop)
        for part in moves:
            part.file.require_unchanged()
        return found

    def _whole(self, recipe: Recipe) -> Tensor | None:
        """A whole tensor of the checkpoint, unchanged; None if its file does not have it in one run."""
        source = recipe.copies[0].source
        info = self._checkpoint.tensors[source]
        pieces = self._checkpoint.pieces(source)
        dtype = recipe.dtype
        if len(pieces) != 1 or pieces[0].extent.stride is not None or info.dtype != dtype or dtype == torch.bool:
            return None
        if info.nbytes != recipe.nbytes:  # it is the first part of a larger one
            return None
        count = info.nbytes
        found = self._memory[:count].view(dtype)
        if count:
            pieces[0].file.read_into(self._bytes[:count], pieces[0].extent.start)
            pieces[0].file.require_unchanged()
        return found

    def _run(self, recipe: Recipe, moves: Sequence[Stored], start: int, stop: int) -> Tensor | None:
        """A window that is one run of a file, read directly; None if it is not."""
        dtype = recipe.dtype
        plain = len(moves) == 1 and not recipe.arithmetic and dtype != torch.bool
        if not plain or self._checkpoint.tensors[moves[0].copy.source].dtype != dtype:
            return None
        parts = list(window(moves[0].copy, start, stop))
        if len(parts) != 1 or not parts[0].contiguous or parts[0].numel != stop - start:
            return None
        found = self._memory[: (stop - start) * dtype.itemsize].view(dtype)
        at = moves[0].extent.start + parts[0].source_offset * dtype.itemsize
        moves[0].file.read_into(bytes_of(found), at)
        return found

    def _computed(self, recipe: Recipe, start: int, stop: int) -> Tensor:
        """A window that is computed in this memory; arithmetic in float64 allocates more."""
        rooms = [self._memory]

        def take(count: int, dtype: torch.dtype) -> Tensor:
            nbytes = count * dtype.itemsize
            room = rooms.pop() if rooms else torch.empty(nbytes, dtype=torch.uint8)
            return room[:nbytes].view(dtype)

        read = partial(self._read, start=start, stop=stop)
        return compute(recipe, Window.of_row(start, stop), read, take=take, ranges=self._read)

    def _read(self, copy: Copy, start: int, stop: int) -> Iterator[tuple[Tensor, Copy]]:
        dtype = self._checkpoint.tensors[copy.source].dtype
        for part in self._moves(copy):
            yield from self._staging.read(part, dtype, start, stop)

    def _moves(self, copy: Copy) -> tuple[Stored, ...]:
        if copy not in self._stored:
            if len(self._stored) >= KNOWN:
                self._stored.clear()
            self._stored[copy] = tuple(stored(copy, self._checkpoint))
        return self._stored[copy]


def _as_it_is(recipe: Recipe) -> bool:
    """Whether a recipe copies one whole tensor, as :func:`porting.plan.recipe.as_it_is` makes them."""
    if len(recipe.copies) != 1 or recipe.arithmetic or recipe.content or recipe.base or recipe.work != recipe.dtype:
        return False
    copy = recipe.copies[0]
    run = copy.source_strides == copy.target_strides == (1,) and not copy.source_offset and not copy.target_offset
    return run and copy.sizes[0] == recipe.numel


class Readers(local):
    """A reader for each thread.

    Args:
        checkpoint: what they read.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.mine = Reader(checkpoint)


def nbytes(checkpoint: Checkpoint, names: Sequence[str]) -> int:
    """The bytes of some of a checkpoint's tensors."""
    return sum(checkpoint.tensors[name].nbytes for name in names)
