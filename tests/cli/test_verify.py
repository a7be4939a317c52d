"""``verify``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.modules import OWN, own_modules, write_own
from tests.small_checkpoint import TRUNK, write_checkpoint

__all__ = ["own_modules"]


def test_a_new_head_has_to_be_allowed(run: Run, checkpoint: Path) -> None:
    words = ("check", checkpoint, "--architecture", "BertForTokenClassification")
    result = run(*words)
    assert result.exit_code == 2
    assert "--fresh" in result.stderr
    result = run(*words, "--fresh")
    assert result.exit_code == 0
    assert "new classifier.weight and 1 more not in the checkpoint" in " ".join(result.stdout.split())
    assert result.stdout.splitlines()[-1].endswith("--architecture BertForTokenClassification --fresh")


def test_verify_a_faithful_port(run: Run, checkpoint: Path) -> None:
    result = run("verify", checkpoint, "--dtype", "float32", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.stdout
    assert result.stdout.startswith("FAITHFUL ")
    assert "bfloat16: " in result.stdout
    lines = result.stdout.splitlines()
    assert lines[-1] == "next: porting export c ./exported"
    assert len(lines) <= 10
    assert max(map(len, lines)) < 200


@pytest.mark.slow
def test_verify_names_the_guilty_module_of_ones_own(run: Run, checkpoint: Path) -> None:
    write_own(Path(), bug=("nn.functional.gelu", "nn.functional.relu"))
    result = run("verify", checkpoint, *OWN)
    assert result.exit_code == 1
    verdict, module, line, cause, fix, *_ = result.stdout.splitlines()
    assert verdict.startswith("DIFFERENT ")
    assert module.startswith("  module: blocks.0 and 2 more")
    assert line.startswith("  line: own_model.py:")
    assert line.endswith("return self.norm2(x + self.down(GELU(self.up(x))))")
    assert cause.startswith("  cause: ReLU for another activation")
    assert fix == "  fix: use the activation that hidden_act in the config names"
    assert (
        result.stdout.splitlines()[-1] == "next: porting verify c --table own.toml --into own_model.py:build --verbose"
    )


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_bare_trunk_is_verified_as_one(run: Run, checkpoint: Path) -> None:
    folder = write_checkpoint(Path("trunk"), parts=(TRUNK,), architecture="BertModel")
    result = run("verify", folder)
    assert result.exit_code == 0
    assert "transformers.BertModel" in result.stdout


@pytest.mark.slow
def test_verify_compares_gradients_and_training_when_asked(run: Run, checkpoint: Path) -> None:
    said = run("verify", checkpoint, "--gradients").stdout
    assert "gradients of mlm, nsp: 59 of 59 parameters agree (dropout is off on both sides); float64: off by" in said
    assert "steps of" not in said
    said = run("verify", checkpoint, "--steps", "2").stdout
    assert "2 steps of SGD(lr=0.01, momentum=0.9): the weights move as the reference's, float64: off by" in said
    assert "2 steps of AdamW(lr=0.001)" in said
    assert "gradients of" not in run("verify", checkpoint).stdout


def test_a_table_that_nobody_chose_is_named_when_a_module_of_ones_own_does_not_fit(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    for command in ("check", "load", "verify"):
        result = run(command, checkpoint, "--into", "own_model.py:build")
        assert result.exit_code == 2
        assert "'bert' was chosen by config.json's model_type" in result.stderr
        assert "a module of your own needs a table of its own: --table" in result.stderr


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
