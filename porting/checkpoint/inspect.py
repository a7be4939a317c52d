"""A summary of a checkpoint from its headers: tensors grouped by the pattern of their names."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from porting.checkpoint.checkpoint import Checkpoint
from porting.checkpoint.inner_path import InnerPath, InnerPathNeededError
from porting.checkpoint.layout import ElementType, TensorInfo
from porting.checkpoint.registry import CONTAINERS
from porting.checkpoint.source import open_checkpoint
from porting.limits import charge, reading

DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """Tensors of one shape and dtype whose names differ only in numbers.

    Attributes:
        pattern: the names; a number that varies is written as its range, ``layer.{0..11}.weight``.
        dtype: the element type, without ``torch.``.
    """

    pattern: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class FileSummary:
    """One file of weights: its name, format, bytes, number of tensors and metadata."""

    name: str
    format: str
    size: int
    count: int
    metadata: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The summary that :func:`inspect_checkpoint` makes.

    Attributes:
        commit: the commit of a model on the hub, else None.
        architectures: as ``config.json`` names them.
        model_type: as ``config.json`` names it, or the settings of a GGUF file; None when they do not.
        groups: the tensors, in the order of the files.
        shared: groups of names that stand for one storage.
        parameters: how many elements they have in all.
        warnings: what is wrong without changing any value.
        inner_paths: of a file that holds more than a state dict, the inner paths at which there are some: name one.
            Then there are no groups.  Of a file that is read as a whole too, those with which its names begin.
    """

    location: str
    commit: str | None
    architectures: tuple[str, ...]
    model_type: str | None
    groups: tuple[TensorGroup, ...]
    files: tuple[FileSummary, ...]
    shared: tuple[tuple[str, ...], ...]
    count: int
    parameters: int
    nbytes: int
    warnings: tuple[str, ...]
    inner_paths: tuple[InnerPath, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """The summary as dictionaries, lists, strings and numbers, for JSON."""
        return asdict(self)


class _Family(NamedTuple):
    """The common properties of a group: the text between the numbers of the names, shape and dtype."""

    literals: tuple[str, ...]
    shape: tuple[int, ...]
    element: ElementType


def inspect_checkpoint(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    follow_links: bool = False,
) -> Inspection:
    """Summarize a checkpoint; only headers are read, and of a model on the hub only headers are fetched.

    Args:
        source: as for :func:`porting.checkpoint.open_checkpoint`, and so are the other arguments.
        revision: a branch, tag or commit of a model on the hub.
        token: the hub's access token; True for the stored one, False for none.
        cache_dir: where files from the hub are kept.
        local_files_only: take what the cache holds and ask the hub for nothing.
        follow_links: take files that are links to outside the checkpoint.

    Raises:
        CheckpointError: with every fault found in its files.
        HubError: the hub, or the cache of it, did not give what was asked for.

    >>> import porting
    >>> source = porting.embedded_checkpoint()
    >>> found = inspect_checkpoint(source)
    >>> found.model_type, found.count
    ('bert', 62)
    """
    try:
        checkpoint = open_checkpoint(
            source,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            weights=False,
            follow_links=follow_links,
        )
    except InnerPathNeededError as found:
        return _of_inner_paths(found, os.fspath(source))
    with reading(checkpoint.location):
        return _inspection(checkpoint)


def _inspection(checkpoint: Checkpoint) -> Inspection:
    tensors = checkpoint.tensors.values()
    general = checkpoint.config.get("general")
    model_type = checkpoint.config.get("model_type", general.get("architecture") if isinstance(general, dict) else None)
    architectures = checkpoint.config.get("architectures")
    return Inspection(
        location=checkpoint.location,
        commit=checkpoint.commit,
        architectures=tuple(map(str, architectures)) if isinstance(architectures, list) else (),
        model_type=model_type if isinstance(model_type, str) else None,
        groups=group_tensors(tensors),
        files=tuple(
            FileSummary(
                name=file.name, format=file.format, size=file.size, count=len(file.names), metadata=dict(file.metadata)
            )
            for file in checkpoint.files
        ),
        shared=tuple(tuple(sorted(names)) for names in checkpoint.shared),
        count=len(tensors),
        parameters=sum(info.nbytes // info.element.itemsize for info in tensors),
        nbytes=sum(info.nbytes for info in tensors),
        warnings=tuple(fault.line for fault in checkpoint.warnings),
        inner_paths=_beginnings(checkpoint),
    )


def _beginnings(checkpoint: Checkpoint) -> tuple[InnerPath, ...]:
    """The inner paths with which names begin, as far as one key behind what all have; the largest first."""
    formats = {file.format for file in checkpoint.files}
    separator = next((one.separator for one in CONTAINERS if {one.name} == formats), "")
    if not separator or "#" in checkpoint.location:
        return ()
    charge("objects", sum(name.count(separator) for name in checkpoint.tensors), where=checkpoint.location)
    names = [name.split(separator) for name in checkpoint.tensors]
    levels = zip(*(keys[:-1] for keys in names), strict=False)  # as many as the shortest name has
    shared = [keys[0] for keys in takewhile(lambda keys: len({*keys}) == 1, levels)]
    counts = Counter(separator.join(keys[: len(shared) + 1]) for keys in names if len(keys) > len(shared) + 1)
    found = [(separator.join(shared), len(names))] if shared else []
    return tuple(InnerPath(path=path, tensors=count) for path, count in (*found, *counts.most_common()))


def _of_inner_paths(found: InnerPathNeededError, location: str) -> Inspection:
    """The summary of a file that needs an inner path: its state dicts."""
    count = sum(place.tensors for place in found.places)
    file = FileSummary(
        name=Path(found.source.where).name, format=found.format, size=found.source.size, count=count, metadata={}
    )
    return Inspection(
        location=location,
        commit=None,
        architectures=(),
        model_type=None,
        groups=(),
        files=(file,),
        shared=(),
        count=count,
        parameters=0,
        nbytes=0,
        warnings=tuple(fault.line for fault in found.notes),
        inner_paths=found.places,
    )


def group_tensors(tensors: Iterable[TensorInfo]) -> tuple[TensorGroup, ...]:
    """Group tensors by name, shape and dtype, in the order of each group's first tensor.

    A group's pattern stands for exactly its tensors: where the numbers of two places do not combine freely,
    there are several groups.

    >>> spec = {"shape": (2,), "element": ElementType.FLOAT32, "nbytes": 8, "file": "model.safetensors"}
    >>> group_tensors(TensorInfo(name=f"h.{i}.w", **spec) for i in range(3))[0].pattern
    'h.{0..2}.w'
    """
    families: dict[_Family, list[tuple[str, ...]]] = {}
    for info in tensors:
        parts = DIGITS.split(info.name)
        charge("objects", len(parts) // 4, where="the names of its tensors")
        family = _Family(tuple(parts[::2]), info.shape, info.element)
        families.setdefault(family, []).append(tuple(parts[1::2]))
    groups = []
    for family, numbers in families.items():
        charge("objects", len(numbers) * len(numbers[0]) ** 2 // 16, where="the names of its tensors")
        for box in _boxes(numbers):
            count = math.prod(map(len, box))
            groups.append(
                TensorGroup(
                    pattern=_pattern(family.literals, box),
                    shape=family.shape,
                    dtype=str(family.element),
                    count=count,
                    nbytes=count * math.prod(family.shape) * family.element.itemsize,
                )
            )
    return tuple(groups)


def group_names(names: Iterable[str]) -> dict[str, int]:
    """Group names that differ only in numbers: each pattern, with how many names it stands for.

    >>> group_names(["model-1-of-3.pt", "config.json", "model-2-of-3.pt", "model-3-of-3.pt"])
    {'model-{1..3}-of-3.pt': 3, 'config.json': 1}
    """
    families: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for name in names:
        parts = DIGITS.split(name)
        families.setdefault(tuple(parts[::2]), []).append(tuple(parts[1::2]))
    boxes = [(literals, box) for literals, numbers in families.items() for box in _boxes(numbers)]
    return {_pattern(literals, box): math.prod(map(len, box)) for literals, box in boxes}


Box = tuple[tuple[str, ...], ...]
"""The values of each number in a name; the box has all their combinations."""


def _boxes(numbers: Sequence[tuple[str, ...]]) -> list[Box]:
    """Join combinations of numbers to as few products of sets as possible.

    >>> _boxes([("0", "0"), ("0", "1"), ("1", "0"), ("1", "1"), ("2", "5")])
    [(('0', '1'), ('0', '1')), (('2',), ('5',))]
    """
    boxes: list[Box] = [tuple((number,) for number in item) for item in numbers]
    for place in range(len(numbers[0])):
        joined: dict[Box, list[str]] = {}
        for box in boxes:
            joined.setdefault(box[:place] + box[place + 1 :], []).extend(box[place])
        boxes = [(*rest[:place], tuple(values), *rest[place:]) for rest, values in joined.items()]
    return boxes


def _pattern(literals: Sequence[str], box: Box) -> str:
    text = literals[0]
    for values, literal in zip(box, literals[1:], strict=True):
        text += (values[0] if len(values) == 1 else "{" + _ranges(values) + "}") + literal
    return text


def _ranges(values: Sequence[str]) -> str:
    """Numbers as ranges.

    >>> _ranges(["0", "1", "2", "5"])
    '0..2,5'
    """
    ordered = sorted(values, key=lambda value: (int(value[:4000]), len(value)))
    runs: list[list[str]] = []
    for value in ordered:
        if runs and len(value) < 4000 and value == _next(runs[-1][-1]):
            runs[-1].append(value)
        else:
            runs.append([value])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


def _next(value: str) -> str:
    """The number after this one, with as many leading zeros."""
    return str(int(value[:4000]) + 1).zfill(len(value) if value.startswith("0") else 0)
