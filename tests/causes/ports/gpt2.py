"""GPT-2 (Radford et al. 2019) as most scratch versions have it: pre-norm, one fused projection, [in out] weights."""

# mypy: disable-error-code="no-any-return,no-untyped-call,index"
# As users write a model: what a module gives has no type there.

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

HIDDEN, HEADS, VOCABULARY, POSITIONS, LAYERS, EPS = 24, 4, 53, 40, 2, 1e-5


class Conv1D(nn.Module):
    def __init__(self, out: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, out))
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = Conv1D(3 * HIDDEN, HIDDEN)
        self.c_proj = Conv1D(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.c_attn(x).split(HIDDEN, dim=2)
        q = q.view(b, s, HEADS, -1).transpose(1, 2)
        k = k.view(b, s, HEADS, -1).transpose(1, 2)
        v = v.view(b, s, HEADS, -1).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        causal = torch.ones(s, s).tril().bool()
        allowed = causal & mask[:, None, None, :].bool()
        scores = scores.masked_fill(~allowed, -1e30)
        y = scores.softmax(-1) @ v
        y = y.transpose(1, 2).contiguous().view(b, s, HIDDEN)
        return self.c_proj(y)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc = Conv1D(4 * HIDDEN, HIDDEN)
        self.c_proj = Conv1D(HIDDEN, 4 * HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        x = 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
        return self.c_proj(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(HIDDEN, eps=EPS)
        self.attn = Attention()
        self.ln_2 = nn.LayerNorm(HIDDEN, eps=EPS)
        self.mlp = MLP()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x), mask)
        return x + self.mlp(self.ln_2(x))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, HIDDEN)
        self.wpe = nn.Embedding(POSITIONS, HIDDEN)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(HIDDEN, eps=EPS)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1])[None])
        for block in self.h:
            x = block(x, mask)
        return self.ln_f(x)


class Port(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = Body()
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.transformer(input_ids, attention_mask)
        return self.lm_head(x)
