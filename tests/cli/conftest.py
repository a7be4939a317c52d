"""The command line in this process, and small checkpoints to give it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

import porting
from porting import suggesting
from porting.cli.app import app
from porting.suggesting import Suggestion, Verdict
from porting.suggesting.verdict.suggestion import Evidence
from tests.small_checkpoint import write_checkpoint

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Runs a command, which may be typed to; standard output and standard error are kept apart."""
    runner = CliRunner()

    def invoke(*words: str | Path, typed: str = "") -> Result:
        result = runner.invoke(app, [str(word) for word in words], prog_name="porting", input=typed)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception  # a bug: what a user can do something about has become an exit code
        return result

    return invoke


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small BERT called ``c`` in the current folder, which is empty otherwise."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_checkpoint(folder / "c")
    return Path("c")


@pytest.fixture
def suggested(monkeypatch: pytest.MonkeyPatch) -> Suggestion:
    """What ``suggest`` gives at once: a table that was found before, for tests of what the command does with one."""
    line = '"bert.embeddings.word_embeddings.weight" = "words.weight"'
    found = Suggestion(
        verdict=Verdict.TRUNK,
        text=f'# A table.\n[mapping]\nname = "own"\n\n[tensors]\n{line}\n',
        missing=("bert.pooler", "cls"),
        evidence=(Evidence(line=line, decided="its place", said="Tried: nothing else."),),
        proof="Proven in float64 on a small random model.",
    )
    monkeypatch.setattr(suggesting, "suggest", lambda *args, **kwargs: found)
    return found


@pytest.fixture
def port(checkpoint: Path) -> Path:
    """The checkpoint as the handwritten model names its tensors."""
    tensors = {name: tensor.clone() for name, tensor in porting.load(checkpoint).state_dict().items()}
    tensors.pop("mlm.decoder.weight", None)
    tensors.pop("mlm.decoder.bias", None)
    Path("port").mkdir()
    save_file(tensors, "port/model.safetensors")
    Path("port/config.json").write_bytes((checkpoint / "config.json").read_bytes())
    return Path("port")
