"""Projections of attention that are grouped, turned in pairs, or fused in another order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import porting
from porting.suggesting import Verdict, suggest
from scripts.suggest_zoo import tried
from tests.suggesting import kernels
from tests.suggesting.kernels import Kernels
from tests.suggesting.llama import FIELDS, OnlyLast, builder
from tests.suggesting.oracle import BOUND, apart, drafted, source
from tests.suggesting.styles import drawn

GPT2 = 3
"""A seed of GPT-2's."""

GROUPED = "[(g (q r s|k z y|v d)) e]"


LAYOUTS = pytest.mark.parametrize(
    ("architecture", "fields", "style", "said"),
    [
        ("LlamaForCausalLM", {}, {"rotate": "neighbours"}, ".wk.weight [(g r s) e]"),
        ("LlamaForCausalLM", {}, {"lie": "key first", "gate": "last"}, "[(a|b|f) e]"),
        ("Qwen2ForCausalLM", {}, {"lie": "groups", "rotate": "neighbours", "bias": True, "gate": "first"}, GROUPED),
        (
            "MistralForCausalLM",
            {"num_key_value_heads": 6, "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            {"lie": "blocks", "rotate": "neighbours"},
            "[(h r s|g z y|f) e]",
        ),
        ("LlamaForCausalLM", {"num_key_value_heads": 1, "tie_word_embeddings": True}, {"tied": True}, "{p:wq,wk,wv}"),
    ],
)


@pytest.mark.few(1)
@LAYOUTS
def test_every_projection_has_its_place(
    tmp_path: Path, architecture: str, fields: Mapping[str, object], style: Mapping[str, object], said: str
) -> None:
    reference = source(architecture, {**FIELDS, **fields}, tmp_path)
    build = builder(**style)  # type: ignore[arg-type]  # the choices of a test
    found = drafted(tmp_path, build)
    assert said in found.text
    ids = torch.randint(3, 100, (4, 20), generator=torch.Generator().manual_seed(1))
    assert apart(reference, tmp_path, build, found, {"input_ids": ids}, {"tokens": ids}) < BOUND
    port = tmp_path / "port"
    port.mkdir()
    (port / "config.json").write_bytes((tmp_path / "config.json").read_bytes())
    state = porting.load(tmp_path, build, found.text).state_dict()
    save_file({name: tensor.clone() for name, tensor in state.items()}, port / "model.safetensors")
    assert str(porting.digest(port, found.text)) == str(porting.digest(tmp_path, found.text))
    alone = tmp_path / "weights"
    alone.mkdir()
    (alone / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    assert str(porting.digest(alone, found.text)) == str(porting.digest(tmp_path, found.text)), "no size is needed here"


@pytest.mark.slow
@LAYOUTS
def test_a_llama_is_found(
    tmp_path: Path, architecture: str, fields: Mapping[str, object], style: Mapping[str, object], said: str
) -> None:
    reference = source(architecture, {**FIELDS, **fields}, tmp_path)
    build = builder(**style)  # type: ignore[arg-type]  # the choices of a test
    found = suggest(tmp_path, build)
    assert found.verdict is Verdict.EXACT, str(found)
    assert said in found.text
    ids = torch.randint(3, 100, (4, 20), generator=torch.Generator().manual_seed(1))
    assert apart(reference, tmp_path, build, found, {"input_ids": ids}, {"tokens": ids}) < BOUND


@pytest.mark.slow
def test_a_model_may_return_the_last_position_only(tmp_path: Path) -> None:
    source("LlamaForCausalLM", FIELDS, tmp_path)
    found = suggest(tmp_path, builder(kind=OnlyLast))
    assert found.verdict is Verdict.EXACT, str(found)


@pytest.mark.slow
def test_one_fused_tensor_into_another_that_is_interleaved_in_another_order() -> None:
    style = replace(drawn(GPT2, flawed=False), qkv="interleaved", order=("value", "key", "query"))
    assert style.family.architecture == "GPT2Model"
    one = tried(style)
    assert one.found is not None, one.said
    assert (one.verdict, one.false_proof) == (True, False), str(one.found)
    assert "c_attn.weight [e ((q|k|v) h d)]" in one.found.text
    assert ".weight [(h (v|k|q) d) e]" in one.found.text or ".weight [e (h (v|k|q) d)]" in one.found.text


PHI = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
AXES = pytest.mark.parametrize(
    ("architecture", "fields", "style", "said"),
    [
        ("Phi3", PHI, Kernels(), '"blocks.{i}.attend.key [e g d]"'),
        ("Phi3", PHI, Kernels(into="nde", back="end", feed="fe", down="ef"), '"blocks.{i}.attend.key [g d e]"'),
        ("Phi3", PHI, Kernels(rotate="neighbours"), "[(h s r|g y z|f d) e]"),
        (
            "Phi3",
            {**PHI, "hidden_size": 96, "partial_rotary_factor": 0.5},
            Kernels(share=0.5, into="ned"),
            '"blocks.{i}.attend.key [g e d]"',
        ),
        ("Phi3", PHI, Kernels(stacked="aed"), '"blocks.{i}.attend.fused [(h|g|f) e d]"'),
        ("Llama", {}, Kernels(stacked="ade"), '"blocks.{i}.attend.fused [(h|g|f) d e]"'),
        ("Llama", {}, Kernels(into="ned", rotate="neighbours"), '"blocks.{i}.attend.query [h e (r s)]"'),
        ("Qwen2", {}, Kernels(rotate="neighbours", bias=True), '"blocks.{i}.attend.query_bias [h (r s)]"'),
    ],
)


@pytest.mark.few(2)
@AXES
def test_heads_and_features_may_be_axes_of_their_own(
    tmp_path: Path, architecture: str, fields: Mapping[str, object], style: Kernels, said: str
) -> None:
    reference = source(f"{architecture}ForCausalLM", {**FIELDS, **fields}, tmp_path)
    build = kernels.builder(style)
    found = drafted(tmp_path, build)
    assert said in found.text
    ids = torch.randint(3, 100, (4, 20), generator=torch.Generator().manual_seed(1))
    assert apart(reference, tmp_path, build, found, {"input_ids": ids}, {"tokens": ids}) < BOUND


@pytest.mark.slow
@AXES
def test_a_module_with_axes_for_heads_is_exact(
    tmp_path: Path, architecture: str, fields: Mapping[str, object], style: Kernels, said: str
) -> None:
    source(f"{architecture}ForCausalLM", {**FIELDS, **fields}, tmp_path)
    found = suggest(tmp_path, kernels.builder(style))
    assert found.verdict is Verdict.EXACT, str(found)
    assert said in found.text
