"""The header of a safetensors file that is about to be written: the same text for the same tensors, always."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from porting.checkpoint.layout import SAFETENSORS_DTYPES
from porting.checkpoint.safetensors_file import parse_header

NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


class Shaped(Protocol):
    """What a header says of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extents."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """A header and the place that it gives to each tensor.

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
        """All that stands in front of the data."""
        return len(self.text).to_bytes(8, "little") + self.text

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return 8 + len(self.text) + self.data


def nbytes(tensor: Shaped) -> int:
    """The bytes of a tensor's elements."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def new_header(tensors: Mapping[str, Shaped], metadata: Mapping[str, str] | None, *, where: str) -> Header:
    """A canonical header.

    Args:
        tensors: shapes and dtypes, in the order in which the header is to list them.
        metadata: strings for ``__metadata__``, which are sorted.
        where: the file, for messages.

    Returns:
        The header.  The data goes in the order of the tensors but wide elements first, so that each is aligned.

    Raises:
        CheckpointError: a name, a size or the metadata cannot be written.
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
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offsets[name], offsets[name] + nbytes(tensor)],
        }
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    # What is written can be read again: the same parser judges names, sizes and metadata.
    parse_header(text, where=where, name=Path(where).name, size=8 + len(text) + end)
    return Header(text=text, offsets=offsets, data=end)
