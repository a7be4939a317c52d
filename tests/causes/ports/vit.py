"""A vision transformer (Dosovitskiy et al. 2020): patches, a class token, pre-norm."""

# mypy: disable-error-code="no-any-return,no-untyped-call,index"
# As users write a model: what a module gives has no type there.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, HEADS, INNER, LAYERS, PIXELS, PATCH, LABELS, EPS = 24, 4, 40, 2, 32, 8, 5, 1e-3


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, HIDDEN, kernel_size=PATCH, stride=PATCH)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.projection(pixels).flatten(2).transpose(1, 2)


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, HIDDEN))
        self.position_embeddings = nn.Parameter(torch.zeros(1, (PIXELS // PATCH) ** 2 + 1, HIDDEN))
        self.patch_embeddings = Patches()

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embeddings(pixels)
        x = torch.cat((self.cls_token.expand(len(pixels), -1, -1), patches), dim=1)
        return x + self.position_embeddings


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HIDDEN)
        self.k_proj = nn.Linear(HIDDEN, HIDDEN)
        self.v_proj = nn.Linear(HIDDEN, HIDDEN)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, HEADS, -1).transpose(1, 2)
        k = self.k_proj(x).view(b, s, HEADS, -1).transpose(1, 2)
        v = self.v_proj(x).view(b, s, HEADS, -1).transpose(1, 2)
        context = F.scaled_dot_product_attention(q, k, v)
        return self.o_proj(context.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(HIDDEN, INNER)
        self.fc2 = nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.layernorm_before = nn.LayerNorm(HIDDEN, eps=EPS)
        self.layernorm_after = nn.LayerNorm(HIDDEN, eps=EPS)
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.layernorm_before(x))
        return x + self.mlp(self.layernorm_after(x))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.layernorm = nn.LayerNorm(HIDDEN, eps=EPS)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embeddings(pixels)
        for layer in self.layers:
            x = layer(x)
        return self.layernorm(x)


class Port(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vit = Body()
        self.classifier = nn.Linear(HIDDEN, LABELS)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.classifier(self.vit(pixel_values)[:, 0])
