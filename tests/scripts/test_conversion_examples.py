"""The examples of conversions that people copy: they run, here on a small checkpoint and a hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
from safetensors.torch import load_file

from porting import convert, load
from scripts.upload_export import upload
from tests.guards.tree import ROOT
from tests.hub_server import Hub, hub  # noqa: F401  # a fixture
from tests.small_checkpoint import tensors, write_checkpoint


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source")


def script(name: str, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    command = [str(ROOT / "scripts" / name), *map(str, words)]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=ROOT)


@pytest.mark.parametrize("name", ["nightly_conversion.sh", "torchrun_conversion.sh"])
def test_a_conversion_that_fails_is_no_success(name: str, tmp_path: Path) -> None:
    done = script(name, tmp_path / "nowhere", tmp_path / "out", "bert_into_fused", PYTHON="false")
    assert done.returncode != 0
    assert not list((tmp_path / "out").glob("*/model.safetensors"))


@pytest.mark.slow
def test_a_nightly_conversion(source: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    for day in range(1, 9):
        (home / f"2020-01-{day:02d}").mkdir(parents=True)
    done = script("nightly_conversion.sh", source, home, "bert_into_fused")
    assert done.returncode == 0, done.stderr
    assert "every byte is as it was written" in done.stdout.splitlines()
    events = [json.loads(line)["event"] for line in (home / "events.jsonl").read_text().splitlines()]
    assert (events[0], events[-1]) == ("begin", "done")
    assert (home / "current").resolve().name == date.today().isoformat()  # as `date` of the shell
    assert sorted(path.name for path in home.glob("2020*")) == [f"2020-01-{day:02d}" for day in range(3, 9)]
    assert len(load_file(home / "current" / "model.safetensors")) == 40


@pytest.mark.slow
def test_a_conversion_by_torchrun(source: Path, tmp_path: Path) -> None:
    done = script("torchrun_conversion.sh", source, tmp_path / "out", "bert_into_fused", "2")
    assert done.returncode == 0, done.stderr
    assert "every byte is as it was written" in done.stdout
    convert(source, tmp_path / "alone", "bert_into_fused")
    for path in (tmp_path / "alone").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.usefixtures("hub")
def test_an_upload_can_be_loaded_again(source: Path, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811  # the fixture
    monkeypatch.setenv("HF_TOKEN", hub.token)
    convert(source, tmp_path / "half", dtype=None)
    convert(tmp_path / "half", tmp_path / "back", reverse=True)
    commit = upload(tmp_path / "back", "org/name")
    assert hub.models["org/name"].commits[commit].keys() == {path.name for path in (tmp_path / "back").iterdir()}
    found = load(f"org/name@{commit}").state_dict()
    word = tensors()["bert.embeddings.word_embeddings.weight"]
    assert found["bert.embeddings.word.weight"].equal(word)


def test_a_damaged_directory_is_not_uploaded(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out")
    raw = bytearray((tmp_path / "out" / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "out" / "model.safetensors").write_bytes(raw)
    with pytest.raises(ValueError, match=r"not uploaded: model\.safetensors: tensor "):
        upload(tmp_path / "out", "org/name")
