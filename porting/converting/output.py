"""Writing bytes at places of a file; a tensor's are digested while they are in the processor's cache."""

from __future__ import annotations

from collections.abc import Callable

from porting.atomic import write_at
from porting.converting.digests import Sum

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
