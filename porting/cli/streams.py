"""Standard output and standard error, made to fail in words, or not at all."""

from __future__ import annotations

import os
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputError(OSError):
    """Standard output cannot be written: the disk that it goes to is full, or it was opened for reading only."""

    def __str__(self) -> str:
        return f"standard output cannot be written: {self.strerror or super().__str__()}"


class _Output(FileIO):
    """Standard output: a failure says that it is its own.  A reader that is gone is another matter."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from error


class _Errors(FileIO):
    """Standard error: what cannot be written there is lost, and the work goes on."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def output(stream: TextIO | None) -> TextIO:
    """Standard output, which takes every character; its failures are :class:`OutputError`."""
    return _over(stream, _Output)


def errors(stream: TextIO | None) -> TextIO:
    """Standard error, which takes every character, and never fails."""
    return _over(stream, _Errors)


def _over(stream: TextIO | None, kind: type[FileIO]) -> TextIO:
    """The same stream over another kind of file; one that was closed becomes one that swallows everything."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if type(stream) is not TextIOWrapper:  # put there by a test, or by a program that calls this one
        return stream
    stream.flush()
    return TextIOWrapper(
        BufferedWriter(kind(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
