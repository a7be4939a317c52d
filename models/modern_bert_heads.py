"""ModernBERT's heads: the encoder of ``modern_bert.py`` with what turns its output into logits.

Warner et al. 2024, sections 2.2.1 (masked language modelling) and 3.1 (labels). Inputs and shape letters are as there.

>>> import torch
>>> config = ModernBertConfig(
...     vocab_size=30, hidden_size=8, num_hidden_layers=4, num_attention_heads=2, intermediate_size=12, pad_token_id=0
... )
>>> ModernBertForMaskedLM(config=config).eval()(torch.tensor([[1, 7, 9, 2], [1, 5, 8, 2]])).logits.shape
torch.Size([2, 4, 30])
"""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.models.bert import BertOutput, initialize
from porting.models.bert_config import ACTIVATIONS
from porting.models.bert_heads import BertLogits, BertSpanOutput
from porting.models.modern_bert import ModernBert, norm
from porting.models.modern_bert_config import ModernBertConfig

__all__ = [
    "ModernBertForMaskedLM",
    "ModernBertForMultipleChoice",
    "ModernBertForQuestionAnswering",
    "ModernBertForSequenceClassification",
    "ModernBertForTokenClassification",
]


class ModernBertHead(nn.Module):
    """What every head begins with: a dense layer, an activation and a norm."""

    def __init__(self, *, config: ModernBertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.activation = ACTIVATIONS[config.classifier_activation]()
        self.norm = norm(config)
        initialize(self, std=config.initializer_range * (2 * config.num_hidden_layers) ** -0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        """[... e] -> [... e]."""
        states: Tensor = self.norm(self.activation(self.dense(hidden)))  # [... e]
        return states


class TiedDecoder(nn.Module):
    """Compute the score of every token with the embedding table itself, which is passed to ``forward``, and a bias."""

    def __init__(self, *, config: ModernBertConfig) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(config.vocab_size))
        initialize(self, std=config.initializer_range)

    def forward(self, hidden: Tensor, word_embeddings: Tensor) -> Tensor:
        """Hidden states [b s e] and the token embedding table [v e] -> logits [b s v]."""
        return F.linear(hidden, word_embeddings, self.bias)


class Classifier(nn.Module):
    """The end of every other head: dropout and a linear layer, the only one with a bias."""

    def __init__(self, *, config: ModernBertConfig, labels: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.dense = nn.Linear(config.hidden_size, labels)
        initialize(self, std=config.hidden_size**-0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        """[... e] -> logits [... labels]."""
        logits: Tensor = self.dense(self.dropout(hidden))  # [... labels]
        return logits


Output = TypeVar("Output")


class ModernBertWithHead(nn.Module, Generic[Output]):
    """The encoder with a head: a subclass adds what follows the head's beginning, and :meth:`read`."""

    def __init__(self, *, config: ModernBertConfig) -> None:
        super().__init__()
        self.bert = ModernBert(config=config)
        self.head = ModernBertHead(config=config)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> Output:
        """Encode a batch, and compute the logits."""
        encoded: BertOutput = self.bert(
            input_ids,
            attention_mask,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        return self.read(encoded, attention_mask)

    def read(self, encoded: BertOutput, attention_mask: Tensor | None) -> Output:
        """The logits of what was encoded, with its hidden states and attentions."""
        raise NotImplementedError


class ModernBertForMaskedLM(ModernBertWithHead[BertLogits]):
    """Masked language modelling (section 2.2.1)."""

    def __init__(self, *, config: ModernBertConfig) -> None:
        super().__init__(config=config)
        self.decoder = TiedDecoder(config=config)

    def read(self, encoded: BertOutput, attention_mask: Tensor | None) -> BertLogits:
        """Logits [b s v]."""
        logits = self.decoder(self.head(encoded.last_hidden_state), self.bert.embeddings.word.weight)  # [b s v]
        return BertLogits(logits, encoded.hidden_states, encoded.attentions)


class ModernBertForSequenceClassification(ModernBertWithHead[BertLogits]):
    """One label for the whole input, read from its first token or from the mean of all (``classifier_pooling``)."""

    def __init__(self, *, config: ModernBertConfig) -> None:
        super().__init__(config=config)
        self.mean = config.classifier_pooling == "mean"
        self.classifier = Classifier(config=config, labels=config.num_labels)

    def read(self, encoded: BertOutput, attention_mask: Tensor | None) -> BertLogits:
        """Logits [b num_labels]."""
        hidden = encoded.last_hidden_state  # [b s e]
        pooled = mean(hidden, attention_mask) if self.mean else hidden[:, 0]  # [b e]
        return BertLogits(self.classifier(self.head(pooled)), encoded.hidden_states, encoded.attentions)


def mean(hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The mean of the hidden states [b s e] over the tokens that are not padding -> [b e]."""
    if attention_mask is None:
        return hidden.mean(dim=1)
    weights = attention_mask.to(torch.bool)[:, :, None].to(hidden.dtype)  # [b s 1]
    return (hidden * weights).sum(dim=1) / weights.sum(dim=1)  # [b e]


class ModernBertForTokenClassification(ModernBertWithHead[BertLogits]):
    """One label for each token."""

    def __init__(self, *, config: ModernBertConfig) -> None:
        super().__init__(config=config)
        self.classifier = Classifier(config=config, labels=config.num_labels)

    def read(self, encoded: BertOutput, attention_mask: Tensor | None) -> BertLogits:
        """Logits [b s num_labels]."""
        logits = self.classifier(self.head(encoded.last_hidden_state))  # [b s num_labels]
        return BertLogits(logits, encoded.hidden_states, encoded.attentions)


def first(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """The state of each row's first token that is not padding, on whichever side that stands.

    Args:
        hidden: [b s e].
        mask: [b s], 1 or True = a token; None: every place is one.

    Returns:
        [b e].
    """
    if mask is None:
        return hidden[:, 0]
    places = mask.to(torch.bool).long().argmax(-1)  # [b]
    return hidden[torch.arange(len(hidden), device=hidden.device), places]


class ModernBertForMultipleChoice(ModernBertWithHead[BertLogits]):
    """The best of c continuations, each encoded with the same beginning."""

    def __init__(self, *, config: ModernBertConfig) -> None:
        super().__init__(config=config)
        self.mean = config.classifier_pooling == "mean"
        self.classifier = Classifier(config=config, labels=1)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> BertLogits:
        """Return logits [b c]; here every input is [b c s]."""
        mask = None if attention_mask is None else attention_mask.flatten(0, 1)  # [(b c) s]
        encoded = self.bert(
            input_ids.flatten(0, 1),
            mask,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        hidden = encoded.last_hidden_state  # [(b c) s e]
        pooled = mean(hidden, mask) if self.mean else first(hidden, mask)  # [(b c) e]
        logits = self.classifier(self.head(pooled)).view(input_ids.shape[:2])  # [b c]
        return BertLogits(logits, encoded.hidden_states, encoded.attentions)


class ModernBertForQuestionAnswering(ModernBertWithHead[BertSpanOutput]):
    """Where in the text the answer starts and where it ends."""

    def __init__(self, *, config: ModernBertConfig) -> None:
        super().__init__(config=config)
        self.classifier = Classifier(config=config, labels=2)

    def read(self, encoded: BertOutput, attention_mask: Tensor | None) -> BertSpanOutput:
        """Logits [b s] for the answer's first token and [b s] for its last."""
        start_logits, end_logits = self.classifier(self.head(encoded.last_hidden_state)).unbind(-1)  # [b s], [b s]
        return BertSpanOutput(start_logits, end_logits, encoded.hidden_states, encoded.attentions)
