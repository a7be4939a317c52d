"""``docs/your-own-model.md`` is followed to the letter: its files are written, its commands run, its promises kept."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from porting.embedded import embedded_checkpoint
from tests.generating import checkpoints
from tests.small_checkpoint import WORDS

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "your-own-model.md").read_text(encoding="utf-8")
FILES = re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
BLOCKS = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
CONSOLES = [part for block in BLOCKS for part in re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", block, re.MULTILINE)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES:
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def run(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    program, *arguments = shlex.split(command)
    module = {"porting": ["-m", "porting"], "python": []}[program]
    environment = {**os.environ, "COLUMNS": "120", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, *module, *arguments],
        cwd=folder,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )


def test_the_page_has_its_files_and_its_commands() -> None:
    assert [name for name, _ in FILES] == [
        "my_bert.py",
        "my_bert.toml",
        "back.py",
        "my_heads.py",
        "my_heads.toml",
        "my_untied.toml",
        "unusual_bert.py",
        "my_gpt.py",
        "my_llama.py",
    ]
    assert [command.split()[1] for command, _ in CONSOLES] == [
        "check",
        "verify",
        "verify",
        "back.py",
        "verify",
        "fill-mask",
        "next-sentence",
        "suggest",
        "suggest",
        "generate",
        "suggest",
        "generate",
    ]


@pytest.mark.slow
def test_the_commands_of_the_page_do_what_it_says(folder: Path) -> None:
    check, faithful, different, back, *_ = CONSOLES
    assert run(folder, check[0]).returncode == 0

    done = run(folder, faithful[0])
    assert (done.returncode, faithful[1].strip() in done.stdout) == (0, True), done.stdout + done.stderr

    written = (folder / "my_bert.py").read_text(encoding="utf-8")
    old, new = "F.gelu(self.up(x))", 'F.gelu(self.up(x), approximate="tanh")'
    assert old in written
    assert new in PAGE
    (folder / "my_bert.py").write_text(written.replace(old, new), encoding="utf-8")
    broken = run(folder, different[0])
    assert broken.returncode == 1, broken.stdout + broken.stderr
    assert all(line in broken.stdout for line in different[1].strip().splitlines()), broken.stdout

    (folder / "my_bert.py").write_text(written, encoding="utf-8")
    assert run(folder, back[0]).returncode == 0
    exported = (folder / "exported" / "model.safetensors").read_bytes()
    assert exported == (embedded_checkpoint() / "model.safetensors").read_bytes()


def test_a_misspelled_target_is_named_with_what_was_meant(folder: Path) -> None:
    table = (folder / "my_bert.toml").read_text(encoding="utf-8")
    (folder / "my_bert.toml").write_text(table.replace("blocks.{i}.up.", "blocks.{i}.upp."), encoding="utf-8")
    done = run(folder, CONSOLES[0][0])
    assert done.returncode == 2
    assert "blocks.0.upp" in done.stderr
    assert "did you mean 'blocks.0.up.weight'?" in done.stderr


@pytest.mark.slow
def test_the_heads_of_the_page_guess_words_and_judge_sentences(folder: Path) -> None:
    """As the bundled model does, with the pooler, both heads and a decoder of its own."""
    for command, shown in CONSOLES[5:7]:
        done = run(folder, command)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(shown.rstrip())
        assert done.stdout.splitlines()[-1] == "next: porting verify --table my_heads.toml --into my_heads.py:build"
        shipped = run(folder, command.partition(" --into")[0]).stdout
        assert done.stdout.splitlines()[:-1] == shipped.splitlines()[:-1]


@pytest.mark.slow
def test_the_model_with_heads_is_faithful_and_goes_back(folder: Path) -> None:
    command, shown = CONSOLES[4]
    done = run(folder, command)
    assert (done.returncode, shown.strip() in done.stdout) == (0, True), done.stdout + done.stderr
    assert "proven by activation: 51 of 51 parameters and buffers" in done.stdout
    assert run(folder, "porting export heads --table my_heads.toml --into my_heads.py:build").returncode == 0
    exported = (folder / "heads" / "model.safetensors").read_bytes()
    assert exported == (embedded_checkpoint() / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_checkpoint_that_is_not_tied_is_read_into_the_decoder(folder: Path) -> None:
    config = transformers.BertConfig.from_pretrained(embedded_checkpoint(), tie_word_embeddings=False)
    torch.manual_seed(0)
    model = transformers.BertForPreTraining(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, and the decoder's own
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder / "untied")
    done = run(folder, "porting verify untied --table my_untied.toml --into my_heads.py:build")
    assert done.stdout.startswith("FAITHFUL  my_heads.MyHeads computes what transformers.BertForPreTraining computes")
    assert "proven by activation: 51 of 51 parameters and buffers" in done.stdout


@pytest.mark.slow
def test_the_unusual_model_gets_the_table_that_is_shown(folder: Path) -> None:
    command, shown = CONSOLES[7]
    done = run(folder, command)
    assert done.stdout.startswith(shown.splitlines()[0]), done.stdout + done.stderr
    assert all(line in done.stdout.splitlines() for line in shown.splitlines()[1:])
    rule, _ = re.findall(r'^```\n(".*)\n```', PAGE, re.MULTILINE)
    written = (folder / "unusual.toml").read_text(encoding="utf-8").splitlines()
    assert rule in [line.partition("  #")[0] for line in written]


@pytest.mark.slow
def test_a_gpt_2_and_a_llama_are_filled_and_continue_a_text(folder: Path) -> None:
    checkpoints.gpt2(folder / "gpt2")
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=40, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    checkpoints.write(folder / "llama", model, eos_token_id=checkpoints.END, pad_token_id=0)
    for command, shown in CONSOLES[8:]:
        done = run(folder, command)
        assert done.returncode == 0, done.stdout + done.stderr
        assert all(line in done.stdout for line in shown.splitlines()), done.stdout
    _, rule = re.findall(r'^```\n(".*)\n```', PAGE, re.MULTILINE)
    assert rule in [line.partition("  #")[0] for line in (folder / "my_gpt.toml").read_text().splitlines()]
