"""Llama 3 (Dubey et al. 2024): shared key and value heads, scaled rotation, gated feed-forward network."""

# mypy: disable-error-code="no-any-return,no-untyped-call,index"
# As users write a model: what a module gives has no type there.

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, HEADS, SHARED, SIZE, INNER, VOCABULARY, LAYERS = 32, 8, 2, 8, 40, 53, 2
THETA, FACTOR, LOW, HIGH, KNOWN, EPS = 10000.0, 8.0, 1.0, 4.0, 64, 1e-3


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + EPS))


def angles(length: int) -> tuple[Tensor, Tensor]:
    speeds = 1.0 / (THETA ** (torch.arange(0, SIZE, 2).float() / SIZE))
    waves = 2 * math.pi / speeds
    slow = torch.where(waves > KNOWN / LOW, speeds / FACTOR, speeds)
    share = (KNOWN / waves - LOW) / (HIGH - LOW)
    between = (1 - share) * slow / FACTOR + share * slow
    medium = (waves >= KNOWN / HIGH) & (waves <= KNOWN / LOW)
    speeds = torch.where(medium, between, slow)
    turn = torch.arange(length).float()[:, None] * speeds
    turn = torch.cat((turn, turn), dim=-1)
    return turn.cos(), turn.sin()


def rotate_half(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * SIZE, bias=False)
        self.k_proj = nn.Linear(HIDDEN, SHARED * SIZE, bias=False)
        self.v_proj = nn.Linear(HIDDEN, SHARED * SIZE, bias=False)
        self.o_proj = nn.Linear(HEADS * SIZE, HIDDEN, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, HEADS, SIZE).transpose(1, 2)
        k = self.k_proj(x).view(b, s, SHARED, SIZE).transpose(1, 2)
        v = self.v_proj(x).view(b, s, SHARED, SIZE).transpose(1, 2)
        cos, sin = (angle.to(x.dtype) for angle in angles(s))
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        k = k.repeat_interleave(HEADS // SHARED, dim=1)
        v = v.repeat_interleave(HEADS // SHARED, dim=1)
        allowed = torch.ones(s, s, dtype=torch.bool).tril()[None, None] & (mask[:, None, None, :] > 0)
        bias = torch.zeros(allowed.shape, dtype=x.dtype).masked_fill(~allowed, torch.finfo(x.dtype).min)
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.o_proj(context.transpose(1, 2).reshape(b, s, HEADS * SIZE))


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = Feed()
        self.input_layernorm = Norm()
        self.post_attention_layernorm = Norm()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = Norm()

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


class Port(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Body()
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.lm_head(self.model(input_ids, attention_mask))
