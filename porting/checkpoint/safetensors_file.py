"""The header of a safetensors file: read strictly, and written deterministically.

The format (https://github.com/huggingface/safetensors, "Format"): eight bytes of length, little-endian; a
JSON object of that length, name to ``{"dtype", "shape", "data_offsets"}``, padded with spaces; then the
tensors' bytes, which the offsets cover from first to last without hole or overlap.  The reference parser
accepts more than that (a key twice, a rank of 1000); here everything that the format does not say is a fault,
and all faults are reported together.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from porting.checkpoint.container import (
    Container,
    FileKind,
    Outline,
    Promises,
    Shard,
    UnrecognisedError,
    WriteOptions,
    divided,
    nbytes,
)
from porting.checkpoint.errors import FAULTS_SHOWN, CheckpointError, FaultList, quote
from porting.checkpoint.files import ByteSource
from porting.checkpoint.layout import (
    MAX_BYTES,
    PACKED_DTYPES,
    SAFETENSORS_DTYPES,
    Contents,
    Described,
    ElementType,
    Extent,
    TensorInfo,
    WeightFile,
    shape_fault,
    shown_sizes,
)
from porting.checkpoint.names import check_names
from porting.checkpoint.strict_json import Json, JsonError, parse
from porting.errors import Code, Fault, nearest
from porting.limits import grant_tensors
from porting.printable import NAME_SHOWN, dtype_name

SURROGATE = re.compile("[\ud800-\udfff]")

MAX_HEADER = 100_000_000
"""The longest header that the reference parser reads, in bytes."""

FETCH_AGAIN = "the file is damaged or was not written by a safetensors library: fetch it again"
CONVERT = "convert it to one of " + ", ".join(SAFETENSORS_DTYPES)
FIELDS = ("dtype", "shape", "data_offsets")
EXPECTED = frozenset(FIELDS)


def read_header(source: ByteSource, *, name: str) -> Contents:
    """Read the header of a safetensors file, and check it against the file's size."""
    raw = _raw_header(source)
    return parse_header(raw, where=source.where, name=name, size=source.size)


def parse_header(raw: bytes, *, where: str, name: str, size: int | None = None) -> Contents:
    """Parse the JSON text of a header.

    Args:
        size: the bytes of the whole file; when left out, as many as the header describes.
    """
    faults = FaultList(where)
    try:
        header = parse(raw, where=where, signed_zero=True)
    except JsonError as error:
        faults.add(Code.SAFETENSORS_HEADER, f"the header cannot be read: {error}", hint=FETCH_AGAIN)
        raise CheckpointError(faults.faults()) from error
    if not isinstance(header, dict):
        faults.add(Code.SAFETENSORS_HEADER, f"the header is a JSON {_kind(header)}, not an object", hint=FETCH_AGAIN)
        raise CheckpointError(faults.faults())
    metadata = _metadata(header.pop("__metadata__", {}), faults)
    grant_tensors(len(header), where=where)
    data_start = 8 + len(raw)
    tensors: dict[str, TensorInfo] = {}
    extents: dict[str, Extent] = {}
    for key, entry in header.items():
        parsed = _entry(key, entry, name, faults)
        if parsed is not None:
            info, start, stop = parsed
            tensors[key] = info
            extents[key] = Extent(start=data_start + start, stop=data_start + stop)
    check_names(header, faults)
    end = max((extent.stop for extent in extents.values()), default=data_start)
    size = end if size is None else size
    if not faults:  # a tensor left out above would show here as a hole
        _check_coverage(extents, data_start, size, faults)
    faults.raise_if_any()
    file = WeightFile(name=name, size=size, format="safetensors", metadata=metadata, names=tuple(tensors), header=raw)
    return Contents(file=file, tensors=tensors, extents=extents)


def _raw_header(source: ByteSource) -> bytes:
    """The JSON text of the header with its padding."""
    if source.size < 8:
        raise _unreadable(
            source, f"{source.size} bytes are too few for a safetensors file, which begins with 8 of length"
        )
    length = int.from_bytes(source.pread(0, 8), "little")
    if length == 0:
        raise _unreadable(source, "the header's length is 0")
    if length > source.size - 8:
        raise _unreadable(
            source,
            f"the header should have {length} bytes, and only {source.size - 8} follow",
            hint="the file was cut short, or is not a safetensors file: fetch it again",
        )
    if length > MAX_HEADER:
        raise _unreadable(source, f"the header should have {length} bytes; the format allows {MAX_HEADER}")
    raw = source.pread(8, length)
    if raw[:1] != b"{":
        raise _unreadable(source, f"the header begins with {_shown(raw)} where '{{' is expected")
    if not raw.rstrip(b" ").endswith(b"}"):
        raise _unreadable(source, f"the header ends with {_shown(raw[-8:])} where '}}' and spaces are expected")
    return raw


def _shown(raw: bytes) -> str:
    return ascii(raw[:8].decode("latin-1"))


def _unreadable(source: ByteSource, message: str, *, hint: str = FETCH_AGAIN) -> CheckpointError:
    """The error for a header that cannot be read at all."""
    fault = Fault(code=Code.SAFETENSORS_HEADER, where=source.where, message=message, hint=hint)
    return UnrecognisedError(fault, source, Safetensors.title)


def _metadata(value: Json, faults: FaultList) -> dict[str, str]:
    if not isinstance(value, dict):
        faults.add(
            Code.SAFETENSORS_HEADER,
            f"__metadata__ is a JSON {_kind(value)} where an object of strings is expected",
            hint=FETCH_AGAIN,
        )
        return {}
    metadata = {}
    for key, text in value.items():
        if isinstance(text, str):
            metadata[key] = text
            if SURROGATE.search(key + text):
                faults.add(
                    Code.SAFETENSORS_HEADER,
                    f"__metadata__ {quote(key)} has half of a surrogate pair, which is no Unicode text",
                    hint="write the file again without it: other readers refuse it",
                )
        else:
            faults.add(
                Code.SAFETENSORS_HEADER,
                f"__metadata__ {quote(key)} is a JSON {_kind(text)} where a string is expected",
                hint="write the file again with strings for metadata",
            )
    return metadata


def _entry(key: str, entry: Json, file: str, faults: FaultList) -> tuple[TensorInfo, int, int] | None:
    """A tensor of the header with its range; None if it has a fault, which is noted."""
    if not isinstance(entry, dict):
        message = f"a JSON {_kind(entry)} where an object is expected"
        faults.add(Code.SAFETENSORS_TENSOR, message, tensor=key, hint=FETCH_AGAIN)
        return None
    if entry.keys() != EXPECTED:
        _note_fields(key, entry, faults)
        return None
    name = entry["dtype"]
    element = SAFETENSORS_DTYPES.get(name) if isinstance(name, str) else None
    if element is None:
        faults.add(Code.SAFETENSORS_TENSOR, _dtype_fault(name), tensor=key, hint=CONVERT)
    shape = _sizes(key, "shape", entry["shape"], faults)
    offsets = _sizes(key, "data_offsets", entry["data_offsets"], faults)
    if element is None or shape is None or offsets is None:
        return None
    reason = _range_fault(element, shape, offsets)
    if reason:
        faults.add(Code.SAFETENSORS_TENSOR, reason, tensor=key, hint=FETCH_AGAIN)
        return None
    start, stop = offsets
    info = TensorInfo(name=key, shape=tuple(shape), element=element, nbytes=stop - start, file=file)
    return info, start, stop


def _note_fields(key: str, entry: dict[str, Json], faults: FaultList) -> None:
    for name in FIELDS:
        if name not in entry:
            faults.add(Code.SAFETENSORS_TENSOR, f"no {name!r} is given", tensor=key, hint=FETCH_AGAIN)
    unknown = [name for name in entry if name not in FIELDS]
    for name in unknown[:FAULTS_SHOWN]:
        message = f"the field {quote(name)} is not one of the format's"
        hint = nearest(name[:NAME_SHOWN], FIELDS) or FETCH_AGAIN
        faults.add(Code.SAFETENSORS_TENSOR, message, tensor=key, hint=hint)
    if len(unknown) > FAULTS_SHOWN:
        message = f"{len(unknown)} fields are not the format's"
        faults.add(Code.SAFETENSORS_TENSOR, message, tensor=key, hint=FETCH_AGAIN)


def _range_fault(element: ElementType, shape: list[int], offsets: list[int]) -> str:
    """The reason why a range cannot hold the shape: no range, rank, overflow, or size; empty if it can."""
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"its data_offsets {shown_sizes(offsets)} are not a range"
    reason = shape_fault(shape, element)
    if reason:
        return reason
    length, count = offsets[1] - offsets[0], math.prod(shape) * element.itemsize
    if length != count:
        needed = f"shape {shown_sizes(shape)} of {element} needs {count}"
        return f"its range {shown_sizes(offsets)} has {length} bytes, and {needed}"
    return ""


def _sizes(key: str, field: str, value: Json, faults: FaultList) -> list[int] | None:
    """Take a value for a list of sizes; None if it is none, which is noted."""
    reason = ""
    sizes: list[int] = []
    if not isinstance(value, list):
        reason = f"is a JSON {_kind(value)} where a list of sizes is expected"
    else:
        for size in value:
            if type(size) is not int:
                reason = f"holds {quote(size)}, which is not a whole number"
                break
            if not 0 <= size <= MAX_BYTES:
                problem = "negative" if size < 0 else "more than 64 bits can hold"
                reason = f"holds {quote(size)}, which is {problem}"
                break
            sizes.append(size)
    if reason:
        faults.add(Code.SAFETENSORS_TENSOR, f"its {field} {reason}", tensor=key, hint=FETCH_AGAIN)
        return None
    return sizes


def _dtype_fault(name: Json) -> str:
    if isinstance(name, str) and name in PACKED_DTYPES:
        return f"its dtype {name} packs {PACKED_DTYPES[name]} elements, which this library does not read"
    return f"its dtype {quote(name)} is none that torch can hold"


def _check_coverage(extents: dict[str, Extent], start: int, size: int, faults: FaultList) -> None:
    """Check that the ranges fill the file from the header's end on, without hole or overlap."""
    end = start
    last = ""
    for name, extent in sorted(extents.items(), key=lambda item: (item[1].start, item[1].stop)):
        if extent.start > end:
            after = f"after tensor {quote(last)}" if last else "before the first tensor"
            faults.add(
                Code.SAFETENSORS_LAYOUT, f"{extent.start - end} bytes {after} belong to no tensor", hint=FETCH_AGAIN
            )
        elif extent.start < end:
            faults.add(
                Code.SAFETENSORS_LAYOUT,
                f"its range overlaps that of {quote(last)} by {end - extent.start} bytes",
                tensor=name,
                hint=FETCH_AGAIN,
            )
        if extent.stop >= end:
            end, last = extent.stop, name
    if end > size:
        faults.add(
            Code.SAFETENSORS_LAYOUT,
            f"the header describes {end} bytes and the file has {size}: {end - size} are missing",
            hint="the file was cut short: fetch it again",
        )
    elif end < size:
        faults.add(
            Code.SAFETENSORS_LAYOUT, f"{size - end} bytes after the last tensor belong to no tensor", hint=FETCH_AGAIN
        )


def _kind(value: Json) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


DTYPE_NAMES = {str(element): name for name, element in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Header:
    """A header and the place of each tensor.

    Attributes:
        text: the JSON text with its padding, without the eight bytes of length that stand in front of it.
        offsets: where each tensor begins, in bytes after the header; in the order of the data.
        data: bytes of all tensors.
    """

    text: bytes = field(repr=False)
    offsets: Mapping[str, int]
    data: int

    @property
    def prefix(self) -> bytes:
        """All bytes in front of the data."""
        return len(self.text).to_bytes(8, "little") + self.text

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return 8 + len(self.text) + self.data


def new_header(tensors: Mapping[str, Described], metadata: Mapping[str, str] | None, *, where: str) -> Header:
    """A canonical header.

    Args:
        tensors: shapes and dtypes, in the order in which the header is to list them.

    Returns:
        The header.  The data goes in the order of the tensors but wide elements first, so that each is aligned.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # a stable sort: else the mapping's order
    offsets, end = {}, 0
    for name in order:
        offsets[name] = end
        end += nbytes(tensors[name])
    content: dict[str, object] = {}
    if metadata:
        content["__metadata__"] = dict(sorted(metadata.items()))
    for name, tensor in tensors.items():
        content[name] = {
            "dtype": DTYPE_NAMES[dtype_name(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [offsets[name], offsets[name] + nbytes(tensor)],
        }
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    # What is written can be read again: the same parser judges names, sizes and metadata.
    parse_header(text, where=where, name=Path(where).name, size=8 + len(text) + end)
    return Header(text=text, offsets=offsets, data=end)


def shard_of(name: str, header: Header, tensors: Mapping[str, Described]) -> Shard:
    """A file with that header."""
    data = len(header.prefix)
    offsets = {tensor: data + offset for tensor, offset in header.offsets.items()}
    return Shard(name=name, size=header.size, frame=((0, header.prefix),), offsets=offsets, tensors=tuple(tensors))


class Safetensors(Container):
    """A safetensors file."""

    name = "safetensors"
    title = "a safetensors file"
    endings = (".safetensors",)
    main = "model.safetensors"
    also = ("diffusion_pytorch_model.safetensors",)
    spare = (
        "adapter_model.safetensors",
        "pytorch_lora_weights.safetensors",
        "consolidated.safetensors",
        "open_clip_model.safetensors",
    )
    promises = Promises(writes=True, metadata=True, shards=True, transformers=True)

    def sniff(self, source: ByteSource) -> FileKind | None:
        """Whether the file begins with a length that fits, and then a JSON object."""
        head = source.pread(0, min(source.size, 9))
        if head[8:] != b"{" or int.from_bytes(head[:8], "little") > source.size - 8:
            return None
        return FileKind(self.title, "rename it to end in .safetensors")

    def read(self, source: ByteSource, *, name: str, locate: bool = True) -> Contents:
        """Read the header (:func:`read_header`)."""
        return read_header(source, name=name)

    def outline(self, tensors: Mapping[str, Described], options: WriteOptions) -> Outline:
        """Lay out one file; or several, and their index."""
        main = options.main or self.main
        self.require_writable(tensors, where=f"{options.where}/{main}")
        groups = divided(tensors, options.shard_size)
        count, stem = len(groups), main.removesuffix(".safetensors")
        names = [f"{stem}-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)] if count > 1 else [main]
        shards = tuple(
            shard_of(name, new_header(group, options.metadata, where=f"{options.where}/{name}"), group)
            for name, group in zip(names, groups, strict=True)
        )
        if count == 1:
            return Outline(shards=shards)
        content = {
            "metadata": {"total_size": sum(map(nbytes, tensors.values()))},
            "weight_map": {name: shard.name for shard in shards for name in shard.tensors},
        }
        raw = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
        return Outline(shards=shards, files={f"{main}.index.json": raw})
