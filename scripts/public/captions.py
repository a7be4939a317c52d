"""Public models that read captions: the text side of CLIP."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from porting.suggesting import Verdict
from scripts.public.recipe import BERT, Recipe, bare, without

Build = Callable[..., nn.Module]


def clip_text() -> Build:
    """CLIP's text tower, whose forward is a method of another name."""
    without("torchvision", "torchvision.transforms", "ftfy", "regex")
    model = importlib.import_module("clip.model")

    class Text(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            whole = model.CLIP(
                config.projection_dim, 32, 1, 64, 8, config.max_position_embeddings, config.vocab_size,
                config.hidden_size, config.num_attention_heads, config.num_hidden_layers,
            )  # fmt: skip
            self.transformer, self.token_embedding, self.ln_final = (
                whole.transformer, whole.token_embedding, whole.ln_final,
            )  # fmt: skip
            self.positional_embedding, self.text_projection = whole.positional_embedding, whole.text_projection

        def forward(self, text: Tensor) -> Tensor:
            x = (self.token_embedding(text) + self.positional_embedding[: text.shape[1]]).permute(1, 0, 2)
            mask = torch.full((text.shape[1], text.shape[1]), float("-inf")).triu_(1)
            for block in self.transformer.resblocks:
                block.attn_mask = mask
            x = self.ln_final(self.transformer(x).permute(1, 0, 2))
            found: Tensor = x[torch.arange(x.shape[0]), text.argmax(dim=-1)] @ self.text_projection
            return found

    return Text


def open_clip_text() -> Build:
    """The text tower of OpenCLIP, with the exact GELU."""
    without("torchvision", "torchvision.ops", "torchvision.ops.misc")
    bare("open_clip")
    model = importlib.import_module("open_clip.transformer")

    def build(config: Any) -> nn.Module:  # a config with CLIP's fields
        made: nn.Module = model.TextTransformer(
            config.max_position_embeddings, config.vocab_size, config.hidden_size, config.num_attention_heads,
            config.num_hidden_layers, config.intermediate_size / config.hidden_size, output_dim=config.projection_dim,
        )  # fmt: skip
        return made

    return build


def stable_diffusion() -> Build:
    """Stable Diffusion's reader of captions, built of its own parts: its sizes are written into it.

    It takes rows of its full length only, so that a shorter one is filled up; nothing looks at what stands behind.
    """
    model = importlib.import_module("clip")

    class Text(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.length = config.max_position_embeddings
            self.embedding = model.CLIPEmbedding(config.vocab_size, config.hidden_size, self.length)
            self.layers = nn.ModuleList(
                model.CLIPLayer(config.num_attention_heads, config.hidden_size) for _ in range(config.num_hidden_layers)
            )
            self.layernorm = nn.LayerNorm(config.hidden_size)

        def forward(self, tokens: Tensor) -> Tensor:
            whole = nn.functional.pad(tokens, (0, self.length - tokens.shape[1]))
            found: Tensor = model.CLIP.forward(self, whole)
            return found[:, : tokens.shape[1]]

    return Text


CLIP = {**BERT, "projection_dim": 36, "eos_token_id": 112, "bos_token_id": 111}

RECIPES: Mapping[str, Recipe] = {
    "CLIP-text": Recipe(
        folder="CLIP", make=clip_text, architecture="CLIPTextModelWithProjection", fields=CLIP, verdict=Verdict.EXACT,
    ),
    "open_clip-text": Recipe(
        folder="open_clip/src", make=open_clip_text, architecture="CLIPTextModelWithProjection",
        fields={**CLIP, "hidden_act": "gelu"}, verdict=Verdict.EXACT,
    ),
    "pytorch-stable-diffusion": Recipe(
        folder="pytorch-stable-diffusion/sd", make=stable_diffusion, architecture="CLIPTextModel", fields=CLIP,
        verdict=Verdict.EXACT,
    ),
}  # fmt: skip
