"""The tensors of a saved state dict, their extents checked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from porting.checkpoint.errors import FaultList, checkpoint_error, quote
from porting.checkpoint.files import ByteSource
from porting.checkpoint.layout import (
    MAX_BYTES,
    MAX_RANK,
    ChecksummedRange,
    Contents,
    Extent,
    TensorInfo,
    WeightFile,
    shape_fault,
)
from porting.checkpoint.names import check_names
from porting.checkpoint.state_pickle import StorageRef, TensorSpec, describe
from porting.checkpoint.zip_file import FETCH_AGAIN
from porting.errors import Code, Fault
from porting.limits import charge
from porting.printable import first_few, shown

MAX_REPEATED = 1 << 28
"""Bytes of a tensor that repeats its elements (stride 0); reading it writes them out."""

SHARED = 4
"""The allowed ratio of tensors' elements to those of storages; tied weights share theirs."""

SHOWN = 3
"""The number of entries without tensors that a message names."""

WIDEST = 16
"""Bytes that an element beyond the ratio is charged: a reference and a port may each read it as float64."""


def read_tensors(value: object, records: Mapping[str, ChecksummedRange], source: ByteSource, *, name: str) -> Contents:
    """Read the tensors of a state dict, each checked against its storage record; entries of None are skipped."""
    described = require_flat(value, source)
    faults = FaultList(source.where)
    tensors: dict[str, TensorInfo] = {}
    extents: dict[str, Extent] = {}
    for key, spec in described.items():
        extent = _extent(key, spec, records, faults) if spec is not None else None
        if spec is not None and extent is not None:
            extents[key] = extent
            tensors[key] = TensorInfo(
                name=key,
                shape=spec.size,
                element=spec.element,
                nbytes=_count(spec) * spec.element.itemsize,
                file=name,
                repeated=max(_count(spec) - _steps(spec), 0),
            )
    check_names(tensors, faults)
    faults.raise_if_any()
    keys = {spec.storage.key for spec in described.values() if spec is not None}
    used = {key: record for key, record in records.items() if key in keys}
    charge("made", made_of(described.values(), used), where=source.where)
    file = WeightFile(name=name, size=source.size, format="bin", metadata={}, names=tuple(tensors))
    notes = not_read([key for key, spec in described.items() if spec is None], source.where)
    return Contents(file=file, tensors=tensors, extents=extents, shared=_shared(extents), notes=notes)


def require_flat(value: object, source: ByteSource) -> dict[str, TensorSpec | None]:
    """Require that a pickle described names with tensors, or with None."""
    if not isinstance(value, dict):
        raise checkpoint_error(
            Code.BIN_TENSOR,
            source.where,
            f"it holds {describe(value)} where a state dict, names to tensors, is expected",
            "save model.state_dict() with torch.save",
        )
    faults = FaultList(source.where)
    found: dict[str, TensorSpec | None] = {}
    for key, spec in value.items():
        if not isinstance(key, str):
            message = f"the key {quote(key)} is {describe(key)} where a name is expected"
            faults.add(Code.BIN_TENSOR, message, hint="save model.state_dict() with torch.save")
        elif not isinstance(spec, TensorSpec | None):
            message = f"the key {quote(key)} holds {describe(spec)} where a tensor is expected"
            faults.add(Code.BIN_TENSOR, message, hint="save model.state_dict() alone")
        else:
            found[key] = spec
    faults.raise_if_any()
    return found


def not_read(names: Sequence[str], where: str) -> tuple[Fault, ...]:
    """The note about entries that are not tensors."""
    if not names:
        return ()
    message = f"no tensor, and not read: {first_few([*map(quote, names)], SHOWN)}"
    return (Fault(code=Code.NOT_READ, where=where, message=message),)


def require_stored(
    specs: Iterable[TensorSpec],
    storages: Iterable[StorageRef],
    records: Mapping[str, ChecksummedRange],
    source: ByteSource,
) -> None:
    """Require that what is not read is stored as it is described too, as torch does."""
    faults = FaultList(source.where)
    for spec in specs:
        _extent("beside those that are read", replace(spec, lazy=""), records, faults)
    faults.raise_if_any()
    for storage in storages:
        record = records.get(storage.key)
        length = storage.count * (storage.element.itemsize if storage.element else 1)
        if record is None or record.stop - record.start != length:
            found = "is not in the file" if record is None else f"has a record of {record.stop - record.start}"
            message = f"the storage {quote(storage.key)} of {shown(length)} bytes {found}"
            faults.add(Code.BIN_TENSOR, message, hint=FETCH_AGAIN)
    faults.raise_if_any()


def made_of(specs: Iterable[object], records: Mapping[str, ChecksummedRange]) -> int:
    """The bytes that tensors may take in memory beyond what is stored, in the widest dtype that they are cast to."""
    elements, widths = 0, dict.fromkeys(records, 1)
    for spec in specs:
        if isinstance(spec, TensorSpec):
            elements += _count(spec)
            widths[spec.storage.key] = max(widths[spec.storage.key], spec.element.itemsize)
    stored = sum((record.stop - record.start) // widths[key] for key, record in records.items())
    return WIDEST * max(elements - SHARED * stored, 0)


def _steps(spec: TensorSpec) -> int:
    """The number of elements of the storage between a tensor's first element and its last."""
    if not _count(spec):
        return 0
    return sum((size - 1) * step for size, step in zip(spec.size, spec.stride, strict=True)) + 1


def _count(spec: TensorSpec) -> int:
    count = 1
    for size in spec.size:
        count *= size
    return count


def _extent(key: str, spec: TensorSpec, records: Mapping[str, ChecksummedRange], faults: FaultList) -> Extent | None:
    """Where the tensor's elements lie; None if they do not fit, which is noted."""
    reason = _shape_fault(spec)
    if reason:
        hint = f"save it resolved: tensor.{RESOLVED[spec.lazy]}" if spec.lazy in RESOLVED else FETCH_AGAIN
        faults.add(Code.BIN_TENSOR, reason, tensor=key, hint=hint)
        return None
    storage = spec.storage
    record = records.get(storage.key)
    if record is None:
        faults.add(
            Code.BIN_TENSOR, f"its storage {quote(storage.key)} is not in the file", tensor=key, hint=FETCH_AGAIN
        )
        return None
    itemsize = spec.element.itemsize
    length = storage.count * (storage.element.itemsize if storage.element else 1)
    if length != record.stop - record.start:
        faults.add(
            Code.BIN_TENSOR,
            f"its storage should have {length} bytes, and its record has {record.stop - record.start}",
            tensor=key,
            hint=FETCH_AGAIN,
        )
        return None
    count = _count(spec)
    begin = spec.offset * itemsize
    steps = _steps(spec)
    if begin + steps * itemsize > length:
        faults.add(
            Code.BIN_TENSOR,
            f"its elements reach to byte {begin + steps * itemsize} of a storage of {length}",
            tensor=key,
            hint=FETCH_AGAIN,
        )
        return None
    if count > steps and count * itemsize > MAX_REPEATED:
        faults.add(
            Code.BIN_TENSOR,
            f"it repeats {steps * itemsize} bytes until they are {count * itemsize}",
            tensor=key,
            hint="save it before it is expanded",
        )
        return None
    start = record.start + begin
    stride = None if _is_contiguous(spec) else spec.stride
    return Extent(start=start, stop=start + steps * itemsize, stride=stride, record=record)


RESOLVED = {
    "conjugated": "resolve_conj()",
    "negated": "resolve_neg()",
    "conjugated and negated": "resolve_conj().resolve_neg()",
}
"""The method that gives the plain values of a tensor that torch reads as a view."""


def _shape_fault(spec: TensorSpec) -> str:
    if len(spec.size) > MAX_RANK:
        return f"{len(spec.size)} dimensions; torch handles {MAX_RANK}"
    numbers = (*spec.size, *spec.stride, spec.offset, spec.storage.count)
    if min(numbers) < 0:
        return "a negative size, stride or offset"
    if max(numbers) > MAX_BYTES or shape_fault(
        spec.size, spec.element
    ):  # in this order: products of long numbers are slow
        return "its sizes overflow 64 bits"
    if spec.lazy:
        return f"its elements are to be read {spec.lazy}, which this library does not do"
    return ""


def _is_contiguous(spec: TensorSpec) -> bool:
    expected = 1
    for size, step in zip(reversed(spec.size), reversed(spec.stride), strict=True):
        if size != 1:
            if step != expected:
                return _count(spec) == 0
            expected *= size
    return True


def _shared(extents: Mapping[str, Extent]) -> tuple[frozenset[str], ...]:
    """The groups of names that share a range of a storage: tied weights."""
    groups: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for name, extent in extents.items():
        if extent.stop > extent.start:
            groups[extent.start, extent.stop].append(name)
    return tuple(frozenset(names) for names in groups.values() if len(names) > 1)
