"""Moves out of the tensors of a checkpoint, read from its files into a piece of memory of fixed size.

A tensor may lie in several pieces, its axes in any order; what a move reads of a piece is a few runs of bytes.

Files are read by position and never through a mapping, so that a file that is truncated during the read gives an
error, and does not end the process with SIGBUS.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from porting.checkpoint import Checkpoint
from porting.checkpoint.errors import checkpoint_error
from porting.checkpoint.files import ByteSource, Readable
from porting.checkpoint.layout import Extent
from porting.errors import Code
from porting.plan.clipping import clip_source, row_major, window
from porting.plan.copies import Copy
from porting.plan.pieces import parts, reading
from porting.plan.strided import through

OnRead = Callable[[int, Sequence[memoryview]], None]
"""Called with the place of bytes that were read of a piece of a tensor, and the buffers with them."""


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
        checkpoint: whose tensor is its source.
        verify: see that the checksums of the pieces are right, where they have any; for those that are read whole.

    Raises:
        CheckpointError: the checkpoint has no such tensor, or it is damaged.
    """
    shape = checkpoint.tensors[copy.source].shape
    for piece in checkpoint.pieces(copy.source, verify=verify):
        parts = iter((copy,)) if piece.sizes == shape else clip_source(copy, shape, piece.starts, piece.sizes)
        for part in parts:
            stride = piece.extent.stride
            yield Stored(piece.file, piece.extent, part if stride is None else through(part, piece.sizes, stride))


def by_axes(copy: Copy, checkpoint: Checkpoint) -> Copy:
    """Rewrite a move so that each direction stays within one axis of its source, so that cuts of it fit pieces.

    A run over several axes that is cut somewhere is no box of them any more; runs along single axes are.

    Args:
        copy: a move of a plan.
        checkpoint: the checkpoint that it reads.
    """
    pieces = checkpoint.pieces(copy.source, verify=False)
    if len(pieces) == 1 and pieces[0].extent.stride is None:
        return copy
    shape = checkpoint.tensors[copy.source].shape
    return through(copy, shape, row_major(shape))


class Staging:
    """A buffer of fixed size that parts of moves are read into.

    Args:
        nbytes: its size.

    Attributes:
        memory: all of it, as bytes.
        view: the same, for reading into.
    """

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8)
        self.view = bytes_of(self.memory)
        self._divided = 0, 0
        self._rows: list[memoryview] = []

    def read(
        self, move: Stored, dtype: torch.dtype, start: int, stop: int, *, most: int = 0, on_read: OnRead | None = None
    ) -> Iterator[tuple[Tensor, Copy]]:
        """Read the part of a move that lands in the elements from ``start`` to ``stop`` of its target.

        Args:
            move: the move.
            dtype: its source's.
            start, stop: the window, in row-major order.
            most: bytes to be read at a time; 0 for as many as there is memory.
            on_read: called with what is read, in the order in which that is done.

        Yields:
            Parts of it, their target counted from ``start``, each with its elements: a view of the memory, which the
            next part overwrites.

        Raises:
            CheckpointError: they cannot be read, or are no booleans although they should be.
        """
        width = dtype.itemsize
        count = (most or self.memory.numel()) // width
        for wanted in window(move.copy, start, stop):
            for part in parts(wanted, width, count):
                reads = reading(part, width, count)
                size, pitch = reads.length * width, reads.pitch * width
                rows = self._divide(len(reads.starts), size, pitch)
                for begun, ended in reads.calls():
                    at = reads.starts[begun] * width
                    move.file.read_rows(rows[begun:ended], move.extent.start + at)
                    if on_read is not None:
                        on_read(at, rows[begun:ended])
                if dtype == torch.bool:
                    _require_booleans(self.memory[: reads.numel].view(-1, pitch)[:, :size], move.file, part.source)
                flat = self.memory[: reads.numel * width].view(dtype)
                yield flat.as_strided(part.sizes, reads.strides), part

    def _divide(self, count: int, size: int, pitch: int) -> list[memoryview]:
        """Views of ``size`` bytes of the buffer that begin ``pitch`` bytes apart."""
        if self._divided != (size, pitch) or len(self._rows) < count:
            self._divided = size, pitch
            self._rows = [self.view[at : at + size] for at in range(0, count * pitch, pitch)]
        return self._rows


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    count = tensor.numel() * tensor.itemsize
    if count == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B")


def _require_booleans(raw: Tensor, file: ByteSource, name: str) -> None:
    if raw.numel() and int(raw.max()) > 1:
        message = f"tensor {name!r}: a boolean is stored as the byte {int(raw.max())}; only 0 and 1 are"
        hint = "the file is damaged: fetch it again"
        raise checkpoint_error(Code.TENSOR_DAMAGED, file.where, message, hint)
