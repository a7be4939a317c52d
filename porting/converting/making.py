"""Making one tensor of the output in memory that does not depend on its size.

Where bytes are only carried to another place the kernel copies them.  Else the tensor is made in blocks, from its first
element to its last: what lands in a block is read as runs of the source (:mod:`porting.converting.pieces`), gathered,
cast, digested and written.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor

from porting.checkpoint import Checkpoint
from porting.checkpoint.errors import CheckpointError
from porting.checkpoint.files import LocalFile
from porting.converting.casts import NONE, Losses, can_lose, losses
from porting.converting.digests import PIECE, of_range
from porting.converting.kernel import PAGE, Copier, write_at
from porting.converting.pieces import parts, reading, within
from porting.converting.recipe import Recipe
from porting.errors import Code, Fault
from porting.plan.copies import Copy
from porting.stored import Stored, stored

LEAST = 1 << 20
"""Bytes of memory that one worker needs."""

BLOCK = 1 << 18
"""Bytes of a block where the source is read in long runs anyway: what a processor's cache holds."""

LONG = 1 << 14
"""Bytes: runs shorter than this, on the average, make a block larger, for each costs a call of the system."""

SLICE = 1 << 15
"""Elements whose losses are counted at a time."""

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Made:
    """What is known of a tensor once it is written.

    Attributes:
        digest: of its bytes.
        losses: what casts and factors did to its values.
        sources: digests of those source tensors that were read from first to last on the way.
    """

    digest: str
    losses: Losses = NONE
    sources: Mapping[str, str] = field(default_factory=dict)


class Maker:
    """Makes tensors, one after the other, in a piece of memory of its own.

    Args:
        checkpoint: the input.
        like: the followed checkpoint, for tensors that the input does not hold; None when there is none.
        memory: bytes for buffers, at least :data:`LEAST`; nothing else here grows with a tensor.
        told: called with the number of bytes of the output that were written since the last call.
    """

    def __init__(
        self, checkpoint: Checkpoint, like: Checkpoint | None, memory: int, told: Callable[[int], None]
    ) -> None:
        self._checkpoint = checkpoint
        self._like = like
        self._told = told
        self._staging = torch.empty(min(4 * PIECE, memory // 4) // 64 * 64, dtype=torch.uint8)
        self._block = torch.empty((memory - self._staging.numel()) // 64 * 64, dtype=torch.uint8)
        self._view = _memory(self._staging)
        self._copier = Copier(self._view)
        self._lengths: dict[object, int] = {}
        self._divided = 0, 0
        self._parts: list[memoryview] = []
        self._divisions: dict[tuple[Copy, bool], tuple[Stored, ...]] = {}

    def digest_of(self, name: str) -> str:
        """The digest of a tensor of the input as it lies in its file; of one in several pieces, in row-major order."""
        pieces = self._checkpoint.pieces(name)
        if len(pieces) == 1:
            file, extent = pieces[0].file, pieces[0].extent
            digest = of_range(file, extent.start, extent.stop, self._view)
            file.require_unchanged()
            return digest
        info = self._checkpoint.tensors[name]
        whole = Copy(name, name, (math.prod(info.shape),), 0, (1,), 0, (1,))
        itself = Recipe(name=name, shape=info.shape, work=info.dtype, dtype=info.dtype, copies=(whole,))
        state = xxhash.xxh3_128()
        for block, _ in self._blocks(itself, _Heard(itself, self._checkpoint)):
            state.update(_memory(block))
        for piece in pieces:
            piece.file.require_unchanged()
        return state.hexdigest()

    def digest_at(self, descriptor: int, at: int, count: int) -> str:
        """The digest of a range of the output as it lies there."""
        state = xxhash.xxh3_128()
        for done in range(0, count, PIECE):
            piece = self._view[: min(PIECE, len(self._view), count - done)]
            _read_back(descriptor, piece, at + done)
            state.update(piece)
        return state.hexdigest()

    def make(self, recipe: Recipe, target: int, at: int) -> Made:
        """Write a tensor.

        Args:
            recipe: how it is made.
            target: the descriptor of the file.
            at: the place of its first byte there.

        Raises:
            CheckpointError: the input cannot be read, is damaged, or changed.
            OSError: writing failed.
        """
        files = {one.file.where: one.file for copy in recipe.copies for one in self._stored(copy)}
        runs = self._runs(recipe)
        made = self._by_kernel(recipe, runs, target, at) if runs is not None else self._in_blocks(recipe, target, at)
        for file in files.values():
            file.require_unchanged()
        self._divisions.clear()
        return made

    def _rows(self, count: int, size: int, pitch: int) -> list[memoryview]:
        """The buffer's first rows of ``size`` bytes that begin ``pitch`` bytes apart."""
        if self._divided != (size, pitch) or len(self._parts) < count:
            self._divided = size, pitch
            self._parts = [self._view[at : at + size] for at in range(0, count * pitch, pitch)]
        return self._parts

    def _stored(self, copy: Copy, *, like: bool = False) -> tuple[Stored, ...]:
        """The parts of a move, each counted as its source lies in a file."""
        if (copy, like) not in self._divisions:
            checkpoint = self._like if like and self._like is not None else self._checkpoint
            self._divisions[copy, like] = tuple(stored(copy, checkpoint))
        return self._divisions[copy, like]

    # ------------------------------------------------------------------------------------------ bytes as they are

    def _runs(self, recipe: Recipe) -> list[Stored] | None:
        """The moves in the target's order, when they carry whole runs of bytes and nothing else is to be done."""
        tensors = self._checkpoint.tensors
        plain = recipe.copies and recipe.covered and not recipe.arithmetic and recipe.dtype != torch.bool
        if not plain or any(tensors[copy.source].dtype != recipe.dtype for copy in recipe.copies):
            return None
        runs = [one for copy in recipe.copies for one in self._stored(copy)]
        if not all(one.copy.contiguous for one in runs):
            return None
        return sorted(runs, key=lambda one: one.copy.target_offset)

    def _by_kernel(self, recipe: Recipe, runs: list[Stored], target: int, at: int) -> Made:
        width = recipe.dtype.itemsize
        state = xxhash.xxh3_128()
        for run in runs:
            start, count = run.extent.start + run.copy.source_offset * width, run.copy.numel * width
            end = at + count
            while at < end:
                piece = self._view[: min(PIECE - at % min(PAGE, PIECE), len(self._view), end - at)]  # then whole pages
                if not self._copier.copy(run.file, start, target, at, len(piece)):
                    _read_back(target, piece, at)
                state.update(piece)
                start, at = start + len(piece), at + len(piece)
                self._told(len(piece))
        digest = state.hexdigest()
        first, *others = recipe.copies
        name = first.source
        whole = not others and first.contiguous and first.numel * width == self._checkpoint.tensors[name].nbytes
        return Made(digest=digest, sources={name: digest} if whole else {})

    # ------------------------------------------------------------------------------------------ block by block

    def _in_blocks(self, recipe: Recipe, target: int, at: int) -> Made:
        state = xxhash.xxh3_128()
        lost = NONE
        heard = _Heard(recipe, self._checkpoint)
        for block, lost_here in self._blocks(recipe, heard):
            raw = _memory(block)
            for done in range(0, len(raw), PIECE):
                piece = raw[done : done + PIECE]
                state.update(piece)
                write_at(target, piece, at)
                at += len(piece)
            lost += lost_here
            self._told(len(raw))
        return Made(digest=state.hexdigest(), losses=lost, sources=heard.digests())

    def _blocks(self, recipe: Recipe, heard: _Heard) -> Iterator[tuple[Tensor, Losses]]:
        """The tensor from its first element to its last; each block is overwritten by the next."""
        length = self._length(recipe)
        for start in range(0, recipe.numel, length):
            yield self._filled(recipe, start, min(start + length, recipe.numel), heard)

    def _length(self, recipe: Recipe) -> int:
        """Elements of a block: so many that the source is read in long runs, as far as the memory goes."""
        width = recipe.work.itemsize
        cost = width + (recipe.dtype.itemsize if recipe.dtype != recipe.work else 0) + 8 * recipe.arithmetic
        most = max(1, (self._block.numel() - 256) // cost)
        moves = tuple((one.sizes, one.source_strides, one.target_strides) for one in recipe.copies)
        key = (moves, recipe.work, recipe.dtype, recipe.numel, recipe.arithmetic)
        if key not in self._lengths:
            length = min(most, max(1, BLOCK // width))
            while length < min(most, recipe.numel) and not self._reads_long_runs(recipe, length):
                length = min(most, 2 * length)
            self._lengths[key] = length
        return self._lengths[key]

    def _reads_long_runs(self, recipe: Recipe, length: int) -> bool:
        runs = wanted = 0
        for copy in recipe.copies:
            width = self._checkpoint.tensors[copy.source].dtype.itemsize
            most = self._staging.numel() // width
            middle = copy.target_offset // length * length
            for one in self._stored(copy):
                for part in within(one.copy, middle, middle + length):
                    first = next(parts(part, width, most))
                    runs += sum(1 for _ in reading(first, width, most).calls())
                    wanted += first.numel * width
        return wanted >= runs * LONG

    def _filled(self, recipe: Recipe, start: int, stop: int, heard: _Heard) -> tuple[Tensor, Losses]:
        """The elements ``[start, stop)`` of a tensor, as they go into the file."""
        count = stop - start
        take = _Taken(self._block)
        block = take(count, recipe.work)
        sums = take(count, torch.float64) if recipe.arithmetic else None
        lost = self._begin(recipe, block, start, stop)
        if recipe.fold and sums is not None:
            sums.zero_()
        for copy in recipe.copies:
            for staged, part in self._read(copy, start, stop, heard):
                if recipe.fold and sums is not None:
                    term = staged.to(recipe.work)
                    lost += losses(staged, term) if can_lose(staged.dtype, recipe.work) else NONE
                    _placed(sums, part, start).add_(term)
                else:
                    lost += _put(staged, _placed(block, part, start))
        for copy in recipe.blanks:
            for part in within(copy, start, stop):
                _placed(block, part, start).zero_()
        if sums is not None:
            lost += _computed(recipe, block, sums)
        if recipe.dtype == recipe.work:
            return block, lost
        result = take(count, recipe.dtype)
        return result, lost + _put_all(block, result)

    def _begin(self, recipe: Recipe, block: Tensor, start: int, stop: int) -> Losses:
        """What stands in a block before any move."""
        if recipe.arange:
            last = recipe.shape[-1] if recipe.shape else 1
            block.copy_(torch.arange(start, stop).remainder_(last))
        elif recipe.base:
            return self._from_followed(recipe, block, start, stop)
        elif not recipe.covered:
            block.fill_(recipe.fill if recipe.fill is not None else 0.0)
        return NONE

    def _from_followed(self, recipe: Recipe, block: Tensor, start: int, stop: int) -> Losses:
        if self._like is None:
            raise ValueError(f"{recipe.name!r} is taken from a checkpoint that was not given")  # a bug of ours
        copy = Copy(recipe.base, recipe.name, (recipe.numel,), 0, (1,), 0, (1,))
        lost = NONE
        for staged, part in self._read(copy, start, stop, None, like=True):
            lost += _put(staged, _placed(block, part, start))
        return lost

    def _read(
        self, copy: Copy, start: int, stop: int, heard: _Heard | None, *, like: bool = False
    ) -> Iterator[tuple[Tensor, Copy]]:
        """The parts of a move that land in ``[start, stop)``, each with its elements as a view of the buffer."""
        checkpoint = self._like if like and self._like is not None else self._checkpoint
        dtype = checkpoint.tensors[copy.source].dtype
        width = dtype.itemsize
        most = self._staging.numel() // width
        for one in self._stored(copy, like=like):
            for wanted in within(one.copy, start, stop):
                for part in parts(wanted, width, most):
                    how = reading(part, width, most)
                    size, pitch = how.length * width, how.pitch * width
                    rows = self._rows(len(how.starts), size, pitch)
                    for begun, ended in how.calls():
                        one.file.read_rows(rows[begun:ended], one.extent.start + how.starts[begun] * width)
                    if heard is not None:
                        heard.hear(copy, self._view[:size])
                    if dtype == torch.bool:
                        _require_booleans(self._staging[: how.numel].view(-1, pitch)[:, :size], one.file, copy.source)
                    flat = self._staging[: how.numel * width].view(dtype)
                    yield flat.as_strided(part.sizes, how.strides), part


class _Heard:
    """Takes the digest of a source that is read from its first byte to its last while it is cast."""

    def __init__(self, recipe: Recipe, checkpoint: Checkpoint) -> None:
        self._name = ""
        self._state = xxhash.xxh3_128()
        if len(recipe.copies) == 1 and recipe.copies[0].contiguous:
            name = recipe.copies[0].source
            info, pieces = checkpoint.tensors[name], checkpoint.pieces(name)
            whole = info.nbytes == recipe.copies[0].numel * info.dtype.itemsize
            if whole and len(pieces) == 1 and pieces[0].extent.stride is None:
                self._name = name

    def hear(self, copy: Copy, raw: memoryview) -> None:
        if copy.source == self._name:
            self._state.update(raw)

    def digests(self) -> dict[str, str]:
        return {self._name: self._state.hexdigest()} if self._name else {}


class _Taken:
    """Gives out parts of a buffer, one after the other."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._end = 0

    def __call__(self, count: int, dtype: torch.dtype) -> Tensor:
        size = count * dtype.itemsize
        start, self._end = self._end, self._end + (size + 63) // 64 * 64
        return self._buffer[start : start + size].view(dtype)


def _placed(tensor: Tensor, part: Copy, start: int) -> Tensor:
    """Where a part lands in a block whose first element is ``start`` of the tensor."""
    return tensor.as_strided(part.sizes, part.target_strides, tensor.storage_offset() + part.target_offset - start)


def _put(values: Tensor, place: Tensor) -> Losses:
    """Move values to their place, cast to its dtype."""
    if values.dtype == place.dtype:
        raw = _RAW[values.dtype.itemsize]  # bits as they are: no dtype is too strange to be moved, and no NaN changes
        place.view(raw).copy_(values.view(raw))
        return NONE
    place.copy_(values)
    return losses(values, place) if can_lose(values.dtype, place.dtype) else NONE


def _put_all(values: Tensor, place: Tensor) -> Losses:
    """The same for whole blocks, in slices: counting takes memory of its own."""
    lost = NONE
    for start in range(0, values.numel(), SLICE):
        lost += _put(values[start : start + SLICE], place[start : start + SLICE])
    return lost


def _computed(recipe: Recipe, block: Tensor, sums: Tensor) -> Losses:
    """The result of a fold or a factor, computed in float64, into the block."""
    lost = _put_all(sums, block) if recipe.fold else NONE  # one rounding, that of the sum; then that of the product
    if recipe.factor is not None:
        sums.copy_(block)
        sums.div_(recipe.factor) if recipe.divide else sums.mul_(recipe.factor)
        lost += _put_all(sums, block)
    return lost


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    count = tensor.numel() * tensor.itemsize
    if count == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B")


def _read_back(descriptor: int, piece: memoryview, at: int) -> None:
    while piece:
        done = os.preadv(descriptor, [piece], at)
        if done == 0:
            raise OSError("what was written is not there")
        piece, at = piece[done:], at + done


def _require_booleans(raw: Tensor, file: LocalFile, name: str) -> None:
    if raw.numel() and int(raw.max()) > 1:
        message = f"tensor {name!r}: a boolean is stored as the byte {int(raw.max())}; only 0 and 1 are"
        hint = "the file is damaged: fetch it again"
        raise CheckpointError(Fault(code=Code.TENSOR_DAMAGED, where=file.where, message=message, hint=hint))
