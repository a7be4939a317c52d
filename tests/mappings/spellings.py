"""BERT checkpoints as transformers has written them over the years, and as others have."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.twins import TINY, realistic

Weights = dict[str, Tensor]

WITH_MLM = ("BertForPreTraining", "BertForMaskedLM")
WITHOUT_POOLER = ("BertForMaskedLM", "BertForTokenClassification", "BertForQuestionAnswering")


def architecture_fields(architecture: str) -> dict[str, Any]:  # Any: fields of several types
    """Config fields; two labels for the head that needs them, five for the others."""
    return {**TINY, "num_labels": 2 if architecture == "BertForQuestionAnswering" else 5}


def modern(directory: Path, architecture: str, **changes: str | float) -> None:
    """What transformers writes today, every parameter drawn at realistic scale."""
    reference_model(architecture, **changes).save_pretrained(directory)


@cache
def reference_model(architecture: str, **changes: str | float) -> transformers.PreTrainedModel:
    """A model of transformers; each is made once."""
    config = transformers.BertConfig(**{**architecture_fields(architecture), **changes})
    model: transformers.PreTrainedModel = getattr(transformers, architecture)(config).eval()
    realistic(model, seed=0)
    return model


def rewrite(directory: Path, change: Callable[[Weights], Weights]) -> None:
    """Give the tensors of a checkpoint other names."""
    path = directory / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def as_modern(directory: Path, architecture: str) -> None:
    modern(directory, architecture)


def as_gamma_beta(directory: Path, architecture: str) -> None:
    modern(directory, architecture)
    rewrite(directory, _gamma_beta)


def as_half_gamma_beta(directory: Path, architecture: str) -> None:
    """Both spellings in one file, as a script that stopped half way leaves them."""
    modern(directory, architecture)
    rewrite(directory, lambda weights: _gamma_beta(weights, only="layer.1."))


def as_other_prefix(directory: Path, architecture: str) -> None:
    """The bare encoder with ``bert.`` in front, the models with heads without it."""
    modern(directory, architecture)
    if architecture == "BertModel":
        rewrite(directory, lambda weights: {f"bert.{name}": tensor for name, tensor in weights.items()})
    else:
        rewrite(directory, lambda weights: {name.removeprefix("bert."): tensor for name, tensor in weights.items()})


def as_with_position_ids(directory: Path, architecture: str) -> None:
    """Until transformers 4.31 they were saved with the weights."""
    modern(directory, architecture)
    rewrite(directory, lambda weights: {**weights, **_position_ids(architecture)})


def as_with_copies(directory: Path, architecture: str) -> None:
    """The tied output matrix and its bias written out, as tools that know no ties do."""
    modern(directory, architecture)
    rewrite(directory, lambda weights: {**weights, **{n: t.clone() for n, t in _copies(weights, architecture).items()}})


def as_with_pooler(directory: Path, architecture: str) -> None:
    """A pooler that the architecture has no use for, as early versions saved it."""
    modern(directory, architecture)
    pooler = {"bert.pooler.dense.weight": torch.randn(24, 24), "bert.pooler.dense.bias": torch.randn(24)}
    rewrite(directory, lambda weights: {**pooler, **weights} if architecture in WITHOUT_POOLER else weights)


def as_sharded(directory: Path, architecture: str) -> None:
    reference_model(architecture).save_pretrained(directory, max_shard_size="16KB")
    assert len(list(directory.glob("*.safetensors"))) > 2


def as_bin(directory: Path, architecture: str) -> None:
    """As of 2018: a pickle, gamma and beta, ties that share their storage, and a config of few fields."""
    modern(directory, architecture)
    weights = load_file(directory / "model.safetensors")
    weights |= {**_position_ids(architecture), **_copies(weights, architecture)}
    torch.save(_gamma_beta(weights), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    config = json.loads((directory / "config.json").read_text())
    newer = {"layer_norm_eps", "pad_token_id", "classifier_dropout", "tie_word_embeddings", "is_decoder", "dtype"}
    newer |= {"add_cross_attention", "transformers_version", "use_cache"}
    kept = {field: value for field, value in config.items() if field not in newer}
    (directory / "config.json").write_text(json.dumps(kept))


def as_sharded_bin(directory: Path, architecture: str) -> None:
    modern(directory, architecture)
    weights = load_file(directory / "model.safetensors")
    names = list(weights)
    half = len(names) // 2
    home: dict[str, str] = {}
    for number, part in enumerate((names[:half], names[half:]), 1):
        shard = f"pytorch_model-{number:05}-of-00002.bin"
        torch.save({name: weights[name] for name in part}, directory / shard)
        home |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": sum(t.nbytes for t in weights.values())}, "weight_map": home}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (directory / "model.safetensors").unlink()


SPELLINGS: dict[str, Callable[[Path, str], None]] = {
    "modern": as_modern,
    "gamma-beta": as_gamma_beta,
    "half-gamma-beta": as_half_gamma_beta,
    "other-prefix": as_other_prefix,
    "position-ids": as_with_position_ids,
    "copies": as_with_copies,
    "pooler": as_with_pooler,
    "sharded": as_sharded,
    "bin": as_bin,
    "sharded-bin": as_sharded_bin,
}


def missing_and_unexpected(directory: Path, architecture: str) -> dict[str, object]:
    """All that transformers has to say of a checkpoint's keys when it loads it."""
    _, info = getattr(transformers, architecture).from_pretrained(directory, output_loading_info=True)
    return {key: value for key, value in info.items() if value}


def tensors_of(directory: Path) -> Weights:
    """Every tensor in a directory, read by safetensors and torch."""
    found: Weights = {}
    for path in sorted(directory.iterdir()):
        if path.suffix == ".safetensors":
            found |= load_file(path)
        elif path.suffix == ".bin":
            found |= torch.load(path, weights_only=True)
    return found


def _gamma_beta(weights: Weights, only: str = "") -> Weights:
    def spell(name: str) -> str:
        if only not in name:
            return name
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    return {spell(name): tensor for name, tensor in weights.items()}


def _trunk(architecture: str) -> str:
    return "" if architecture == "BertModel" else "bert."


def _position_ids(architecture: str) -> Weights:
    return {f"{_trunk(architecture)}embeddings.position_ids": torch.arange(TINY["max_position_embeddings"])[None]}


def _copies(weights: Weights, architecture: str) -> Weights:
    if architecture not in WITH_MLM:
        return {}
    return {
        "cls.predictions.decoder.weight": weights["bert.embeddings.word_embeddings.weight"],
        "cls.predictions.decoder.bias": weights["cls.predictions.bias"],
    }
