"""What the ranks of a model saved, read as one checkpoint whose names tell the ranks apart."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from porting.checkpoint import CheckpointError, inspect_checkpoint, open_checkpoint
from porting.checkpoint.joined import MOST
from porting.cli.app import app
from porting.comparing.differences import diff
from porting.converting.conversion import convert
from porting.notation.table import parse_table
from tests.checkpoint.hostile import refused
from tests.converting.drawing import bits

TABLE = parse_table("""
[mapping]
name = "join"

[tensors]
"rank{r}.layers.{i}.up.weight [o e]" = "layers.{i}.up.weight [(r o) e]"
"rank{r}.layers.{i}.down.weight [o e]" = "layers.{i}.down.weight [o (r e)]"
""")


COPY = '[mapping]\nname = "copy"\n[rest]\n"{*rest}" = "{*rest}"\n'


def whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    up = {f"layers.{i}.up.weight": torch.randn(8, 3) for i in range(2)}
    return up | {f"layers.{i}.down.weight": torch.randn(3, 8) for i in range(2)}


def of_rank(number: int, count: int = 2) -> dict[str, torch.Tensor]:
    """The rows, or the columns, that a rank has."""
    split = {name: tensor.chunk(count, 0 if ".up." in name else 1)[number].clone() for name, tensor in whole().items()}
    return dict(reversed(split.items())) if number else split


def test_ranks_are_joined_by_a_table_and_divided_again(tmp_path: Path) -> None:
    for number in range(2):
        torch.save(of_rank(number), tmp_path / f"consolidated.{number:02}.pth")
    (tmp_path / "consolidated.x.pth").write_bytes(b"no rank")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine"}))
    pattern = f"{tmp_path}/consolidated.{{r}}.pth"
    checkpoint = open_checkpoint(pattern)
    assert checkpoint.ranks == 2
    assert checkpoint.config == {"model_type": "mine"}
    assert [file.name for file in checkpoint.files] == ["consolidated.00.pth", "consolidated.01.pth"]
    for number in range(2):
        for name, tensor in of_rank(number).items():
            assert bits(checkpoint.read(f"rank{number}.{name}")) == bits(tensor)
    assert inspect_checkpoint(pattern).groups[0].pattern == "rank{0..1}.layers.{0..1}.up.weight"
    convert(pattern, tmp_path / "joined", TABLE)
    joined = open_checkpoint(tmp_path / "joined")
    assert {name: bits(joined.read(name)) for name in joined.tensors} == {
        n: bits(tensor) for n, tensor in whole().items()
    }
    convert(tmp_path / "joined", tmp_path / "back", TABLE, reverse=True)
    assert diff(pattern, tmp_path / "back").equal


def test_commands_take_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        torch.save({"module": of_rank(number), "step": 1}, f"mp_rank_{number:02}_model_states.pt")
    pattern = "mp_rank_{r}_model_states.pt"
    runner = CliRunner()
    found = runner.invoke(app, ["inspect", pattern])
    assert "next: porting inspect 'mp_rank_{r}_model_states.pt#module'" in found.stdout
    for words in (["inspect"], ["hash"], ["diff", f"{pattern}#module"]):
        done = runner.invoke(app, [*words, f"{pattern}#module"])
        assert done.exit_code == 0, done.output
    assert runner.invoke(app, ["export", f"{pattern}#module", "out"]).exit_code == 2, "no table is for its names"


def test_ranks_in_folders_with_an_inner_path(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"model_{number}").mkdir()
        torch.save({"model": {"w": torch.full((2,), float(number))}, "n": 1}, tmp_path / f"model_{number}" / "optim.pt")
    checkpoint = open_checkpoint(f"{tmp_path}/model_{{r}}/optim.pt#model")
    assert [float(checkpoint.read(f"rank{number}.w")[0]) for number in range(3)] == [0, 1, 2]
    assert [file.name for file in checkpoint.files] == [f"model_{number}/optim.pt" for number in range(3)]
    with pytest.raises(CheckpointError, match=r"open '.*/model_\{r\}/optim.pt#model'"):
        open_checkpoint(f"{tmp_path}/model_{{r}}/optim.pt")
    for number in range(3):
        save_file({"w": torch.ones(1)}, tmp_path / f"model_{number}" / "model.safetensors")
    assert [*open_checkpoint(f"{tmp_path}/model_{{r}}").tensors] == ["rank0.w", "rank1.w", "rank2.w"]


def test_ranks_that_are_directories_are_read_each_from_its_own_files(tmp_path: Path) -> None:
    """Their files have the same names, single ones as well as shards."""
    for number in range(3):
        folder = tmp_path / f"one_{number}"
        folder.mkdir()
        save_file({"w": torch.full((2,), float(number))}, folder / "model.safetensors")
        folder = tmp_path / f"sharded_{number}" / "step"
        folder.mkdir(parents=True)
        for shard, name in enumerate("wv"):
            save_file({name: torch.full((2,), 10.0 * number + shard)}, folder / f"s{shard}.safetensors")
        index = {"weight_map": {"w": "s0.safetensors", "v": "s1.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for pattern, names in (("one_{r}", "w"), ("one_{r}/", "w"), ("sharded_{r}/step", "wv")):
        checkpoint = open_checkpoint(f"{tmp_path}/{pattern}")
        found = {name: float(checkpoint.read(name)[0]) for name in checkpoint.tensors}
        step = 1 if names == "w" else 10
        assert found == {f"rank{r}.{name}": step * r + shard for r in range(3) for shard, name in enumerate(names)}
        assert all(path.is_file() for path in checkpoint.paths)
        assert len({*checkpoint.paths}) == 3 * len(names)
    copied = convert(f"{tmp_path}/one_{{r}}", tmp_path / "out", parse_table(COPY), derive=True)
    assert float(open_checkpoint(copied.path).read("rank0.w")[0]) == 0


def test_ranks_that_share_a_shard_read_it_once(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "shared.safetensors")
    for number in range(2):
        index = json.dumps({"weight_map": {"w": "shared.safetensors"}})
        (tmp_path / f"m{number}.safetensors.index.json").write_text(index)
    checkpoint = open_checkpoint(f"{tmp_path}/m{{r}}.safetensors.index.json")
    assert [float(checkpoint.read(f"rank{number}.w")[0]) for number in range(2)] == [1, 1]


def test_every_rank_has_to_be_there_once(tmp_path: Path) -> None:
    def pattern(text: str) -> str:
        return f"{tmp_path}/{text}"

    refused(pattern("m{r}.pt"), "no name in", "has a number in the place of {r}")
    refused(pattern("m{r}/{r}.pt"), "{r} stands in it more than once")
    refused(pattern("no/folder/m{r}.pt"), "no/folder")
    for number in (0, 3):
        torch.save({"w": torch.ones(1)}, tmp_path / f"m{number}.pt")
    refused(pattern("m{r}.pt"), "there is no rank 1", "there is no rank 2")
    for name in ("m1", "m2", "m02"):
        torch.save({"w": torch.ones(1)}, tmp_path / f"{name}.pt")
    refused(pattern("m{r}.pt"), "rank 2 is 'm02.pt' and 'm2.pt'")
    (tmp_path / "m02.pt").unlink()
    assert open_checkpoint(pattern("m{r}.pt")).ranks == 4
    (tmp_path / "m3.pt").write_bytes(b"")
    refused(pattern("m{r}.pt"), "m3.pt: this is an empty file")
    (tmp_path / "m999999999.pt").write_bytes(b"")
    refused(pattern("m{r}.pt"), "and 4073 more faults, not shown", f"there is no rank {4}")
    assert MOST == 4096


def test_a_link_of_one_rank_that_leaves_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    torch.save({"w": torch.ones(1)}, tmp_path / "outside.bin")
    for number in range(2):
        (tmp_path / "run" / f"r{number}").mkdir()
        (tmp_path / "run" / f"r{number}" / "pytorch_model.bin").symlink_to(tmp_path / "outside.bin")
    refused(f"{tmp_path}/run/r{{r}}", "outside the checkpoint")


def test_a_rank_that_is_a_link_leads_nowhere_outside(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    torch.save({"w": torch.ones(1)}, tmp_path / "outside" / "w.pt")
    run = tmp_path / "run"
    (run / "r0").mkdir(parents=True)
    for path in (run / "m0.pt", run / "r0" / "w.pt"):
        torch.save({"w": torch.zeros(1)}, path)
    (run / "m1.pt").symlink_to(tmp_path / "outside" / "w.pt")
    (run / "r1").symlink_to(tmp_path / "outside")
    refused(f"{run}/m{{r}}.pt", "m1.pt: a link to", "outside the checkpoint (copy the file here")
    refused(f"{run}/r{{r}}/w.pt", "r1: a link where a directory should be (copy the directory here")
    refused(f"{run}/r{{r}}", "holds no weights")
    for pattern in ("m{r}.pt", "r{r}/w.pt"):
        trusted = open_checkpoint(f"{run}/{pattern}", follow_links=True)
        assert [float(trusted.read(f"rank{number}.w")) for number in range(2)] == [0, 1]
    (run / "m1.pt").unlink()
    (run / "m1.pt").symlink_to("m0.pt")
    assert open_checkpoint(f"{run}/m{{r}}.pt").ranks == 2


def test_each_rank_looks_after_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "m0.pt")
    for number in range(1, 100):
        (tmp_path / f"m{number}.pt").hardlink_to(tmp_path / "m0.pt")
    asked: list[object] = []
    before = os.stat

    def counted(path: str, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        asked.append(path)
        return before(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(os, "stat", counted)
    assert open_checkpoint(f"{tmp_path}/m{{r}}.pt").ranks == 100
    assert len(asked) < 1500, "as many for each rank, however many there are"


def test_ranks_in_the_cache_of_the_hub_are_links_to_its_blobs(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    for number in range(2):
        torch.save({"w": torch.ones(1)}, blobs / f"{number}")
        for path in (snapshot / f"m{number}.pt", snapshot / f"r{number}" / "w.pt"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(blobs / f"{number}")
    assert open_checkpoint(f"{snapshot}/m{{r}}.pt").ranks == 2
    assert open_checkpoint(f"{snapshot}/r{{r}}/w.pt").ranks == 2


def test_a_home_of_nobody_is_an_ordinary_name() -> None:
    for path in ("~nobody at all/m{r}.pt", "~nobody at all/m.pt", "~nobody at all/m.pt#model"):
        refused(path, "nobody at all")


def test_a_file_that_changes_in_between_is_noticed(tmp_path: Path) -> None:
    for number in range(2):
        torch.save({"w": torch.ones(1)}, tmp_path / f"m{number}.pt")
    checkpoint = open_checkpoint(f"{tmp_path}/m{{r}}.pt")
    torch.save({"w": torch.zeros(1)}, tmp_path / "m1.pt")
    with pytest.raises(CheckpointError, match="changed after it was opened"):
        checkpoint.require_in_place()
