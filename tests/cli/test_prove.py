"""``check`` and ``verify``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Run
from tests.cli.modules import write_own
from tests.hub_server import Hub, hub
from tests.small_checkpoint import TRUNK, tensors, write_checkpoint

__all__ = ["hub"]

OWN = ("--table", "own.toml", "--into", "own_model.py:build")


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test imports its own ``own_model``."""
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_model", raising=False)


def test_check_counts_what_each_rule_reads_and_writes(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    result = run("check", checkpoint, *OWN)
    assert result.exit_code == 0, result.stderr
    (line,) = [one for one in result.stdout.splitlines() if "qkv.weight" in one]
    assert line.split()[-3:-1] == ["9", "3"]
    assert line.split()[-1].startswith("own.toml:")
    assert "fits: 53 of 64 tensors fill 41 of 41 places, 11 left out" in result.stdout
    assert result.stdout.splitlines()[-1] == "next: porting verify c --table own.toml --into own_model.py:build"


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


def test_a_new_head_has_to_be_allowed(run: Run, checkpoint: Path) -> None:
    words = ("check", checkpoint, "--architecture", "BertForTokenClassification")
    result = run(*words)
    assert result.exit_code == 2
    assert "--fresh" in result.stderr
    result = run(*words, "--fresh")
    assert result.exit_code == 0
    assert "new classifier.weight not in the checkpoint" in " ".join(result.stdout.split())
    assert result.stdout.splitlines()[-1].endswith("--architecture BertForTokenClassification --fresh")


def test_a_declared_cast(run: Run, checkpoint: Path) -> None:
    assert run("check", checkpoint, "--dtype", "float16").exit_code == 0


def test_a_table_of_strangers_is_not_trusted(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    result = run("check", checkpoint, "--table", "own.toml")
    assert result.exit_code == 2
    assert "[untrusted-target]" in result.stderr
    assert run("check", checkpoint, "--table", "own.toml", "--trust").exit_code == 0


def test_verify_a_faithful_port(run: Run, checkpoint: Path) -> None:
    result = run("verify", checkpoint, "--dtype", "float32", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.stdout
    assert result.stdout.startswith("FAITHFUL ")
    assert "bfloat16" in result.stdout
    assert result.stdout.splitlines()[-1] == "next: porting export c ./exported"


def test_verify_names_the_guilty_module_of_ones_own(run: Run, checkpoint: Path) -> None:
    write_own(Path(), bug=("nn.functional.gelu", "nn.functional.relu"))
    result = run("verify", checkpoint, *OWN)
    assert result.exit_code == 1
    assert result.stdout.startswith("DIFFERENT ")
    assert "first guilty module: blocks.0" in result.stdout
    assert (
        result.stdout.splitlines()[-1] == "next: porting verify c --table own.toml --into own_model.py:build --verbose"
    )


def test_verify_json_and_a_row_for_each_probe(run: Run, checkpoint: Path) -> None:
    report = json.loads(run("verify", checkpoint, "--json", "--seed", "5").stdout)
    assert report["verdict"] == "faithful"
    assert report["seed"] == 5
    every = run("verify", checkpoint, "--all").stdout
    assert all(probe["port"] in every for probe in report["probes"])


def test_verify_of_a_module_that_cannot_run(run: Run, checkpoint: Path) -> None:
    write_own(Path(), bug=("self.mix((scores", "self.mixx((scores"))
    result = run("verify", checkpoint, *OWN)
    assert result.exit_code == 2
    assert "mixx" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_bare_trunk_is_verified_as_one(run: Run, checkpoint: Path) -> None:
    folder = write_checkpoint(Path("trunk"), parts=(TRUNK,), architecture="BertModel")
    result = run("verify", folder)
    assert result.exit_code == 0
    assert "transformers.BertModel" in result.stdout


def test_headers_only_fetches_no_weights_of_a_model_on_the_hub(run: Run, checkpoint: Path, hub: Hub) -> None:
    hub.add("org/small", checkpoint)
    result = run("check", "org/small", "--headers-only")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "next: porting verify org/small"
    cache = Path.cwd().parent / "hf"
    assert not list(cache.rglob("model.safetensors"))
    assert run("check", "org/small").exit_code == 0
    assert list(cache.rglob("model.safetensors"))


def test_verify_compares_gradients_and_training_when_asked(run: Run, checkpoint: Path) -> None:
    said = run("verify", checkpoint, "--gradients").stdout
    assert "gradients of mlm, nsp: 59 of 59 parameters agree (dropout is off on both sides); float64: off by" in said
    assert "steps of" not in said
    said = run("verify", checkpoint, "--steps", "2").stdout
    assert "2 steps of SGD(lr=0.01, momentum=0.9): the weights move as the reference's, float64: off by" in said
    assert "2 steps of AdamW(lr=0.001)" in said
    assert "gradients of" not in run("verify", checkpoint).stdout


def test_check_doubts_probes_and_inputs_that_name_nothing(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    table = Path("own.toml").read_text()
    Path("own.toml").write_text(table.replace('"bert.embeddings" = "norm"', '"bert.embeddings" = "nrom"'))
    result = run("check", checkpoint, *OWN)
    assert result.exit_code == 0
    assert "the module has no part 'nrom' of the probe" in result.stderr + result.stdout
    assert "did you mean 'norm'?" in result.stderr + result.stdout


def test_a_table_that_nobody_chose_is_named_when_a_module_of_ones_own_does_not_fit(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    for command in ("check", "load", "verify"):
        result = run(command, checkpoint, "--into", "own_model.py:build")
        assert result.exit_code == 2
        assert "'bert' was chosen by config.json's model_type" in result.stderr
        assert "a module of your own needs a table of its own: --table" in result.stderr


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


def test_record_and_verify_without_the_reference(run: Run, checkpoint: Path) -> None:
    said = run("record", checkpoint, "--out", "golden.safetensors").stdout
    assert said.splitlines()[0].startswith("recorded golden.safetensors, ")
    assert said.splitlines()[-1] == "next: porting verify c --reference golden.safetensors"
    result = run("verify", checkpoint, "--reference", "golden.safetensors")
    assert result.exit_code == 0
    assert "computes what transformers.BertForPreTraining, recorded in golden.safetensors, computes" in result.stdout
    assert run("record", checkpoint, "--out", "golden.safetensors").exit_code == 2
    result = run("verify", checkpoint, "--reference", "absent.safetensors")
    assert result.exit_code == 2


def test_verify_streams_when_asked(run: Run, checkpoint: Path) -> None:
    result = run("verify", checkpoint, "--stream", "--longest", "24")
    assert result.exit_code == 0, result.stderr
    assert "which weights reach a probe" in result.stdout
    assert "of 24 tokens" in result.stdout or "1 to 24 tokens" in result.stdout
    result = run("verify", checkpoint, "--stream", "--gradients")
    assert result.exit_code == 2
    assert "cannot take gradients and training" in result.stderr
