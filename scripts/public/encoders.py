"""Public models that read words: BERT and its like."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from porting.suggesting import Verdict
from scripts.public.recipe import BERT, GPT2, Recipe, without

Build = Callable[..., nn.Module]


def simple_bert() -> Build:
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


def minbert() -> Build:
    """BERT as an exercise: its gaps are filled in as whoever takes the course would."""
    without("importlib_metadata", "requests", "filelock")
    model, configs = importlib.import_module("bert"), importlib.import_module("config")

    class Attention(model.BertSelfAttention):  # type: ignore[name-defined,misc]  # the clone's
        def attention(self, key: Tensor, query: Tensor, value: Tensor, attention_mask: Tensor) -> Tensor:
            scores = query @ key.transpose(-1, -2) / math.sqrt(self.attention_head_size) + attention_mask
            return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)

    class Layer(model.BertLayer):  # type: ignore[name-defined,misc]  # as above
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.self_attention = Attention(config)

        def add_norm(self, x: Tensor, output: Tensor, dense: nn.Module, dropout: nn.Module, norm: nn.Module) -> Tensor:
            found: Tensor = norm(x + dropout(dense(output)))
            return found

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            seen = self.self_attention(x, mask)
            x = self.add_norm(x, seen, self.attention_dense, self.attention_dropout, self.attention_layer_norm)
            inner = self.interm_af(self.interm_dense(x))
            return self.add_norm(x, inner, self.out_dense, self.out_dropout, self.out_layer_norm)

    class Bert(model.BertModel):  # type: ignore[name-defined,misc]  # as above
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.bert_layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))

        def embed(self, input_ids: Tensor) -> Tensor:
            places = self.position_ids[:, : input_ids.shape[1]]
            kinds = self.tk_type_embedding(torch.zeros_like(input_ids))
            whole = self.word_embedding(input_ids) + self.pos_embedding(places) + kinds
            found: Tensor = self.embed_dropout(self.embed_layer_norm(whole))
            return found

    def build(config: Any) -> nn.Module:  # a config with BERT's fields
        names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                 "max_position_embeddings", "type_vocab_size", "layer_norm_eps")  # fmt: skip
        made = configs.BertConfig(**{name: getattr(config, name) for name in names})
        made.name_or_path = ""
        return Bert(made)

    return build


def pytorchic() -> Build:
    """BERT in one page."""
    model = importlib.import_module("models")

    def build(config: Any) -> nn.Module:
        made: nn.Module = model.Transformer(
            model.Config(
                config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads,
                config.intermediate_size, 0.0, 0.0, config.max_position_embeddings, config.type_vocab_size,
            )
        )  # fmt: skip
        return made

    return build


def codertimo() -> Build:
    """A BERT with computed positions, norms in front of its sublayers and none at its ends."""
    without("tqdm")
    model = importlib.import_module("bert_pytorch.model")

    def build(config: Any) -> nn.Module:
        made: nn.Module = model.BERT(
            config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads, 0.0
        )
        return made

    return build


def _evolution(config: Any, **names: int) -> Any:
    """The config of transformer-evolution's models."""
    return SimpleNamespace(
        n_layer=config.num_hidden_layers, d_hidn=config.hidden_size, i_pad=config.pad_token_id or 0,
        n_head=config.num_attention_heads, d_head=config.hidden_size // config.num_attention_heads,
        d_ff=4 * config.hidden_size, dropout=0.0, layer_norm_epsilon=1e-12, **names,
    )  # fmt: skip


def evolution_bert() -> Build:
    """A BERT without a norm behind its embeddings; its positions are counted from 1."""
    model = importlib.import_module("bert.model")

    def build(config: Any) -> nn.Module:
        more = {"n_enc_vocab": config.vocab_size, "n_enc_seq": config.max_position_embeddings, "n_seg_type": 2}
        made: nn.Module = model.BERT(_evolution(config, **more))
        return made

    return build


def evolution_gpt() -> Build:
    """A GPT with the exact GELU; its positions begin as computed ones, in a table that can be loaded."""
    model = importlib.import_module("gpt.model")

    def build(config: Any) -> nn.Module:
        more = {"n_dec_vocab": config.vocab_size, "n_dec_seq": config.max_position_embeddings}
        made: nn.Module = model.GPT(_evolution(config, **more))
        return made

    return build


def d2l() -> Build:
    """The BERT of Dive into Deep Learning: lazy, with ReLU, no norm behind its embeddings, and lengths for a mask."""
    without("torchvision", "torchvision.transforms", "pandas", "requests", "IPython", "matplotlib", "PIL", "scipy")
    without("matplotlib.pyplot", "matplotlib_inline", "scipy.spatial")
    model = importlib.import_module("d2l.torch")

    class Encoder(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.encoder = model.BERTEncoder(
                config.vocab_size, config.hidden_size, config.intermediate_size, config.num_attention_heads,
                config.num_hidden_layers, 0.0, max_len=config.max_position_embeddings,
            )  # fmt: skip

        def forward(self, tokens: Tensor, segments: Tensor, mask: Tensor) -> Tensor:
            found: Tensor = self.encoder(tokens, segments, mask.sum(-1))
            return found

    return Encoder


def esm() -> Build:
    """ESM-2, whose forward returns a dictionary; its tokens are those of proteins."""
    model = importlib.import_module("esm.model.esm2")

    def build(config: Any) -> nn.Module:
        alphabet = model.esm.data.Alphabet.from_architecture("ESM-1b")
        made: nn.Module = model.ESM2(
            config.num_hidden_layers, config.hidden_size, config.num_attention_heads, alphabet,
            token_dropout=config.token_dropout,
        )  # fmt: skip
        return made

    return build


def torchscale() -> Build:
    """TorchScale's encoder with its norms behind the sublayers."""
    without("fairscale", "fairscale.nn", "timm", "timm.models", "timm.models.layers", "apex", "flash_attn", "xformers")
    encoder, configs, words = (
        importlib.import_module(f"torchscale.{name}")
        for name in ("architecture.encoder", "architecture.config", "component.embedding")
    )

    def build(config: Any) -> nn.Module:
        sizes = configs.EncoderConfig(
            encoder_embed_dim=config.hidden_size, encoder_attention_heads=config.num_attention_heads,
            encoder_ffn_embed_dim=config.intermediate_size, encoder_layers=config.num_hidden_layers,
            encoder_normalize_before=False, layernorm_embedding=True, subln=False, no_output_layer=True,
            layernorm_eps=config.layer_norm_eps, vocab_size=config.vocab_size,
        )  # fmt: skip
        made: nn.Module = encoder.Encoder(
            sizes, words.TextEmbedding(config.vocab_size, config.hidden_size),
            words.PositionalEmbedding(config.max_position_embeddings, config.hidden_size),
        )  # fmt: skip
        return made

    return build


def _curated(family: str, **more: Callable[[Any], object]) -> Callable[[], Build]:
    """An encoder of curated-transformers; its mask is an object, so it is handed over in a module of three lines."""

    def make() -> Build:
        without("catalogue", "curated_tokenizers", "fsspec", "requests")
        models = importlib.import_module("curated_transformers.models")
        layers = importlib.import_module("curated_transformers.layers")
        kind = getattr(models, f"{family}Encoder")
        sizes = getattr(models, f"{family}Config", models.RoBERTaConfig)

        class Encoder(nn.Module):
            def __init__(self, config: Any) -> None:
                super().__init__()
                self.encoder = kind(
                    sizes(
                        **{
                            "embedding_width": config.hidden_size, "hidden_width": config.hidden_size,
                            "intermediate_width": config.intermediate_size,
                            "n_attention_heads": config.num_attention_heads,
                            "n_hidden_layers": config.num_hidden_layers, "n_pieces": config.vocab_size,
                            "n_positions": config.max_position_embeddings,
                            "model_max_length": config.max_position_embeddings,
                            **{name: say(config) for name, say in more.items()},
                        }
                    )
                )  # fmt: skip

            def forward(self, piece_ids: Tensor, mask: Tensor, type_ids: Tensor | None = None) -> Tensor:
                found = self.encoder(piece_ids, layers.AttentionMask(mask.bool()), type_ids=type_ids)
                last: Tensor = found.last_hidden_layer_state
                return last

        return Encoder

    return make


PROTEINS = {**BERT, "vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "token_dropout": True,
            "position_embedding_type": "rotary", "emb_layer_norm_before": False, "layer_norm_eps": 1e-5}  # fmt: skip
ROBERTA = {**BERT, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}

RECIPES: Mapping[str, Recipe] = {
    "simple-bert-pytorch": Recipe(
        folder="simple-bert-pytorch", make=simple_bert, architecture="BertForMaskedLM", fields=BERT,
        verdict=Verdict.TRUNK,
    ),
    "minbert-assignment": Recipe(
        folder="minbert-assignment", make=minbert, architecture="BertModel", fields=BERT, verdict=Verdict.EXACT,
    ),
    "minbert-default-final-project": Recipe(
        folder="minbert-default-final-project", make=minbert, architecture="BertModel", fields=BERT,
        verdict=Verdict.EXACT,
    ),
    "pytorchic-bert": Recipe(
        folder="pytorchic-bert", make=pytorchic, architecture="BertModel", fields=BERT, verdict=Verdict.TRUNK,
    ),
    "BERT-pytorch": Recipe(
        folder="BERT-pytorch", make=codertimo, architecture="BertModel", fields=BERT, verdict=Verdict.IMPOSSIBLE,
    ),
    "transformer-evolution-bert": Recipe(
        folder="transformer-evolution", make=evolution_bert, architecture="BertModel", fields=BERT,
        verdict=Verdict.IMPOSSIBLE, reason="embeddings.LayerNorm",
    ),
    "transformer-evolution-gpt": Recipe(
        folder="transformer-evolution", make=evolution_gpt, architecture="OpenAIGPTModel", fields=GPT2,
        verdict=Verdict.APPROXIMATE, reason="exact GELU",
    ),
    "d2l-en": Recipe(
        folder="d2l-en", make=d2l, architecture="BertModel", fields=BERT, verdict=Verdict.IMPOSSIBLE,
        reason="embeddings.LayerNorm",
    ),
    "esm": Recipe(
        folder="esm", make=esm, architecture="EsmForMaskedLM", fields=PROTEINS, verdict=Verdict.EXACT,
    ),
    "torchscale": Recipe(
        folder="torchscale", make=torchscale, architecture="BertModel", fields=BERT, verdict=Verdict.TRUNK,
    ),
    "curated-transformers": Recipe(
        folder="curated-transformers", make=_curated("BERT"), architecture="BertModel", fields=BERT,
        verdict=Verdict.TRUNK,
    ),
    "curated-roberta": Recipe(
        folder="curated-transformers", make=_curated("RoBERTa", padding_id=lambda config: config.pad_token_id),
        architecture="RobertaModel", fields=ROBERTA, verdict=Verdict.TRUNK,
    ),
    "curated-camembert": Recipe(
        folder="curated-transformers", make=_curated("CamemBERT", padding_id=lambda config: config.pad_token_id),
        architecture="CamembertModel", fields=ROBERTA, verdict=Verdict.TRUNK,
    ),
    "curated-albert": Recipe(
        folder="curated-transformers",
        make=_curated("ALBERT", embedding_width=lambda config: config.embedding_size), architecture="AlbertModel",
        fields={**BERT, "embedding_size": 24}, verdict=Verdict.TRUNK,
    ),
}  # fmt: skip
