"""``check``."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from porting.plan.scan import scan
from tests.cli.conftest import Run
from tests.cli.modules import OWN, own_modules, write_own
from tests.hub_server import Hub, hub
from tests.small_checkpoint import tensors, write_checkpoint

__all__ = ["hub", "own_modules"]


def test_check_counts_what_each_rule_reads_and_writes(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    result = run("check", checkpoint, *OWN, "--verbose")
    assert result.exit_code == 0, result.stderr
    (line,) = [one for one in result.stdout.splitlines() if "qkv.weight" in one]
    assert line.split()[-3:-1] == ["9", "3"]
    assert line.split()[-1].startswith("own.toml:")
    assert "fits: 53 of 64 tensors fill 41 of 41 places, 11 left out" in result.stdout
    assert result.stdout.splitlines()[-1] == "next: porting verify c --table own.toml --into own_model.py:build"


def test_check_says_in_a_few_lines_that_all_fits(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    brief = run("check", checkpoint, *OWN).stdout.splitlines()
    assert len(brief) <= 10
    assert brief[-2] == "fits: 53 of 64 tensors fill 41 of 41 places, 11 left out"
    verbose = run("check", checkpoint, *OWN, "--verbose").stdout.splitlines()
    assert brief[-2:] == verbose[-2:]
    rows = [" ".join(line.split()) for line in brief if line.startswith("left out")]
    assert "left out bert.pooler.dense.bias and 1 more no pooler here" in rows


def test_check_says_what_is_left_out_and_why(run: Run, checkpoint: Path) -> None:
    rows = [" ".join(line.split()) for line in run("check", checkpoint).stdout.splitlines()]
    assert "left out cls.predictions.decoder.bias equals cls.predictions.bias, proven" in rows
    rows = [" ".join(line.split()) for line in run("check", checkpoint, "--headers-only").stdout.splitlines()]
    assert "left out cls.predictions.decoder.bias equals cls.predictions.bias, not read" in rows


def test_check_all_lists_each_tensor(run: Run, checkpoint: Path) -> None:
    lines = [" ".join(line.split()) for line in run("check", checkpoint, "--all").stdout.splitlines()]
    ours = "bert.layers.2.output.weight [24, 40] float32"
    assert f"bert.encoder.layer.2.output.dense.weight [24, 40] float32 {ours}" in lines


def test_check_names_all_that_does_not_fit(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    table = Path("own.toml").read_text()
    Path("own.toml").write_text(table.replace(".up.{w", ".upp.{w").replace('"norm.{w', '"nrom.{w'))
    result = run("check", checkpoint, *OWN)
    assert result.exit_code == 2
    assert result.stdout == ""
    *lines, last = result.stderr.splitlines()
    assert len(lines) >= 2
    assert all(line.startswith("error: ") for line in lines)
    for missing, meant in (("norm.weight", "nrom.weight"), ("blocks.0.up.weight", "blocks.0.upp.weight")):
        (line,) = [one for one in lines if f"'{missing}'" in one and "[unwritten-parameter]" in one]
        assert f" has '{meant}': is it this one?)" in line
    assert sum("[no-target]" in line for line in lines) == 2
    assert last == "next: porting explain no-target unwritten-parameter"


def test_check_json_has_every_move(run: Run, checkpoint: Path) -> None:
    found = json.loads(run("check", checkpoint, "--json").stdout)
    assert (found["fits"], found["read"], found["written"], found["new"]) == (True, 62, 62, [])
    (move,) = [one for one in found["moves"] if "bert.encoder.layer.1.intermediate.dense.bias" in one["from"]]
    assert move["to"] == ["bert.layers.1.intermediate.bias"]
    assert [one["proven"] for one in found["left_out"]] == [True, True]


def test_check_json_of_what_does_not_fit(run: Run, checkpoint: Path) -> None:
    result = run("check", checkpoint, "--architecture", "BertForQuestionAnswering", "--json")
    assert result.exit_code == 2
    (fault,) = json.loads(result.stdout)["faults"]
    assert fault["code"] == "fresh-not-allowed"


def test_a_copy_that_is_no_copy(run: Run, checkpoint: Path) -> None:
    other = {"cls.predictions.decoder.bias": torch.randn(40)}
    folder = write_checkpoint(Path("untied"), values=other)
    assert run("check", folder, "--headers-only").exit_code == 0
    result = run("check", folder)
    assert result.exit_code == 2
    assert "cls.predictions.decoder.bias" in result.stderr
    assert "[drop-differs]" in result.stderr


def test_weights_that_are_no_numbers_are_a_warning(run: Run, checkpoint: Path) -> None:
    name = "bert.encoder.layer.1.output.dense.weight"
    broken = tensors()[name]
    broken[3, 5] = torch.nan
    folder = write_checkpoint(Path("nan"), values={name: broken})
    result = run("check", folder)
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: ")
    assert name in result.stderr
    assert "1 NaN (the first at [3, 5])" in result.stderr
    assert run("check", folder, "--headers-only").stderr == ""
    assert len(json.loads(run("check", folder, "--json").stdout)["warnings"]) == 1


def test_a_declared_cast(run: Run, checkpoint: Path) -> None:
    assert run("check", checkpoint, "--dtype", "float16").exit_code == 0


def test_a_table_of_strangers_is_not_trusted(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    result = run("check", checkpoint, "--table", "own.toml")
    assert result.exit_code == 2
    assert "[untrusted-target]" in result.stderr
    assert run("check", checkpoint, "--table", "own.toml", "--trust").exit_code == 0


def test_headers_only_fetches_no_weights_of_a_model_on_the_hub(run: Run, checkpoint: Path, hub: Hub) -> None:
    hub.add("org/small", checkpoint)
    result = run("check", "org/small", "--headers-only")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "next: porting verify org/small"
    cache = Path.cwd().parent / "hf"
    assert not list(cache.rglob("model.safetensors"))
    assert run("check", "org/small").exit_code == 0
    assert list(cache.rglob("model.safetensors"))


def test_check_doubts_probes_and_inputs_that_name_nothing(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    table = Path("own.toml").read_text()
    Path("own.toml").write_text(table.replace('"bert.embeddings" = "norm"', '"bert.embeddings" = "nrom"'))
    result = run("check", checkpoint, *OWN)
    assert result.exit_code == 0
    assert "the module has no part 'nrom' of the probe" in result.stderr + result.stdout
    assert "did you mean 'norm'?" in result.stderr + result.stdout


def test_into_without_a_name_says_how_to_write_it(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    result = run("check", checkpoint, "--into", "own_model.py", "--table", "own.toml")
    assert result.exit_code == 2
    assert "write own_model.py:NAME, a class or a function in it" in result.stderr


def test_a_table_in_the_place_of_the_checkpoint_is_recognised(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    result = run("check", "own.toml")
    assert result.exit_code == 2
    assert "this is a TOML text" in result.stderr
    assert "a mapping table is passed as --table" in result.stderr
    result = run("check", "own_model.py")
    assert "what builds a module is passed as --into file.py:NAME" in result.stderr


def test_a_shard_that_is_replaced_while_the_values_are_read_is_noticed(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was proven holds for no state that the directory had."""
    folder, shard = checkpoint, "model-2.safetensors"
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    parts = {"model-1.safetensors": names[:20], shard: names[20:]}
    for file, part in parts.items():
        save_file({name: whole[name] for name in part}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(folder / shard, tmp_path / shard)

    def replaced(*arguments: Any) -> Any:  # as scan takes them
        os.replace(tmp_path / shard, folder / shard)
        return scan(*arguments)

    monkeypatch.setattr("porting.plan.scan.scan", replaced)
    result = run("check", folder)
    assert result.exit_code == 2
    assert f"{shard}: the file changed after it was opened: another file stands there now" in result.stderr


def test_a_part_in_place_of_the_module_is_answered_in_a_few_lines(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    words = ("--table", "own.toml", "--into", "own_model.py:Layer")
    brief = run("check", checkpoint, *words).stderr.splitlines()
    every = run("check", checkpoint, *words, "--verbose").stderr.splitlines()
    faults = json.loads(run("check", checkpoint, *words, "--json").stdout)["faults"]
    assert len(brief) < 20 <= len(every)
    assert len(every) == len(faults) + 1
    assert brief[-2:] == [f"error: {len(faults)} faults; --verbose lists all", every[-1]]
    assert {*brief} & {*every}
    left = [int(line.split()[2]) for line in brief if line.startswith("error: and ")]
    shown = [line for line in brief if line in every[:-1]]
    assert sum(left) + len(shown) == len(faults)
    assert run("load", checkpoint, *words).stderr.splitlines()[-2].endswith("faults; --json lists all")
