"""Gemma 2 (Gemma Team 2024) as a user writes it, without annotations."""

# mypy: ignore-errors

import torch
import torch.nn.functional as F
from torch import nn


class Norm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x):
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed * (1 + self.weight)


def rope(x, base=10000.0):
    s, d = x.shape[-2:]
    inv = base ** -(torch.arange(0, d, 2, device=x.device).float() / d)
    angle = torch.arange(s, device=x.device).float()[:, None] * inv[None]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, c, window):
        super().__init__()
        width, self.heads, self.groups, self.size = (
            c["hidden_size"],
            c["num_attention_heads"],
            c["num_key_value_heads"],
            c["head_dim"],
        )
        self.window = window
        self.cap = c["attn_logit_softcapping"]
        self.scale = c["query_pre_attn_scalar"] ** -0.5
        self.q = nn.Linear(width, self.heads * self.size, bias=False)
        self.kv = nn.Linear(width, 2 * self.groups * self.size, bias=False)
        self.o = nn.Linear(self.heads * self.size, width, bias=False)

    def forward(self, x, keep):
        b, s, _ = x.shape
        q = self.q(x).view(b, s, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(x).view(b, s, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)
        q, k = rope(q), rope(k)
        k = k.repeat_interleave(self.heads // self.groups, 1)
        v = v.repeat_interleave(self.heads // self.groups, 1)
        scores = q @ k.mT * self.scale
        scores = self.cap * torch.tanh(scores / self.cap)
        at = torch.arange(s, device=x.device)
        back = at[:, None] - at[None, :]
        allowed = back >= 0
        if self.window:
            allowed = allowed & (back < self.window)
        allowed = allowed & keep[:, None, None, :].bool()
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        y = scores.softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.wi = nn.Linear(width, 2 * inner, bias=False)
        self.wo = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        gate, up = self.wi(x).chunk(2, dim=-1)
        return self.wo(F.gelu(gate, approximate="tanh") * up)


class Layer(nn.Module):
    def __init__(self, c, i):
        super().__init__()
        width, eps = c["hidden_size"], c["rms_norm_eps"]
        self.attn = Attention(c, c["sliding_window"] if i % 2 == 0 else None)
        self.mlp = Mlp(width, c["intermediate_size"])
        self.n1, self.n2, self.n3, self.n4 = (Norm(width, eps) for _ in range(4))

    def forward(self, x, keep):
        x = x + self.n2(self.attn(self.n1(x), keep))
        return x + self.n4(self.mlp(self.n3(x)))


class Net(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c["num_hidden_layers"]))
        self.norm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.cap = c["final_logit_softcapping"]
        self.scale = c["hidden_size"] ** 0.5

    def forward(self, ids, keep):
        x = self.tok(ids) * self.scale
        for layer in self.layers:
            x = layer(x, keep)
        x = self.norm(x)
        logits = x @ self.tok.weight.T
        return self.cap * torch.tanh(logits / self.cap)
