"""A BERT of transformers and ours with the same weights, carried over name for name, and their inputs."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from porting import models

HEADS = {
    "BertModel": models.Bert,
    "BertForPreTraining": models.BertForPreTraining,
    "BertForMaskedLM": models.BertForMaskedLM,
    "BertForNextSentencePrediction": models.BertForNextSentencePrediction,
    "BertForSequenceClassification": models.BertForSequenceClassification,
    "BertForTokenClassification": models.BertForTokenClassification,
    "BertForMultipleChoice": models.BertForMultipleChoice,
    "BertForQuestionAnswering": models.BertForQuestionAnswering,
}

TINY: dict[str, Any] = {  # Any: fields of several types
    "vocab_size": 37,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 19,
    "num_labels": 5,
}

UNUSED_WORD = TINY["vocab_size"] - 1  # no input contains it

# transformers' spelling -> ours; the table engine is not asked, so that neither can hide the other's mistake.
RENAMED = (
    (r"^(embeddings|encoder|pooler)\.", r"bert.\1."),  # the bare encoder, until the last line
    (r"embeddings\.(word|position|token_type)_embeddings", r"embeddings.\1"),
    (r"encoder\.layer\.(\d+)\.attention\.self\.(query|key|value)", r"layers.\1.attention.\2"),
    (r"encoder\.layer\.(\d+)\.attention\.output\.dense", r"layers.\1.attention.output"),
    (r"encoder\.layer\.(\d+)\.attention\.output\.LayerNorm", r"layers.\1.attention_norm"),
    (r"encoder\.layer\.(\d+)\.output\.LayerNorm", r"layers.\1.output_norm"),
    (r"encoder\.layer\.(\d+)\.(intermediate|output)\.dense", r"layers.\1.\2"),
    (r"cls\.predictions\.transform\.", "mlm."),
    (r"cls\.predictions\.bias", "mlm.bias"),
    (r"cls\.seq_relationship", "nsp"),
    (r"qa_outputs", "span"),
    (r"LayerNorm", "norm"),
)


def our_name(name: str, *, bare: bool) -> str:
    """What ``name`` is called here; ``bare`` for the encoder alone, which has no ``bert.`` in front."""
    for theirs, ours in RENAMED:
        name = re.sub(theirs, ours, name)
    return name.removeprefix("bert.") if bare else name


def realistic(model: nn.Module, *, seed: int) -> None:
    """Draws every parameter as training might have left it: no zero bias, no unit gain, no flat attention."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center, spread = 0.0, 0.2
            if name.endswith("bias"):
                spread = 0.1
            elif "LayerNorm" in name:
                center = 1.0
            noise = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            parameter.copy_(center + spread * noise)


class Twins(NamedTuple):
    """One function, written twice."""

    theirs: transformers.PreTrainedModel
    ours: nn.Module

    @property
    def bare(self) -> bool:
        """Whether this is the encoder alone."""
        return isinstance(self.ours, models.Bert)

    def to(self, dtype: torch.dtype) -> Twins:
        """Both in ``dtype``."""
        nn.Module.to(self.theirs, dtype)
        self.ours.to(dtype)
        return self


def twins(architecture: str, *, seed: int = 0, attention: str = "eager", **changes: Any) -> Twins:
    """Both implementations of ``architecture`` with the same realistic weights, float64, in evaluation mode.

    Args:
        architecture: transformers' name of it.
        seed: of the weights.
        attention: how transformers computes attention: ``eager`` gives its maps, ``sdpa`` does not.
        changes: config fields that differ from ``TINY``.
    """
    fields = {**TINY, **changes}
    if architecture == "BertForQuestionAnswering":
        fields["num_labels"] = 2  # there the width of its output, which ours fixes: a start and an end
    config = transformers.BertConfig(**fields)
    theirs = getattr(transformers, architecture)._from_config(config, attn_implementation=attention)
    theirs.to(torch.float64).eval()
    realistic(theirs, seed=seed)
    ours = HEADS[architecture](config=models.BertConfig(**fields)).to(torch.float64).eval()
    bare = architecture == "BertModel"
    weights = {our_name(name, bare=bare): parameter.detach() for name, parameter in theirs.named_parameters()}
    ours.load_state_dict(weights, strict=True)
    return Twins(theirs, ours)


def inputs(kind: str = "padded", *, choices: int | None = None, types: int = 2) -> dict[str, Tensor]:
    """Ids for ``TINY``, seeded: rows of different lengths, segments, the longest position, the padding word.

    Args:
        kind: ``padded`` (one row of four full), ``mask of ones``, ``no mask`` (every row full), ``short``
            (padded, and no row reaches the last position) or ``ids alone``.
        choices: with a number, ids are [b c s], else [b s].
        types: number of segments.
    """
    generator = torch.Generator().manual_seed(11)
    rows = 4 * (choices or 1)
    length = 13 if kind == "short" else int(TINY["max_position_embeddings"])
    ids = torch.randint(1, UNUSED_WORD, (rows, length), generator=generator)
    mask = (torch.arange(length) < length - 3 * (torch.arange(rows)[:, None] % 4)).long()
    segments = (torch.arange(length) * types // length).repeat(rows, 1)
    if kind == "ids alone":
        found = {"input_ids": ids}
    elif kind == "no mask":
        found = {"input_ids": ids, "token_type_ids": segments}
    elif kind == "mask of ones":
        found = {"input_ids": ids, "token_type_ids": segments, "attention_mask": torch.ones_like(ids)}
    else:
        found = {"input_ids": ids * mask, "token_type_ids": segments * mask, "attention_mask": mask}
    return {name: value.view(4, choices, length) if choices else value for name, value in found.items()}


KINDS = ("padded", "mask of ones", "no mask", "short", "ids alone")


def inputs_for(architecture: str, kind: str = "padded") -> dict[str, Tensor]:
    """``inputs`` in the shape that ``architecture`` takes."""
    return inputs(kind, choices=3 if architecture == "BertForMultipleChoice" else None)


def main_outputs(output: object) -> dict[str, Tensor]:
    """What a model, theirs or ours, is asked for: tensors by our names, without hidden states and maps."""
    renamed = {
        "prediction_logits": "mlm_logits",
        "seq_relationship_logits": "nsp_logits",
        "pooler_output": "pooled",
    }
    fields = output._asdict() if hasattr(output, "_asdict") else dict(output)  # type: ignore[call-overload]  # ModelOutput
    return {renamed.get(name, name): value for name, value in fields.items() if isinstance(value, Tensor)}


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    assert ours.shape == theirs.shape
    return float(((ours - theirs).abs().max() / theirs.abs().max()).detach())
