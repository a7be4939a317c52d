"""Pre-norm BERTs, written by hand: RoBERTa-PreLayerNorm and Megatron-BERT.

In BERT the norm comes after each addition; here it comes before each part, x + part(norm(x)), and once more after all
layers. The residual stream then runs through the model untouched, and deep models train without a warm-up.

Papers: Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture" (figure 1); Ott et al. 2019,
"fairseq" (``--encoder-normalize-before``, which is RoBERTa-PreLayerNorm); Shoeybi et al. 2019, "Megatron-LM" (section
5.3 and figure 7: BERT grows deeper only this way). Shape letters are those of ``bert.py``.

>>> import torch
>>> config = BertConfig(
...     vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
... )
>>> PreNormBert(config=config).eval()(torch.tensor([[1, 7, 9, 2], [1, 5, 8, 2]])).last_hidden_state.shape
torch.Size([2, 4, 8])
"""

from __future__ import annotations

from torch import Tensor, nn

from porting.models.bert import Bert, BertAttention, BertEmbeddings
from porting.models.bert_config import ACTIVATIONS, BertConfig
from porting.models.bert_heads import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from porting.models.roberta import RobertaForSequenceClassification
from porting.models.unpadded import Rows

__all__ = [
    "MegatronBert",
    "MegatronBertForMaskedLM",
    "MegatronBertForMultipleChoice",
    "MegatronBertForNextSentencePrediction",
    "MegatronBertForPreTraining",
    "MegatronBertForQuestionAnswering",
    "MegatronBertForSequenceClassification",
    "MegatronBertForTokenClassification",
    "PreNormBert",
    "PreNormBertForMaskedLM",
    "PreNormBertForMultipleChoice",
    "PreNormBertForQuestionAnswering",
    "PreNormBertForSequenceClassification",
    "PreNormBertForTokenClassification",
]


class PreNormLayer(nn.Module):
    """One encoder layer: attention, then a feed-forward network, each x -> x + dropout(part(norm(x)))."""

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = BertAttention(config=config)
        self.intermediate_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACTIVATIONS[config.hidden_act]()
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, hidden: Tensor, bias: Tensor | Rows | None = None, *, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [b s e], bias [b 1 1 s] -> hidden states [b s e], probabilities [b h s s] or None."""
        normed = self.attention_norm(hidden)  # [b s e]
        attended, probabilities = self.attention(normed, bias, output_attentions=output_attentions)  # [b s e]
        hidden = hidden + self.dropout(attended)  # [b s e]
        expanded = self.activation(self.intermediate(self.intermediate_norm(hidden)))  # [b s f]
        hidden = hidden + self.dropout(self.output(expanded))  # [b s e]
        return hidden, probabilities


class PreNormBert(Bert):
    """The encoder: BERT with pre-norm layers and a last norm after them."""

    layer_class = PreNormLayer

    def __init__(self, *, config: BertConfig, pooler: bool = True) -> None:
        super().__init__(config=config, pooler=pooler)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def encode(
        self, hidden: Tensor, bias: Tensor | Rows | None, *, output_hidden_states: bool, output_attentions: bool
    ) -> tuple[Tensor, tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
        """As in ``Bert``, and the last norm; ``hidden_states`` are the residual stream, before it."""
        hidden, hidden_states, attentions = super().encode(
            hidden, bias, output_hidden_states=output_hidden_states, output_attentions=output_attentions
        )
        return self.norm(hidden), hidden_states, attentions


class PreNormBertForMaskedLM(BertForMaskedLM):
    """Masked language modelling."""

    encoder_class = PreNormBert


class PreNormBertForSequenceClassification(RobertaForSequenceClassification):
    """One label for the whole input."""

    encoder_class = PreNormBert


class PreNormBertForTokenClassification(BertForTokenClassification):
    """One label for each token."""

    encoder_class = PreNormBert


class PreNormBertForMultipleChoice(BertForMultipleChoice):
    """The best of c continuations."""

    encoder_class = PreNormBert


class PreNormBertForQuestionAnswering(BertForQuestionAnswering):
    """Where in the text the answer starts and where it ends."""

    encoder_class = PreNormBert


class MegatronEmbeddings(BertEmbeddings):
    """BERT's embeddings without a norm: the first layer begins with one."""

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__(config=config)
        self.norm = nn.Identity()


class MegatronBert(PreNormBert):
    """The encoder: pre-norm layers on embeddings that are not normed."""

    embeddings_class = MegatronEmbeddings


class MegatronBertForPreTraining(BertForPreTraining):
    """Both pre-training tasks: masked language modelling and next sentence prediction."""

    encoder_class = MegatronBert


class MegatronBertForMaskedLM(BertForMaskedLM):
    """Masked language modelling."""

    encoder_class = MegatronBert


class MegatronBertForNextSentencePrediction(BertForNextSentencePrediction):
    """Does sentence B follow sentence A."""

    encoder_class = MegatronBert


class MegatronBertForSequenceClassification(BertForSequenceClassification):
    """One label for the whole input."""

    encoder_class = MegatronBert


class MegatronBertForTokenClassification(BertForTokenClassification):
    """One label for each token."""

    encoder_class = MegatronBert


class MegatronBertForMultipleChoice(BertForMultipleChoice):
    """The best of c continuations."""

    encoder_class = MegatronBert


class MegatronBertForQuestionAnswering(BertForQuestionAnswering):
    """Where in the text the answer starts and where it ends."""

    encoder_class = MegatronBert
