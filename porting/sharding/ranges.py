"""Reading boxes of stored tensors, without other bytes, and counting what was read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from porting.checkpoint import Checkpoint
from porting.checkpoint.errors import CheckpointError, quote
from porting.checkpoint.files import Readable
from porting.errors import Code, Fault
from porting.plan.clipping import clip
from porting.plan.copies import Copy
from porting.staging import Stored, by_axes, bytes_of, stored

PIECE = 1 << 20
"""Bytes of a box that are buffered at a time."""

FETCH_AGAIN = "the file is damaged: fetch it again"

SHORT = 64
"""Bytes of a run below which asking the system for each would cost more than what lies between two of them."""

NEAR = 512
"""Bytes between two short runs up to which what lies between is read with them."""


class Ranges:
    """Reads boxes of a checkpoint's tensors.

    Attributes:
        nbytes: the bytes that were read so far; of short runs that are near each other, what lies between is read too.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.nbytes = 0

    def clipped(
        self, copy: Copy, shape: Sequence[int], starts: Sequence[int], sizes: Sequence[int]
    ) -> Iterator[tuple[Copy, Tensor]]:
        """The part of a move that lands in a box of its target, as :meth:`boxes` reads it.

        Args:
            copy: the move.
            shape: the target's.
            starts, sizes: the box, axis by axis.
        """
        if copy.numel == 0:
            return
        for part in clip(by_axes(copy, self.checkpoint), shape, starts, sizes):
            yield from self.boxes(part)

    def row(self, name: str, start: int, stop: int) -> Tensor:
        """The elements from ``start`` to ``stop`` of a tensor in row-major order, in memory of their own."""
        info = self.checkpoint.tensors[name]
        found = torch.empty(stop - start, dtype=info.dtype)
        whole = Copy(name, name, (math.prod(info.shape),), 0, (1,), 0, (1,))
        for part, values in self.clipped(whole, (math.prod(info.shape),), (start,), (stop - start,)):
            found.as_strided(part.sizes, part.target_strides, part.target_offset).copy_(values)
        return found

    def boxes(self, copy: Copy) -> Iterator[tuple[Copy, Tensor]]:
        """Read the elements of a move in parts: yields the move of each part, and its elements in the move's sizes.

        Args:
            copy: a move of a plan, or a part of one as :meth:`clipped` cuts it.

        Raises:
            CheckpointError: they cannot be read, or are no booleans although they should be.
        """
        info = self.checkpoint.tensors[copy.source]
        # Of a chunk of a distributed checkpoint a process may need a little: its checksum would take all of it.
        for stored_part in stored(copy, self.checkpoint, verify=not self.checkpoint.in_chunks):
            for part in pieces(stored_part.copy, max(PIECE // info.dtype.itemsize, 1)):
                values = self._read_box(replace(stored_part, copy=part), info.dtype)
                if info.dtype == torch.bool:
                    if values.numel() and int(values.max()) > 1:
                        message = f"tensor {quote(copy.source)}: a boolean is stored as the byte {int(values.max())}"
                        fault = Fault(code=Code.TENSOR_DAMAGED, where=info.file, message=message, hint=FETCH_AGAIN)
                        raise CheckpointError(fault)
                    values = values.view(torch.bool)
                yield part, values

    def _read_box(self, part: Stored, dtype: torch.dtype) -> Tensor:
        file, start, copy = part.file, part.extent.start, part.copy
        dtype = torch.uint8 if dtype == torch.bool else dtype
        width = dtype.itemsize
        inner, outer = run_of(copy)
        length = math.prod(copy.sizes[place] for place in inner)
        count = math.prod(copy.sizes[place] for place in outer)
        found = torch.empty(count * length, dtype=dtype)
        if length * width < SHORT:
            begins = torch.tensor([copy.source_offset])
            for place in outer:
                steps = torch.arange(copy.sizes[place]) * copy.source_strides[place]
                begins = (begins[:, None] + steps).reshape(-1)
            self._scattered(file, start + begins * width, found.view(torch.uint8).view(count, length * width))
        else:
            self.nbytes += found.nbytes
            buffer = bytes_of(found)
            for number, place_of in enumerate(product(*(range(copy.sizes[place]) for place in outer))):
                at = copy.source_offset + sum(
                    step * copy.source_strides[place] for step, place in zip(place_of, outer, strict=True)
                )
                begin = number * length * width
                file.read_into(buffer[begin : begin + length * width], start + at * width)
        file.require_unchanged()
        order = [*outer, *inner]
        shaped = found.view([copy.sizes[axis] for axis in order])
        return shaped.permute([order.index(axis) for axis in range(len(order))]).reshape(copy.sizes)

    def _scattered(self, file: Readable, begins: Tensor, found: Tensor) -> None:
        """Read short runs; those near each other in one call.

        Args:
            file: where they lie.
            begins: where each begins, [r].
            found: filled with their bytes, [r n].
        """
        if not found.numel():
            return
        length = found.shape[1]
        sorted_begins, order = begins.sort()
        apart = sorted_begins.diff() > length + NEAR
        apart |= (sorted_begins // PIECE).diff() > 0  # so that what is held at once is bounded
        cuts = apart.nonzero().view(-1) + 1
        for begins_together, places in zip(sorted_begins.tensor_split(cuts), order.tensor_split(cuts), strict=True):
            first = int(begins_together[0])
            raw = torch.empty(int(begins_together[-1]) + length - first, dtype=torch.uint8)
            file.read_into(bytes_of(raw), first)
            self.nbytes += raw.nbytes
            found[places] = raw[(begins_together - first)[:, None] + torch.arange(length)]


def run_of(copy: Copy) -> tuple[list[int], list[int]]:
    """Divide the axes of a box: those that form one run of the file, slowest first, and the others."""
    ascending = sorted(range(len(copy.sizes)), key=lambda place: copy.source_strides[place])
    inner: list[int] = []
    length = 1
    for place in ascending:
        if copy.source_strides[place] != length:
            break
        inner.insert(0, place)
        length *= copy.sizes[place]
    return inner, [place for place in range(len(copy.sizes)) if place not in inner]


def pieces(copy: Copy, most: int) -> Iterator[Copy]:
    """Cut a move into moves of at most ``most`` elements, along the axes that are slowest in the target.

    Args:
        copy: the move.
        most: elements.
    """
    if copy.numel <= most or not copy.sizes:
        yield copy
        return
    size, *rest = copy.sizes
    each = max(most // math.prod(rest), 1)
    for start in range(0, size, each):
        part = replace(
            copy,
            sizes=(min(each, size - start), *rest),
            source_offset=copy.source_offset + start * copy.source_strides[0],
            target_offset=copy.target_offset + start * copy.target_strides[0],
        )
        if part.numel <= most:
            yield part
        else:  # one step along it is too much still: go on with the next direction
            single = replace(
                part,
                sizes=part.sizes[1:],
                source_strides=part.source_strides[1:],
                target_strides=part.target_strides[1:],
            )
            yield from pieces(single, most)
