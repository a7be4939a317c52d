"""Read and write recorded references with numpy alone: for programs in JAX, TensorFlow or plain numpy.

Importing this module imports numpy and the standard library, neither torch nor transformers, so that it also runs
where only numpy is installed beside this package (``pip install --no-deps``).  ``docs/foreign-references.md`` shows it
at work, and describes the file.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from porting.atomic import check_destination, new_file, write_all
from porting.checkpoint.files import InMemory
from porting.checkpoint.safetensors_file import read_header
from porting.errors import CheckpointError, Code, Fault, PortingError
from porting.opening import read_file

FORMAT, VERSION = "porting trace", "1"
INPUTS, WEIGHTS, EXACT = "inputs", "weights", "float64"
WORKING = ("float32", "bfloat16", "float16")
ISOLATED = " isolated"
RETURNED = "."
"""The point of the model's returned value."""

Array: TypeAlias = Any
"""Anything that ``numpy.asarray`` takes: arrays of numpy, JAX, TensorFlow or torch."""

Batch: TypeAlias = Mapping[str, Array]
Values: TypeAlias = Mapping[str, Array] | Array

_TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
NUMBERED = re.compile(rf"({INPUTS}|{EXACT}|(?:{'|'.join(WORKING)})(?:{ISOLATED})?)/(0|[1-9]\d{{0,5}})/(.+)")
_X64 = "in JAX: jax.config.update('jax_enable_x64', True) before anything is computed"


class RecordingError(PortingError):
    """A recording cannot be read, or what was given cannot be recorded."""


@dataclass(frozen=True)
class RecordedArrays:
    """The content of a recording as numpy arrays.

    Attributes:
        inputs: for each batch, argument -> array.
        weights: name -> array; empty unless the recording was made with weights.
        points: kind (``"float64"``, ``"float32"``, ``"float32 isolated"``, ...) -> for each batch, point -> array.
    """

    inputs: tuple[dict[str, np.ndarray], ...]
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    points: dict[str, tuple[dict[str, np.ndarray], ...]] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)


def save_recording(
    path: str | os.PathLike[str],
    inputs: Batch | Sequence[Batch],
    points: Values | Sequence[Values],
    *,
    float32: Values | Sequence[Values] | None = None,
    bfloat16: Values | Sequence[Values] | None = None,
    float16: Values | Sequence[Values] | None = None,
    reference: str = "",
    overwrite: bool = False,
) -> Path:
    """Write a reference's inputs and activations, for ``porting.verify(..., reference=path)``.

    Args:
        path: the file to be made, ``trace.safetensors``.
        inputs: the arguments of the forward pass by name; or a sequence of such batches.
        points: what was computed from them in float64, for each batch: a dict from names to arrays, in the order of
            execution; or one array, the returned value.  A name is that of a module of the port (``"encoder.0"``), that
            of an output of the whole model (``"logits"``), or any other that ``[probes]`` of a table has on its left
            side.  Dicts inside of dicts are joined by a dot.
        float32, bfloat16, float16: the same in a working dtype, where the reference was run in it: then the port's
            rounding error is compared with the reference's.
        reference: how reports describe the reference.
        overwrite: whether a file that stands there may be replaced.

    Returns:
        The path.

    Raises:
        RecordingError: something has another dtype or shape than it should have, or the file cannot be written; with
            every fault.

    >>> from tempfile import TemporaryDirectory
    >>> x = np.ones((2, 3))
    >>> with TemporaryDirectory() as folder:
    ...     made = save_recording(f"{folder}/trace.safetensors", {"x": x}, {"double": x * 2, ".": x * 2 + 1})
    ...     sorted(load_recording(made).points["float64"][0])
    ['.', 'double']
    """
    path = Path(path)
    batches = [{name: np.asarray(array) for name, array in batch.items()} for batch in _each(inputs)]
    kinds = {EXACT: points, "float32": float32, "bfloat16": bfloat16, "float16": float16}
    computed = {kind: [named(value) for value in _each(values)] for kind, values in kinds.items() if values is not None}
    faults = [
        Fault(code=Code.BAD_RECORDING, where=str(path), message=message, hint=hint)
        for message, hint in _wrong(batches, computed)
    ]
    if faults:
        raise RecordingError(faults)
    arrays = numbered({INPUTS: batches, **computed})
    metadata = {"format": FORMAT, "version": VERSION, **({"reference": reference} if reference else {})}
    _write(path, arrays, metadata, overwrite=overwrite)
    return path


def load_recording(path: str | os.PathLike[str]) -> RecordedArrays:
    """Read a recording, such as ``porting record --inputs-only --weights`` writes for a program in another framework.

    Args:
        path: the file.

    Returns:
        Its arrays.  bfloat16 becomes float32, which holds all its values.

    Raises:
        RecordingError: the file is damaged, or no recording.
        LimitError: its header has more values than one command may read (:mod:`porting.limits`).

    >>> from tempfile import TemporaryDirectory
    >>> x = np.ones((2, 3))
    >>> with TemporaryDirectory() as folder:
    ...     made = save_recording(f"{folder}/own.safetensors", inputs={"x": x}, points={"head": x + x})
    ...     sorted(load_recording(made).inputs[0])
    ['x']
    """
    path = Path(path)
    try:
        content = read_file(path, limit=None)
    except CheckpointError as error:
        raise _unreadable(path, error.faults[0].message) from error
    try:
        arrays, metadata = _parsed(content, path)
    except CheckpointError as error:
        raise _unreadable(path, f"it is not a safetensors file: {error.faults[0].message}") from error
    kind, version = metadata.get("format", ""), metadata.get("version", "")
    if (kind, version) != (FORMAT, VERSION):
        raise _unreadable(path, f"its metadata has format {kind!r} and version {version!r}, expected {FORMAT!r}")
    weights: dict[str, np.ndarray] = {}
    runs: dict[str, dict[int, dict[str, np.ndarray]]] = {}
    for name, array in arrays.items():
        found = NUMBERED.fullmatch(name)
        if found:
            runs.setdefault(found[1], {}).setdefault(int(found[2]), {})[found[3]] = array
        elif name.startswith(f"{WEIGHTS}/"):
            weights[name.removeprefix(f"{WEIGHTS}/")] = array
    count = 1 + max(runs.get(INPUTS, {}), default=-1)
    if count > len(runs.get(INPUTS, {})):
        raise _unreadable(path, f"it has {len(runs[INPUTS])} cases with inputs, numbered up to {count - 1}")
    listed = {kind: tuple(cases.get(number, {}) for number in range(count)) for kind, cases in runs.items()}
    return RecordedArrays(listed.pop(INPUTS, ()), weights, listed, metadata)


def named(values: Values, prefix: str = "") -> dict[str, np.ndarray]:
    """Name arrays by points, from an array or from nested dicts.

    >>> sorted(named({"encoder": {"0": np.ones(1)}, "logits": np.ones(1)}))
    ['encoder.0', 'logits']
    """
    if not isinstance(values, Mapping):
        return {prefix or RETURNED: np.asarray(values)}
    found: dict[str, np.ndarray] = {}
    for name, value in values.items():
        found |= named(value, f"{prefix}.{name}" if prefix else str(name))
    return found


def numbered(kinds: Mapping[str, Sequence[Mapping[str, Array]]]) -> dict[str, Array]:
    """The arrays of each case in a recording, by name: ``KIND/CASE/NAME``."""
    return {
        f"{kind}/{number}/{name}": array
        for kind, runs in kinds.items()
        for number, run in enumerate(runs)
        for name, array in run.items()
    }


def _each(values: Any) -> list[Any]:  # a batch or a sequence of batches
    return list(values) if isinstance(values, list | tuple) else [values]


def _wrong(
    batches: Sequence[Mapping[str, np.ndarray]], computed: Mapping[str, Sequence[Mapping[str, np.ndarray]]]
) -> Iterator[tuple[str, str]]:
    """The faults of arrays that are to be written, each with a hint."""
    if not batches or not all(batches):
        yield "there are no inputs", "a batch is a dict from the names of the arguments to arrays"
    for number, batch in enumerate(batches):
        for name, array in batch.items():
            if array.dtype.name not in _TYPES:
                yield (
                    f"the input {name!r} of batch {number} is of {array.dtype}",
                    f"expected one of {', '.join(_TYPES)}",
                )
    for kind, runs in computed.items():
        if len(runs) != len(batches):
            yield f"{len(batches)} batches, and values in {kind} of {len(runs)}", "one dict of points for each batch"
        for number, run in enumerate(runs):
            if not run:
                yield f"batch {number} has no point in {kind}", "give the returned value at least"
            exact = computed[EXACT][number] if number < len(computed[EXACT]) else {}
            for name, value in run.items():
                yield from _wrong_point(f"{name!r} of batch {number}", value, kind, exact.get(name))


def _wrong_point(subject: str, value: np.ndarray, kind: str, exact: np.ndarray | None) -> Iterator[tuple[str, str]]:
    if value.dtype.name != kind:
        hint = f"compute it in float64; {_X64}" if kind == EXACT else f"leave it out, or compute it in {kind}"
        yield f"{subject} is of {value.dtype}, expected {kind}", hint
    elif exact is None:
        yield f"{subject} is there in {kind}, and not in float64", "every value needs its exact one"
    elif exact.shape != value.shape:
        yield f"{subject} is {list(value.shape)} in {kind}, and {list(exact.shape)} in float64", ""


def _write(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str], *, overwrite: bool) -> None:
    """Write a safetensors file, whole or not at all."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": _TYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        check_destination(path, overwrite=overwrite, file=True)
        with new_file(path, size=8 + len(text) + end, overwrite=overwrite) as descriptor:
            write_all(descriptor, struct.pack("<Q", len(text)) + text)
            for array in arrays.values():
                little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
                write_all(descriptor, little.tobytes())
    except CheckpointError as error:
        raise RecordingError(error.faults) from error


def _parsed(content: bytes, path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays and the metadata of a safetensors file, whose header is read as every other one is."""
    found = read_header(InMemory(content, str(path)), name=path.name)
    arrays: dict[str, np.ndarray] = {}
    for name, info in found.tensors.items():
        kind, extent = str(info.element).removeprefix("torch."), found.extents[name]
        if kind not in _TYPES:
            raise _unreadable(path, f"{name!r} is of {kind}, expected one of {', '.join(_TYPES)}")
        half = kind == "bfloat16"
        dtype = np.dtype("uint16" if half else kind).newbyteorder("<")
        array = np.frombuffer(memoryview(content)[extent.start : extent.stop], dtype).reshape(info.shape)
        if kind == "bool" and array.size and array.view(np.uint8).max() > 1:
            raise _unreadable(path, f"{name!r} has a boolean that is stored as another byte than 0 and 1")
        arrays[name] = (array.astype(np.uint32) << 16).view(np.float32) if half else array
    return arrays, dict(found.file.metadata)


def _unreadable(path: Path, message: str) -> RecordingError:
    hint = "porting record makes one, docs/foreign-references.md says what it holds"
    return RecordingError(Fault(code=Code.BAD_RECORDING, where=str(path), message=message, hint=hint))
