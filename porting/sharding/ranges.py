"""Reading a box of a stored tensor, and no byte beside it, with a count of what was read."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from porting.checkpoint import Checkpoint
from porting.checkpoint.errors import CheckpointError, quote
from porting.errors import Code, Fault
from porting.plan.copies import Copy
from porting.plan.strided import through

PIECE = 1 << 20
"""Bytes of a box that are held beside its place."""

SHORT = 64
"""Bytes of a run below which asking the system for each costs more than touching a mapping: a line of the cache."""


class Ranges:
    """Reads boxes of a checkpoint's tensors.

    Attributes:
        nbytes: the bytes that were asked for so far; a run shorter than a line of the cache counts as one.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.nbytes = 0

    def boxes(self, copy: Copy) -> Iterator[tuple[Copy, Tensor]]:
        """The elements that a move reads, piece by piece: a move of each piece, and its elements in the move's sizes.

        Raises:
            CheckpointError: they cannot be read, or are no booleans although they should be.
        """
        info = self.checkpoint.tensors[copy.source]
        for part in pieces(copy, max(PIECE // info.dtype.itemsize, 1)):
            values = self._box(part)
            if info.dtype == torch.bool:
                if values.numel() and int(values.max()) > 1:
                    message = f"tensor {quote(copy.source)}: a boolean is stored as the byte {int(values.max())}"
                    hint = "the file is damaged: fetch it again"
                    raise CheckpointError(Fault(code=Code.TENSOR_DAMAGED, where=info.file, message=message, hint=hint))
                values = values.view(torch.bool)
            yield part, values

    def _box(self, copy: Copy) -> Tensor:
        info = self.checkpoint.tensors[copy.source]
        file, extent = self.checkpoint.place(copy.source)
        dtype = torch.uint8 if info.dtype == torch.bool else info.dtype
        stored = copy if extent.stride is None else through(copy, info.shape, extent.stride)
        inner, outer = run_of(stored)
        length = math.prod(stored.sizes[place] for place in inner)
        count = math.prod(stored.sizes[place] for place in outer)
        if length * dtype.itemsize < SHORT:
            self.nbytes += count * SHORT
            flat = file.view(extent.start, extent.stop, dtype)
            return flat.as_strided(stored.sizes, stored.source_strides, stored.source_offset).reshape(copy.sizes)
        self.nbytes += count * length * dtype.itemsize
        found = torch.empty(count * length, dtype=dtype)
        buffer = memoryview((ctypes.c_char * found.nbytes).from_address(found.data_ptr())).cast("B")
        for number, place in enumerate(product(*(range(stored.sizes[one]) for one in outer))):
            at = stored.source_offset + sum(
                step * stored.source_strides[one] for step, one in zip(place, outer, strict=True)
            )
            begin = number * length * dtype.itemsize
            file.read_into(buffer[begin : begin + length * dtype.itemsize], extent.start + at * dtype.itemsize)
        file.require_unchanged()
        order = [*outer, *inner]
        shaped = found.view([stored.sizes[one] for one in order])
        return shaped.permute([order.index(one) for one in range(len(order))]).reshape(copy.sizes)


def run_of(copy: Copy) -> tuple[list[int], list[int]]:
    """The directions of a box that make up one run of the file, slowest first, and the others."""
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
    """A move cut into moves of at most ``most`` elements, along the directions that are slowest in the target."""
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
