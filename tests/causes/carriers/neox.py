"""GPT-NeoX (Black et al. 2022) as a user writes it, without annotations."""

# mypy: ignore-errors

import torch
import torch.nn.functional as F
from torch import nn


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.rot = self.size // 4
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, mask):
        b, s, e = x.shape
        qkv = self.qkv(x).view(b, s, self.heads, 3 * self.size)
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=-1)
        freq = 10000 ** (-torch.arange(0, self.rot, 2, device=x.device).float() / self.rot)
        angle = torch.arange(s, device=x.device).float()[:, None] * freq
        angle = torch.cat((angle, angle), dim=-1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        q1, q2 = q[..., : self.rot], q[..., self.rot :]
        k1, k2 = k[..., : self.rot], k[..., self.rot :]
        q = torch.cat((q1 * cos + rotate_half(q1) * sin, q2), dim=-1)
        k = torch.cat((k1 * cos + rotate_half(k1) * sin, k2), dim=-1)
        scores = q @ k.transpose(-1, -2) / self.size**0.5
        causal = torch.ones(s, s, dtype=torch.bool, device=x.device).tril()
        scores = scores.masked_fill(~(causal & mask[:, None, None, :].bool()), -1e9)
        y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, s, e))


class Mlp(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width, heads, inner, eps):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.attn = Attention(width, heads)
        self.mlp = Mlp(width, inner)

    def forward(self, x, mask):
        return x + self.attn(self.norm1(x), mask) + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.blocks = nn.ModuleList(
            Block(c["hidden_size"], c["num_attention_heads"], c["intermediate_size"], c["layer_norm_eps"])
            for _ in range(c["num_hidden_layers"])
        )
        self.norm = nn.LayerNorm(c["hidden_size"], eps=c["layer_norm_eps"])
        self.head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)

    def forward(self, ids, mask):
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))
