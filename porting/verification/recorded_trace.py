"""A recorded trace: what a reference was given and what it computed, in a safetensors file.

The names of the tensors say what they are, ``KIND/CASE/NAME``:

- ``inputs/0/input_ids``: an argument of the forward pass of case 0;
- ``float64/0/encoder.layer.1``: the activation at a point, in float64; the points in order of execution;
- ``float32/0/encoder.layer.1``: the same of a run in float32, bfloat16 or float16; optional;
- ``float32 isolated/0/encoder.layer.1``: of a run in which every point was given the exact values before it; optional;
- ``weights/encoder.weight``: a weight of the model that was recorded; optional.

:mod:`porting.recordings` reads and writes the same file with numpy alone.

The header's metadata has ``format`` and ``version``; everything else in it is optional: ``reference``, ``cases`` (a
JSON list of what each case is there to show), ``weights`` (the digest of the checkpoint), ``lowered`` (a JSON object:
point to the operations before it that computed with less than float64), and versions of packages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from porting.checkpoint import Checkpoint, open_checkpoint
from porting.checkpoint.strict_json import JsonError, parse
from porting.checkpoint.write import write_safetensors
from porting.errors import Code, Fault, Message, Option, VerifyError
from porting.limits import charge
from porting.printable import dtype_name
from porting.recordings import EXACT, FORMAT, INPUTS, ISOLATED, NUMBERED, VERSION, WEIGHTS, numbered
from porting.tracing.trace import Point, Trace
from porting.trials.inputs import Case

WORKING = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

MOST_GAPS = 20
"""Cases that are missing and are named."""

PLACE, CASE, DENSE = 1 << 16, 1 << 21, 2
"""Bytes that a model makes of an element of its inputs, and of a batch; so many elements a stored byte are free."""

MADE_BY = "porting record makes one, docs/foreign-references.md says what it holds"


@dataclass(frozen=True)
class Recording:
    """A recorded trace that has been opened; activations are read from the file when they are asked for.

    Attributes:
        lowered: point -> operations before it that computed with less than float64.
    """

    where: str
    cases: tuple[Case, ...]
    metadata: Mapping[str, str]
    lowered: Mapping[Point, tuple[str, ...]]
    weights: tuple[str, ...]
    _file: Checkpoint = field(repr=False)
    _names: Mapping[tuple[str, int], Mapping[Point, str]] = field(repr=False)

    @property
    def reference(self) -> str:
        """The name of the recorded reference."""
        return self.metadata.get("reference", "a recorded reference")

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The working dtypes that were recorded for every case."""
        cases = range(len(self.cases))
        return tuple(dtype for name, dtype in WORKING.items() if all((name, case) in self._names for case in cases))

    def points(self) -> list[Point]:
        """Every point that was recorded."""
        found = (point for case in range(len(self.cases)) for point in self._names[EXACT, case])
        return list(dict.fromkeys(found))

    def read_weights(self) -> dict[str, Tensor]:
        """The weights that it holds, by name."""
        return {name: self._file.read(f"{WEIGHTS}/{name}", own=True) for name in self.weights}

    def trace(self, dtype: torch.dtype, case: int, *, isolated: bool = False) -> Iterator[tuple[Point, Tensor]]:
        """The activations of one run, in order of execution."""
        kind = dtype_name(dtype) + (ISOLATED if isolated else "")
        for point, name in self._names.get((kind, case), {}).items():
            yield point, self._file.read(name)


def write_recording(
    path: str | Path,
    cases: Sequence[Case],
    traces: Mapping[str, Sequence[Trace]],
    metadata: Mapping[str, str],
    *,
    weights: Mapping[str, Tensor] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a recording; the same content gives the same bytes.

    Args:
        traces: ``"float64"``, ``"float32"``, ``"float32 isolated"``, ... -> the activations of each case.
        weights: those of the model, where they are to be kept with it.
        overwrite: whether a file that stands there may be replaced.

    Raises:
        CheckpointError: the destination is refused, or the system failed; nothing is left behind.
    """
    tensors = numbered({INPUTS: [case.inputs for case in cases], **traces})
    tensors |= {f"{WEIGHTS}/{name}": one for name, one in (weights or {}).items()}
    said = {"format": FORMAT, "version": VERSION, "cases": json.dumps([case.name for case in cases]), **metadata}
    write_safetensors(path, tensors, metadata=said, overwrite=overwrite)


def read_recording(path: str | Path) -> Recording:
    """Open a recording, and see that it is one.

    Raises:
        CheckpointError: the file is not a safetensors file, or a damaged one.
        VerifyError: it is one, and no recording; with every fault.
    """
    file = open_checkpoint(path)
    metadata = file.files[0].metadata
    kind, version = metadata.get("format", ""), metadata.get("version", "")
    if (kind, version) != (FORMAT, VERSION):
        message = f"its metadata has format {kind!r} and version {version!r}, expected {FORMAT!r} and {VERSION!r}"
        raise VerifyError(Fault(code=Code.BAD_RECORDING, where=file.location, message=message, hint=MADE_BY))
    names, weights, faults = _sorted(file)
    count = 1 + max((case for _, case in names), default=-1)
    if count and not any(kind == EXACT for kind, _ in names):
        message = "it holds inputs and nothing that was computed from them"
        hint = Message("run the reference on them, and write a recording of its own; or pass it as ", Option("inputs"))
        raise VerifyError(Fault(code=Code.BAD_RECORDING, where=file.location, message=message, hint=hint))
    gaps = (
        f"case {case} of {count} has no {one}"
        for case in range(count)
        for one in (INPUTS, EXACT)
        if (one, case) not in names
    )
    faults += islice(gaps, MOST_GAPS)
    if not count:
        faults.append("it holds no case")
    titles = _read(metadata, "cases", list, faults)
    lowered = _read(metadata, "lowered", dict, faults)
    if isinstance(lowered, dict) and not all(isinstance(one, list) for one in lowered.values()):
        faults.append("its metadata's lowered is not an object of lists of operations")
    if faults:
        raise VerifyError(
            Fault(code=Code.BAD_RECORDING, where=file.location, message=one, hint=MADE_BY) for one in faults
        )
    cases = _cases(file, names, titles)
    said = {str(point): tuple(map(str, one)) for point, one in lowered.items()} if isinstance(lowered, dict) else {}
    return Recording(file.location, cases, metadata, said, tuple(weights), file, names)


def read_inputs(path: str) -> list[Case]:
    """The batch in a file of tensors, or those of a recording, whatever else it holds.

    Raises:
        CheckpointError: it cannot be read.
        LimitError: running a model on it takes far more than on a file of its size.
    """
    file = open_checkpoint(path)
    if file.files[0].metadata.get("format") == FORMAT:
        names, _, _ = _sorted(file)
        recorded = _cases(file, names, _read(file.files[0].metadata, "cases", list, []))
        if recorded:
            return list(recorded)
    _charge(file, 1, file.tensors)
    return [Case(Path(path).name, {name: file.read(name, own=True) for name in file.tensors})]


def _charge(file: Checkpoint, cases: int, inputs: Iterable[str]) -> None:
    """Charge what models make of inputs, which a compressed file says in a few bytes, before it is spent."""
    elements = sum(math.prod(file.tensors[name].shape) for name in inputs)
    beyond = max(elements - DENSE * sum(one.size for one in file.files), 0)
    charge("made", CASE * cases + PLACE * beyond, where=file.location)


def _cases(file: Checkpoint, names: Mapping[tuple[str, int], Mapping[Point, str]], titles: object) -> tuple[Case, ...]:
    inputs = {number: found for (kind, number), found in names.items() if kind == INPUTS}
    _charge(file, len(inputs), (name for found in inputs.values() for name in found.values()))
    cases = []
    for number, found in sorted(inputs.items()):
        title = titles[number] if isinstance(titles, list) and number < len(titles) else f"case {number}"
        cases.append(Case(str(title), {name: file.read(key, own=True) for name, key in found.items()}))
    return tuple(cases)


def _sorted(file: Checkpoint) -> tuple[dict[tuple[str, int], dict[Point, str]], list[str], list[str]]:
    """The tensors by kind and case, in the header's order; the names of weights; and what is wrong with them."""
    names: dict[tuple[str, int], dict[Point, str]] = {}
    weights: list[str] = []
    faults: list[str] = []
    for name, info in file.tensors.items():
        if name.startswith(f"{WEIGHTS}/"):
            weights.append(name.removeprefix(f"{WEIGHTS}/"))
            continue
        found = NUMBERED.fullmatch(name)
        if found is None:
            faults.append(f"a tensor is called {name!r}, expected KIND/CASE/NAME, such as 'float64/0/encoder.layer.1'")
            continue
        kind, case, point = found[1], int(found[2]), found[3]
        names.setdefault((kind, case), {})[point] = name
        held = dtype_name(info.dtype)
        if kind != INPUTS and held != kind.removesuffix(ISOLATED):
            faults.append(f"{name!r} is of {held}, expected {kind.removesuffix(ISOLATED)}")
        exact = file.tensors.get(f"{EXACT}/{case}/{point}")
        if kind != INPUTS and exact is None:
            faults.append(f"{name!r} has no counterpart in float64")
        elif kind != INPUTS and exact is not None and exact.shape != info.shape:
            faults.append(f"{name!r} is {list(info.shape)}, and in float64 {list(exact.shape)}")
    return names, weights, faults


def _read(metadata: Mapping[str, str], key: str, kind: type, faults: list[str]) -> object:
    try:
        found: object = parse(metadata.get(key, "null").encode(errors="surrogatepass"), where=key)
    except JsonError:
        found = ...
    if found is not None and not isinstance(found, kind):
        faults.append(f"metadata {key!r} is not a JSON {'object' if kind is dict else 'list'}")
    return found if isinstance(found, kind) else kind()


def refuse_with_recording(recording: Recording, inputs: Sequence[Case] | None, *, gradients: bool) -> None:
    """Refuse what a recording cannot give.

    Raises:
        VerifyError: other inputs than the recorded ones, or gradients.
    """
    if inputs:
        message = "it was recorded for inputs of its own, and inputs were given"
        hint = "leave one of them out, or record these inputs"
        raise VerifyError(Fault(code=Code.BAD_RECORDING, where=recording.where, message=message, hint=hint))
    if gradients:
        message = "gradients and training need the reference itself, and a recording has activations only"
        raise VerifyError(Fault(code=Code.NO_REFERENCE, where=recording.where, message=message))


def without_rounding(dtype: torch.dtype, why: str = "was not recorded") -> str:
    """The sentence on a dtype that the reference was not run in."""
    name = dtype_name(dtype)
    return f"the reference {why} in {name}: how well the port rounds there is not known"
