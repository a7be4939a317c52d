"""A program that goes over an HDF5 file and writes what is in it, run by :mod:`porting.checkpoint.hdf5_file`.

HDF5's library crashes on some damaged files, which would end the process that it runs in without a word.  So it runs in
a process of its own, which imports nothing else of this project and opens no file: it asks for the bytes, so that
the process that started it checks, charges and remembers what is read.

The standard output has a JSON list on each line, whose first element says what it is.  ``["read", offset, count]`` asks
for bytes, which come on the standard input.
"""

from __future__ import annotations

import base64
import io
import json
import os
import resource
import sys
from collections.abc import Collection
from typing import Any, BinaryIO

ROOM = 512 << 20
"""Bytes of memory; the imported packages take a quarter of them."""

COMPACT = 0
"""The layout of a dataset whose elements lie in its header."""


class Channel:
    """Writes the lines, and gets the bytes that they ask for."""

    def __init__(self, answers: BinaryIO, output: BinaryIO) -> None:
        self._answers = answers
        self._output = output

    def say(self, *message: object) -> None:
        """Write a line; it may wait in a buffer until the next request."""
        self._output.write(json.dumps(message).encode() + b"\n")

    def read(self, offset: int, count: int) -> bytes:
        """Ask for bytes."""
        self.say("read", offset, count)
        self._output.flush()
        return self._answers.read(count)

    def end(self) -> None:
        """Write that all has been written."""
        self.say("end")
        self._output.flush()


class _Remote(io.RawIOBase):
    """The file as h5py reads it."""

    def __init__(self, channel: Channel, size: int) -> None:
        self._channel = channel
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + {0: 0, 1: self._position, 2: self._size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:  # as RawIOBase has it
        """Read the next bytes; none behind the end."""
        view = memoryview(buffer).cast("B")
        count = min(len(view), max(self._size - self._position, 0))
        if count:
            view[:count] = self._channel.read(self._position, count)
        self._position += count
        return count


def walk(root: Any, channel: Channel, numbers: Collection[str]) -> None:  # a group of h5py, which has no types
    """Go over all links of a file; stops at one that is damaged, and at a second name of the same object.

    Args:
        numbers: the kinds of numbers that are read, as ``"f4"``.
    """
    import h5py  # noqa: PLC0415  # an extra

    seen = {h5py.h5o.get_info(root.id).addr: ""}
    waiting = [("", root)]
    while waiting:
        prefix, group = waiting.pop()
        inside = []
        for key in group:
            path = f"{prefix}{key}"
            channel.say("link", path)
            link = group.get(key, getlink=True)
            if link is None:  # its group lists it: h5py does not tell a link that is damaged from none
                channel.say("damaged")
                return
            if not isinstance(link, h5py.HardLink):
                channel.say("leads", link.path, getattr(link, "filename", None))
                continue
            found = group[key]
            if isinstance(found, h5py.Dataset | h5py.Group):
                first = seen.setdefault(h5py.h5o.get_info(found.id).addr, path)
                if first != path:
                    channel.say("again", first, "dataset" if isinstance(found, h5py.Dataset) else "group")
                    return
            if isinstance(found, h5py.Dataset):
                channel.say("dataset", described(found, channel, numbers))
            elif isinstance(found, h5py.Group):
                inside.append((f"{path}/", found))
            else:
                channel.say("dataset", None)
        waiting += reversed(inside)


def described(dataset: Any, channel: Channel, numbers: Collection[str]) -> dict[str, object] | None:  # of h5py
    """What a dataset is; None if it has no numbers.  Its stored parts have lines of their own."""
    import h5py  # noqa: PLC0415  # an extra
    import numpy as np  # noqa: PLC0415  # h5py has it

    dtype = dataset.dtype
    if dataset.shape is None or dtype.kind in "OSUMm":  # without values, text, dates
        return None
    kind = f"{dtype.kind}{dtype.itemsize}"
    found: dict[str, object] = {"kind": kind, "title": str(dtype), "shape": list(map(int, dataset.shape))}
    if kind not in numbers:
        return found
    found["dtype"] = dtype.str
    found["same"] = dataset.id.get_type() == h5py.h5t.py_create(dtype, logical=True)
    found["elsewhere"] = bool(dataset.external) or bool(dataset.is_virtual)
    if not found["same"] or found["elsewhere"]:
        return found
    start, storage = dataset.id.get_offset(), dataset.id.get_storage_size()
    settings = dataset.id.get_create_plist()
    filters = [settings.get_filter(at) for at in range(settings.get_nfilters())]
    if start is not None:
        channel.say("stored", [0] * dataset.ndim, 0, start, storage)
    elif dataset.chunks and dataset.id.get_num_chunks():
        dataset.id.chunk_iter(
            lambda chunk: channel.say(
                "stored", list(chunk.chunk_offset), chunk.filter_mask, chunk.byte_offset, chunk.size
            )
        )
    # What lies in the header of the dataset itself was read with it, and is at most 64 kB.
    fill = dataset[()] if settings.get_layout() == COMPACT else dataset.fillvalue
    return found | {
        "start": start,
        "storage": storage,
        "chunks": list(map(int, dataset.chunks)) if dataset.chunks else None,
        "filters": [[number, list(values)] for number, _, values, _ in filters],
        "fill": base64.b64encode(np.asarray(fill, dtype=dtype).tobytes()).decode(),
    }


def limit(seconds: int) -> None:
    """Limit the processor time and the memory of this process."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # the first one ends it by SIGXCPU, which says why
    resource.setrlimit(resource.RLIMIT_AS, (ROOM, ROOM))


def main() -> None:
    """Go over the file whose bytes are asked for."""
    size, seconds, numbers, folders = json.loads(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path += [folder for folder in folders if folder not in sys.path]
    channel = Channel(sys.stdin.buffer, os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # a library that prints does not spoil the lines
    try:
        import h5py  # noqa: PLC0415  # an extra

        limit(seconds)
        with h5py.File(_Remote(channel, size), "r") as root:
            walk(root, channel, numbers)
    except Exception as error:  # noqa: BLE001  # h5py raises whatever HDF5's errors look like to it
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        channel.say("failed", told)
    channel.end()
    os._exit(0)  # closing what is damaged may fail again


if __name__ == "__main__":
    main()
