"""Making the tensors of the output, in memory that does not grow with them.

A tensor is made from its first element to its last, in blocks: the elements of a block are read from the source
(:class:`porting.staging.MoveReader`), gathered, cast and written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor

from porting.atomic import read_back, write_at
from porting.checkpoint import Checkpoint
from porting.converting.casts import NONE, CountedCasts, Losses
from porting.converting.digests import PIECE, StreamDigests, Sum, of_range
from porting.plan.copies import window
from porting.plan.move import Window, compute
from porting.plan.pieces import parts, reading
from porting.plan.recipe import Recipe, as_it_is
from porting.staging import BufferParts, MoveReader, Stored, bytes_of, in_long_runs

BLOCK = 1 << 18
"""Bytes that are digested and written together: what a processor's cache holds beside what they are made from."""

WRITTEN = 1 << 16
"""Bytes of one write, from one multiple of it in the file to the next.  The system keeps a file in pieces of memory as
large as what is written.  Small ones cost more calls; large ones it may have to fetch from far: on a virtual machine
that lends its free memory out, writes of 128 KiB took five times as long as these."""


class Output(Sum):
    """A place in a file at which a tensor is written, and the digests of what was put there.

    Args:
        on_written: called with the number of bytes after each writing.
        crc: take the CRC-32 as well.
    """

    def __init__(self, target: int, at: int, on_written: Callable[[int], None], *, crc: bool = False) -> None:
        super().__init__(crc=crc)
        self._target = target
        self._at = at
        self._on_written = on_written

    @property
    def room(self) -> int:
        """Bytes up to the next multiple of :data:`BLOCK` in the file, so that writes are aligned."""
        return BLOCK - self._at % BLOCK

    def put(self, raw: memoryview) -> None:
        """Digest some bytes and write them."""
        for begun in range(0, len(raw), BLOCK):
            block = raw[begun : begun + BLOCK]
            self.update(block)
            while block:
                piece = block[: WRITTEN - self._at % WRITTEN]
                write_at(self._target, piece, self._at)
                self._at += len(piece)
                block = block[len(piece) :]
        self._on_written(len(raw))


LEAST = 1 << 20
"""Bytes of memory that a thread needs."""

STAGED = 1 << 20
"""Bytes that are read at a time beside a block, to be transposed."""

LONG = 1 << 14
"""Bytes: runs shorter than this, on the average, make a block larger, for each costs a call of the system."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """The digests and losses of a tensor that was written.

    Attributes:
        losses: what casts and factors did to its values.
        sources: digests of those source tensors that were read from first to last on the way.
        crc: the CRC-32 of its bytes, where the file says that.
    """

    digest: str
    losses: Losses = NONE
    sources: Mapping[str, str] = field(default_factory=dict)
    crc: int = 0


class Maker:
    """Makes tensors, one after the other, in a piece of memory of its own.

    Args:
        like: the followed checkpoint, for tensors that the input does not hold; None when there is none.
        memory: bytes for buffers, at least :data:`LEAST`; nothing else here grows with a tensor.
        on_written: called with the number of bytes of the output that were written since the last call.
        crc: take the CRC-32 of every tensor as well.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        like: Checkpoint | None,
        memory: int,
        on_written: Callable[[int], None],
        *,
        crc: bool = False,
    ) -> None:
        self._crc = crc
        self._checkpoint = checkpoint
        self._on_written = on_written
        staging = torch.empty(min(STAGED, memory // 4) // 64 * 64, dtype=torch.uint8)
        self._view = bytes_of(staging)
        self._reader = MoveReader(checkpoint, staging, on_read=self._update_digest)
        self._base = None if like is None else MoveReader(like, staging).read
        self._block = torch.empty((memory - len(self._view)) // 64 * 64, dtype=torch.uint8)
        self._streams = StreamDigests()
        self._whole = False
        self._lengths: dict[object, int] = {}

    def digest_of(self, name: str) -> str:
        """The digest of a tensor of the input as it is stored; of one in several pieces, in row-major order."""
        pieces = self._checkpoint.pieces(name)
        state = xxhash.xxh3_128()
        if len(pieces) == 1:
            file, extent = pieces[0].file, pieces[0].extent
            digest = of_range(file, extent.start, extent.stop, self._view)
        else:
            for block, _ in self._blocks(as_it_is(name, self._checkpoint.tensors[name])):
                state.update(bytes_of(block))
            digest = state.hexdigest()
        for piece in pieces:
            piece.file.require_unchanged()
        return digest

    def sum_at(self, descriptor: int, at: int, count: int) -> Sum:
        """The digests of a range of the output, read back."""
        state = Sum(crc=self._crc)
        for done in range(0, count, PIECE):
            piece = self._view[: min(PIECE, len(self._view), count - done)]
            read_back(descriptor, piece, at + done)
            state.update(piece)
        return state

    def make(self, recipe: Recipe, target: int, at: int) -> Made:
        """Write a tensor."""
        out = Output(target, at, self._on_written, crc=self._crc)
        self._whole = self._is_whole(recipe)
        lost = NONE
        for block, lost_here in self._blocks(recipe, out.room // recipe.dtype.itemsize):
            out.put(bytes_of(block))
            lost += lost_here
        return Made(digest=out.hexdigest(), losses=lost, sources=self._digests(recipe, out), crc=out.crc)

    def _digests(self, recipe: Recipe, out: Output) -> dict[str, str]:
        """The digests of the tensors of the input whose last byte was read now."""
        if self._whole:
            return {recipe.copies[0].source: out.hexdigest()}
        found = {}
        for name in dict.fromkeys(copy.source for copy in recipe.copies):
            pieces = self._checkpoint.pieces(name, verify=False)
            if len(pieces) != 1:
                continue
            digest = self._streams.digest(name, pieces[0].extent.stop - pieces[0].extent.start)
            if digest is not None:
                found[name] = digest
        return found

    def _is_whole(self, recipe: Recipe) -> bool:
        """Whether a tensor of the output has the bytes of one of the input."""
        if len(recipe.copies) != 1 or recipe.arithmetic or not recipe.copies[0].contiguous:
            return False
        info = self._checkpoint.tensors[recipe.copies[0].source]
        pieces = self._checkpoint.pieces(info.name, verify=False)
        lies = len(pieces) != 1 or pieces[0].extent.stride is None
        return lies and info.dtype == recipe.dtype and recipe.copies[0].numel * info.dtype.itemsize == info.nbytes

    def _update_digest(self, part: Stored, at: int, rows: Sequence[memoryview]) -> None:
        """Add bytes of the input that were read to the digest of their tensor."""
        if not self._whole and len(self._checkpoint.pieces(part.copy.source, verify=False)) == 1:
            self._streams.update(part.copy.source, at, rows)

    def _blocks(self, recipe: Recipe, room: int = 0) -> Iterator[tuple[Tensor, Losses]]:
        """The tensor from its first element to its last; each block is overwritten by the next.

        Blocks end where writes do: ``room`` is the first element that lies at a multiple of :data:`BLOCK` in the file.
        Those of a formula are its own, and what it computes with takes the place of the block.
        """
        if recipe.applied is not None:
            memory, self._block = self._block.numel(), torch.empty(0, dtype=torch.uint8)
            for start, stop in recipe.applied.parts(memory, 2 * per_element(recipe)):  # this one, and that before
                yield self._filled(recipe, start, stop)
            self._block = torch.empty(memory, dtype=torch.uint8)
            return
        length = self._length(recipe)
        step = BLOCK // recipe.dtype.itemsize
        start = 0
        while start < recipe.numel:
            stop = min(start + length, recipe.numel)
            if stop < recipe.numel and length > step:
                stop -= (stop - room) % step
            yield self._filled(recipe, start, stop)
            start = stop

    def _length(self, recipe: Recipe) -> int:
        """The number of elements of a block: enough to read the source in long runs, if the memory allows."""
        width = recipe.work.itemsize
        most = max(1, (self._block.numel() - 256) // (per_element(recipe) + recipe.arithmetic.nbytes(recipe.work)))
        moves = tuple((copy.sizes, copy.source_strides, copy.target_strides) for copy in recipe.copies)
        key = (moves, recipe.work, recipe.dtype, recipe.numel, bool(recipe.arithmetic))
        if key not in self._lengths:
            length = min(most, max(1, BLOCK // width))
            while length < min(most, recipe.numel) and not self._reads_long_runs(recipe, length):
                length = min(most, 2 * length)
            self._lengths[key] = length
        return self._lengths[key]

    def _reads_long_runs(self, recipe: Recipe, length: int) -> bool:
        runs = wanted = 0
        for copy in recipe.copies:
            width = self._checkpoint.tensors[copy.source].dtype.itemsize
            most = len(self._view) // width
            middle = copy.target_offset // length * length
            for stored_part in self._reader.moves(copy):
                for part in window(stored_part.copy, middle, middle + length):
                    if in_long_runs(part, width):
                        continue
                    first = next(parts(part, width, most))
                    runs += reading(first, width, most).count
                    wanted += first.numel * width
        return wanted >= runs * LONG

    def _filled(self, recipe: Recipe, start: int, stop: int) -> tuple[Tensor, Losses]:
        """Compute the elements ``[start, stop)`` of a tensor."""
        casts = CountedCasts()
        take = None if recipe.applied is not None else BufferParts(self._block)
        where = Window.of_row(start, stop)
        found = compute(recipe, where, self._reader.read, base=self._base, take=take, casts=casts)
        return found, casts.losses


def required(recipe: Recipe) -> int:
    """Bytes of memory that a thread needs for a tensor: a formula may have parts that cannot be divided."""
    if recipe.applied is None:
        return LEAST
    computed = recipe.applied.least(2 * per_element(recipe))
    return max(LEAST, computed + min(STAGED, -(-computed // 3)) + 64)


def per_element(recipe: Recipe) -> int:
    """Bytes that an element of a block takes: in the dtype in which it is gathered, and in its own."""
    return recipe.work.itemsize + (recipe.dtype.itemsize if recipe.dtype != recipe.work else 0)
