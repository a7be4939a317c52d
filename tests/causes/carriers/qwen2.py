"""Qwen2 (Yang et al. 2024) as a user writes it, without annotations."""

# mypy: ignore-errors

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    x1, x2 = x[..., :half], x[..., half:]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        width, self.heads, self.groups = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
        self.size = width // self.heads
        self.q = nn.Linear(width, self.heads * self.size)
        self.k = nn.Linear(width, self.groups * self.size)
        self.v = nn.Linear(width, self.groups * self.size)
        self.o = nn.Linear(self.heads * self.size, width, bias=False)

    def forward(self, x, cos, sin, allowed):
        b, s, _ = x.shape
        q = self.q(x).view(b, s, self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(b, s, self.groups, self.size).transpose(1, 2)
        v = self.v(x).view(b, s, self.groups, self.size).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k = k.repeat_interleave(self.heads // self.groups, dim=1)
        v = v.repeat_interleave(self.heads // self.groups, dim=1)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * self.size**-0.5
        scores = scores.masked_fill(~allowed, torch.finfo(x.dtype).min)
        probs = torch.softmax(scores, dim=-1)
        y = torch.einsum("bhqk,bhkd->bqhd", probs, v)
        return self.o(y.reshape(b, s, -1))


class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.up = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.down = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1 = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.attn = Attention(c)
        self.norm2 = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.mlp = Mlp(c)

    def forward(self, x, cos, sin, allowed):
        h = x + self.attn(self.norm1(x), cos, sin, allowed)
        return h + self.mlp(self.norm2(h))


class Net(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)
        self.size = c["hidden_size"] // c["num_attention_heads"]
        self.base = 10000.0

    def forward(self, ids, mask):
        s = ids.shape[1]
        inv = 1.0 / self.base ** (torch.arange(0, self.size, 2, device=ids.device).float() / self.size)
        angles = torch.outer(torch.arange(s, device=ids.device).float(), inv)
        x = self.tok(ids)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        row = torch.arange(s, device=ids.device)
        causal = row[None, :] <= row[:, None]
        allowed = causal[None, None] & mask[:, None, None, :].bool()
        for layer in self.layers:
            x = layer(x, cos, sin, allowed)
        x = self.norm(x)
        return self.head(x)
