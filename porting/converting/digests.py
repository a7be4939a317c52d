"""Digests of tensors and files: XXH3 with 128 bits, as fast as memory.

They detect accidents, such as a flipped bit or a truncated file, and not a file that was made to have a given digest;
for that, SHA-256 of the files is recorded on request.  A digest is taken

* of a tensor: of its bytes as they are stored, in row-major order;
* of a file of tensors that was written here: of the bytes around the tensors, followed by the tensors' digests (16
  bytes each) in the order of the data, so that tensors can be written and checked in any order and by several threads;
* of any other file: of its bytes.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence

import xxhash

from porting.checkpoint.files import LocalFile, Readable

ALGORITHM = "xxh3-128"
PIECE = 1 << 18
"""Bytes read at a time: what a processor's cache holds."""

MOST_STREAMS = 256
"""The number of unfinished digests that are kept while tensors are read in parts."""


def of_bytes(raw: bytes | memoryview) -> str:
    """The digest of bytes in memory."""
    return xxhash.xxh3_128_hexdigest(raw)


def of_framed(frame: bytes, tensors: Iterable[str]) -> str:
    """The digest of a file of tensors."""
    state = xxhash.xxh3_128(frame)
    for digest in tensors:
        state.update(bytes.fromhex(digest))
    return state.hexdigest()


class Sum:
    """Digests of bytes as they come.

    Args:
        crc: take their CRC-32 as well.
    """

    def __init__(self, *, crc: bool) -> None:
        self._state = xxhash.xxh3_128()
        self._takes = crc
        self.crc = 0

    def update(self, piece: memoryview) -> None:
        """Add bytes."""
        self._state.update(piece)
        if self._takes:
            self.crc = zlib.crc32(piece, self.crc)

    def hexdigest(self) -> str:
        """The XXH3 of all bytes so far."""
        return self._state.hexdigest()


def of_range(file: Readable, start: int, stop: int, buffer: memoryview) -> str:
    """The digest of a range of a file, read into ``buffer`` piece by piece."""
    state = xxhash.xxh3_128()
    while start < stop:
        piece = buffer[: min(len(buffer), PIECE, stop - start)]
        file.read_into(piece, start)
        state.update(piece)
        start += len(piece)
    return state.hexdigest()


def sha256_of(file: LocalFile) -> str:
    """The SHA-256 of a file, as ``sha256sum`` prints it."""
    state = hashlib.sha256()
    for start in range(0, file.size, PIECE):
        state.update(file.pread(start, min(PIECE, file.size - start)))
    return state.hexdigest()


class StreamDigests:
    """Digests of the input's tensors, taken while they are read in parts for the output.

    No digest is made of a tensor whose bytes are read out of order or with gaps.  When too many digests have begun, the
    one that was updated least recently is dropped.
    """

    def __init__(self) -> None:
        self._begun: dict[str, tuple[xxhash.xxh3_128, int]] = {}

    def update(self, name: str, at: int, rows: Sequence[memoryview]) -> None:
        """Add the bytes of a tensor from ``at`` on, which were read into these buffers."""
        state, expected = self._begun.pop(name, (None, -1))
        if at == 0:
            state, expected = xxhash.xxh3_128(), 0
        if state is None or at != expected:
            return
        for row in rows:
            state.update(row)
        self._begun[name] = state, at + sum(map(len, rows))
        if len(self._begun) > MOST_STREAMS:
            del self._begun[next(iter(self._begun))]

    def digest(self, name: str, nbytes: int) -> str | None:
        """The digest of a tensor if all its bytes were read, and forget it; else None."""
        state, seen = self._begun.get(name, (None, -1))
        if state is None or seen != nbytes:
            return None
        del self._begun[name]
        return state.hexdigest()
