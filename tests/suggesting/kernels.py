"""A decoder with heads as axes of their own in its weights, as JAX code has them: contractions of named axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.suggesting.llama import Norm, halves, neighbours


@dataclass(frozen=True)
class Kernels:
    """How the weights lie: the axes of each, where ``n`` are heads, ``d`` their features and ``e`` the model's.

    Attributes:
        into: of queries, keys and values, each by itself, as ``"end"``.
        back: of what comes out of the heads.
        stacked: of several in one: keys and values along ``c``, ``"cend"``; all three along ``c``, as many keys as
            queries; all heads of all three one after the other along ``a``, ``"aed"``.
        feed: of the first two matrices of the second half, each by itself or both, ``"cef"``.
        down: of its last one.
        rotate: ``"halves"`` or ``"neighbours"``.
        share: the share of a head that is rotated.
        bias: whether the projections have biases, with the axes of heads and features that the weights have.
    """

    into: str = "end"
    back: str = "nde"
    stacked: str = ""
    feed: str = "ef"
    down: str = "fe"
    rotate: str = "halves"
    share: float = 1.0
    bias: bool = False


def weight(axes: str, sizes: Mapping[str, int]) -> nn.Parameter:
    """A parameter with these axes."""
    return nn.Parameter(torch.randn([sizes[axis] for axis in axes]) * 0.1)


class Attention(nn.Module):
    """Grouped attention over such weights."""

    def __init__(self, style: Kernels, width: int, heads: int, groups: int, size: int) -> None:
        super().__init__()
        self.style, self.groups, self.heads = style, groups, heads
        self.turned = int(size * style.share)
        queries = {"e": width, "n": heads, "d": size, "c": 3, "a": heads + 2 * groups}
        keys = {**queries, "n": groups, "c": 2}
        into, stacked = style.into, style.stacked
        self.both = "c" in stacked and heads != groups
        self.out = weight(style.back, queries)
        if not stacked or self.both:
            self.query = weight(into, queries)
        if stacked:
            self.fused = weight(stacked, keys if self.both else queries)
        else:
            self.key, self.value = weight(into, keys), weight(into, keys)
        if style.bias:
            axes = into.replace("e", "")
            self.query_bias, self.key_bias, self.value_bias = (weight(axes, one) for one in (queries, keys, keys))

    def projected(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values, [b s n d]."""
        into, stacked = self.style.into, self.style.stacked
        made = [torch.einsum(f"bse,{into}->bsnd", x, self.query)] if not stacked or self.both else []
        if stacked:
            ahead = "cbsnd" if "c" in stacked else "bsad"
            found = torch.einsum(f"bse,{stacked}->{ahead}", x, self.fused)
            counts = [self.heads, self.groups, self.groups]
            made += found.unbind(0) if "c" in stacked else torch.split(found, counts, 2)
        else:
            made += [torch.einsum(f"bse,{into}->bsnd", x, one) for one in (self.key, self.value)]
        if self.style.bias:
            given = "nd" if into.replace("e", "") == "nd" else "dn"
            biases = (self.query_bias, self.key_bias, self.value_bias)
            made = [one + (bias if given == "nd" else bias.t()) for one, bias in zip(made, biases, strict=True)]
        return made

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turn = {"halves": halves, "neighbours": neighbours}[self.style.rotate]
        return torch.cat([turn(x[..., : self.turned], cos, sin), x[..., self.turned :]], -1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = self.projected(x)
        query, key = self.rotated(query, cos, sin), self.rotated(key, cos, sin)
        query = query.reshape(*query.shape[:2], self.groups, -1, query.shape[-1])
        scores = torch.einsum("bsgqd,btgd->bgqst", query, key) * query.shape[-1] ** -0.5
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        weights = scores.masked_fill(~seen, -1e30).softmax(-1)
        found = torch.einsum("bgqst,btgd->bsgqd", weights, value).flatten(2, 3)
        return torch.einsum(f"bsnd,{self.style.back}->bse", found, self.out)


class Feed(nn.Module):
    """The second half of a block, with a gate."""

    def __init__(self, style: Kernels, width: int, inner: int) -> None:
        super().__init__()
        self.style, sizes = style, {"e": width, "f": inner, "c": 2}
        if "c" in style.feed:
            self.gating = weight(style.feed, sizes)
        else:
            self.gate, self.up = weight(style.feed, sizes), weight(style.feed, sizes)
        self.down = weight(style.down, sizes)

    def forward(self, x: Tensor) -> Tensor:
        feed = self.style.feed
        if "c" in feed:
            gate, up = torch.einsum(f"bse,{feed}->cbsf", x, self.gating)
        else:
            gate, up = (torch.einsum(f"bse,{feed}->bsf", x, one) for one in (self.gate, self.up))
        return torch.einsum(f"bsf,{self.style.down}->bse", F.silu(gate) * up, self.down)


class Block(nn.Module):
    def __init__(self, style: Kernels, width: int, heads: int, groups: int, size: int, inner: int, eps: float) -> None:
        super().__init__()
        self.before, self.between = Norm(width, eps), Norm(width, eps)
        self.attend, self.feed = Attention(style, width, heads, groups, size), Feed(style, width, inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attend(self.before(x), cos, sin)
        out: Tensor = x + self.feed(self.between(x))
        return out


class Decoder(nn.Module):
    def __init__(self, words: nn.Parameter, head: nn.Parameter, blocks: list[Block], turned: int, base: float) -> None:
        super().__init__()
        self.words, self.head, self.blocks = words, head, nn.ModuleList(blocks)
        self.norm = Norm(words.shape[1], blocks[0].before.eps)
        frequencies = 1.0 / base ** (torch.arange(0, turned, 2).float() / turned)
        angles = torch.outer(torch.arange(128).float(), frequencies)[:, None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words[tokens]
        cos, sin = self.get_buffer("cos")[: tokens.shape[1]], self.get_buffer("sin")[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        out: Tensor = self.norm(x) @ self.head
        return out


def builder(style: Kernels) -> Callable[..., nn.Module]:
    """What a user would hand over."""

    def build(
        vocab_size: int,
        hidden_size: int,
        num_hidden_layers: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        intermediate_size: int,
        rms_norm_eps: float,
        rope_theta: float = 10000.0,
    ) -> nn.Module:
        size = hidden_size // num_attention_heads
        blocks = [
            Block(style, hidden_size, num_attention_heads, num_key_value_heads, size, intermediate_size, rms_norm_eps)
            for _ in range(num_hidden_layers)
        ]
        sizes = {"v": vocab_size, "e": hidden_size}
        words, head = weight("ve", sizes), weight("ev", sizes)
        return Decoder(words, head, blocks, int(size * style.share), rope_theta)

    return build
