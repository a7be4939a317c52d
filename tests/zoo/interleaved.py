"""Query, key and value in one matrix, taking turns head by head."""

from __future__ import annotations

from torch import Tensor, nn

from tests.zoo.parts import EPS, Config, Embeddings, attend, join


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.heads = config["width"], config["heads"]
        self.query_key_value = nn.Linear(width, 3 * width)
        self.dense = nn.Linear(width, width)
        self.post_attention_norm = nn.LayerNorm(width, eps=EPS)
        self.mlp = nn.Sequential(nn.Linear(width, config["inner"]), nn.GELU(), nn.Linear(config["inner"], width))
        self.post_mlp_norm = nn.LayerNorm(width, eps=EPS)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.query_key_value(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, dim=-1)
        x = self.post_attention_norm(x + self.dense(join(attend(q, k, v, keep))))
        out: Tensor = self.post_mlp_norm(x + self.mlp(x))
        return out


class Interleaved(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["depth"]))

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x: Tensor = self.embeddings(ids, segments)
        for layer in self.layers:
            x = layer(x, keep)
        return x
