"""Ranges of bytes copied from file to file by the kernel, by whichever of its calls the file systems support."""

from __future__ import annotations

import errno
import os

from porting.checkpoint.files import LocalFile

PIECE = 1 << 18
"""Bytes handed to the kernel at a time, so that their digest is taken while they are still in the cache."""

PAGE = 1 << 12
"""Bytes of a page, on every machine: the output must not depend on it."""

_NEXT = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF, errno.EIO}
"""What a call says that cannot do it here.  EIO too: reading piece by piece then says which side failed."""


class Copier:
    """Copies between files, and remembers which call works."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._calls = [
            call
            for call, there in (
                (self._copy_file_range, hasattr(os, "copy_file_range")),
                (self._sendfile, hasattr(os, "sendfile")),
                (self._by_hand, True),
            )
            if there
        ]

    def copy(self, source: LocalFile, start: int, target: int, at: int, count: int) -> bool:
        """Copy ``count`` bytes from ``start`` of ``source`` to ``at`` of the descriptor ``target``.

        Where the two places do not lie alike in their pages the kernel would copy each page in two parts, half as fast
        again as by hand.

        Args:
            source: the file to copy from.
            start, at: the places.
            target: the descriptor to copy to.
            count: bytes, no more than the buffer has.

        Returns:
            Whether the buffer holds the bytes now.
        """
        if (start - at) % PAGE or len(self._calls) == 1:
            self._by_hand(source, start, target, at, count)
            return True
        while count:
            piece = min(count, PIECE)
            try:
                done = self._calls[0](source, start, target, at, piece)
            except OSError as error:
                if error.errno not in _NEXT or len(self._calls) == 1:
                    raise
                del self._calls[0]
                continue
            if done == 0:  # the source ended early: reading says so in words
                done = self._by_hand(source, start, target, at, piece)
            start, at, count = start + done, at + done, count - done
        return False

    @staticmethod
    def _copy_file_range(source: LocalFile, start: int, target: int, at: int, count: int) -> int:
        return os.copy_file_range(source.fileno(), target, count, start, at)

    @staticmethod
    def _sendfile(source: LocalFile, start: int, target: int, at: int, count: int) -> int:
        os.lseek(target, at, os.SEEK_SET)
        return os.sendfile(target, source.fileno(), start, count)

    def _by_hand(self, source: LocalFile, start: int, target: int, at: int, count: int) -> int:
        piece = self._buffer[: min(count, len(self._buffer))]
        source.read_into(piece, start)
        write_at(target, piece, at)
        return len(piece)


def write_at(target: int, data: memoryview | bytes, at: int) -> None:
    """Write all of it at a place of a file."""
    view = memoryview(data)
    while view:
        done = os.pwrite(target, view, at)
        view, at = view[done:], at + done
