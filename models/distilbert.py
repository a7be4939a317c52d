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

import torch
from torch import Tensor, nn

from porting.models.bert import Bert, BertEmbeddings, BertLayer, BertPooler
from porting.models.bert_config import BertConfig
from porting.models.bert_heads import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from porting.models.unpadded import Rows

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
    """BERT's embeddings without token types: tokens and positions (section 3)."""

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
            position_ids = self.positions(input_ids)  # [1 s] or [b s]
        hidden: Tensor = self.dropout(self.norm(self.word(input_ids) + self.position(position_ids)))  # [b s e]
        return hidden


class DistilBertLayer(BertLayer):
    """BERT's layer, but that what attention gives is not dropped out."""

    def forward(
        self, hidden: Tensor, bias: Tensor | Rows | None = None, *, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [b s e], bias [b 1 1 s] -> hidden states [b s e], probabilities [b h s s] or None."""
        attended, probabilities = self.attention(hidden, bias, output_attentions=output_attentions)  # [b s e]
        hidden = self.attention_norm(hidden + attended)  # [b s e]
        expanded = self.activation(self.intermediate(hidden))  # [b s f]
        hidden = self.output_norm(hidden + self.dropout(self.output(expanded)))  # [b s e]
        return hidden, probabilities


class DistilBertPooler(BertPooler):
    """The vector of the whole input, with ReLU; it was not distilled, each classifier trains its own."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [b s e] -> pooled [b e]."""
        return torch.relu(self.dense(hidden[:, 0]))  # [b e]


class DistilBert(Bert):
    """The encoder: BERT's layers over embeddings without token types."""

    embeddings_class = UntypedEmbeddings
    layer_class = DistilBertLayer
    pooler_class = DistilBertPooler

    def __init__(self, *, config: BertConfig, pooler: bool = False) -> None:
        super().__init__(config=config, pooler=pooler)


class DistilBertForMaskedLM(BertForMaskedLM):
    """Masked language modelling (section 3)."""

    encoder_class = DistilBert


class DistilBertForSequenceClassification(BertForSequenceClassification):
    """One label for the whole input (section 4)."""

    encoder_class = DistilBert


class DistilBertForTokenClassification(BertForTokenClassification):
    """One label for each token."""

    encoder_class = DistilBert

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__(config=config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)  # classifier_dropout is for what is pooled


class DistilBertForMultipleChoice(BertForMultipleChoice):
    """The best of c continuations, each encoded with the same beginning."""

    encoder_class = DistilBert


class DistilBertForQuestionAnswering(BertForQuestionAnswering):
    """Where in the text the answer starts and where it ends (section 4)."""

    encoder_class = DistilBert
