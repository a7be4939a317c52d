"""Public models that listen."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from porting.suggesting import Verdict
from scripts.public.recipe import SEQ2SEQ, Recipe, without


def whisper() -> Callable[..., nn.Module]:
    """Whisper, without what reads files and decodes."""
    without("tiktoken", "numba", "tqdm", "more_itertools")
    package = ModuleType("whisper")
    package.__path__ = [str(Path(sys.path[0], "whisper"))]
    sys.modules["whisper"] = package
    model = importlib.import_module("whisper.model")

    def build(config: Any) -> nn.Module:
        made: nn.Module = model.Whisper(model.ModelDimensions(
            config.num_mel_bins, config.max_source_positions, config.d_model, config.encoder_attention_heads,
            config.encoder_layers, config.vocab_size, config.max_target_positions, config.d_model,
            config.decoder_attention_heads, config.decoder_layers,
        ))  # fmt: skip
        return made

    return build


RECIPES: Mapping[str, Recipe] = {
    "whisper": Recipe(
        folder="whisper", make=whisper, architecture="WhisperForConditionalGeneration",
        fields={
            **{name: size for name, size in SEQ2SEQ.items() if name != "max_position_embeddings"}, "num_mel_bins": 20,
            "max_source_positions": 30, "max_target_positions": 24, "encoder_ffn_dim": 192, "decoder_ffn_dim": 192,
            "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
            "suppress_tokens": None, "begin_suppress_tokens": None,
        },
        verdict=Verdict.EXACT,
    ),
}  # fmt: skip
