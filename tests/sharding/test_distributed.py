"""What 1, 2 and 4 processes saved with ``torch.distributed.checkpoint``, read by one process and by several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import porting
from porting.checkpoint import open_checkpoint
from porting.comparing.differences import diff
from porting.comparing.digests import digest
from porting.converting.conversion import convert
from porting.converting.integrity import verify_files
from porting.converting.record import read_record, unpacked
from porting.opening import Folder
from tests import own
from tests.checkpoint.test_dcp import flat
from tests.guards.tree import ROOT
from tests.sharding.saver import LAYOUTS

FAST = "rows-2"
"""What two processes saved; all that needs more of them, or that they load, is slow."""

TABLE = """
[mapping]
name = "wide"
[tensors]
"plain [a b]" = "plain [a b]"
"other [a b]" = "other [a b]"
"""


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which two processes have saved."""
    return saving(tmp_path_factory.mktemp("two"), "save-2")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the processes have saved and loaded."""
    return saving(tmp_path_factory.mktemp("distributed"))


def saving(root: Path, *acts: str) -> Path:
    """Let processes do these acts, or all, with what is in the folder from then on."""
    own.write(root / "source")
    own.table(root)
    (root / "wide.toml").write_text(TABLE)
    for name, size in (("made", None), ("made in parts", 300)):
        options: dict[str, Any] = {"to": "dcp/model", "shard_size": size}
        convert(root / "source", root / name, root / "own.toml", into=lambda: own.Own(own.SIZES), **options)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.sharding.saver", str(root), *acts]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return root


def results(ran: Path, count: int) -> list[dict[str, Any]]:
    return [json.loads((ran / f"seen-{count}-{rank}.json").read_text()) for rank in range(count)]


def test_what_two_processes_saved_is_read_and_converted(saved_by_two: Path, tmp_path: Path) -> None:
    assert_read(saved_by_two, FAST)
    assert_converted(saved_by_two, FAST, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["rows-1", "rows-2", "rows-4", "columns-4", "grid-4", "trained-2", "trained-4"])
def test_every_tensor_is_what_torch_reads(ran: Path, saved: str) -> None:
    assert_read(ran, saved)


def assert_read(ran: Path, saved: str) -> None:
    dcp_to_torch_save(ran / saved, ran / "torch.pt")
    expected = flat(torch.load(ran / "torch.pt", weights_only=True))
    checkpoint = open_checkpoint(ran / saved)
    tensors = {name: tensor for name, tensor in expected.items() if isinstance(tensor, torch.Tensor)}
    assert {*tensors} == {*checkpoint.tensors}
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name), tensor)
    if saved.endswith("-4"):
        assert max(len(checkpoint.pieces(name)) for name in tensors) == 4


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["rows-2", "rows-4", "columns-4", "grid-4"])
def test_one_process_makes_of_it_what_it_makes_of_safetensors(ran: Path, saved: str, tmp_path: Path) -> None:
    assert_converted(ran, saved, tmp_path)


def assert_converted(ran: Path, saved: str, tmp_path: Path) -> None:
    part = ran / saved / "model"
    assert str(digest(part)) == str(digest(ran / "source"))
    assert diff(part, ran / "source").summary == "equal: 25 with equal bytes"
    done = convert(part, tmp_path / "a", ran / "own.toml", into=lambda: own.Own(own.SIZES), memory=2 << 20)
    other = convert(ran / "source", tmp_path / "b", ran / "own.toml", into=lambda: own.Own(own.SIZES))
    assert done.digests == other.digests
    assert verify_files(tmp_path / "a").same
    records = [read_record(Folder(tmp_path / name)) for name in "ab"]
    record, named = (
        {name: digest for name, (digest, _) in unpacked(one.section("source", "tensors")).items()}
        for one in records
        if one is not None
    )
    assert len(record) == 25
    assert record == named
    assert records[0] is not None
    assert {*records[0].section("source", "files")} == {
        ".metadata",
        *(f"__{rank}_0.distcp" for rank in range(int(saved[-1]))),
    }


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_it_loads_into_sharded_modules_through_a_table(ran: Path, count: int) -> None:
    for result in results(ran, count):
        assert len(result["table"]) == 3 * 2 * len(LAYOUTS)
        assert {*map(tuple, result["table"].values())} == {()}


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_each_process_reads_its_own_ranges(ran: Path, count: int) -> None:
    """Of rows that four processes saved, two and four others read theirs, and nothing beside them."""
    for result in results(ran, count):
        assert result["wide"]["differ"] == []
        assert result["wide"]["read"] == result["wide"]["local"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_torch_loads_a_conversion_into_a_sharded_module(ran: Path, count: int) -> None:
    for result in results(ran, count):
        assert result["torch"] == {"made": [], "made in parts": []}


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_it_is_exported_from_shards_as_from_one_process(ran: Path, count: int, tmp_path: Path) -> None:
    whole = own.Own(own.SIZES)
    porting.load(ran / "grid-4" / "model", whole, ran / "own.toml")
    expected = porting.export(whole, ran / "own.toml", tmp_path / "whole")
    own.assert_same_files(ran / f"exported-{count}", tmp_path / "whole")
    assert [result["exported"] for result in results(ran, count)] == [[*expected.files]] * count
    found, source = open_checkpoint(tmp_path / "whole"), open_checkpoint(ran / "source")
    assert all(torch.equal(found.read(name), source.read(name)) for name in source.tensors)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("to", ["npz", "dcp"])
def test_another_container_is_exported_from_shards_as_from_one_process(
    ran: Path, count: int, to: str, tmp_path: Path
) -> None:
    """Each process writes its ranges, and a share of the checksums when all have."""
    whole = own.filled(ran / "grid-4" / "model", ran / "own.toml")
    porting.export(whole, ran / "own.toml", tmp_path / "whole", to=to)
    own.assert_same_files(ran / f"exported-{count}-{to}", tmp_path / "whole")
    made = open_checkpoint(tmp_path / "whole")
    assert {name: made.read(name).shape for name in made.tensors}, "its checksums are compared as it is read"


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_the_lines_of_the_documentation_do_what_they_say(ran: Path, count: int) -> None:
    assert [result["documented"] for result in results(ran, count)] == [[]] * count


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_what_one_process_cannot_read_none_loads(ran: Path, count: int) -> None:
    *others, last = [result["failing"] for result in results(ran, count)]
    assert "nowhere: no such file or directory" in last["missing"][1]
    assert "reading failed: Input/output error" in last["disk"][1]
    for how in ("missing", "disk"):
        reason = last[how][1].splitlines()[0]
        for result in others:
            line = f"nothing was loaded, since process {count - 1} could not go on: {reason} [rank-lost]"
            assert result[how] == ["RankError", f"{ran}/source: {line}"]
        for result in (*others, last):
            assert result[f"{how}: untouched"]


@pytest.mark.slow
def test_when_a_process_is_killed_the_other_says_so(ran: Path) -> None:
    kind, told = json.loads((ran / "dying-0.json").read_text())["told"]
    assert kind == "RankError"
    assert "source: nothing was loaded, since another process has ended: " in told
    assert not (ran / "dying-1.json").exists()
