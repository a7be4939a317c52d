"""No nn.Linear: raw parameters [h e d], einsum, norms of gamma and beta."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.parts import EPS, Config, Embeddings, attend


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))
        self.beta = nn.Parameter(torch.zeros(width))
        self.eps = EPS

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.gamma.shape, self.gamma, self.beta, self.eps)


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        h, e, f = config["heads"], config["width"], config["inner"]
        self.W_Q, self.W_K, self.W_V = (nn.Parameter(torch.randn(h, e, e // h)) for _ in range(3))
        self.b_Q, self.b_K, self.b_V = (nn.Parameter(torch.zeros(h, e // h)) for _ in range(3))
        self.W_O, self.b_O = nn.Parameter(torch.randn(h, e // h, e)), nn.Parameter(torch.zeros(e))
        self.W_in, self.b_in = nn.Parameter(torch.randn(e, f)), nn.Parameter(torch.zeros(f))
        self.W_out, self.b_out = nn.Parameter(torch.randn(f, e)), nn.Parameter(torch.zeros(e))
        self.ln1, self.ln2 = Norm(e), Norm(e)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (
            torch.einsum("bse,hed->bhsd", x, weight) + bias[:, None]
            for weight, bias in ((self.W_Q, self.b_Q), (self.W_K, self.b_K), (self.W_V, self.b_V))
        )
        x = self.ln1(x + torch.einsum("bhsd,hde->bse", attend(q, k, v, keep), self.W_O) + self.b_O)
        out: Tensor = self.ln2(x + F.gelu(x @ self.W_in + self.b_in) @ self.W_out + self.b_out)
        return out


class RawHeads(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["depth"]))

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x: Tensor = self.embeddings(ids, segments)
        for layer in self.layers:
            x = layer(x, keep)
        return x
