"""Several processes convert together: the bytes of one, shared by their number, and nothing lost when one dies."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from porting.converting.conversion import convert
from porting.converting.processes import ProcessGroup, shared_failures, shares, torchrun_group
from porting.errors import RankError
from porting.notation.table import parse_table
from tests.converting.drawing import write
from tests.guards.tree import ROOT

TABLE = """
[mapping]
name = "t"
[tensors]
"layers.{i}.{p:q,k,v} [(h d) e]" = "layers.{i}.qkv [(h p d) e]"
"layers.{i}.up [k o]" = "layers.{i}.up [o k]"
"embedding" = "embedding"
[sizes]
h = 2
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tensors differ in size, and what one process makes of it."""
    folder = tmp_path_factory.mktemp("team")
    torch.manual_seed(0)
    tensors = {"embedding": torch.randn(101, 37)}
    for i in range(7):
        tensors |= {f"layers.{i}.{part}": torch.randn(20, 30) for part in "qkv"}
        tensors[f"layers.{i}.up"] = torch.randn(33, 50 + i)
    write(folder / "source", tensors)
    (folder / "table.toml").write_text(TABLE)
    convert(folder / "source", folder / "alone", parse_table(TABLE), shard_size=40_000)
    return folder


def together(
    work: Path, destination: Path, size: int, victim: int = -1, how: str = "killed", *to: str
) -> tuple[int, dict[int, list[str]]]:
    """How many processes failed, and what each said."""
    words = [str(work / "source"), str(destination), str(work / "table.toml"), str(size), str(victim), how, *to]
    program = [sys.executable, "-m", "tests.converting.ranks", *words]
    done = subprocess.run(program, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.stderr == ""
    lines = [line.split(" ", 3) for line in done.stdout.splitlines()]
    return done.returncode, {int(line[0]): line[1:] for line in lines}


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [2, 4])
def test_several_make_what_one_makes_and_share_it_by_bytes(size: int, work: Path, tmp_path: Path) -> None:
    failed, said = together(work, tmp_path / "out", size)
    assert failed == 0
    assert {line[2] for line in said.values()} == {"done 15"}
    assert contents(tmp_path / "out") == contents(work / "alone")
    made = [int(said[rank][1]) for rank in range(size)]
    assert sum(int(said[rank][0]) for rank in range(size)) == 15
    assert max(made) - min(made) <= 101 * 37 * 4, "no further apart than one tensor"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.slow
def test_when_one_dies_the_others_say_so_and_the_same_command_goes_on(work: Path, tmp_path: Path) -> None:
    failed, said = together(work, tmp_path / "out", 2, 1)
    assert failed == 2
    assert "rank 0: another process of this conversion has ended: " in said[0][2]
    assert "the same command goes on from here" in said[0][2]
    assert os.listdir(tmp_path) == [".out.porting-convert"]
    shutil.copytree(tmp_path / ".out.porting-convert", tmp_path / ".other.porting-convert")
    done = convert(work / "source", tmp_path / "other", parse_table(TABLE), shard_size=40_000)
    assert done.resumed > 0, "one process finishes what several began"
    assert contents(tmp_path / "other") == contents(work / "alone")
    failed, said = together(work, tmp_path / "out", 2)
    assert failed == 0
    assert sum(int(line[0]) for line in said.values()) < 15 - 3, "what both had made was kept"
    assert contents(tmp_path / "out") == contents(work / "alone")
    assert sorted(os.listdir(tmp_path)) == ["other", "out"]


def test_a_process_that_opened_another_folder_writes_nothing_there(work: Path, tmp_path: Path) -> None:
    """The folder was exchanged before that process opened it: its part would be missing in what appears."""
    other = tmp_path / "elsewhere" / ".out.porting-convert"
    for name in ("files", "journals"):
        (other / name).mkdir(parents=True)
    other.chmod(0o700)
    failed, said = together(work, tmp_path / "out", 2, 1, "led")
    assert failed == 2
    assert "lies in a directory in which another user moved the temporary files" in said[1][2]
    assert list(other.rglob("*.safetensors")) == []
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "reason"), [("fails", "Input/output error"), ("strays", "no such file or directory")])
def test_what_one_cannot_do_the_others_are_told(how: str, reason: str, work: Path, tmp_path: Path) -> None:
    failed, said = together(work, tmp_path / "out", 2, 1, how)
    assert failed == 2
    assert reason in said[1][2]
    assert said[0][2].startswith("rank 1: it could not go on, so that no process did: ")
    assert reason in said[0][2]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("how", "first"), [("early", "No space left on device|disk is full"), ("exits", "exit 0")])
def test_the_reason_of_the_first_that_failed_is_the_one_of_all(
    how: str, first: str, work: Path, tmp_path: Path
) -> None:
    """It may have removed the temporary files before the others open them: that is not why the conversion failed."""
    failed, said = together(work, tmp_path / "out", 2, 0, how)
    assert failed == 2
    assert re.search(first, said[0][2])
    assert "no such file" not in said[1][2].lower()
    expected = {
        "early": r"rank 0: it could not go on, so that no process did: .*No space left on device",
        "exits": r"rank 0 ended first and removed the temporary files \(its own message says why;",
    }
    assert re.search(expected[how], said[1][2])
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_several_make_a_distributed_checkpoint_as_one_makes_it(work: Path, tmp_path: Path) -> None:
    convert(work / "source", tmp_path / "alone", parse_table(TABLE), shard_size=40_000, to="dcp/model")
    failed, _ = together(work, tmp_path / "out", 2, -1, "killed", "dcp/model")
    assert failed == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


@pytest.mark.slow
def test_under_torchrun_a_killed_process_ends_all_and_the_same_command_goes_on(work: Path, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tests.converting.mortal"]
    words = ["convert", str(work / "source"), str(tmp_path / "out"), "--table", str(work / "table.toml"), "--derive"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [*program, *words, "--shard-size", "40KB", "--threads", "1", "--memory", "1MiB"]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert "Signal 9 (SIGKILL)" in done.stderr
    assert done.stderr.count("error: rank 0: ") == 1, "the survivor says why it ended"
    assert "next: porting explain rank-lost" in done.stderr
    assert os.listdir(tmp_path) == [".out.porting-convert"]
    again = convert(work / "source", tmp_path / "out", parse_table(TABLE), shard_size=40_000, derive=True)
    assert again.resumed > 0
    assert contents(tmp_path / "out") == contents(work / "alone")


UNEVEN = """
import os
import torch
from torch import nn


def build(config):
    if os.environ["RANK"] == "1":
        raise OSError("no such volume")
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Module() for _ in range(7))
    model.embedding = nn.Parameter(torch.empty(101, 37))
    for i, layer in enumerate(model.layers):
        layer.qkv, layer.up = nn.Parameter(torch.empty(60, 30)), nn.Parameter(torch.empty(50 + i, 33))
    return model
"""


@pytest.mark.slow
def test_under_torchrun_what_one_cannot_prepare_all_are_told(work: Path, tmp_path: Path) -> None:
    (tmp_path / "uneven.py").write_text(UNEVEN)
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "porting"]
    words = ["convert", str(work / "source"), "out", "--table", str(work / "table.toml"), "--into", "uneven.py:build"]
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [*program, *words], cwd=tmp_path, env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert done.stderr.count("error: rank 1: it could not go on, so that no process did: ") == 1
    assert done.stderr.count("no such volume") == 2
    assert set(os.listdir(tmp_path)) - {"__pycache__"} == {"uneven.py"}


def test_an_error_that_cannot_be_printed_stays_the_error() -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise ValueError("not this one")

    with pytest.raises(UnprintableError), shared_failures(ProcessGroup(alone=True)):
        raise UnprintableError


def test_every_job_is_somebodys() -> None:
    costs = [7, 1, 1, 5, 0, 3, 3, 9]
    for size in range(1, 10):
        found = shares(costs, size)
        assert sorted(job for jobs in found for job in jobs) == list(range(len(costs)))
        loads = [sum(costs[job] for job in jobs) for jobs in found]
        assert max(loads) - min(loads) <= max(costs)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2", "RANK": "7"}, r"RANK is 7 and WORLD_SIZE 2; ranks are counted from 0"),
        (
            {"WORLD_SIZE": "2", "RANK": "0"},
            r"torch.distributed does not find the other processes: ValueError: .*MASTER",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"},
            r"torch.distributed does not find the other processes: ",
        ),
    ],
)
def test_processes_that_are_described_wrongly_are_an_error_with_a_line(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match=message), torchrun_group():
        raise AssertionError("there is no group")
