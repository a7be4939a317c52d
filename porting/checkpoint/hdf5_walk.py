"""A program that goes over an HDF5 file and writes what is in it, run by :mod:`porting.checkpoint.hdf5_file`.

HDF5's library crashes on some damaged files, which would end the process that it runs in without a word.  So it runs in
a process of its own, which imports nothing else of this project and opens no file: it asks for the bytes, so that
the process that started it checks, charges and remembers what is read.

The standard output has a JSON list on each line, whose first element says what it is.  ``["read", offset, count,
used]`` asks for bytes, which come on the standard input.  Whole blocks are asked for, since the library reads many
small pieces that lie side by side; ``used`` says how many bytes it wanted.
"""

from __future__ import annotations

import base64
import ctypes
import io
import json
import os
import resource
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, BinaryIO

ROOM = 512 << 20
"""Bytes of memory; the imported packages take a quarter of them."""

BLOCK = 1 << 14
"""Bytes of a block; the last one is shorter."""

BLOCKS = 64
"""Blocks that are kept."""

EACH = 0.001
"""Seconds that each dataset extends the time by."""

MANY = round(1 / EACH)
"""Datasets that extend it by a second."""

COMPACT, CHUNKED, VIRTUAL = 0, 2, 3
"""The layouts of a dataset whose elements lie in its header, in chunks, and in other datasets."""

PARTIAL_AS_THEY_ARE = 2
"""HDF5's option of datasets whose filters are not applied to chunks that reach beyond the dataset's edge."""

GROWING_ARRAY = 4
"""HDF5's number of the array that grows along an axis (H5D_CHUNK_IDX_EARRAY), as an index of chunks."""

NO_FILTER = 0xFFFFFFFF
"""The filters that were not applied to a chunk, as bits: all of them."""


class Channel:
    """Writes the lines, and gets the bytes that they ask for.

    Args:
        size: bytes of the file.
    """

    def __init__(self, answers: BinaryIO, output: BinaryIO, size: int) -> None:
        self._answers = answers
        self._output = output
        self.size = size
        self._blocks: dict[int, bytes] = {}

    def say(self, *message: object) -> None:
        """Write a line; it may wait in a buffer until the next request."""
        self._output.write(json.dumps(message).encode() + b"\n")

    def read(self, offset: int, count: int) -> bytes:
        """Bytes of the file; those of the last blocks are at hand."""
        number, begin = divmod(offset, BLOCK)
        if begin + count > BLOCK:
            return self._ask(offset, count, count)
        block = self._blocks.get(number)
        if block is None:
            if len(self._blocks) >= BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            start = number * BLOCK
            block = self._blocks[number] = self._ask(start, min(BLOCK, self.size - start), count)
        return block[begin : begin + count]

    def _ask(self, offset: int, count: int, used: int) -> bytes:
        self.say("read", offset, count, used)
        self._output.flush()
        return self._answers.read(count)

    def end(self) -> None:
        """Write that all has been written."""
        self.say("end")
        self._output.flush()


class _Remote(io.RawIOBase):
    """The file as h5py reads it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + {0: 0, 1: self._position, 2: self._channel.size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:  # as RawIOBase has it
        """Read the next bytes; none behind the end."""
        view = memoryview(buffer).cast("B")
        count = min(len(view), max(self._channel.size - self._position, 0))
        if count:
            view[:count] = self._channel.read(self._position, count)
        self._position += count
        return count


def walk(  # a group of h5py, which has no types
    root: Any, channel: Channel, numbers: Collection[str], found_one: Callable[[int], None] = lambda count: None
) -> None:
    """Go over all links of a file; stops at one that is damaged, and at a second name of the same object.

    Args:
        numbers: the kinds of numbers that are read, as ``"f4"``.
        found_one: called with the number of datasets so far, at each.
    """
    import h5py  # noqa: PLC0415  # an extra

    seen = {h5py.h5o.get_info(root.id).addr: ""}
    waiting, count = [("", root)], 0
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
                channel.say("dataset", described(found.id, channel, numbers))
                count += 1
                found_one(count)
            elif isinstance(found, h5py.Group):
                inside.append((f"{path}/", found))
            else:
                channel.say("dataset", None)
        waiting += reversed(inside)


def described(dataset: Any, channel: Channel, numbers: Collection[str]) -> dict[str, object] | None:  # h5py's DatasetID
    """The description of a dataset; None if it has no numbers.  Its stored parts have lines of their own."""
    import h5py  # noqa: PLC0415  # an extra
    import numpy as np  # noqa: PLC0415  # h5py has it

    dtype = dataset.dtype
    if dataset.get_space().get_simple_extent_type() == h5py.h5s.NULL or dtype.kind in "OSUMm":  # no values, text, dates
        return None
    shape = list(map(int, dataset.shape))
    kind = f"{dtype.kind}{dtype.itemsize}"
    found: dict[str, object] = {"kind": kind, "title": str(dtype), "shape": shape}
    if kind not in numbers:
        return found
    settings = dataset.get_create_plist()
    layout = settings.get_layout()
    found["dtype"] = dtype.str
    found["same"] = dataset.get_type() == h5py.h5t.py_create(dtype, logical=True)
    found["elsewhere"] = settings.get_external_count() > 0 or layout == VIRTUAL
    if not found["same"] or found["elsewhere"]:
        return found
    chunks = list(map(int, settings.get_chunk())) if layout == CHUNKED else None
    start, storage = dataset.get_offset(), dataset.get_storage_size()
    filters = [settings.get_filter(at) for at in range(settings.get_nfilters())]
    if start is not None:
        channel.say("stored", [0] * len(shape), 0, start, storage)
    elif chunks and dataset.get_num_chunks():
        table = _Chunks(dataset, chunks)
        as_they_are = bool(filters) and bool(table.options(settings) & PARTIAL_AS_THEY_ARE)
        for starts, chunk in table.stored():
            ends = zip(starts, chunks, shape, strict=True)
            partial = as_they_are and any(at + edge > size for at, edge, size in ends)
            skipped = NO_FILTER if partial else chunk.filter_mask  # which does not say so
            channel.say("stored", starts, skipped, chunk.byte_offset, chunk.size)
    if layout == COMPACT:  # what lies in the header of the dataset itself was read with it, and is at most 64 kB
        fill = h5py.Dataset(dataset)[()]
    else:
        fill = np.zeros((), dtype)
        undefined = settings.fill_value_defined() == h5py.h5d.FILL_VALUE_UNDEFINED
        some = start is not None or bool(chunks and dataset.get_num_chunks())
        never = some if undefined else settings.get_fill_time() == h5py.h5d.FILL_TIME_NEVER
        if not never:  # else HDF5 leaves them as they are, which are zeros of h5py
            settings.get_fill_value(fill)
    return found | {
        "start": start,
        "storage": storage,
        "chunks": chunks,
        "filters": [[number, list(values)] for number, _, values, _ in filters],
        "fill": base64.b64encode(np.asarray(fill, dtype=dtype).tobytes()).decode(),
    }


class _Chunks:
    """The stored chunks of a dataset, and what HDF5 knows of them and h5py does not give.

    For that the library that h5py has loaded is asked.

    Args:
        dataset: h5py's DatasetID.
        edges: the sizes of a chunk.
    """

    def __init__(self, dataset: Any, edges: Sequence[int]) -> None:
        import h5py  # noqa: PLC0415  # an extra

        self._dataset, self._edges = dataset, edges
        self._library = ctypes.CDLL(h5py.h5p.__file__)
        self._starts, self._size = (ctypes.c_uint64 * len(edges))(), ctypes.c_uint64(0)
        most = dataset.get_space().get_simple_extent_dims(True)
        self._growing = [axis for axis, size in enumerate(most) if size == h5py.h5s.UNLIMITED]
        self._counts = [-(-size // edge) for size, edge in zip(most, edges, strict=True)]

    def options(self, settings: Any) -> int:  # h5py's PropDCID
        """The options of the dataset's chunks."""
        options = ctypes.c_uint(0)
        if self._library.H5Pget_chunk_opts(ctypes.c_int64(settings.id), ctypes.byref(options)) < 0:
            message = "the options of its chunks cannot be read"
            raise ValueError(message)
        return options.value

    def stored(self) -> Iterator[tuple[list[int], Any]]:
        """Where each stored chunk begins, and h5py's StoreInfo of it."""
        listed: list[Any] = []
        self._dataset.chunk_iter(listed.append)
        order: Callable[[Sequence[int]], list[int]] = list
        lost = self._lost(listed, order)
        if lost is not None and self._is_growing_array():
            order = self._in_order
            lost = self._lost(listed, order)
        if lost is not None:
            message = f"the chunk at {lost} of a dataset is stored, and is not found where it is looked for"
            raise ValueError(message)
        return ((order(chunk.chunk_offset), chunk) for chunk in listed)

    def _lost(self, listed: Iterable[Any], order: Callable[[Sequence[int]], list[int]]) -> list[int] | None:
        """The first place at which no chunk is found; None if there is none."""
        return next((starts for chunk in listed if not self._finds(starts := order(chunk.chunk_offset))), None)

    def _finds(self, starts: Sequence[int]) -> bool:
        """Whether what reads the dataset finds a stored chunk at a place."""
        self._starts[:] = [*starts]
        dataset = ctypes.c_int64(self._dataset.id)
        found = self._library.H5Dget_chunk_storage_size(dataset, self._starts, ctypes.byref(self._size))
        return bool(found >= 0 and self._size.value)

    def _is_growing_array(self) -> bool:
        """Whether the chunks are in an array that grows along an axis, and this is not the first one.

        Of such an array HDF5 lists the chunks under wrong places: they are stored with that axis as the slowest one,
        and numbered as if it was where it is.
        """
        kind = ctypes.c_int(0)
        dataset = ctypes.c_int64(self._dataset.id)
        known = self._library.H5Dget_chunk_index_type(dataset, ctypes.byref(kind)) >= 0
        return known and kind.value == GROWING_ARRAY and len(self._growing) == 1 and self._growing[0] > 0

    def _in_order(self, starts: Sequence[int]) -> list[int]:
        """The true place of a chunk that is listed under another one."""
        (growing,) = self._growing
        places = [start // edge for start, edge in zip(starts, self._edges, strict=True)]
        number = places[growing]  # those in front of it are 0, since it never ends
        for axis in range(growing + 1, len(places)):
            number = number * self._counts[axis] + places[axis]
        for axis in reversed([axis for axis in range(len(places)) if axis != growing]):
            number, places[axis] = divmod(number, self._counts[axis])
        places[growing] = number
        return [place * edge for place, edge in zip(places, self._edges, strict=True)]


def limit(seconds: int) -> Callable[[int], None]:
    """Limit the processor time and the memory of this process; returns what extends the time for so many datasets."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]

    def extend(count: int) -> None:
        allowed = seconds + int(EACH * count)
        resource.setrlimit(resource.RLIMIT_CPU, (allowed if hard < 0 else min(allowed, hard), hard))

    extend(0)  # the soft limit ends it by SIGXCPU, which says why
    resource.setrlimit(resource.RLIMIT_AS, (ROOM, ROOM))
    return lambda count: None if count % MANY else extend(count)


def main() -> None:
    """Go over the file whose bytes are asked for."""
    size, seconds, numbers, folders = json.loads(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path += [folder for folder in folders if folder not in sys.path]
    channel = Channel(sys.stdin.buffer, os.fdopen(os.dup(1), "wb"), size)
    os.dup2(2, 1)  # a library that prints does not spoil the lines
    try:
        import h5py  # noqa: PLC0415  # an extra

        extend = limit(seconds)
        with h5py.File(_Remote(channel), "r") as root:
            walk(root, channel, numbers, extend)
    except Exception as error:  # noqa: BLE001  # h5py raises whatever HDF5's errors look like to it
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        channel.say("failed", told)
    channel.end()
    os._exit(0)  # closing what is damaged may fail again


if __name__ == "__main__":
    main()
