"""Seeing that tensors which are left out equal what they are said to equal, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from porting.checkpoint import Checkpoint
from porting.converting.digests import PIECE
from porting.errors import Code, Fault
from porting.loading import same_bits
from porting.plan.plan import LeftOut, PlanError


def prove_same(pairs: Iterable[LeftOut], checkpoint: Checkpoint) -> None:
    """Compare each tensor with what it is said to equal, bit for bit.

    Raises:
        PlanError: some differ; carries all faults.
        CheckpointError: the checkpoint cannot be read.
    """
    buffers = memoryview(bytearray(PIECE)), memoryview(bytearray(PIECE))
    faults = []
    for pair in pairs:
        if any({pair.name, pair.equals} <= names for names in checkpoint.shared):
            continue
        if not _equal(pair, checkpoint, *buffers):
            message = f"was to be left out because it equals {pair.equals!r}, and it does not"
            tied = pair.equals in checkpoint.tensors
            hint = "a layout that ties them cannot hold this checkpoint" if tied else ""
            faults.append(Fault(code=Code.DROP_DIFFERS, where=pair.name, message=message, hint=hint))
    if faults:
        raise PlanError(faults)


def _equal(pair: LeftOut, checkpoint: Checkpoint, mine: memoryview, other: memoryview) -> bool:
    info = checkpoint.tensors[pair.name]
    file, extent = checkpoint.place(pair.name)
    if pair.equals not in checkpoint.tensors:
        return _generated(pair, checkpoint, mine)
    if (info.shape, info.dtype) != (checkpoint.tensors[pair.equals].shape, checkpoint.tensors[pair.equals].dtype):
        return False
    second, place = checkpoint.place(pair.equals)
    if extent.stride is not None or place.stride is not None:
        return same_bits(checkpoint.read(pair.name), checkpoint.read(pair.equals))
    for start, count in _pieces(info.nbytes):
        file.read_into(mine[:count], extent.start + start)
        second.read_into(other[:count], place.start + start)
        if mine[:count] != other[:count]:
            return False
    return True


def _generated(pair: LeftOut, checkpoint: Checkpoint, buffer: memoryview) -> bool:
    """Whether a tensor counts along its last axis, or is zero."""
    info = checkpoint.tensors[pair.name]
    file, extent = checkpoint.place(pair.name)
    last = info.shape[-1] if info.shape else 1
    if extent.stride is not None:
        numbers = torch.arange(last).to(info.dtype) if pair.equals == "arange" else torch.zeros(last, dtype=info.dtype)
        return same_bits(checkpoint.read(pair.name), numbers.expand(info.shape))
    width = info.dtype.itemsize
    for start, count in _pieces(info.nbytes):
        file.read_into(buffer[:count], extent.start + start)
        found = torch.frombuffer(buffer, dtype=torch.uint8, count=count)
        first, size = start // width, count // width
        numbers = torch.arange(first, first + size).remainder_(last) if pair.equals == "arange" else torch.zeros(size)
        if not torch.equal(found, numbers.to(info.dtype).view(torch.uint8)):
            return False
    return True


def _pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, nbytes, PIECE):
        yield start, min(PIECE, nbytes - start)
