"""Public models with an encoder and a decoder."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from porting.suggesting import Verdict
from scripts.public.recipe import SEQ2SEQ, Recipe, without


def annotated() -> Callable[..., nn.Module]:
    """The annotated transformer's encoder-decoder, with one word table; its loop makes the mask of what is to come."""
    without("pandas", "altair", "spacy", "GPUtil", "torchtext")
    without(*(f"torchtext.{part}" for part in ("data", "data.functional", "datasets", "vocab")))
    model = importlib.import_module("the_annotated_transformer")

    class Whole(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.made = model.make_model(
                config.vocab_size, config.vocab_size, config.encoder_layers, config.d_model, config.encoder_ffn_dim,
                config.encoder_attention_heads, 0.0,
            )  # fmt: skip
            self.made.tgt_embed[0].lut.weight = self.made.src_embed[0].lut.weight

        def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor) -> Tensor:
            out: Tensor = self.made(src, tgt, src_mask.bool(), model.subsequent_mask(tgt.shape[1]))
            return out

    return Whole


def _tied(made: Any, *names: str) -> nn.Module:
    """The module with one word table for all of these, as the checkpoint has it."""
    first = made.get_submodule(names[0])
    for name in names[1:]:
        made.get_submodule(name).weight = first.weight
    found: nn.Module = made
    return found


def _file(path: str) -> Any:  # a module of Python, whatever is in it
    spec = importlib.util.spec_from_file_location(Path(path).stem, Path(sys.path[0], path))
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def hyunwoongko() -> Callable[..., nn.Module]:
    """An encoder-decoder with computed positions and norms behind the sums; its padding word is 1."""
    model = importlib.import_module("models.model.transformer")

    def build(config: Any) -> nn.Module:
        made = model.Transformer(
            config.pad_token_id, config.pad_token_id, config.decoder_start_token_id, config.vocab_size,
            config.vocab_size, config.d_model, config.encoder_attention_heads, config.max_position_embeddings,
            config.encoder_ffn_dim, config.encoder_layers, 0.0, "cpu",
        )  # fmt: skip
        return _tied(made, "encoder.emb.tok_emb", "decoder.emb.tok_emb", "decoder.linear")

    return build


def jadore() -> Callable[..., nn.Module]:
    """An encoder-decoder without biases in attention, whose words are normed at the start."""
    model = importlib.import_module("transformer.Models")

    def build(config: Any) -> nn.Module:
        width = config.d_model // config.encoder_attention_heads
        made: nn.Module = model.Transformer(
            config.vocab_size, config.vocab_size, config.pad_token_id, config.pad_token_id, d_word_vec=config.d_model,
            d_model=config.d_model, d_inner=config.encoder_ffn_dim, n_layers=config.encoder_layers,
            n_head=config.encoder_attention_heads, d_k=width, d_v=width, n_position=config.max_position_embeddings,
        )  # fmt: skip
        return made

    return build


def tunz() -> Callable[..., nn.Module]:
    """An encoder-decoder with eight heads whatever it is told; when it was written a mask could be of bytes."""
    model = importlib.import_module("model.transformer")
    masks = model.utils
    for name in ("create_pad_mask", "create_trg_self_mask"):
        old = getattr(masks, name)
        setattr(masks, name, lambda *args, old=old, **kwargs: old(*args, **kwargs).bool())

    def build(config: Any) -> nn.Module:
        made: nn.Module = model.Transformer(
            config.vocab_size, config.vocab_size, n_layers=config.encoder_layers, hidden_size=config.d_model,
            filter_size=config.encoder_ffn_dim, dropout_rate=0.0, src_pad_idx=config.pad_token_id,
            trg_pad_idx=config.pad_token_id,
        )  # fmt: skip
        return made

    return build


def samlynn() -> Callable[..., nn.Module]:
    """An encoder-decoder whose feed-forward parts are 2048 wide; who trains it makes the mask of what is to come."""
    model = importlib.import_module("Models")

    class Whole(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.made = model.Transformer(
                config.vocab_size, config.vocab_size, config.d_model, config.encoder_layers,
                config.encoder_attention_heads, 0.0,
            )  # fmt: skip
            _tied(self.made, "encoder.embed.embed", "decoder.embed.embed", "out")

        def forward(self, src: Tensor, trg: Tensor, src_mask: Tensor) -> Tensor:
            future = torch.ones(1, trg.shape[1], trg.shape[1]).tril()
            out: Tensor = self.made(src, trg, src_mask, future)
            return out

    return Whole


def hkproj() -> Callable[..., nn.Module]:
    """An encoder-decoder whose forward is three methods, without biases in attention."""
    model = importlib.import_module("model")

    class Whole(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.made = model.build_transformer(
                config.vocab_size, config.vocab_size, config.max_position_embeddings, config.max_position_embeddings,
                config.d_model, config.encoder_layers, config.encoder_attention_heads, 0.0, config.encoder_ffn_dim,
            )  # fmt: skip
            _tied(self.made, "src_embed.embedding", "tgt_embed.embedding", "projection_layer.proj")

        def forward(self, src: Tensor, src_mask: Tensor, tgt: Tensor) -> Tensor:
            future = torch.ones(1, tgt.shape[1], tgt.shape[1]).tril()
            memory = self.made.encode(src, src_mask)
            out: Tensor = self.made.project(self.made.decode(memory, src_mask, tgt, future))
            return out

    return Whole


def gordic() -> Callable[..., nn.Module]:
    """An encoder-decoder that returns the logarithms of its probabilities."""
    model = _file("models/definitions/transformer_model.py")  # another package may be called models

    class Whole(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.made = model.Transformer(
                config.d_model, config.vocab_size, config.vocab_size, config.encoder_attention_heads,
                config.encoder_layers, 0.0,
            )  # fmt: skip
            _tied(
                self.made,
                "src_embedding.embeddings_table",
                "trg_embedding.embeddings_table",
                "decoder_generator.linear",
            )

        def forward(self, src: Tensor, src_mask: Tensor, tgt: Tensor) -> Tensor:
            future = torch.ones(1, 1, tgt.shape[1], tgt.shape[1]).tril().bool()
            out: Tensor = self.made(src, tgt, src_mask, future)
            return out

    return Whole


def t5_pytorch() -> Callable[..., nn.Module]:
    """T5 with norms that centre and matrices with biases; its masks suit no rows of two lengths."""
    model = importlib.import_module("t5_pytorch.t5_pytorch")

    class Whole(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.made = model.T5(
                dim=config.d_model, enc_num_tokens=config.vocab_size, enc_depth=config.num_layers,
                enc_heads=config.num_heads, enc_dim_head=config.d_kv, enc_mlp_mult=4, dec_num_tokens=config.vocab_size,
                dec_depth=config.num_layers, dec_heads=config.num_heads, dec_dim_head=config.d_kv, dec_mlp_mult=4,
            )  # fmt: skip

        def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
            out: Tensor = self.made(src, tgt)
            return out

    return Whole


MARIAN = {**SEQ2SEQ, "pad_token_id": 1, "decoder_start_token_id": 1, "activation_function": "relu"}
PEGASUS = {**SEQ2SEQ, "activation_function": "relu", "scale_embedding": True}
"""Both multiply their words by the root of the width."""
T5 = {
    "vocab_size": 113, "d_model": 48, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4, "d_kv": 12, "d_ff": 192,
}  # fmt: skip


RECIPES: Mapping[str, Recipe] = {
    "annotated-transformer": Recipe(
        folder="annotated-transformer", make=annotated, architecture="PegasusForConditionalGeneration",
        fields={**SEQ2SEQ, "activation_function": "relu"}, verdict=Verdict.APPROXIMATE, reason="unbiased",
    ),
    "hyunwoongko": Recipe(
        folder="transformer", make=hyunwoongko, architecture="MarianMTModel", fields=MARIAN,
        verdict=Verdict.APPROXIMATE, reason="LayerNorm eps",
    ),
    "jadore801120": Recipe(
        folder="attention-is-all-you-need-pytorch", make=jadore, architecture="BartForConditionalGeneration",
        fields={**MARIAN, "eos_token_id": 2}, verdict=Verdict.IMPOSSIBLE, reason="has no bias",
    ),
    "tunz": Recipe(
        folder="transformer-pytorch", make=tunz, architecture="PegasusForConditionalGeneration",
        fields={**PEGASUS, "encoder_attention_heads": 8, "decoder_attention_heads": 8}, verdict=Verdict.IMPOSSIBLE,
        reason="has no bias",
    ),
    "SamLynnEvans": Recipe(
        folder="Transformer", make=samlynn, architecture="PegasusForConditionalGeneration",
        fields={**PEGASUS, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}, verdict=Verdict.APPROXIMATE,
        reason="unbiased",
    ),
    "hkproj": Recipe(
        folder="pytorch-transformer", make=hkproj, architecture="PegasusForConditionalGeneration", fields=PEGASUS,
        verdict=Verdict.IMPOSSIBLE, reason="has no bias",
    ),
    "gordicaleksa": Recipe(
        folder="pytorch-original-transformer", make=gordic, architecture="PegasusForConditionalGeneration",
        fields={**PEGASUS, "encoder_ffn_dim": 192, "decoder_ffn_dim": 192}, verdict=Verdict.TRUNK, reason="at the end",
    ),
    "t5-pytorch": Recipe(
        folder="t5-pytorch", make=t5_pytorch, architecture="T5ForConditionalGeneration", fields=T5,
        verdict=Verdict.IMPOSSIBLE, reason="no attention mask",
    ),
}  # fmt: skip
