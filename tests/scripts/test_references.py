"""Small models of any type, their proofs, and the page that is written from them."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from scripts.reference_models import proving
from scripts.reference_models.page import page, reason
from scripts.reference_models.proving import BUILD, MISSED, PASSES, REFUSED, Proof, prove
from scripts.reference_models.shrinking import shrunk
from scripts.reference_models.types import classes, model_types


def test_sizes_that_depend_on_one_another_stay_so() -> None:
    config: dict[str, Any] = transformers.Qwen2VLTextConfig().to_dict()
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}
    small = shrunk(config)
    head = small["hidden_size"] // small["num_attention_heads"]
    assert small["hidden_size"] < config["hidden_size"]
    assert small["hidden_size"] % small["num_attention_heads"] == 0
    assert head % 2 == 0
    assert sum(small["rope_parameters"]["mrope_section"]) == head // 2
    assert small["num_hidden_layers"] == 2


def test_one_layer_of_each_kind_is_kept_and_tokens_stay_different() -> None:
    kinds = ["linear", "linear", "linear", "full", "linear", "linear"]
    config = {
        "num_hidden_layers": 6,
        "layer_types": kinds,
        "vocab_size": 9000,
        "image_token_id": 8000,
        "video_token_id": 8001,
    }
    small = shrunk(config)
    assert small["layer_types"] == ["linear", "full"]
    assert small["num_hidden_layers"] == 2
    assert len({small["image_token_id"], small["video_token_id"]}) == 2
    assert max(small["image_token_id"], small["video_token_id"]) < small["vocab_size"]


def test_every_type_has_classes_or_is_a_part() -> None:
    assert classes("bert")[-1] == "BertModel"
    assert classes("clip_text_model")
    assert sum(bool(classes(one)) for one in model_types()) > 300


def test_a_type_is_proven_and_a_fault_is_seen() -> None:
    proof = prove("bert", "BertModel")
    assert proof.outcome == PASSES, proof.said
    assert proof.probes > 10


@pytest.mark.slow
def test_a_fault_that_is_not_seen_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "_planted", lambda *given: "a wrong weight is seen in no activation")
    assert prove("bert", "BertModel").outcome == MISSED


def test_the_page_counts_and_gives_reasons() -> None:
    proofs = [
        Proof(model_type="a", architecture="AModel", outcome=PASSES, inputs=("8 rows",), probes=3, reached=0.5),
        Proof(
            model_type="b",
            architecture="BModel",
            outcome=REFUSED,
            said="the reference failed on x [2]: ValueError: no (at)",
        ),
        Proof(model_type="c", architecture="CModel", outcome=BUILD, said="X requires the timm library but"),
    ]
    text = page(
        {(proof.model_type, proof.architecture): proof for proof in proofs},
        ["part"],
        ["late"],
        version="5",
        seconds=1,
        gigabytes=2,
    )
    assert "Of 3 classes 2 were built, and 1 of these pass." in text
    assert "| a | AModel | passes | 8 rows | 3 | 50% |" in text
    assert "library missing: timm" in text
    assert "late" in text
    assert reason("the reference failed on x [2]: ValueError: no | such [forward-failed]") == "ValueError: no / such"
