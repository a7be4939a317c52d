"""Lists by kind and not by layer: all attentions, all first norms, all feed-forward parts, all second norms."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.parts import EPS, Config, Embeddings, attend, join, split


class MultiHeadAttention(nn.Module):
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_lin, self.k_lin, self.v_lin, self.out_lin = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (split(linear(x), self.heads) for linear in (self.q_lin, self.k_lin, self.v_lin))
        out: Tensor = self.out_lin(join(attend(q, k, v, keep)))
        return out


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lin2(F.gelu(self.lin1(x)))
        return out


class TypeMajor(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, depth = config["width"], config["depth"]
        self.embeddings = Embeddings(config)
        self.attentions = nn.ModuleList(MultiHeadAttention(config["heads"], width) for _ in range(depth))
        self.layer_norm1 = nn.ModuleList(nn.LayerNorm(width, eps=EPS) for _ in range(depth))
        self.ffns = nn.ModuleList(FeedForward(width, config["inner"]) for _ in range(depth))
        self.layer_norm2 = nn.ModuleList(nn.LayerNorm(width, eps=EPS) for _ in range(depth))

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x: Tensor = self.embeddings(ids, segments)
        for attention, norm1, ffn, norm2 in zip(
            self.attentions, self.layer_norm1, self.ffns, self.layer_norm2, strict=True
        ):
            x = norm1(x + attention(x, keep))
            x = norm2(x + ffn(x))
        return x
