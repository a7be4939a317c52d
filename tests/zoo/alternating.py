"""Attention and feed-forward take turns in one list: two entries are a layer."""

from __future__ import annotations

from torch import Tensor, nn

from tests.zoo.parts import EPS, Config, Embeddings, attend, join, split


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.heads = config["width"], config["heads"]
        self.to_qkv = nn.Linear(width, 3 * width)
        self.to_out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=EPS)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (split(one, self.heads) for one in self.to_qkv(x).chunk(3, dim=-1))
        out: Tensor = self.norm(x + self.to_out(join(attend(q, k, v, keep))))
        return out


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, inner = config["width"], config["inner"]
        self.net = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
        self.norm = nn.LayerNorm(width, eps=EPS)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        out: Tensor = self.norm(x + self.net(x))
        return out


class Alternating(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList()
        for _ in range(config["depth"]):
            self.layers.append(Attention(config))
            self.layers.append(FeedForward(config))

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x: Tensor = self.embeddings(ids, segments)
        for layer in self.layers:
            x = layer(x, keep)
        return x
