"""What a recipe says: whose module, how it is handed over, and what is right to say of it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

from torch import nn

from porting.suggesting import Verdict

GPT2 = {"vocab_size": 113, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 40}
BERT = {
    "vocab_size": 113,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "max_position_embeddings": 40,
}
VISION = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 1,
    "intermediate_size": 256,
    "image_size": 24,
    "patch_size": 8,
}
LLAMA = {
    "vocab_size": 113, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 100, "max_position_embeddings": 40, "rms_norm_eps": 1e-5,
}  # fmt: skip
SEQ2SEQ = {
    "vocab_size": 113, "d_model": 48, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 40,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A public model and what is right to say of it.

    Attributes:
        folder: of its clone.
        also: of other clones that it is made of.
        make: gives the builder, with the clone on the path.
        architecture, fields: of the checkpoint.
        verdict: the right verdict.
        reason: a part of the right reason; empty where there is none.
    """

    folder: str
    also: tuple[str, ...] = ()
    make: Callable[[], Callable[..., nn.Module]]
    architecture: str
    fields: Mapping[str, object]
    verdict: Verdict
    reason: str = ""


def without(*names: str) -> None:
    """Stand-ins for what a clone imports and what its model does not need."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = MagicMock(__spec__=None, __path__=[])


def bare(name: str) -> ModuleType:
    """A package of the clone's whose own first lines are not run: they want what its model does not."""
    place = next(path for root in sys.path if (path := Path(root, *name.split("."))).is_dir())
    made = ModuleType(name)
    made.__path__, made.__file__ = [str(place)], str(place / "__init__.py")
    sys.modules[name] = made
    return made
