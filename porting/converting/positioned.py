"""Bytes at places of a file that is being written: put there, and read back from there."""

from __future__ import annotations

import os


def write_at(target: int, data: memoryview | bytes, at: int) -> None:
    """Write all of it at a place of a file."""
    view = memoryview(data)
    while view:
        done = os.pwrite(target, view, at)
        view, at = view[done:], at + done


def read_back(target: int, piece: memoryview, at: int) -> None:
    """Fill a buffer with what was written at a place of a file.

    Raises:
        OSError: it is not there.
    """
    while piece:
        done = os.preadv(target, [piece], at)
        if done == 0:
            raise OSError("what was written is not there")
        piece, at = piece[done:], at + done
