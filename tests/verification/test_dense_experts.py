"""Experts that all take all tokens give what transformers gives, and the same calls whatever the router says."""

from __future__ import annotations

import pytest
import torch
import transformers

from porting.causes.tape import Recorder
from porting.verification.dense_experts import dense_experts
from tests.families.ported import draw

SMALL = {
    "vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 40, "moe_intermediate_size": 40, "num_experts_per_tok": 2,
    "pad_token_id": 0, "num_local_experts": 5, "num_experts": 5, "n_routed_experts": 5,
    "n_shared_experts": 1,
}  # fmt: skip
KINDS = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "GptOssForCausalLM", "Dots1ForCausalLM")


def model(kind: str) -> torch.nn.Module:
    """One of transformers', in float64; GPT-OSS has biases, transposed weights and a gate of its own."""
    made = getattr(transformers, kind)
    config = made.config_class(**SMALL)
    config._experts_implementation = "eager"
    found: torch.nn.Module = made(config).double().eval()
    draw(found)
    return found


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_they_give_what_transformers_gives(kind: str) -> None:
    reference, ids = model(kind), torch.arange(4, 34).view(2, 15)
    expected = reference(input_ids=ids).logits
    with dense_experts(reference, ids.numel(), 1 << 30) as changed:
        assert changed
        found = reference(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert torch.equal(reference(input_ids=ids).logits, expected)


@torch.no_grad()
def test_the_calls_are_the_same_whatever_the_tokens_are() -> None:
    reference = model("MixtralForCausalLM")
    names = []
    with dense_experts(reference, 30, 1 << 30):
        for ids in (torch.arange(4, 34).view(2, 15), torch.full((2, 15), 7)):  # many experts, and two
            with Recorder(reference) as recorder:
                reference(input_ids=ids)
            names.append([call.name for call in recorder.tape.calls])
    assert names[0] == names[1]


def test_nothing_is_changed_where_it_would_be_large() -> None:
    reference = model("MixtralForCausalLM")
    with dense_experts(reference, 30, 1 << 10) as changed:
        assert not changed


def test_a_model_without_experts_is_left_as_it_is() -> None:
    with dense_experts(torch.nn.Linear(2, 2), 30, 1 << 30) as changed:
        assert not changed
