"""The hyperparameters of an encoder-decoder, checked when they are written down."""

from __future__ import annotations

from dataclasses import dataclass

from porting.models import checks
from porting.models.bert_config import ACTIVATIONS

__all__ = ["Seq2SeqConfig"]


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig:
    """The hyperparameters of an encoder-decoder. The defaults are the base model's of Vaswani et al. 2017, table 3.

    Attributes:
        vocab_size: number of tokens; source and target share them.
        hidden_size: width of the residual stream; even, and a multiple of the numbers of heads.
        num_encoder_layers: number of encoder layers.
        num_decoder_layers: number of decoder layers.
        encoder_attention_heads: attention heads in each encoder layer.
        decoder_attention_heads: attention heads in each of a decoder layer's two attentions.
        encoder_intermediate_size: width of the feed-forward network inside an encoder layer.
        decoder_intermediate_size: width of the feed-forward network inside a decoder layer.
        hidden_act: the feed-forward networks' activation, a key of :data:`porting.models.bert_config.ACTIVATIONS`.
        max_position_embeddings: the longest sequence on either side, in tokens.
        scale_embeddings: whether embeddings are multiplied by sqrt(hidden_size), as in the paper.
        embedding_norm: a LayerNorm after embeddings and positions, which the paper does not have.
        layer_norm_eps: added to the variance inside every LayerNorm.
        dropout: after the embeddings and before each residual addition.
        attention_dropout: on the attention probabilities.
        activation_dropout: after the feed-forward networks' activation.
        pad_token_id: the token that fills up short rows; a search writes it behind the end.
        decoder_start_token_id: the token that the decoder begins with.
        eos_token_id: the token that ends a sequence.

    Raises:
        ValueError: if a field is out of its range; one line for each such field.

    >>> Seq2SeqConfig(decoder_attention_heads=7, eos_token_id=40000)
    Traceback (most recent call last):
    ...
    ValueError: Seq2SeqConfig has 2 faults:
      hidden_size=512: expected a multiple of decoder_attention_heads=7
      eos_token_id=40000: expected a token, from 0 to vocab_size - 1
    """

    vocab_size: int = 37000
    hidden_size: int = 512
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    encoder_attention_heads: int = 8
    decoder_attention_heads: int = 8
    encoder_intermediate_size: int = 2048
    decoder_intermediate_size: int = 2048
    hidden_act: str = "relu"
    max_position_embeddings: int = 512
    scale_embeddings: bool = True
    embedding_norm: bool = False
    layer_norm_eps: float = 1e-5
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    pad_token_id: int = 0
    decoder_start_token_id: int = 1
    eos_token_id: int = 2

    def __post_init__(self) -> None:
        faults = [
            *checks.sizes(self, "vocab_size", "hidden_size", "num_encoder_layers", "num_decoder_layers"),
            *checks.sizes(self, "encoder_attention_heads", "decoder_attention_heads"),
            *checks.sizes(self, "encoder_intermediate_size", "decoder_intermediate_size", "max_position_embeddings"),
            *checks.divides(self, "hidden_size", "encoder_attention_heads"),
            *checks.divides(self, "hidden_size", "decoder_attention_heads"),
            *checks.even(self, "hidden_size"),
            *checks.one_of(self, "hidden_act", ACTIVATIONS),
            *checks.positive(self, "layer_norm_eps"),
            *checks.probabilities(self, "dropout", "attention_dropout", "activation_dropout"),
            *checks.tokens(self, "pad_token_id", "decoder_start_token_id", "eos_token_id"),
        ]
        checks.refuse(self, faults)
