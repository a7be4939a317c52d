"""The activations of a pass: in memory while they are small, and in a file without a name when they are large.

In a BERT-base, one row of 512 tokens has 1.3 GB of float64 activations at the probes, more than the model's weights.
They are needed one at a time, once in each of the passes that are measured from them.
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
"""Bytes of a pass that are kept in memory, of each batch; what comes after that goes to the file."""


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in the file."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Activations(MutableMapping[str, Tensor]):
    """Copies of tensors by name, in the order in which they came.

    What goes to the file is read again each time that it is asked for.  The file has no name, so that nothing is left
    of it whatever happens to the process; where it cannot be made or written, tensors stay in memory.

    Args:
        most: so many bytes are held in memory; ``HELD`` when None.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = HELD if most is None else most
        self._held: dict[str, Tensor | _Place] = {}
        self._nbytes = 0
        self._end = 0
        self._file: BinaryIO | None = None

    @property
    def stored(self) -> bool:
        """Whether some of them lie in the file."""
        return self._file is not None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes, without reading anything."""
        return {name: tuple(value.shape) for name, value in self._held.items()}

    def __setitem__(self, name: str, value: Tensor) -> None:
        value = value.detach()
        if self._nbytes + value.nbytes > self._most and value.device.type == "cpu" and value.numel():
            place = self._write(value)
            if place is not None:
                self._held[name] = place
                return
        self._held[name] = value.clone(memory_format=torch.contiguous_format)
        self._nbytes += value.nbytes

    def __getitem__(self, name: str) -> Tensor:
        found = self._held[name]
        return self._read(found) if isinstance(found, _Place) else found

    def __delitem__(self, name: str) -> None:
        found = self._held.pop(name)
        if isinstance(found, Tensor):
            self._nbytes -= found.nbytes

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def _write(self, value: Tensor) -> _Place | None:
        """Put a tensor at the end of the file; None where the system refuses."""
        place = _Place(self._end, tuple(value.shape), value.dtype)
        left = _bytes(value.contiguous())
        at = self._end
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="porting-")  # noqa: SIM115  # it lives as long as this does
                finalize(self, self._file.close)
            while left:
                count = os.pwrite(self._file.fileno(), left, at)
                at, left = at + count, left[count:]
        except OSError:  # a full disk, say
            return None
        self._end = at
        return place

    def _read(self, place: _Place) -> Tensor:
        value = torch.empty(place.shape, dtype=place.dtype)
        left, at = _bytes(value), place.offset
        while left and self._file is not None:
            count = os.preadv(self._file.fileno(), [left], at)
            if not count:
                message = "the temporary file that activations were written to has been cut short"
                raise VerifyError(Fault(code=Code.FILE_CHANGED, message=message, hint="run it again"))
            at, left = at + count, left[count:]
        return value


def _bytes(value: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return value.reshape(-1).view(torch.uint8).numpy().data
