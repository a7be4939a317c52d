"""A tensor's bytes on their way into the file: digested and written while the processor's cache holds them."""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from porting.converting.positioned import write_at

BLOCK = 1 << 18
"""Bytes that are digested and written together: what a processor's cache holds beside what they are made from."""

WRITTEN = 1 << 16
"""Bytes of one write, from one multiple of it in the file to the next.  The system keeps a file in pieces of memory as
large as what is written.  Small ones cost more calls; large ones it may have to fetch from far: on a virtual machine
that lends its free memory out, writes of 128 KiB took five times as long as these."""


class Output:
    """A place in a file, from which on a tensor is written.

    Args:
        target: the descriptor of the file.
        at: the place.
        told: called with the number of bytes after each writing.
    """

    def __init__(self, target: int, at: int, told: Callable[[int], None]) -> None:
        self._target = target
        self._at = at
        self._told = told
        self._state = xxhash.xxh3_128()

    @property
    def room(self) -> int:
        """Bytes up to the next multiple of :data:`BLOCK` in the file: with so many, writes are whole."""
        return BLOCK - self._at % BLOCK

    @property
    def digest(self) -> str:
        """The digest of all that was put."""
        return self._state.hexdigest()

    def put(self, raw: memoryview) -> None:
        """Digest some bytes and write them.

        Raises:
            OSError: writing failed.
        """
        for begun in range(0, len(raw), BLOCK):
            block = raw[begun : begun + BLOCK]
            self._state.update(block)
            while block:
                piece = block[: WRITTEN - self._at % WRITTEN]
                write_at(self._target, piece, self._at)
                self._at += len(piece)
                block = block[len(piece) :]
        self._told(len(raw))
