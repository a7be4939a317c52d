"""A norm's gain that one side stores as what it adds to 1: the table adds the 1, in either direction."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch

from porting.suggesting import Verdict, suggest
from tests.suggesting import llama
from tests.suggesting.oracle import BOUND, apart, drafted, source
from tests.suggesting.test_llama_mistakes import edited

GAIN = "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight"
GAIN_FIRST = "return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)"
FIRST = "return (1 + self.weight) * (x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())"
SCALED = {"x = self.tok_embeddings(tokens)": "x = self.tok_embeddings(tokens) * self.norm.weight.shape[0] ** 0.5"}
TANH = {"F.silu(gate)": "F.gelu(gate, approximate='tanh')"}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("architecture", "changes", "offset"),
    [
        pytest.param("LlamaForCausalLM", {"* self.weight": "* (1 + self.weight)"}, -1, id="1 added by the module"),
        pytest.param("GemmaForCausalLM", {**SCALED, **TANH}, 1, id="1 added by the reference"),
        pytest.param("LlamaForCausalLM", {GAIN: FIRST}, -1, id="before the division"),
        pytest.param("MistralForCausalLM", {"* self.weight": "* self.weight.add(1.0)"}, -1, id="another family"),
    ],
)
def test_the_table_adds_the_1(architecture: str, changes: dict[str, str], offset: int, tmp_path: Path) -> None:
    fields: dict[str, object] = {
        **llama.FIELDS,
        **({"head_dim": 8, "eos_token_id": 1} if architecture == "GemmaForCausalLM" else {}),
    }
    fields |= {"sliding_window": None} if architecture == "MistralForCausalLM" else {}
    reference = source(architecture, fields, tmp_path)
    build = edited(changes).builder()
    found = drafted(tmp_path, build)
    rules = {one["target"]: one.get("offset") for one in tomllib.loads(found.text)["rule"]}
    assert rules == {
        "layers.{i}.attention_norm.weight": offset,
        "layers.{i}.ffn_norm.weight": offset,
        "norm.weight": offset,
    }
    far = 1e-5 if architecture == "GemmaForCausalLM" else BOUND  # whose norms compute in float32
    words = torch.randint(0, 113, (3, 9), generator=torch.Generator().manual_seed(0))
    assert apart(reference, tmp_path, build, found, {"input_ids": words}, {"tokens": words}) < far


@pytest.mark.slow
def test_a_gain_may_be_multiplied_before_the_division(tmp_path: Path) -> None:
    """The norm ends at its division; what the gain alone gives is nothing of the reference."""
    source("LlamaForCausalLM", llama.FIELDS, tmp_path)
    found = suggest(tmp_path, edited({GAIN: GAIN_FIRST}).builder(gate="first"))
    assert found.verdict is Verdict.EXACT, str(found)


@pytest.mark.slow
def test_norms_of_queries_and_keys_have_gains_of_their_own(tmp_path: Path) -> None:
    """What stands behind the norm of the queries first is the norm of the keys, which shows nothing of its gain."""
    fields = {**llama.FIELDS, "head_dim": 8}
    source("Qwen3ForCausalLM", fields, tmp_path)
    normed = {
        "self.wo = nn.Linear(dim, dim, bias=False)": (
            "self.wo, self.q_norm, self.k_norm = nn.Linear(dim, dim, bias=False), Norm(dim // heads, 1e-5),"
            " Norm(dim // heads, 1e-5)"
        ),
        "query, key = self.rotate(query, cos, sin)": (
            "query, key = self.q_norm(query), self.k_norm(key)\n        query, key = self.rotate(query, cos, sin)"
        ),
    }
    found = suggest(
        tmp_path, edited({**normed, "+ self.eps) * self.weight": "+ self.eps) * (1 + self.weight)"}).builder()
    )
    assert found.verdict is Verdict.EXACT, str(found)
    assert [one.get("offset") for one in tomllib.loads(found.text)["rule"]] == [-1] * 5


def test_another_eps_is_no_bessel_s_correction(tmp_path: Path) -> None:
    """On average a norm with a larger eps may be smaller by just as much; in each row by itself it is not."""
    source("LlamaForCausalLM", {**llama.FIELDS, "hidden_size": 24, "num_attention_heads": 4}, tmp_path)
    for eps in (1e-3, 3e-3, 1e-2):
        found = drafted(tmp_path, edited({"+ self.eps": f"+ {eps}"}).builder())
        assert "Bessel" not in found.text


WITHOUT_FINAL = {"self.output(self.norm(x))": "self.output(x)"}


def test_a_head_that_is_tied_in_the_reference_is_one_behind_a_norm_that_is_left_out(tmp_path: Path) -> None:
    source("LlamaForCausalLM", {**llama.FIELDS, "tie_word_embeddings": True}, tmp_path)
    found = tomllib.loads(drafted(tmp_path, edited(WITHOUT_FINAL).builder()).text)
    assert found["make"]["output.weight"] == "equals tok_embeddings.weight"


@pytest.mark.slow
def test_a_final_norm_that_is_left_out_in_front_of_a_tied_head(tmp_path: Path) -> None:
    """The part in front of the norm is right, and is not all that the module computes."""
    source("LlamaForCausalLM", {**llama.FIELDS, "tie_word_embeddings": True}, tmp_path)
    found = suggest(tmp_path, edited(WITHOUT_FINAL).builder())
    assert found.verdict is Verdict.IMPOSSIBLE, str(found)
    assert "final norm missing" in str(found)
