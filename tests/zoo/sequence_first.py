"""Sequence first throughout, torch's own attention, True = ignore."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.parts import EPS, Config, Embeddings


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config["width"]
        self.attn = nn.MultiheadAttention(width, config["heads"])
        self.fc1, self.fc2 = nn.Linear(width, config["inner"]), nn.Linear(config["inner"], width)
        self.ln1, self.ln2 = nn.LayerNorm(width, eps=EPS), nn.LayerNorm(width, eps=EPS)

    def forward(self, x: Tensor, ignore: Tensor) -> Tensor:
        x = self.ln1(x + self.attn(x, x, x, key_padding_mask=ignore, need_weights=False)[0])
        out: Tensor = self.ln2(x + self.fc2(F.gelu(self.fc1(x))))
        return out


class SequenceFirst(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["depth"]))

    def forward(self, src: Tensor, ignore: Tensor, segments: Tensor) -> Tensor:
        x: Tensor = self.embeddings(src.T, segments.T).transpose(0, 1)
        for layer in self.layers:
            x = layer(x, ignore)
        return x
