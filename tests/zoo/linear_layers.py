"""Query, key and value as a list of three, norms of a_2 and b_2, the residual and its norm as a module of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.zoo.parts import EPS, Config, Embeddings, attend, join, split


class LayerNorm(nn.Module):
    """With ``unbiased``, by Bessel, eps is added to the deviation: nobody's pretrained norm is like that."""

    def __init__(self, width: int, *, unbiased: bool) -> None:
        super().__init__()
        self.a_2 = nn.Parameter(torch.ones(width))
        self.b_2 = nn.Parameter(torch.zeros(width))
        self.unbiased = unbiased
        self.eps = 1e-6 if unbiased else EPS

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        if self.unbiased:
            return self.a_2 * centred / (x.std(-1, keepdim=True) + self.eps) + self.b_2
        return self.a_2 * centred / (x.var(-1, keepdim=True, correction=0) + self.eps).sqrt() + self.b_2


class SublayerConnection(nn.Module):
    def __init__(self, width: int, *, unbiased: bool) -> None:
        super().__init__()
        self.norm = LayerNorm(width, unbiased=unbiased)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        out: Tensor = self.norm(x + sublayer(x))
        return out


class MultiHeadedAttention(nn.Module):
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear_layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.output_linear = nn.Linear(width, width)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (split(linear(x), self.heads) for linear in self.linear_layers)
        out: Tensor = self.output_linear(join(attend(q, k, v, keep)))
        return out


class TransformerBlock(nn.Module):
    def __init__(self, config: Config, *, unbiased: bool) -> None:
        super().__init__()
        width, inner = config["width"], config["inner"]
        self.attention = MultiHeadedAttention(config["heads"], width)
        self.feed_forward = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
        self.input_sublayer = SublayerConnection(width, unbiased=unbiased)
        self.output_sublayer = SublayerConnection(width, unbiased=unbiased)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = self.input_sublayer(x, lambda y: self.attention(y, keep))
        out: Tensor = self.output_sublayer(x, self.feed_forward)
        return out


class LinearLayers(nn.Module):
    unbiased = False

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        blocks = (TransformerBlock(config, unbiased=self.unbiased) for _ in range(config["depth"]))
        self.transformer_blocks = nn.ModuleList(blocks)

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x: Tensor = self.embeddings(ids, segments)
        for block in self.transformer_blocks:
            x = block(x, keep)
        return x


class Unbiased(LinearLayers):
    unbiased = True
