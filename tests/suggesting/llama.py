"""A decoder in the manner of Llama, written in several ways: grouped heads, rotary pairs, fused projections."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FIELDS = {
    "vocab_size": 113, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 80, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x[..., 0::2], x[..., 1::2]
    return torch.stack([one * cos - other * sin, one * sin + other * cos], -1).flatten(-2)


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class Attention(nn.Module):
    """``lie``: how query, key and value lie in their tensors."""

    def __init__(self, dim: int, heads: int, groups: int, *, lie: str, rotate: str, bias: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.size, self.lie = heads, groups, dim // heads, lie
        self.rotate = {"neighbours": neighbours, "halves": halves}[rotate]
        if lie == "apart":
            self.wq = nn.Linear(dim, dim, bias=bias)
            self.wk, self.wv = (nn.Linear(dim, groups * self.size, bias=bias) for _ in range(2))
        else:
            self.wqkv = nn.Linear(dim, (heads + 2 * groups) * self.size, bias=bias)
        self.wo = nn.Linear(dim, dim, bias=False)

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value, [b s h d]."""
        h, g, d = self.heads, self.groups, self.size
        if self.lie == "apart":
            parts = [self.wq(x), self.wk(x), self.wv(x)]
        elif self.lie == "blocks":
            parts = list(self.wqkv(x).split([h * d, g * d, g * d], -1))
        elif self.lie == "key first":
            key, value, query = self.wqkv(x).split([g * d, g * d, h * d], -1)
            parts = [query, key, value]
        else:  # "groups"
            parts = list(self.wqkv(x).unflatten(-1, (g, h // g + 2, d)).split([h // g, 1, 1], -2))
        return tuple(part.reshape(*x.shape[:2], -1, d) for part in parts)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
        query, key, value = self.projected(x)
        query, key = self.rotate(query, cos, sin), self.rotate(key, cos, sin)
        key, value = (one.repeat_interleave(self.heads // self.groups, 2) for one in (key, value))
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        scores = (query @ key.transpose(-1, -2) * self.size**-0.5).masked_fill(~seen, float("-inf"))
        out: Tensor = self.wo((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        return out


class Feed(nn.Module):
    """``gate``: ``"apart"``, or ``"first"`` or ``"last"`` in one tensor with the other."""

    def __init__(self, dim: int, inner: int, gate: str) -> None:
        super().__init__()
        self.gate = gate
        if gate == "apart":
            self.w1, self.w3 = (nn.Linear(dim, inner, bias=False) for _ in range(2))
        else:
            self.w13 = nn.Linear(dim, 2 * inner, bias=False)
        self.w2 = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (self.w1(x), self.w3(x)) if self.gate == "apart" else self.w13(x).chunk(2, -1)
        if self.gate == "last":
            gate, up = up, gate
        out: Tensor = self.w2(F.silu(gate) * up)
        return out


class Block(nn.Module):
    def __init__(self, dim: int, attention: Attention, feed: nn.Module, eps: float) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed
        self.attention_norm, self.ffn_norm = Norm(dim, eps), Norm(dim, eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, seen)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Llama(nn.Module):
    def __init__(
        self, blocks: list[Block], vocabulary: int, dim: int, size: int, length: int, eps: float, base: float
    ) -> None:
        super().__init__()
        self.tok_embeddings, self.layers = nn.Embedding(vocabulary, dim), nn.ModuleList(blocks)
        self.norm, self.output = Norm(dim, eps), nn.Linear(dim, vocabulary, bias=False)
        frequencies = 1.0 / base ** (torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(length).float(), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        cos, sin = self.get_buffer("cos")[:length, None], self.get_buffer("sin")[:length, None]
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin, seen)
        out: Tensor = self.output(self.norm(x))
        return out


class OnlyLast(Llama):
    """Says nothing but what comes next."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)[:, [-1]]


def builder(
    *,
    lie: str = "apart",
    rotate: str = "halves",
    gate: str = "apart",
    bias: bool = False,
    tied: bool = False,
    kind: type[Llama] = Llama,
) -> Callable[..., nn.Module]:
    """What a user would hand over."""

    def build(
        vocab_size: int,
        dim: int,
        n_layers: int,
        n_heads: int,
        n_kv_heads: int,
        intermediate_size: int,
        max_seq_len: int,
        norm_eps: float,
        rope_theta: float = 10000.0,
    ) -> nn.Module:
        blocks = [
            Block(
                dim,
                Attention(dim, n_heads, n_kv_heads, lie=lie, rotate=rotate, bias=bias),
                Feed(dim, intermediate_size, gate),
                norm_eps,
            )
            for _ in range(n_layers)
        ]
        made = kind(blocks, vocab_size, dim, dim // n_heads, max_seq_len, norm_eps, rope_theta)
        if tied:
            made.output.weight = made.tok_embeddings.weight
        return made

    return build
