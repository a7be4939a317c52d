"""A causal language model on ``torch.nn.TransformerEncoder``: it reads from left to right and predicts the next token.

Papers: Vaswani et al. 2017, "Attention Is All You Need" (a bare section number is one of its sections); Radford et al.
2018, "Improving Language Understanding by Generative Pre-Training", the first to show what such a model learns.
Written as PyTorch's tutorial on language modelling writes it: the sequence comes first, embeddings are multiplied by
sqrt(e), positions are sines and cosines in a buffer, the layers are PyTorch's own.

Shapes stand beside the tensors, in these letters:

    s sequence   b batch   e hidden_size   f intermediate_size   v vocab_size

>>> config = LanguageModelConfig(
...     vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
... )
>>> model = LanguageModel(config=config).eval()
>>> input_ids = torch.tensor([[1, 5], [7, 2], [9, 0]])  # two texts, a column each; the second is padded
>>> model(input_ids, attention_mask=input_ids != 0).shape
torch.Size([3, 2, 30])
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.models import checks
from porting.models.bert_config import ACTIVATIONS
from porting.models.encoder import check_mask
from porting.models.positions import sinusoidal_positions

__all__ = ["LanguageModel", "LanguageModelConfig"]


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """The hyperparameters of a language model.

    Attributes:
        vocab_size: number of tokens in the vocabulary.
        hidden_size: width of the residual stream; even, and a multiple of ``num_attention_heads``.
        num_hidden_layers: number of layers.
        num_attention_heads: attention heads in each layer.
        intermediate_size: width of the feed-forward network inside a layer; None means ``4 * hidden_size``.
        hidden_act: its activation, a key of :data:`porting.models.bert_config.ACTIVATIONS`.
        max_position_embeddings: the longest sequence, in tokens.
        norm_first: True = pre-norm, x + part(norm(x)); False = post-norm, norm(x + part(x)).
        final_norm: a last LayerNorm after all layers; pre-norm models need one.
        layer_norm_eps: added to the variance inside every LayerNorm.
        tie_word_embeddings: True = the output matrix is the embedding table, multiplied by sqrt(e) as in the
            input; there is no bias. False = a linear layer of its own.
        dropout: after the embeddings and in the four places where PyTorch's layer has one.
        initializer_range: standard deviation of freshly drawn weights.

    Raises:
        ValueError: if a field is out of its range; one line for each such field.

    >>> LanguageModelConfig(hidden_size=9, num_attention_heads=3, hidden_act="geluu")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: LanguageModelConfig has 2 faults:
      hidden_act='geluu': did you mean 'gelu'? expected gelu, gelu_new, ...
      hidden_size=9: expected an even number, for a sine and a cosine of each frequency
    """

    vocab_size: int = 28782
    hidden_size: int = 200
    num_hidden_layers: int = 2
    num_attention_heads: int = 2
    intermediate_size: int | None = None
    hidden_act: str = "relu"
    max_position_embeddings: int = 5000
    norm_first: bool = False
    final_norm: bool = False
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    dropout: float = 0.2
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        faults = [
            *checks.sizes(self, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
            *checks.sizes(self, *([] if self.intermediate_size is None else ["intermediate_size"])),
            *checks.sizes(self, "max_position_embeddings"),
            *checks.divides(self, "hidden_size", "num_attention_heads"),
            *checks.one_of(self, "hidden_act", ACTIVATIONS),
            *checks.even(self, "hidden_size"),
            *checks.positive(self, "layer_norm_eps", "initializer_range"),
            *checks.probabilities(self, "dropout"),
        ]
        checks.refuse(self, faults)


class PositionalEncoding(nn.Module):
    """Add the position encoding to each embedding (section 3.5).

    The table is a buffer: it is saved with the model, and an optimizer leaves it as it is. A model whose positions were
    learned has them here.
    """

    table: Tensor

    def __init__(self, *, config: LanguageModelConfig) -> None:
        super().__init__()
        table = sinusoidal_positions(config.max_position_embeddings, config.hidden_size)  # [longest e]
        self.register_buffer("table", table[:, None])  # [longest 1 e]
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, embedded: Tensor) -> Tensor:
        """Embeddings [s b e] -> embeddings with positions [s b e]."""
        hidden: Tensor = self.dropout(embedded + self.table[: len(embedded)])  # [s b e]
        return hidden


class LanguageModel(nn.Module):
    """Embeddings, positions, layers, and logits for the next token."""

    def __init__(self, *, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.positions = PositionalEncoding(config=config)
        layer = nn.TransformerEncoderLayer(
            d_model=width,
            nhead=config.num_attention_heads,
            dim_feedforward=4 * width if config.intermediate_size is None else config.intermediate_size,
            dropout=config.dropout,
            # A module, so that hooks see its output.  In inference PyTorch may run a whole layer as one operation,
            # which takes any nn.GELU for the exact one; it never does so with the sequence first.
            activation=ACTIVATIONS[config.hidden_act](),
            layer_norm_eps=config.layer_norm_eps,
            norm_first=config.norm_first,
        )
        norm = nn.LayerNorm(width, eps=config.layer_norm_eps) if config.final_norm else None
        self.encoder = nn.TransformerEncoder(layer, config.num_hidden_layers, norm=norm, enable_nested_tensor=False)
        self.head = None if config.tie_word_embeddings else nn.Linear(width, config.vocab_size)
        initialize(self)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Compute the logits of the next token at every position, from it and the tokens before it.

        Args:
            input_ids: [s b], integer: a column is a text.
            attention_mask: [s b], any dtype, 1 or True = attend, 0 or False = padding; None = no padding.

        Returns:
            Logits [s b v]; those of the last token are for the one that is not there yet.

        Raises:
            ValueError: if a text is longer than the position table, or the mask not shaped like the ids.
        """
        length, longest = len(input_ids), len(self.positions.table)
        if length > longest:
            raise ValueError(f"input_ids has {length} tokens a column; max_position_embeddings allows {longest}")
        check_mask(input_ids, attention_mask)
        scale = math.sqrt(self.config.hidden_size)
        hidden = self.positions(self.embedding(input_ids) * scale)  # [s b e]
        hidden = self.encoder(
            hidden,
            mask=nn.Transformer.generate_square_subsequent_mask(length, device=hidden.device, dtype=hidden.dtype),
            src_key_padding_mask=None if attention_mask is None else padding_bias(attention_mask, dtype=hidden.dtype),
            is_causal=True,
        )  # [s b e]
        if self.head is None:
            return F.linear(hidden * scale, self.embedding.weight)  # [s b v], = hidden (weight * scale)^T
        logits: Tensor = self.head(hidden)  # [s b v]
        return logits


def padding_bias(attention_mask: Tensor, *, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of a key: 0 for one to attend to, a huge negative number for padding.

    Not -inf, which the causal mask has: a text that is padded on the left begins with tokens that see padding alone,
    and of a row of -inf softmax is undefined. So the first token attends to itself, whatever it is.

    Args:
        attention_mask: [s b], any dtype, 1 or True = attend.
        dtype: the floating dtype of the scores.

    Returns:
        [b s], as PyTorch's layers take it.
    """
    padded = attention_mask.logical_not().transpose(0, 1)  # [b s]
    return torch.zeros(padded.shape, dtype=dtype, device=padded.device).masked_fill(padded, torch.finfo(dtype).min / 2)


def initialize(model: LanguageModel) -> None:
    """Draw the weights from a normal distribution; biases are 0, LayerNorm gains 1.

    PyTorch's encoder is made of copies of one layer: each is initialised separately. Embeddings that are tied are drawn
    smaller by sqrt(e), since they are multiplied by it where they come in and where they go out.
    """
    std = model.config.initializer_range
    for name, weight in model.named_parameters():
        if weight.is_meta:
            continue
        if weight.dim() > 1:
            tied = weight is model.embedding.weight and model.head is None
            nn.init.normal_(weight, std=std / math.sqrt(model.config.hidden_size) if tied else std)
        elif name.endswith("bias"):
            nn.init.zeros_(weight)
