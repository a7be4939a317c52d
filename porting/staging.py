"""Reading what moves bring out of the tensors of a checkpoint, from its files, with a buffer of fixed size.

A tensor may lie in several pieces, its axes in any order; what a move reads of a piece is a few runs of bytes.

Files are read by position and never through a mapping, so that a file that is truncated during the read gives an
error, and does not end the process with SIGBUS.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import mul

import torch
from torch import Tensor

from porting.checkpoint import Checkpoint
from porting.checkpoint.checkpoint import require_booleans
from porting.checkpoint.files import Readable, Stream
from porting.checkpoint.layout import Extent
from porting.plan.copies import Copy, clip_source, row_major, split_by_axes
from porting.plan.move import Window, compute
from porting.plan.pieces import parts, reading, run_length
from porting.plan.recipe import as_it_is

PIECE = 1 << 20
"""Bytes that are read at a time."""

CAST = 1 << 19
"""Bytes that are read at a time to be cast: they and their result stay in the cache while losses are counted."""

SPARED = 1 << 15
"""Bytes that a sparing reader buffers: less than the shard that it reads."""

LONG = 1 << 12
"""Bytes of a run: reading shorter ones one by one takes longer than to sort them out in memory."""

KNOWN = 1 << 12
"""Moves whose sources' places are cached."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A part of a move that reads from one piece of a file.

    Attributes:
        file: the file, or what its bytes are decoded to.
        extent: where in it the piece of the source lies that is read from.
        copy: the part; its source is counted in elements from the beginning of the extent, as they lie there.
    """

    file: Readable
    extent: Extent
    copy: Copy


def stored(copy: Copy, checkpoint: Checkpoint, *, verify: bool = True) -> Iterator[Stored]:
    """Divide a move into parts that each read from one piece of its source.

    Args:
        copy: a move of a plan; or a part of one that went through :func:`by_axes` before it was cut.
        verify: see that the checksums of the pieces are right, where they have any; for those that are read whole.
    """
    shape = checkpoint.tensors[copy.source].shape
    for piece in checkpoint.pieces(copy.source, verify=verify):
        parts = iter((copy,)) if piece.sizes == shape else clip_source(copy, shape, piece.starts, piece.sizes)
        for part in parts:
            stride = piece.extent.stride
            yield Stored(piece.file, piece.extent, part if stride is None else through(part, piece.sizes, stride))


def through(copy: Copy, shape: Sequence[int], strides: Sequence[int]) -> Copy:
    """The move with its source counted as it lies in the file, where that is not in row-major order, as a pickled view.

    Args:
        copy: the move, its source counted in row-major elements.
        shape: the source's extents.
        strides: steps of its axes in the file, in elements.

    >>> moved = through(Copy("a", "b", (6,), 0, (1,), 0, (1,)), (2, 3), (1, 2))  # stored transposed
    >>> moved.sizes, moved.source_strides, moved.target_strides
    ((2, 3), (1, 2), (3, 1))
    """
    if copy.numel == 0:
        return copy
    rows = row_major(shape)
    offset, rest = 0, copy.source_offset
    for row, stride in zip(rows, strides, strict=True):
        at, rest = divmod(rest, row)
        offset += at * stride
    turned = replace(copy, source_strides=copy.target_strides, target_strides=copy.source_strides)
    directions = [
        (size, step * stride, place)
        for stride, digits in zip(strides, split_by_axes(turned, shape, rows), strict=True)
        for size, step, place in digits
    ]
    directions += [(size, 0, place) for size, step, place in copy.directions if not step]
    directions.sort(key=lambda one: (-one[2], -one[1]))  # not merged: each stays within one axis
    sizes, theirs, ours = (tuple(one[part] for one in directions) for part in range(3))
    return Copy(copy.source, copy.target, sizes, offset, theirs, copy.target_offset, ours)


def by_axes(copy: Copy, checkpoint: Checkpoint) -> Copy:
    """Rewrite a move so that each direction stays within one axis of its source, so that cuts of it fit pieces.

    A run over several axes that is cut somewhere is not a box of them any more; runs along single axes are.
    """
    pieces = checkpoint.pieces(copy.source, verify=False)
    if len(pieces) == 1 and pieces[0].extent.stride is None:
        return copy
    shape = checkpoint.tensors[copy.source].shape
    return through(copy, shape, row_major(shape))


def in_long_runs(copy: Copy, width: int) -> bool:
    """Whether a move is one run, or several long ones; ``width`` are the bytes of an element."""
    if not copy.sizes:
        return True
    if copy.source_strides[-1] != 1 or copy.target_strides[-1] != 1:
        return False
    return len(copy.sizes) == 1 or copy.sizes[-1] * width >= LONG


class MoveReader:
    """Reads what moves bring into windows, from the files of a checkpoint; for one thread.

    Args:
        staging: the buffer that is read into, 1-D, of bytes; one of its own when left out.
        sparing: read what is wanted and what lies between short runs near each other, and nothing else: no checksum of
            a chunk, which would take all of it.
        on_read: called with the part of a move, the place of bytes that were read of its piece, and the buffers with
            them, in the order in which they are read.

    Attributes:
        nbytes: the bytes that were read so far.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        staging: Tensor | None = None,
        *,
        sparing: bool = False,
        on_read: Callable[[Stored, int, Sequence[memoryview]], None] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.nbytes = 0
        self._memory = torch.empty(0, dtype=torch.uint8) if staging is None else staging
        self._view = bytes_of(self._memory)
        self._most = len(self._view) if staging is not None else SPARED if sparing else PIECE
        self._sparing = sparing
        self._on_read = on_read
        self._moves: dict[Copy, tuple[Stored, ...]] = {}
        self._divided = 0, 0
        self._rows: list[memoryview] = []

    def moves(self, copy: Copy) -> tuple[Stored, ...]:
        """The parts of a move, each counted in elements of the piece of a file that it reads."""
        if copy not in self._moves:
            if len(self._moves) >= KNOWN:
                self._moves.clear()
            self._moves[copy] = tuple(self._stored(copy))
        return self._moves[copy]

    def _stored(self, copy: Copy) -> Iterator[Stored]:
        return stored(copy, self.checkpoint, verify=not (self._sparing and self.checkpoint.in_chunks))

    def _inside(self, copy: Copy, where: Window) -> Iterator[Stored]:
        """The parts of a move that land in a window; in a box those of what :func:`by_axes` cuts for it."""
        if where.is_row:
            for move in self.moves(copy):
                yield from (Stored(move.file, move.extent, part) for part in where.clip(move.copy))
        elif copy.numel:
            for part in where.clip(by_axes(copy, self.checkpoint)):
                yield from self._stored(part)

    def row(self, name: str, start: int, stop: int) -> Tensor:
        """The elements from ``start`` to ``stop`` of a tensor in row-major order, in memory of their own."""
        return compute(as_it_is(name, self.checkpoint.tensors[name]), Window.of_row(start, stop), self.read)

    def read(self, copy: Copy, where: Window, /, into: Tensor | None = None) -> Iterator[tuple[Tensor, Copy]]:
        """Read the part of a move that lands in a window of its target.

        Args:
            into: the memory of the window, in one row: long runs of its dtype are read there, and not given out.

        Yields:
            The elements of each part, a view of the buffer, which the next part overwrites; and the part.
        """
        dtype = self.checkpoint.tensors[copy.source].dtype
        width = dtype.itemsize
        same = into is None or into.dtype == dtype
        for move in self._inside(copy, where):
            if into is not None and same and dtype != torch.bool and in_long_runs(move.copy, width):
                self._read_runs(move, into)
            else:
                cast = not same and move.copy.source_strides in ((), (1,))
                most = min(CAST, self._most) if cast else self._most
                for part in parts(move.copy, width, most // width, sparing=self._sparing):
                    yield self._read_part(move, part, dtype, most // width), part
            move.file.require_unchanged()

    def _read_part(self, move: Stored, part: Copy, dtype: torch.dtype, most: int) -> Tensor:
        """Read a part into the buffer."""
        width = dtype.itemsize
        short = part.sizes and run_length(part, width, most) * width < LONG
        if short and not self._sparing and isinstance(move.file, Stream):
            return self._gathered(move, part, dtype)
        reads = reading(part, width, most, sparing=self._sparing)
        size, pitch = reads.length * width, reads.pitch * width
        if reads.numel * width > len(self._view):
            self._memory, self._divided = torch.empty(reads.numel * width, dtype=torch.uint8), (0, 0)
            self._view = bytes_of(self._memory)
        rows = self._divide(len(reads.starts), size, pitch)
        for begun, ended in reads.calls():
            at = reads.starts[begun] * width
            move.file.read_rows(rows[begun:ended], move.extent.start + at)
            self._count(move, at, rows[begun:ended])
        if dtype == torch.bool:
            require_booleans(self._memory[: reads.numel].view(-1, pitch)[:, :size], move.file, part.source)
        return self._memory[: reads.numel * width].view(dtype).as_strided(part.sizes, reads.strides)

    def _gathered(self, move: Stored, part: Copy, dtype: torch.dtype) -> Tensor:
        """Gather a part of short runs from decoded elements, all of which are kept for it."""
        assert isinstance(move.file, Stream)  # noqa: S101  # for mypy
        at = move.extent.start + part.source_offset * dtype.itemsize
        raw = move.file.gather(at, part.sizes, part.source_strides, dtype.itemsize)
        self.nbytes += raw.nbytes
        found = torch.from_numpy(raw)
        if dtype == torch.bool:
            require_booleans(found, move.file, part.source)
        return found.view(dtype)

    def _read_runs(self, move: Stored, into: Tensor) -> None:
        """Read the runs of a move to their places."""
        part, raw, width = move.copy, bytes_of(into), into.itemsize
        count = (part.sizes[-1] if part.sizes else 1) * width
        for place in product(*map(range, part.sizes[:-1])):
            source = part.source_offset + sum(map(mul, place, part.source_strides))
            target = part.target_offset + sum(map(mul, place, part.target_strides))
            row = raw[target * width : target * width + count]
            move.file.read_into(row, move.extent.start + source * width)
            self._count(move, source * width, [row])

    def _count(self, move: Stored, at: int, rows: Sequence[memoryview]) -> None:
        self.nbytes += sum(map(len, rows))
        if self._on_read is not None:
            self._on_read(move, at, rows)

    def _divide(self, count: int, size: int, pitch: int) -> list[memoryview]:
        """Views of ``size`` bytes of the buffer that begin ``pitch`` bytes apart."""
        if self._divided != (size, pitch) or len(self._rows) < count:
            self._divided = size, pitch
            self._rows = [self._view[at : at + size] for at in range(0, count * pitch, pitch)]
        return self._rows


class BufferParts:
    """Gives out parts of a buffer of bytes, one after the other, and memory of its own where that is full."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._end = 0

    def __call__(self, count: int, dtype: torch.dtype) -> Tensor:
        """Memory for so many elements, in one row."""
        size = count * dtype.itemsize
        start, self._end = self._end, self._end + (size + 63) // 64 * 64
        if start + size > len(self._buffer):
            return torch.empty(count, dtype=dtype)
        return self._buffer[start : start + size].view(dtype)


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    count = tensor.numel() * tensor.itemsize
    if count == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B")
