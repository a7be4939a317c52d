"""The first checkpoints of BERT, GPT-2 and T5, by transformers' functions that read TensorFlow's."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import transformers
from torch import nn

from scripts.conversions.case import SCRIPTS, Case, Maker, Sources, Tensors, drawn

HIDDEN, INNER, WORDS = 8, 12, 11


def _case(sources: Sources, family: str, title: str, table: str, source: Tensors, model: nn.Module) -> Case:
    script = sources.script(f"{SCRIPTS}/transformers/models/{family}/modeling_{family}.py")
    function = f"load_tf_weights_in_{family}"
    reading = SimpleNamespace(
        list_variables=lambda _: [(name, list(one.shape)) for name, one in source.items()],
        load_variable=lambda _, name: source[name].numpy(),
    )
    with mock.patch.dict(sys.modules, {"tensorflow": SimpleNamespace(train=reading)}):
        getattr(script, function)(model, model.config, "bert_model.ckpt")
    return Case(
        project="transformers",
        title=title,
        table=table,
        lines=script.lines(function),
        source=source,
        made=dict(model.state_dict()),
        remark="read without TensorFlow: the function is given the arrays",
    )


def bert(sources: Sources) -> Case:
    """BERT with its two heads for pretraining."""
    layer = "bert/encoder/layer_{i}"
    shapes: dict[str, Any] = {"bert/embeddings/word_embeddings": (WORDS, HIDDEN)}
    shapes |= {"bert/embeddings/position_embeddings": (9, HIDDEN), "bert/embeddings/token_type_embeddings": (2, HIDDEN)}
    dense = {f"{layer}/attention/self/{one}": (HIDDEN, HIDDEN) for one in ("query", "key", "value")}
    dense |= {f"{layer}/attention/output/dense": (HIDDEN, HIDDEN), f"{layer}/intermediate/dense": (HIDDEN, INNER)}
    dense |= {f"{layer}/output/dense": (INNER, HIDDEN), "bert/pooler/dense": (HIDDEN, HIDDEN)}
    dense |= {"cls/predictions/transform/dense": (HIDDEN, HIDDEN)}
    for name, size in dense.items():
        shapes |= {f"{name}/kernel": size, f"{name}/bias": size[1:]}
    for name in ("bert/embeddings", f"{layer}/attention/output", f"{layer}/output", "cls/predictions/transform"):
        shapes |= {f"{name}/LayerNorm/{one}": (HIDDEN,) for one in ("gamma", "beta")}
    shapes |= {"cls/predictions/output_bias": (WORDS,), "cls/seq_relationship/output_weights": (2, HIDDEN)}
    source = drawn(shapes | {"cls/seq_relationship/output_bias": (2,)}, i=2)
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=INNER,
        max_position_embeddings=9,
    )
    model = transformers.BertForPreTraining(config)
    return _case(sources, "bert", "BERT of Google, from TensorFlow", "google_bert", source, model)


def gpt2(sources: Sources) -> Case:
    """GPT-2."""
    layer = "model/h{i}"
    shapes: dict[str, Any] = {"model/wte": (WORDS, HIDDEN), "model/wpe": (9, HIDDEN)}
    dense = {"attn/c_attn": (HIDDEN, 3 * HIDDEN), "attn/c_proj": (HIDDEN, HIDDEN)}
    dense |= {"mlp/c_fc": (HIDDEN, 4 * HIDDEN), "mlp/c_proj": (4 * HIDDEN, HIDDEN)}
    for name, size in dense.items():
        shapes |= {f"{layer}/{name}/w": (1, *size), f"{layer}/{name}/b": size[1:]}
    for name in (f"{layer}/ln_1", f"{layer}/ln_2", "model/ln_f"):
        shapes |= {f"{name}/{one}": (HIDDEN,) for one in "gb"}
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=HIDDEN, n_layer=2, n_head=2, n_positions=9)
    model, title = transformers.GPT2Model(config), "GPT-2 of OpenAI, from TensorFlow"
    return _case(sources, "gpt2", title, "openai_gpt2", drawn(shapes, i=2), model)


def t5(sources: Sources) -> Case:
    """T5, whose names have numbers of three digits."""
    shapes: dict[str, Any] = {"shared/embedding": (WORDS, HIDDEN)}
    for side, count in (("encoder", 2), ("decoder", 3)):
        for block in range(2):
            place = f"{side}/block_{block:03}"
            attention = [f"{place}/layer_000/SelfAttention"]
            attention += [f"{place}/layer_001/EncDecAttention"] if side == "decoder" else []
            for name in attention:
                shapes |= {f"{name}/{one}": (HIDDEN, 6) for one in "qkv"} | {f"{name}/o": (6, HIDDEN)}
            dense = f"{place}/layer_{count - 1:03}/DenseReluDense"
            shapes |= {f"{dense}/wi/kernel": (HIDDEN, INNER), f"{dense}/wo/kernel": (INNER, HIDDEN)}
            shapes |= {f"{place}/layer_{layer:03}/layer_norm/scale": (HIDDEN,) for layer in range(count)}
        shapes |= {f"{side}/block_000/layer_000/SelfAttention/relative_attention_bias": (2, 32)}
        shapes |= {f"{side}/final_layer_norm/scale": (HIDDEN,)}
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=HIDDEN, d_kv=3, d_ff=INNER, num_layers=2, num_heads=2, feed_forward_proj="relu"
    )
    model = transformers.T5ForConditionalGeneration(config)
    return _case(sources, "t5", "T5 of Google, from TensorFlow", "google_t5", drawn(shapes), model)


CASES: tuple[Maker, ...] = (bert, gpt2, t5)
