"""Every command on what ``torch.distributed.checkpoint`` saved: the embedded model, beside a number."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save

from porting.cli.app import app
from porting.embedded import embedded_checkpoint
from tests.cli.conftest import Run
from tests.test_own_model_page import FILES

SOURCE = "saved/model"
OWN = ("--into", "my_bert.py:build")
TESTED = """
import torch
import my_bert
import porting

SOURCE = "saved/model"


def test_my_bert():
    port = porting.load(SOURCE, my_bert.build, "my_bert.toml").double().eval()
    theirs = porting.load(SOURCE).double().eval()
    ids = torch.tensor([[2, 9, 30, 7, 3], [2, 11, 3, 0, 0]])
    keep, kinds = ids != 0, torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]])
    expected = theirs.bert(ids, attention_mask=keep, token_type_ids=kinds).last_hidden_state
    assert torch.allclose(port(ids, keep, kinds)[keep], expected[keep], rtol=0, atol=1e-9)
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    embedded = Path(embedded_checkpoint())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is one process only
        save(
            {"model": load_file(embedded / "model.safetensors"), "lr": 0.1},
            checkpoint_id=folder / "saved",
            no_dist=True,
        )
    for file in embedded.iterdir():
        if file.suffix in {".json", ".txt"}:
            shutil.copy(file, folder / "saved")
    for name, text in FILES:
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "test_mine.py").write_text(TESTED, encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def here(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is where the checkpoint is, and imports ``my_bert`` from there."""
    import sys

    monkeypatch.chdir(saved)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_bert", raising=False)


COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "inspect": (("inspect", SOURCE), "tensors        62, 1,165,442 elements, 4.66 MB"),
    "tables": (("tables",), "bert  "),
    "explain": (("explain", "dcp-parts"), "a distributed checkpoint holds more than tensors"),
    "check": (("check", SOURCE), "fits: 62 of 62 tensors fill 62 of 62 places"),
    "check, own": (("check", SOURCE, *OWN, "--table", "my_bert.toml"), "fits: 53 of 62 tensors fill"),
    "load": (("load", SOURCE), "parameters  1,165,442 in 62 tensors"),
    "verify": (("verify", SOURCE, "--longest", "12"), "FAITHFUL"),
    "verify, own": (("verify", SOURCE, *OWN, "--table", "my_bert.toml", "--longest", "12"), "FAITHFUL"),
    "verify, streamed": (("verify", SOURCE, "--stream", "--longest", "12"), "FAITHFUL"),
    "verify, learning": (("verify", SOURCE, "--gradients", "--steps", "1", "--longest", "8"), "FAITHFUL"),
    "record": (("record", SOURCE, "--out", "kept.safetensors", "--longest", "8"), "recorded kept.safetensors"),
    "verify, recorded": (("verify", SOURCE, "--reference", "kept.safetensors"), "FAITHFUL"),
    "suggest": (("suggest", SOURCE, *OWN, "-o", "found.toml"), "TRUNK ONLY  Proven in float64 on the checkpoint"),
    "mutate": (
        ("mutate", "test_mine.py", *OWN, "--only", "tanh GELU for another activation"),
        "1 of 1 caught",
    ),
    "export": (("export", SOURCE, "exported"), "weights       safetensors in the place of .metadata, __0_0.distcp"),
    "convert": (("convert", SOURCE, "ported", "--table", "bert"), "tensors       62, 4.66 MB"),
    "convert, to its own kind": (("convert", SOURCE, "again", "--table", "bert", "--to", "dcp/model"), "62, 4.66 MB"),
    "convert, back from it": (("convert", "again/model", "back", "--table", "bert", "--reverse"), "read backwards"),
    "verify-files": (("verify-files", "again"), "every byte is as it was written"),
    "diff": (("diff", SOURCE, "back"), "equal: 62 with equal bytes"),
    "diff, exported": (("diff", "exported", SOURCE), "equal: 62 with equal bytes"),
    "fill-mask": (("fill-mask", "Return the [MASK] of the string.", "--source", SOURCE), "14.09%  number"),
    "next-sentence": (("next-sentence", "Open it.", "Read it.", "--source", SOURCE), "follows"),
    "generate": (
        ("generate", "Return the", "--next", "--source", SOURCE, "--architecture", "BertForMaskedLM"),
        "next: porting generate 'Return the'",
    ),
    "classify": (  # whether a sentence follows is one of two classes
        ("classify", "Open it.", "--source", SOURCE, "--architecture", "BertForNextSentencePrediction"),
        "LABEL_0",
    ),
    "attention": (("attention", "Return it.", "--source", SOURCE), "token 0 of 5, attends to most"),
}
"""By what is shown: the words of the command, in the order in which they build on each other, and what it says."""


@pytest.mark.slow
def test_every_command_takes_it(run: Run) -> None:
    for name, (words, said) in COMMANDS.items():
        result = run(*words)
        assert result.exit_code == 0, f"{name}: {result.stdout}{result.stderr}"
        assert said in result.stdout, f"{name}: {result.stdout}{result.stderr}"
    digest = run("hash", "saved/model").stdout.split()[0]
    assert digest == run("hash", "back").stdout.split()[0] == run("hash").stdout.split()[0]


def test_no_command_is_forgotten() -> None:
    tried = {words[0] for words, _ in COMMANDS.values()} | {
        "hash",
        "translate",
        "report-bug",
    }  # no encoder-decoder; no checkpoint
    assert tried == {command.name for command in app.registered_commands}


def test_its_directory_says_where_the_model_is(run: Run) -> None:
    found = json.loads(run("inspect", "saved", "--json").stdout)
    assert found["count"] == 62
    assert "saved/model is what was saved under 'model'" in found["warnings"][0]
    refused = run("check", "saved")
    assert refused.exit_code == 2
    assert "61 more like it of the checkpoint: no rule reads it, and 'model.' stands before" in refused.stderr
    assert "of a distributed checkpoint pass DIRECTORY/NAME" in refused.stderr
