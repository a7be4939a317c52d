"""DistilBERT, written by hand: half of BERT's layers, one kind of text, no pooler.

Paper: Sanh, Debut, Chaumond and Wolf 2019, "DistilBERT, a distilled version of BERT"; a bare section number is one of
its sections. A small BERT learns the outputs of a large one (section 2); token types and the pooler are left out
(section 3). Reference: huggingface/transformers, ``modeling_distilbert.py``. Shape letters are those of ``bert.py``.

>>> config = BertConfig(
...     vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
... )
>>> DistilBert(config=config).eval()(torch.tensor([[1, 7, 9, 2], [1, 5, 8, 2]])).last_hidden_state.shape
torch.Size([2, 4, 8])
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from porting.models.bert import Bert, BertEmbeddings, initialize
from porting.models.bert_config import BertConfig
from porting.models.bert_heads import (
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForTokenClassification,
    BertLogits,
)
from porting.models.roberta import FirstTokenHead, RobertaForSequenceClassification

__all__ = [
    "DistilBert",
    "DistilBertForMaskedLM",
    "DistilBertForMultipleChoice",
    "DistilBertForQuestionAnswering",
    "DistilBertForSequenceClassification",
    "DistilBertForTokenClassification",
    "UntypedEmbeddings",
]


class UntypedEmbeddings(BertEmbeddings):
    """BERT's embeddings without token types: word and position (section 3)."""

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__(config=config)
        del self.token_type

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Ids [b s] and positions [b s] -> embeddings [b s e].

        Raises:
            ValueError: if there are token types.
        """
        if token_type_ids is not None:
            raise ValueError("token_type_ids were passed, and this model knows one kind of text; expected None")
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[-1], device=input_ids.device)[None]  # [1 s]
        hidden: Tensor = self.dropout(self.norm(self.word(input_ids) + self.position(position_ids)))  # [b s e]
        return hidden


class DistilBert(Bert):
    """The encoder: BERT's layers over embeddings without token types."""

    embeddings_class = UntypedEmbeddings

    def __init__(self, *, config: BertConfig, pooler: bool = False) -> None:
        super().__init__(config=config, pooler=pooler)


class DistilBertForMaskedLM(BertForMaskedLM):
    """Guesses masked words (section 3)."""

    encoder_class = DistilBert


class DistilBertClassificationHead(FirstTokenHead):
    """A layer with ReLU, dropout, a linear layer."""

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__(
            hidden_size=config.hidden_size,
            num_labels=config.num_labels,
            activation=nn.ReLU(),
            dropout=config.classifier_dropout_prob,
            first_dropout=False,
        )


class DistilBertForSequenceClassification(RobertaForSequenceClassification):
    """One label for the whole input (section 4)."""

    encoder_class = DistilBert
    head_class = DistilBertClassificationHead


class DistilBertForTokenClassification(BertForTokenClassification):
    """One label for each token."""

    encoder_class = DistilBert

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__(config=config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)  # the other classifiers have a probability of their own


class DistilBertChoiceHead(DistilBertClassificationHead):
    """One score: how well this continuation fits."""

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__(config=replace(config, num_labels=1))


class DistilBertForMultipleChoice(nn.Module):
    """The best of c continuations, each encoded with the same beginning."""

    encoder_class: ClassVar[type[Bert]] = DistilBert
    head_class: ClassVar[type[nn.Module]] = DistilBertChoiceHead

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__()
        self.bert = self.encoder_class(config=config, pooler=False)
        self.classifier = self.head_class(config=config)
        initialize(self.classifier, std=config.initializer_range)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> BertLogits:
        """Returns logits [b c]; here every input is [b c s]."""
        inputs = (input_ids, attention_mask, token_type_ids, position_ids)
        rows = (None if ids is None else ids.flatten(0, 1) for ids in inputs)  # [(b c) s] each
        encoded = self.bert(*rows, output_hidden_states=output_hidden_states, output_attentions=output_attentions)
        logits = self.classifier(encoded.last_hidden_state).view(input_ids.shape[:2])  # [b c]
        return BertLogits(logits, encoded.hidden_states, encoded.attentions)


class DistilBertForQuestionAnswering(BertForQuestionAnswering):
    """Where in the text the answer starts and where it ends (section 4)."""

    encoder_class = DistilBert
