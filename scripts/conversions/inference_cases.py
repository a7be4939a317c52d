"""Checkpoints of transformers into the layouts of libraries for inference: mlx-lm, llama.cpp, vLLM."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from scripts.conversions.case import DECODER, NORMS, PINNED, Case, Maker, Sources, Tensors, both, decoder, drawn
from scripts.conversions.training_cases import FOUR_NORMS, deepseek, short_norms

QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


# ---------------------------------------------------------------------------------------------- mlx-lm


def _mlx(sources: Sources, file: str, title: str, table: str, source: Tensors, **args: Any) -> Case:
    arrays = SimpleNamespace(
        stack=torch.stack, contiguous=torch.Tensor.contiguous, split=lambda one, count, axis: one.chunk(count, axis)
    )
    given = {"mx": arrays, "nn": nn, "BaseModelArgs": object, "dataclass": lambda one: one, "PipelineMixin": object}
    script = sources.script(f"mlx_lm/models/{file}.py", **given)
    model = SimpleNamespace(args=SimpleNamespace(tie_word_embeddings=False, num_hidden_layers=2, **args))
    return Case(
        project="mlx-lm",
        title=title,
        table=table,
        lines=script.lines("Model.sanitize"),
        config={"num_attention_heads": 4, "qk_nope_head_dim": 2, "ffn_config": {"moe_num_experts": 3}},
        source=source,
        made=script.Model.sanitize(model, dict(source)),
        remark="run with torch's tensors in place of mlx's arrays",
    )


def mlx_mixtral(sources: Sources) -> Case:
    """Mixtral: the experts stacked."""
    source = drawn(decoder(experts="block_sparse_moe"), i=2, x=3)
    return _mlx(sources, "mixtral", "Mixtral of transformers", "mlx_mixtral", source, num_local_experts=3)


def _gpt2(prefix: str) -> dict[str, Any]:
    layer, hidden = f"{prefix}h.{{i}}", 8
    shapes: dict[str, Any] = {f"{prefix}wte.weight": (11, hidden), f"{prefix}wpe.weight": (9, hidden)}
    for name, size in {"attn.c_attn": (hidden, 24), "mlp.c_fc": (hidden, 32), "mlp.c_proj": (32, hidden)}.items():
        shapes |= {f"{layer}.{name}.weight": size, f"{layer}.{name}.bias": size[1:]}
    shapes |= both(f"{layer}.attn.c_proj", shape=(hidden, hidden))
    return shapes | both(f"{layer}.ln_1", f"{layer}.ln_2", f"{prefix}ln_f", shape=(hidden,))


def mlx_gpt2(sources: Sources) -> Case:
    """GPT-2, without the causal masks that it throws away."""
    return _mlx(sources, "gpt2", "GPT-2 of transformers", "mlx_gpt2", drawn(_gpt2(""), i=2), n_layer=2)


def mlx_qwen_3_moe(sources: Sources) -> Case:
    """Qwen 3 with experts."""
    source = drawn(decoder(norms=(*NORMS, *QK_NORMS), experts="mlp"), i=2, x=3)
    return _mlx(sources, "qwen3_moe", "Qwen 3 MoE of transformers", "mlx_qwen_3_moe", source, num_experts=3)


def mlx_deepseek_v3(sources: Sources) -> Case:
    """DeepSeek-V3: the up-projection of keys and values taken apart by heads."""
    sizes = {"n_routed_experts": 3, "qk_nope_head_dim": 2, "v_head_dim": 4, "num_attention_heads": 4}
    title = "DeepSeek-V3 of transformers"
    return _mlx(sources, "deepseek_v3", title, "mlx_deepseek_v3", deepseek(), **sizes)


def mlx_jamba(sources: Sources) -> Case:
    """Jamba: a layer of Mamba with an MLP, one of attention with experts."""
    mamba, attention = "model.layers.0", "model.layers.1"
    shapes: dict[str, Any] = {"model.embed_tokens.weight": (11, 16), "lm_head.weight": (11, 16)}
    shapes |= {"model.final_layernorm.weight": (16,), f"{mamba}.mamba.A_log": (20, 5), f"{mamba}.mamba.D": (20,)}
    shapes |= {f"{mamba}.mamba.conv1d.weight": (20, 1, 4), f"{mamba}.mamba.conv1d.bias": (20,)}
    parts = {"in_proj": (40, 16), "out_proj": (16, 20), "x_proj": (13, 20), "dt_proj": (20, 3)}
    shapes |= {f"{mamba}.mamba.{name}.weight": size for name, size in parts.items()}
    shapes |= {f"{attention}.self_attn.{name}_proj.weight": (16, 16) for name in "qkvo"}
    shapes |= {f"{layer}.input_layernorm.weight": (16,) for layer in (mamba, attention)}
    shapes[f"{attention}.feed_forward.router.weight"] = (3, 16)
    for place in (f"{mamba}.feed_forward", f"{attention}.feed_forward.experts.{{x}}"):
        shapes |= {f"{place}.{name}_proj.weight": (12, 16) for name in ("gate", "up")}
        shapes[f"{place}.down_proj.weight"] = (16, 12)
    return _mlx(sources, "jamba", "Jamba of transformers", "mlx_jamba", drawn(shapes, x=3))


def mlx_dbrx(sources: Sources) -> Case:
    """DBRX: the experts taken apart."""
    block = "transformer.blocks.{i}"
    shapes: dict[str, Any] = {"transformer.wte.weight": (11, 16), "lm_head.weight": (11, 16)}
    shapes |= {"transformer.norm_f.weight": (16,), f"{block}.ffn.router.layer.weight": (3, 16)}
    shapes |= {f"{block}.ffn.experts.mlp.{name}": (36, 16) for name in ("w1", "v1", "w2")}
    attention = f"{block}.norm_attn_norm"
    shapes |= {f"{attention}.attn.Wqkv.weight": (32, 16), f"{attention}.attn.out_proj.weight": (16, 16)}
    source = drawn(shapes | {f"{attention}.norm_{one}.weight": (16,) for one in (1, 2)}, i=2)
    config = {"moe_num_experts": 3}
    return _mlx(sources, "dbrx", "DBRX of transformers", "mlx_dbrx", source, ffn_config=config)


# ---------------------------------------------------------------------------------------------- llama.cpp


def _llama_cpp(
    sources: Sources, name: str, title: str, table: str, source: Tensors, *, remark: str = "", **config: Any
) -> Case:
    with mock.patch.object(sys, "path", [str(sources.folder), *sys.path]):
        gguf = importlib.import_module("gguf")
    script = sources.script("llama_cpp/convert_hf_to_gguf.py", gguf=gguf)
    kind = getattr(script, name)
    model = object.__new__(kind)
    config = DECODER | config
    model.hparams, model.block_count, model.tensor_names = config, 2, set(source)
    model.tensor_map = gguf.get_tensor_name_map(kind.model_arch, 2)
    made: Tensors = {}
    for one, tensor in source.items():
        layer = next((int(part) for part in one.split(".") if part.isdecimal()), None)
        made |= dict(model.modify_tensors(tensor, one, layer))
    method = f"{name}.modify_tensors"
    return Case(
        project="llama.cpp",
        title=title,
        table=table,
        lines=script.lines(method),
        config=config,
        source=source,
        made=made,
        remark=remark,
        version=PINNED["llama_cpp"].version,
    )


def llama_cpp_llama(sources: Sources) -> Case:
    """Llama: q and k in Meta's order."""
    source = drawn(decoder(), i=2)
    return _llama_cpp(sources, "LlamaModel", "Llama of transformers", "llama_cpp_llama", source)


def llama_cpp_mixtral(sources: Sources) -> Case:
    """Mixtral: the same with experts."""
    source = drawn(decoder(experts="block_sparse_moe"), i=2, x=3)
    title = "Mixtral of transformers"
    return _llama_cpp(sources, "LlamaModel", title, "llama_cpp_mixtral", source, num_local_experts=3)


def llama_cpp_gpt2(sources: Sources) -> Case:
    """GPT-2, whose head is written as a copy."""
    source = drawn(_gpt2("transformer."), i=2)
    return _llama_cpp(sources, "GPT2Model", "GPT-2 of transformers", "llama_cpp_gpt2", source)


def _fused(layer: str, attention: str) -> dict[str, Any]:
    shapes = both(f"{layer}.{attention}.query_key_value", shape=(24, 8)) | both(
        f"{layer}.{attention}.dense", shape=(8, 8)
    )
    shapes |= both(f"{layer}.mlp.dense_h_to_4h", shape=(12, 8)) | both(f"{layer}.mlp.dense_4h_to_h", shape=(8, 12))
    return shapes | both(*(f"{layer}.{norm}" for norm in NORMS), shape=(8,))


def _gpt_neox() -> Tensors:
    shapes: dict[str, Any] = {"gpt_neox.embed_in.weight": (11, 8), "embed_out.weight": (11, 8)}
    shapes |= _fused("gpt_neox.layers.{i}", "attention")
    return drawn(shapes | both("gpt_neox.final_layer_norm", shape=(8,)), i=2)


SMALL: Mapping[str, Any] = MappingProxyType({"hidden_size": 8, "num_attention_heads": 4, "n_head": 4})


def llama_cpp_gpt_neox(sources: Sources) -> Case:
    """GPT-NeoX: all queries, all keys, all values."""
    title = "GPT-NeoX of transformers"
    return _llama_cpp(sources, "GPTNeoXModel", title, "llama_cpp_gpt_neox", _gpt_neox(), **SMALL)


def llama_cpp_bloom(sources: Sources) -> Case:
    """BLOOM: the same, and the head is written as a copy."""
    shapes = {"transformer.word_embeddings.weight": (11, 8)} | _fused("transformer.h.{i}", "self_attention")
    shapes |= both("transformer.word_embeddings_layernorm", "transformer.ln_f", shape=(8,))
    source, title = drawn(shapes, i=2), "BLOOM of transformers"
    return _llama_cpp(sources, "BloomModel", title, "llama_cpp_bloom", source, **SMALL)


def _falcon() -> Tensors:
    layer = "transformer.h.{i}"
    shapes: dict[str, Any] = {"transformer.word_embeddings.weight": (11, 16), "lm_head.weight": (11, 16)}
    shapes |= {f"{layer}.self_attention.query_key_value.weight": (32, 16)}
    shapes |= {f"{layer}.self_attention.dense.weight": (16, 16), f"{layer}.mlp.dense_h_to_4h.weight": (12, 16)}
    shapes |= {f"{layer}.mlp.dense_4h_to_h.weight": (16, 12)}
    return drawn(shapes | both(f"{layer}.ln_attn", f"{layer}.ln_mlp", "transformer.ln_f", shape=(16,)), i=2)


FALCON: Mapping[str, Any] = MappingProxyType({"num_attention_heads": 4, "num_kv_heads": 2})


def llama_cpp_falcon(sources: Sources) -> Case:
    """Falcon 40B: the same of groups."""
    title = "Falcon 40B of transformers"
    return _llama_cpp(sources, "FalconModel", title, "llama_cpp_falcon", _falcon(), **FALCON)


def llama_cpp_gemma_2(sources: Sources) -> Case:
    """Gemma 2: norms that hold the whole gain."""
    source = short_norms(drawn(decoder(norms=FOUR_NORMS, head=False), i=2))
    remark = "norms are multiples of 1/1024, so that adding 1 does not round"
    return _llama_cpp(sources, "Gemma2Model", "Gemma 2 of transformers", "llama_cpp_gemma_2", source, remark=remark)


def llama_cpp_qwen_2_moe(sources: Sources) -> Case:
    """Qwen 1.5 and 2 with experts, and one that every token is shown to."""
    layer = "model.layers.{i}"
    shapes = decoder(experts="mlp") | {f"{layer}.mlp.shared_expert_gate.weight": (1, 16)}
    shapes |= {f"{layer}.self_attn.{part}_proj.bias": (rows,) for part, rows in zip("qkv", (24, 8, 8), strict=True)}
    shapes |= {f"{layer}.mlp.shared_expert.{part}_proj.weight": (20, 16) for part in ("gate", "up")}
    source = drawn(shapes | {f"{layer}.mlp.shared_expert.down_proj.weight": (16, 20)}, i=2, x=3)
    title = "Qwen 2 MoE of transformers"
    return _llama_cpp(sources, "Qwen2MoeModel", title, "llama_cpp_qwen_2_moe", source, num_experts=3)


def llama_cpp_bert(sources: Sources) -> Case:
    """BERT, without the pooler that it throws away."""
    layer = "encoder.layer.{i}"
    shapes: dict[str, Any] = {
        f"embeddings.{one}_embeddings.weight": (9, 8) for one in ("word", "position", "token_type")
    }
    shapes |= both(
        "embeddings.LayerNorm", *(f"{layer}.{one}.LayerNorm" for one in ("attention.output", "output")), shape=(8,)
    )
    names = [*(f"attention.self.{one}" for one in ("query", "key", "value")), "attention.output.dense"]
    shapes |= both(*(f"{layer}.{name}" for name in names), shape=(8, 8))
    shapes |= both(f"{layer}.intermediate.dense", shape=(12, 8)) | both(f"{layer}.output.dense", shape=(8, 12))
    source = drawn(shapes, i=2)
    return _llama_cpp(sources, "BertModel", "BERT of transformers", "llama_cpp_bert", source)


# ---------------------------------------------------------------------------------------------- vLLM


def _vllm(sources: Sources, file: str, name: str, title: str, table: str, source: Tensors, sizes: Tensors) -> Case:
    given: dict[str, Any] = {"nn": nn, "LinearBase": object, "is_pp_missing_parameter": lambda *_: False}
    given |= {"get_compressed_tensors_cache_scale": lambda _: None, "maybe_remap_kv_scale_name": lambda one, _: one}
    given |= {"get_tensor_model_parallel_rank": lambda: 0, "get_tensor_model_parallel_world_size": lambda: 1}
    given |= {"default_weight_loader": lambda parameter, loaded: parameter.data.copy_(loaded)}
    given |= dict.fromkeys(("SupportsLoRA", "SupportsPP"), type("Supports", (), {}))
    layers = "vllm/model_executor/layers/linear.py"
    script = sources.script(layers, f"vllm/model_executor/models/{file}.py", **given)
    qkv, pair = object.__new__(script.QKVParallelLinear), object.__new__(script.MergedColumnParallelLinear)
    qkv.num_heads, qkv.num_kv_heads, qkv.head_size, qkv.num_kv_head_replicas = 6, 2, 4, 1
    qkv.total_num_heads, qkv.total_num_kv_heads = 6, 2
    pair.output_sizes = [12, 12]
    parameters = {}
    for one, tensor in sizes.items():
        parameters[one] = parameter = nn.Parameter(torch.empty_like(tensor))
        parameter.output_dim = 0  # type: ignore[attr-defined]  # theirs have it
        for part, loader in ((".qkv_proj.", qkv), (".gate_up_proj.", pair)):
            if part in one:
                parameter.weight_loader = loader.weight_loader  # type: ignore[attr-defined]  # as above
    config = SimpleNamespace(num_attention_heads=4, num_kv_heads=2, new_decoder_architecture=True)
    model = SimpleNamespace(named_parameters=lambda **_: parameters.items(), config=config, tie_word_embeddings=False)
    getattr(script, name).load_weights(model, iter(source.items()))
    code = [f"{name}.load_weights"]
    code += ["QKVParallelLinear.weight_loader"] if any("qkv_proj" in one for one in sizes) else []
    return Case(
        project="vllm",
        title=title,
        table=table,
        lines=script.lines(*code),
        config=DECODER if file == "llama" else {"hidden_size": 16, **FALCON},
        source=source,
        made={one: parameter.data for one, parameter in parameters.items()},
        remark="as on one process",
    )


def vllm_llama(sources: Sources) -> Case:
    """Llama: q, k and v, and both parts of the MLP, in one matrix each."""
    source = {name.removeprefix("model."): one for name, one in drawn(decoder(head=False), i=2).items()}
    sizes = {
        name: one
        for name, one in source.items()
        if not any(f".{part}_proj." in name for part in ("q", "k", "v", "gate", "up"))
    }
    for layer in range(2):
        sizes[f"layers.{layer}.self_attn.qkv_proj.weight"] = torch.empty(40, 16)
        sizes[f"layers.{layer}.mlp.gate_up_proj.weight"] = torch.empty(24, 16)
    return _vllm(sources, "llama", "LlamaModel", "Llama of transformers", "vllm_llama", source, sizes)


def vllm_gpt_neox(sources: Sources) -> Case:
    """GPT-NeoX: all queries, all keys, all values."""
    source, title = _gpt_neox(), "GPT-NeoX of transformers"
    return _vllm(sources, "gpt_neox", "GPTNeoXForCausalLM", title, "vllm_gpt_neox", source, source)


def vllm_falcon(sources: Sources) -> Case:
    """Falcon 40B: the same of groups."""
    source, title = _falcon(), "Falcon 40B of transformers"
    return _vllm(sources, "falcon", "FalconForCausalLM", title, "vllm_falcon", source, source)


CASES: tuple[Maker, ...] = (
    mlx_mixtral, mlx_gpt2, mlx_qwen_3_moe, mlx_deepseek_v3, mlx_jamba, mlx_dbrx,
    llama_cpp_llama, llama_cpp_mixtral, llama_cpp_gpt2, llama_cpp_gpt_neox, llama_cpp_bloom, llama_cpp_falcon,
    llama_cpp_gemma_2, llama_cpp_qwen_2_moe, llama_cpp_bert,
    vllm_llama, vllm_gpt_neox, vllm_falcon,
)  # fmt: skip
