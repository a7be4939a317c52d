"""What the kernel copies: what lies alike in its pages, which headers are padded for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from porting.checkpoint import open_checkpoint
from porting.converting import convert
from porting.notation.table import parse_table
from tests.converting.drawing import write

TABLE = parse_table('[mapping]\nname = "t"\n[tensors]\n"a.{i}" = "a_much_longer_name.{i}"\n')


def copied(source: Path, destination: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that the kernel copied."""
    real, counts = os.copy_file_range, [0]

    def count(*arguments: int) -> int:
        done = real(*arguments)
        counts.append(done)
        return done

    with monkeypatch.context() as patch:
        patch.setattr(os, "copy_file_range", count)
        convert(source, destination, TABLE)
    return sum(counts)


def test_headers_are_padded_so_that_the_kernel_copies_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    source = write(tmp_path / "a", {"a.0": torch.randn(64, 1024), "a.1": torch.randn(10), "a.2": torch.randn(512, 256)})
    assert copied(source, tmp_path / "b", monkeypatch) >= 512 * 256 * 4
    before, after = (open_checkpoint(tmp_path / one) for one in "ab")
    starts = before.pieces("a.2")[0].extent.start, after.pieces("a_much_longer_name.2")[0].extent.start
    assert starts[0] != starts[1]
    assert (starts[0] - starts[1]) % 4096 == 0
    assert starts[1] % 8 == 0
    for number in range(3):
        assert torch.equal(before.read(f"a.{number}"), after.read(f"a_much_longer_name.{number}"))


def test_what_does_not_lie_alike_is_read_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header of an odd length: data is aligned to 8 bytes all the same."""
    source = write(tmp_path / "a", {"a.0": torch.arange(9000.0)})
    path = source / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    path.write_bytes((length + 3).to_bytes(8, "little") + raw[8 : 8 + length] + b"   " + raw[8 + length :])
    assert copied(source, tmp_path / "b", monkeypatch) == 0
    after = open_checkpoint(tmp_path / "b")
    assert after.pieces("a_much_longer_name.0")[0].extent.start % 8 == 0
    assert torch.equal(after.read("a_much_longer_name.0"), torch.arange(9000.0))
