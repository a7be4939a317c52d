"""Models written by hand: pure torch, to be read. They import nothing of the engine that loads them."""

from porting.models.bert import Bert, BertOutput
from porting.models.bert_config import BertConfig
from porting.models.bert_heads import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertLogits,
    BertPreTrainingOutput,
    BertSpanOutput,
)

__all__ = [
    "Bert",
    "BertConfig",
    "BertForMaskedLM",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertLogits",
    "BertOutput",
    "BertPreTrainingOutput",
    "BertSpanOutput",
]
