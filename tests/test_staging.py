"""Moves out of tensors that lie in pieces: random tables, random cuts, random boxes of the result."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from porting.checkpoint import open_checkpoint
from porting.converting import making
from porting.converting.conversion import convert
from porting.converting.reverse_table import places_of
from porting.notation.table import parse_table
from porting.ops import NOTHING
from porting.plan.check import check
from porting.plan.recipe import forward_recipes
from porting.sharding.filling import compute_box
from porting.sharding.layout import Box
from porting.staging import MoveReader
from tests.checkpoint.distributed import in_pieces
from tests.checkpoint.test_dcp import cuts
from tests.converting.drawing import Drawn, bits, tables
from tests.converting.test_round_trip import read


@settings(max_examples=30, deadline=None)
@given(tables(), st.data())
def test_any_cut_of_the_sources_gives_the_same(drawn: Drawn, more: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        patch.setattr(making, "BLOCK", 64)
        root = Path(name)
        sources = {key: (tensor, more.draw(cuts(tuple(tensor.shape)))) for key, tensor in drawn.sources.items()}
        table = parse_table(drawn.table)
        convert(in_pieces(root / "a", sources), root / "b", table, memory=2 << 20)
        found = read(root / "b")
        assert {name: bits(value) for name, value in found.items()} == {
            name: bits(value) for name, value in drawn.targets.items()
        }


@settings(max_examples=30, deadline=None)
@given(tables(), st.booleans(), st.data())
def test_any_box_of_the_result_is_read_from_pieces(drawn: Drawn, turned: bool, more: st.DataObject) -> None:
    """From the chunks of a distributed checkpoint; and from a pickled one whose tensors are stored transposed."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        if turned:
            strided = {
                key: value.mT.contiguous().mT if value.ndim > 1 else value for key, value in drawn.sources.items()
            }
            torch.save(strided, root / "pytorch_model.bin")
        else:
            in_pieces(
                root, {key: (tensor, more.draw(cuts(tuple(tensor.shape)))) for key, tensor in drawn.sources.items()}
            )
        table, checkpoint = parse_table(drawn.table), open_checkpoint(root)
        plan = check(table, checkpoint, places_of(table, checkpoint.tensors, {}))
        reader = MoveReader(checkpoint, sparing=True)
        for step in plan.steps:
            for recipe in forward_recipes(step, plan.sources, plan.targets, NOTHING):
                starts = tuple(more.draw(st.integers(0, size - 1)) for size in recipe.shape)
                sizes = tuple(
                    more.draw(st.integers(1, size - at)) for size, at in zip(recipe.shape, starts, strict=True)
                )
                box = tuple(slice(at, at + size) for at, size in zip(starts, sizes, strict=True))
                found = compute_box(recipe, Box(starts, sizes, (0,) * len(sizes)), reader)
                assert bits(found) == bits(drawn.targets[recipe.name][box])


@pytest.mark.parametrize("turned", [False, True])
def test_a_window_that_begins_in_the_middle_of_a_row(turned: bool, tmp_path: Path) -> None:
    """It is a run of the tensor and no box of it: of its pieces, and of rows that lie apart in the file, it is none."""
    whole = torch.arange(40.0).view(4, 10)
    if turned:
        torch.save({"w": whole.t().contiguous().t()}, tmp_path / "pytorch_model.bin")
    else:
        in_pieces(tmp_path, {"w": (whole, [((0, 0), (2, 10)), ((2, 0), (2, 4)), ((2, 4), (2, 6))])})
    reader = MoveReader(open_checkpoint(tmp_path), sparing=True)
    for start in range(40):
        for stop in range(start + 1, 41):
            assert torch.equal(reader.row("w", start, stop), whole.flatten()[start:stop])
