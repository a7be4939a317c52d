"""Wrong ports of five families: an edit of the text in ports/, held against transformers."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import nn

from porting.notation.table import Table, parse_table
from porting.verification import Case, Report, verify
from tests.families.ported import draw

TOKENS: Mapping[str, object] = {"vocab_size": 53, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A reference, and what is compared of it.

    Attributes:
        architecture: its class in transformers.
        config: its fields.
        port: the file in ports/.
        probes: a regular expression: the modules that are probes.
    """

    architecture: str
    config: Mapping[str, object]
    port: str
    probes: str = ".*"

    def reference(self, **fields: object) -> nn.Module:
        """With every parameter drawn."""
        kind: Any = getattr(transformers, self.architecture)  # one of transformers' classes
        torch.manual_seed(0)
        made: nn.Module = kind(kind.config_class(**{**self.config, **fields}))
        draw(made)
        return made.eval()


ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "bert": Family(
        architecture="BertForPreTraining",
        config={
            **TOKENS, "hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 40, "num_hidden_layers": 2,
            "max_position_embeddings": 40, "layer_norm_eps": 1e-3,
        },
        port="bert",
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        config={**TOKENS, "n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 40, "max_position_embeddings": 40},
        port="gpt2",
    ),
    "llama": Family(
        architecture="LlamaForCausalLM",
        config={
            **TOKENS, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
            "intermediate_size": 40, "num_hidden_layers": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-3,
            "rope_parameters": ROPE,
        },
        port="llama",
        probes=r"model\.embed_tokens|model\.layers\.\d+|lm_head",
    ),
    "marian": Family(
        architecture="MarianMTModel",
        config={
            **TOKENS, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "scale_embedding": True,
            "max_position_embeddings": 64, "decoder_start_token_id": 0, "activation_function": "silu",
            "decoder_vocab_size": 53,
        },
        port="marian",
        probes=r"model\.\w+\.layers\.\d+(\.(self|encoder)_attn)?|\.",
    ),
    "vit": Family(
        architecture="ViTForImageClassification",
        config={
            "hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 40, "num_hidden_layers": 2,
            "image_size": 32, "patch_size": 8, "num_labels": 5, "layer_norm_eps": 1e-3,
        },
        port="vit",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Wrong:
    """A mistake.

    Attributes:
        family: whose.
        changes: what stands in the file, and what stands there instead.
        names: what the cause may be called.
        detail: what the finding says of it.
        fields: of the reference's config, where they are others.
        probes: a regular expression: which modules are probes, where not the family's; with ``inner=False`` without
            attention's scores and probabilities.
        sections: more of the table.
    """

    family: str
    changes: Mapping[str, str]
    names: tuple[str, ...] = ()
    detail: str = ""
    fields: Mapping[str, object] = field(default_factory=dict)
    probes: str = ""
    inner: bool = True
    sections: str = ""


def edited(port: str, changes: Mapping[str, str]) -> nn.Module:
    """A port, out of its file with the mistake in it."""
    path = Path(importlib.import_module(f"tests.causes.ports.{port}").__file__ or "")
    source = path.read_text(encoding="utf-8")
    for old, new in changes.items():
        if old not in source:
            raise LookupError(f"{path.name} no longer has {old!r}")
        source = source.replace(old, new)
    module = ModuleType(f"edited_{port}")
    sys.modules[module.__name__] = module
    exec(compile(source, str(path), "exec"), module.__dict__)  # noqa: S102  # it is our own file
    made: nn.Module = module.Port()
    return made.eval()


def verified(wrong: Wrong, **options: Any) -> Report:
    """The report on it."""
    family = FAMILIES[wrong.family]
    reference, port = family.reference(**wrong.fields), edited(family.port, wrong.changes)
    inputs = None
    if wrong.family == "vit":
        generator = torch.Generator().manual_seed(1)
        inputs = [
            Case(f"{count} pictures", {"pixel_values": torch.randn(count, 3, 32, 32, generator=generator)})
            for count in (3, 2)
        ]
    options = {"dtypes": (), "longest": 24, "inputs": inputs, **options}
    held, drawn = port.state_dict(), reference.state_dict()
    port.load_state_dict({name: drawn[name] for name in held})
    compared = table(reference, port, wrong.probes or family.probes, inner=wrong.inner, sections=wrong.sections)
    return verify(into=port, table=compared, reference=reference, loaded=True, **options)


def table(reference: nn.Module, port: nn.Module, probes: str, *, inner: bool = True, sections: str = "") -> Table:
    """Where modules have the same names, what they compute is compared."""
    ours = dict(port.named_modules())
    held = port.state_dict()
    lines = ['[mapping]\nname = "wrong"\n[tensors]', *(f'"{name}" = "{name}"' for name in held), "[drop]"]
    lines += [f'"{name}" = "the port has it under another name"' for name in reference.state_dict() if name not in held]
    lines += [sections, "[probes]"]
    for path, part in reference.named_modules():
        if path in ours and not isinstance(part, nn.ModuleList) and re.fullmatch(probes, path or "."):
            point = path or "."
            values = ["", *([" -> scores", " -> probabilities"] if inner else []), *([" -> 1"] if point == "." else [])]
            lines += [f'"{point}{value}" = "{point}{value}"' for value in values]
    return parse_table("\n".join(lines))
