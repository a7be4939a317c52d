"""BERT's heads: the encoder of ``bert.py`` with what turns its output into logits.

First the two pre-training tasks (Devlin et al. 2019, section 3.1), together and each alone, then four kinds
of fine-tuning (section 3.2). Reference: google-research/bert, ``run_pretraining.py``, ``run_classifier.py``,
``run_squad.py``. Inputs, shape letters and paper are as in ``bert.py``.

>>> config = BertConfig(
...     vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
... )
>>> model = BertForPreTraining(config=config).eval()
>>> output = model(torch.tensor([[1, 7, 9, 2], [1, 5, 8, 2]]))
>>> output.mlm_logits.shape, output.nsp_logits.shape
(torch.Size([2, 4, 30]), torch.Size([2, 2]))
"""

from __future__ import annotations

from typing import ClassVar, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.models.bert import Bert, BertOutput, initialize
from porting.models.bert_config import ACTIVATIONS, BertConfig

__all__ = [
    "BertForMaskedLM",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertLogits",
    "BertPreTrainingOutput",
    "BertSpanOutput",
    "BertWithHead",
]


class BertMaskedLMHead(nn.Module):
    """Compute the score of every token of the vocabulary at every position (``get_masked_lm_output`` in the reference).

    The output matrix is the token embedding table itself. It is passed to ``forward``, so the model has one
    parameter, not two that must be kept equal.
    """

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.hidden_act]()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.empty(config.vocab_size))

    def forward(self, hidden: Tensor, word_embeddings: Tensor) -> Tensor:
        """Hidden states [b s e] and the token embedding table [v e] -> logits [b s v]."""
        hidden = self.norm(self.activation(self.dense(hidden)))  # [b s e]
        return F.linear(hidden, word_embeddings, self.bias)  # [b s v]


class BertPreTrainingOutput(NamedTuple):
    """What :class:`BertForPreTraining` returns."""

    mlm_logits: Tensor  # [b s v]
    nsp_logits: Tensor  # [b 2], class 0 = sentence B follows A, class 1 = it does not
    hidden_states: tuple[Tensor, ...] | None = None  # as in BertOutput
    attentions: tuple[Tensor, ...] | None = None


class BertLogits(NamedTuple):
    """What the models with one kind of logits return; each model's ``read`` says their shape."""

    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None  # as in BertOutput
    attentions: tuple[Tensor, ...] | None = None


class BertSpanOutput(NamedTuple):
    """What :class:`BertForQuestionAnswering` returns."""

    start_logits: Tensor  # [b s]
    end_logits: Tensor  # [b s]
    hidden_states: tuple[Tensor, ...] | None = None  # as in BertOutput
    attentions: tuple[Tensor, ...] | None = None


Output = TypeVar("Output")


class BertWithHead(nn.Module, Generic[Output]):
    """The encoder with a head: a subclass adds the head's parts and :meth:`read`.

    Args:
        config: the hyperparameters.
        pooler: whether the head needs one.
    """

    encoder_class: ClassVar[type[Bert]] = Bert

    def __init__(self, *, config: BertConfig, pooler: bool) -> None:
        super().__init__()
        self.bert = self.encoder_class(config=config, pooler=pooler)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> Output:
        """Encode a batch, and compute the logits; the inputs are those of ``bert.py``."""
        encoded: BertOutput = self.bert(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        return self.read(encoded)

    def read(self, encoded: BertOutput) -> Output:
        """The logits of what was encoded, with its hidden states and attentions."""
        raise NotImplementedError


class BertForPreTraining(BertWithHead[BertPreTrainingOutput]):
    """Both pre-training tasks: masked language modelling and next sentence prediction (section 3.1)."""

    head_class: ClassVar[type[BertMaskedLMHead]] = BertMaskedLMHead

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__(config=config, pooler=True)
        self.mlm = self.head_class(config=config)
        self.nsp = nn.Linear(config.hidden_size, 2)
        initialize(nn.ModuleList([self.mlm, self.nsp]), std=config.initializer_range)

    def read(self, encoded: BertOutput) -> BertPreTrainingOutput:
        """The MLM and the NSP logits."""
        mlm_logits = encoded.at_tokens(self.mlm, self.bert.embeddings.word.weight)  # [b s v]
        nsp_logits = self.nsp(encoded.pooled)  # [b 2]
        return BertPreTrainingOutput(mlm_logits, nsp_logits, encoded.hidden_states, encoded.attentions)


class BertForMaskedLM(BertWithHead[BertLogits]):
    """Masked language modelling (section 3.1, task 1)."""

    head_class: ClassVar[type[BertMaskedLMHead]] = BertMaskedLMHead

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__(config=config, pooler=False)
        self.mlm = self.head_class(config=config)
        initialize(self.mlm, std=config.initializer_range)

    def read(self, encoded: BertOutput) -> BertLogits:
        """Logits [b s v]."""
        logits = encoded.at_tokens(self.mlm, self.bert.embeddings.word.weight)  # [b s v]
        return BertLogits(logits, encoded.hidden_states, encoded.attentions)


class BertForNextSentencePrediction(BertWithHead[BertLogits]):
    """Does sentence B follow sentence A (section 3.1, task 2)."""

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__(config=config, pooler=True)
        self.nsp = nn.Linear(config.hidden_size, 2)
        initialize(self.nsp, std=config.initializer_range)

    def read(self, encoded: BertOutput) -> BertLogits:
        """Logits [b 2]: class 0 = B follows A, class 1 = it does not."""
        return BertLogits(self.nsp(encoded.pooled), encoded.hidden_states, encoded.attentions)  # [b 2]


class BertForSequenceClassification(BertWithHead[BertLogits]):
    """One label for the whole input (section 4.1)."""

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__(config=config, pooler=True)
        self.dropout = nn.Dropout(config.classifier_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        initialize(self.classifier, std=config.initializer_range)

    def read(self, encoded: BertOutput) -> BertLogits:
        """Logits [b num_labels]."""
        logits = self.classifier(self.dropout(encoded.pooled))  # [b num_labels]
        return BertLogits(logits, encoded.hidden_states, encoded.attentions)


class BertForTokenClassification(BertWithHead[BertLogits]):
    """One label for each token (section 5.3)."""

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__(config=config, pooler=False)
        self.dropout = nn.Dropout(config.classifier_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        initialize(self.classifier, std=config.initializer_range)

    def read(self, encoded: BertOutput) -> BertLogits:
        """Logits [b s num_labels]."""
        logits = self.classifier(self.dropout(encoded.last_hidden_state))  # [b s num_labels]
        return BertLogits(logits, encoded.hidden_states, encoded.attentions)


class BertForMultipleChoice(BertWithHead[BertLogits]):
    """The best of c continuations, each encoded with the same beginning (section 4.4)."""

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__(config=config, pooler=True)
        self.dropout = nn.Dropout(config.classifier_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, 1)
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
        """Return logits [b c]; here every input is [b c s]."""
        inputs = (input_ids, attention_mask, token_type_ids, position_ids)
        rows = (None if ids is None else ids.flatten(0, 1) for ids in inputs)  # [(b c) s] each
        encoded = self.bert(*rows, output_hidden_states=output_hidden_states, output_attentions=output_attentions)
        logits = self.classifier(self.dropout(encoded.pooled)).view(input_ids.shape[:2])  # [b c]
        return BertLogits(logits, encoded.hidden_states, encoded.attentions)


class BertForQuestionAnswering(BertWithHead[BertSpanOutput]):
    """Where in the text the answer starts and where it ends (section 4.2)."""

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__(config=config, pooler=False)
        self.span = nn.Linear(config.hidden_size, 2)
        initialize(self.span, std=config.initializer_range)

    def read(self, encoded: BertOutput) -> BertSpanOutput:
        """Logits [b s] for the answer's first token and [b s] for its last."""
        start_logits, end_logits = self.span(encoded.last_hidden_state).unbind(-1)  # [b s], [b s]
        return BertSpanOutput(start_logits, end_logits, encoded.hidden_states, encoded.attentions)
