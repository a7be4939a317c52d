"""Parts of moves, read from their files as a few runs of bytes into a piece of memory of fixed size.

Files are read by position and never through a mapping: one that is cut short meanwhile is then an error in words, and
not the end of the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from porting.checkpoint.errors import CheckpointError
from porting.checkpoint.files import ByteSource
from porting.errors import Code, Fault
from porting.plan.clipping import window
from porting.plan.copies import Copy
from porting.plan.pieces import parts, reading
from porting.stored import Stored

OnRead = Callable[[int, Sequence[memoryview]], None]
"""Called with where in a piece of a tensor bytes were read, and the buffers that hold them, one after the other."""


class Staging:
    """A piece of memory that parts of moves are read into.

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
        """What a move brings into the elements from ``start`` to ``stop`` of its target.

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
                how = reading(part, width, count)
                size, pitch = how.length * width, how.pitch * width
                rows = self._divide(len(how.starts), size, pitch)
                for begun, ended in how.calls():
                    at = how.starts[begun] * width
                    move.file.read_rows(rows[begun:ended], move.extent.start + at)
                    if on_read is not None:
                        on_read(at, rows[begun:ended])
                if dtype == torch.bool:
                    _require_booleans(self.memory[: how.numel].view(-1, pitch)[:, :size], move.file, part.source)
                flat = self.memory[: how.numel * width].view(dtype)
                yield flat.as_strided(part.sizes, how.strides), part

    def _divide(self, count: int, size: int, pitch: int) -> list[memoryview]:
        """The first rows of ``size`` bytes that begin ``pitch`` bytes apart."""
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
        raise CheckpointError(Fault(code=Code.TENSOR_DAMAGED, where=file.where, message=message, hint=hint))
