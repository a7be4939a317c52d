"""Public models that write on: GPT-2 and its like."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from porting.suggesting import Verdict
from scripts.public.recipe import GPT2, Recipe, without


def min_gpt() -> Callable[..., nn.Module]:
    """GPT-2 with nn.Linear in the place of Conv1D, and a head of its own."""
    model = importlib.import_module("mingpt.model")

    def build(config: Any) -> nn.Module:  # a config with GPT-2's fields
        mine = model.GPT.get_default_config()
        mine.model_type, mine.vocab_size, mine.block_size = None, config.vocab_size, config.n_positions
        mine.n_layer, mine.n_head, mine.n_embd = config.n_layer, config.n_head, config.n_embd
        made: nn.Module = model.GPT(mine)
        return made

    return build


def nano_gpt() -> Callable[..., nn.Module]:
    """GPT-2 with a tied head; it has the exact GELU where GPT-2 has the tanh approximation."""
    model = importlib.import_module("model")

    def build(vocab_size: int, n_embd: int, n_layer: int, n_head: int, block_size: int) -> nn.Module:
        mine = model.GPTConfig(
            block_size=block_size, vocab_size=vocab_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd, dropout=0.0
        )
        made: nn.Module = model.GPT(mine)
        return made

    return build


def graykode() -> Callable[..., nn.Module]:
    """GPT-2 as in the days of pytorch-pretrained-BERT."""
    model, config = (importlib.import_module(f"GPT2.{name}") for name in ("model", "config"))

    def build(vocab_size: int, n_embd: int, n_layer: int, n_head: int, n_positions: int) -> nn.Module:
        mine = config.GPT2Config(vocab_size, n_positions, n_positions, n_embd, n_layer, n_head)
        made: nn.Module = model.GPT2LMHeadModel(mine)
        made.set_tied()  # type: ignore[operator]  # as its main.py does
        return made

    return build


def former() -> Callable[..., nn.Module]:
    """A post-norm language model without biases in its attention."""
    without("torch.utils.tensorboard")
    made: Callable[..., nn.Module] = importlib.import_module("former").GTransformer
    return made


RECIPES: Mapping[str, Recipe] = {
    "minGPT": Recipe(
        folder="minGPT", make=min_gpt, architecture="GPT2LMHeadModel", fields=GPT2, verdict=Verdict.TRUNK,
        reason="lm_head.weight",
    ),
    "nanoGPT": Recipe(
        folder="nanoGPT", make=nano_gpt, architecture="GPT2LMHeadModel", fields=GPT2, verdict=Verdict.APPROXIMATE,
        reason="tanh",
    ),
    "gpt-2-Pytorch": Recipe(
        folder="gpt-2-Pytorch", make=graykode, architecture="GPT2LMHeadModel", fields=GPT2, verdict=Verdict.EXACT
    ),
    "former": Recipe(
        folder="former", make=former, architecture="OpenAIGPTLMHeadModel",
        fields={**GPT2}, verdict=Verdict.IMPOSSIBLE, reason="bias",
    ),
}  # fmt: skip
