"""Whisper's encoder (Radford et al. 2022) as a user writes it, without annotations."""

# mypy: ignore-errors

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        b, s, e = x.shape
        scale = (e // self.heads) ** -0.25
        q = self.query(x).view(b, s, self.heads, -1).permute(0, 2, 1, 3) * scale
        k = self.key(x).view(b, s, self.heads, -1).permute(0, 2, 3, 1) * scale
        v = self.value(x).view(b, s, self.heads, -1).permute(0, 2, 1, 3)
        w = F.softmax(q @ k, dim=-1)
        return self.out((w @ v).permute(0, 2, 1, 3).flatten(start_dim=2))


class Block(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.attn = Attention(width, heads)
        self.attn_ln = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
        self.mlp_ln = nn.LayerNorm(width)

    def forward(self, x):
        x = x + self.attn(self.attn_ln(x))
        return x + self.mlp(self.mlp_ln(x))


class Net(nn.Module):
    def __init__(self, c):
        super().__init__()
        width = c["d_model"]
        self.conv1 = nn.Conv1d(c["num_mel_bins"], width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(width, width, kernel_size=3, stride=2, padding=1)
        self.positional_embedding = nn.Parameter(torch.zeros(c["max_source_positions"], width))
        self.blocks = nn.ModuleList(
            Block(width, c["encoder_attention_heads"], c["encoder_ffn_dim"]) for _ in range(c["encoder_layers"])
        )
        self.ln_post = nn.LayerNorm(width)

    def forward(self, mel):
        x = F.gelu(self.conv1(mel))
        x = F.gelu(self.conv2(x))
        x = x.permute(0, 2, 1)
        x = x + self.positional_embedding
        for block in self.blocks:
            x = block(x)
        return self.ln_post(x)
