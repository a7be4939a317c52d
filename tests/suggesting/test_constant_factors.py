"""A constant factor that one side multiplies an activation by is taken in by weights; a port that lacks it is exact.

The references are transformers' own models, which have the factors in their configs: Granite multiplies embeddings,
scores, branches and logits, Gemma the embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from porting.suggesting import Verdict, suggest
from porting.suggesting.search.constant_factors import constant_factor, formula
from porting.tracing.angle_tables import angle_columns, with_columns
from tests.small_checkpoint import write_checkpoint
from tests.suggesting import llama
from tests.suggesting.oracle import drafted, source
from tests.suggesting.test_llama_mistakes import edited
from tests.suggesting.test_verdicts import Plain

GRANITE: Mapping[str, object] = {
    **llama.FIELDS,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logits_scaling": 7.0,
}
GEMMA: Mapping[str, object] = {**llama.FIELDS, "head_dim": 8, "tie_word_embeddings": True}
TANH = {"F.silu(gate)": 'F.gelu(gate, approximate="tanh")'}
WORDS = "self.tok_embeddings(tokens)"


def scales(text: str) -> dict[str, str]:
    """The module's tensors whose rules multiply, and by what."""
    rules = text.split("[[rule]]")[1:]
    found = [dict(line.split(" = ", 1) for line in rule.strip().splitlines() if " = " in line) for rule in rules]
    return {one["target"].strip('"'): one["scale"].strip('"') for one in found if "scale" in one}


@pytest.mark.parametrize("tied", [True, False])
def test_a_plain_llama_takes_in_the_factors_of_granite(tied: bool, tmp_path: Path) -> None:
    source("GraniteForCausalLM", {**GRANITE, "tie_word_embeddings": tied}, tmp_path)
    found = scales(drafted(tmp_path, llama.builder(tied=tied)).text)
    assert found.pop("tok_embeddings.weight") == "embedding_multiplier"
    assert found.pop("layers.{i}.attention.wo.weight") == "residual_multiplier"
    assert found.pop("layers.{i}.feed_forward.w2.weight") == "residual_multiplier"
    width = "(hidden_size / num_attention_heads) ** 0.5"
    assert found.pop("layers.{i}.attention.wq.weight") == f"attention_multiplier * {width}"
    logits = "embedding_multiplier ** -1 * logits_scaling ** -1" if tied else "logits_scaling ** -1"
    assert found == {"norm.weight" if tied else "output.weight": logits}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_and_is_proven_exact(tied: bool, tmp_path: Path) -> None:
    source("GraniteForCausalLM", {**GRANITE, "tie_word_embeddings": tied}, tmp_path)
    found = suggest(tmp_path, llama.builder(tied=tied))
    assert found.verdict is Verdict.EXACT, str(found)


@pytest.mark.slow
def test_embeddings_that_are_not_scaled_are_stored_so(tmp_path: Path) -> None:
    source("GemmaForCausalLM", GEMMA, tmp_path)
    found = suggest(tmp_path, edited(TANH).builder(tied=True))
    assert found.verdict is Verdict.EXACT, str(found)
    assert scales(found.text) == {"tok_embeddings.weight": "hidden_size ** 0.5", "norm.weight": "hidden_size ** -0.5"}


@pytest.mark.slow
def test_embeddings_that_are_scaled_besides_are_stored_smaller(tmp_path: Path) -> None:
    source("LlamaForCausalLM", llama.FIELDS, tmp_path)
    found = suggest(tmp_path, edited({WORDS: f"{WORDS} * self.tok_embeddings.weight.shape[1] ** 0.5"}).builder())
    assert found.verdict is Verdict.EXACT, str(found)
    assert scales(found.text) == {"tok_embeddings.weight": "hidden_size ** -0.5"}


class ScaledWords(Plain):
    """The words are multiplied by the root of the width before positions and segments are added."""

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        words = self.tok(ids) * self.tok.embedding_dim**0.5
        x: Tensor = self.norm(words + self.pe[:, : ids.shape[1]] + self.seg(segments))
        for layer in self.layers:
            x = layer(x, keep)
        return x


def test_words_that_are_scaled_before_others_are_added_are_stored_smaller(tmp_path: Path) -> None:
    assert scales(drafted(write_checkpoint(tmp_path / "bert"), ScaledWords).text) == {
        "tok.weight": "hidden_size ** -0.5"
    }


@pytest.mark.slow
def test_behind_a_factor_the_next_difference_is_found(tmp_path: Path) -> None:
    source("GemmaForCausalLM", GEMMA, tmp_path)
    last = {"self.norm, self.output = Norm(dim, eps),": "self.norm, self.output = nn.LayerNorm(dim, eps),"}
    found = suggest(tmp_path, edited({**TANH, **last}).builder(tied=True))
    assert found.verdict is Verdict.IMPOSSIBLE, str(found)
    assert any("LayerNorm for RMSNorm" in reason.said for reason in found.reasons if reason.shown), str(found)


@pytest.mark.slow
def test_what_is_done_to_the_logits_is_compared(tmp_path: Path) -> None:
    """A module with every weight that leaves out the end is the whole model, and returns something else."""
    fields = {**GEMMA, "head_dim": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": None}
    fields |= {"query_pre_attn_scalar": 8, "sliding_window": 64}
    source("Gemma2ForCausalLM", fields, tmp_path)
    sandwiched = {
        "x = x + self.attention(self.attention_norm(x), cos, sin, seen)": (
            "x = x + self.after1(self.attention(self.attention_norm(x), cos, sin, seen))"
        ),
        "x + self.feed_forward(self.ffn_norm(x))": "x + self.after2(self.feed_forward(self.ffn_norm(x)))",
        "self.attention_norm, self.ffn_norm = Norm(dim, eps), Norm(dim, eps)": (
            "self.attention_norm, self.ffn_norm = Norm(dim, eps), Norm(dim, eps)\n"
            "        self.after1, self.after2 = Norm(dim, eps), Norm(dim, eps)"
        ),
        WORDS: f"{WORDS} * self.tok_embeddings.weight.shape[1] ** 0.5",
    }
    found = suggest(tmp_path, edited({**TANH, **sandwiched}).builder(tied=True))
    assert found.verdict is Verdict.IMPOSSIBLE, str(found)
    assert any("soft cap of logits" in reason.said for reason in found.reasons if reason.shown), str(found)


def test_a_factor_is_told_from_other_differences() -> None:
    torch.manual_seed(0)
    value = torch.randn(3, 5, 8, dtype=torch.float64)
    assert constant_factor(value, 3 * value) == pytest.approx(3, rel=1e-12)
    assert constant_factor(value.transpose(0, 1), 3 * value) == pytest.approx(3, rel=1e-12)
    assert constant_factor(value, value) == 1
    assert constant_factor(value, value.flip(-1)) is None
    assert constant_factor(value, 3 * value + 1e-6) is None
    assert constant_factor(value, 0 * value) is None
    assert constant_factor(value, value[..., :4]) is None


def test_a_factor_is_written_with_what_is_called_one_first() -> None:
    config = {"hidden_size": 16, "num_attention_heads": 4, "residual_multiplier": 4.0, "num_layers": 4, "tied": True}
    assert formula(4.0, config) == "residual_multiplier"
    assert formula(0.5, config) == "residual_multiplier ** -0.5"
    assert formula(2.0, {**config, "residual_multiplier": 0.7}) == "(hidden_size / num_attention_heads) ** 0.5"
    assert formula(1.4, {**config, "residual_multiplier": 0.7}) == (
        "residual_multiplier * (hidden_size / num_attention_heads) ** 0.5"
    )
    assert formula(1.2345, config) == ""
    assert formula(3.0, {"hidden_size": 16, "num_hidden_layers": 3, "eos_token_id": 3}) == ""  # by chance


@pytest.mark.parametrize("changes", [{"inner": ".double()"}, {}], ids=["in float64", "alike"])
def test_positions_that_are_rounded_otherwise_hide_no_factor(changes: Mapping[str, str], tmp_path: Path) -> None:
    source("GraniteForCausalLM", GRANITE, tmp_path)
    rounded = {"torch.arange(0, size, 2).float()": f"torch.arange(0, size, 2){changes.get('inner', '.float()')}"}
    found = scales(drafted(tmp_path, edited(rounded).builder(tied=True)).text)
    assert found["layers.{i}.attention.wo.weight"] == "residual_multiplier"


def test_columns_are_taken_from_another_table_only_if_they_are_its_own() -> None:
    angles = torch.outer(torch.arange(7).double(), 100.0 ** -torch.arange(4).double().div(4))
    columns = torch.cat([angles.cos(), angles.sin()], -1)
    rounded = angles.float().cos().double()
    made = with_columns(torch.cat([rounded, rounded], -1), columns)
    assert made is not None
    assert 0 < made[1] < 1e-6
    assert torch.equal(made[0], torch.cat([angles.cos(), angles.cos()], -1))
    longer = with_columns(torch.cat([rounded, torch.ones(2, 4).double()]), columns)
    assert longer is not None
    assert torch.equal(longer[0][:7], angles.cos())
    assert torch.equal(longer[0][7:], torch.ones(2, 4).double())
    assert with_columns((1.01 * angles).cos(), columns) is None
    shorter = with_columns(rounded[:5], columns)
    assert shorter is not None
    assert torch.equal(shorter[0], angles[:5].cos())


@pytest.mark.parametrize("axes", [(1,), (0, 2), (1, 1), (0, 0)])
def test_rounded_angles_may_have_axes_of_one_element(axes: tuple[int, ...]) -> None:
    angles = torch.outer(torch.arange(7).double(), 100.0 ** -torch.arange(4).double().div(4))
    exact, rounded = angles.cos(), angles.float().cos().double()
    for axis in axes:  # for all heads, and for all rows of a batch
        exact, rounded = exact.unsqueeze(axis), rounded.unsqueeze(axis)
    made = with_columns(rounded, angles.cos())
    assert made is not None
    assert made[1] > 0
    assert torch.equal(made[0], exact)
    columns = angle_columns([exact])
    assert columns is not None
    assert torch.equal(columns, angles.cos())
