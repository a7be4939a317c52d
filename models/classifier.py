"""A small text classifier that returns its attention probabilities.

Papers: Vaswani et al. 2017, "Attention Is All You Need": embeddings times sqrt(d) (section 3.4), sinusoidal positions
(section 3.5), ReLU in the feed-forward network (section 3.3); the norms come first, as in Xiong et al. 2020, "On Layer
Normalization in the Transformer Architecture". As it is usually drawn there are two blocks of one head; any number of
both can be had.

Shapes stand beside the tensors, in these letters:

    b batch   s sequence   e hidden_size   h heads   f intermediate_size

>>> import torch
>>> config = ClassifierConfig(vocab_size=30, hidden_size=8, intermediate_size=16, num_labels=3)
>>> classifier = Classifier(config=config).eval()
>>> input_ids = torch.tensor([[1, 7, 9, 2], [1, 5, 2, 0]])
>>> logits, attentions = classifier(input_ids, attention_mask=input_ids != 0)
>>> logits.shape, len(attentions), attentions[0].shape
(torch.Size([2, 3]), 2, torch.Size([2, 1, 4, 4]))
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from porting.models import checks
from porting.models.attention import SeparateAttention
from porting.models.encoder import check_mask
from porting.models.positions import sinusoidal_positions

__all__ = ["Classifier", "ClassifierConfig", "ClassifierEncoder", "ClassifierOutput"]


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """The hyperparameters of a classifier.

    Attributes:
        vocab_size: number of tokens in the vocabulary.
        hidden_size: width of the residual stream; even, and a multiple of ``num_attention_heads``.
        num_hidden_layers: number of blocks.
        num_attention_heads: attention heads in each block.
        intermediate_size: width of the feed-forward network inside a block.
        max_position_embeddings: the longest sequence, in tokens.
        layer_norm_eps: added to the variance inside every LayerNorm.
        final_norm: a last LayerNorm after all blocks.
        dropout: after the embeddings, on the attention probabilities and before each residual addition.
        pad_token_id: the token whose embedding is 0 and stays so; None: no such token.
        num_labels: classes.

    Raises:
        ValueError: if a field is out of its range; one line for each such field.

    >>> ClassifierConfig(hidden_size=9, dropout=1.5)
    Traceback (most recent call last):
    ...
    ValueError: ClassifierConfig has 2 faults:
      hidden_size=9: expected an even number, for a sine and a cosine of each frequency
      dropout=1.5: expected a probability, from 0 to 1
    """

    vocab_size: int = 30522
    hidden_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 1
    intermediate_size: int = 512
    max_position_embeddings: int = 512
    layer_norm_eps: float = 1e-5
    final_norm: bool = False
    dropout: float = 0.1
    pad_token_id: int | None = 0
    num_labels: int = 2

    def __post_init__(self) -> None:
        faults = [
            *checks.sizes(self, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
            *checks.sizes(self, "intermediate_size", "max_position_embeddings", "num_labels"),
            *checks.divides(self, "hidden_size", "num_attention_heads"),
        ]
        if not faults and self.hidden_size % 2:
            expected = "an even number, for a sine and a cosine of each frequency"
            faults.append(f"hidden_size={self.hidden_size}: expected {expected}")
        faults += checks.positive(self, "layer_norm_eps")
        faults += checks.probabilities(self, "dropout")
        faults += checks.padding_token(self)
        checks.refuse(self, faults)


class ClassifierEmbeddings(nn.Module):
    """Token embeddings times sqrt(e), so that the positions do not drown them, plus the positions (section 3.4)."""

    positions: Tensor

    def __init__(self, *, config: ClassifierConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        table = sinusoidal_positions(config.max_position_embeddings, config.hidden_size)  # [longest e]
        self.register_buffer("positions", table)  # saved, and an optimizer leaves it as it is
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Ids [b s] -> embeddings [b s e].

        Raises:
            ValueError: if a row is longer than the position table.
        """
        length, longest = input_ids.shape[-1], len(self.positions)
        if length > longest:
            raise ValueError(f"input_ids has {length} tokens a row; max_position_embeddings allows {longest}")
        scaled = self.token(input_ids) * math.sqrt(self.token.embedding_dim)  # [b s e]
        hidden: Tensor = self.dropout(scaled + self.positions[:length])  # [b s e]
        return hidden


class ClassifierBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, *, config: ClassifierConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = SeparateAttention(
            hidden_size=config.hidden_size, num_attention_heads=config.num_attention_heads, dropout=config.dropout
        )
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = nn.ReLU()
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Hidden states [b s e], mask [b s] -> hidden states [b s e], probabilities [b h s s]."""
        attended, probabilities = self.attention(self.attention_norm(hidden), mask)  # [b s e], [b h s s]
        hidden = hidden + self.dropout(attended)
        expanded = self.activation(self.intermediate(self.feed_forward_norm(hidden)))  # [b s f]
        return hidden + self.dropout(self.output(expanded)), probabilities


class ClassifierEncoder(nn.Module):
    """The embeddings and the blocks: what a pretrained encoder has, and a classifier is put on."""

    def __init__(self, *, config: ClassifierConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = ClassifierEmbeddings(config=config)
        self.blocks = nn.ModuleList([ClassifierBlock(config=config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.final_norm else None
        initialize(self)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Ids [b s], mask [b s] -> hidden states [b s e], every block's probabilities before dropout [b h s s].

        Raises:
            ValueError: if a row is longer than the position table, or the mask not shaped like the ids.
        """
        check_mask(input_ids, attention_mask)
        hidden = self.embeddings(input_ids)  # [b s e]
        attentions: tuple[Tensor, ...] = ()
        for block in self.blocks:
            hidden, probabilities = block(hidden, attention_mask)  # [b s e], [b h s s]
            attentions += (probabilities,)
        if self.norm is not None:
            hidden = self.norm(hidden)  # [b s e]
        return hidden, attentions


class ClassifierOutput(NamedTuple):
    """What :class:`Classifier` returns."""

    logits: Tensor  # [b num_labels]
    attentions: tuple[Tensor, ...]  # every block's probabilities before dropout: [b h s s] each


class Classifier(nn.Module):
    """The encoder, and a linear layer on the first token."""

    def __init__(self, *, config: ClassifierConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = ClassifierEncoder(config=config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        initialize(self.classifier)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> ClassifierOutput:
        """Classify a batch.

        Args:
            input_ids: [b s], integer.
            attention_mask: [b s], any dtype, 1 or True = attend, 0 or False = padding; None = no padding.

        Raises:
            ValueError: if a row is longer than the position table, or the mask not shaped like the ids.
        """
        hidden, attentions = self.encoder(input_ids, attention_mask)  # [b s e], [b h s s] each
        return ClassifierOutput(self.classifier(hidden[:, 0]), attentions)


def initialize(module: nn.Module) -> None:
    """Draw the weights: Glorot's uniform distribution for matrices, e^-0.5 for tokens, which sqrt(e) makes 1."""
    for part in module.modules():
        if isinstance(part, nn.Linear) and not part.weight.is_meta:
            nn.init.xavier_uniform_(part.weight)
            nn.init.zeros_(part.bias)
        if isinstance(part, nn.Embedding) and not part.weight.is_meta:
            nn.init.normal_(part.weight, std=part.embedding_dim**-0.5)
            if part.padding_idx is not None:
                nn.init.zeros_(part.weight[part.padding_idx])
