"""The tensors of a pass, in memory as far as they are small, else in an unnamed temporary file.

In a BERT-base, one row of 512 tokens has 1.3 GB of float64 activations at the probes, more than the model's weights.
They are needed one at a time, once in each pass that is compared with them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO
from weakref import finalize

import torch
from torch import Tensor

from porting.errors import Code, Fault, VerifyError

HELD = 16 << 20
"""Bytes of each pass that are kept in memory; further activations are written to the file."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        offset: where its elements begin, in bytes.
        nbytes: the number of bytes that are read; those of a view's whole storage.
        shape, stride, start: the tensor in that storage; the last two count elements.
    """

    file: TensorFile
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    dtype: torch.dtype

    def read(self) -> Tensor:
        """Return a copy of the tensor with the strides that it had."""
        with torch._C.DisableTorchFunction():  # a mode that records a pass must not see this
            content = torch.empty(self.nbytes, dtype=torch.uint8)
            self.file.fill(content.numpy().data, self.offset)
            empty = torch.empty(0, dtype=self.dtype)
            return empty.set_(content.untyped_storage(), self.start, self.shape, self.stride)


class TensorFile:
    """An unnamed temporary file of tensors, which vanishes with the process."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._end = 0

    def write(self, value: Tensor) -> StoredTensor | None:
        """Append the elements of a tensor; None where the system refuses, or where its memory cannot be read."""
        with torch._C.DisableTorchFunction():
            value = value.detach().contiguous()
            stored = StoredTensor(self, self._end, value.nbytes, tuple(value.shape), value.stride(), 0, value.dtype)
            return stored if self._append(value.reshape(-1).view(torch.uint8).numpy().data) else None

    def write_storages(self, values: Sequence[Tensor]) -> list[StoredTensor | None]:
        """Append the memory of tensors, once for all views of it; they are read with the strides that they have."""
        places: dict[int, int | None] = {}
        found: list[StoredTensor | None] = []
        with torch._C.DisableTorchFunction():
            for value in values:
                storage = value.untyped_storage()
                if storage.data_ptr() not in places:
                    content = torch.empty(0, dtype=torch.uint8).set_(storage)
                    offset = self._end
                    places[storage.data_ptr()] = offset if self._append(content.numpy().data) else None
                place = places[storage.data_ptr()]
                shape, stride, start = tuple(value.shape), value.stride(), value.storage_offset()
                found.append(
                    None
                    if place is None
                    else StoredTensor(self, place, storage.nbytes(), shape, stride, int(start), value.dtype)
                )
        return found

    def fill(self, memory: memoryview, offset: int) -> None:
        """Read bytes from an offset on.

        Raises:
            VerifyError: the file is shorter than what was written.
        """
        while memory and self._file is not None:
            count = os.preadv(self._file.fileno(), [memory], offset)
            if not count:
                message = "the temporary file that activations were written to has been cut short"
                raise VerifyError(Fault(code=Code.FILE_CHANGED, message=message, hint="run it again"))
            offset, memory = offset + count, memory[count:]

    def _append(self, remaining: memoryview) -> bool:
        offset = self._end
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="porting-")  # noqa: SIM115  # it lives as long as this does
                finalize(self, self._file.close)
            while remaining:
                count = os.pwrite(self._file.fileno(), remaining, offset)
                offset, remaining = offset + count, remaining[count:]
        except OSError:  # a full disk, say
            return False
        self._end = offset
        return True


class Activations(MutableMapping[str, Tensor]):
    """A mapping of names to copies of tensors, in the order in which they were added.

    A tensor in the file is read each time that it is asked for. The file has no name, so that it vanishes with the
    process. If it cannot be written, tensors stay in memory.

    Args:
        most: the number of bytes that are kept in memory; ``HELD`` if None.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = HELD if most is None else most
        self._entries: dict[str, Tensor | StoredTensor] = {}
        self._nbytes = 0
        self._file = TensorFile()

    @property
    def stored(self) -> bool:
        """Whether any tensor is in the file."""
        return any(isinstance(value, StoredTensor) for value in self._entries.values())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes, without reading values."""
        return {name: tuple(value.shape) for name, value in self._entries.items()}

    def __setitem__(self, name: str, value: Tensor) -> None:
        value = value.detach()
        if self._nbytes + value.nbytes > self._most and value.device.type == "cpu" and value.numel():
            place = self._file.write(value)
            if place is not None:
                self._entries[name] = place
                return
        self._entries[name] = value.clone(memory_format=torch.contiguous_format)
        self._nbytes += value.nbytes

    def __getitem__(self, name: str) -> Tensor:
        found = self._entries[name]
        return found.read() if isinstance(found, StoredTensor) else found

    def __delitem__(self, name: str) -> None:
        found = self._entries.pop(name)
        if isinstance(found, Tensor):
            self._nbytes -= found.nbytes

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
