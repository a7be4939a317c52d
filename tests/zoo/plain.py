"""The layer of the models whose peculiarity lies in their embeddings."""

from __future__ import annotations

from torch import Tensor, nn

from tests.zoo.parts import EPS, Config, attend, join, split


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.heads = config["width"], config["heads"]
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.act, self.down = nn.Linear(width, config["inner"]), nn.GELU(), nn.Linear(config["inner"], width)
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=EPS), nn.LayerNorm(width, eps=EPS)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (split(linear(x), self.heads) for linear in (self.query, self.key, self.value))
        x = self.norm1(x + self.out(join(attend(q, k, v, keep))))
        out: Tensor = self.norm2(x + self.down(self.act(self.up(x))))
        return out
