"""Random tables there and back: the values of the port, and the very values of the checkpoint again."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from porting.converting import making
from porting.converting.conversion import convert
from porting.converting.integrity import verify_files
from porting.notation.table import parse_table
from tests.converting.drawing import Drawn, bits, tables, write


@settings(max_examples=40, deadline=None)
@given(tables(), st.integers(1, 3), st.sampled_from([1, 2, 40]), st.sampled_from([None, 64, 1000]))
def test_there_and_back(drawn: Drawn, threads: int, memory: int, shard_size: int | None) -> None:
    table = parse_table(drawn.table)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        source = write(root / "a", drawn.sources)
        convert(source, root / "b", table, threads=threads, memory=memory * threads << 20, shard_size=shard_size)
        found = read(root / "b")
        assert {name: bits(value) for name, value in found.items()} == {
            name: bits(value) for name, value in drawn.targets.items()
        }
        convert(root / "b", root / "c", table, reverse=True, threads=threads, memory=memory * threads << 20)
        again = read(root / "c")
        assert {name: bits(value) for name, value in again.items()} == {
            name: bits(value) for name, value in drawn.sources.items()
        }
        assert verify_files(root / "b").same
        assert verify_files(root / "c").same


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("block", [64, 1000, 4096])
@settings(max_examples=15, deadline=None)
@given(tables())
def test_blocks_and_buffers_of_any_size_give_the_same(block: int, drawn: Drawn) -> None:
    """Tensors of a test are small: the blocks are made so as well, so that every tensor is made in many."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        patch.setattr(making, "BLOCK", block)
        patch.setattr(making, "PIECE", block)
        patch.setattr(making, "LONG", 0)
        root = Path(name)
        convert(write(root / "a", drawn.sources), root / "b", parse_table(drawn.table), memory=2 << 20)
        found = read(root / "b")
        assert {name: bits(value) for name, value in found.items()} == {
            name: bits(value) for name, value in drawn.targets.items()
        }
