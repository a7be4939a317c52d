"""How long a conversion would take: a little of it is tried out."""

from __future__ import annotations

import os
import time
from pathlib import Path

import xxhash

from porting.converting.draft import Draft
from porting.converting.output import BLOCK, write_at

TRIED = 64 << 20
"""Bytes that are copied to see how fast that is."""


def estimate(draft: Draft, destination: str | os.PathLike[str], *, threads: int) -> float | None:
    """Seconds that a conversion would take, by copying some of the input into a file that has no name.

    Args:
        draft: the conversion.
        destination: the directory that it would make; the file is made beside it, and is gone when this returns.
        threads: how many threads would work; two are taken to be half as fast again as one, more are as two.

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
    """Copy and digest the first tensors; how many bytes."""
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
