"""Decisions that are the user's: asked with a reason, answered by default, and proven whatever was chosen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from porting.errors import VerifyError
from porting.suggesting import Question, Verdict, suggest
from tests.suggesting.oracle import drafted
from tests.suggesting.test_not_found import Unclear
from tests.suggesting.test_verdicts import Plain


class Untyped(Plain):
    """Without a table of segments: row 0 of theirs has to go somewhere."""

    def change(self) -> None:
        del self.seg

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:  # type: ignore[override]  # the point
        x: Tensor = self.norm(self.tok(ids) + self.pe[:, : ids.shape[1]])
        for layer in self.layers:
            x = layer(x, keep)
        return x


class Strange(Plain):
    def forward(self, ids: Tensor, island: Tensor, segments: Tensor) -> Tensor:
        return super().forward(ids, island, segments)


def answering(answers: dict[str, str], asked: list[Question]) -> Callable[[Question], str]:
    def ask(question: Question) -> str:
        asked.append(question)
        return answers.get(question.about, question.default)

    return ask


@pytest.mark.slow
def test_a_row_that_is_folded_goes_where_the_user_says(source: Path) -> None:
    asked: list[Question] = []
    by_default = suggest(source, Untyped)
    assert by_default.verdict is Verdict.TRUNK, str(by_default)
    assert [(decision.about, decision.answer) for decision in by_default.decisions] == [("fold", "pe")]
    chosen = suggest(source, Untyped, ask=answering({"fold": "tok.weight"}, asked))
    assert [one.about for one in asked] == ["fold"]
    assert list(asked[0].choices) == ["pe", "tok.weight"]
    assert "row 0 of bert.embeddings.token_type_embeddings.weight" in asked[0].said
    assert asked[0].why.startswith("the module has no such table")
    assert chosen.verdict is Verdict.TRUNK, str(chosen)
    folded = next(part for part in chosen.text.split("\n\n") if "fold = true" in part)
    assert 'target = "tok.weight [t e]"' in folded
    assert '"bert.embeddings.position_embeddings.weight [t e]" = "pe [1 t e]"' in chosen.text


def test_an_argument_is_what_the_user_says(source: Path) -> None:
    asked: list[Question] = []
    with pytest.raises(VerifyError, match="takes 'island', and nothing tells what to give it"):
        suggest(source, Strange, ask=answering({}, asked))
    assert [one.about for one in asked] == ["argument"]
    assert list(asked[0].choices) == ["none", "attention_mask", "position_ids"]
    found = drafted(source, Strange, ask=answering({"argument": "attention_mask"}, asked))
    assert '"attention_mask" = "island -> bool"' in found.text


@pytest.mark.slow
def test_a_table_with_an_answer_is_proven(source: Path) -> None:
    asked: list[Question] = []
    found = suggest(source, Strange, ask=answering({"argument": "attention_mask"}, asked))
    assert found.verdict is Verdict.TRUNK, str(found)
    assert '"attention_mask" = "island -> bool"' in found.text


@pytest.mark.slow
def test_an_argument_with_a_default_is_asked_for_where_the_mask_is_missing(source: Path) -> None:
    asked: list[Question] = []
    found = suggest(source, Unclear, ask=answering({"argument": "attention_mask"}, asked))
    assert [one.said for one in asked] == ["What is 'thing' of Unclear.forward?"]
    assert found.verdict is Verdict.TRUNK, str(found)


@pytest.mark.slow
def test_the_architecture_is_what_the_checkpoint_holds_where_no_config_says_it(source: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(source, tmp_path / "unnamed")
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    assert suggest(folder, Plain).text.startswith("# BertForPreTraining into Plain: trunk only.")
    asked: list[Question] = []
    found = suggest(folder, Plain, ask=answering({"architecture": "BertForPreTraining"}, asked))
    assert asked[0].about == "architecture"
    assert asked[0].default == "BertForPreTraining"
    assert {"BertModel", "BertForMaskedLM", "BertForPreTraining"} <= set(asked[0].choices)
    assert found.verdict is Verdict.TRUNK, str(found)
    assert found.text.startswith("# BertForPreTraining into Plain: trunk only.")


@pytest.mark.slow
def test_an_answer_that_is_no_choice_is_the_default(source: Path) -> None:
    torch.manual_seed(0)
    found = suggest(source, Untyped, ask=lambda question: "nonsense")
    assert [(decision.answer, decision.default) for decision in found.decisions] == [("pe", "pe")]
