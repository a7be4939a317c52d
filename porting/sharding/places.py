"""The places of a checkpoint's tensors in files that several processes write together."""

from __future__ import annotations

import math
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor

from porting.atomic import read_back, write_at
from porting.checkpoint import TensorFile
from porting.checkpoint.container import Shard
from porting.checkpoint.write import shard_around
from porting.opening import Folder
from porting.plan.copies import Copy
from porting.staging import PIECE, bytes_of


@dataclass(frozen=True, kw_only=True)
class Place:
    """The file, the offset and the dtype of a tensor.

    Attributes:
        start: its first byte there.
    """

    file: str
    start: int
    dtype: torch.dtype
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The files to write, and the places of tensors in them.

    Attributes:
        same: whether all of it is as in the checkpoint that is followed.
    """

    shards: Mapping[str, Shard] = field(repr=False)
    places: Mapping[str, Place]
    same: bool


def layout(files: Mapping[str, TensorFile]) -> Layout:
    """Lay out files of tensors, which need no values."""
    shards = {name: shard_around(file, where=name) for name, file in files.items()}
    places = {
        tensor: Place(file=name, start=at, dtype=described.dtype, nbytes=described.nbytes)
        for name, shard in shards.items()
        for tensor, at in shard.offsets.items()
        for described in [files[name].tensors[tensor]]
    }
    same = all(file.header is not None for file in files.values())
    return Layout(shards=shards, places=places, same=same)


class Places:
    """Writes values to the places of tensors, run by run.

    A shared mapping would be quicker where runs are short, and wrong on a file system of several machines.

    Attributes:
        infinite: for each tensor, how many finite values became infinite in the cast.
    """

    def __init__(self, layout: Layout, folder: Folder) -> None:
        self.infinite: Counter[str] = Counter()
        self._layout = layout
        self._folder = folder
        self._open: dict[str, int] = {}

    def __enter__(self) -> Places:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.fsync(descriptor)
            os.close(descriptor)

    def put(self, copy: Copy, values: Tensor, *, name: str = "", counted: Tensor | None = None) -> None:
        """Write the elements that a move reads, cast to the file's dtype.

        Args:
            values: its target's elements in a row.
            name: the tensor to write to, in place of the move's source.
            counted: which of ``values`` count when they become infinite; all when left out.
        """
        for part in pieces(copy, max(PIECE // values.itemsize, 1)):
            box = part.sizes, part.target_strides, part.target_offset
            chosen = None if counted is None else counted.as_strided(*box)
            self._put(part, values.as_strided(*box), name or copy.source, chosen)

    def clear(self, copy: Copy) -> None:
        """Write zeros over the elements that a move reads."""
        kept = [place for place, step in enumerate(copy.source_strides) if step]
        sizes = tuple(copy.sizes[place] for place in kept)
        strides = tuple(copy.source_strides[place] for place in kept)
        dense = tuple(math.prod(sizes[place + 1 :]) for place in range(len(sizes)))
        zeros = torch.zeros(math.prod(sizes), dtype=self._layout.places[copy.source].dtype)
        self.put(Copy(copy.source, "", sizes, copy.source_offset, strides, 0, dense), zeros)

    def _put(self, part: Copy, values: Tensor, name: str, counted: Tensor | None) -> None:
        place = self._layout.places[name]
        if values.dtype != place.dtype:
            before, values = values, values.to(place.dtype)
            became = _infinite(values) & ~_infinite(before)
            self.infinite[name] += int((became if counted is None else became & counted).sum())
        inner, outer = run_of(part)
        length = math.prod(part.sizes[axis] for axis in inner)
        ordered = values.permute([*outer, *inner]).contiguous()
        raw = bytes_of(ordered)
        descriptor = self._descriptor(place.file)
        for number, steps in enumerate(product(*(range(part.sizes[axis]) for axis in outer))):
            at = part.source_offset + sum(
                step * part.source_strides[axis] for step, axis in zip(steps, outer, strict=True)
            )
            begin = number * length * values.itemsize
            write_at(descriptor, raw[begin : begin + length * values.itemsize], place.start + at * values.itemsize)

    def seal(self, number: int, count: int) -> None:
        """Write the checksums of a share of the tensors, once all processes have put their values.

        Args:
            count: of how many.
        """
        sealed = [(name, seal) for shard in self._layout.shards.values() for name, seal in shard.seals.items()]
        for name, seal in sealed[number::count]:
            place, crc = self._layout.places[name], 0
            descriptor = self._descriptor(place.file)
            for start in range(0, place.nbytes, PIECE):
                piece = memoryview(bytearray(min(PIECE, place.nbytes - start)))
                read_back(descriptor, piece, place.start + start)
                crc = zlib.crc32(piece, crc)
            for at in seal.places:
                write_at(descriptor, seal.of(crc, place.nbytes), at)

    def _descriptor(self, file: str) -> int:
        if file not in self._open:
            self._open[file] = self._folder.write(file)
        return self._open[file]


def _infinite(values: Tensor) -> Tensor:
    return (values.float() if values.itemsize == 1 else values).isinf()


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
    """Cut a move into moves of at most ``most`` elements, along the axes that are slowest in the target."""
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
