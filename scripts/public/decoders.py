"""Public models that write on: GPT-2 and its like; with those of llamas.py and litgpts.py."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from porting.suggesting import Verdict
from scripts.public import litgpts, llamas
from scripts.public.recipe import GPT2, Recipe, bare, without


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


def karpathy(name: str, kind: str = "GPT", config: str = "GPTConfig") -> Callable[[], Callable[..., nn.Module]]:
    """Further GPT-2s of one author: each a module, a class, and a config with the same fields."""

    def make() -> Callable[..., nn.Module]:
        without("hellaswag", "tiktoken", "torch.utils.tensorboard")
        model = importlib.import_module(name)

        def build(vocab_size: int, n_embd: int, n_layer: int, n_head: int, block_size: int) -> nn.Module:
            mine = getattr(model, config)(
                block_size=block_size, vocab_size=vocab_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd
            )
            made: nn.Module = getattr(model, kind)(mine)
            return made

        return build

    return make


def classes(script: str, first: str, behind: str) -> str:
    """The classes of a script that trains where it stands, from the first one up to what stands behind them."""
    text = (Path(sys.path[0]) / script).read_text(encoding="utf-8")
    return text[text.index(first) : text.index(behind)]


def reproduced() -> Callable[..., nn.Module]:
    """GPT-2, reproduced in a script: its classes alone."""
    model: Any = ModuleType("train_gpt2")
    vars(model).update(torch=torch, nn=nn, F=nn.functional, dataclass=dataclass)
    sys.modules["train_gpt2"] = model
    exec(classes("train_gpt2.py", "class CausalSelfAttention", "import tiktoken"), vars(model))  # noqa: S102  # as below
    return karpathy("train_gpt2")()


def lecture() -> Callable[..., nn.Module]:
    """The GPT of a lecture, whose sizes are globals."""
    code = classes("gpt.py", "class Head(", "model = GPTLanguageModel()")

    def build(vocab_size: int, n_embd: int, n_layer: int, n_head: int, block_size: int) -> nn.Module:
        model: Any = ModuleType("gpt")
        vars(model).update(torch=torch, nn=nn, F=nn.functional, device="cpu", dropout=0.0, vocab_size=vocab_size)
        vars(model).update(n_embd=n_embd, n_layer=n_layer, n_head=n_head, block_size=block_size)
        exec(code, vars(model))  # noqa: S102  # the clone's own code, as importing it is
        made: nn.Module = model.GPTLanguageModel()
        return made

    return build


def lyeoni() -> Callable[..., nn.Module]:
    """The first GPT; its positions begin at one, and it masks padding by itself."""
    model = importlib.import_module("model")

    def build(config: Any) -> nn.Module:
        made: nn.Module = model.GPTLMHead(
            model.GPT(
                config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, 4 * config.n_embd,
                pad_id=0,
            )
        )  # fmt: skip
        return made

    return build


def affjljoo() -> Callable[..., nn.Module]:
    """GPT-2 with swish, and a present beside the logits."""
    model = importlib.import_module("gpt2.modeling")

    def build(config: Any) -> nn.Module:
        made: nn.Module = model.Transformer(
            config.n_layer, 0, config.vocab_size, config.n_positions, config.n_head, config.n_embd, bidirectional=False
        )
        return made

    return build


def lora() -> Callable[..., nn.Module]:
    """GPT-2 whose queries and values have low-rank updates, which begin at zero."""
    sys.path.append(str(Path(sys.path[0]).parents[2]))  # where the clone's loralib is, which is installed otherwise
    model = importlib.import_module("model")

    def build(config: Any) -> nn.Module:
        mine = model.GPT2Config(
            config.vocab_size, config.n_positions, config.n_positions, config.n_embd, config.n_layer, config.n_head,
            lora_attn_dim=4, lora_attn_alpha=32,
        )  # fmt: skip
        made: nn.Module = model.GPT2LMModel(mine)
        return made

    return build


def openai() -> Callable[..., nn.Module]:
    """The first GPT, with words and positions in one table; it takes pairs of both."""
    model = importlib.import_module("model_pytorch")

    class Language(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            mine = SimpleNamespace(
                n_embd=config.n_embd, n_head=config.n_head, n_layer=config.n_layer, embd_pdrop=0.0, attn_pdrop=0.0,
                resid_pdrop=0.0, clf_pdrop=0.0, afn="gelu",
            )  # fmt: skip
            self.words = config.vocab_size
            self.lm = model.LMModel(mine, vocab=self.words + config.n_positions, n_ctx=config.n_positions)
            self.lm.lm_head.trunc_and_reshape = False

        def forward(self, ids: Tensor) -> Tensor:
            places = torch.arange(ids.shape[1]).expand_as(ids) + self.words
            found: Tensor = self.lm(torch.stack([ids, places], -1))
            return found

    return Language


def rasbt(name: str = "GPTModel", *, bias: bool = True) -> Callable[[], Callable[..., nn.Module]]:
    """The GPT-2 of a book's fourth chapter."""

    def make() -> Callable[..., nn.Module]:
        without("tiktoken", "tiktoken.load", "matplotlib", "matplotlib.pyplot", "matplotlib.ticker", "requests")
        model = importlib.import_module("llms_from_scratch.ch04")

        def build(config: Any) -> nn.Module:
            made: nn.Module = getattr(model, name)({
                "vocab_size": config.vocab_size, "context_length": config.n_positions, "emb_dim": config.n_embd,
                "n_heads": config.n_head, "n_layers": config.n_layer, "drop_rate": 0.0, "qkv_bias": bias,
            })  # fmt: skip
            return made

        return build

    return make


def arena() -> Callable[..., nn.Module]:
    """A GPT-2 from scratch of parameters for each head, W_Q [n_heads d_model d_head], and einsum."""
    without("transformer_lens", "transformer_lens.utils", "jaxtyping", "datasets", "wandb", "plotly_utils")
    without("circuitsvis", "tqdm.notebook", "IPython", "IPython.display", "plotly", "plotly.express")
    without("transformers.models.gpt2.tokenization_gpt2_fast")
    model: Any = importlib.import_module("solutions")
    model.gelu_new = lambda one: nn.functional.gelu(one, approximate="tanh")

    def build(config: Any) -> nn.Module:
        made: nn.Module = model.DemoTransformer(
            model.Config(
                d_model=config.n_embd, d_vocab=config.vocab_size, n_ctx=config.n_positions, n_heads=config.n_head,
                d_head=config.n_embd // config.n_head, d_mlp=4 * config.n_embd, n_layers=config.n_layer,
            )
        )  # fmt: skip
        return made

    return build


def x_transformers() -> Callable[..., nn.Module]:
    """A decoder of many options, with the default of each: no biases in attention, a gain alone in its norms."""
    without("loguru", "einx", "torch_einops_utils", "torch_einops_utils.nn", "torch_einops_utils.device")
    bare("x_transformers")
    model = importlib.import_module("x_transformers.x_transformers")

    def build(config: Any) -> nn.Module:
        layers = model.Decoder(
            dim=config.n_embd, depth=config.n_layer, heads=config.n_head, attn_dim_head=config.n_embd // config.n_head
        )
        made: nn.Module = model.TransformerWrapper(
            num_tokens=config.vocab_size, max_seq_len=config.n_positions, attn_layers=layers
        )
        return made

    return build


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
    "build-nanogpt": Recipe(
        folder="build-nanogpt", make=reproduced, architecture="GPT2LMHeadModel", fields=GPT2,
        verdict=Verdict.EXACT,
    ),
    "llm.c-gpt2": Recipe(
        folder="llm.c", make=karpathy("train_gpt2"), architecture="GPT2LMHeadModel", fields=GPT2,
        verdict=Verdict.EXACT,
    ),
    "makemore": Recipe(
        folder="makemore", make=karpathy("makemore", "Transformer", "ModelConfig"), architecture="GPT2LMHeadModel",
        fields=GPT2, verdict=Verdict.TRUNK, reason="lm_head.weight",
    ),
    "ng-video-lecture": Recipe(
        folder="ng-video-lecture", make=lecture, architecture="GPT2LMHeadModel", fields=GPT2,
        verdict=Verdict.IMPOSSIBLE, reason="bias",
    ),
    "gpt-pytorch": Recipe(
        folder="gpt-pytorch", make=lyeoni, architecture="OpenAIGPTLMHeadModel", fields={**GPT2, "afn": "gelu"},
        verdict=Verdict.APPROXIMATE, reason="tanh",
    ),
    "GPT2": Recipe(
        folder="GPT2/src", make=affjljoo, architecture="GPT2LMHeadModel", fields=GPT2, verdict=Verdict.IMPOSSIBLE,
        reason="",
    ),
    "LoRA": Recipe(
        folder="LoRA/examples/NLG/src", make=lora, architecture="GPT2LMHeadModel", fields=GPT2, verdict=Verdict.TRUNK,
        reason="lora_A",
    ),
    "pytorch-openai-transformer-lm": Recipe(
        folder="pytorch-openai-transformer-lm", make=openai, architecture="OpenAIGPTLMHeadModel", fields=GPT2,
        verdict=Verdict.TRUNK,
    ),
    "LLMs-from-scratch": Recipe(
        folder="LLMs-from-scratch/pkg", make=rasbt(), architecture="GPT2LMHeadModel", fields=GPT2,
        verdict=Verdict.APPROXIMATE, reason="by 2e-09",  # the root in its GELU is a float32 tensor
    ),
    "LLMs-from-scratch-fast": Recipe(
        folder="LLMs-from-scratch/pkg", make=rasbt("GPTModelFast"), architecture="GPT2LMHeadModel", fields=GPT2,
        verdict=Verdict.TRUNK, reason="out_head.weight",
    ),
    "LLMs-from-scratch-no-bias": Recipe(
        folder="LLMs-from-scratch/pkg", make=rasbt(bias=False), architecture="GPT2LMHeadModel", fields=GPT2,
        verdict=Verdict.IMPOSSIBLE, reason="bias",
    ),
    "ARENA": Recipe(
        folder="ARENA_2.0/chapter1_transformers/exercises/part1_transformer_from_scratch", make=arena,
        architecture="GPT2LMHeadModel", fields=GPT2, verdict=Verdict.TRUNK, reason="unembed.W_U",
    ),
    "x-transformers": Recipe(
        folder="x-transformers", make=x_transformers, architecture="GPT2LMHeadModel", fields=GPT2,
        verdict=Verdict.IMPOSSIBLE, reason="bias",
    ),
    **llamas.RECIPES,
    **litgpts.RECIPES,
}  # fmt: skip
