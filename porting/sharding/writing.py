"""``export`` of a sharded module: each process writes the ranges of its own shards into shared files.

The files are those that one process would write.  Where they are the followed checkpoint's own, they are first made
equal to it, each process copying its share of the bytes; else each process lays its share of what the module does not
hold into its place.  Then each puts the values of its shards in their places, through the table read from right to
left.  Nothing is gathered.  The directory appears when all have done their part, or not at all.
"""

from __future__ import annotations

import math
import os
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from porting.atomic import check_destination, new_directory, read_back, refused, reserve, write_all, write_at
from porting.checkpoint import Checkpoint, TensorFile
from porting.checkpoint.container import Shard
from porting.checkpoint.write import shard_around
from porting.converting.processes import Processes
from porting.errors import Code, Fault, alike
from porting.export_files import LARGEST
from porting.opening import Folder, Member
from porting.ops import Content, InexactError
from porting.plan.align import Step
from porting.plan.copies import Copy, clip, window
from porting.plan.leftovers import differs
from porting.plan.move import inexact
from porting.plan.plan import MADE, LeftOut, Plan, PlanError
from porting.plan.recipe import Recipe, forward_recipes
from porting.printable import dtype_name, quote
from porting.sharding.filling import compute_box
from porting.sharding.layout import Box, boxes, is_dtensor, is_first
from porting.staging import PIECE, MoveReader, bytes_of
from porting.target import TargetError, named_tensors


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


def write_shards(
    module: nn.Module,
    plan: Plan,
    checkpoint: Checkpoint,
    left_out: Iterable[LeftOut],
    weights: Mapping[str, TensorFile],
    files: Mapping[str, bytes | Member],
    path: Path,
    *,
    overwrite: bool,
    sources: Iterable[Path],
) -> tuple[tuple[str, ...], Mapping[str, int]]:
    """Write the directory; called by every process.

    Args:
        plan: how the checkpoint maps to it.
        left_out: its tensors that the module does not hold.
        weights: the files of weights, of tensors without values.
        files: what stands beside the weights.
        path: the directory to be made, on a file system that all processes share.

    Returns:
        The names of the files; and for each tensor in which finite values became infinite, how many.
    """
    processes = Processes(str(path), "nothing was written")
    with ExitStack() as stack:
        made: Folder | None = None
        with processes.step():
            _require_values(module, plan)
            require_made(module, plan)
            placed = layout(weights)
            if processes.rank == 0:
                check_destination(path, overwrite=overwrite, sources=list(sources))
                needed = sum(shard.size for shard in placed.shards.values())
                made = stack.enter_context(new_directory(path, needed=needed, overwrite=overwrite))
                _prepare_files(made, placed, files)
        name, inode = processes.gather(_identity(made))[0]
        with processes.step():
            temporary = made or Folder(path.parent / name, inside=Folder(path.parent))
            if _identity(temporary)[1] != inode:
                hint = "choose a destination in a directory that only you can write to"
                raise refused(path, f"lies in a directory in which another one took the place of {quote(name)}", hint)
            changed = _changed_steps(module, plan, checkpoint)
        changed = set().union(*processes.gather(changed))
        with processes.step():
            _require_kept(plan, changed)
        alone = frozenset(range(len(plan.steps))) - _repeated(plan)
        steps = [
            step for number, step in enumerate(plan.steps) if number in changed or (step.rule.exact and number in alone)
        ]
        copies = {left.equals: left.name for left in left_out if left.equals}
        with processes.step(), Places(placed, temporary) as places:
            kept = all(plan.sources[name].dtype == dtype for name, dtype in moved_dtypes(module, plan).items())
            if placed.same and kept:  # loading rounded nothing
                for old, new in zip(checkpoint.files, placed.shards, strict=True):
                    _copy_share(checkpoint, old.name, temporary, new, processes)
            else:
                _copy_unreplaced(checkpoint, module, plan, steps, copies, places, processes)
        infinite = places.infinite
        with processes.step(), Places(placed, temporary) as places:
            for step in steps:
                _write_step(step, plan, module, places, copies, processes)
        with processes.step(), Places(placed, temporary) as sealing:
            sealing.seal(processes.rank, processes.count)
        with processes.step():
            stack.close()
    total = sum(processes.gather(infinite + places.infinite), start=Counter[str]())
    return tuple(sorted({*files, *placed.shards})), dict(total)


def _identity(folder: Folder | None) -> tuple[str, int]:
    """The name of a directory, and its inode, which is the same on all machines that share it."""
    return ("", 0) if folder is None else (folder.path.name, os.fstat(folder.descriptor).st_ino)


def _require_values(module: nn.Module, plan: Plan) -> None:
    tensors = dict(named_tensors(module))
    faults = []
    for step in plan.steps:
        for name in step.targets:
            if tensors[name].is_meta:
                message, hint = "it is on the meta device and has no values", "load or initialise the module first"
                faults.append(Fault(code=Code.DTYPE_CHANGE, where=name, message=message, hint=hint))
        dtypes = {dtype_name(tensors[name].dtype) for name in step.targets}
        if len(dtypes) > 1:
            message = f"the module has {' and '.join(sorted(dtypes))} for '{step.rule}'"
            hint = "one rule makes one tensor of them: give them one dtype first"
            faults.append(Fault(code=Code.DTYPE_CHANGE, where=step.rule.where, message=message, hint=hint))
    if faults:
        raise TargetError(faults)


def _repeated(plan: Plan) -> frozenset[int]:
    """The steps that read what others read as well, so that the way back compares the module's tensors."""
    numbers: dict[str, list[int]] = {}
    for number, step in enumerate(plan.steps):
        for name in () if step.rule.fold else step.sources:
            numbers.setdefault(name, []).append(number)
    return frozenset(number for same in numbers.values() if len(same) > 1 for number in same)


def _require_kept(plan: Plan, changed: Collection[int]) -> None:
    """Raises: TargetError for values that were changed where the way back takes whole tensors."""
    faults = []
    repeated = _repeated(plan)
    for number in sorted(changed):
        step = plan.steps[number]
        if step.layout is not None or number in repeated:
            message = f"{step.targets[0]!r} was changed, and undoing '{step.rule}' takes whole tensors"
            hint = "gather the module into a whole one, and export that"
            faults.append(Fault(code=Code.BAD_TARGET, where=step.rule.where, message=message, hint=hint))
    if faults:
        raise TargetError(alike(faults))


def require_made(module: nn.Module, plan: Plan) -> None:
    """Require that a module has the content that [make] states, in this process's part."""
    tensors = dict(named_tensors(module))
    others = (recipe for recipe in plan.made if not _has_made_content(recipe, tensors))
    faults = [differs(LeftOut(name=recipe.name, reason=MADE, equals=recipe.made_as), ()) for recipe in others]
    if faults:
        raise PlanError(alike(faults))


def _has_made_content(recipe: Recipe, tensors: Mapping[str, Tensor]) -> bool:
    """Whether this process's part of a tensor has the content that [make] states."""
    tensor = tensors[recipe.name]
    if recipe.equals:
        pair = (tensor.detach(), tensors[recipe.equals].detach())
        whole = [tensor.full_tensor() if is_dtensor(tensor) else tensor for tensor in pair]  # type: ignore[attr-defined]  # as below
        return torch.equal(*whole)
    content = recipe.content or Content()
    parts = _local_boxes(recipe, tensor)
    made = ((values, content.box(box.starts, box.sizes, recipe.shape)) for box, values in parts)
    return all(content.held_by(values, expected, rounded=True) for values, expected in made)


def moved_dtypes(module: nn.Module, plan: Plan) -> dict[str, torch.dtype]:
    """The dtype of the module's tensor that each source is moved to; a formula's sources may be of several."""
    tensors = dict(named_tensors(module))
    moved = [step for step in plan.steps if step.layout is None]
    return {name: tensors[step.targets[0]].dtype for step in moved for name in step.sources}


def _prepare_files(temporary: Folder, placed: Layout, files: Mapping[str, bytes | Member]) -> None:
    """Write the files beside the weights, and the headers of the weights; reserve the space for these."""
    for name, content in files.items():
        raw = content if isinstance(content, bytes) else content.read(limit=LARGEST)
        with _written(temporary, name) as descriptor:
            write_all(descriptor, raw)
    for name, shard in placed.shards.items():
        with _written(temporary, name) as descriptor:
            reserve(descriptor, shard.size)
            os.ftruncate(descriptor, shard.size)
            for at, raw in shard.frame:
                os.lseek(descriptor, at, os.SEEK_SET)
                write_all(descriptor, raw)


@contextmanager
def _written(folder: Folder, name: str) -> Iterator[int]:
    """A file that is written, and is on the disk at the end."""
    descriptor = folder.write(name)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _copy_share(checkpoint: Checkpoint, old: str, folder: Folder, new: str, processes: Processes) -> None:
    """Copy this process's share of a file's bytes."""
    source = checkpoint.file(old)
    each = -(-source.size // processes.count)
    start, stop = min(processes.rank * each, source.size), min((processes.rank + 1) * each, source.size)
    with _written(folder, new) as descriptor:
        os.lseek(descriptor, start, os.SEEK_SET)
        for at in range(start, stop, PIECE):
            write_all(descriptor, source.pread(at, min(PIECE, stop - at)))
        source.require_unchanged()


def _copy_unreplaced(
    checkpoint: Checkpoint,
    module: nn.Module,
    plan: Plan,
    steps: Iterable[Step],
    copies: Mapping[str, str],
    places: Places,
    processes: Processes,
) -> None:
    """Copy this process's share of the checkpoint's elements that no value of the module replaces."""
    dtypes = moved_dtypes(module, plan)
    written: dict[str, list[Copy]] = {}
    for step in steps:
        for copy in step.copies:
            written.setdefault(copy.source, []).append(copy.written_back)
    for name, other in copies.items():
        if name in written:
            written[other], dtypes[other] = written[name], dtypes[name]
    reader = MoveReader(checkpoint, sparing=True)
    for name, info in checkpoint.tensors.items():
        numel = math.prod(info.shape)
        each = -(-numel // processes.count)
        step_size = max(PIECE // info.dtype.itemsize, 1)
        for start in range(min(processes.rank * each, numel), min((processes.rank + 1) * each, numel), step_size):
            stop = min(start + step_size, (processes.rank + 1) * each, numel)
            kept = torch.ones(stop - start, dtype=torch.bool)
            for copy in written.get(name, ()):
                for part in window(copy, start, stop):
                    kept.as_strided(part.sizes, part.target_strides, part.target_offset).fill_(value=False)
            if not kept.any():
                continue
            values = reader.row(name, start, stop)
            if name in dtypes and values.is_floating_point():
                values = values.to(dtypes[name])  # as the module had it, when it was loaded in another dtype
            places.put(Copy(name, "", (stop - start,), start, (1,), 0, (1,)), values, counted=kept)


def _changed_steps(module: nn.Module, plan: Plan, checkpoint: Checkpoint) -> set[int]:
    """The steps that cannot be undone here by themselves, and whose values here have changed since they were loaded."""
    tensors = dict(named_tensors(module))
    reader = MoveReader(checkpoint, sparing=True)
    repeated = _repeated(plan)
    changed = set()
    for number, step in enumerate(plan.steps):
        if step.rule.exact and number not in repeated:
            continue
        for recipe in forward_recipes(step, plan.sources, plan.targets, plan.arithmetic(step)):
            for box, values in _local_boxes(recipe, tensors[recipe.name]):
                loaded = compute_box(recipe, box, reader).to(values.dtype)
                if not torch.equal(values.view(-1).view(torch.uint8), loaded.reshape(-1).view(torch.uint8)):
                    changed.add(number)
    return changed


def _local_boxes(recipe: Recipe, tensor: Tensor) -> Iterable[tuple[Box, Tensor]]:
    local = tensor.detach().to_local() if is_dtensor(tensor) else tensor.detach()  # type: ignore[attr-defined]  # a DTensor has it
    for box in boxes(tensor, name=recipe.name):
        place = tuple(slice(low, low + size) for low, size in zip(box.local, box.sizes, strict=True))
        yield box, local[place].cpu().contiguous()


def _write_step(
    step: Step, plan: Plan, module: nn.Module, places: Places, copies: Mapping[str, str], processes: Processes
) -> None:
    """Write the values of a step's targets, arithmetic undone, to the places of its sources, or zeros."""
    tensors = dict(named_tensors(module))
    arithmetic = plan.arithmetic(step)
    returned = {name for number, name in enumerate(step.sources) if arithmetic.returns_to(number)}
    for recipe in forward_recipes(step, plan.sources, plan.targets, arithmetic):
        kept = [copy for copy in recipe.copies if copy.source in returned]
        if processes.rank == 0:
            for copy in recipe.copies:
                if copy.source not in returned:
                    places.clear(copy)
        if not is_first(tensors[recipe.name], processes.rank):
            continue
        for box, local in _local_boxes(recipe, tensors[recipe.name]):
            try:
                values = arithmetic.inverse.applied(local).view(-1)
            except InexactError as error:
                raise inexact(recipe.name, arithmetic, error) from error
            for copy in kept:
                for part in clip(copy, recipe.shape, box.starts, box.sizes):
                    places.put(part, values)
                    if copy.source in copies:
                        places.put(part, values, name=copies[copy.source])
