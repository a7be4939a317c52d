"""Multi-head self-attention in four weight layouts that compute the same function.

Paper: Vaswani et al. 2017, "Attention Is All You Need", section 3.2. Every query, key and value of every head is a
linear function of the hidden state, so all of them together are one matrix of 3 h d rows: p = query, key, value;
h = heads; d = the width of a head; e = h d, the width of the hidden state. The layouts differ in how the rows are cut
and ordered, and say so in the notation of the mapping tables:

    separate     query.weight, key.weight, value.weight    [(h d) e]    as BERT is written
    per_head     heads.{h}.query.weight, ...               [d e]        as teaching notebooks write it
    fused        qkv.weight                                [(p h d) e]  as torch.nn.MultiheadAttention, "in_proj"
    interleaved  qkv.weight                                [(h p d) e]  as GPT-NeoX and BLOOM are written

Each takes hidden states [b s e] and a mask [b s] (1 or True = attend, 0 or False = padding, None = no padding), and
returns the attended states [b s e] and the probabilities before dropout [b h s s], each row of which sums to 1.

>>> attention = LAYOUTS["fused"](hidden_size=8, num_attention_heads=2)
>>> attended, probabilities = attention(torch.randn(3, 5, 8))
>>> attended.shape, probabilities.shape
(torch.Size([3, 5, 8]), torch.Size([3, 2, 5, 5]))
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

__all__ = [
    "LAYOUTS",
    "FusedAttention",
    "InterleavedAttention",
    "PerHeadAttention",
    "ScaledDotProduct",
    "SeparateAttention",
]


class ScaledDotProduct(nn.Module):
    """softmax(Q K^T / sqrt(d)) V; it has no weights (section 3.2.1)."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attend from every query to every key.

        Args:
            query: [... s d], and ``key`` and ``value`` alike: any number of heads, or one.
            key: [... s d].
            value: [... s d].
            mask: [... 1 s], any dtype, 1 or True = attend; None attends to all.

        Returns:
            The context [... s d], and the probabilities [... s s] before dropout.
        """
        scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5  # [... s s]
        if mask is not None:
            # The lowest number and not -inf: a row that is all padding then attends evenly, and gives no NaN.
            scores = scores.masked_fill(mask.logical_not(), torch.finfo(scores.dtype).min)  # [... s s]
        probabilities = torch.softmax(scores, dim=-1)  # [... s s]
        return self.dropout(probabilities) @ value, probabilities  # [... s d], [... s s]


def for_all_heads(mask: Tensor | None) -> Tensor | None:
    """A mask [b s] -> [b 1 1 s]: the same for every head and every query."""
    return None if mask is None else mask[:, None, None, :]


class SeparateAttention(nn.Module):
    """Three projections, each for all heads at once: query, key and value [(h d) e]."""

    def __init__(self, *, hidden_size: int, num_attention_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = (num_attention_heads, head_size(hidden_size, num_attention_heads))
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.core = ScaledDotProduct(dropout=dropout)
        self.output = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Hidden states [b s e], mask [b s] -> attended [b s e], probabilities [b h s s]."""
        projections = (self.query, self.key, self.value)
        query, key, value = (self.split(projection(hidden)) for projection in projections)  # [b h s d] each
        context, probabilities = self.core(query, key, value, for_all_heads(mask))  # [b h s d], [b h s s]
        return self.output(context.transpose(1, 2).flatten(2)), probabilities

    def split(self, states: Tensor) -> Tensor:
        """[b s (h d)] -> [b h s d]."""
        return states.view(*states.shape[:-1], *self.heads).transpose(1, 2)


class AttentionHead(nn.Module):
    """One head: its own small projections [d e], and its own softmax."""

    def __init__(self, *, hidden_size: int, head_size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.query = nn.Linear(hidden_size, head_size)
        self.key = nn.Linear(hidden_size, head_size)
        self.value = nn.Linear(hidden_size, head_size)
        self.core = ScaledDotProduct(dropout=dropout)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Hidden states [b s e], mask [b 1 s] -> context [b s d], probabilities [b s s]."""
        context, probabilities = self.core(self.query(hidden), self.key(hidden), self.value(hidden), mask)
        return context, probabilities


class PerHeadAttention(nn.Module):
    """A list of heads, run one by one; their contexts are concatenated (section 3.2.2, the equation)."""

    def __init__(self, *, hidden_size: int, num_attention_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        width = head_size(hidden_size, num_attention_heads)
        self.heads = nn.ModuleList(
            [
                AttentionHead(hidden_size=hidden_size, head_size=width, dropout=dropout)
                for _ in range(num_attention_heads)
            ]
        )
        self.output = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Hidden states [b s e], mask [b s] -> attended [b s e], probabilities [b h s s]."""
        same_for_every_query = None if mask is None else mask[:, None, :]  # [b 1 s]
        found = [head(hidden, same_for_every_query) for head in self.heads]
        context = torch.cat([context for context, _ in found], dim=-1)  # h of [b s d] -> [b s (h d)]
        probabilities = torch.stack([probabilities for _, probabilities in found], dim=1)  # [b h s s]
        return self.output(context), probabilities


class FusedAttention(nn.Module):
    """One projection for everything, [(p h d) e]: all queries, then all keys, then all values."""

    def __init__(self, *, hidden_size: int, num_attention_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.rows = (3, num_attention_heads, head_size(hidden_size, num_attention_heads))
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.core = ScaledDotProduct(dropout=dropout)
        self.output = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Hidden states [b s e], mask [b s] -> attended [b s e], probabilities [b h s s]."""
        query, key, value = self.split(self.qkv(hidden))  # [b h s d] each
        context, probabilities = self.core(query, key, value, for_all_heads(mask))  # [b h s d], [b h s s]
        return self.output(context.transpose(1, 2).flatten(2)), probabilities

    def split(self, qkv: Tensor) -> Tensor:
        """[b s (p h d)] -> [p b h s d]."""
        return qkv.view(*qkv.shape[:-1], *self.rows).permute(2, 0, 3, 1, 4)


class InterleavedAttention(FusedAttention):
    """One projection for everything, [(h p d) e]: query, key and value of the first head, then of the second, ...

    A slice of its rows is a set of whole heads, so several devices can share the work by the rows.
    """

    def __init__(self, *, hidden_size: int, num_attention_heads: int, dropout: float = 0.0) -> None:
        super().__init__(hidden_size=hidden_size, num_attention_heads=num_attention_heads, dropout=dropout)
        self.rows = (num_attention_heads, 3, head_size(hidden_size, num_attention_heads))

    def split(self, qkv: Tensor) -> Tensor:
        """[b s (h p d)] -> [p b h s d]."""
        return qkv.view(*qkv.shape[:-1], *self.rows).permute(3, 0, 2, 1, 4)


def head_size(hidden_size: int, num_attention_heads: int) -> int:
    """The width d of one head.

    Raises:
        ValueError: if the heads do not divide the hidden state.
    """
    if hidden_size % num_attention_heads:
        raise ValueError(f"hidden_size={hidden_size}: expected a multiple of num_attention_heads={num_attention_heads}")
    return hidden_size // num_attention_heads


class MakesAttention(Protocol):
    """A class of this file: all four are made in the same way."""

    def __call__(self, *, hidden_size: int, num_attention_heads: int, dropout: float = 0.0) -> nn.Module:
        """Make an attention.

        Args:
            hidden_size: the width e of the hidden states, a multiple of ``num_attention_heads``.
            num_attention_heads: how many heads.
            dropout: the probability with which an attention probability is set to 0 in training.

        Raises:
            ValueError: if the heads do not divide the hidden state.
        """


#: The name of a layout, as configs and tables spell it -> its class.
LAYOUTS: Mapping[str, MakesAttention] = MappingProxyType(
    {
        "separate": SeparateAttention,
        "per_head": PerHeadAttention,
        "fused": FusedAttention,
        "interleaved": InterleavedAttention,
    }
)
