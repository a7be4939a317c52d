"""T5 1.1 (Raffel et al. 2020) as a user writes it, without annotations."""

# mypy: ignore-errors

import math

import torch
import torch.nn.functional as F
from torch import nn


class Norm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def buckets(q, k, count, far, both):
    relative = torch.arange(k)[None, :] - torch.arange(q)[:, None]
    bucket = torch.zeros_like(relative)
    if both:
        count //= 2
        bucket = bucket + (relative > 0).long() * count
        relative = relative.abs()
    else:
        relative = (-relative).clamp(min=0)
    exact = count // 2
    large = exact + (torch.log(relative.float().clamp(min=1) / exact) / math.log(far / exact) * (count - exact)).long()
    large = large.clamp(max=count - 1)
    return bucket + torch.where(relative < exact, relative, large)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        inner, self.heads = c["num_heads"] * c["d_kv"], c["num_heads"]
        self.q = nn.Linear(c["d_model"], inner, bias=False)
        self.k = nn.Linear(c["d_model"], inner, bias=False)
        self.v = nn.Linear(c["d_model"], inner, bias=False)
        self.o = nn.Linear(inner, c["d_model"], bias=False)

    def forward(self, x, memory, bias):
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, y in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        scores = q @ k.transpose(2, 3) + bias
        y = scores.softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(2))


class Ff(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate = nn.Linear(c["d_model"], c["d_ff"], bias=False)
        self.up = nn.Linear(c["d_model"], c["d_ff"], bias=False)
        self.down = nn.Linear(c["d_ff"], c["d_model"], bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))


class Layer(nn.Module):
    def __init__(self, c, cross):
        super().__init__()
        width, eps = c["d_model"], c["layer_norm_epsilon"]
        self.attn, self.attn_norm = Attention(c), Norm(width, eps)
        self.ff, self.ff_norm = Ff(c), Norm(width, eps)
        if cross:
            self.cross, self.cross_norm = Attention(c), Norm(width, eps)

    def forward(self, x, bias, memory=None, hidden=None):
        h = self.attn_norm(x)
        x = x + self.attn(h, h, bias)
        if memory is not None:
            x = x + self.cross(self.cross_norm(x), memory, hidden)
        return x + self.ff(self.ff_norm(x))


class Stack(nn.Module):
    def __init__(self, c, cross):
        super().__init__()
        self.cross, self.count = cross, c["relative_attention_num_buckets"]
        self.far = c["relative_attention_max_distance"]
        self.relative = nn.Embedding(self.count, c["num_heads"])
        self.layers = nn.ModuleList(Layer(c, cross) for _ in range(c["num_layers"]))
        self.norm = Norm(c["d_model"], c["layer_norm_epsilon"])

    def forward(self, x, mask, memory=None, hidden=None):
        s = x.shape[1]
        place = buckets(s, s, self.count, self.far, both=not self.cross)
        bias = self.relative(place).permute(2, 0, 1)[None]
        bias = bias + mask
        for layer in self.layers:
            x = layer(x, bias, memory, hidden)
        return self.norm(x)


class Net(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok = nn.Embedding(c["vocab_size"], c["d_model"])
        self.width = c["d_model"]
        self.encoder, self.decoder = Stack(c, False), Stack(c, True)

    def forward(self, ids, keep, target):
        dtype = self.tok.weight.dtype
        padding = (1 - keep[:, None, None, :].to(dtype)) * -1e9
        t = target.shape[1]
        future = torch.full((t, t), -1e9, dtype=dtype).triu(1)
        memory = self.encoder(self.tok(ids), padding)
        x = self.decoder(self.tok(target), future, memory, padding)
        return x * self.width**-0.5 @ self.tok.weight.T
