"""Long runs are found, in the target's order, and what is carried is read once and by no detour."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from porting import staging
from porting.checkpoint import open_checkpoint
from porting.converting.conversion import convert
from porting.notation.table import parse_table
from porting.plan.copies import Copy
from porting.plan.move import Window
from porting.staging import MoveReader, in_long_runs
from tests.converting.drawing import write
from tests.plan.test_pieces import boxes, pairs

HEAD = '[mapping]\nname = "t"\n[tensors]\n'


@settings(max_examples=100, deadline=None)
@given(boxes(), st.booleans())
def test_runs_are_read_to_their_places(drawn: tuple[Copy, int, int], sparing: bool) -> None:
    """Straight to their places in the window's memory where they are long, else through the buffer."""
    copy, _, _ = drawn
    places = pairs(copy)
    values = torch.arange(max(source for source, _ in places) + 1, dtype=torch.int32)
    length = max(target for _, target in places) + 1
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "LONG", 8)
        reader = MoveReader(open_checkpoint(write(Path(name) / "a", {copy.source: values})), sparing=sparing)
        found = torch.full((length,), -1, dtype=torch.int32)
        for part, move in reader.read(copy, Window.of_row(0, length), found):
            assert not in_long_runs(move, 4)
            found.as_strided(move.sizes, move.target_strides, move.target_offset).copy_(part)
    expected = torch.full((length,), -1, dtype=torch.int32)
    for source, target in places:
        expected[target] = source
    assert torch.equal(found, expected)


def test_short_runs_are_not_carried() -> None:
    short = Copy("s", "t", (10, 1023), 0, (2046, 1), 0, (1023, 1))
    assert not in_long_runs(short, 4)
    assert in_long_runs(short, 8)
    assert in_long_runs(Copy("s", "t", (3,), 5, (1,), 0, (1,)), 1), "one run is as long as it can be"


RULES = {
    "renamed": '"a" = "x"\n"b" = "y"\n"c" = "z"\n',
    "joined": '"{p:a,b,c} [h e]" = "x [(p h) e]"\n',
    "interleaved": '"{p:a,b,c} [(h d) e]" = "x [(h p d) e]"\n[sizes]\nh = 2\n',
    "turned": '"{p:a,b,c} [h e]" = "{p:a,b,c} [e h]"\n',
    "split": '"w [(p h) e]" = "w{p:0,1,2} [h e]"\n',
}


def expected(kind: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    a, b, c = (tensors[name] for name in "abc") if kind != "split" else tensors["w"].chunk(3)
    match kind:
        case "renamed":
            return {"x": a, "y": b, "z": c}
        case "joined":
            return {"x": torch.cat([a, b, c])}
        case "interleaved":
            return {
                "x": torch.stack([tensor.reshape(2, -1, tensor.shape[1]) for tensor in (a, b, c)], 1).reshape(
                    -1, a.shape[1]
                )
            }
        case "turned":
            return {"a": a.T, "b": b.T, "c": c.T}
        case _:
            return {"w0": a, "w1": b, "w2": c}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", RULES)
def test_every_byte_is_read_once(
    kind: str, dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest for the record included: whatever is read from first to last needs no reading of its own."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(512, 300) for name in "abc"} if kind != "split" else {"w": torch.randn(3 * 512, 300)}
    source = write(tmp_path / "source", tensors)
    read, real = [0], os.preadv

    def preadv(descriptor: int, buffers: Sequence[memoryview], at: int) -> int:
        read[0] += sum(map(len, buffers))
        return real(descriptor, buffers, at)

    monkeypatch.setattr(os, "preadv", preadv)
    done = convert(source, tmp_path / "out", parse_table(HEAD + RULES[kind]), dtype=dtype, threads=1)
    found = load_file(tmp_path / "out" / "model.safetensors")
    wanted = {name: tensor.to(dtype or tensor.dtype) for name, tensor in expected(kind, tensors).items()}
    assert found.keys() == wanted.keys() == done.digests.keys()
    assert all(torch.equal(found[name], one) for name, one in wanted.items())
    assert read[0] == sum(tensor.nbytes for tensor in tensors.values())


def test_runs_of_several_dtypes_and_any_place_in_the_file() -> None:
    """Elements that are wider than their place's alignment, and sources of two dtypes cast into one."""
    torch.manual_seed(1)
    tensors = {"a": torch.randn(70_000).double(), "b": torch.randn(70_001).double(), "small": torch.arange(3).char()}
    table = parse_table(HEAD + '"a" = "x"\n"b" = "y"\n"small" = "z"\n')
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        source = write(root / "source", tensors)
        for dtype in (None, torch.float32, torch.bfloat16):
            convert(source, root / "out", table, dtype=dtype, overwrite=True, memory=2 << 20)
            found = load_file(root / "out" / "model.safetensors")
            for old, new in zip(("a", "b"), ("x", "y"), strict=True):
                assert torch.equal(found[new], tensors[old].to(dtype or torch.float64))
            assert torch.equal(found["z"], tensors["small"])
