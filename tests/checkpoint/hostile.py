"""Making files that are wrong in one way each, and seeing them refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from porting.checkpoint import open_checkpoint
from porting.errors import PortingError
from tests.converting.drawing import bits

HostileFile = tuple[str, Callable[[], bytes], str]
"""The fault, a function that makes the file, and a part of the error message."""


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
    """Opening fails, or reading what was opened, with these messages, each line naming a place."""
    with pytest.raises(PortingError) as caught:
        tensors_of(source)
    for message in messages:
        assert message in str(caught.value)
    for line in str(caught.value).split("\n"):
        assert line.isprintable()
        assert line.endswith("]")


def tensors_of(source: Path | str) -> dict[str, bytes]:
    """Every tensor of a checkpoint, to the bit."""
    checkpoint = open_checkpoint(source)
    return {name: bits(checkpoint.read(name)) for name in checkpoint.tensors}


def torn(good: bytes, path: Path, *, count: int = 150) -> None:
    """Open damaged copies of a file: bytes changed, cut short, a piece twice.  Each opens, or has an error of ours."""
    draw = random.Random(0)  # noqa: S311  # no secret
    opened = 0
    for number in range(count):
        raw = bytearray(good)
        at = draw.randrange(len(raw))
        if number % 5 == 0:
            del raw[at:]
        elif number % 5 == 1:
            raw[at:at] = raw[at : at + draw.randrange(1, 40)]
        else:
            for _ in range(draw.randrange(1, 4)):
                raw[draw.randrange(len(raw))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        path.write_bytes(raw)
        with suppress(PortingError):
            tensors_of(path)
            opened += 1
    assert opened < count
