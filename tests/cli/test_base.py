"""bert-base-uncased as the hub has it, through every command, into a BERT from scratch and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import Result

from tests.cli.conftest import Run
from tests.pretraining import BASE, DECODER, WORDS, write_base, write_scratch

# As the hub has them: the pickle has the decoder beside the words, the safetensors file has each tensor once.
STATES = [
    ("pytorch_model.bin", True, "Bert"),
    ("model.safetensors", True, "Bert"),
    ("pytorch_model.bin", True, "Tied"),
    ("model.safetensors", False, "Tied"),
]


def succeeding(run: Run) -> Run:
    """As the fixture, of what must succeed."""

    def good(*words: str | Path, **options: str) -> Result:
        result = run(*words, **options)
        assert result.exit_code == 0, f"{words}: {result.output}"
        return result

    return good


def through_every_command(run: Run, folder: Path, kind: str) -> None:
    """Every command that takes a checkpoint, a table and a module; everything comes back."""

    def good(*words: str | Path | int) -> str:
        return succeeding(run)(*map(str, words)).stdout

    own = ("--table", "made.toml", "--into", f"scratch.py:{kind}")
    assert "BertForMaskedLM" in good("inspect", folder)
    suggested = run("suggest", folder, "--into", f"scratch.py:{kind}", "-o", "made.toml", "--overwrite", "--limit", 300)
    assert suggested.exit_code == 0, suggested.output
    assert suggested.stdout.startswith("EXACT  "), suggested.stdout
    good("check", folder, *own)
    good("check", folder)
    good("load", folder, *own)
    proven = good("verify", folder, *own, "--longest", 48)
    assert proven.startswith("FAITHFUL"), proven
    assert "transformers.BertForPreTraining" in proven
    good("verify", folder, *own, "--longest", 16, "--stream")
    good(
        "record",
        folder,
        "--table",
        "made.toml",
        "--out",
        "golden.safetensors",
        "--longest",
        9,
        "--case",
        0,
        "--overwrite",
    )
    good("verify", folder, *own, "--reference", "golden.safetensors")
    there_and_back(run, folder, *own)
    good("verify", "back", *own, "--longest", 16)


def there_and_back(run: Run, folder: Path, *own: str) -> None:
    """Every command that writes or reads files and runs no model."""
    good = succeeding(run)
    good("hash", folder, "--table", "made.toml")
    good("export", folder, "exported", *own)
    good("diff", folder, "exported")
    good("convert", folder, "ported", *own)
    good("verify-files", "ported")
    good("diff", folder, "ported", "--table", "made.toml")
    good("convert", "ported", "back", "--table", "made.toml", "--reverse", "--like", folder)
    good("diff", folder, "back")


@pytest.mark.slow
@pytest.mark.parametrize(("file", "decoder", "kind"), STATES)
def test_every_command_takes_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, decoder: bool, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_scratch(Path())
    write_base(Path("c"), file=file, decoder=decoder)
    through_every_command(run, Path("c"), kind)
    assert_same(file, kind)


def test_every_command_without_a_search_takes_it(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the table that a person wrote, and verified layer by layer, which is the quickest."""
    monkeypatch.chdir(tmp_path)
    write_scratch(Path())
    write_base(Path("c"), file="pytorch_model.bin", decoder=True)
    Path("tied.toml").rename("made.toml")
    good, own = succeeding(run), ("--table", "made.toml", "--into", "scratch.py:Tied")
    assert "BertForMaskedLM" in good("inspect", "c").stdout
    for command in ("check", "load"):
        good(command, "c", *own)
    assert good("verify", "c", *own, "--longest", "16", "--stream").stdout.startswith("FAITHFUL")
    there_and_back(run, Path("c"), *own)
    assert_same("pytorch_model.bin", "Tied")


def assert_same(file: str, kind: str) -> None:
    port = load_file("ported/model.safetensors")
    assert ("mlm.decoder.weight" in port) is (kind == "Bert")
    before = torch.load("c/pytorch_model.bin", weights_only=True) if file.endswith(".bin") else load_file(f"c/{file}")
    for place in ("exported", "back"):
        after = load_file(f"{place}/model.safetensors")
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], one) for name, one in before.items())
    assert json.loads(Path("back/config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    assert torch.equal(before.get(DECODER, before[WORDS]), before[WORDS])


@pytest.mark.slow
@pytest.mark.sampled(1)  # the other file is read in the small test
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("file", "decoder", "kind"), STATES[:2])
def test_every_command_takes_it_at_its_own_sizes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, decoder: bool, kind: str
) -> None:
    """BERT-base's words, width and heads; two layers in the place of twelve."""
    monkeypatch.chdir(tmp_path)
    write_scratch(Path())
    sizes = {name: value for name, value in BASE.items() if isinstance(value, int) and not isinstance(value, bool)}
    write_base(Path("c"), file=file, decoder=decoder, **{**sizes, "num_hidden_layers": 2})
    through_every_command(run, Path("c"), kind)
