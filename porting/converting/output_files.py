"""The output's files before any tensor is made: who lies where.  Headers and index follow from the recipes alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from porting.checkpoint.names import SAFETENSORS, SAFETENSORS_INDEX
from porting.checkpoint.safetensors_file import Header, new_header
from porting.plan.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of weights.

    Attributes:
        name: its name.
        size: its bytes.
        frame: what stands around the tensors, each piece with its place.
        offsets: the place of each tensor's first byte, in the order of the data.
        recipes: its tensors, in the order in which they are listed.
        seals: places at which the CRC-32 of a tensor's bytes is written once it is known.
        ranges: of a distributed checkpoint, the place and the length of what holds a tensor.
    """

    name: str
    size: int
    frame: tuple[tuple[int, bytes], ...] = field(repr=False)
    offsets: Mapping[str, int]
    recipes: tuple[Recipe, ...]
    seals: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @cached_property
    def by_name(self) -> Mapping[str, Recipe]:
        """Its tensors by name."""
        return {one.name: one for one in self.recipes}


@dataclass(frozen=True, kw_only=True)
class Outline:
    """All files of weights, and their index when there are several.

    Attributes:
        shards: the files.
        index: name and bytes of the index; None for a single file.
    """

    shards: tuple[Shard, ...]
    index: tuple[str, bytes] | None

    @property
    def size(self) -> int:
        """Bytes of all of it."""
        return sum(shard.size for shard in self.shards) + (len(self.index[1]) if self.index else 0)


def outline(
    recipes: Sequence[Recipe],
    metadata: Mapping[str, str],
    *,
    shard_size: int | None,
    where: str,
) -> Outline:
    """Divide tensors among files.

    Args:
        recipes: the tensors, in their order.
        metadata: strings for each file's header.
        shard_size: bytes of tensors that one file may hold; a larger tensor has a file of its own.  None for one file.
        where: the destination, for messages.

    Raises:
        CheckpointError: a name cannot be written.
    """
    groups = divided(recipes, shard_size)
    count = len(groups)
    names = [SAFETENSORS] if count == 1 else [f"model-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]
    shards = tuple(
        _shard(name, group, new_header({one.name: one for one in group}, metadata, where=f"{where}/{name}"))
        for name, group in zip(names, groups, strict=True)
    )
    if count == 1:
        return Outline(shards=shards, index=None)
    content = {
        "metadata": {"total_size": sum(one.nbytes for one in recipes)},
        "weight_map": {one.name: shard.name for shard in shards for one in shard.recipes},
    }
    raw = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
    return Outline(shards=shards, index=(SAFETENSORS_INDEX, raw))


def divided(recipes: Sequence[Recipe], shard_size: int | None) -> list[list[Recipe]]:
    """Tensors in groups of at most ``shard_size`` bytes; a larger one is a group of its own."""
    groups: list[list[Recipe]] = [[]]
    filled = 0
    for one in recipes:
        if groups[-1] and shard_size is not None and filled + one.nbytes > shard_size:
            groups.append([])
            filled = 0
        groups[-1].append(one)
        filled += one.nbytes
    return groups


def _shard(name: str, group: Sequence[Recipe], header: Header) -> Shard:
    data = len(header.prefix)
    offsets = {tensor: data + offset for tensor, offset in header.offsets.items()}
    return Shard(name=name, size=header.size, frame=((0, header.prefix),), offsets=offsets, recipes=tuple(group))
