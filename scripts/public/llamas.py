"""Public models that write on and turn queries and keys by their places: Llama and its like."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from porting.suggesting import Verdict
from scripts.public.recipe import LLAMA, Recipe, bare, without


def llama2_c() -> Callable[..., nn.Module]:
    """Llama with a tied head; it returns the logits of the last position alone."""
    model = importlib.import_module("model")

    def build(config: Any) -> nn.Module:
        made: nn.Module = model.Transformer(
            model.ModelArgs(
                dim=config.hidden_size, n_layers=config.num_hidden_layers, n_heads=config.num_attention_heads,
                n_kv_heads=config.num_key_value_heads, vocab_size=config.vocab_size,
                hidden_dim=config.intermediate_size, norm_eps=config.rms_norm_eps,
                max_seq_len=config.max_position_embeddings,
            )
        )  # fmt: skip
        return made

    return build


def llm_c() -> Callable[..., nn.Module]:
    """Llama 3 with query, key and value in one matrix and a cache; the logits of the last position alone."""
    without("tiktoken", "tiktoken.load")
    model = importlib.import_module("train_llama3")

    def build(config: Any) -> nn.Module:
        made: nn.Module = model.LLaMA(
            model.LlamaConfig(
                block_size=config.max_position_embeddings, vocab_size=config.vocab_size,
                n_layer=config.num_hidden_layers, n_head=config.num_attention_heads,
                n_kv_head=config.num_key_value_heads, n_embd=config.hidden_size, ffn_dim_multiplier=None,
                multiple_of=256, norm_eps=config.rms_norm_eps, rope_theta=10000.0, use_scaled_rope=False,
            )
        )  # fmt: skip
        return made

    return build


def meta(name: str) -> Callable[[], Callable[..., nn.Module]]:
    """Meta's own, with plain layers in the place of fairscale's; its forward takes where the tokens start."""

    def make() -> Callable[..., nn.Module]:
        without(*(f"fairscale{part}" for part in ("", ".nn", ".nn.model_parallel", ".nn.model_parallel.initialize")))
        without("fairscale.nn.model_parallel.layers", "sentencepiece", "tiktoken", "tiktoken.load", "fire")
        bare("llama")
        model: Any = importlib.import_module("llama.model")

        def linear(into: int, out: int, *, bias: bool = False, **_: object) -> nn.Linear:
            return nn.Linear(into, out, bias=bias)

        def table(rows: int, width: int, **_: object) -> nn.Embedding:
            return nn.Embedding(rows, width)

        model.ColumnParallelLinear = model.RowParallelLinear = linear
        model.ParallelEmbedding = model.VocabParallelEmbedding = table
        model.fs_init = SimpleNamespace(get_model_parallel_world_size=lambda: 1)

        class Start(nn.Module):
            def __init__(self, config: Any) -> None:
                super().__init__()
                theta = {"rope_theta": config.rope_theta} if name == "llama3" else {}
                with patch.object(Tensor, "cuda", lambda one: one):  # its caches, on this machine
                    self.model = model.Transformer(
                        model.ModelArgs(
                            dim=config.hidden_size, n_layers=config.num_hidden_layers,
                            n_heads=config.num_attention_heads, n_kv_heads=config.num_key_value_heads,
                            vocab_size=config.vocab_size, norm_eps=config.rms_norm_eps,
                            max_seq_len=config.max_position_embeddings, **theta,
                        )
                    )  # fmt: skip

            def forward(self, tokens: Tensor) -> Tensor:
                found: Tensor = self.model(tokens, 0)
                return found

        return Start

    return make


def hkproj() -> Callable[..., nn.Module]:
    """Llama 2 that takes one token at a time, with a cache."""
    model = importlib.import_module("model")

    class OneByOne(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.model = model.Transformer(
                model.ModelArgs(
                    dim=config.hidden_size, n_layers=config.num_hidden_layers, n_heads=config.num_attention_heads,
                    n_kv_heads=config.num_key_value_heads, vocab_size=config.vocab_size,
                    norm_eps=config.rms_norm_eps, max_seq_len=config.max_position_embeddings, device="cpu",
                )
            )  # fmt: skip

        def forward(self, tokens: Tensor) -> Tensor:
            return torch.cat([self.model(tokens[:, place : place + 1], place) for place in range(tokens.shape[1])], 1)

    return OneByOne


def lit_llama() -> Callable[..., nn.Module]:
    """The first Llama; its eps is written into it."""
    without("lightning", "lightning.fabric", "lightning.fabric.strategies", "lightning.fabric.utilities")
    without("lightning.fabric.utilities.load")
    bare("lit_llama")
    without("lit_llama.utils")
    vars(importlib.import_module("lit_llama.utils")).update(find_multiple=lambda n, k: n + -n % k)
    model = importlib.import_module("lit_llama.model")

    def build(config: Any) -> nn.Module:
        made: nn.Module = model.LLaMA(
            model.LLaMAConfig(
                block_size=config.max_position_embeddings, vocab_size=config.vocab_size,
                padded_vocab_size=config.vocab_size, n_layer=config.num_hidden_layers,
                n_head=config.num_attention_heads, n_embd=config.hidden_size,
            )
        )  # fmt: skip
        return made

    return build


def mistral() -> Callable[..., nn.Module]:
    """Mistral's own: rows one after the other in one, and a cache; without xformers, two stand-ins of a few lines."""

    class Causal:
        def __init__(self, lengths: Sequence[int]) -> None:
            row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
            self.seen = (row[:, None] == row) & torch.ones(len(row), len(row)).tril().bool()

        @classmethod
        def from_seqlens(cls, lengths: Sequence[int]) -> Causal:
            return cls(lengths)

        def make_local_attention(self, size: int) -> Causal:
            return self

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Causal) -> Tensor:
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias.seen).transpose(1, 2)

    without("xformers", "xformers.ops", "xformers.ops.fmha", "xformers.ops.fmha.attn_bias")
    without("simple_parsing", "simple_parsing.helpers", "safetensors.torch")
    vars(importlib.import_module("xformers.ops.fmha")).update(memory_efficient_attention=attend)
    vars(importlib.import_module("xformers.ops.fmha.attn_bias")).update(BlockDiagonalCausalMask=Causal)
    vars(importlib.import_module("simple_parsing.helpers")).update(Serializable=object)
    args, caches, transformer = (
        importlib.import_module(f"mistral_inference.{name}") for name in ("args", "cache", "transformer")
    )

    class Rows(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.args = args.TransformerArgs(
                dim=config.hidden_size, n_layers=config.num_hidden_layers, head_dim=config.head_dim,
                hidden_dim=config.intermediate_size, n_heads=config.num_attention_heads,
                n_kv_heads=config.num_key_value_heads, norm_eps=config.rms_norm_eps, vocab_size=config.vocab_size,
                max_batch_size=32, rope_theta=config.rope_theta,
            )  # fmt: skip
            self.model = transformer.Transformer(self.args)

        def forward(self, ids: Tensor) -> Tensor:
            rows, length = ids.shape
            cache = caches.BufferCache(self.args.n_layers, rows, length, self.args.n_kv_heads, self.args.head_dim)
            cache = cache.to(device=ids.device, dtype=self.model.dtype)
            found: Tensor = self.model(ids.flatten(), [length] * rows, cache)
            return found.view(rows, length, -1)

    return Rows


def rasbt(kind: str) -> Callable[[], Callable[..., nn.Module]]:
    """Llama 3 and Qwen3, of a book that writes them from scratch."""

    def make() -> Callable[..., nn.Module]:
        without("tiktoken", "tiktoken.load", "tokenizers", "requests")
        model = importlib.import_module(f"llms_from_scratch.{kind.lower()}")

        def build(config: Any) -> nn.Module:
            mine = {
                "vocab_size": config.vocab_size, "context_length": config.max_position_embeddings,
                "emb_dim": config.hidden_size, "n_heads": config.num_attention_heads,
                "n_layers": config.num_hidden_layers, "hidden_dim": config.intermediate_size,
                "n_kv_groups": config.num_key_value_heads, "rope_base": 10000.0, "rope_freq": None,
                "dtype": torch.float32,
            }  # fmt: skip
            if kind == "Qwen3":
                mine |= {"head_dim": config.head_dim, "qk_norm": True}
            made: nn.Module = getattr(model, f"{kind}Model")(mine)
            return made

        return build

    return make


def gemma() -> Callable[..., nn.Module]:
    """Google's own Gemma: its rope, masks and caches are given from without, so it comes in a module of a few lines."""
    without("sentencepiece", "immutabledict", "PIL", "PIL.Image", "absl")
    model, configs = (importlib.import_module(f"gemma.{name}") for name in ("model", "config"))

    class Whole(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.config = configs.GemmaConfig(
                vocab_size=config.vocab_size, max_position_embeddings=config.max_position_embeddings,
                num_hidden_layers=config.num_hidden_layers, num_attention_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads, hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size, head_dim=config.head_dim,
                rms_norm_eps=config.rms_norm_eps,
            )  # fmt: skip
            self.embedder = model.Embedding(config.vocab_size, config.hidden_size, quant=False)
            self.model = model.GemmaModel(self.config)
            angles = model.precompute_freqs_cis(config.head_dim, config.max_position_embeddings)
            self.register_buffer("freqs_cis", angles, persistent=False)

        def forward(self, ids: Tensor) -> Tensor:
            length = ids.shape[1]
            hidden = self.embedder(ids) * math.sqrt(self.config.hidden_size)
            size = (len(ids), length, self.config.num_key_value_heads, self.config.head_dim)
            caches = [(hidden.new_zeros(size), hidden.new_zeros(size)) for _ in range(self.config.num_hidden_layers)]
            mask = hidden.new_full((1, 1, length, length), -2.3819763e38).triu(1)
            angles = self.freqs_cis[:length]  # type: ignore[index]  # a buffer
            kinds = dict.fromkeys(configs.AttentionType, angles)
            hidden = self.model(hidden, kinds, torch.arange(length), caches, mask, mask)
            return nn.functional.linear(hidden, self.embedder.weight)

    return Whole


def paligemma() -> Callable[..., nn.Module]:
    """The Gemma of a PaliGemma from scratch: it takes embeddings, a mask to add, and positions."""
    model = importlib.import_module("modeling_gemma")

    class Words(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.model = model.GemmaForCausalLM(
                model.GemmaConfig(
                    config.vocab_size, config.hidden_size, config.intermediate_size, config.num_hidden_layers,
                    config.num_attention_heads, config.num_key_value_heads, head_dim=config.head_dim,
                    max_position_embeddings=config.max_position_embeddings, rms_norm_eps=config.rms_norm_eps,
                )
            )  # fmt: skip
            self.model.tie_weights()

        def forward(self, input_ids: Tensor) -> Tensor:
            embedded = self.model.get_input_embeddings()(input_ids)
            length = input_ids.shape[1]
            mask = embedded.new_full((1, 1, length, length), float("-inf")).triu(1)
            places = torch.arange(length).expand_as(input_ids)
            found: Tensor = self.model(mask, places, embedded)["logits"]
            return found

    return Words


def olmo() -> Callable[..., nn.Module]:
    """AI2's own OLMo: query, key and value in one matrix, gate and up in another, norms without weights."""
    without("omegaconf", "omegaconf.errors", "boto3", "botocore", "botocore.exceptions", "botocore.config", "datasets")
    without("cached_path", "cached_path.schemes", "google", "google.api_core", "google.api_core.retry", "requests")
    without("importlib_resources", "importlib_resources.abc")
    bare("olmo")
    vars(importlib.import_module("omegaconf.errors")).update(OmegaConfBaseException=ValueError)
    model, config_of = (importlib.import_module(f"olmo.{name}") for name in ("model", "config"))

    def build(config: Any) -> nn.Module:
        made: nn.Module = model.OLMo(
            config_of.ModelConfig(
                d_model=config.hidden_size, n_heads=config.num_attention_heads, n_kv_heads=config.num_key_value_heads,
                n_layers=config.num_hidden_layers, mlp_hidden_size=2 * config.intermediate_size, rope=True,
                attention_dropout=0.0, residual_dropout=0.0, embedding_dropout=0.0, layer_norm_with_affine=False,
                attention_layer_norm_with_affine=False, max_sequence_length=config.max_position_embeddings,
                include_bias=False, bias_for_layer_norm=False, vocab_size=config.vocab_size,
                embedding_size=config.vocab_size, weight_tying=config.tie_word_embeddings, init_device="cpu",
                pad_token_id=1, eos_token_id=1,
            )
        )  # fmt: skip
        return made

    return build


WIDE = {**LLAMA, "intermediate_size": 256}
"""Where a module rounds the inner size up to a multiple of 256."""

RECIPES: Mapping[str, Recipe] = {
    "llama2.c": Recipe(
        folder="llama2.c", make=llama2_c, architecture="LlamaForCausalLM",
        fields={**LLAMA, "tie_word_embeddings": True}, verdict=Verdict.EXACT,
    ),
    # what torch.polar gives in float32 is another float32 number here and there than the reference's cosine
    "llm.c-llama3": Recipe(
        folder="llm.c", make=llm_c, architecture="LlamaForCausalLM", fields=WIDE,
        verdict=Verdict.APPROXIMATE, reason="rounded",
    ),
    "llama": Recipe(
        folder="llama", make=meta("llama"), architecture="LlamaForCausalLM", fields=WIDE,
        verdict=Verdict.APPROXIMATE, reason="rounded",
    ),
    "llama3": Recipe(
        folder="llama3", make=meta("llama3"), architecture="LlamaForCausalLM",
        fields={**WIDE, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        verdict=Verdict.APPROXIMATE, reason="rounded",
    ),
    "pytorch-llama": Recipe(
        folder="pytorch-llama", make=hkproj, architecture="LlamaForCausalLM", fields=WIDE,
        verdict=Verdict.APPROXIMATE, reason="rounded",
    ),
    "lit-llama": Recipe(
        folder="lit-llama", make=lit_llama, architecture="LlamaForCausalLM",
        fields={**WIDE, "num_key_value_heads": 4}, verdict=Verdict.EXACT,
    ),
    "mistral-inference": Recipe(
        folder="mistral-inference/src", make=mistral, architecture="MistralForCausalLM",
        fields={**LLAMA, "head_dim": 16, "sliding_window": None}, verdict=Verdict.APPROXIMATE,
        reason="rounded",  # its rotations are complex64
    ),
    "LLMs-from-scratch-llama3": Recipe(
        folder="LLMs-from-scratch/pkg", make=rasbt("Llama3"), architecture="LlamaForCausalLM", fields=LLAMA,
        verdict=Verdict.EXACT,
    ),
    "LLMs-from-scratch-qwen3": Recipe(
        folder="LLMs-from-scratch/pkg", make=rasbt("Qwen3"), architecture="Qwen3ForCausalLM",
        fields={**LLAMA, "rms_norm_eps": 1e-6, "head_dim": 16}, verdict=Verdict.EXACT,
    ),
    "gemma_pytorch": Recipe(
        folder="gemma_pytorch", make=gemma, architecture="GemmaForCausalLM", fields={**LLAMA, "head_dim": 16},
        verdict=Verdict.APPROXIMATE, reason="rounded",
    ),
    "pytorch-paligemma": Recipe(
        folder="pytorch-paligemma", make=paligemma, architecture="GemmaForCausalLM",
        fields={**LLAMA, "head_dim": 16}, verdict=Verdict.EXACT,
    ),
    "OLMo": Recipe(
        folder="OLMo", make=olmo, architecture="OlmoForCausalLM",
        fields={**LLAMA, "tie_word_embeddings": False, "pad_token_id": 1}, verdict=Verdict.EXACT,
    ),
}  # fmt: skip
