"""Which places of an axis are held, against torch's own cuts; and boxes of stored tensors, whatever their strides."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from porting.checkpoint import CheckpointError, open_checkpoint
from porting.checkpoint.files import LocalFile
from porting.plan.copies import Copy
from porting.plan.move import Window
from porting.plan.pieces import SHORT
from porting.sharding.layout import runs
from porting.sharding.writing import pieces
from porting.staging import MoveReader


@given(size=st.integers(0, 40), cuts=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), max_size=3))
def test_runs_are_what_torch_chunk_leaves(size: int, cuts: list[tuple[int, int]]) -> None:
    left = torch.arange(size)
    kept = []
    for count, number in cuts:
        kept.append((count, number % count))
        step = -(-left.numel() // count)
        left = left[number % count * step : (number % count + 1) * step]
    assert [place for start, length in runs(size, kept) for place in range(start, start + length)] == left.tolist()


@given(size=st.integers(1, 23), count=st.integers(1, 4))
def test_one_cut_is_torch_chunk(size: int, count: int) -> None:
    chunks = list(torch.arange(size).chunk(count))
    for number in range(count):
        expected = chunks[number].tolist() if number < len(chunks) else []
        assert [s + i for s, n in runs(size, [(count, number)]) for i in range(n)] == expected


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    most=st.integers(1, 40),
)
def test_pieces_of_a_move_are_the_move(sizes: list[int], order: object, most: int) -> None:
    strides = [math.prod(sizes[place + 1 :]) for place in range(len(sizes))]
    move = Copy("a", "b", tuple(sizes), 3, tuple(strides[::-1]), 5, tuple(strides))

    def places(copy: Copy, offset: int, steps: tuple[int, ...]) -> list[int]:
        whole = torch.arange(10_000).as_strided(copy.sizes, steps, offset)
        return whole.reshape(-1).tolist()

    found = list(pieces(move, most))
    assert all(part.numel <= most for part in found)
    sources = [place for part in found for place in places(part, part.source_offset, part.source_strides)]
    targets = [place for part in found for place in places(part, part.target_offset, part.target_strides)]
    assert sources == places(move, 3, move.source_strides)
    assert targets == places(move, 5, move.target_strides)


@pytest.mark.parametrize("container", ["safetensors", "bin", "bin, columns first"])
@pytest.mark.parametrize(
    ("rows", "columns"), [((3, 9), (0, 40)), ((0, 12), (5, 37)), ((2, 3), (7, 8)), ((0, 12), (0, 3))]
)
def test_a_box_of_a_stored_tensor(
    tmp_path: Path, container: str, rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    value = torch.randn(12, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if container == "safetensors":
        save_file({"x": value}, tmp_path / "model.safetensors")
    else:
        torch.save({"x": value.T.contiguous().T if "columns" in container else value}, tmp_path / "pytorch_model.bin")
    reader = MoveReader(open_checkpoint(tmp_path), sparing=True)
    high, wide = rows[1] - rows[0], columns[1] - columns[0]
    move = Copy("x", "y", (high, wide), rows[0] * 40 + columns[0], (40, 1), 0, (wide, 1))
    [(found, _)] = reader.read(move, Window.of_row(0, high * wide))
    assert torch.equal(found.reshape(high, wide), value[slice(*rows), slice(*columns)])
    if container == "safetensors":
        short = wide * 8 < SHORT  # and near each other: what lies between is read as well
        assert reader.nbytes == (((high - 1) * 40 + wide) if short else high * wide) * 8


@pytest.mark.parametrize("many", [12, 3000])
def test_of_short_runs_that_are_far_from_each_other_nothing_is_read_beside_them(tmp_path: Path, many: int) -> None:
    value = torch.randn(many, 400, generator=torch.Generator().manual_seed(0))
    save_file({"x": value}, tmp_path / "model.safetensors")
    reader = MoveReader(open_checkpoint(tmp_path), sparing=True)
    move = Copy("x", "y", (5, many), 7, (1, 400), 0, (1, 5))
    found = torch.cat([part.clone() for part, _ in reader.read(move, Window.of_row(0, 5 * many))])
    assert torch.equal(found, value[:, 7:12])
    assert reader.nbytes == many * 5 * 4


def test_a_file_that_is_cut_short_behind_the_last_look_at_it_is_a_line_and_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a mapping the first page behind the end would end the process."""
    monkeypatch.setattr(LocalFile, "require_unchanged", lambda self: None)
    value = torch.randn(64, 400, generator=torch.Generator().manual_seed(0))
    save_file({"x": value}, tmp_path / "model.safetensors")
    for width in (3, 300):  # short runs, and long ones
        checkpoint = open_checkpoint(tmp_path)
        size = (tmp_path / "model.safetensors").stat().st_size
        os.truncate(tmp_path / "model.safetensors", 5000)
        move = Copy("x", "y", (64, width), 0, (400, 1), 0, (width, 1))
        with pytest.raises(CheckpointError, match="ended early while it was being read"):
            list(MoveReader(checkpoint, sparing=True).read(move, Window.of_row(0, 64 * width)))
        os.truncate(tmp_path / "model.safetensors", size)


def test_booleans_that_are_none(tmp_path: Path) -> None:
    from tests.checkpoint.hostile import entry, st_file

    (tmp_path / "model.safetensors").write_bytes(st_file({"m": entry([3], 0, 3, "BOOL")}, b"\0\1\7"))
    reader = MoveReader(open_checkpoint(tmp_path), sparing=True)
    [(good, _)] = reader.read(Copy("m", "m", (2,), 0, (1,), 0, (1,)), Window.of_row(0, 2))
    assert good.tolist() == [False, True]
    with pytest.raises(CheckpointError, match="a boolean is stored as the byte 7"):
        list(reader.read(Copy("m", "m", (2,), 1, (1,), 0, (1,)), Window.of_row(0, 2)))
