"""Distributed checkpoints: every tensor as torch itself gives it, from chunks of any shape, with nothing unpickled."""

from __future__ import annotations

import warnings
from enum import Enum
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict_saver import save as torch_saves

import porting
from porting.checkpoint import CheckpointError, open_checkpoint
from porting.checkpoint.dcp_metadata import COMPARISONS_PER_BOX, MOST_IN_PAIRS, TangledError, overlapping
from porting.errors import Code
from porting.loading import same_bits
from porting.notation.faults import TableError
from tests.checkpoint.distributed import FILE, METADATA, in_pieces, moved, save
from tests.checkpoint.hostile import refused

Box = tuple[tuple[int, ...], tuple[int, ...]]
Drawn = tuple[tuple[int, ...], list[Box]]


def flat(state: dict[str, Any], before: str = "") -> dict[str, Any]:
    """A nested state dict with its names put together, as torch puts them."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
    return found


def by_torch(folder: Path) -> dict[str, Any]:
    """What torch reads."""
    dcp_to_torch_save(folder, folder.parent / "torch.pt")
    return flat(torch.load(folder.parent / "torch.pt", weights_only=True))


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64, torch.uint16]


def test_each_dtype_and_layout_is_what_torch_reads(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    state: dict[str, Any] = {
        str(dtype): torch.randint(2, 90, (5, 3), generator=generator).to(dtype) for dtype in DTYPES
    }
    state |= {"turned": torch.randn(4, 6, generator=generator).t(), "scalar": torch.tensor(3.5)}
    state |= {"part": torch.randn(9, 9, generator=generator)[2:5, 1:4], "empty": torch.zeros(0, 3)}
    checkpoint = open_checkpoint(save(tmp_path / "saved", {"model": state, "lr": 0.1}))
    expected = by_torch(tmp_path / "saved")
    assert {*checkpoint.tensors, "lr"} == {*expected}
    for name, info in checkpoint.tensors.items():
        for own in (False, True):
            found = checkpoint.read(name, own=own)
            assert found.dtype == info.dtype
            assert tuple(found.shape) == info.shape
            assert same_bits(found, expected[name])


def test_what_an_early_python_3_11_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes a member of an enumeration as a call of getattr."""

    def by_name(member: Enum, protocol: object) -> object:
        return getattr, (type(member), member.name)

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    value = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    saved = save(tmp_path / "saved", {"a": value})
    assert b"getattr" in (saved / METADATA).read_bytes()
    assert torch.equal(open_checkpoint(saved).read("a"), value)


def test_a_nested_state_dict_is_named_like_a_folder(tmp_path: Path) -> None:
    state = {
        "model": {"a": torch.ones(2), "b.c": torch.zeros(3)},
        "optim": {"a": torch.ones(4)},
        "step": 3,
        "seed": [1],
    }
    save(tmp_path / "saved", state)
    (tmp_path / "saved" / "config.json").write_text('{"model_type": "x"}')
    part = open_checkpoint(tmp_path / "saved" / "model")
    assert {name: info.shape for name, info in part.tensors.items()} == {"a": (2,), "b.c": (3,)}
    assert part.config == {"model_type": "x"}
    assert part.warnings == ()
    (note,) = open_checkpoint(tmp_path / "saved").warnings
    assert note.code == Code.DCP_PARTS
    assert note.message == "2 entries are not tensors and are not read: 'step', 'seed'"
    assert note.hint == (
        f"it has 'model' (2 tensors), 'optim' (1 tensor); {tmp_path}/saved/model is what was saved under 'model', "
        "by its own names"
    )
    refused(tmp_path / "saved" / "modle", "no tensor whose name begins with 'modle.' (did you mean 'model'?)")
    refused(tmp_path / "saved" / FILE, "one file of a distributed checkpoint", f"pass its directory, {tmp_path}/saved")
    refused(tmp_path / "saved" / METADATA, "one file of a distributed checkpoint")


def test_where_a_model_was_saved_is_said_by_what_torch_wrote_down_and_not_by_its_names(tmp_path: Path) -> None:
    (note,) = open_checkpoint(save(tmp_path / "nested", {"model": {"a.w": torch.ones(2)}})).warnings
    assert note.message == "what was saved has 'model' (1 tensor) in it"
    assert note.hint.startswith(f"{tmp_path}/nested/model is what was saved under 'model'")
    assert open_checkpoint(save(tmp_path / "flat", {"model.a.w": torch.ones(2)})).warnings == ()


def test_without_a_config_it_is_said_where_to_put_it(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"pass table=; suggest writes one, or put the model's config.json beside"):
        porting.load(save(tmp_path / "saved"))


def test_safetensors_beside_it_go_first(tmp_path: Path) -> None:
    save(tmp_path / "saved")
    (tmp_path / "saved" / "pytorch_model.bin").write_bytes(b"")
    refused(tmp_path / "saved", "pytorch_model.bin: this is an empty file")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_what_its_own_writer_of_safetensors_writes_is_a_directory_like_others(tmp_path: Path) -> None:
    state = {"w": torch.arange(6.0).view(3, 2), "b": torch.ones(2)}
    torch_saves(state, storage_writer=HuggingFaceStorageWriter(str(tmp_path / "saved")), no_dist=True)
    checkpoint = open_checkpoint(tmp_path / "saved")
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in state.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_parts_of_safetensors_that_nothing_describes_are_refused_and_what_is_put_together_is_read(
    tmp_path: Path,
) -> None:
    """A row-wise shard of the last process may be missing, and torch would read a smaller tensor."""
    state = {"w": torch.arange(6.0).view(3, 2), "b": torch.ones(2)}
    for folder, together in (("apart", False), ("together", True)):
        writer = HuggingFaceStorageWriter(str(tmp_path / folder), save_distributed=True, enable_consolidation=together)
        torch_saves(state, storage_writer=writer, no_dist=True)
    refused(
        tmp_path / "apart",
        "holds parts of tensors, as torch saves them unconsolidated (shard-00001-model-00001-of-00001.safetensors and",
        "nothing says how large a tensor is",
        "save it again with enable_consolidation of torch's HuggingFaceStorageWriter switched on",
    )
    (part,) = (tmp_path / "apart").iterdir()
    refused(part, "this is what one process saved of a distributed model, with parts of tensors in it")
    checkpoint = open_checkpoint(tmp_path / "together")
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in state.items())


def test_a_chunk_that_is_not_needed_is_not_read(tmp_path: Path) -> None:
    """What is wrong inside of one tensor's chunk is said when that is read, and of all files when they are opened."""
    moved("b", length=12)(tmp_path / "m")
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.read("a").shape == (6, 4)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: tensor 'b', chunk at \[0\]: "):
        checkpoint.read("b")


# --------------------------------------------------------------------------------------------------- chunks


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that cover a tensor: it is cut in two along some axis, and so are the parts, a few times."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        number = draw(st.integers(0, len(boxes) - 1))
        starts, sizes = boxes[number]
        axes = [axis for axis, size in enumerate(sizes) if size > 1]
        if not axes:
            continue
        axis = draw(st.sampled_from(axes))
        at = draw(st.integers(1, sizes[axis] - 1))
        first = (*sizes[:axis], at, *sizes[axis + 1 :])
        second = (*sizes[:axis], sizes[axis] - at, *sizes[axis + 1 :])
        boxes[number] = (starts, first)
        boxes.append(((*starts[:axis], starts[axis] + at, *starts[axis + 1 :]), second))
    return draw(st.permutations(boxes))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple))
    return shape, draw(cuts(shape))


@settings(max_examples=25)
@given(drawn=shapes())
def test_any_cut_is_put_together(
    drawn: tuple[tuple[int, ...], list[Box]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    shape, boxes = drawn
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    checkpoint = open_checkpoint(in_pieces(tmp_path_factory.mktemp("m"), {"w": (whole, boxes)}))
    assert len(checkpoint.pieces("w")) == len(boxes)
    assert torch.equal(checkpoint.read("w"), whole)


@given(drawn=shapes(), more=st.data())
def test_boxes_that_meet_are_found(drawn: Drawn, more: st.DataObject) -> None:
    """Against all elements counted: with one box more, or one that is larger."""
    shape, boxes = drawn
    assert overlapping(boxes) is None
    starts = tuple(more.draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(more.draw(st.integers(1, size - at)) for size, at in zip(shape, starts, strict=True))
    boxes = [*boxes[1:], (starts, sizes)]
    elements = [{*product(*(range(at, at + size) for at, size in zip(*box, strict=True)))} for box in boxes]
    pairs = {(i, j) for j in range(len(boxes)) for i in range(j) if elements[i] & elements[j]}
    found = overlapping(boxes)
    assert (found in pairs) if pairs else found is None


def test_a_million_boxes_in_order_take_few_looks_and_a_tangle_is_refused() -> None:
    grid = [((i, j), (1, 1)) for i in range(300) for j in range(300)]
    assert overlapping(grid) is None
    ring = [((0, 0), (2, 1)), ((2, 0), (1, 2)), ((1, 2), (2, 1)), ((0, 1), (1, 2)), ((1, 1), (1, 1))]
    assert overlapping(ring) is None, "no row along any axis"
    tangle = [((i, MOST_IN_PAIRS - i), (MOST_IN_PAIRS, 2)) for i in range(MOST_IN_PAIRS + 1)]
    with pytest.raises(TangledError):
        overlapping(tangle)
    many = COMPARISONS_PER_BOX * 200
    stairs = [((k, k), (1, many - k)) for k in range(many)] + [((k + 1, k), (many - k, 1)) for k in range(many)]
    with pytest.raises(TangledError):
        overlapping(stairs)


def test_no_message_of_torch_is_needed(tmp_path: Path) -> None:
    """Reading warns of nothing."""
    save(tmp_path / "m")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_checkpoint(tmp_path / "m").read("a")
