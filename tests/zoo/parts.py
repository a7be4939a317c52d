"""What most of the zoo has in common, so that each model shows only what is its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

Config = Mapping[str, int]
"""width, depth, heads, inner, vocab, positions and segments; the tables' [config] gives them these names."""

EPS = 1e-12


class Embeddings(nn.Module):
    """Words, positions and segments, summed and normed."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tok = nn.Embedding(config["vocab"], config["width"])
        self.pos = nn.Embedding(config["positions"], config["width"])
        self.seg = nn.Embedding(config["segments"], config["width"])
        self.norm = nn.LayerNorm(config["width"], eps=EPS)

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:
        """Shape: [b s], [b s] -> [b s e]."""
        normed: Tensor = self.norm(self.tok(ids) + self.pos.weight[: ids.shape[1]] + self.seg(segments))
        return normed


def split(x: Tensor, heads: int) -> Tensor:
    """Shape: [b s (h d)] -> [b h s d]."""
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)


def join(x: Tensor) -> Tensor:
    """Shape: [b h s d] -> [b s (h d)]."""
    return x.transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Attention; q, k and v are [b ... s d], keep is [b s], True = attend."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    mask = keep.view(keep.shape[0], *[1] * (q.ndim - 2), keep.shape[1])
    return torch.softmax(scores.masked_fill(~mask, -1e9), dim=-1) @ v
