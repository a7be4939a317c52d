"""Conversions that torch.distributed.checkpoint loads: to the bit, the same bytes each time, whole or not at all."""

from __future__ import annotations

import os
import pickletools
import tempfile
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from porting.checkpoint import open_checkpoint
from porting.checkpoint.bin_file import locate_tensor
from porting.checkpoint.dcp_archive import frame
from porting.checkpoint.files import LocalFile
from porting.checkpoint.layout import ElementType
from porting.comparing.differences import diff
from porting.converting.conversion import convert
from porting.converting.integrity import verify_files
from porting.converting.making import Made, Maker
from porting.notation.table import parse_table
from porting.plan.recipe import Recipe
from porting.target import TargetError
from tests.checkpoint.test_dcp import DTYPES, flat
from tests.converting.drawing import Drawn, bits, tables, write
from tests.converting.test_processes import contents
from tests.converting.test_round_trip import read

TABLE = parse_table('[mapping]\nname = "t"\n[tensors]\n"{*n}" = "{*n}"\n')


def by_torch(folder: Path) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as name:
        dcp_to_torch_save(folder, Path(name, "x"))
        return flat(torch.load(Path(name, "x"), weights_only=True))


@settings(max_examples=12, deadline=None)
@given(tables(), st.sampled_from([None, 64, 1000]), st.sampled_from(["dcp", "dcp/model"]))
def test_there_and_back(drawn: Drawn, shard_size: int | None, to: str) -> None:
    table = parse_table(drawn.table)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        convert(write(root / "a", drawn.sources), root / "b", table, shard_size=shard_size, to=to)
        part = to.partition("/")[2]
        found = {key.removeprefix(f"{part}."): tensor for key, tensor in by_torch(root / "b").items()}
        assert {key: bits(tensor) for key, tensor in found.items()} == {
            key: bits(tensor) for key, tensor in drawn.targets.items()
        }
        assert verify_files(root / "b").same
        convert(root / "b" / part, root / "c", table, reverse=True)
        again = read(root / "c")
        assert {key: bits(tensor) for key, tensor in again.items()} == {
            key: bits(tensor) for key, tensor in drawn.sources.items()
        }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(2)
    tensors = {
        str(dtype).removeprefix("torch."): torch.randint(2, 90, (7, 3), generator=generator).to(dtype)
        for dtype in DTYPES
    }
    tensors |= {"wide": torch.randn(300, 400, generator=generator), "scalar": torch.tensor(2.5)}
    return write(tmp_path / "source", tensors | {"empty": torch.zeros(0, 3)})


def test_each_dtype_is_what_torch_reads_and_torch_s_own_archive_is_no_other(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", TABLE, to="dcp")
    expected, found = open_checkpoint(source), by_torch(tmp_path / "out")
    assert {*found} == {*expected.tensors}
    assert all(bits(found[name]) == bits(expected.read(name)) for name in found)
    again = open_checkpoint(tmp_path / "out")
    assert all(bits(again.read(name)) == bits(expected.read(name)) for name in found)
    assert {again.pieces(name)[0].extent.start % 64 for name in found if name != "empty"} == {0}
    (piece,) = again.pieces("wide")
    assert piece.extent.record is not None
    assert piece.extent.record.crc, "its checksum is there, and was compared when it was read"


def test_it_is_a_source_as_well_with_tensors_of_no_elements(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "a", TABLE, to="dcp")
    done = convert(tmp_path / "a", tmp_path / "b", TABLE)
    assert done.digests == convert(source, tmp_path / "c", TABLE).digests
    assert diff(tmp_path / "a", source).equal
    assert verify_files(tmp_path / "b").same


def test_the_bytes_depend_on_nothing_but_the_input(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "a", TABLE, to="dcp", threads=1, memory=1 << 20)
    convert(source, tmp_path / "b", TABLE, to="dcp", threads=3, memory=9 << 20)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    opcodes = {one.name for one, _, _ in pickletools.genops((tmp_path / "a" / ".metadata").read_bytes())}
    assert not {opcode for opcode in opcodes if "MEMO" in opcode or "GET" in opcode}, (
        "no object stands for another by its identity"
    )
    assert {*contents(tmp_path / "a")} == {".metadata", "__0_0.distcp", "config.json", "provenance.json"}


def test_what_was_killed_goes_on_and_its_checksums_are_right(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "a", TABLE, to="dcp")
    real = Maker.make
    made: list[str] = []

    def make(self: Maker, recipe: Recipe, target: int, at: int) -> Made:
        if len(made) == 5:
            raise KeyboardInterrupt
        made.append(recipe.name)
        return real(self, recipe, target, at)

    with monkeypatch.context() as patch:
        patch.setattr(Maker, "make", make)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "b", TABLE, to="dcp", threads=1)
    done = convert(source, tmp_path / "b", TABLE, to="dcp", threads=1)
    assert done.resumed > 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_any_flipped_bit_is_found_and_said_where(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", TABLE, to="dcp/model")
    (piece,) = open_checkpoint(tmp_path / "out" / "model").pieces("float32")
    path = tmp_path / "out" / "__0_0.distcp"
    raw = path.read_bytes()
    at = piece.extent.start
    told = {}
    for place in (at, at + 83, at - 1, at - 60, at + 90, at - 250, len(raw) - 3):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :])
        report = verify_files(tmp_path / "out")
        assert not report.same, place - at
        told[place - at] = report.problems
    path.write_bytes(raw)
    assert told[0] == told[83] == ("__0_0.distcp: tensor 'float32' is not as it was written",)
    assert told[-1] == ("__0_0.distcp: what stands around its tensors is not as it was written",)
    assert all(line.startswith("__0_0.distcp: ") for lines in told.values() for line in lines)
    (tmp_path / "out" / ".metadata").write_bytes(b"")
    assert any(".metadata" in line for line in verify_files(tmp_path / "out").problems)


@pytest.mark.parametrize("to", ["safetensors", "dcp/", "dcp/a/b", "dcp/a.b", "DCP", ""])
def test_other_formats_are_refused(source: Path, tmp_path: Path, to: str) -> None:
    with pytest.raises(TargetError, match="expected bin, or dcp, or dcp/model for what is saved under 'model'"):
        convert(source, tmp_path / "out", TABLE, to=to)
    assert os.listdir(tmp_path) == ["source"]


def test_only_a_distributed_checkpoint_is_replaced_by_one(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", TABLE, to="dcp")
    (tmp_path / "out" / "config.json").unlink()
    convert(source, tmp_path / "out", TABLE, to="dcp/x", overwrite=True)
    assert by_torch(tmp_path / "out").keys() == {f"x.{name}" for name in open_checkpoint(source).tensors}


@pytest.mark.parametrize("shape", [(1 << 30, 5), ((1 << 32) - 2,), ((1 << 32) - 1,), (1 << 32,)])
def test_more_than_four_gigabytes(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Zip files count in 32 bits unless they say otherwise; the file here has holes and takes no room."""
    dtype = torch.uint8
    made = frame(dtype, shape, at=0)
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.write(made.front)
        file.seek(made.size - len(made.back))
        file.write(made.back)
    extent = locate_tensor(LocalFile(path), element=ElementType.of(dtype), shape=shape)
    assert extent.start == len(made.front)
    assert extent.start % 64 == 0
    assert extent.stop - extent.start == torch.Size(shape).numel()
    with zipfile.ZipFile(path) as archive:
        assert [info.file_size for info in archive.infolist()][-1] == extent.stop - extent.start
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = torch._C.PyTorchFileReader(str(path))
    assert reader.get_record_offset("data/0") == extent.start  # type: ignore[attr-defined]  # torch does not declare it
