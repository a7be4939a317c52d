"""Distributed checkpoints for tests: a good one that torch wrote, and what becomes of it when it is changed."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as torch_saves

FILE = "__0_0.distcp"
METADATA = ".metadata"


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {"a": torch.randn(6, 4, generator=generator), "b": torch.randn(5, generator=generator).bfloat16()}


def save(folder: Path, values: dict[str, Any] | None = None) -> Path:
    """A checkpoint as torch writes it from one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is one process only
        torch_saves(tensors() if values is None else values, checkpoint_id=folder, no_dist=True)
    return folder


def archive(value: object) -> bytes:
    """What torch.save makes of it."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def in_pieces(folder: Path, values: dict[str, tuple[Tensor, list[tuple[tuple[int, ...], tuple[int, ...]]]]]) -> Path:
    """A checkpoint of tensors cut into boxes, each given by where it begins and its sizes."""
    save(folder, {name: tensor for name, (tensor, _) in values.items()})
    metadata = read(folder)
    metadata.storage_data = {}
    data = b""
    for name, (tensor, boxes) in values.items():
        metadata.state_dict_metadata[name].chunks = [
            ChunkStorageMetadata(torch.Size(starts), torch.Size(sizes)) for starts, sizes in boxes
        ]
        for starts, sizes in boxes:
            box = tensor[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))].clone()
            raw = archive(box)
            metadata.storage_data[MetadataIndex(name, starts)] = _StorageInfo(FILE, len(data), len(raw))
            data += raw
    (folder / FILE).write_bytes(data)
    write(folder, metadata)
    return folder


def read(folder: Path) -> Any:
    """torch's own objects; the file is one of ours."""
    return pickle.loads((folder / METADATA).read_bytes())  # the tests wrote it


def write(folder: Path, metadata: object) -> None:
    (folder / METADATA).write_bytes(pickle.dumps(metadata, protocol=4))


def changed(change: Callable[[Any], object]) -> Callable[[Path], object]:
    """A good checkpoint whose metadata is changed."""

    def make(folder: Path) -> None:
        save(folder)
        metadata = read(folder)
        change(metadata)
        write(folder, metadata)

    return make


def moved(name: str = "a", **fields: object) -> Callable[[Path], object]:
    """The storage of a tensor is said to be elsewhere."""

    def change(metadata: Metadata) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == name)
        metadata.storage_data[index] = replace(metadata.storage_data[index], **fields)

    return changed(change)


def cut(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Callable[[Path], object]:
    """Chunks of tensor ``a``, each with a storage."""

    def change(metadata: Any) -> None:
        chunks = [ChunkStorageMetadata(torch.Size(starts), torch.Size(sizes)) for starts, sizes in boxes]
        metadata.state_dict_metadata["a"].chunks = chunks
        for number, (starts, _) in enumerate(boxes):
            metadata.storage_data[MetadataIndex("a", starts)] = _StorageInfo(FILE, 7 * number, 7)

    return changed(change)


def holding(raw: bytes, name: str = "a") -> Callable[[Path], object]:
    """These bytes stand where the archive of a tensor does."""

    def make(folder: Path) -> None:
        save(folder)
        metadata = read(folder)
        index = next(index for index in metadata.storage_data if index.fqn == name)
        data = (folder / FILE).read_bytes()
        metadata.storage_data[index] = replace(metadata.storage_data[index], offset=len(data), length=len(raw))
        (folder / FILE).write_bytes(data + raw)
        write(folder, metadata)

    return make


def metadata_is(raw: bytes) -> Callable[[Path], object]:
    """The metadata is these bytes."""

    def make(folder: Path) -> None:
        save(folder)
        (folder / METADATA).write_bytes(raw)

    return make
