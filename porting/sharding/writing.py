"""``export`` of a sharded module: each process writes the byte ranges of its own shards into files that all share.

The files follow the checkpoint that the module came from.  They are first made equal to it, each process copying its
share of the bytes; then each process puts the values of its shards in their places, through the table read from right
to left.  Nothing is gathered.  The directory appears when all have done their part, or not at all.

Each run of bytes is written by itself: a shared mapping would be quicker where runs are short, and wrong on a file
system of several machines.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from porting.checkpoint import Checkpoint
from porting.checkpoint.atomic import check_destination, new_directory, reserve, write_all
from porting.errors import Code, Fault
from porting.plan.align import Step
from porting.plan.clipping import clip
from porting.plan.copies import Copy
from porting.plan.plan import LeftOut, Plan
from porting.plan.recipe import Recipe, recipes
from porting.sharding.filling import compute_box
from porting.sharding.layout import Box, boxes, is_dtensor
from porting.sharding.ranges import Ranges, pieces, run_of
from porting.sharding.together import Crew
from porting.target import TargetError, named_tensors

PIECE = 1 << 20
"""Bytes that are copied, or laid out for the file, at a time."""


def write_shards(
    module: nn.Module,
    plan: Plan,
    checkpoint: Checkpoint,
    left_out: Iterable[LeftOut],
    files: Mapping[str, bytes | Path],
    path: Path,
    *,
    overwrite: bool,
    sources: Iterable[Path],
) -> tuple[str, ...]:
    """Write the directory; called by every process.

    Args:
        module: the sharded module.
        plan: the checkpoint held against it.
        checkpoint: the checkpoint that is followed, of safetensors.
        left_out: its tensors that the module does not hold.
        files: what stands beside the weights.
        path: the directory to be made, on a file system that all processes share.
        overwrite, sources: as of :func:`porting.checkpoint.write_directory`.

    Returns:
        The names of the files.

    Raises:
        CheckpointError: the destination is refused, or this process could not write.
        RankError: another process could not.
        TargetError: the module has values of another dtype than the checkpoint.
    """
    crew = Crew(str(path), "nothing was written")
    names = _names(checkpoint)
    with ExitStack() as stack:
        temporary = Path()
        with crew.step():
            _require_same_dtypes(module, plan)
            if crew.rank == 0:
                check_destination(path, overwrite=overwrite, sources=list(sources))
                needed = sum(file.size for file in checkpoint.files)
                temporary = stack.enter_context(new_directory(path, needed=needed, overwrite=overwrite))
                _begin(temporary, checkpoint, names, files)
        temporary = crew.gather(temporary)[0]
        with crew.step():
            for old, new in names.items():
                _copy_share(checkpoint, old, temporary / new, crew)
        with crew.step():
            changed = _changed_steps(module, plan, checkpoint)
        changed = set().union(*crew.gather(changed))
        copies = {left.equals: left.name for left in left_out if left.equals}
        with crew.step(), Places(checkpoint, temporary, names) as places:
            for number, step in enumerate(plan.steps):
                if number in changed or (not step.rule.fold and step.rule.scale is None):
                    _put(step, plan, module, places, copies, crew)
        with crew.step():
            stack.close()
    return tuple(sorted({*files, *names.values()}))


def _names(checkpoint: Checkpoint) -> dict[str, str]:
    """The checkpoint's files of weights, and what they are called in the new directory."""
    if checkpoint.index_file is None:
        return {file.name: "model.safetensors" for file in checkpoint.files}
    return {file.name: file.name for file in checkpoint.files}


def _require_same_dtypes(module: nn.Module, plan: Plan) -> None:
    tensors = dict(named_tensors(module))
    faults = []
    for step in plan.steps:
        for name in step.targets:
            dtypes = {plan.sources[one].dtype for one in step.sources}
            if dtypes != {tensors[name].dtype} or tensors[name].is_meta:
                what = "is on the meta device" if tensors[name].is_meta else f"is {tensors[name].dtype} in the module"
                message = f"it {what}, and {' and '.join(sorted(map(str, dtypes)))} in the checkpoint"
                hint = "shards are written in the checkpoint's dtype: gather the module to write another"
                fault = Fault(code=Code.DTYPE_CHANGE, where=name, message=message.replace("torch.", ""), hint=hint)
                faults.append(fault)
    if faults:
        raise TargetError(faults)


def _begin(
    temporary: Path, checkpoint: Checkpoint, names: Mapping[str, str], files: Mapping[str, bytes | Path]
) -> None:
    """The files beside the weights, and room for the weights."""
    for name, content in files.items():
        raw = content if isinstance(content, bytes) else content.read_bytes()
        with (temporary / name).open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
    for old in checkpoint.files:
        descriptor = os.open(temporary / names[old.name], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            reserve(descriptor, old.size)
            os.ftruncate(descriptor, old.size)
        finally:
            os.close(descriptor)


def _copy_share(checkpoint: Checkpoint, old: str, new: Path, crew: Crew) -> None:
    """This process's share of a file's bytes, as they are."""
    source = checkpoint.file(old)
    each = -(-source.size // crew.count)
    start, stop = min(crew.rank * each, source.size), min((crew.rank + 1) * each, source.size)
    descriptor = os.open(new, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.lseek(descriptor, start, os.SEEK_SET)
        for at in range(start, stop, PIECE):
            write_all(descriptor, source.pread(at, min(PIECE, stop - at)))
        source.require_unchanged()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _changed_steps(module: nn.Module, plan: Plan, checkpoint: Checkpoint) -> set[int]:
    """Sums and factors, which cannot be undone exactly, whose values here are not those that were loaded."""
    tensors = dict(named_tensors(module))
    reader = Ranges(checkpoint)
    changed = set()
    for number, step in enumerate(plan.steps):
        if not step.rule.fold and step.rule.scale is None:
            continue
        for recipe in recipes(step, plan.sources, plan.targets, plan.scale(step)):
            for box, held in _held(recipe, tensors[recipe.name]):
                loaded = compute_box(recipe, box, recipe.dtype, reader)
                if not torch.equal(held.view(-1).view(torch.uint8), loaded.reshape(-1).view(torch.uint8)):
                    changed.add(number)
    return changed


def _held(recipe: Recipe, tensor: Tensor) -> Iterable[tuple[Box, Tensor]]:
    local = tensor.detach().to_local() if is_dtensor(tensor) else tensor.detach()  # type: ignore[attr-defined]  # a DTensor has it
    for box in boxes(tensor, name=recipe.name):
        place = tuple(slice(low, low + size) for low, size in zip(box.local, box.sizes, strict=True))
        yield box, local[place].cpu().contiguous()


def _put(step: Step, plan: Plan, module: nn.Module, places: Places, copies: Mapping[str, str], crew: Crew) -> None:
    """The values of a step's targets into the places of its sources; in a fold the first gets all, the others zeros."""
    tensors = dict(named_tensors(module))
    scale = plan.scale(step)
    for recipe in recipes(step, plan.sources, plan.targets, None):
        if step.rule.fold and crew.rank == 0:
            for copy in recipe.copies:
                if copy.source != step.sources[0]:
                    places.clear(copy)
        if not _writes(tensors[recipe.name], crew):
            continue
        for box, held in _held(recipe, tensors[recipe.name]):
            values = held if scale is None else (held.double() / scale).to(held.dtype)
            for copy in recipe.copies:
                if step.rule.fold and copy.source != step.sources[0]:
                    continue
                for part in clip(copy, recipe.shape, box.starts, box.sizes):
                    places.put(part, values.view(-1))
                    if copy.source in copies:
                        places.put(part, values.view(-1), name=copies[copy.source])


def _writes(tensor: Tensor, crew: Crew) -> bool:
    """Whether this process is the one, of those that hold the same elements, that writes them."""
    if not is_dtensor(tensor):
        return crew.rank == 0
    coordinate = tensor.device_mesh.get_coordinate()  # type: ignore[attr-defined]  # a DTensor has it
    placements = tensor.placements  # type: ignore[attr-defined]  # as above
    return all(place == 0 for place, one in zip(coordinate, placements, strict=True) if one.is_replicate())


class Places:
    """Where each tensor of the checkpoint lies in the new files."""

    def __init__(self, checkpoint: Checkpoint, folder: Path, names: Mapping[str, str]) -> None:
        self.checkpoint = checkpoint
        self._folder = folder
        self._names = names
        self._open: dict[str, int] = {}

    def __enter__(self) -> Places:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.fsync(descriptor)
            os.close(descriptor)

    def put(self, copy: Copy, values: Tensor, *, name: str = "") -> None:
        """Write what a move would read.

        Args:
            copy: the move.
            values: its target's elements in a row.
            name: the tensor to write to, in place of the move's source.
        """
        for part in pieces(copy, max(PIECE // values.itemsize, 1)):
            self._put(part, values.as_strided(part.sizes, part.target_strides, part.target_offset), name or copy.source)

    def clear(self, copy: Copy) -> None:
        """Write zeros over what a move reads."""
        kept = [place for place, step in enumerate(copy.source_strides) if step]
        sizes = tuple(copy.sizes[place] for place in kept)
        strides = tuple(copy.source_strides[place] for place in kept)
        dense = tuple(math.prod(sizes[place + 1 :]) for place in range(len(sizes)))
        zeros = torch.zeros(math.prod(sizes), dtype=self.checkpoint.tensors[copy.source].dtype)
        self.put(Copy(copy.source, "", sizes, copy.source_offset, strides, 0, dense), zeros)

    def _put(self, part: Copy, values: Tensor, name: str) -> None:
        (piece,) = self.checkpoint.pieces(name)
        inner, outer = run_of(part)
        length = math.prod(part.sizes[place] for place in inner)
        ordered = values.permute([*outer, *inner]).contiguous()
        raw = memoryview((ctypes.c_char * ordered.nbytes).from_address(ordered.data_ptr())).cast("B")
        descriptor = self._descriptor(name)
        for number, place in enumerate(product(*(range(part.sizes[one]) for one in outer))):
            at = part.source_offset + sum(
                step * part.source_strides[one] for step, one in zip(place, outer, strict=True)
            )
            begin = number * length * values.itemsize
            view, where = raw[begin : begin + length * values.itemsize], piece.extent.start + at * values.itemsize
            while view:
                written = os.pwrite(descriptor, view, where)
                view, where = view[written:], where + written

    def _descriptor(self, name: str) -> int:
        file = self._names[self.checkpoint.tensors[name].file]
        if file not in self._open:
            self._open[file] = os.open(self._folder / file, os.O_RDWR | os.O_CLOEXEC)
        return self._open[file]
