"""Every head is a module with three projections of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.parts import EPS, Config, Embeddings, attend


class AttentionHead(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, size) for _ in range(3))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return attend(self.q(x), self.k(x), self.v(x), keep)


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, heads = config["width"], config["heads"]
        self.heads = nn.ModuleList(AttentionHead(width, width // heads) for _ in range(heads))
        self.output_linear = nn.Linear(width, width)
        self.norm_1 = nn.LayerNorm(width, eps=EPS)
        self.ff = nn.Sequential(nn.Linear(width, config["inner"]), nn.GELU(), nn.Linear(config["inner"], width))
        self.norm_2 = nn.LayerNorm(width, eps=EPS)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = self.norm_1(x + self.output_linear(torch.cat([head(x, keep) for head in self.heads], dim=-1)))
        out: Tensor = self.norm_2(x + self.ff(x))
        return out


class PerHead(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["depth"]))

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x: Tensor = self.embeddings(ids, segments)
        for layer in self.layers:
            x = layer(x, keep)
        return x
