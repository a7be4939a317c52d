"""Sharded checkpoints as a container: an index and the shards that it names.

Only what the index names is opened.  Shards that an older save left behind are not looked for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from porting.checkpoint.bin_file import Bin
from porting.checkpoint.container import Container, Found, Place, open_all, open_each
from porting.checkpoint.errors import checkpoint_error
from porting.checkpoint.files import ByteSource
from porting.checkpoint.index import INDEX, MAX_INDEX, WRITE_AGAIN, ShardIndex, parse_index
from porting.checkpoint.layout import Contents
from porting.checkpoint.safetensors_file import Safetensors
from porting.errors import Code

SHARDS: Mapping[str, Container] = {container.endings[0]: container for container in (Safetensors(), Bin())}
"""The containers of shards, by the endings of :data:`~porting.checkpoint.index.SHARD_ENDINGS`."""


class ShardedIndex(Container):
    """An index and the shards that it names.

    Args:
        of: what its shards usually are; its name is that of their single file with an ending behind.
    """

    name = "index"
    title = "an index of shards"

    def __init__(self, of: Container) -> None:
        self.endings = (f"{of.endings[0]}{INDEX}",)
        self.main = f"{of.main}{INDEX}"
        self.also = tuple(f"{name}{INDEX}" for name in of.also)
        self.single = of.main
        self.promises = of.promises

    def read(self, source: ByteSource, *, name: str, locate: bool = True) -> Contents:
        """Refuse: an index holds no tensors, its shards do.

        Raises:
            CheckpointError: always.
        """
        message = "an index of shards holds no tensor itself"
        raise checkpoint_error(Code.INDEX_INVALID, source.where, message, WRITE_AGAIN)

    def open(self, place: Place, main: str, *, part: str | None = None, locate: bool = True) -> Found:
        """Open every shard, in the container of its file ending."""
        self.require_no_part(part, where=place.location)
        index = _read(place, main)
        # Of a model on the hub only headers are wanted: each file is let go once it was read.
        sources = open_all(place, index.shards) if locate else {}
        contents = tuple(
            SHARDS[os.path.splitext(name)[1]].read(source, name=name, locate=locate)
            for name, source in (sources.items() if locate else open_each(place, index.shards))
        )
        notes = tuple(note for file in contents for note in file.notes)
        return Found(contents=contents, sources=sources, index=index, notes=notes)

    def others(self, place: Place, main: str) -> tuple[str, ...]:
        """The shards."""
        return _read(place, main).shards


def _read(place: Place, name: str) -> ShardIndex:
    raw, where = place.read(name, limit=MAX_INDEX)
    return parse_index(raw, name=name, where=where)
