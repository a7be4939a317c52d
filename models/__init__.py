"""Handwritten models in pure torch, to be read. They import nothing of the engine that loads them.

Each architecture is a file. The names here are its model and its config, and BERT's heads; the other heads are in
their files. A file is imported when one of its names is first used.

    bert, bert_heads                  BERT; begin here
    roberta, distilbert, albert,      its relatives, which replace some of BERT's parts
      electra, mpnet, prenorm_bert, bert_generation
    modern_bert, modern_bert_heads    the current encoder: rotary positions, local attention, gated activations
    unpadded                          computing without padding, for BERT and its relatives
    attention                         multi-head attention in four weight layouts
    encoder, torch_encoder            the textbook encoder in these layouts, and on PyTorch's own layers
    classifier                        a small classifier that returns its attention probabilities
    language_model                    a causal language model on PyTorch's layers, sequence first
    seq2seq, seq2seq_search           an encoder-decoder, and its greedy and beam search
    positions                         sinusoidal positions, which the last three add to their embeddings

>>> from porting import models
>>> models.Encoder.__module__
'porting.models.encoder'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from porting.models.albert import Albert, AlbertConfig
    from porting.models.bert import Bert, BertOutput
    from porting.models.bert_config import BertConfig
    from porting.models.bert_generation import BertGeneration
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
    from porting.models.classifier import Classifier, ClassifierConfig
    from porting.models.distilbert import DistilBert
    from porting.models.electra import Electra, ElectraConfig
    from porting.models.encoder import Encoder, EncoderConfig
    from porting.models.language_model import LanguageModel, LanguageModelConfig
    from porting.models.modern_bert import ModernBert
    from porting.models.modern_bert_config import ModernBertConfig
    from porting.models.mpnet import MPNet
    from porting.models.prenorm_bert import MegatronBert, PreNormBert
    from porting.models.seq2seq import Seq2Seq
    from porting.models.seq2seq_config import Seq2SeqConfig
    from porting.models.torch_encoder import TorchEncoder

__all__ = [
    "Albert",
    "AlbertConfig",
    "Bert",
    "BertConfig",
    "BertForMaskedLM",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertGeneration",
    "BertLogits",
    "BertOutput",
    "BertPreTrainingOutput",
    "BertSpanOutput",
    "Classifier",
    "ClassifierConfig",
    "DistilBert",
    "Electra",
    "ElectraConfig",
    "Encoder",
    "EncoderConfig",
    "LanguageModel",
    "LanguageModelConfig",
    "MPNet",
    "MegatronBert",
    "ModernBert",
    "ModernBertConfig",
    "PreNormBert",
    "Seq2Seq",
    "Seq2SeqConfig",
    "TorchEncoder",
]

_MODULES = {
    "albert": (
        "Albert",
        "AlbertConfig",
    ),
    "bert": (
        "Bert",
        "BertOutput",
    ),
    "bert_config": ("BertConfig",),
    "bert_generation": ("BertGeneration",),
    "bert_heads": (
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
    ),
    "classifier": (
        "Classifier",
        "ClassifierConfig",
    ),
    "distilbert": ("DistilBert",),
    "electra": (
        "Electra",
        "ElectraConfig",
    ),
    "encoder": (
        "Encoder",
        "EncoderConfig",
    ),
    "language_model": (
        "LanguageModel",
        "LanguageModelConfig",
    ),
    "modern_bert": ("ModernBert",),
    "modern_bert_config": ("ModernBertConfig",),
    "mpnet": ("MPNet",),
    "prenorm_bert": (
        "MegatronBert",
        "PreNormBert",
    ),
    "seq2seq": ("Seq2Seq",),
    "seq2seq_config": ("Seq2SeqConfig",),
    "torch_encoder": ("TorchEncoder",),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
