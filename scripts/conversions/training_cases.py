"""Checkpoints of transformers into the layouts of training libraries, by their own functions."""

from __future__ import annotations

import glob
import json
import sys
import tempfile
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from scripts.conversions.case import DECODER, NORMS, PINNED, Case, Maker, Sources, Tensors, both, decoder, drawn

FOUR_NORMS = (*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
TITAN = "torchtitan/models"
BRIDGE = "megatron/bridge/models"


# ---------------------------------------------------------------------------------------------- nanoGPT and gpt-fast


def nanogpt(sources: Sources) -> Case:
    """``GPT.from_pretrained``, with a small model in place of the one that it would download."""
    layer, hidden = "transformer.h.{i}", 8
    shapes: dict[str, Any] = {"transformer.wte.weight": (11, hidden), "transformer.wpe.weight": (9, hidden)}
    shapes |= {f"{layer}.attn.c_attn.weight": (hidden, 24), f"{layer}.attn.c_attn.bias": (24,)}
    shapes |= {f"{layer}.attn.c_proj.weight": (hidden, hidden), f"{layer}.attn.c_proj.bias": (hidden,)}
    shapes |= {f"{layer}.mlp.c_fc.weight": (hidden, 32), f"{layer}.mlp.c_fc.bias": (32,)}
    shapes |= {f"{layer}.mlp.c_proj.weight": (32, hidden), f"{layer}.mlp.c_proj.bias": (hidden,)}
    shapes |= both(f"{layer}.ln_1", f"{layer}.ln_2", "transformer.ln_f", shape=(hidden,))
    source = drawn(shapes | {"lm_head.weight": (11, hidden)}, i=2)
    turned = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    made = {
        name: torch.empty(tuple(reversed(one.shape)) if name.endswith(turned) else tuple(one.shape))
        for name, one in source.items()
    }
    theirs = SimpleNamespace(from_pretrained=lambda _: SimpleNamespace(state_dict=lambda: source))
    script = sources.script("nanogpt/model.py", nn=nn, F=nn.functional)
    script.names["GPTConfig"] = SimpleNamespace  # theirs has other sizes
    convert = script.GPT.from_pretrained
    code, script.names["GPT"] = script.lines("GPT.from_pretrained"), lambda _: SimpleNamespace(state_dict=lambda: made)
    with mock.patch.dict(sys.modules, {"transformers": SimpleNamespace(GPT2LMHeadModel=theirs)}):
        convert("gpt2")
    return Case(
        project="nanoGPT",
        title="GPT-2 of transformers",
        table="nanogpt_gpt2",
        lines=code,
        source=source,
        made=made,
        version=PINNED["nanogpt"].version,
    )


def _gpt_fast(sources: Sources, path: str, title: str, table: str, source: Tensors, **config: Any) -> Case:
    args = SimpleNamespace(from_name=lambda _: SimpleNamespace(**config))
    given = {"Path": Path, "json": json, "glob": glob, "ModelArgs": args, "load_safetensors_file": load_file}
    script = sources.script(f"gpt_fast/{path}", **given)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        save_file(source, root / "model.safetensors")
        index = {"weight_map": dict.fromkeys(source, "model.safetensors")}
        (root / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        torch.save(source, root / "consolidated.00.pt")
        script.convert_hf_checkpoint(checkpoint_dir=root, model_name="tiny")
        made = torch.load(root / "model.pth", weights_only=True)
    return Case(
        project="gpt-fast",
        title=title,
        table=table,
        lines=script.lines("convert_hf_checkpoint"),
        config=DECODER | {"num_local_experts": 3},
        source=source,
        made=made,
        version=PINNED["gpt_fast"].version,
    )


def gpt_fast_llama(sources: Sources) -> Case:
    """Llama: q and k in Meta's order, and fused."""
    sizes = {"dim": 16, "n_head": 6, "n_local_heads": 2, "head_dim": 4}
    path = "scripts/convert_hf_checkpoint.py"
    return _gpt_fast(sources, path, "Llama of transformers", "gpt_fast_llama", drawn(decoder(), i=2), **sizes)


def gpt_fast_mixtral(sources: Sources) -> Case:
    """Mixtral as Mistral published it, the experts below each other."""
    layer = "layers.{i}"
    shapes: dict[str, Any] = {"tok_embeddings.weight": (11, 16), "output.weight": (11, 16), "norm.weight": (16,)}
    shapes |= {f"{layer}.attention.w{part}.weight": (rows, 16) for part, rows in {"q": 24, "k": 8, "v": 8}.items()}
    shapes |= {f"{layer}.attention.wo.weight": (16, 24), f"{layer}.block_sparse_moe.gate.weight": (3, 16)}
    shapes |= {f"{layer}.block_sparse_moe.w{one}": (36, 16) for one in (1, 2, 3)}
    shapes |= {f"{layer}.{one}_norm.weight": (16,) for one in ("attention", "ffn")}
    sizes = {"dim": 16, "num_experts": 3, "intermediate_size": 12}
    path = "mixtral-moe/scripts/convert_hf_checkpoint.py"
    return _gpt_fast(sources, path, "Mixtral of Mistral", "gpt_fast_mixtral", drawn(shapes, i=2), **sizes)


# ---------------------------------------------------------------------------------------------- torchtitan


def _titan(sources: Sources, path: str, name: str, title: str, table: str, source: Tensors, config: Any) -> Case:
    class Base:
        """What their adapters extend: it reads an index of files, and compares rotary settings."""

        def __init__(self, model_config: Any, _: object) -> None:
            self.model_config, self.fqn_to_index_mapping = model_config, None

        def _validate_hf_rope_config(self, _: object) -> None:
            pass

    given: dict[str, Any] = {"StateDictAdapter": Base, "DTensor": SimpleNamespace}
    given |= dict.fromkeys(("ComplexRoPE", "CosSinRoPE"), SimpleNamespace(Config=None))
    script = sources.script(f"{TITAN}/utils.py", f"{TITAN}/{path}/state_dict_adapter.py", **given)
    adapter = getattr(script, name)(config, None)
    made = adapter.from_hf(dict(source))
    return Case(
        project="torchtitan",
        title=title,
        table=table,
        lines=script.lines(*(f"{name}.{one}" for one in ("__init__", "from_hf", "to_hf"))),
        config=DECODER,
        source=source,
        made=made,
        returned=adapter.to_hf(dict(made)),
    )


def _layers(**attention: Any) -> list[Any]:
    return [SimpleNamespace(attention=SimpleNamespace(**attention), moe=SimpleNamespace(num_experts=3))]


def titan_llama(sources: Sources) -> Case:
    """Llama 3: q and k in Meta's order."""
    config = SimpleNamespace(dim=16, enable_weight_tying=False, layers=_layers(n_heads=6, n_kv_heads=2, head_dim=4))
    source = drawn(decoder(), i=2)
    return _titan(
        sources, "llama3", "Llama3StateDictAdapter", "Llama of transformers", "torchtitan_llama", source, config
    )


def titan_qwen_3_moe(sources: Sources) -> Case:
    """Qwen 3 with experts."""
    config = SimpleNamespace(enable_weight_tying=False, layers=_layers())
    source = drawn(decoder(norms=(*NORMS, "self_attn.q_norm", "self_attn.k_norm"), experts="mlp"), i=2, x=3)
    title = "Qwen 3 MoE of transformers"
    return _titan(sources, "qwen3", "Qwen3StateDictAdapter", title, "torchtitan_qwen_3_moe", source, config)


def deepseek() -> Tensors:
    """DeepSeek-V3: latent attention; the first layer dense, the second with experts."""
    layer = "model.layers.{i}"
    shapes: dict[str, Any] = {"model.embed_tokens.weight": (11, 16), "model.norm.weight": (16,)}
    shapes |= {"lm_head.weight": (11, 16)} | {f"{layer}.{norm}.weight": (16,) for norm in NORMS}
    attention = {"q_a_proj": (6, 16), "q_b_proj": (20, 6), "kv_a_proj_with_mqa": (7, 16), "kv_b_proj": (24, 5)}
    attention |= {"o_proj": (16, 12), "q_a_layernorm": (6,), "kv_a_layernorm": (5,)}  # type: ignore[dict-item]
    shapes |= {f"{layer}.self_attn.{name}.weight": shape for name, shape in attention.items()}
    one = "model.layers.1.mlp"
    for place in ("model.layers.0.mlp", f"{one}.experts.{{x}}", f"{one}.shared_experts"):
        shapes |= {f"{place}.{part}_proj.weight": (12, 16) for part in ("gate", "up")}
        shapes[f"{place}.down_proj.weight"] = (16, 12)
    return drawn(shapes | {f"{one}.gate.weight": (3, 16), f"{one}.gate.e_score_correction_bias": (3,)}, i=2, x=3)


def titan_deepseek_v3(sources: Sources) -> Case:
    """DeepSeek-V3."""
    config = SimpleNamespace(layers=_layers(q_lora_rank=6), mtp_layers=[], enable_weight_tying=False)
    title = "DeepSeek-V3 of transformers"
    return _titan(
        sources, "deepseek_v3", "DeepSeekV3StateDictAdapter", title, "torchtitan_deepseek_v3", deepseek(), config
    )


def titan_flux(sources: Sources) -> Case:
    """FLUX.1 of diffusers."""
    hidden = 8
    shapes = both("x_embedder", "context_embedder", shape=(hidden, 5)) | both("proj_out", shape=(6, hidden))
    shapes |= both("norm_out.linear", shape=(2 * hidden, hidden))
    for part in ("text", "timestep"):
        shapes |= both(f"time_text_embed.{part}_embedder.linear_1", shape=(hidden, 3))
        shapes |= both(f"time_text_embed.{part}_embedder.linear_2", shape=(hidden, hidden))
    double, single = "transformer_blocks.{i}", "single_transformer_blocks.{i}"
    names = [f"{double}.attn.{one}" for one in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")]
    names += [f"{double}.attn.to_out.0", f"{double}.attn.to_add_out"]
    shapes |= both(*names, *(f"{single}.attn.to_{one}" for one in "qkv"), shape=(hidden, hidden))
    shapes |= both(f"{double}.norm1.linear", f"{double}.norm1_context.linear", shape=(6 * hidden, hidden))
    for part in ("ff", "ff_context"):
        shapes |= both(f"{double}.{part}.net.0.proj", shape=(32, hidden))
        shapes |= both(f"{double}.{part}.net.2", shape=(hidden, 32))
    shapes |= {f"{double}.attn.norm_{one}.weight": (4,) for one in ("q", "k", "added_q", "added_k")}
    shapes |= {f"{single}.attn.norm_{one}.weight": (4,) for one in "qk"}
    shapes |= both(f"{single}.proj_mlp", shape=(32, hidden)) | both(f"{single}.proj_out", shape=(hidden, 40))
    source = drawn(shapes | both(f"{single}.norm.linear", shape=(3 * hidden, hidden)), i=2)
    config = SimpleNamespace(hidden_size=hidden, mlp_ratio=4.0)
    name, title = "FluxStateDictAdapter", "FLUX.1 of diffusers"
    return replace(
        _titan(sources, "flux/model", name, title, "torchtitan_flux", source, config), config={"hidden_size": hidden}
    )


# ---------------------------------------------------------------------------------------------- Megatron-Bridge


def _megatron(
    sources: Sources, path: str, name: str, title: str, table: str, source: Tensors, names: list[str]
) -> Case:
    given: dict[str, Any] = {"ABC": ABC, "abstractmethod": abstractmethod}
    given |= {
        "nn": nn,
        "mpu": SimpleNamespace(is_initialized=lambda: False),
        "MegatronModelBridge": type("Bridge", (), {"CONFIG_MAPPING": []}),
    }
    given |= {"get_pg_rank": lambda _: 0, "get_pg_size": lambda _: 1}
    there = f"{BRIDGE}/conversion"
    files = f"{there}/param_mapping.py", f"{there}/mapping_registry.py", f"{BRIDGE}/{path}"
    script = sources.script(*files, **given)
    # on one process, what is left of a mapping that only distributes is the tensor itself
    script.AutoMapping.hf_to_megatron = script.DirectMapping.hf_to_megatron
    registry = getattr(script, name)().mapping_registry()
    config = SimpleNamespace(num_attention_heads=6, num_query_groups=2, kv_channels=4, hidden_size=16)
    made = {}
    for wanted in names:
        mapping = registry.megatron_to_hf_lookup(wanted)
        asked = mapping.hf_param
        given_to = source[asked] if isinstance(asked, str) else {part: source[one] for part, one in asked.items()}
        made[wanted] = mapping.hf_to_megatron(given_to, SimpleNamespace(config=config))
    code = [f"{name}.mapping_registry", "merge_qkv_weights", "split_qkv_weights"]
    code += ["merge_qkv_biases", "split_qkv_biases"] if any(one.endswith("linear_qkv.bias") for one in names) else []
    return Case(
        project="megatron-bridge",
        title=title,
        table=table,
        lines=script.lines(*code),
        config=DECODER,
        source=source,
        made=made,
        remark="its mappings were run as on one process, without Megatron",
    )


def _megatron_names(*layer: str, head: bool = True) -> list[str]:
    whole = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]
    whole += ["output_layer.weight"] if head else []
    shared = ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.layer_norm_weight")
    shared += ("self_attention.linear_proj.weight",)  # type: ignore[assignment]
    return whole + [f"decoder.layers.{i}.{one}" for i in range(2) for one in (*shared, *layer)]


DENSE = ("mlp.linear_fc1.weight", "mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc2.weight")


def megatron_llama(sources: Sources) -> Case:
    """Llama: queries, key and value of each group beside each other."""
    source, names = drawn(decoder(), i=2), _megatron_names(*DENSE)
    path = "llama/llama_bridge.py"
    return _megatron(sources, path, "LlamaBridge", "Llama of transformers", "megatron_llama", source, names)


def megatron_qwen_2(sources: Sources) -> Case:
    """Qwen 2: biases of q, k and v."""
    bias = {
        f"model.layers.{{i}}.self_attn.{part}_proj.bias": (rows,) for part, rows in zip("qkv", (24, 8, 8), strict=True)
    }
    source, names = drawn(decoder() | bias, i=2), _megatron_names("self_attention.linear_qkv.bias", *DENSE)
    path = "qwen/qwen2_bridge.py"
    return _megatron(sources, path, "Qwen2Bridge", "Qwen 2 of transformers", "megatron_qwen_2", source, names)


def megatron_qwen_3_moe(sources: Sources) -> Case:
    """Qwen 3 with experts, whose numbers end their names."""
    source = drawn(decoder(norms=(*NORMS, "self_attn.q_norm", "self_attn.k_norm"), experts="mlp"), i=2, x=3)
    experts = [f"mlp.experts.linear_fc{one}.weight{x}" for one in (1, 2) for x in range(3)]
    names = _megatron_names(
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "pre_mlp_layernorm.weight",
        "mlp.router.weight",
        *experts,
    )
    path, title = "qwen/qwen3_moe_bridge.py", "Qwen 3 MoE of transformers"
    return _megatron(sources, path, "Qwen3MoEBridge", title, "megatron_qwen_3_moe", source, names)


def megatron_gemma_2(sources: Sources) -> Case:
    """Gemma 2: four norms a layer."""
    source = drawn(decoder(norms=FOUR_NORMS, head=False), i=2)
    more = ("self_attention.linear_proj.post_layernorm.weight", "mlp.linear_fc2.post_layernorm.weight")
    names = _megatron_names(*DENSE, *more, head=False)
    path = "gemma/gemma2_bridge.py"
    return _megatron(sources, path, "Gemma2Bridge", "Gemma 2 of transformers", "megatron_gemma_2", source, names)


def megatron_nemotron(sources: Sources) -> Case:
    """Nemotron: norms with biases, an MLP without a gate."""
    shapes = {name: shape for name, shape in decoder().items() if "gate_proj" not in name}
    norms = ("model.norm", *(f"model.layers.{{i}}.{norm}" for norm in NORMS))
    source = drawn(shapes | {f"{norm}.bias": (16,) for norm in norms}, i=2)
    biases = ("self_attention.linear_qkv.layer_norm_bias", "mlp.linear_fc1.layer_norm_bias")
    names = [*_megatron_names(*DENSE, *biases), "decoder.final_layernorm.bias"]
    path = "nemotron/nemotron_bridge.py"
    return _megatron(sources, path, "NemotronBridge", "Nemotron of transformers", "megatron_nemotron", source, names)


# ---------------------------------------------------------------------------------------------- MaxText


def _maxtext(
    sources: Sources,
    family: str,
    title: str,
    table: str,
    source: Tensors,
    *,
    scanned: bool,
    layers: int = 2,
    remark: str = "heads of 4, so that the scale of the queries does not round",
) -> Case:
    config = DECODER | {"num_hidden_layers": layers}
    given = {"jax": SimpleNamespace(numpy=np)}
    script = sources.script("maxtext/utils.py", "maxtext/param_mapping.py", "maxtext/to_maxtext.py", **given)
    options = SimpleNamespace(num_experts=3, head_dim=4, scan_layers=scanned, param_scan_axis=1)
    names = getattr(script, f"{family}_MAXTEXT_TO_HF_PARAM_MAPPING")(config, options, scan_layers=scanned)
    hooks = getattr(script, f"{family}_MAXTEXT_TO_HF_PARAM_HOOK_FN")(config, options, scan_layers=scanned)
    made = {}

    def read(one: str) -> Any:
        return source[one].numpy()

    for name, asked in names.items():
        hook = hooks.get(name)
        first = asked
        while isinstance(first, list):
            first = first[0]
        wanted = tuple(_kernel(first, list(source[first].shape)))
        if isinstance(asked, str):
            value = script.apply_hook_fns(read(asked), wanted, hook)
        elif isinstance(asked[0], str):
            whole = (*wanted[:1], len(asked), *wanted[1:])
            value = script._build_single_axis_stacked_tensor(asked, read, hook, whole, options)  # theirs
        else:
            whole = (len(asked), len(asked[0]), *wanted)
            value = script._build_multi_axis_stacked_tensor(asked, read, hook, whole, options)  # theirs
        made[name] = torch.from_numpy(np.ascontiguousarray(value))
    code = [f"{family}_MAXTEXT_TO_HF_PARAM_MAPPING", f"{family}_MAXTEXT_TO_HF_PARAM_HOOK_FN"]
    return Case(
        project="MaxText",
        title=title,
        table=table,
        lines=script.lines(*code),
        config=config,
        source=source,
        made=made,
        remark=remark,
        version=PINNED["maxtext"].version,
    )


def _kernel(name: str, shape: list[int]) -> list[int]:
    """The shape of a tensor in MaxText: kernels are transposed, and heads are an axis of their own."""
    if "norm" in name or "embed" in name:
        return shape
    turned = shape[::-1]
    if any(f"{part}_proj" in name for part in "qkv"):
        return [turned[0], turned[1] // 4, 4]
    return [turned[0] // 4, 4, turned[1]] if "o_proj" in name else turned


def maxtext_llama(sources: Sources) -> Case:
    """Llama 3.1, one array for each layer's tensor."""
    source, title = drawn(decoder(), i=2), "Llama of transformers"
    return _maxtext(sources, "LLAMA31", title, "maxtext_llama", source, scanned=False)


def maxtext_llama_scanned(sources: Sources) -> Case:
    """Llama 3.1, the layers in one array."""
    source, title = drawn(decoder(), i=2), "Llama of transformers, layers stacked"
    return _maxtext(sources, "LLAMA31", title, "maxtext_llama_scanned", source, scanned=True)


def maxtext_mixtral(sources: Sources) -> Case:
    """Mixtral, layers and experts in one array."""
    source = drawn(decoder(experts="block_sparse_moe"), i=2, x=3)
    title = "Mixtral of transformers, layers stacked"
    return _maxtext(sources, "MIXTRAL", title, "maxtext_mixtral_scanned", source, scanned=True)


def maxtext_gemma_2(sources: Sources) -> Case:
    """Gemma 2, local and global layers in arrays of their own."""
    source = short_norms(drawn(decoder(norms=FOUR_NORMS, head=False), i=4))
    title = "Gemma 2 of transformers, layers stacked"
    remark = "norms are multiples of 1/1024, so that adding 1 does not round; the vocabulary is not padded"
    return _maxtext(sources, "GEMMA2", title, "maxtext_gemma_2_scanned", source, scanned=True, layers=4, remark=remark)


def short_norms(tensors: Tensors) -> Tensors:
    """The tensors, norms rounded to multiples of 1/1024."""
    return {name: (one * 1024).round() / 1024 if name.endswith("norm.weight") else one for name, one in tensors.items()}


CASES: tuple[Maker, ...] = (
    nanogpt, gpt_fast_llama, gpt_fast_mixtral,
    titan_llama, titan_qwen_3_moe, titan_deepseek_v3, titan_flux,
    megatron_llama, megatron_qwen_2, megatron_qwen_3_moe, megatron_gemma_2, megatron_nemotron,
    maxtext_llama, maxtext_llama_scanned, maxtext_mixtral, maxtext_gemma_2,
)  # fmt: skip
