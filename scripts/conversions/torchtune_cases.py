"""torchtune's converters, and its own way back."""

from __future__ import annotations

from typing import Any

from scripts.conversions.case import Case, Maker, Sources, Tensors, both, drawn
from scripts.conversions.litgpt_cases import GROUPS, HEAD, HEADS, HIDDEN, INNER, NORMS, QKV, WORDS, _decoder

COMMON = "torchtune/models/convert_weights.py"
CONFIG = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS}
SIZES = {"num_heads": HEADS, "num_kv_heads": GROUPS, "dim": HIDDEN}


def _case(
    sources: Sources,
    path: str,
    names: tuple[str, ...],
    title: str,
    table: str,
    source: Tensors,
    *,
    options: dict[str, Any] | None = None,
    back_options: dict[str, Any] | None = None,
) -> Case:
    script = sources.script(COMMON, *([path] if path != COMMON else []))
    forward, backward, *tables = names
    given = SIZES if options is None else options
    made = getattr(script, forward)(dict(source), **given)
    returned = (
        getattr(script, backward)(dict(made), **(given if back_options is None else back_options)) if backward else None
    )
    return Case(
        project="torchtune",
        title=title,
        table=table,
        lines=script.lines(*[name for name in (forward, backward, "get_mapped_key", *tables) if name]),
        config=CONFIG,
        source=source,
        made=made,
        returned=returned,
    )


def llama(sources: Sources) -> Case:
    """Llama: rotary halves interleaved."""
    names = ("hf_to_tune", "tune_to_hf", "_FROM_HF")
    source = drawn(_decoder(norms=NORMS), i=2)
    return _case(sources, COMMON, names, "Llama of transformers", "torchtune_llama", source)


def meta(sources: Sources) -> Case:
    """Meta's own files."""
    shapes: dict[str, Any] = {"tok_embeddings.weight": (WORDS, HIDDEN), "output.weight": (WORDS, HIDDEN)}
    shapes |= {f"layers.{{i}}.attention.w{part}.weight": (rows, HIDDEN) for part, rows in QKV.items()}
    shapes |= {
        "layers.{i}.attention.wo.weight": (HIDDEN, HEADS * HEAD),
        "layers.{i}.feed_forward.w2.weight": (HIDDEN, INNER),
    }
    shapes |= {f"layers.{{i}}.feed_forward.{one}.weight": (INNER, HIDDEN) for one in ("w1", "w3")}
    shapes |= {
        "layers.{i}.attention_norm.weight": (HIDDEN,),
        "layers.{i}.ffn_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    names = ("meta_to_tune", "tune_to_meta", "_FROM_META")
    return _case(sources, COMMON, names, "Llama of Meta", "torchtune_meta", drawn(shapes, i=2), options={})


def qwen_2(sources: Sources) -> Case:
    """Qwen 2: biases of q, k and v."""
    names = ("qwen2_hf_to_tune", "qwen2_tune_to_hf", "_FROM_HF")
    path = "torchtune/models/qwen2/_convert_weights.py"
    source = drawn(_decoder(norms=NORMS, bias=True), i=2)
    return _case(sources, path, names, "Qwen 2 of transformers", "torchtune_qwen_2", source)


def gemma_2(sources: Sources) -> Case:
    """Gemma 2: the head is the embedding."""
    norms = (*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    source = drawn(_decoder(norms=norms), i=2)
    del source["lm_head.weight"]
    names = ("gemma2_hf_to_tune", "gemma2_tune_to_hf", "_GEMMA2_FROM_HF")
    path = "torchtune/models/gemma2/_convert_weights.py"
    return _case(sources, path, names, "Gemma 2 of transformers", "torchtune_gemma_2", source)


def phi_3(sources: Sources) -> Case:
    """Phi-3: q, k and v in one matrix, gate and up in another."""
    shapes = {
        name: shape
        for name, shape in _decoder(norms=NORMS).items()
        if ".mlp." not in name and ".self_attn." not in name
    }
    layer = "model.layers.{i}"
    shapes |= {f"{layer}.self_attn.qkv_proj.weight": ((HEADS + 2 * GROUPS) * HEAD, HIDDEN)}
    shapes |= {f"{layer}.self_attn.o_proj.weight": (HIDDEN, HIDDEN), f"{layer}.mlp.down_proj.weight": (HIDDEN, INNER)}
    shapes |= {f"{layer}.mlp.gate_up_proj.weight": (2 * INNER, HIDDEN)}
    names = ("phi3_hf_to_tune", "phi3_tune_to_hf", "_PHI3_MINI")
    path = "torchtune/models/phi3/_convert_weights.py"
    source = drawn(shapes, i=2)
    return _case(sources, path, names, "Phi-3 of transformers", "torchtune_phi_3", source, back_options={})


def clip_text(sources: Sources) -> Case:
    """CLIP's text tower."""
    layer = "text_model.encoder.layers.{i}"
    shapes: dict[str, Any] = {"text_model.embeddings.token_embedding.weight": (WORDS, HIDDEN)}
    shapes |= {"text_model.embeddings.position_embedding.weight": (7, HIDDEN)}
    shapes |= both(f"{layer}.layer_norm1", f"{layer}.layer_norm2", "text_model.final_layer_norm", shape=(HIDDEN,))
    shapes |= both(f"{layer}.mlp.fc1", shape=(INNER, HIDDEN)) | both(f"{layer}.mlp.fc2", shape=(HIDDEN, INNER))
    shapes |= both(*(f"{layer}.self_attn.{one}_proj" for one in ("q", "k", "v", "out")), shape=(HIDDEN, HIDDEN))
    names = ("clip_text_hf_to_tune", "", "_FROM_HF", "_IGNORE")
    path = "torchtune/models/clip/_convert_weights.py"
    return _case(
        sources, path, names, "CLIP's text tower of transformers", "torchtune_clip_text", drawn(shapes, i=2), options={}
    )


def t5_encoder(sources: Sources) -> Case:
    """T5's encoder."""
    block = "encoder.block.{i}.layer"
    shapes: dict[str, Any] = {
        "encoder.embed_tokens.weight": (WORDS, HIDDEN),
        "encoder.final_layer_norm.weight": (HIDDEN,),
    }
    shapes |= {"encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": (5, HEADS)}
    shapes |= {f"{block}.0.SelfAttention.{one}.weight": (HIDDEN, HIDDEN) for one in "qkvo"}
    shapes |= {f"{block}.1.DenseReluDense.{one}.weight": (INNER, HIDDEN) for one in ("wi_0", "wi_1")}
    shapes |= {f"{block}.1.DenseReluDense.wo.weight": (HIDDEN, INNER)}
    shapes |= {f"{block}.{one}.layer_norm.weight": (HIDDEN,) for one in (0, 1)}
    names = ("t5_encoder_hf_to_tune", "", "_FROM_HF", "_IGNORE")
    path = "torchtune/models/t5/_convert_weights.py"
    return _case(
        sources, path, names, "T5's encoder of transformers", "torchtune_t5_encoder", drawn(shapes, i=2), options={}
    )


CASES: tuple[Maker, ...] = (llama, meta, qwen_2, gemma_2, phi_3, clip_text, t5_encoder)
