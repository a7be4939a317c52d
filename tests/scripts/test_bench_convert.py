"""The benchmark of conversions, on a checkpoint that takes no time."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from scripts import bench_convert


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of 16, and no flushing of a disk that others write to as well."""
    monkeypatch.setattr(bench_convert, "HIDDEN", 16)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(bench_convert, "SYNC", ["true"])


@pytest.mark.slow
def test_every_peer_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_convert.measure(tmp_path, size=1, rounds=1)
    rows = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    peers = [*bench_convert.peers(tmp_path), *bench_convert.with_sync(tmp_path)]
    assert [row.removeprefix("| ") for row in rows if row != "|"] == [*peers[:-2], *peers[-2:]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_the_peers_write_the_same_tensors(tmp_path: Path) -> None:
    source = tmp_path / "source"
    bench_convert.write_checkpoint(source, 1)
    found = {}
    for name, peer in bench_convert.peers(source).items():
        if name.startswith("cast to bfloat16"):
            continue  # the values alone, without a header
        peer(tmp_path / "out")
        files = sorted((tmp_path / "out").glob("*.safetensors"))
        found[name] = {key: value for path in files for key, value in load_file(path).items()}
        shutil.rmtree(tmp_path / "out")
    everything = found["load everything, save everything"]
    ours = found["porting convert, renamed, two threads"]
    assert {name.removeprefix("decoder.model.") for name in everything} == {
        name.removeprefix("decoder.") for name in ours
    }
    assert all(
        value.equal(everything[f"decoder.model.{name.removeprefix('decoder.')}"]) for name, value in ours.items()
    )
    half = found["porting convert, to bfloat16, one thread"]
    assert all(value.equal(ours[name].bfloat16()) for name, value in half.items())
