"""A norm of scale and shift, and a segment table whose row 0 is the padding's: segments are counted from 1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.parts import EPS, Config, attend, join, split


class LayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.eps = EPS
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return self.scale * centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + self.eps) + self.shift


class TransformerBlock(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.heads = config["width"], config["heads"]
        self.W_query, self.W_key, self.W_value = (nn.Linear(width, width) for _ in range(3))
        self.out_proj = nn.Linear(width, width)
        self.norm1 = LayerNorm(width)
        self.ff = nn.Sequential(nn.Linear(width, config["inner"]), nn.GELU(), nn.Linear(config["inner"], width))
        self.norm2 = LayerNorm(width)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (split(linear(x), self.heads) for linear in (self.W_query, self.W_key, self.W_value))
        x = self.norm1(x + self.out_proj(join(attend(q, k, v, keep))))
        out: Tensor = self.norm2(x + self.ff(x))
        return out


class ThreeSegments(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(config["vocab"], config["width"])
        self.pos_emb = nn.Embedding(config["positions"], config["width"])
        self.seg_emb = nn.Embedding(3, config["width"], padding_idx=0)
        self.norm = LayerNorm(config["width"])
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config["depth"]))

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        x: Tensor = self.norm(self.tok_emb(ids) + self.pos_emb(places) + F.embedding(segments + 1, self.seg_emb.weight))
        for block in self.blocks:
            x = block(x, keep)
        return x
