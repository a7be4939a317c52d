"""ELECTRA, written by hand: BERT's encoder, trained to tell replaced tokens from original ones.

Paper: Clark, Luong, Le and Manning 2020, "ELECTRA: Pre-training Text Encoders as Discriminators Rather Than
Generators" (ICLR); a bare section number is one of its sections. A small generator fills in masked tokens; the
discriminator, the model that is kept, predicts for each token whether the generator replaced it (section 3.1). Both are
encoders of this kind, and the small ones have narrow embeddings (section 3.3). Reference: google-research/electra.

>>> import torch
>>> config = ElectraConfig(
...     vocab_size=30, embedding_size=4, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
... )
>>> ElectraForPreTraining(config=config).eval()(torch.tensor([[1, 7, 9, 2], [1, 5, 8, 2]])).logits.shape
torch.Size([2, 4])
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from porting.models import checks
from porting.models.albert import FactorizedConfig, FactorizedEmbeddings, FactorizedMaskedLMHead
from porting.models.bert import Bert, BertOutput, BertPooler, initialize
from porting.models.bert_config import ACTIVATIONS
from porting.models.bert_heads import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForTokenClassification,
    BertLogits,
    BertWithHead,
)
from porting.models.roberta import RobertaClassificationHead, RobertaForSequenceClassification

__all__ = [
    "Electra",
    "ElectraConfig",
    "ElectraForMaskedLM",
    "ElectraForMultipleChoice",
    "ElectraForPreTraining",
    "ElectraForQuestionAnswering",
    "ElectraForSequenceClassification",
    "ElectraForTokenClassification",
]


@dataclass(frozen=True, kw_only=True)
class ElectraConfig(FactorizedConfig):
    """The hyperparameters of an ELECTRA. The widths are BERT-base's.

    Attributes:
        summary_dropout: dropout before the score of a continuation.
    """

    summary_dropout: float = 0.1

    def faults(self) -> Iterator[str]:
        """The faults of the fields, one line each."""
        yield from super().faults()
        yield from checks.probabilities(self, "summary_dropout")


class ElectraEmbeddings(FactorizedEmbeddings):
    """Narrow embeddings and their projection; where they are as wide as the layers, there is none."""

    def __init__(self, *, config: ElectraConfig) -> None:
        super().__init__(config=config)
        if config.embedding_size == config.hidden_size:
            self.projection = nn.Identity()


class ElectraPooler(BertPooler):
    """The vector of the whole input, with GELU."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [b s e] -> pooled [b e]."""
        return F.gelu(self.dense(hidden[:, 0]))  # [b e]


class Electra(Bert):
    """The encoder; it was trained without a pooler."""

    embeddings_class = ElectraEmbeddings
    pooler_class = ElectraPooler

    def __init__(self, *, config: ElectraConfig, pooler: bool = False) -> None:
        super().__init__(config=config, pooler=pooler)


class ElectraDiscriminatorHead(nn.Module):
    """Was this token replaced? One hidden layer, then one score for each token (``get_discriminator_output``)."""

    def __init__(self, *, config: ElectraConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.hidden_act]()
        self.output = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [b s e] -> logits [b s]."""
        logits: Tensor = self.output(self.activation(self.dense(hidden)))  # [b s 1]
        return logits.squeeze(-1)


class ElectraForPreTraining(BertWithHead[BertLogits]):
    """The discriminator (section 3.1)."""

    encoder_class = Electra

    def __init__(self, *, config: ElectraConfig) -> None:
        super().__init__(config=config, pooler=False)
        self.discriminator = ElectraDiscriminatorHead(config=config)
        initialize(self.discriminator, std=config.initializer_range)

    def read(self, encoded: BertOutput) -> BertLogits:
        """Logits [b s], above 0 for a token that was replaced."""
        logits = self.discriminator(encoded.last_hidden_state)  # [b s]
        return BertLogits(logits, encoded.hidden_states, encoded.attentions)


class ElectraForMaskedLM(BertForMaskedLM):
    """The generator (section 3.1)."""

    encoder_class = Electra
    head_class = FactorizedMaskedLMHead


class ElectraClassificationHead(RobertaClassificationHead):
    """RoBERTa's with GELU in the place of tanh."""

    activation_class = nn.GELU


class ElectraForSequenceClassification(RobertaForSequenceClassification):
    """One label for the whole input (section 4.1)."""

    encoder_class = Electra
    head_class = ElectraClassificationHead


class ElectraForTokenClassification(BertForTokenClassification):
    """One label for each token."""

    encoder_class = Electra


class ElectraForMultipleChoice(BertForMultipleChoice):
    """The best of c continuations, each encoded with the same beginning; this head alone has a pooler."""

    encoder_class = Electra

    def __init__(self, *, config: ElectraConfig) -> None:
        super().__init__(config=config)
        self.dropout = nn.Dropout(config.summary_dropout)


class ElectraForQuestionAnswering(BertForQuestionAnswering):
    """Where in the text the answer starts and where it ends (section 4.1)."""

    encoder_class = Electra
