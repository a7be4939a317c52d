"""The transformer encoder as textbooks write it: head by head, pre-norm or post-norm, with a classifier on top.

Papers: Vaswani et al. 2017, "Attention Is All You Need" (a bare section number is one of its sections); Devlin et al.
2019, "BERT" (learned positions, GELU, a norm on the embeddings); Xiong et al. 2020, "On Layer Normalization in the
Transformer Architecture" (pre-norm against post-norm, figure 1).

Classes stand in the order of the forward pass. Shapes stand beside the tensors, in these letters:

    b batch   s sequence   e hidden_size   h heads   d head size, e = h d   f intermediate_size   v vocab_size

Every model takes the same inputs:

    input_ids       [b s]  integer; token ids
    attention_mask  [b s]  any dtype; 1 or True = attend, 0 or False = padding; None = no padding

There is one kind of segment: a checkpoint with token types is loaded for texts of the first kind, whose row a table
adds to every position.

>>> config = EncoderConfig(
...     vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
... )
>>> encoder = Encoder(config=config).eval()
>>> input_ids = torch.tensor([[1, 7, 9, 2], [1, 5, 2, 0]])
>>> output = encoder(input_ids, attention_mask=input_ids != 0, output_attentions=True)
>>> output.last_hidden_state.shape, output.attentions[0].shape
(torch.Size([2, 4, 8]), torch.Size([2, 2, 4, 4]))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from porting.models import checks
from porting.models.attention import LAYOUTS
from porting.models.positions import counted_positions

__all__ = [
    "Encoder",
    "EncoderConfig",
    "EncoderEmbeddings",
    "EncoderForSequenceClassification",
    "EncoderLogits",
    "EncoderOutput",
]


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The hyperparameters of an encoder. The defaults are BERT-base's, post-norm and one head after the other.

    Attributes:
        vocab_size: number of tokens in the vocabulary.
        hidden_size: width of the residual stream; a multiple of ``num_attention_heads``.
        num_hidden_layers: number of encoder layers.
        num_attention_heads: attention heads in each layer.
        intermediate_size: width of the feed-forward network inside a layer.
        max_position_embeddings: the longest sequence, in tokens.
        attention: how a layer keeps the weights of its attention, a key of :data:`porting.models.attention.LAYOUTS`.
        norm_first: True = pre-norm, x + part(norm(x)); False = post-norm, norm(x + part(x)).
        final_norm: a last LayerNorm after all layers; pre-norm models need one.
        layer_norm_eps: added to the variance inside every LayerNorm.
        hidden_dropout_prob: dropout after the embeddings, before each residual addition and before the classifier.
        attention_probs_dropout_prob: dropout on the attention probabilities.
        initializer_range: standard deviation of freshly drawn weights.
        pad_token_id: the token whose embedding gets no gradient from the input; None: no such token.
        pooler: whether the classifier first puts token 0 through a linear layer and tanh, as BERT and RoBERTa do.
        num_labels: classes of the classifier.
        padding_position: padding has a position of its own, 0, and the tokens that are not padding are counted from 1,
            as in fairseq's models (RoBERTa, MPNet); so padding in front of a row changes no token's position.

    Raises:
        ValueError: if a field is out of its range; one line for each such field.

    >>> EncoderConfig(hidden_size=100, num_attention_heads=3, attention="fussed")
    Traceback (most recent call last):
    ...
    ValueError: EncoderConfig has 2 faults:
      hidden_size=100: expected a multiple of num_attention_heads=3
      attention='fussed': did you mean 'fused'? expected separate, per_head, fused, interleaved
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 512
    attention: str = "per_head"
    norm_first: bool = False
    final_norm: bool = False
    layer_norm_eps: float = 1e-12
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    initializer_range: float = 0.02
    pad_token_id: int | None = 0
    pooler: bool = False
    num_labels: int = 2
    padding_position: bool = False

    def __post_init__(self) -> None:
        checks.refuse(
            self,
            [
                *checks.sizes(self, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
                *checks.sizes(self, "intermediate_size", "max_position_embeddings", "num_labels"),
                *checks.divides(self, "hidden_size", "num_attention_heads"),
                *checks.one_of(self, "attention", LAYOUTS),
                *checks.probabilities(self, "hidden_dropout_prob", "attention_probs_dropout_prob"),
                *checks.positive(self, "layer_norm_eps", "initializer_range"),
                *checks.padding_token(self),
            ],
        )


class EncoderEmbeddings(nn.Module):
    """The input: what the token is and where it stands, summed, then normed."""

    def __init__(self, *, config: EncoderConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.padding = config.pad_token_id if config.padding_position else None
        self.longest = config.max_position_embeddings
        self.position = nn.Embedding(
            self.longest + config.padding_position,
            config.hidden_size,
            padding_idx=0 if config.padding_position else None,
        )
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def positions(self, input_ids: Tensor) -> Tensor:
        """The position of each token, [1 s], or [b s] where padding is not counted."""
        if self.padding is None:
            return torch.arange(input_ids.shape[-1], device=input_ids.device)[None]
        return counted_positions(input_ids, self.padding)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Ids [b s] -> embeddings [b s e].

        Raises:
            ValueError: if a row is longer than the position table.
        """
        length, longest = input_ids.shape[-1], self.longest
        if length > longest:
            raise ValueError(f"input_ids has {length} tokens a row; max_position_embeddings allows {longest}")
        positions = self.positions(input_ids)  # [1 s] or [b s]
        hidden: Tensor = self.dropout(self.norm(self.token(input_ids) + self.position(positions)))  # [b s e]
        return hidden


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them, the same at every position (section 3.3)."""

    def __init__(self, *, config: EncoderConfig) -> None:
        super().__init__()
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = nn.GELU()
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [b s e] -> [b s f] -> [b s e]."""
        changed: Tensor = self.output(self.activation(self.intermediate(hidden)))  # [b s e]
        return changed


class EncoderLayer(nn.Module):
    """Attention, then a feed-forward network, each with a norm and a way around it (section 3.1; Xiong et al.)."""

    def __init__(self, *, config: EncoderConfig) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.attention = LAYOUTS[config.attention](
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            dropout=config.attention_probs_dropout_prob,
        )
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config=config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Hidden states [b s e], mask [b s] -> hidden states [b s e], probabilities [b h s s]."""
        if self.norm_first:
            attended, probabilities = self.attention(self.attention_norm(hidden), mask)  # [b s e], [b h s s]
            hidden = hidden + self.dropout(attended)
            hidden = hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))
        else:
            attended, probabilities = self.attention(hidden, mask)  # [b s e], [b h s s]
            hidden = self.attention_norm(hidden + self.dropout(attended))
            hidden = self.feed_forward_norm(hidden + self.dropout(self.feed_forward(hidden)))
        return hidden, probabilities


class EncoderOutput(NamedTuple):
    """What :class:`Encoder` returns."""

    last_hidden_state: Tensor  # [b s e]
    attentions: tuple[Tensor, ...] | None = None  # every layer's probabilities before dropout: [b h s s] each


class Encoder(nn.Module):
    """Embeddings, the layers, and a final norm if the config asks for one (section 3.1)."""

    def __init__(self, *, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = EncoderEmbeddings(config=config)
        self.layers = nn.ModuleList([EncoderLayer(config=config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.final_norm else None
        initialize(self, std=config.initializer_range)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, output_attentions: bool = False
    ) -> EncoderOutput:
        """Encode a batch; the module's docstring describes the inputs.

        Raises:
            ValueError: if a row is longer than the position table, or the mask not shaped like the ids.
        """
        check_mask(input_ids, attention_mask)
        hidden = self.embeddings(input_ids)  # [b s e]
        attentions: tuple[Tensor, ...] | None = () if output_attentions else None
        for layer in self.layers:
            hidden, probabilities = layer(hidden, attention_mask)  # [b s e], [b h s s]
            if attentions is not None:
                attentions += (probabilities,)
        if self.norm is not None:
            hidden = self.norm(hidden)  # [b s e]
        return EncoderOutput(hidden, attentions)


class EncoderLogits(NamedTuple):
    """What a classifier returns."""

    logits: Tensor  # [b num_labels]
    attentions: tuple[Tensor, ...] | None = None  # as in EncoderOutput


class EncoderForSequenceClassification(nn.Module):
    """One label for the whole text, read off its first token (Devlin et al., section 4.1)."""

    def __init__(self, *, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config=config)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size) if config.pooler else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        for part in (self.pooler, self.classifier):
            if part is not None:
                initialize(part, std=config.initializer_range)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, output_attentions: bool = False
    ) -> EncoderLogits:
        """Return logits [b num_labels]; the module's docstring describes the inputs.

        Raises:
            ValueError: as :class:`Encoder`.
        """
        hidden, attentions = self.encoder(input_ids, attention_mask, output_attentions=output_attentions)
        first = hidden[:, 0]  # [b e]
        if self.pooler is not None:
            first = torch.tanh(self.pooler(first))  # [b e]
        return EncoderLogits(self.classifier(self.dropout(first)), attentions)


def check_mask(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Check that the mask has the shape of the ids.

    Raises:
        ValueError: if it has another shape than the ids.
    """
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}; "
            f"expected that of input_ids, {list(input_ids.shape)}"
        )


def initialize(module: nn.Module, *, std: float) -> None:
    """Draw weights and embeddings anew from a normal distribution of this standard deviation.

    Biases are 0, LayerNorm gains 1 and the padding token 0. On the meta device there is nothing to draw.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding) and not part.weight.is_meta:
            nn.init.normal_(part.weight, std=std)
        if isinstance(part, nn.Linear) and not part.bias.is_meta:
            nn.init.zeros_(part.bias)
        if isinstance(part, nn.Embedding) and part.padding_idx is not None and not part.weight.is_meta:
            nn.init.zeros_(part.weight[part.padding_idx])
