"""The output's files before any tensor is made: who lies where.  Headers and index follow from the recipes alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from porting.checkpoint.header import Header, new_header
from porting.checkpoint.names import SAFETENSORS, SAFETENSORS_INDEX
from porting.converting.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of weights.

    Attributes:
        name: its name.
        header: what it begins with.
        recipes: its tensors, in the order in which the header lists them.
    """

    name: str
    header: Header
    recipes: tuple[Recipe, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Recipe]:
        """Its tensors by name."""
        return {one.name: one for one in self.recipes}

    def offset(self, name: str) -> int:
        """The place of a tensor's first byte in the file."""
        return len(self.header.prefix) + self.header.offsets[name]


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
        return sum(shard.header.size for shard in self.shards) + (len(self.index[1]) if self.index else 0)


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
    groups: list[list[Recipe]] = [[]]
    filled = 0
    for one in recipes:
        if groups[-1] and shard_size is not None and filled + one.nbytes > shard_size:
            groups.append([])
            filled = 0
        groups[-1].append(one)
        filled += one.nbytes
    count = len(groups)
    names = [SAFETENSORS] if count == 1 else [f"model-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]
    shards = tuple(
        Shard(
            name=name,
            header=new_header({one.name: one for one in group}, metadata, where=f"{where}/{name}"),
            recipes=tuple(group),
        )
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
