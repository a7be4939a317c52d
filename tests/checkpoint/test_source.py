from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from porting.checkpoint import CheckpointError, open_checkpoint
from porting.checkpoint import hub as hub_module
from porting.export_files import weight_files
from tests.checkpoint.hostile import index, refused

INDEX = "model.safetensors.index.json"


def test_directory_with_one_file(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "bert", "x": Infinity}')
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.location == str(tmp_path)
    assert checkpoint.path == tmp_path
    assert checkpoint.config["model_type"] == "bert"
    assert checkpoint.index is None
    assert checkpoint.shared == ()
    (file,) = checkpoint.files
    assert (file.name, file.format, file.metadata) == ("model.safetensors", "safetensors", {"format": "pt"})
    assert set(file.names) == set(weights)
    raw = (tmp_path / "model.safetensors").read_bytes()
    assert file.header is not None
    assert raw[8 : 8 + len(file.header)] == file.header
    for name, tensor in weights.items():
        assert torch.equal(checkpoint.read(name), tensor)


def test_file_takes_the_configuration_beside_it(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, tmp_path / "other.safetensors")
    assert open_checkpoint(tmp_path / "other.safetensors").config == {}
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    checkpoint = open_checkpoint(str(tmp_path / "other.safetensors"))
    assert checkpoint.config == {"hidden_size": 4}
    assert checkpoint.path == tmp_path


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_sharded_directory_and_its_index_give_the_same(
    tmp_path: Path, weights: dict[str, torch.Tensor], ending: str
) -> None:
    name = INDEX if ending == "safetensors" else "pytorch_model.bin.index.json"
    shard(tmp_path, [{"a": weights["a"]}, {"c": weights["c"], "b": weights["b"]}], ending=ending)
    for source in (tmp_path, tmp_path / name):
        checkpoint = open_checkpoint(source)
        assert [file.name for file in checkpoint.files] == [f"s0.{ending}", f"s1.{ending}"]
        assert next(iter(checkpoint.tensors)) == "a"
        assert checkpoint.tensors["b"].file == f"s1.{ending}"
        assert checkpoint.index == {
            "metadata": {},
            "weight_map": {"a": f"s0.{ending}"} | dict.fromkeys("cb", f"s1.{ending}"),
        }
        assert checkpoint.index_file is not None
        assert checkpoint.index_file.raw == (tmp_path / name).read_bytes()
        for key, tensor in weights.items():
            assert torch.equal(checkpoint.read(key), tensor)


def shard(root: Path, shards: list[dict[str, torch.Tensor]], *, ending: str = "safetensors") -> None:
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards):
        name = f"s{number}.{ending}"
        weight_map |= dict.fromkeys(tensors, name)
        if ending == "bin":
            torch.save(tensors, root / name)
        else:
            save_file(tensors, root / name)
    (root / (INDEX if ending == "safetensors" else "pytorch_model.bin.index.json")).write_bytes(index(weight_map))


def test_safetensors_go_before_bin(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    torch.save({"old": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert list(open_checkpoint(tmp_path).tensors) == ["old"]
    save_file(weights, tmp_path / "model.safetensors")
    assert "a" in open_checkpoint(tmp_path).tensors


def test_stray_shards_are_not_read(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    shard(tmp_path, [{"a": weights["a"]}])
    (tmp_path / "s7.safetensors").write_bytes(b"an older save")
    assert list(open_checkpoint(tmp_path).tensors) == ["a"]


def test_index_that_names_only_the_single_file_is_no_second_set_of_weights(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / INDEX).write_bytes(index(dict.fromkeys(weights, "model.safetensors")))
    assert open_checkpoint(tmp_path).index is not None


def test_no_checkpoint_there(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    refused(tmp_path, "holds no weights: none of model.safetensors", "check the path")
    refused(tmp_path / "nothing", "no such file or directory", "check the path")
    refused("./nothing/at/all", "no such file or directory")
    refused("nothing.safetensors", "no such file or directory")
    save_file(weights, tmp_path / "foo.safetensors")
    refused(tmp_path, "if foo.safetensors is meant, pass its path")


@pytest.mark.parametrize("empty", ["", "#model"])
def test_an_empty_path_is_not_the_current_directory(
    tmp_path: Path, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, empty: str
) -> None:
    save_file(weights, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="the path is empty"):
        open_checkpoint(empty)
    assert open_checkpoint(".").tensors.keys() == weights.keys()


@pytest.mark.parametrize("name", ["x/" * 5000, "x" * 300, "x" * 300 + "/model", "x/" * 5000 + "#inside"])
def test_a_path_that_is_too_long_is_none(name: str) -> None:
    with pytest.raises(CheckpointError, match="longer than the system lets a path be"):
        open_checkpoint(name)


def test_two_sets_of_weights(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    shard(tmp_path, [{"a": weights["a"]}])
    save_file(weights, tmp_path / "model.safetensors")
    refused(tmp_path, f"model.safetensors and {INDEX} are both here", "pass the path of the one you mean")
    assert list(open_checkpoint(tmp_path / INDEX).tensors) == ["a"]


DIFFUSION = "diffusion_pytorch_model"


def test_the_file_names_of_diffusers_are_found(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    single, several, pickled = (tmp_path / "pipeline" / name for name in ("unet", "transformer", "vae"))
    for folder in (single, several, pickled):
        folder.mkdir(parents=True)
    save_file(weights, single / f"{DIFFUSION}.safetensors")
    torch.save(weights, pickled / f"{DIFFUSION}.bin")
    for number, (name, tensor) in enumerate(weights.items()):
        save_file({name: tensor}, several / f"{DIFFUSION}-{number}.safetensors")
    shards = {name: f"{DIFFUSION}-{number}.safetensors" for number, name in enumerate(weights)}
    (several / f"{DIFFUSION}.safetensors.index.json").write_bytes(index(shards))
    for folder in (single, several, pickled):
        assert {*open_checkpoint(folder).tensors} == {*weights}
    (tmp_path / "pipeline" / "scheduler").mkdir()
    (tmp_path / "pipeline" / "linked").symlink_to(single)
    refused(
        tmp_path / "pipeline",
        "these folders in it hold weights: 'transformer', 'unet', 'vae'",
        f"pass the one you mean: {tmp_path}/pipeline/transformer",
    )
    save_file(weights, single / "model.safetensors")
    refused(single, f"{DIFFUSION}.safetensors and model.safetensors are both here")


def test_an_export_keeps_the_file_names_of_diffusers(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    for name, save_as in (("a", save_file), ("b", torch.save)):
        (tmp_path / name).mkdir()
        save_as(weights, tmp_path / name / f"{DIFFUSION}.{'safetensors' if name == 'a' else 'bin'}")
        files = weight_files(open_checkpoint(tmp_path / name), weights, to=None, where="x")
        assert [*files] == [f"{DIFFUSION}.safetensors"]


def test_file_of_another_kind_is_named(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "weights.dat"
    path.write_bytes(save(weights))
    refused(path, "a safetensors file whose name does not say so (rename it to end in .safetensors)")
    path.write_bytes(b"<html>")
    refused(path, "this is an HTML page")
    path.write_bytes(b"something else altogether")
    refused(path, "this is not a checkpoint")


def test_revision_of_a_local_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a revision, 'main', was given for a path on this machine"):
        open_checkpoint(tmp_path, revision="main")


def test_what_may_have_been_meant_as_a_path_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny-bert").mkdir()
    (tmp_path / "models.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint("models/tiny-brt", local_files_only=True)
    assert str(caught.value).splitlines()[-1] == (
        "models/tiny-brt: taken for a model on the hub, since there is no such path on this machine "
        "(did you mean 'models/tiny-bert'?) [checkpoint-not-found]"
    )
    with pytest.raises(CheckpointError, match=r"no such path on this machine \(did you mean 'models'\?\)"):
        open_checkpoint("model", local_files_only=True)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint("someone/tiny-brt", local_files_only=True)
    assert "taken for" not in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("./models/tiny-brt", "models/tiny-bert"), ("../modles/tiny-bert", ""), ("a.safetensors", "b.safetensors")],
)
def test_what_can_be_no_model_s_name_has_a_near_path_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, meant: str
) -> None:
    (tmp_path / "models" / "tiny-bert").mkdir(parents=True)
    (tmp_path / "b.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    meant = meant or "../models/tiny-bert"
    if typed.startswith(".."):
        monkeypatch.chdir(tmp_path / "models")
    with pytest.raises(CheckpointError, match=re.escape(f"(did you mean '{meant}'?)")):
        open_checkpoint(typed)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("models/tiny-brt", "models/tiny-bert"), ("modles/tiny-bert", "models/tiny-bert"), ("modles", "models")],
)
def test_a_near_path_is_named_before_the_hub_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, meant: str
) -> None:
    (tmp_path / "models" / "tiny-bert").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    def asked(*args: object, **kwargs: object) -> None:
        raise RuntimeError("the hub is asked")

    monkeypatch.setattr(hub_module, "is_offline", lambda local: False)
    monkeypatch.setattr(hub_module, "download", asked)
    with pytest.raises(RuntimeError, match="the hub is asked"), pytest.warns(match=f"did you mean '{meant}'"):
        open_checkpoint(typed)
