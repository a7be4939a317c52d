"""No modules at all: a dictionary of parameters and functions over it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.parts import EPS, Config, attend, join, split


class Functional(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        e, f, self.heads, self.depth = config["width"], config["inner"], config["heads"], config["depth"]
        shapes: dict[str, tuple[int, ...]] = {
            "wte": (config["vocab"], e),
            "wpe": (config["positions"], e),
            "wse": (config["segments"], e),
        }
        shapes |= {"g": (e,), "b": (e,)}
        for i in range(self.depth):
            shapes |= {f"w{part}_{i}": (e, e) for part in "qkvo"} | {f"b{part}_{i}": (e,) for part in "qkvo"}
            shapes |= {f"w1_{i}": (e, f), f"b1_{i}": (f,), f"w2_{i}": (f, e), f"b2_{i}": (e,)}
            shapes |= {f"{kind}_{i}": (e,) for kind in ("ga", "ba", "gf", "bf")}
        self.params = nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()})

    def affine(self, x: Tensor, part: str, i: int) -> Tensor:
        out: Tensor = x @ self.params[f"w{part}_{i}"] + self.params[f"b{part}_{i}"]
        return out

    def norm(self, x: Tensor, gain: str, shift: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.params[gain], self.params[shift], EPS)

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        p = self.params
        x = self.norm(p["wte"][ids] + p["wpe"][: ids.shape[1]] + p["wse"][segments], "g", "b")
        for i in range(self.depth):
            q, k, v = (split(self.affine(x, part, i), self.heads) for part in "qkv")
            x = self.norm(x + self.affine(join(attend(q, k, v, keep)), "o", i), f"ga_{i}", f"ba_{i}")
            x = self.norm(x + self.affine(F.gelu(self.affine(x, "1", i)), "2", i), f"gf_{i}", f"bf_{i}")
        return x
