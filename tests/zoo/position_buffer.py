"""Positions that no optimiser touches: a persistent buffer can be loaded, a plain attribute is nobody's tensor."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.parts import EPS, Config
from tests.zoo.plain import Layer


class PositionBuffer(nn.Module):
    pe: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tok = nn.Embedding(config["vocab"], config["width"])
        self.seg = nn.Embedding(config["segments"], config["width"])
        self.keep_positions(torch.zeros(1, config["positions"], config["width"]))
        self.norm = nn.LayerNorm(config["width"], eps=EPS)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["depth"]))

    def keep_positions(self, table: Tensor) -> None:
        self.register_buffer("pe", table)

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x: Tensor = self.norm(self.tok(ids) + self.pe[:, : ids.shape[1]] + self.seg(segments))
        for layer in self.layers:
            x = layer(x, keep)
        return x


class PositionAttribute(PositionBuffer):
    def keep_positions(self, table: Tensor) -> None:
        self.pe = table
