"""Small ports of architectures that the project does not ship, each with its table; plants edit them and are named."""

from __future__ import annotations

import importlib.util
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.whisper.modeling_whisper import WhisperEncoder

import porting
from porting.verification import Report
from tests.families.ported import draw

Edits = Sequence[tuple[str, str]]
"""What stands in a file, and what stands there instead."""

TOKENS: Mapping[str, object] = {"vocab_size": 53, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TWO: Mapping[str, object] = {"num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 64}

SPECIFICATIONS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "neox": ("GPTNeoXForCausalLM", {**TOKENS, **TWO, "hidden_size": 64, "intermediate_size": 96}),
    "opt": ("OPTForCausalLM", {**TOKENS, **TWO, "hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "qwen2": (
        "Qwen2ForCausalLM",
        {**TOKENS, **TWO, "hidden_size": 32, "num_key_value_heads": 2, "intermediate_size": 48},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            **TOKENS, **TWO, "hidden_size": 32, "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 16,
            "intermediate_size": 48, "sliding_window": 5, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0,
        },
    ),
    "albert": (
        "AlbertForSequenceClassification",
        {
            **TOKENS, **TWO, "embedding_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
            "num_labels": 5,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": 53, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "d_model": 32,
            "d_kv": 8, "num_heads": 4, "d_ff": 48, "num_layers": 2, "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 16, "feed_forward_proj": "gated-gelu",
        },
    ),
    "whisper": (
        "WhisperEncoder",
        {
            **TOKENS, "d_model": 32, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "encoder_layers": 2,
            "num_mel_bins": 10, "max_source_positions": 20, "decoder_start_token_id": 1,
        },
    ),
    "gpt2": ("GPT2LMHeadModel", {**TOKENS, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 40}),
}  # fmt: skip


@dataclass(frozen=True)
class Plant:
    """A mistake in a port, or in its table.

    Attributes:
        carrier: the port.
        truth: what is wrong, as it was read off the edit before it was run.
        edits, table: of the port, and of its table.
        names: what the cause may be called.
        says: what its detail or its fix has to say.
    """

    carrier: str
    truth: str
    edits: Edits = ()
    table: Edits = ()
    names: tuple[str, ...] = field(kw_only=True)
    says: str = field(default="", kw_only=True)


def reference(name: str) -> nn.Module:
    """The reference with every parameter drawn."""
    architecture, fields = SPECIFICATIONS[name]
    kind: Any = WhisperEncoder if name == "whisper" else getattr(transformers, architecture)
    torch.manual_seed(0)
    made: nn.Module = kind(kind.config_class(**fields))
    draw(made)
    return made.eval()


def edited(text: str, edits: Edits) -> str:
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text


def verified(plant: Plant, folder: Path, **options: Any) -> Report:
    """The report on a port with a mistake, built from files in a folder as a user would."""
    name, here = plant.carrier, Path(__file__).parent
    port, table = folder / f"my_{name}.py", folder / f"my_{name}.toml"
    port.write_text(edited((here / f"{name}.py").read_text(encoding="utf-8"), plant.edits), encoding="utf-8")
    table.write_text(edited((here / f"{name}.toml").read_text(encoding="utf-8"), plant.table), encoding="utf-8")
    theirs: Any = reference(name)
    theirs.save_pretrained(folder / "checkpoint")
    if name == "whisper":
        generator = torch.Generator().manual_seed(1)
        sounds = [{"input_features": torch.randn(rows, 10, 40, generator=generator)} for rows in (2, 3)]
        options = {"reference": theirs, "inputs": sounds, **options}
    else:
        options = {"architecture": SPECIFICATIONS[name][0], **options}
    options = {"dtypes": (), "longest": 24, **options}
    return porting.verify(folder / "checkpoint", into=_builder(port), table=table, **options)


def _builder(path: Path) -> Callable[[Any], nn.Module]:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module
    linecache.checkcache()
    specification.loader.exec_module(module)

    def build(config: Any) -> nn.Module:
        made: nn.Module = module.Net(config if isinstance(config, dict) else config.to_dict())
        return made

    return build
