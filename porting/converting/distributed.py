"""The output as ``torch.distributed.checkpoint`` reads it: every tensor a chunk of its own, and a ``.metadata``.

The ``.metadata`` is a pickle, the only one that is ever written here, because that is what torch reads.  It is made of
torch's own classes with names, sizes and numbers in them, and holds no weight.  Without a memo (``fast``) its bytes
follow from these alone, and not from which of them happened to be one object.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence

from porting.checkpoint.dcp_archive import frame
from porting.checkpoint.names import DCP_ENDING
from porting.converting.directions import Recipes
from porting.converting.output_files import Outline, Shard, divided
from porting.errors import Code, Fault, option
from porting.plan.recipe import Recipe
from porting.target import TargetError

FORMAT = "dcp"


def part_of(to: str | None) -> str | None:
    """The state dict that tensors are put under, as ``to`` says; empty for none, None when no such format is asked for.

    Raises:
        TargetError: it says something else.

    >>> part_of("dcp"), part_of("dcp/model")
    ('', 'model')
    """
    if to is None:
        return None
    kind, _, part = to.partition("/")
    if kind != FORMAT or to.endswith("/") or "/" in part or "." in part or not to.isprintable():
        message = f"{option('to', to)}: expected {FORMAT}, or {FORMAT}/model for what is saved under 'model'"
        raise TargetError(Fault(code=Code.OPTION_REFUSED, message=message, hint="leave it out for safetensors"))
    return part


def outline_distributed(recipes: Recipes, *, shard_size: int | None, part: str) -> tuple[Outline, bytes]:
    """Divide tensors among files.

    Args:
        recipes: the tensors; to other names of one, torch has to be told where it lies as well.
        shard_size: bytes of tensors that one file may hold; None for one file.
        part: the state dict that they are saved under; empty for none.

    Returns:
        The files, and the content of the ``.metadata``.
    """
    shards = tuple(
        _shard(f"__0_{number}{DCP_ENDING}", group) for number, group in enumerate(divided(recipes.tensors, shard_size))
    )
    return Outline(shards=shards, index=None), _metadata(recipes, shards, part)


def _shard(name: str, group: Sequence[Recipe]) -> Shard:
    pieces: list[tuple[int, bytes]] = []
    offsets: dict[str, int] = {}
    seals: dict[str, tuple[int, ...]] = {}
    ranges: dict[str, tuple[int, int]] = {}
    at = 0
    for one in group:
        made = frame(one.dtype, one.shape, at=at)
        offsets[one.name] = at + len(made.front)
        seals[one.name] = tuple(at + seal for seal in made.seals)
        ranges[one.name] = at, made.size
        pieces += [(at, made.front), (at + made.size - len(made.back), made.back)]
        at += made.size
    return Shard(
        name=name, size=at, frame=tuple(pieces), offsets=offsets, recipes=tuple(group), seals=seals, ranges=ranges
    )


def _metadata(recipes: Recipes, shards: Sequence[Shard], part: str) -> bytes:
    """The pickle of torch's own objects that describes all of it.

    Raises:
        TargetError: this torch has no ``torch.distributed``.
    """
    try:
        from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: PLC0415 - a heavy import
        from torch.distributed.checkpoint.metadata import (  # noqa: PLC0415 - as above
            STORAGE_TYPES,
            ChunkStorageMetadata,
            Metadata,
            MetadataIndex,
            TensorProperties,
            TensorStorageMetadata,
        )
    except ImportError as error:
        message = "this build of torch has no torch.distributed.checkpoint, whose metadata it should be"
        raise TargetError(Fault(code=Code.OPTION_REFUSED, message=message)) from error
    from torch import Size  # noqa: PLC0415 - as above

    before = (part,) if part else ()
    made = {one.name: one for one in recipes.tensors}
    stored = {name: name for name in made} | {name: own for name, own in recipes.tied.items() if own in made}
    places = {name: (shard.name, *where) for shard in shards for name, where in shard.ranges.items()}
    state: dict[str, STORAGE_TYPES] = {}
    storage = {}
    planner = {}
    for name, own in stored.items():
        shape, path = made[own].shape, (*before, name)
        chunk = ChunkStorageMetadata(offsets=Size([0] * len(shape)), sizes=Size(shape))
        state[".".join(path)] = TensorStorageMetadata(TensorProperties(dtype=made[own].dtype), Size(shape), [chunk])
        storage[MetadataIndex(".".join(path), [0] * len(shape), 0)] = _StorageInfo(*places[own])
        planner[".".join(path)] = path
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=4)
    pickler.fast = True
    pickler.dump(Metadata(state_dict_metadata=state, planner_data=planner, storage_data=storage, version="1.0.0"))
    return file.getvalue()
