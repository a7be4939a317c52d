"""The activations of a pass, in memory as far as they are small, else in an unnamed temporary file.

In a BERT-base, one row of 512 tokens has 1.3 GB of float64 activations at the probes, more than the model's weights.
They are needed one at a time, once in each pass that is compared with them.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import BinaryIO
from weakref import finalize

import torch
from torch import Tensor

from porting.errors import Code, Fault, VerifyError

HELD = 16 << 20
"""Bytes of each pass that are kept in memory; further activations are written to the file."""


@dataclass(frozen=True)
class _Place:
    """The position of a tensor in the file."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Activations(MutableMapping[str, Tensor]):
    """A mapping of names to copies of tensors, in the order in which they were added.

    A tensor in the file is read each time that it is asked for. The file has no name, so that it vanishes with the
    process. If it cannot be written, tensors stay in memory.

    Args:
        most: the number of bytes that are kept in memory; ``HELD`` if None.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = HELD if most is None else most
        self._entries: dict[str, Tensor | _Place] = {}
        self._nbytes = 0
        self._end = 0
        self._file: BinaryIO | None = None

    @property
    def stored(self) -> bool:
        """Whether any tensor is in the file."""
        return self._file is not None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes, without reading values."""
        return {name: tuple(value.shape) for name, value in self._entries.items()}

    def __setitem__(self, name: str, value: Tensor) -> None:
        value = value.detach()
        if self._nbytes + value.nbytes > self._most and value.device.type == "cpu" and value.numel():
            place = self._write(value)
            if place is not None:
                self._entries[name] = place
                return
        self._entries[name] = value.clone(memory_format=torch.contiguous_format)
        self._nbytes += value.nbytes

    def __getitem__(self, name: str) -> Tensor:
        found = self._entries[name]
        return self._read(found) if isinstance(found, _Place) else found

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

    def _write(self, value: Tensor) -> _Place | None:
        """Append a tensor to the file; None where the system refuses."""
        place = _Place(self._end, tuple(value.shape), value.dtype)
        remaining = _bytes(value.contiguous())
        offset = self._end
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="porting-")  # noqa: SIM115  # it lives as long as this does
                finalize(self, self._file.close)
            while remaining:
                count = os.pwrite(self._file.fileno(), remaining, offset)
                offset, remaining = offset + count, remaining[count:]
        except OSError:  # a full disk, say
            return None
        self._end = offset
        return place

    def _read(self, place: _Place) -> Tensor:
        value = torch.empty(place.shape, dtype=place.dtype)
        remaining, offset = _bytes(value), place.offset
        while remaining and self._file is not None:
            count = os.preadv(self._file.fileno(), [remaining], offset)
            if not count:
                message = "the temporary file that activations were written to has been cut short"
                raise VerifyError(Fault(code=Code.FILE_CHANGED, message=message, hint="run it again"))
            offset, remaining = offset + count, remaining[count:]
        return value


def _bytes(value: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return value.reshape(-1).view(torch.uint8).numpy().data
