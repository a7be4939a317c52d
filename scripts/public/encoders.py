"""Public models that read words: BERT and its like, and the text side of CLIP."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from porting.suggesting import Verdict
from scripts.public.recipe import BERT, Recipe, without


def simple_bert() -> Callable[..., nn.Module]:
    """BERT."""
    models = importlib.import_module("simple_bert_pytorch.models.bert")

    def build(vocab_size: int, dim: int, num_heads: int, num_layers: int, intermediate_size: int) -> nn.Module:
        made: nn.Module = models.Bert(
            vocab_size=vocab_size,
            dim=dim,
            num_heads=num_heads,
            num_layers=num_layers,
            intermediate_size=intermediate_size,
        )
        return made

    return build


def clip_text() -> Callable[..., nn.Module]:
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


def curated() -> Callable[..., nn.Module]:
    """BERT of curated-transformers; its mask is an object, so it is handed over in a module of three lines."""
    without("catalogue", "curated_tokenizers", "fsspec", "requests")
    models = importlib.import_module("curated_transformers.models")
    layers = importlib.import_module("curated_transformers.layers")

    class Encoder(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.encoder = models.BERTEncoder(
                models.BERTConfig(
                    embedding_width=config.hidden_size, hidden_width=config.hidden_size,
                    intermediate_width=config.intermediate_size, n_attention_heads=config.num_attention_heads,
                    n_hidden_layers=config.num_hidden_layers, n_pieces=config.vocab_size,
                    n_positions=config.max_position_embeddings, model_max_length=config.max_position_embeddings,
                )
            )  # fmt: skip

        def forward(self, piece_ids: Tensor, mask: Tensor, type_ids: Tensor) -> Tensor:
            found = self.encoder(piece_ids, layers.AttentionMask(mask.bool()), type_ids=type_ids)
            last: Tensor = found.last_hidden_layer_state
            return last

    return Encoder


CLIP_TEXT = {**BERT, "projection_dim": 36, "eos_token_id": 112, "bos_token_id": 111}

RECIPES: Mapping[str, Recipe] = {
    "simple-bert-pytorch": Recipe(
        folder="simple-bert-pytorch", make=simple_bert, architecture="BertForMaskedLM", fields=BERT,
        verdict=Verdict.TRUNK,
    ),
    "CLIP-text": Recipe(
        folder="CLIP", make=clip_text, architecture="CLIPTextModelWithProjection", fields=CLIP_TEXT,
        verdict=Verdict.EXACT,
    ),
    "curated-transformers": Recipe(
        folder="curated-transformers", make=curated, architecture="BertModel", fields=BERT, verdict=Verdict.TRUNK,
    ),
}  # fmt: skip
