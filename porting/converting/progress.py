"""The progress of a conversion, and an estimate of its time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import xxhash

from porting.atomic import write_at
from porting.converting.draft import Draft
from porting.converting.making import BLOCK


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a conversion.

    Attributes:
        stage: what is being done: ``"checking"``, ``"writing"``, ``"reading"`` or ``"publishing"``.
        tensors, bytes: how much of the output is there.
        all_tensors, all_bytes: how much there will be.
        resumed: bytes of it that an earlier process had written.
        seconds: since the conversion began to write.
    """

    stage: str
    tensors: int
    bytes: int
    all_tensors: int
    all_bytes: int
    resumed: int
    seconds: float

    @property
    def speed(self) -> float:
        """Bytes per second, resumed ones excluded."""
        return (self.bytes - self.resumed) / self.seconds if self.seconds > 0 else 0.0

    @property
    def left(self) -> float | None:
        """Seconds to go; None while the speed is unknown."""
        return (self.all_bytes - self.bytes) / self.speed if self.speed > 0 else None


Tell = Callable[[Progress], None]


class Meter:
    """Counts the progress of several threads.

    Args:
        tensors, nbytes: how much the output holds.
        tell: called with the progress by :meth:`look`; None for nothing.
    """

    def __init__(self, tensors: int, nbytes: int, tell: Tell | None) -> None:
        self._all = tensors, nbytes
        self._tell = tell
        self._lock = Lock()
        self._begun = time.monotonic()
        self._tensors = self._bytes = self._resumed = 0
        self.stage = "writing"

    def expect(self, tensors: int, nbytes: int) -> None:
        """Set the share of this process, if several processes convert together."""
        self._all = tensors, nbytes

    def wrote(self, nbytes: int) -> None:
        """Count bytes of the output that were written."""
        with self._lock:
            self._bytes += nbytes

    def kept(self, nbytes: int) -> None:
        """Count a tensor that was there already."""
        with self._lock:
            self._bytes += nbytes
            self._resumed += nbytes
            self._tensors += 1

    def finished(self) -> None:
        """Count a complete tensor of the output."""
        with self._lock:
            self._tensors += 1

    def look(self) -> None:
        """Report the progress."""
        if self._tell is not None:
            self._tell(self.now)

    @property
    def now(self) -> Progress:
        """The progress so far."""
        with self._lock:
            return Progress(
                stage=self.stage,
                tensors=self._tensors,
                bytes=self._bytes,
                all_tensors=self._all[0],
                all_bytes=self._all[1],
                resumed=self._resumed,
                seconds=time.monotonic() - self._begun,
            )


TRIED = 64 << 20
"""Bytes that are copied to measure the speed."""


def estimate(draft: Draft, destination: str | os.PathLike[str], *, threads: int) -> float | None:
    """Estimate the seconds that a conversion takes, by copying some of the input to an unnamed file.

    Args:
        destination: the directory that it would make; the file is made beside it, and is gone when this returns.

    Returns:
        None when the file system knows no files without a name, or nothing can be read.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_TMPFILE", 0)
    if not hasattr(os, "O_TMPFILE") or not draft.checkpoint.tensors:
        return None
    try:
        descriptor = os.open(Path(destination).parent, flags, 0o600)
    except OSError:
        return None
    try:
        begun = time.perf_counter()
        copied = _copy(draft, descriptor)
        os.fsync(descriptor)
        taken = time.perf_counter() - begun
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return draft.recipes.nbytes / copied * taken / (1.5 if threads > 1 else 1.0) if copied else None


def _copy(draft: Draft, descriptor: int) -> int:
    """Copy and digest the first tensors; returns the number of bytes."""
    buffer = memoryview(bytearray(BLOCK))
    copied = 0
    places = (piece for name in draft.checkpoint.tensors for piece in draft.checkpoint.pieces(name))
    for place in places:
        for start in range(place.extent.start, place.extent.stop, BLOCK):
            if copied >= TRIED:
                return copied
            piece = buffer[: min(BLOCK, place.extent.stop - start)]
            place.file.read_into(piece, start)
            xxhash.xxh3_128_digest(piece)
            write_at(descriptor, piece, copied)
            copied += len(piece)
    return copied
