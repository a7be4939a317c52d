"""ALBERT, written by hand: BERT with narrow embeddings and with one layer for all depths.

Paper: Lan et al. 2020, "ALBERT: A Lite BERT for Self-supervised Learning of Language Representations" (ICLR); a bare
section number is one of its sections. Reference: google-research/albert, ``modeling.py``. Shape letters are those of
``bert.py``, and

    n embedding_size, the width of the embeddings before they are projected

>>> import torch
>>> config = AlbertConfig(
...     vocab_size=30, embedding_size=4, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16
... )
>>> albert = Albert(config=config).eval()
>>> output = albert(torch.tensor([[1, 7, 9, 2], [1, 5, 8, 2]]), output_attentions=True)
>>> output.last_hidden_state.shape, len(output.attentions), len(albert.layers)
(torch.Size([2, 4, 8]), 3, 1)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor, nn

from porting.models import checks
from porting.models.bert import Bert, BertEmbeddings, BertOutput, initialize
from porting.models.bert_config import BertConfig
from porting.models.bert_heads import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertMaskedLMHead,
    BertWithHead,
)

__all__ = [
    "Albert",
    "AlbertConfig",
    "AlbertForMaskedLM",
    "AlbertForMultipleChoice",
    "AlbertForPreTraining",
    "AlbertForQuestionAnswering",
    "AlbertForSequenceClassification",
    "AlbertForTokenClassification",
    "AlbertPreTrainingOutput",
    "FactorizedConfig",
    "FactorizedEmbeddings",
    "FactorizedMaskedLMHead",
]


@dataclass(frozen=True, kw_only=True)
class FactorizedConfig(BertConfig):
    """BERT's hyperparameters, and the width of the embeddings (section 3.1).

    Attributes:
        embedding_size: width of the embeddings, before they are projected to ``hidden_size``.
    """

    embedding_size: int = 128

    def faults(self) -> Iterator[str]:
        """The faults of the fields, one line each."""
        yield from super().faults()
        yield from checks.sizes(self, "embedding_size")

    @property
    def narrow(self) -> BertConfig:
        """The config of the parts that are ``embedding_size`` wide; these have no heads."""
        return replace(self, hidden_size=self.embedding_size, num_attention_heads=1)


@dataclass(frozen=True, kw_only=True)
class AlbertConfig(FactorizedConfig):
    """The hyperparameters of an ALBERT. The widths are BERT-base's (ALBERT-base in table 1).

    Attributes:
        num_hidden_groups: how many layers have weights of their own; each serves as many depths in a row.

    Raises:
        ValueError: if a field is out of its range; one line for each such field.

    >>> AlbertConfig(num_hidden_layers=12, num_hidden_groups=13)
    Traceback (most recent call last):
    ...
    ValueError: AlbertConfig has 1 fault:
      num_hidden_groups=13: expected at most num_hidden_layers=12
    """

    vocab_size: int = 30000
    hidden_act: str = "gelu_new"
    num_hidden_groups: int = 1

    def faults(self) -> Iterator[str]:
        """The faults of the fields, one line each."""
        yield from super().faults()
        yield from checks.sizes(self, "num_hidden_groups")
        yield from checks.at_most(self, "num_hidden_groups", "num_hidden_layers")


class FactorizedEmbeddings(BertEmbeddings):
    """The v x e embedding table as a product of v x n and n x e: fewer weights, since n is small (section 3.1)."""

    def __init__(self, *, config: FactorizedConfig) -> None:
        super().__init__(config=config.narrow)
        self.projection: nn.Module = nn.Linear(config.embedding_size, config.hidden_size)

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Ids [b s], each -> embeddings [b s n] -> [b s e]."""
        projected: Tensor = self.projection(super().forward(input_ids, token_type_ids, position_ids))  # [b s e]
        return projected


class FactorizedMaskedLMHead(BertMaskedLMHead):
    """BERT's MLM head, projected back to the width of the embedding table."""

    def __init__(self, *, config: FactorizedConfig) -> None:
        super().__init__(config=config.narrow)
        self.dense = nn.Linear(config.hidden_size, config.embedding_size)


class Albert(Bert):
    """The encoder: ``layers`` has one layer for each group of depths, and most often one for all (section 3.1)."""

    config: AlbertConfig
    embeddings_class = FactorizedEmbeddings

    def __init__(self, *, config: AlbertConfig, pooler: bool = True) -> None:
        super().__init__(config=replace(config, num_hidden_layers=config.num_hidden_groups), pooler=pooler)
        self.config = config

    def depths(self) -> Iterator[nn.Module]:
        """The layer at each depth: that of its group."""
        depths, groups = self.config.num_hidden_layers, self.config.num_hidden_groups
        return (self.layers[depth * groups // depths] for depth in range(depths))


class AlbertPreTrainingOutput(NamedTuple):
    """What :class:`AlbertForPreTraining` returns."""

    mlm_logits: Tensor  # [b s v]
    sop_logits: Tensor  # [b num_labels], class 0 = the two segments stand in order, class 1 = they were swapped
    hidden_states: tuple[Tensor, ...] | None = None  # as in BertOutput
    attentions: tuple[Tensor, ...] | None = None


class AlbertForPreTraining(BertWithHead[AlbertPreTrainingOutput]):
    """Both pre-training tasks: masked language modelling and the order of two segments (section 3.1)."""

    encoder_class = Albert

    def __init__(self, *, config: AlbertConfig) -> None:
        super().__init__(config=config, pooler=True)
        self.mlm = FactorizedMaskedLMHead(config=config)
        self.dropout = nn.Dropout(config.classifier_dropout_prob)
        self.sop = nn.Linear(config.hidden_size, config.num_labels)
        initialize(nn.ModuleList([self.mlm, self.sop]), std=config.initializer_range)

    def read(self, encoded: BertOutput) -> AlbertPreTrainingOutput:
        """The MLM and the sentence-order logits."""
        mlm_logits = encoded.at_tokens(self.mlm, self.bert.embeddings.word.weight)  # [b s v]
        sop_logits = self.sop(self.dropout(encoded.pooled))  # [b num_labels]
        return AlbertPreTrainingOutput(mlm_logits, sop_logits, encoded.hidden_states, encoded.attentions)


class AlbertForMaskedLM(BertForMaskedLM):
    """Masked language modelling (section 3.1)."""

    encoder_class = Albert
    head_class = FactorizedMaskedLMHead


class AlbertForSequenceClassification(BertForSequenceClassification):
    """One label for the whole input (section 4.1)."""

    encoder_class = Albert


class AlbertForTokenClassification(BertForTokenClassification):
    """One label for each token."""

    encoder_class = Albert


class AlbertForMultipleChoice(BertForMultipleChoice):
    """The best of c continuations (section 4.1, RACE)."""

    encoder_class = Albert


class AlbertForQuestionAnswering(BertForQuestionAnswering):
    """Where in the text the answer starts and where it ends (section 4.1, SQuAD)."""

    encoder_class = Albert
