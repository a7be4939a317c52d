"""Guides are executed: suggest, verification, comparing, converting, containers and sharding."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import porting
from porting.embedded import embedded_checkpoint
from porting.notation.table import parse_table
from tests.cli.conftest import Run, run
from tests.guards.tree import ROOT
from tests.test_readme import FILES, same_lines

__all__ = ["run"]

SUGGEST, VERIFY = ((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("suggest", "verification"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS = {
    name: next(text for language, text in BLOCK.findall(page) if language == "python")
    for name, page in {"suggest": SUGGEST, "verification": VERIFY}.items()
}
CONSOLES = [text for page in (SUGGEST, VERIFY) for language, text in BLOCK.findall(page) if language == "console"]

RIGHT, WRONG = "self.ln = nn.LayerNorm(width, eps=1e-12)", "self.ln = nn.LayerNorm(width)"
"""The line of my_bert.py that README has the reader change: before, and after."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader types: the model and table of docs/your-own-model.md, and a checkpoint."""
    for name in ("my_bert.py", "my_bert.toml"):
        (tmp_path / name).write_text(FILES[name], encoding="utf-8")
    shutil.copytree(embedded_checkpoint(), tmp_path / "my-checkpoint")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_bert", raising=False)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_python_runs(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(PROGRAMS[name], f"{name}.md", "exec"), {"__name__": "__main__"})  # noqa: S102 - the project's own example
    out = capsys.readouterr().out
    if name == "suggest":
        assert out.lower().startswith("trunk only")
        assert (folder / "suggested.toml").is_file()
    else:
        assert out.startswith("FAITHFUL ")
        assert out.endswith("\nfaithful ()\n")


@pytest.mark.slow
@pytest.mark.sampled(len(CONSOLES))
@pytest.mark.parametrize("text", CONSOLES, ids=lambda text: " ".join(text.split("\n", 2)[1].split()[:2]))
def test_the_command_prints_what_is_shown(text: str, folder: Path, run: Run) -> None:
    command, shown = text.removeprefix("$ porting ").split("\n", 1)
    wrong = shown.startswith("DIFFERENT")
    if wrong:
        assert f"`{WRONG}`" in VERIFY
        assert FILES["my_bert.py"].count(RIGHT) == 1
        (folder / "my_bert.py").write_text(FILES["my_bert.py"].replace(RIGHT, WRONG), encoding="utf-8")
    result = run(*shlex.split(command))
    assert result.exit_code == (1 if wrong else 0), result.stderr
    same_lines(shown, result.stdout)


def test_the_signature_is_the_function_s() -> None:
    (shown,) = re.findall(r"^verify\((.*?)\) -> Report$", VERIFY, re.MULTILINE | re.DOTALL)
    words = []
    for one in inspect.signature(porting.verify).parameters.values():
        if one.kind is one.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        words.append(f"{one.name}={one.default}")
    assert " ".join(shown.split()) == ", ".join(words)


PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("comparing", "converting")}
COMMANDS = {
    name: [
        found
        for language, text in BLOCK.findall(page)
        if language in {"", "console"}
        for found in re.findall(r"^(?:\$ )?porting (.+)$", text, re.MULTILINE)
    ]
    for name, page in PAGES.items()
}
ELSEWHERE = "transformers:mixtral"
"""What ``tests/registries`` runs: a checkpoint of that type is not made here."""


@pytest.fixture
def checkpoints(folder: Path, run: Run) -> Path:
    """What the pages on comparing and converting say is there."""
    shutil.copy(folder / "my_bert.toml", folder / "my_table.toml")
    (folder / "my_names.toml").write_text('[tensors]\n"encoder.{i}.{*rest}" = "blocks.{i}.{*rest}"\n')
    for one in ("one", "other"):
        shutil.copytree(folder / "my-checkpoint", folder / one)
    for words in (
        ("my-checkpoint", "my-port", "--table", "my_table.toml", "--into", "my_bert.py:build"),
        ("my-checkpoint", "float32", "--table", "bert"),
        ("my-checkpoint", "bfloat16", "--table", "bert", "--dtype", "bfloat16"),
    ):
        made = run("convert", *words)
        assert made.exit_code == 0, made.stderr
    return folder


@pytest.mark.parametrize("name", PAGES)
def test_the_python_of_a_page_runs(name: str, folder: Path) -> None:
    (program,) = [text for language, text in BLOCK.findall(PAGES[name]) if language == "python"]
    exec(compile(program, f"{name}.md", "exec"), {"__name__": "__main__"})  # noqa: S102 - the project's own example


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_page_run(name: str, checkpoints: Path, run: Run) -> None:
    commands = [one.partition(" | ")[0] for one in COMMANDS[name] if ELSEWHERE not in one]
    assert len(commands) >= 6
    for command in commands:
        into = ["--into", "my_bert.py:build"] if command.startswith("convert") and "my_table" in command else []
        result = run(*shlex.split(command), *into)
        assert result.exit_code == 0, (command, result.stderr, result.stdout)


CONTAINERS = BLOCK.findall((ROOT / "docs" / "containers.md").read_text(encoding="utf-8"))


def test_the_python_of_the_page_on_containers_runs(folder: Path) -> None:
    programs = [text for language, text in CONTAINERS if language == "python"]
    assert programs
    for program in programs:
        exec(compile(program, "containers.md", "exec"), {"__name__": "__main__"})  # noqa: S102 - as above
    assert (folder / "step-1000.pt").is_file()


@pytest.mark.parametrize("text", [text for language, text in CONTAINERS if language == "toml"])
def test_a_table_of_the_page_on_containers_is_read(text: str) -> None:
    head = "" if "[mapping]" in text else '[mapping]\nname = "shown"\n'
    assert parse_table(head + text, where="containers.md").digest  # it has no fault


CONSOLES_OF_CONTAINERS = [text for language, text in CONTAINERS if language == "" and text.startswith("$ ")]
QUERY = "model.layers.0.self_attn.q_proj"
SAVED: dict[str, dict[str, tuple[int, ...]]] = {
    "llama": {f"{QUERY}.weight": (6, 4)},
    "adapter": {f"base_model.model.{QUERY}.lora_A.weight": (2, 4), f"base_model.model.{QUERY}.lora_B.weight": (6, 2)},
    "llava": {"projector.weight": (2, 2)},
    "clip": {"visual.weight": (2, 2)},
    "vicuna": {"norm.weight": (2,)},
}
"""The checkpoints of the page on containers that are joined, with the shapes of their tensors."""
RANKS = {
    "llama/consolidated.0{}.pth": "",
    "run/mp_rank_0{}_model_states.pt": "module",
    "run/model_{}/model_optim_rng.pt": "model",
}
"""The files that each rank saved, and the key under which they hold the state dict."""


@pytest.fixture
def containers(folder: Path) -> Path:
    """The checkpoints and tables that the commands of the page on containers name."""
    shutil.copy(folder / "my_bert.toml", folder / "my_table.toml")
    state = load_file(folder / "my-checkpoint" / "model.safetensors")
    torch.save({"state_dict": state, "epoch": 3}, folder / "step-1000.ckpt")
    shutil.copy(folder / "my-checkpoint" / "config.json", folder)  # beside the training checkpoint
    for name, shapes in SAVED.items():
        (folder / name).mkdir()
        of_adapter = name == "adapter"
        config = {"r": 2, "lora_alpha": 4} if of_adapter else {"model_type": name}
        (folder / name / ("adapter_config.json" if of_adapter else "config.json")).write_text(json.dumps(config))
        tensors = {tensor: torch.rand(shape) for tensor, shape in shapes.items()}
        save_file(tensors, folder / name / ("adapter_model.safetensors" if of_adapter else "model.safetensors"))
    for name, key in RANKS.items():
        for rank in range(2):
            path = folder / name.format(rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            part = {"norm.weight": torch.ones(2), "up.weight": torch.rand(3, 2)}
            torch.save({key: part} if key else part, path)
    (merging,) = [text for language, text in CONTAINERS if language == "toml" and "[mapping]" in text]
    (folder / "merge.toml").write_text(merging)
    (folder / "llava.toml").write_text('[mapping]\nname = "llava"\n[tensors]\n"{*name}" = "{*name}"\n')
    return folder


@pytest.mark.parametrize("text", CONSOLES_OF_CONTAINERS, ids=lambda text: text.split()[3])
def test_the_commands_of_the_page_on_containers_run(text: str, containers: Path, run: Run) -> None:
    commands = re.findall(r"^\$ porting (.+)$", text, re.MULTILINE)
    assert len(commands) == len(text.splitlines())
    for command in commands:
        words = shlex.split(command.replace("openai/clip-vit-large-patch14", "./clip"))  # no hub can be reached here
        into = ["--into", "my_bert.py:build"] if "my_table.toml" in words else []
        result = run(*words, *into)
        assert result.exit_code == 0, (command, result.stderr, result.stdout)
    if "merge.toml" in text:
        base, lora = load_file("llama/model.safetensors"), load_file("adapter/adapter_model.safetensors")
        added = 2 * lora[f"base_model.model.{QUERY}.lora_B.weight"] @ lora[f"base_model.model.{QUERY}.lora_A.weight"]
        merged = load_file("merged/model.safetensors")[f"{QUERY}.weight"]
        assert torch.allclose(merged, base[f"{QUERY}.weight"] + added)
        assert len(load_file("whole/model.safetensors")) == 3


SHARDING = BLOCK.findall((ROOT / "docs" / "sharding.md").read_text(encoding="utf-8"))
SETTING = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import porting
from my_bert import MyBert

dist.init_process_group("gloo")
config = {config}


class MyModel(MyBert):
    layers = property(lambda self: self.blocks)

    def __init__(self, config):
        super().__init__(**config)


{first}
with torch.device("meta"):
    other = MyModel(config)
fully_shard(other)
{second}
alone = porting.load("./my-checkpoint", lambda: MyModel(config), "my_table.toml")
for name, value in alone.named_parameters():
    for filled in (model, other):
        assert torch.equal(filled.get_parameter(name).full_tensor(), value), name
print("the same")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_programs_of_the_page_on_sharding_run_in_two_processes(folder: Path) -> None:
    shutil.copy(folder / "my_bert.toml", folder / "my_table.toml")
    first, second = (text for language, text in SHARDING if language == "python")
    (table,) = (text for language, text in SHARDING if language == "toml")
    (folder / "same.toml").write_text(table)
    config = {"vocab": 4096, "width": 128, "depth": 3, "heads": 4, "positions": 64}
    (folder / "shards.py").write_text(SETTING.format(config=config, first=first, second=second))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "shards.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, *words], env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.count("the same") == 2  # without the ends of lines, which two processes write apart
