"""Words and positions in one table: a position is a word behind the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.parts import EPS, Config
from tests.zoo.plain import Layer


class OneTable(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.vocab = config["vocab"]
        self.table = nn.Embedding(config["vocab"] + config["positions"], config["width"])
        self.seg = nn.Embedding(config["segments"], config["width"])
        self.norm = nn.LayerNorm(config["width"], eps=EPS)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["depth"]))

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        places = self.vocab + torch.arange(ids.shape[1])
        x: Tensor = self.norm(self.table(torch.stack([ids, places.expand_as(ids)])).sum(0) + self.seg(segments))
        for layer in self.layers:
            x = layer(x, keep)
        return x
