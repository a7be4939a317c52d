"""HDF5 files, in which Keras and TensorFlow models of transformers keep their weights.

Read by h5py (``pip install porting[hdf5]``), through this library's own reading of the file.  The path of a dataset is
the tensor's name.  Where HDF5 has the elements in a row and uncompressed, they are mapped and read by ranges; of a
dataset in chunks, rows are read by h5py.  What a file names elsewhere (links to other files, external storage, virtual
datasets) is not followed.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from porting.checkpoint.container import Container, FileKind, Promises, UnrecognisedError
from porting.checkpoint.errors import checkpoint_error, quote
from porting.checkpoint.files import ByteSource, Decoded, LocalFile
from porting.checkpoint.header import FETCH_AGAIN, TensorList
from porting.checkpoint.layout import Contents
from porting.checkpoint.names import LONGEST_TENSOR_NAME
from porting.checkpoint.state_dict import not_read
from porting.errors import Code, Fault, PortingError
from porting.limits import charge, reading

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"\x89HDF\r\n\x1a\n"
INSTALL = "pip install 'porting[hdf5]'"

STEP = 32
"""Values that a dataset, a group or a link is charged as."""


class Hdf5(Container):
    """An HDF5 file."""

    name = "hdf5"
    title = "an HDF5 file"
    endings = (".h5", ".hdf5")
    main = "tf_model.h5"
    also = ("model.weights.h5",)
    separator = "/"
    promises = Promises(writes=False)

    def sniff(self, source: ByteSource) -> FileKind | None:
        """Whether the file begins with the format's signature."""
        begins = source.pread(0, min(len(MAGIC), source.size)) == MAGIC
        return FileKind(self.title, "rename it to end in .h5") if begins else None

    def read(self, source: ByteSource, *, name: str, locate: bool = True) -> Contents:
        """Go through all groups; no elements are read."""
        if self.sniff(source) is None:
            message = "this does not begin as an HDF5 file does"
            fault = Fault(code=Code.FORMAT_WRONG, where=source.where, message=message, hint=FETCH_AGAIN)
            raise UnrecognisedError(fault, source, self.title)
        tensors = TensorList(source, Code.HDF5_FILE, name=name, format=self.name)
        others: list[str] = []
        with reading(source.where), _opened(source) as root:
            for path, dataset in _datasets(root, others, source.where):
                _add(tensors, path, dataset, others)
        return tensors.contents(notes=not_read(others, source.where))


class _File(io.RawIOBase):
    """A file as h5py reads it; what goes wrong is kept, since HDF5 makes another error of it."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._position = 0
        self.charged = True
        self.failure: PortingError | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + {0: 0, 1: self._position, 2: self._source.size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:  # as RawIOBase has it
        """Read the next bytes; none behind the end."""
        view = memoryview(buffer).cast("B")
        count = min(len(view), max(self._source.size - self._position, 0))
        try:
            if self.charged:
                charge("metadata", count, where=self._source.where)
            view[:count] = self._source.pread(self._position, count)
        except PortingError as error:
            self.failure = error
            raise
        self._position += count
        return count


@contextmanager
def _opened(source: ByteSource, *, charged: bool = True) -> Iterator[Any]:  # a group of h5py, which has no types
    """The root group of a file."""
    try:
        import h5py  # noqa: PLC0415  # an extra
    except ImportError as error:
        message = "reading an HDF5 file needs the package h5py, which is not installed"
        raise checkpoint_error(Code.HDF5_FILE, source.where, message, INSTALL) from error
    file = _File(source)
    file.charged = charged
    try:
        with h5py.File(file, "r") as root:
            yield root
    except PortingError:
        raise
    except Exception as error:  # h5py raises whatever HDF5's errors look like to it
        if file.failure is not None:
            raise file.failure from error
        message = f"h5py cannot read it: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        raise checkpoint_error(Code.HDF5_FILE, source.where, message, FETCH_AGAIN) from error


def _datasets(root: Any, others: list[str], where: str) -> Iterator[tuple[str, Any]]:  # groups of h5py
    """The datasets of a file by their paths; ``others`` takes what is not followed."""
    import h5py  # noqa: PLC0415  # an extra

    seen = {h5py.h5o.get_info(root.id).addr}
    waiting = [("", root)]
    while waiting:
        prefix, group = waiting.pop()
        inside = []
        for key in group:
            charge("objects", STEP, where=where)
            path = f"{prefix}{key}"
            if len(path) > LONGEST_TENSOR_NAME:
                raise checkpoint_error(Code.HDF5_FILE, where, f"a name of {len(path)} characters", FETCH_AGAIN)
            link = group.get(key, getlink=True)
            if link is None:  # its group lists it: h5py does not tell a link that is damaged from none
                raise checkpoint_error(Code.HDF5_FILE, where, f"the link of {quote(path)} is damaged", FETCH_AGAIN)
            found = group[key] if isinstance(link, h5py.HardLink) else None
            if isinstance(found, h5py.Dataset):
                yield path, found
            elif isinstance(found, h5py.Group):
                address = h5py.h5o.get_info(found.id).addr
                if address in seen:
                    message = "a group contains itself, or is in two groups"
                    raise checkpoint_error(Code.HDF5_FILE, where, message, FETCH_AGAIN)
                seen.add(address)
                inside.append((f"{path}/", found))
            else:
                others.append(path)
        waiting += reversed(inside)


def _add(tensors: TensorList, path: str, dataset: Any, others: list[str]) -> None:  # of h5py
    """Add a dataset to the tensors, or note why it is none."""
    from porting.checkpoint.npz import DTYPES  # noqa: PLC0415  # numpy's types, which need numpy

    dtype: np.dtype[Any] = dataset.dtype
    element = DTYPES.get(f"{dtype.kind}{dtype.itemsize}")
    if dataset.shape is None or dtype.kind in "OSUMm":  # without values, text, dates
        others.append(path)
        return
    if element is None:
        tensors.refuse(path, f"its type {dtype} is none that torch has", "save it as float32")
        return
    if dataset.external or dataset.is_virtual:
        tensors.refuse(path, "its elements lie in other files, which are not read", "save the weights in one file")
        return
    shape, start = tuple(dataset.shape), dataset.id.get_offset()
    nbytes = math.prod(shape) * dtype.itemsize
    if start is not None and dtype.newbyteorder("<") == dtype and dataset.id.get_storage_size() == nbytes:
        tensors.add(path, shape, element, start=start)
        return
    largest = math.prod(dataset.chunks or (1,)) * dtype.itemsize
    charge("made", max(nbytes, largest), where=tensors.faults.where)
    rows = partial(_Rows, path=path, shape=shape, dtype=dtype.newbyteorder("<"))
    tensors.add(path, shape, element, start=0, decode=rows)


class _Rows(Decoded):
    """The elements of a dataset that HDF5 has in chunks, compressed, big-endian or nowhere, read by rows.

    Args:
        dtype: the type of its elements, little-endian.
    """

    piece = 1 << 24  # each time the file is opened, and chunks at the ends are decompressed once more

    def __init__(self, file: LocalFile, *, path: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        super().__init__(file, math.prod(shape) * dtype.itemsize)
        self._path, self._shape, self._dtype = path, shape, dtype

    def pread(self, offset: int, count: int) -> bytes:
        """Exactly ``count`` bytes of elements."""
        if not count:
            return b""
        row = math.prod(self._shape[1:]) * self._dtype.itemsize
        first, last = offset // row, -(-(offset + count) // row)
        with _opened(self._file, charged=False) as root:
            dataset = root[self._path]
            values = dataset[first:last] if self._shape else dataset[()]
        raw = values.astype(self._dtype).tobytes()
        return bytes(raw[offset - first * row :][:count])
