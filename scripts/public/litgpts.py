"""One public class for many checkpoints: litgpt's GPT, by the names of its own configs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from porting.suggesting import Verdict
from scripts.public.recipe import BERT, LLAMA, Recipe, bare, without


def litgpt(
    name: str, *, inner: bool = True, groups: bool = False, head: bool = False
) -> Callable[[], Callable[..., nn.Module]]:
    """The GPT of litgpt, made from one of its configs.

    Args:
        name: of the config.
        inner: the config says an inner size.
        groups: it says how many heads share a key.
        head: it says the size of a head.
    """

    def make() -> Callable[..., nn.Module]:
        without("lightning", "lightning.fabric", "lightning.fabric.utilities", "lightning.fabric.utilities.load")
        without("litgpt.utils", "yaml", "tqdm", "torchao")
        bare("litgpt")
        bare("litgpt.scripts")
        configs, model = (importlib.import_module(f"litgpt.{one}") for one in ("config", "model"))

        def build(config: Any) -> nn.Module:
            sizes = {
                "block_size": config.max_position_embeddings, "vocab_size": config.vocab_size,
                "padded_vocab_size": config.vocab_size, "n_layer": config.num_hidden_layers,
                "n_head": config.num_attention_heads, "n_embd": config.hidden_size,
            }  # fmt: skip
            sizes |= {"intermediate_size": config.intermediate_size} if inner else {}
            sizes |= {"n_query_groups": config.num_key_value_heads} if groups else {}
            sizes |= {"head_size": config.head_dim} if head else {}
            made: nn.Module = model.GPT(configs.Config.from_name(name, **sizes))
            return made

        return build

    return make


def _rope(**more: object) -> Mapping[str, object]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **more}}


PHI = {**BERT, "hidden_act": "gelu_new", **_rope(partial_rotary_factor=0.5)}

RECIPES: Mapping[str, Recipe] = {
    "litgpt-llama": Recipe(
        folder="litgpt", make=litgpt("tiny-llama-1.1b", groups=True), architecture="LlamaForCausalLM", fields=LLAMA,
        verdict=Verdict.EXACT,
    ),
    "litgpt-pythia": Recipe(
        folder="litgpt", make=litgpt("pythia-14m"), architecture="GPTNeoXForCausalLM",
        fields={**BERT, "num_attention_heads": 3, **_rope(partial_rotary_factor=0.25)}, verdict=Verdict.EXACT,
    ),
    "litgpt-phi": Recipe(
        folder="litgpt", make=litgpt("phi-1_5"), architecture="PhiForCausalLM", fields=PHI, verdict=Verdict.EXACT
    ),
    "litgpt-qwen3": Recipe(
        folder="litgpt", make=litgpt("Qwen3-0.6B", groups=True, head=True), architecture="Qwen3ForCausalLM",
        fields={**LLAMA, "rms_norm_eps": 1e-6, "head_dim": 16, **_rope(rope_theta=1000000.0)}, verdict=Verdict.EXACT,
    ),
    "litgpt-gemma": Recipe(
        folder="litgpt", make=litgpt("Gemma-2b", groups=True, head=True), architecture="GemmaForCausalLM",
        fields={**LLAMA, "head_dim": 16}, verdict=Verdict.TRUNK, reason="lm_head.weight",
    ),
    "litgpt-gemma2": Recipe(
        folder="litgpt", make=litgpt("Gemma-2-2b", groups=True, head=True), architecture="Gemma2ForCausalLM",
        fields={**LLAMA, "head_dim": 16}, verdict=Verdict.TRUNK, reason="lm_head.weight",
    ),
    "litgpt-falcon": Recipe(
        folder="litgpt", make=litgpt("falcon-7b", inner=False), architecture="FalconForCausalLM",
        fields={"vocab_size": 113, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
        verdict=Verdict.TRUNK, reason="lm_head.weight",
    ),
    "litgpt-olmo": Recipe(
        folder="litgpt", make=litgpt("OLMo-1B-hf"), architecture="OlmoForCausalLM",
        fields={**LLAMA, "num_key_value_heads": 4, "tie_word_embeddings": False}, verdict=Verdict.EXACT,
    ),
    "litgpt-olmo2": Recipe(
        folder="litgpt", make=litgpt("OLMo-2-1124-7B", groups=True), architecture="Olmo2ForCausalLM",
        fields={**LLAMA, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, **_rope(rope_theta=500000.0)},
        verdict=Verdict.EXACT,
    ),
}  # fmt: skip
