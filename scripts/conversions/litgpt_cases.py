"""litgpt's scripts: checkpoints of transformers into litgpt's layout, and its own scripts back."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from scripts.conversions.case import Case, Maker, Sources, Tensors, both, drawn

HIDDEN, HEADS, GROUPS, HEAD, INNER, WORDS = 8, 4, 2, 2, 12, 11
QKV = {"q": HEADS * HEAD, "k": GROUPS * HEAD, "v": GROUPS * HEAD}
CONFIG = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": HEAD}


def _config(**more: object) -> Any:
    return SimpleNamespace(n_head=HEADS, n_query_groups=GROUPS, head_size=HEAD, n_layer=2, **more)


def _case(
    sources: Sources,
    family: str,
    title: str,
    table: str,
    source: Tensors,
    config: Any,
    *,
    back: str = "",
    **options: Any,
) -> Case:
    there = sources.script("litgpt/scripts/convert_hf_checkpoint.py")
    again = sources.script("litgpt/scripts/convert_hf_checkpoint.py", "litgpt/scripts/convert_lit_checkpoint.py")
    names = f"copy_weights_{family}", f"copy_weights_{back or family}"
    forward, backward = getattr(there, names[0]), getattr(again, names[1])
    made: Tensors = {}
    takes = forward.__code__.co_varnames[: forward.__code__.co_argcount]
    arguments: dict[str, Any] = {"state_dict": made, "hf_weights": dict(source)}
    arguments |= {"config": config} if "config" in takes else {}
    arguments |= {"qkv_weights": defaultdict(dict)} if "qkv_weights" in takes else {}
    forward(**arguments)
    returned: Tensors = {}
    takes = backward.__code__.co_varnames[: backward.__code__.co_argcount]
    backward(
        **({"config": config} if "config" in takes else {}), state_dict=returned, lit_weights=dict(made), **options
    )
    regroups = ("qkv_reassemble",) if "qkv_reassemble" in forward.__code__.co_names else ()
    lines = there.lines(names[0], *regroups) + again.lines(names[1], *regroups)
    return Case(
        project="litgpt",
        title=title,
        table=table,
        lines=lines,
        config=CONFIG,
        source=source,
        made=made,
        returned=returned,
    )


def _decoder(*, bias: bool = False, norms: tuple[str, ...], biased_norms: bool = False) -> dict[str, Any]:
    layer = "model.layers.{i}"
    shapes: dict[str, Any] = {"model.embed_tokens.weight": (WORDS, HIDDEN), "lm_head.weight": (WORDS, HIDDEN)}
    for part, rows in QKV.items():
        shapes[f"{layer}.self_attn.{part}_proj.weight"] = (rows, HIDDEN)
        if bias:
            shapes[f"{layer}.self_attn.{part}_proj.bias"] = (rows,)
    shapes[f"{layer}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD)
    shapes |= {f"{layer}.mlp.{part}_proj.weight": (INNER, HIDDEN) for part in ("gate", "up")}
    shapes[f"{layer}.mlp.down_proj.weight"] = (HIDDEN, INNER)
    for norm in norms:
        size = HEAD if norm.endswith(("q_norm", "k_norm")) else HIDDEN
        shapes[f"{layer}.{norm}.weight"] = (size,)
        if biased_norms:
            shapes[f"{layer}.{norm}.bias"] = (size,)
    return shapes | {"model.norm.weight": (HIDDEN,)}


NORMS = ("input_layernorm", "post_attention_layernorm")


def llama(sources: Sources) -> Case:
    """Llama: q, k and v concatenated."""
    source = drawn(_decoder(norms=NORMS), i=2)
    config = _config(mlp_class_name="LLaMAMLP")
    return _case(sources, "hf_llama", "Llama of transformers", "litgpt_llama", source, config, back="llama")


def mixtral(sources: Sources) -> Case:
    """Mixtral: the same with experts."""
    shapes = {name: shape for name, shape in _decoder(norms=NORMS).items() if ".mlp." not in name}
    moe = "model.layers.{i}.block_sparse_moe"
    shapes |= {f"{moe}.gate.weight": (3, HIDDEN), f"{moe}.experts.{{x}}.w2.weight": (HIDDEN, INNER)}
    shapes |= {f"{moe}.experts.{{x}}.{one}.weight": (INNER, HIDDEN) for one in ("w1", "w3")}
    config = _config(mlp_class_name="LLaMAMoE")
    return _case(
        sources, "hf_llama", "Mixtral of transformers", "litgpt_mixtral", drawn(shapes, i=2, x=3), config, back="llama"
    )


def gpt_neox(sources: Sources) -> Case:
    """GPT-NeoX: q, k and v of each head beside each other."""
    layer = "gpt_neox.layers.{i}"
    shapes: dict[str, Any] = {"gpt_neox.embed_in.weight": (WORDS, HIDDEN), "embed_out.weight": (WORDS, HIDDEN)}
    shapes |= both(f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", shape=(HIDDEN,))
    shapes |= both(f"{layer}.attention.query_key_value", shape=(3 * HEADS * HEAD, HIDDEN))
    shapes |= both(f"{layer}.attention.dense", shape=(HIDDEN, HIDDEN))
    shapes |= both(f"{layer}.mlp.dense_h_to_4h", shape=(INNER, HIDDEN))
    shapes |= both(f"{layer}.mlp.dense_4h_to_h", shape=(HIDDEN, INNER))
    shapes |= both("gpt_neox.final_layer_norm", shape=(HIDDEN,))
    config = SimpleNamespace(n_head=HEADS, n_query_groups=HEADS, head_size=HEAD, n_layer=2)
    return _case(sources, "gpt_neox", "GPT-NeoX of transformers", "litgpt_gpt_neox", drawn(shapes, i=2), config)


def falcon(sources: Sources) -> Case:
    """Falcon: the queries, key and value of each group beside each other."""
    layer = "transformer.h.{i}"
    rows = (HEADS + 2 * GROUPS) * HEAD
    shapes: dict[str, Any] = {
        "transformer.word_embeddings.weight": (WORDS, HIDDEN),
        f"{layer}.self_attention.query_key_value.weight": (rows, HIDDEN),
        f"{layer}.self_attention.dense.weight": (HIDDEN, HIDDEN),
        f"{layer}.mlp.dense_h_to_4h.weight": (INNER, HIDDEN),
        f"{layer}.mlp.dense_4h_to_h.weight": (HIDDEN, INNER),
        "lm_head.weight": (WORDS, HIDDEN),
    }
    shapes |= both(f"{layer}.ln_attn", f"{layer}.ln_mlp", "transformer.ln_f", shape=(HIDDEN,))
    config = _config(name="falcon-40b")
    return _case(sources, "falcon", "Falcon 40B of transformers", "litgpt_falcon", drawn(shapes, i=2), config)


def _tied(norms: tuple[str, ...]) -> Tensors:
    """Gemma's files do not have the head, which is the embedding."""
    source = drawn(_decoder(norms=norms), i=2)
    del source["lm_head.weight"]
    return source


def gemma_2(sources: Sources) -> Case:
    """Gemma 2: four norms a layer."""
    norms = (*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return _case(sources, "gemma_2", "Gemma 2 of transformers", "litgpt_gemma_2", _tied(norms), _config())


def gemma_3(sources: Sources) -> Case:
    """Gemma 3: norms of queries and keys as well."""
    norms = (*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    return _case(sources, "gemma_3", "Gemma 3 of transformers", "litgpt_gemma_3", _tied(norms), _config())


def phi(sources: Sources) -> Case:
    """Phi-2: biases throughout."""
    layer = "model.layers.{i}"
    shapes: dict[str, Any] = {"model.embed_tokens.weight": (WORDS, HIDDEN)}
    shapes |= both("lm_head", shape=(WORDS, HIDDEN))
    for part, rows in QKV.items():
        shapes |= both(f"{layer}.self_attn.{part}_proj", shape=(rows, HIDDEN))
    shapes |= both(f"{layer}.self_attn.dense", shape=(HIDDEN, HIDDEN))
    shapes |= both(f"{layer}.mlp.fc1", shape=(INNER, HIDDEN)) | both(f"{layer}.mlp.fc2", shape=(HIDDEN, INNER))
    shapes |= both(f"{layer}.input_layernorm", "model.final_layernorm", shape=(HIDDEN,))
    return _case(sources, "phi", "Phi-2 of transformers", "litgpt_phi", drawn(shapes, i=2), _config(name="phi-2"))


def qwen_2_5(sources: Sources) -> Case:
    """Qwen 2.5: biases of q, k and v."""
    source = drawn(_decoder(norms=NORMS, bias=True), i=2)
    return _case(sources, "qwen_2_5", "Qwen 2.5 of transformers", "litgpt_qwen_2_5", source, _config())


def qwen_3(sources: Sources) -> Case:
    """Qwen 3: norms of queries and keys."""
    source = drawn(_decoder(norms=(*NORMS, "self_attn.q_norm", "self_attn.k_norm")), i=2)
    return _case(
        sources, "qwen_3", "Qwen 3 of transformers", "litgpt_qwen_3", source, _config(mlp_class_name="LLaMAMLP")
    )


CASES: tuple[Maker, ...] = (llama, mixtral, gpt_neox, falcon, gemma_2, gemma_3, phi, qwen_2_5, qwen_3)
