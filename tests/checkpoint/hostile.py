"""Making files that are wrong in one way each, and seeing them refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from porting.checkpoint import CheckpointError, open_checkpoint


def st_file(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file with this header (an object, or raw bytes) and these data bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def entry(shape: object, start: object, stop: object, dtype: object = "U8") -> dict[str, object]:
    """A tensor of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def index(weight_map: Mapping[str, object], total_size: object = None) -> bytes:
    """An index of shards."""
    metadata = {} if total_size is None else {"total_size": total_size}
    return json.dumps({"metadata": metadata, "weight_map": weight_map}).encode()


def refused(source: Path | str, *messages: str) -> None:
    """Opening fails with these messages, each line naming a place."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(source)
    for message in messages:
        assert message in str(caught.value)
    for line in str(caught.value).split("\n"):
        assert line.isprintable()
        assert line.endswith("]")
