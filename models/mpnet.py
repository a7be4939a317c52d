"""MPNet, written by hand: BERT's encoder that also knows how far apart two tokens are.

Paper: Song et al. 2020, "MPNet: Masked and Permuted Pre-training for Language Understanding" (NeurIPS). What it
changed is the pre-training; the encoder is RoBERTa's with the relative positions of Raffel et al. 2020, "Exploring the
Limits of Transfer Learning with a Unified Text-to-Text Transformer" (T5), section 2.1: a number for each head and each
distance, added to the attention scores, the same in all layers. Reference: microsoft/MPNet,
``rel_multihead_attention.py``. Shape letters are those of ``bert.py``.

>>> config = BertConfig(
...     vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
... )
>>> MPNet(config=config).eval()(torch.tensor([[0, 7, 9, 2], [0, 5, 8, 2]])).last_hidden_state.shape
torch.Size([2, 4, 8])
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from porting.models.bert import Bert, initialize
from porting.models.bert_config import BertConfig
from porting.models.bert_heads import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForTokenClassification,
)
from porting.models.distilbert import UntypedEmbeddings
from porting.models.roberta import RobertaForSequenceClassification
from porting.models.unpadded import Rows

__all__ = [
    "MPNet",
    "MPNetForMaskedLM",
    "MPNetForMultipleChoice",
    "MPNetForQuestionAnswering",
    "MPNetForSequenceClassification",
    "MPNetForTokenClassification",
    "RelativeBias",
]

BUCKETS = 16
"""Buckets of distances on each side: 0 to 7 have one each, the others share eight, ever wider ones."""

FARTHEST = 128
"""From here on all distances share the last bucket."""


class RelativeBias(nn.Module):
    """What a query adds to its score with a key for the distance between them (Raffel et al., section 2.1).

    The distance is that of their places in the row, whatever ``position_ids`` say.
    """

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__()
        near = BUCKETS // 2
        wider = (near * (FARTHEST / near) ** (step / near) for step in range(1, near))  # a geometric progression
        self.bounds = (*range(1, near + 1), *map(math.ceil, wider))  # where each bucket but the first begins
        self.buckets = nn.Embedding(2 * BUCKETS, config.num_attention_heads)

    def forward(self, length: int) -> Tensor:
        """The bias of a row of ``length`` tokens, [1 h s s]."""
        places = torch.arange(length, device=self.buckets.weight.device)  # [s]
        distance = places[None, :] - places[:, None]  # [s s], key minus query: above 0 for a key to the right
        bounds = torch.tensor(self.bounds, device=places.device)
        bucket = torch.bucketize(distance.abs(), bounds, right=True) + BUCKETS * (distance > 0)  # [s s]
        bias: Tensor = self.buckets(bucket)  # [s s h]
        return bias.permute(2, 0, 1)[None]  # [1 h s s]


class MPNet(Bert):
    """The encoder: token and position embeddings, and layers that share one relative bias."""

    embeddings_class = UntypedEmbeddings

    def __init__(self, *, config: BertConfig, pooler: bool = True) -> None:
        super().__init__(config=config, pooler=pooler)
        self.relative_bias = RelativeBias(config=config)
        initialize(self.relative_bias, std=config.initializer_range)

    def encode(
        self, hidden: Tensor, bias: Tensor | Rows | None, *, output_hidden_states: bool, output_attentions: bool
    ) -> tuple[Tensor, tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
        """As in ``Bert``, with the relative bias added to that of the mask: [b h s s] in all."""
        if isinstance(bias, Rows):
            bias.add(self.relative_bias(bias.shape[1]))  # [1 h s s]
        else:
            relative = self.relative_bias(hidden.shape[1])  # [1 h s s]
            bias = relative if bias is None else bias + relative  # [b h s s]
        return super().encode(
            hidden, bias, output_hidden_states=output_hidden_states, output_attentions=output_attentions
        )


class MPNetForMaskedLM(BertForMaskedLM):
    """Masked language modelling."""

    encoder_class = MPNet


class MPNetForSequenceClassification(RobertaForSequenceClassification):
    """One label for the whole input."""

    encoder_class = MPNet


class MPNetForTokenClassification(BertForTokenClassification):
    """One label for each token."""

    encoder_class = MPNet


class MPNetForMultipleChoice(BertForMultipleChoice):
    """The best of c continuations."""

    encoder_class = MPNet


class MPNetForQuestionAnswering(BertForQuestionAnswering):
    """Where in the text the answer starts and where it ends."""

    encoder_class = MPNet
