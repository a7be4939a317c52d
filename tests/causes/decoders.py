"""Families of decoders: a small checkpoint of each, its table into decoder.py, and what that then has to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from porting.notation.table import Table, parse_table
from tests.causes.decoder import Config
from tests.families.ported import draw

Fields = Mapping[str, object]

COMMON: Fields = {
    "vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 40, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MPT: Fields = {
    "vocab_size": 37, "d_model": 24, "n_layers": 1, "n_heads": 4, "expansion_ratio": 4, "max_seq_len": 24,
    "layer_norm_epsilon": 1e-5, "attn_config": {"alibi": True, "clip_qkv": 0.9}, "tie_word_embeddings": False,
}  # fmt: skip

HEADER = """
[mapping]
name = "decoder"
description = "into decoder.py"
model_types = ["{model_type}"]

[tensors]
"""
STEM = """
"model.embed_tokens.weight" = "words.weight"
"model.layers.{i}.self_attn.{p:q,k,v,o}_proj.weight" = "layers.{i}.attention.{p:q,k,v,o}.weight"
"model.norm.weight" = "norm.weight"
"lm_head.weight" = "head.weight"
"""
BODY = f'{STEM}"model.layers.{{i}}.mlp.down_proj.weight" = "layers.{{i}}.feed.down.weight"\n'
MIXED = """
"model.layers.{i}.block_sparse_moe.gate.weight" = "layers.{i}.feed.router.weight"
"model.layers.{i}.block_sparse_moe.experts.{j}.w{p:1,2}.weight" = "layers.{i}.feed.experts.{j}.{p:gate,down}.weight"
"model.layers.{i}.block_sparse_moe.experts.{j}.w3.weight" = "layers.{i}.feed.experts.{j}.up.weight"
"""
EXPERTS = """
"model.layers.{i}.mlp.gate.weight" = "layers.{i}.feed.router.weight"
"model.layers.{i}.mlp.experts.{j}.{p:gate,up,down}_proj.weight" = "layers.{i}.feed.experts.{j}.{p:gate,up,down}.weight"
"""
CORRECTED = """
"model.layers.{i}.mlp.gate.e_score_correction_bias" = "layers.{i}.feed.correction"
"model.layers.{i}.mlp.shared_experts.{p:gate,up,down}_proj.weight" = "layers.{i}.feed.common.{p:gate,up,down}.weight"
"""
GATE = '"model.layers.{i}.mlp.{p:gate,up}_proj.weight" = "layers.{i}.feed.{p:gate,up}.weight"\n'
FUSED = """
"model.layers.{i}.mlp.gate_up_proj.weight [(p f) e]" = "layers.{i}.feed.{p:gate,up}.weight [f e]"
"""
OWN = '"model.layers.{i}.self_attn.{p:q,k}_norm.weight" = "layers.{i}.attention.{p:q,k}_norm.weight"\n'
TURNED = """
"model.layers.{i}.self_attn.query_layernorm.weight" = "layers.{i}.attention.q_norm.weight"
"model.layers.{i}.self_attn.key_layernorm.weight" = "layers.{i}.attention.k_norm.weight"
"""
PROBES = """
[probes]
"model.embed_tokens" = "words"
"model.layers.{i}.self_attn.{p:q,k,v}_proj" = "layers.{i}.attention.{p:q,k,v}"
"model.layers.{i}.self_attn -> scores" = "layers.{i}.attention -> scores"
"model.layers.{i}.self_attn -> probabilities" = "layers.{i}.attention -> probabilities"
"model.layers.{i}.self_attn" = "layers.{i}.attention"
"model.layers.{i}.mlp" = "layers.{i}.feed"
"model.layers.{i}" = "layers.{i}"
"model.norm" = "norm"
". -> logits" = "."
"""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One of them.

    Attributes:
        architecture: of transformers.
        fields: its config.
        config: what decoder.py then has to do.
        norms: the reference's name of each norm in a layer, by decoder.py's.
        tensors, probes: the table's lines.
    """

    architecture: str
    fields: Fields
    config: Config
    norms: Mapping[str, str]
    tensors: str = BODY + GATE
    probes: str = PROBES

    @property
    def table(self) -> Table:
        """The table."""
        stem = "transformer.blocks" if self.architecture.startswith("Mpt") else "model.layers"
        rows = "".join(
            f'"{stem}.{{i}}.{theirs}.weight" = "layers.{{i}}.{ours}.weight"\n' for ours, theirs in self.norms.items()
        )
        shown = "".join(f'"{stem}.{{i}}.{theirs}" = "layers.{{i}}.{ours}"\n' for ours, theirs in self.norms.items())
        kind = getattr(transformers, self.architecture).config_class.model_type
        return parse_table(HEADER.format(model_type=kind) + self.tensors + rows + self.probes + shown)


BEFORE = {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm"}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 1024}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
NTK_THETA = 10_000.0 * 4 ** (8 / 6)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM", fields={**COMMON, "rope_parameters": PLAIN}, config=Config(), norms=BEFORE
    ),
    "smooth": Family(
        architecture="LlamaForCausalLM",
        fields={**COMMON, "rope_parameters": LLAMA3, "max_position_embeddings": 8192},
        config=Config(stretched=8.0, smooth=True),
        norms=BEFORE,
    ),
    "short": Family(
        architecture="LlamaForCausalLM",
        fields={
            **COMMON,
            "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 20, "rope_theta": 500_000.0},
            "max_position_embeddings": 160,
        },
        config=Config(stretched=8.0, smooth=True, known=20.0, theta=500_000.0),
        norms=BEFORE,
    ),
    "stretched": Family(
        architecture="LlamaForCausalLM",
        fields={**COMMON, "rope_parameters": LINEAR},
        config=Config(stretched=4.0),
        norms=BEFORE,
    ),
    "ntk": Family(
        architecture="LlamaForCausalLM",
        fields={**COMMON, "rope_parameters": {**PLAIN, "rope_theta": NTK_THETA}},
        config=Config(theta=NTK_THETA),
        norms=BEFORE,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        fields={**COMMON, "rope_parameters": PLAIN},
        config=Config(own_norms="head"),
        norms=BEFORE,
        tensors=BODY + GATE + OWN,
    ),
    "hunyuan": Family(
        architecture="HunYuanDenseV1ForCausalLM",
        fields={**COMMON, "rope_parameters": PLAIN},
        config=Config(own_norms="turned"),
        norms=BEFORE,
        tensors=BODY + GATE + TURNED,
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        fields={**COMMON, "rope_parameters": PLAIN, "hidden_size": 32},
        config=Config(own_norms="width", before=False, behind=True, hidden_size=32),
        norms={"norm_3": "post_attention_layernorm", "norm_4": "post_feedforward_layernorm"},
        tensors=BODY + GATE + OWN,
    ),
    "glm": Family(
        architecture="GlmForCausalLM",
        fields={**COMMON, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}, "attention_bias": False},
        config=Config(rotated=4, neighbours=True),
        norms=BEFORE,
        tensors=BODY + FUSED,
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        fields={
            **COMMON,
            "num_hidden_layers": 2,
            "rope_parameters": PLAIN,
            "query_pre_attn_scalar": 8,
            "sliding_window": 6,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        config=Config(
            layers=2,
            one_added=True,
            behind=True,
            score_cap=1.5,
            logit_cap=2.0,
            window=6,
            activation="gelu_tanh",
            embedding_scale=24**0.5,
        ),
        norms={
            "norm_1": "input_layernorm",
            "norm_2": "pre_feedforward_layernorm",
            "norm_3": "post_attention_layernorm",
            "norm_4": "post_feedforward_layernorm",
        },
        probes=PROBES + '"lm_head" = "head"\n',
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        fields={**COMMON, "rope_parameters": PLAIN, "num_local_experts": 5, "num_experts_per_tok": 2},
        config=Config(experts=5),
        norms=BEFORE,
        tensors=STEM + MIXED,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        fields={
            **COMMON,
            "rope_parameters": PLAIN,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": False,
        },
        config=Config(own_norms="head", experts=5, normed=False),
        norms=BEFORE,
        tensors=STEM + EXPERTS + OWN,
    ),
    "dots1": Family(
        architecture="Dots1ForCausalLM",
        fields={
            **COMMON,
            "rope_parameters": PLAIN,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        config=Config(own_norms="head", experts=5, scoring="sigmoid", scaled=2.5, corrected=True, common=40),
        norms=BEFORE,
        tensors=STEM + EXPERTS + CORRECTED + OWN,
    ),
    "mpt": Family(
        architecture="MptForCausalLM",
        fields=MPT,
        config=Config(
            heads=4,
            shared=4,
            head_size=6,
            inner=96,
            centred=True,
            slopes=True,
            clip=0.9,
            gated=False,
            rotated=0,
            activation="gelu",
        ),
        norms={"norm_1": "norm_1", "norm_2": "norm_2"},
        tensors="""
"transformer.wte.weight" = "words.weight"
"transformer.blocks.{i}.attn.Wqkv.weight [(p f) e]" = "layers.{i}.attention.{p:q,k,v}.weight [f e]"
"transformer.blocks.{i}.attn.out_proj.weight" = "layers.{i}.attention.o.weight"
"transformer.blocks.{i}.ffn.{p:up,down}_proj.weight" = "layers.{i}.feed.{p:up,down}.weight"
"transformer.norm_f.weight" = "norm.weight"
"lm_head.weight" = "head.weight"
""",
        probes="""
[probes]
"transformer.wte" = "words"
"transformer.blocks.{i}.attn -> scores" = "layers.{i}.attention -> scores"
"transformer.blocks.{i}.attn -> probabilities" = "layers.{i}.attention -> probabilities"
"transformer.blocks.{i}.attn.out_proj" = "layers.{i}.attention"
"transformer.blocks.{i}" = "layers.{i}"
"transformer.norm_f" = "norm"
"lm_head" = "head"
""",
    ),
}


def written(family: Family, directory: Path) -> Path:
    """A checkpoint of a family, with every parameter drawn."""
    kind: Any = getattr(transformers, family.architecture)  # one of transformers' classes
    torch.manual_seed(0)
    model = kind(kind.config_class(**family.fields))
    draw(model)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):  # a weight that is not a parameter
            torch.nn.init.normal_(buffer, std=0.2)
    model.save_pretrained(directory)
    return directory
