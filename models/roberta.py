"""RoBERTa, written by hand: BERT's encoder and heads, and one head that differs.

Paper: Liu et al. 2019, "RoBERTa: A Robustly Optimized BERT Pretraining Approach". What it changed is how BERT is
trained: longer, on more text, with masks drawn anew and without next sentences (sections 3 and 4). So the encoder is
:class:`~porting.models.bert.Bert`, and XLM-RoBERTa (Conneau et al. 2020) and CamemBERT (Martin et al. 2020) are it
again, trained on other languages. Reference: facebookresearch/fairseq, ``models/roberta/model.py``.

Without next sentences there is no use for a pooler: the classifier has a hidden layer of its own.

>>> import torch
>>> config = BertConfig(
...     vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
... )
>>> model = RobertaForSequenceClassification(config=config).eval()
>>> model(torch.tensor([[0, 7, 9, 2], [0, 5, 8, 2]])).logits.shape
torch.Size([2, 2])
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from porting.models.bert import BertOutput, initialize
from porting.models.bert_config import BertConfig
from porting.models.bert_heads import BertLogits, BertWithHead

__all__ = ["RobertaClassificationHead", "RobertaForSequenceClassification"]


class RobertaClassificationHead(nn.Module):
    """Scores the first token: one hidden layer, then a linear one, dropout before each (section 5.1)."""

    activation_class: ClassVar[type[nn.Module]] = nn.Tanh

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.classifier_dropout_prob)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = self.activation_class()
        self.output = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [b s e] -> logits [b num_labels]."""
        first = self.activation(self.dense(self.dropout(hidden[:, 0])))  # [b e]
        logits: Tensor = self.output(self.dropout(first))  # [b num_labels]
        return logits


class RobertaForSequenceClassification(BertWithHead[BertLogits]):
    """One label for the whole input (section 5.1)."""

    head_class: ClassVar[type[RobertaClassificationHead]] = RobertaClassificationHead

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__(config=config, pooler=False)
        self.classifier = self.head_class(config=config)
        initialize(self.classifier, std=config.initializer_range)

    def read(self, encoded: BertOutput) -> BertLogits:
        """Logits [b num_labels]."""
        logits = self.classifier(encoded.last_hidden_state)  # [b num_labels]
        return BertLogits(logits, encoded.hidden_states, encoded.attentions)
