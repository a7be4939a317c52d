"""Decoders whose heads are rotated otherwise than the reference's: in other pairs, in part, before or behind a norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation = Callable[[Tensor], Tensor]

SIZES = {"vocab_size": 113, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
         "intermediate_size": 80, "max_position_embeddings": 64, "tie_word_embeddings": False}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}


@dataclass(frozen=True, kw_only=True)
class Style:
    """What a decoder is like.

    Attributes:
        rotate: the features that are turned together: ``"neighbours"`` or ``"halves"``.
        wrong: ``"late"`` where keys are turned as those of the next position, ``"apart"`` where they are turned
            backwards; no order of the features makes either right.
        share: the part of a head that is rotated, its first features.
        normed: where queries and keys have a norm: ``""``, ``"head"``, ``"row"`` of all heads, ``"each"`` head with a
            gain of its own, ``"one"`` for the heads of both, or ``"behind"`` the rotation.
        lie: ``"apart"``, ``"blocks"`` or ``"groups"``, one tensor for all three.
        norm: ``"rms"``, ``"layer"`` or ``"gain"``, a LayerNorm without a bias.
        block: ``"before"``, ``"after"``, ``"both"`` from one norm, or ``"two"`` side by side, each with a norm.
        gated: three matrices in the feed-forward part.
        act: its activation.
        biases: those that have one: ``"qkv"``, ``"out"``, ``"feed"``, ``"head"``.
        scale: what the logits are multiplied by.
        rounded: sines and cosines are rounded to float32, as transformers has them.
        tiled: every n-th head of queries shares a key, and not heads next to each other.
        inner: what comes out of a projection has its heads behind their features, ``(d h)``.
    """

    rotate: str = "neighbours"
    wrong: str = ""
    share: float = 1.0
    normed: str = ""
    lie: str = "apart"
    norm: str = "rms"
    block: str = "before"
    gated: bool = True
    act: Activation = F.silu
    biases: str = ""
    scale: float = 1.0
    rounded: bool = True
    tiled: bool = False
    inner: bool = False


class Rms(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps, self.g = eps, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.g * (x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt())


class EachHead(nn.Module):
    """A LayerNorm whose gain is another one for each head."""

    def __init__(self, heads: int, size: int, eps: float) -> None:
        super().__init__()
        self.eps, self.g = eps, nn.Parameter(torch.ones(heads, size))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=self.eps) * self.g


def norm(kind: str, width: int, eps: float) -> nn.Module:
    return Rms(width, eps) if kind == "rms" else nn.LayerNorm(width, eps=eps, bias=kind == "layer")


def turned(x: Tensor, turn: Tensor, how: str) -> Tensor:
    """Rotate the first features of [b s h d] by complex numbers [s 1 r]."""
    rest = x[..., 2 * turn.shape[-1] :]
    x = x[..., : 2 * turn.shape[-1]]
    if how == "neighbours":
        found = torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous()) * turn)
        return torch.cat([found.flatten(-2), rest], -1)
    one, other = x.chunk(2, -1)
    cos, sin = turn.real, turn.imag
    return torch.cat([one * cos - other * sin, other * cos + one * sin, rest], -1)


class Attention(nn.Module):
    def __init__(self, style: Style, dim: int, heads: int, groups: int, eps: float) -> None:
        super().__init__()
        self.style, self.heads, self.groups, self.size = style, heads, groups, dim // heads
        bias, inner = "qkv" in style.biases, groups * self.size
        if style.lie == "apart":
            self.query = nn.Linear(dim, dim, bias=bias)
            self.key, self.value = (nn.Linear(dim, inner, bias=bias) for _ in range(2))
        else:
            self.mixed = nn.Linear(dim, dim + 2 * inner, bias=bias)
        self.out = nn.Linear(dim, dim, bias="out" in style.biases)
        sizes = {"row": (dim, inner), "head": (self.size,) * 2, "behind": (self.size,) * 2}.get(style.normed)
        if sizes is not None:
            self.norm_q, self.norm_k = (norm(style.norm, size, eps) for size in sizes)
        if style.normed == "one":
            self.norm_q = self.norm_k = norm(style.norm, self.size, eps)
        if style.normed == "each":
            self.norm_q, self.norm_k = (EachHead(count, self.size, eps) for count in (heads, groups))

    def projected(self, x: Tensor) -> list[Tensor]:
        h, g, d = self.heads, self.groups, self.size
        if self.style.lie == "apart":
            return [self.query(x), self.key(x), self.value(x)]
        if self.style.lie == "blocks":
            return list(self.mixed(x).split([h * d, g * d, g * d], -1))
        parts = self.mixed(x).unflatten(-1, (g, h // g + 2, d)).split([h // g, 1, 1], -2)
        return [part.flatten(-3) for part in parts]

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        parts = self.projected(x)
        if self.style.normed == "row":
            parts[:2] = self.norm_q(parts[0]), self.norm_k(parts[1])
        if self.style.inner:
            parts = [part.reshape(*x.shape[:2], self.size, -1).mT for part in parts]
        query, key, value = (part.reshape(*x.shape[:2], -1, self.size) for part in parts)
        if self.style.normed in {"head", "each", "one"}:
            query, key = self.norm_q(query), self.norm_k(key)
        others = {"late": turn * turn[1], "apart": turn.conj()}.get(self.style.wrong, turn)
        query, key = turned(query, turn, self.style.rotate), turned(key, others, self.style.rotate)
        if self.style.normed == "behind":
            query, key = self.norm_q(query), self.norm_k(key)
        repeat = Tensor.repeat if self.style.tiled else Tensor.repeat_interleave
        times = (1, 1, self.heads // self.groups, 1) if self.style.tiled else (self.heads // self.groups, 2)
        key, value = (repeat(one, *times) for one in (key, value))
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


class Feed(nn.Module):
    def __init__(self, style: Style, dim: int, inner: int) -> None:
        super().__init__()
        self.act, bias = style.act, "feed" in style.biases
        self.up, self.down = nn.Linear(dim, inner, bias=bias), nn.Linear(inner, dim, bias=bias)
        self.gate = nn.Linear(dim, inner, bias=bias) if style.gated else None

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        found: Tensor = self.down(self.act(up) if self.gate is None else self.act(self.gate(x)) * up)
        return found


class Layer(nn.Module):
    def __init__(self, style: Style, dim: int, heads: int, groups: int, inner: int, eps: float) -> None:
        super().__init__()
        self.kind = style.block
        self.attention, self.feed = Attention(style, dim, heads, groups, eps), Feed(style, dim, inner)
        self.norm1 = norm(style.norm, dim, eps)
        self.norm2 = norm(style.norm, dim, eps) if style.block != "both" else None

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        second = self.norm2 or nn.Identity()
        first = x if self.kind == "after" else self.norm1(x)
        made: Tensor = self.attention(first, turn)
        if self.kind == "after":
            x = x + self.norm1(made)
            made = second(self.feed(x))
        elif self.kind == "before":
            x = x + made
            made = self.feed(second(x))
        else:
            made = made + self.feed(first if self.kind == "both" else second(x))
        return x + made


class Decoder(nn.Module):
    def __init__(
        self, style: Style, vocab_size: int, dim: int, depth: int, heads: int, groups: int, inner: int, eps: float
    ) -> None:
        super().__init__()
        self.style, self.size = style, dim // heads
        self.embed = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(Layer(style, dim, heads, groups, inner, eps) for _ in range(depth))
        self.last, self.head = norm(style.norm, dim, eps), nn.Linear(dim, vocab_size, bias="head" in style.biases)

    def forward(self, tokens: Tensor) -> Tensor:
        count = int(self.size * self.style.share)
        frequencies = 1.0 / 10000.0 ** (torch.arange(0, count, 2).float() / count)
        angles = torch.outer(torch.arange(tokens.shape[1]).float(), frequencies)[:, None]
        x = self.embed(tokens)
        angles = angles if self.style.rounded else angles.to(x.dtype)
        turn = torch.complex(angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        for layer in self.layers:
            x = layer(x, turn)
        found: Tensor = self.head(self.last(x)) * self.style.scale
        return found


def grouped(style: Style) -> Callable[..., nn.Module]:
    def build(
        vocab_size: int, dim: int, n_layers: int, n_heads: int, n_kv_heads: int, intermediate_size: int, norm_eps: float
    ) -> nn.Module:
        return Decoder(style, vocab_size, dim, n_layers, n_heads, n_kv_heads, intermediate_size, norm_eps)

    return build


def plain(style: Style) -> Callable[..., nn.Module]:
    def build(
        vocab_size: int, n_embd: int, n_layer: int, n_head: int, intermediate_size: int, eps: float = 1e-5
    ) -> nn.Module:
        return Decoder(style, vocab_size, n_embd, n_layer, n_head, n_head, intermediate_size, eps)

    return build


TANH = partial(F.gelu, approximate="tanh")


def squared(x: Tensor) -> Tensor:
    return F.relu(x).square()
