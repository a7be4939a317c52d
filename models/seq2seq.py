"""The encoder-decoder of "Attention Is All You Need": it reads one sequence and writes another.

Paper: Vaswani et al. 2017; a bare section number is one of its sections. Searches are in ``seq2seq_search.py``.

Classes stand in the order of the forward pass. Shapes stand beside the tensors, in these letters:

    b batch   s source   t target   p past, target tokens of earlier calls   k keys: s, or p + t
    e hidden_size   h heads   d head size, e = h d   f intermediate size   v vocab_size

Inputs have padding masks, [b s] of any dtype, 1 or True = attend, 0 or False = padding, None = no padding. The parts
have boolean masks over queries and keys, which broadcast to [b h t k], True = attend; masks combine by ``&``.

>>> model = Seq2Seq(config=Seq2SeqConfig(vocab_size=30, hidden_size=8)).eval()
>>> input_ids, decoder_input_ids = torch.tensor([[5, 7, 9, 2], [6, 2, 0, 0]]), torch.tensor([[1, 4, 8], [1, 3, 2]])
>>> model(input_ids, decoder_input_ids, attention_mask=input_ids != 0).shape
torch.Size([2, 3, 30])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.models.bert_config import ACTIVATIONS
from porting.models.encoder import check_mask
from porting.models.positions import sinusoidal_positions
from porting.models.seq2seq_config import Seq2SeqConfig

__all__ = ["Cache", "Seq2Seq", "Seq2SeqConfig", "causal_mask", "padding_mask"]


def padding_mask(attention_mask: Tensor) -> Tensor:
    """[b k], 1 or True = attend -> [b 1 1 k], boolean: no query attends to padding."""
    return attention_mask.to(torch.bool)[:, None, None, :]


def causal_mask(length: int, past: int = 0, *, device: torch.device | None = None) -> Tensor:
    """[1 1 t p+t], boolean: a token attends to itself and to those before it (section 3.2.3).

    >>> causal_mask(2, past=1)
    tensor([[[[ True,  True, False],
              [ True,  True,  True]]]])
    """
    ones = torch.ones(length, past + length, dtype=torch.bool, device=device)  # [t p+t]
    return ones.tril(past)[None, None]


class Positions(nn.Module):
    """Add the position encoding to each embedding (section 3.5): sines and cosines that alternate, as in its formulas.

    The table is a buffer, so an optimizer leaves it as it is; a model whose positions were learned has them here.
    """

    table: Tensor

    def __init__(self, *, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.register_buffer("table", sinusoidal_positions(config.max_position_embeddings, config.hidden_size))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, embedded: Tensor, past: int = 0) -> Tensor:
        """Embeddings [b t e] of tokens that follow ``past`` others -> embeddings with positions [b t e].

        Raises:
            ValueError: if a row is longer than the position table.
        """
        length, longest = past + embedded.shape[1], len(self.table)
        if length > longest:
            raise ValueError(f"a row has {length} tokens; max_position_embeddings allows {longest}")
        hidden = embedded + self.table[past:length]  # [b t e]
        placed: Tensor = self.dropout(hidden if self.norm is None else self.norm(hidden))  # [b t e]
        return placed


class MultiHeadAttention(nn.Module):
    """softmax(Q K^T / sqrt(d)) V in every head (section 3.2).

    Keys and values are made by a call of their own, so that they can be kept from one call to the next.
    """

    def __init__(self, *, hidden_size: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout_prob = dropout
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)

    def keys_and_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """What is attended to, [b k e] -> keys and values, [b h k d] each."""
        return self.split_heads(self.key(states)), self.split_heads(self.value(states))

    def forward(self, hidden: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend from every position of ``hidden`` to every key.

        Args:
            hidden: [b t e].
            key, value: [b h k d] each, as :meth:`keys_and_values` makes them.
            mask: [b 1 t k] or what broadcasts to it, boolean, True = attend; None attends to all.

        Returns:
            Attended states [b t e].
        """
        bias = None
        if mask is not None:
            # Not -inf, of which softmax is undefined: what may attend to nothing attends evenly to all.
            zeros = torch.zeros(mask.shape, dtype=hidden.dtype, device=mask.device)
            bias = zeros.masked_fill(mask.logical_not(), torch.finfo(hidden.dtype).min / 2)
        query = self.split_heads(self.query(hidden))  # [b h t d]
        dropout = self.dropout_prob if self.training else 0.0
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)  # [b h t d]
        attended: Tensor = self.output(context.transpose(1, 2).flatten(2))  # [b t e]
        return attended

    def split_heads(self, states: Tensor) -> Tensor:
        """[b t (h d)] -> [b h t d]."""
        return states.view(*states.shape[:-1], self.heads, -1).transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers with an activation between them, the same at every position (section 3.3)."""

    def __init__(self, *, config: Seq2SeqConfig, intermediate_size: int) -> None:
        super().__init__()
        self.intermediate = nn.Linear(config.hidden_size, intermediate_size)
        self.activation = ACTIVATIONS[config.hidden_act]()
        self.dropout = nn.Dropout(config.activation_dropout)
        self.output = nn.Linear(intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [b t e] -> [b t f] -> [b t e]."""
        changed: Tensor = self.output(self.dropout(self.activation(self.intermediate(hidden))))  # [b t e]
        return changed


class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward network, each x -> norm(x + dropout(part(x))) (section 3.1)."""

    def __init__(self, *, config: Seq2SeqConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        heads, dropout = config.encoder_attention_heads, config.attention_dropout
        self.attention = MultiHeadAttention(hidden_size=width, heads=heads, dropout=dropout)
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.feed_forward = FeedForward(config=config, intermediate_size=config.encoder_intermediate_size)
        self.feed_forward_norm = nn.LayerNorm(width, eps=eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Hidden states [b s e], mask [b 1 1 s] -> hidden states [b s e]."""
        attended = self.attention(hidden, *self.attention.keys_and_values(hidden), mask)  # [b s e]
        hidden = self.attention_norm(hidden + self.dropout(attended))  # [b s e]
        encoded: Tensor = self.feed_forward_norm(hidden + self.dropout(self.feed_forward(hidden)))  # [b s e]
        return encoded


class Encoder(nn.Module):
    """Positions, then the layers."""

    def __init__(self, *, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.positions = Positions(config=config)
        self.layers = nn.ModuleList([EncoderLayer(config=config) for _ in range(config.num_encoder_layers)])

    def forward(self, embedded: Tensor, mask: Tensor | None = None) -> Tensor:
        """Embeddings [b s e], mask [b 1 1 s] -> what the decoder attends to, its memory [b s e]."""
        hidden: Tensor = self.positions(embedded)  # [b s e]
        for layer in self.layers:
            hidden = layer(hidden, mask)  # [b s e]
        return hidden


class Cache(NamedTuple):
    """A decoder layer's keys and values: those of a token do not change when others follow it."""

    key: Tensor  # [b h p+t d], of the target so far
    value: Tensor  # [b h p+t d]
    memory_key: Tensor  # [b h s d], of the source
    memory_value: Tensor  # [b h s d]


class DecoderLayer(nn.Module):
    """As an encoder layer, with attention to the source between its two parts (section 3.1)."""

    def __init__(self, *, config: Seq2SeqConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        heads, dropout = config.decoder_attention_heads, config.attention_dropout
        self.attention = MultiHeadAttention(hidden_size=width, heads=heads, dropout=dropout)
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.cross_attention = MultiHeadAttention(hidden_size=width, heads=heads, dropout=dropout)
        self.cross_attention_norm = nn.LayerNorm(width, eps=eps)
        self.feed_forward = FeedForward(config=config, intermediate_size=config.decoder_intermediate_size)
        self.feed_forward_norm = nn.LayerNorm(width, eps=eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        hidden: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Cache]:
        """Hidden states [b t e], memory [b s e], masks [b 1 t p+t] and [b 1 1 s] -> hidden states [b t e], cache."""
        key, value = self.attention.keys_and_values(hidden)  # [b h t d] each
        if cache is None:
            cache = Cache(key, value, *self.cross_attention.keys_and_values(memory))
        else:
            key, value = torch.cat([cache.key, key], dim=2), torch.cat([cache.value, value], dim=2)  # [b h p+t d]
            cache = cache._replace(key=key, value=value)
        attended = self.attention(hidden, cache.key, cache.value, mask)  # [b t e]
        hidden = self.attention_norm(hidden + self.dropout(attended))  # [b t e]
        attended = self.cross_attention(hidden, cache.memory_key, cache.memory_value, memory_mask)  # [b t e]
        hidden = self.cross_attention_norm(hidden + self.dropout(attended))  # [b t e]
        return self.feed_forward_norm(hidden + self.dropout(self.feed_forward(hidden))), cache


class Decoder(nn.Module):
    """Positions, then the layers."""

    def __init__(self, *, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.positions = Positions(config=config)
        self.layers = nn.ModuleList([DecoderLayer(config=config) for _ in range(config.num_decoder_layers)])

    def forward(
        self,
        embedded: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
    ) -> tuple[Tensor, tuple[Cache, ...]]:
        """Embeddings [b t e], memory [b s e], masks as in :class:`DecoderLayer` -> states [b t e], every cache."""
        past = caches[0].key.shape[2] if caches else 0
        hidden = self.positions(embedded, past)  # [b t e]
        mine: tuple[Cache, ...] = ()
        for number, layer in enumerate(self.layers):
            hidden, cache = layer(hidden, memory, mask, memory_mask, caches[number] if caches else None)  # [b t e]
            mine += (cache,)
        return hidden, mine


class Projection(nn.Module):
    """From states to scores of tokens, by the embedding matrix itself (section 3.4) and a bias.

    The matrix is handed to ``forward``, so the model has one parameter, not two that must be kept equal.
    """

    def __init__(self, *, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """Hidden states [b t e] and embeddings [v e] -> logits [b t v]."""
        return F.linear(hidden, embeddings, self.bias)


class Seq2Seq(nn.Module):
    """Encoder and decoder with one embedding for both languages, which is the output projection as well."""

    def __init__(self, *, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.encoder = Encoder(config=config)
        self.decoder = Decoder(config=config)
        self.projection = Projection(config=config)
        initialize(self)

    def forward(
        self,
        input_ids: Tensor,
        decoder_input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Scores what follows each token of the target.

        Args:
            input_ids: [b s], integer; the source.
            decoder_input_ids: [b t], integer; the target, after ``decoder_start_token_id``.
            attention_mask: [b s], of the source, as the module's docstring describes it.
            decoder_attention_mask: [b t], of the target.

        Returns:
            Logits [b t v].

        Raises:
            ValueError: if a row is longer than the position table, or a mask not shaped like its ids.
        """
        memory = self.encode(input_ids, attention_mask)  # [b s e]
        return self.decode(decoder_input_ids, memory, attention_mask, decoder_attention_mask)[0]

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Source ids [b s], padding mask [b s] -> memory [b s e]."""
        check_mask(input_ids, attention_mask)
        mask = None if attention_mask is None else padding_mask(attention_mask)  # [b 1 1 s]
        memory: Tensor = self.encoder(self.embed(input_ids), mask)  # [b s e]
        return memory

    def decode(
        self,
        decoder_input_ids: Tensor,
        memory: Tensor,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
    ) -> tuple[Tensor, tuple[Cache, ...]]:
        """Target ids [b t], which follow those in the caches, and memory [b s e] -> logits [b t v], caches with them.

        The masks are [b s] of the source and [b p+t] of the target with its past.

        Raises:
            ValueError: if a row is longer than the position table, or the target's mask has another shape.
        """
        length = decoder_input_ids.shape[1]
        past = caches[0].key.shape[2] if caches else 0
        mask = causal_mask(length, past, device=decoder_input_ids.device)  # [1 1 t p+t]
        if decoder_attention_mask is not None:
            if decoder_attention_mask.shape != (len(decoder_input_ids), past + length):
                shape, expected = list(decoder_attention_mask.shape), [len(decoder_input_ids), past + length]
                raise ValueError(f"decoder_attention_mask has shape {shape}; expected {expected}: past and new tokens")
            mask = mask & padding_mask(decoder_attention_mask)  # [b 1 t p+t]
        memory_mask = None if attention_mask is None else padding_mask(attention_mask)  # [b 1 1 s]
        hidden, mine = self.decoder(self.embed(decoder_input_ids), memory, mask, memory_mask, caches)  # [b t e]
        return self.projection(hidden, self.embedding.weight), mine

    def embed(self, ids: Tensor) -> Tensor:
        """Ids [b t] -> embeddings [b t e], times sqrt(e) unless the config says otherwise (section 3.4)."""
        embedded: Tensor = self.embedding(ids)  # [b t e]
        return embedded * math.sqrt(self.config.hidden_size) if self.config.scale_embeddings else embedded


def initialize(model: Seq2Seq) -> None:
    """Draw the weights: Glorot's uniform distribution for matrices, e^-0.5 for embeddings; biases, padding: 0."""
    for part in model.modules():
        if isinstance(part, nn.Linear) and not part.weight.is_meta:
            nn.init.xavier_uniform_(part.weight)
            nn.init.zeros_(part.bias)
        if isinstance(part, nn.Embedding) and not part.weight.is_meta:
            nn.init.normal_(part.weight, std=part.embedding_dim**-0.5)
            nn.init.zeros_(part.weight[part.padding_idx])
