"""The index of a sharded checkpoint, `*.index.json`: the shard of each tensor."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from porting.checkpoint.errors import CheckpointError, FaultList, checkpoint_error, quote
from porting.checkpoint.layout import TensorInfo
from porting.checkpoint.strict_json import Json, JsonError, parse
from porting.errors import Code, Fault
from porting.printable import is_printable, shown

MAX_INDEX = 256 << 20
"""Bytes; an index of a million tensors is smaller."""

LONGEST = 255
"""Bytes of the name of a file."""

PLAIN = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{LONGEST - 1}}}")
"""Names without faults, for a fast check: an index may have a million names."""

INDEX = ".index.json"
"""The ending of an index behind the name of its only file."""

SHARD_ENDINGS = frozenset({".safetensors", ".bin"})
"""The file endings of shards."""

WRITE_AGAIN = "fetch the index again, or save the checkpoint again"


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """An index as it is stored.

    Attributes:
        name: its file's name inside the checkpoint.
        weight_map: tensor to shard, in the file's order.
        shards: the shards, each once, in the order in which they are first named.
        total_size: the bytes of all tensors, as the index says; None when it does not say a whole number.  One that is
            written with an exponent is an int where 64 bits hold it, as ``1e308`` in full has 309 digits.
        raw: the file's bytes, with which it is written again unchanged.
    """

    name: str
    content: Mapping[str, object]
    weight_map: Mapping[str, str]
    shards: tuple[str, ...]
    total_size: int | float | None
    raw: bytes = field(repr=False)


def parse_index(raw: bytes, *, name: str, where: str) -> ShardIndex:
    """Parse the JSON text of an index."""
    try:
        content = parse(raw, where=where)
    except JsonError as error:
        raise _invalid(where, f"the index cannot be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("weight_map"), dict):
        raise _invalid(where, "a JSON text without a weight_map object, so no index of shards")
    weight_map = content["weight_map"]
    if not isinstance(weight_map, dict) or not weight_map:
        raise _invalid(where, "the weight_map names no tensor")
    faults = FaultList(where)
    shards: dict[str, None] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            faults.add(Code.INDEX_INVALID, "its shard is not a string", tensor=tensor, hint=WRITE_AGAIN)
        elif shard not in shards:
            shards[shard] = None
            reason = shard_fault(shard)
            if reason:
                faults.add(
                    Code.INDEX_SHARD,
                    f"the shard {quote(shard)} {reason}; a shard is a plain file name beside the index",
                    hint="do not use this index unless you know who wrote it",
                )
    endings = {os.path.splitext(shard)[1] for shard in shards}  # ten times as fast as a path of each
    if not faults and (len(endings) > 1 or not endings <= SHARD_ENDINGS):
        faults.add(
            Code.INDEX_SHARD,
            "its shards do not all end in .safetensors or all in .bin: " + ", ".join(map(quote, shards)),
            hint=WRITE_AGAIN,
        )
    for one, other in _alike(shards):
        message = f"the shards {quote(one)} and {quote(other)} are one file where case or Unicode's forms do not count"
        faults.add(Code.INDEX_SHARD, message, hint=WRITE_AGAIN)
    faults.raise_if_any()
    checked = {tensor: str(shard) for tensor, shard in weight_map.items()}
    return ShardIndex(
        name=name,
        content=dict(content),
        weight_map=checked,
        shards=tuple(shards),
        total_size=_total_size(content),
        raw=raw,
    )


def _alike(shards: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Pairs of names that a file system may take for one: a conversion there would write one shard over another."""
    seen: dict[str, str] = {}
    for shard in shards:
        first = seen.setdefault(unicodedata.normalize("NFC", shard).casefold(), shard)
        if first != shard:
            yield first, shard


def shard_fault(shard: str) -> str:
    """The reason why a string is not a plain file name; empty if it is one."""
    if PLAIN.fullmatch(shard):
        return ""
    reasons = {
        "is empty or holds control characters": not shard or not is_printable(shard),
        "is a URL": "://" in shard,
        "holds a path separator": "/" in shard or "\\" in shard,
        "names a directory": shard in {".", ".."},
        "is longer than the name of a file can be": len(shard.encode("utf-8", "surrogatepass")) > LONGEST,
        "begins with a drive letter": shard[1:2] == ":",
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _total_size(content: Mapping[str, Json]) -> int | float | None:
    metadata = content.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(total, int | float) or total != total // 1:
        return None
    return int(total) if abs(total) < 1 << 64 else total


def check_against_shards(index: ShardIndex, found: Mapping[str, Mapping[str, TensorInfo]], *, where: str) -> FaultList:
    """Compare the index with the shards' headers.

    Returns:
        Every disagreement, except for tensors that stand in two shards: only their bytes can tell how bad
        that is.
    """
    faults = FaultList(where)
    for tensor, shard in index.weight_map.items():
        if tensor not in found[shard] and faults.full:
            faults.add(Code.INDEX_TENSOR, "")  # counted
        elif tensor not in found[shard]:
            others = [other for other, tensors in found.items() if tensor in tensors]
            hint = f"it is in {others[0]}; {WRITE_AGAIN}" if others else WRITE_AGAIN
            faults.add(Code.INDEX_TENSOR, f"the shard {quote(shard)} does not hold it", tensor=tensor, hint=hint)
    for shard, tensors in found.items():
        for tensor in tensors:
            if tensor not in index.weight_map:
                faults.add(
                    Code.INDEX_TENSOR,
                    f"the shard {quote(shard)} holds it, and the index does not list it",
                    tensor=tensor,
                    hint=f"the shard may belong to another save; {WRITE_AGAIN}",
                )
    return faults


def total_size_warning(index: ShardIndex, tensors: Mapping[str, TensorInfo], *, where: str) -> Fault | None:
    """A warning if the total size is wrong; no value depends on it."""
    total = sum(info.nbytes for info in tensors.values())
    if index.total_size is None or index.total_size == total:
        return None
    return Fault(
        code=Code.INDEX_TOTAL,
        where=where,
        message=f"total_size is {shown(index.total_size)}, and the shards' tensors have {total} bytes",
        hint="compare the files with where they came from",
    )


def _invalid(where: str, message: str) -> CheckpointError:
    return checkpoint_error(Code.INDEX_INVALID, where, message, WRITE_AGAIN)
