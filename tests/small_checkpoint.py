"""A small BERT as a directory in HuggingFace's layout: random weights at realistic scale, and a tokenizer.

Its names and shapes are written out by hand, as the format has them: no table, no module of ours and no transformers
takes part, so that none of them can hide its own mistake.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

WORDS = (  # noqa: SIM905 - a list of forty quoted words is harder to read
    "[PAD] [UNK] [CLS] [SEP] [MASK] the a i we he at of in into to . , ! ' account accessed bank deposit money play "
    "river soccer transferred read book table tree cafe over wrote sun ##ing ##s ##ed ##er"
).split()

CONFIG: dict[str, Any] = {  # Any: fields of several types
    "architectures": ["BertForPreTraining"],
    "model_type": "bert",
    "vocab_size": len(WORDS),
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 24,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "pad_token_id": 0,
}

TRUNK, MLM, NSP = "bert.", "cls.predictions.", "cls.seq_relationship."


def tensors(seed: int = 0, config: dict[str, Any] = CONFIG) -> dict[str, Tensor]:  # Any: as above
    """All tensors of a BertForPreTraining, the tied decoder included, as older files have it."""
    generator = torch.Generator().manual_seed(seed)
    e, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    found: dict[str, Tensor] = {}

    def draw(name: str, *shape: int, scale: float = 0.4, mean: float = 0.0) -> None:
        found[name] = mean + scale * torch.randn(shape, generator=generator)

    def linear(name: str, out: int, into: int) -> None:
        draw(f"{name}.weight", out, into, scale=into**-0.5)
        draw(f"{name}.bias", out, scale=0.2)

    def norm(name: str) -> None:
        draw(f"{name}.weight", e, scale=0.2, mean=1.0)
        draw(f"{name}.bias", e, scale=0.2)

    for kind, rows in (("word", v), ("position", config["max_position_embeddings"]), ("token_type", 2)):
        draw(f"bert.embeddings.{kind}_embeddings.weight", rows, e)
    norm("bert.embeddings.LayerNorm")
    for number in range(config["num_hidden_layers"]):
        layer = f"bert.encoder.layer.{number}"
        for part in ("query", "key", "value"):
            linear(f"{layer}.attention.self.{part}", e, e)
        linear(f"{layer}.attention.output.dense", e, e)
        norm(f"{layer}.attention.output.LayerNorm")
        linear(f"{layer}.intermediate.dense", f, e)
        linear(f"{layer}.output.dense", e, f)
        norm(f"{layer}.output.LayerNorm")
    linear("bert.pooler.dense", e, e)
    linear("cls.predictions.transform.dense", e, e)
    norm("cls.predictions.transform.LayerNorm")
    draw("cls.predictions.bias", v)
    found["cls.predictions.decoder.weight"] = found["bert.embeddings.word_embeddings.weight"].clone()
    found["cls.predictions.decoder.bias"] = found["cls.predictions.bias"].clone()
    linear("cls.seq_relationship", 2, e)
    return found


def write_checkpoint(
    folder: Path,
    *,
    parts: tuple[str, ...] = (TRUNK, MLM, NSP),
    architecture: str = "BertForPreTraining",
    tokenizer: str = "tokenizer.json",
    change: dict[str, Any] | None = None,  # Any: fields of several types
    values: dict[str, Tensor] | None = None,
) -> Path:
    """Write a checkpoint.

    Args:
        folder: where to; it is made.
        parts: how the names of the tensors that it holds begin.
        architecture: what its config says it is.
        tokenizer: ``"tokenizer.json"``, ``"vocab.txt"`` or ``""`` for none.
        change: fields of the config that differ; None takes one out.
        values: tensors in the place of the drawn ones, by name.
    """
    folder.mkdir(parents=True)
    config = {**CONFIG, "architectures": [architecture], **(change or {})}
    config = {field: value for field, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    held = {name: tensor for name, tensor in {**tensors(), **(values or {})}.items() if name.startswith(parts)}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer == "vocab.txt":
        (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
        settings = {"do_lower_case": True, "tokenizer_class": "BertTokenizer"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    elif tokenizer == "tokenizer.json":
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    return folder


def tokenizer_json() -> dict[str, Any]:  # Any: as JSON is
    """The same word pieces as ``tokenizer.json`` has them, with a truncation and a padding that a reader must undo."""
    special = [(number, word) for number, word in enumerate(WORDS) if word.startswith("[")]
    cls, sep = WORDS.index("[CLS]"), WORDS.index("[SEP]")

    def piece(name: str, kind: int) -> dict[str, Any]:
        where = "SpecialToken" if name.startswith("[") else "Sequence"
        return {where: {"id": name, "type_id": kind}}

    return {
        "version": "1.0",
        "truncation": {"max_length": 6, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": {
            "strategy": {"Fixed": 20}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
            "pad_token": "[PAD]",
        },
        "added_tokens": [
            {
                "id": number, "content": word, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False,
            }
            for number, word in special
        ],
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [piece("[CLS]", 0), piece("A", 0), piece("[SEP]", 0)],
            "pair": [piece("[CLS]", 0), piece("A", 0), piece("[SEP]", 0), piece("B", 1), piece("[SEP]", 1)],
            "special_tokens": {
                name: {"id": name, "ids": [number], "tokens": [name]}
                for name, number in (("[CLS]", cls), ("[SEP]", sep))
            },
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {word: number for number, word in enumerate(WORDS)},
        },
    }  # fmt: skip
