"""Public models with an encoder and a decoder."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from porting.suggesting import Verdict
from scripts.public.recipe import SEQ2SEQ, Recipe, without


def annotated() -> Callable[..., nn.Module]:
    """The annotated transformer's encoder-decoder, with one word table for both sides, as its last part has it."""
    without("pandas", "altair", "spacy", "GPUtil", "torchtext")
    without(*(f"torchtext.{part}" for part in ("data", "data.functional", "datasets", "vocab")))
    model = importlib.import_module("the_annotated_transformer")

    def build(config: Any) -> nn.Module:
        made: nn.Module = model.make_model(
            config.vocab_size, config.vocab_size, config.encoder_layers, config.d_model, config.encoder_ffn_dim,
            config.encoder_attention_heads, 0.0,
        )  # fmt: skip
        made.tgt_embed[0].lut.weight = made.src_embed[0].lut.weight  # type: ignore[index,union-attr]  # its own parts
        return made

    return build


RECIPES: Mapping[str, Recipe] = {
    "annotated-transformer": Recipe(
        folder="annotated-transformer", make=annotated, architecture="PegasusForConditionalGeneration",
        fields={**SEQ2SEQ, "activation_function": "relu"}, verdict=Verdict.APPROXIMATE, reason="unbiased",
    ),
}  # fmt: skip
