"""``load`` into sharded modules: the plan, restricted to the boxes that this process holds.

A rule is a set of moves between boxes, and a shard is a box, so that what a process needs of the checkpoint follows by
arithmetic: through renames, transpositions, fusions, folds.  No process holds a whole tensor that is not whole in its
module, and nothing goes from one process to another but the news that something is wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from porting.checkpoint import Checkpoint
from porting.errors import Code, Fault, alike
from porting.ops import Content
from porting.plan.leftovers import copies_differ, differs
from porting.plan.move import Window, compute
from porting.plan.plan import LeftOut, Plan, PlanError
from porting.plan.recipe import Described, Recipe, forward_recipes
from porting.plan.scan import may_lose, not_finite
from porting.sharding.layout import Box, boxes, is_dtensor, is_first
from porting.staging import PIECE, MoveReader
from porting.target import TargetError, assign, named_tensors


@dataclass(frozen=True, kw_only=True)
class Filled:
    """The values that this process read for a module.

    Attributes:
        values: its part of each target tensor, by name, not in the module yet.
        nbytes: the bytes that it read.
        not_finite: for each step that casts or computes, by its number in the plan, how many of its elements here are
            NaN or infinite; of replicas, those of one process.
        lost: by the first target of a step, how many of its finite values became infinite or NaN, in all processes.
    """

    values: Mapping[str, Tensor]
    nbytes: int
    not_finite: Mapping[int, int] = field(default_factory=dict)
    lost: Mapping[str, int] = field(default_factory=dict)

    def put(self, module: nn.Module) -> None:
        """Put the values into the module: into the memory of shards that have some, in place of those on meta."""
        tensors = dict(named_tensors(module))
        kept = {
            name: value
            for name, value in self.values.items()
            if is_dtensor(tensors[name]) and not tensors[name].is_meta
        }
        others = {name: value for name, value in self.values.items() if name not in kept}
        for name, value in others.items():
            if is_dtensor(tensors[name]):
                others[name] = _as_shard(value, tensors[name])
        assign(module, others)
        with torch.no_grad():
            for name, value in kept.items():
                tensors[name].to_local().copy_(value)  # type: ignore[attr-defined]  # a DTensor has it


def is_sharded(module: nn.Module) -> bool:
    """Whether some of the module's tensors are spread over a mesh of processes."""
    return any(is_dtensor(tensor) for _, tensor in named_tensors(module))


def fill(plan: Plan, checkpoint: Checkpoint, module: nn.Module, rank: int = 0) -> Filled:
    """Read this process's part of the targets; the module is not changed yet."""
    tensors = dict(named_tensors(module))
    reader = MoveReader(checkpoint, sparing=True)
    values: dict[str, Tensor] = {}
    faults: list[Fault] = []
    counts = Counter[int]()
    for number, step in enumerate(plan.steps):
        counted = may_lose(step, plan)
        for recipe in forward_recipes(step, plan.sources, plan.targets, plan.arithmetic(step), plan.dtype):
            target, dtype = tensors[recipe.name], recipe.dtype
            if is_dtensor(target) and not target.is_meta and target.dtype != dtype:
                message = f"its shards hold {target.dtype}, and {dtype} is to be loaded".replace("torch.", "")
                hint = "cast the module before it is sharded, or load it on the meta device"
                faults.append(Fault(code=Code.DTYPE_CHANGE, where=recipe.name, message=message, hint=hint))
                continue
            values[recipe.name] = _part(recipe, target, reader)
            if counted and is_first(target, rank):
                counts[number] += not_finite(values[recipe.name])
    values |= {recipe.name: _part(recipe, tensors[recipe.name], reader) for recipe in plan.made}
    if faults:
        raise TargetError(faults)
    return Filled(
        values=values, nbytes=reader.nbytes, not_finite={one: count for one, count in counts.items() if count}
    )


def stored_not_finite(
    plan: Plan, checkpoint: Checkpoint, steps: Iterable[int], rank: int, count: int
) -> tuple[Counter[int], int]:
    """How many elements of the sources of steps are NaN or infinite in the checkpoint, and how many bytes were read.

    Args:
        rank, count: which of how many processes this is; each counts a share of every tensor.
    """
    reader = MoveReader(checkpoint, sparing=True)
    found = Counter[int]()
    for number in steps:
        for name in dict.fromkeys(plan.steps[number].sources):
            for start, stop in _share(checkpoint.tensors[name], rank, count):
                found[number] += not_finite(reader.row(name, start, stop))
    return found, reader.nbytes


def _share(info: Described, rank: int, count: int) -> Iterator[tuple[int, int]]:
    """The elements of a tensor that are the ``rank``-th of ``count`` shares, in pieces that fit into memory."""
    numel = math.prod(info.shape)
    each, step = -(-numel // count), max(PIECE // info.dtype.itemsize, 1)
    for start in range(min(rank * each, numel), min((rank + 1) * each, numel), step):
        yield start, min(start + step, (rank + 1) * each, numel)


def _part(recipe: Recipe, target: Tensor, reader: MoveReader) -> Tensor:
    """This process's part of a tensor."""
    shape = tuple(target.to_local().shape) if is_dtensor(target) else tuple(target.shape)  # type: ignore[attr-defined]  # a DTensor has it
    found = torch.empty(shape, dtype=recipe.dtype)
    for box in boxes(target, name=recipe.name):
        place = tuple(slice(low, low + size) for low, size in zip(box.local, box.sizes, strict=True))
        found[place] = compute_box(recipe, box, reader)
    return found


def compute_box(recipe: Recipe, box: Box, reader: MoveReader) -> Tensor:
    """Compute the elements of a box of a tensor."""
    return compute(recipe, Window(recipe.shape, box.starts, box.sizes), reader.read).view(box.sizes)


def _as_shard(value: Tensor, target: Tensor) -> Tensor:
    """A DTensor with the mesh and placements of one on the meta device."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  # whoever has such tensors has imported it

    if not isinstance(target, DTensor):
        return value
    mesh = target.device_mesh
    return DTensor.from_local(
        value.to(mesh.device_type), mesh, target.placements, run_check=False, shape=target.shape, stride=target.stride()
    )


# ------------------------------------------------------------------------------------------------- what was left out


def unequal(
    pairs: Iterable[LeftOut], checkpoint: Checkpoint, rank: int = 0, count: int = 1
) -> tuple[list[LeftOut], int]:
    """The tensors that are left out because they equal another, or what the table says, and do not, bit for bit.

    Args:
        pairs: tensors that are left out, each with what it equals; those that equal nothing are none.
        rank, count: which of how many processes this is; each compares a share of every tensor.

    Returns:
        Those of which this share differs, and how many bytes were read.
    """
    reader = MoveReader(checkpoint, sparing=True)
    apart = (left for left in pairs if not any({left.name, left.equals} <= names for names in checkpoint.shared))
    return [left for left in apart if left.equals and not _equal(left, reader, rank, count)], reader.nbytes


def require_same(pairs: Iterable[tuple[Recipe, Recipe]], checkpoint: Checkpoint) -> None:
    """Require that tensors which a checkpoint in the port's layout holds several times are the same, bit for bit."""
    reader = MoveReader(checkpoint, sparing=True)
    faults = [
        copies_differ(one.name, one.sources, other.sources) for one, other in pairs if not _alike(one, other, reader)
    ]
    if faults:
        raise PlanError(alike(faults))


def _alike(one: Recipe, other: Recipe, reader: MoveReader) -> bool:
    """Whether two recipes of a tensor give the same, as far as what they read goes."""
    if one.dtype != other.dtype:
        return False
    step = max(PIECE // one.dtype.itemsize, 1)
    rows = [(start, min(start + step, one.numel)) for start in range(0, one.numel, step)]
    if one.applied is not None:
        rows = list(one.applied.parts(PIECE))
    pair = [replace(recipe, base="", fill=recipe.fill or 0.0) for recipe in (one, other)]

    def raw(recipe: Recipe, start: int, stop: int) -> Tensor:
        return compute(recipe, Window.of_row(start, stop), reader.read).view(torch.uint8)

    return all(torch.equal(*(raw(recipe, start, stop) for recipe in pair)) for start, stop in rows)


def require_equal(found: Iterable[LeftOut], tensors: Mapping[str, Described]) -> None:
    """Raises: PlanError for tensors that were found to be different from what they should equal."""
    faults = [differs(left, tensors) for left in dict.fromkeys(found)]
    if faults:
        raise PlanError(alike(faults))


def _equal(left: LeftOut, reader: MoveReader, rank: int, count: int) -> bool:
    """Whether the ``rank``-th of ``count`` shares of a tensor is what the table says of it."""
    tensors = reader.checkpoint.tensors
    info, other = tensors[left.name], tensors.get(left.equals)
    if other is not None and (info.shape, info.dtype) != (other.shape, other.dtype):
        return False
    content = Content.parse(left.equals) if other is None else None
    for start, stop in _share(info, rank, count):
        values = reader.row(left.name, start, stop)
        if content is not None:
            same = content.held_by(values, content.row(info.shape, start, stop), rounded=left.made)
        else:
            same = torch.equal(values.view(torch.uint8), reader.row(left.equals, start, stop).view(torch.uint8))
        if not same:
            return False
    return True
