"""Several checkpoints as one: names, configs, what is protected, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from porting.checkpoint import CheckpointError, inspect_checkpoint, open_checkpoint
from porting.checkpoint.joined import merged
from porting.comparing.differences import diff
from porting.converting.conversion import convert
from porting.converting.integrity import verify_files
from porting.notation.table import Table, parse_table
from tests.checkpoint.hostile import refused
from tests.converting.drawing import bits, values

MERGE = """\
[mapping]
name = "merge"

[sizes]
r = "lora.rank"

[[rule]]
source = { w = "layers.{i}.w [o e]", a = "lora.layers.{i}.a [r e]", b = "lora.layers.{i}.b [o r]" }
target = "layers.{i}.w [o e]"
formula = "w + lora.scaling.alpha / lora.rank * sum(b * a, r)"

[rest]
"{*rest}" = "{*rest}"
"""


def saved(folder: Path, tensors: dict[str, torch.Tensor], config: object, name: str = "model.safetensors") -> Path:
    folder.mkdir()
    save_file(tensors, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tensors = {f"layers.{i}.w": values((6, 4), torch.float64, i) for i in range(2)} | {"norm": torch.rand(4)}
    folder = saved(tmp_path / "base", tensors, {"width": 4})
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    tensors = {f"layers.{i}.a": values((2, 4), torch.float64, 5 + i) for i in range(2)}
    tensors |= {f"layers.{i}.b": values((6, 2), torch.float64, 7 + i) for i in range(2)}
    folder = saved(tmp_path / "adapter", tensors, {}, "adapter_model.safetensors")
    (folder / "config.json").rename(folder / "adapter_config.json")
    (folder / "adapter_config.json").write_text('{"rank": 2, "scaling": {"alpha": 3}}')
    return folder


@pytest.fixture
def table() -> Table:
    return parse_table(MERGE)


def test_the_second_has_a_name_in_front_of_its_tensors_and_its_config(base: Path, adapter: Path) -> None:
    checkpoint = open_checkpoint(f"{base}+lora={adapter}")
    assert {*checkpoint.tensors} == {"layers.0.w", "layers.1.w", "norm"} | {
        f"lora.{name}" for name in open_checkpoint(adapter).tensors
    }
    assert checkpoint.config == {"width": 4, "lora": {"rank": 2, "scaling": {"alpha": 3}}}
    for name in open_checkpoint(adapter).tensors:
        assert bits(checkpoint.read(f"lora.{name}")) == bits(open_checkpoint(adapter).read(name))
    assert checkpoint.paths == [base / "model.safetensors", adapter / "adapter_model.safetensors"]
    assert inspect_checkpoint(f"{base}+lora={adapter}").count == 7


def test_an_adapter_is_merged_into_its_model(base: Path, adapter: Path, table: Table, tmp_path: Path) -> None:
    convert(f"{base}+lora={adapter}", tmp_path / "out", table, derive=True)
    out, model, lora = (open_checkpoint(path) for path in (tmp_path / "out", base, adapter))
    for i in range(2):
        expected = model.read(f"layers.{i}.w") + 1.5 * lora.read(f"layers.{i}.b") @ lora.read(f"layers.{i}.a")
        torch.testing.assert_close(out.read(f"layers.{i}.w"), expected, rtol=1e-14, atol=1e-14)
    assert torch.equal(out.read("norm"), model.read("norm"))
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"width": 4}
    assert (tmp_path / "out/tokenizer.json").exists()
    assert verify_files(tmp_path / "out").same
    record = (tmp_path / "out/provenance.json").read_text()
    assert '"lora/adapter_model.safetensors"' in record
    assert str(tmp_path) not in record


def test_three_of_any_container_with_inner_paths(base: Path, tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "epoch": 3}, tmp_path / "tower.pt")
    torch.save({"w": torch.zeros(2)}, tmp_path / "head.pt")
    checkpoint = open_checkpoint(f"{base}+tower={tmp_path}/tower.pt#model+head={tmp_path}/head.pt")
    assert [float(checkpoint.read(f"{name}.w")[0]) for name in ("tower", "head")] == [1, 0]
    assert diff(f"{tmp_path}/tower.pt#model+x={base}", f"{tmp_path}/tower.pt#model+x={base}").equal


def test_what_is_wrong_with_the_second_is_a_warning(base: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "_extra_state": None}, tmp_path / "other.pt")
    warnings = open_checkpoint(f"{base}+other={tmp_path}/other.pt").warnings
    assert len(warnings) == 1
    assert "_extra_state" in warnings[0].message


def test_what_exists_under_the_whole_name_is_meant(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a+b=c", {"w": torch.ones(2)}, {})
    assert [*open_checkpoint(folder).tensors] == ["w"]


def test_a_path_that_holds_the_name_of_another_is_read_as_what_exists(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "a+y=b", {"w": torch.ones(2)}, {})
    assert "lora.w" in open_checkpoint("base+lora=a+y=b").tensors
    assert "lora.w" in open_checkpoint("base+lora=a+y=b/model.safetensors").tensors
    saved(tmp_path / "a", {"w": torch.zeros(2)}, {})
    assert "lora.w" in open_checkpoint("base+lora=a+y=b").tensors


def test_two_readings_of_which_all_paths_exist_are_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("a", "b", "a+y=b")):
        saved(tmp_path / name, {"w": torch.full((2,), float(number))}, {})
    refused("a+y=b", "this may be a and b, or a+y=b: all of them are there (rename what is not meant)")
    refused("base+lora=a+y=b", "this may be base and a and b, or base and a+y=b: all of them are there")
    assert {*open_checkpoint("a+z=b").tensors} == {"w", "z.w"}


def test_names_that_are_taken_are_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    refused(f"{base}+layers={adapter}", "has the tensor 'layers.0.w', so that 'layers' cannot stand for")
    refused(f"{base}+width={adapter}", "has the field 'width' in its config")
    refused(f"{base}+a={adapter}+a={adapter}", "two of the checkpoints get one name")
    refused(f"{base}+lora={tmp_path}/nowhere", "no such file or directory")


def test_a_name_that_is_a_folder_of_the_first_is_refused(adapter: Path, tmp_path: Path) -> None:
    """Files are known by their names: one of the second would be read where one of the first is meant."""
    for number in range(2):
        (tmp_path / f"model_{number}").mkdir()
        save_file({"w": torch.full((2,), float(number))}, tmp_path / f"model_{number}" / "adapter_model.safetensors")
    ranks = f"{tmp_path}/model_{{r}}"
    for first in (ranks, f"{ranks}/adapter_model.safetensors"):
        refused(f"{first}+model_0={adapter}", "has the file 'model_0/adapter_model.safetensors', so that 'model_0' can")
        whole = open_checkpoint(f"{first}+x={adapter}")
        assert [float(whole.read(f"rank{number}.w")[0]) for number in range(2)] == [0, 1]
        assert torch.equal(whole.read("x.layers.0.a"), open_checkpoint(adapter).read("layers.0.a"))


def test_two_files_of_one_name_are_refused(base: Path, adapter: Path) -> None:
    first, second = open_checkpoint(base), open_checkpoint(adapter)
    second.sources = {"model.safetensors": second.sources["adapter_model.safetensors"]}
    with pytest.raises(
        CheckpointError,
        match=r"base/model\.safetensors and .*adapter_model\.safetensors would both be the file 'model\.safetensors'",
    ):
        merged("x", [("", "", first), ("a.", "", second)])


@pytest.mark.parametrize("inside", ["base", "adapter"])
def test_the_destination_lies_in_none_of_them(
    base: Path, adapter: Path, table: Table, tmp_path: Path, inside: str
) -> None:
    with pytest.raises(CheckpointError, match="lies inside the source"):
        convert(f"{base}+lora={adapter}", tmp_path / inside / "out", table, derive=True)


def test_a_link_of_the_second_that_leaves_its_directory_is_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (adapter / "adapter_model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    refused(f"{base}+lora={adapter}", "outside the checkpoint")


def test_files_of_the_second_that_are_exchanged_are_noticed(base: Path, adapter: Path) -> None:
    checkpoint = open_checkpoint(f"{base}+lora={adapter}")
    raw = (adapter / "adapter_model.safetensors").read_bytes()
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match="another file"):
        checkpoint.require_in_place()


@pytest.mark.parametrize("count", [64, 3000])
def test_too_many_checkpoints_are_refused(base: Path, count: int) -> None:
    refused(str(base) + "".join(f"+a{number}={base}" for number in range(count)), "at most 64 are joined")
