"""OPT (Zhang et al. 2022) as a user writes it, without annotations."""

# mypy: ignore-errors

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.scale = (width // heads) ** -0.5
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.o = nn.Linear(width, width)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, allowed):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=self.scale)
        return self.o(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.attn = Attention(width, heads)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x, allowed):
        x = x + self.attn(self.norm1(x), allowed)
        h = F.relu(self.fc1(self.norm2(x)))
        return x + self.fc2(h)


class Net(nn.Module):
    def __init__(self, c):
        super().__init__()
        width = c["hidden_size"]
        self.tok = nn.Embedding(c["vocab_size"], width)
        self.pos = nn.Embedding(c["max_position_embeddings"] + 2, width)
        self.layers = nn.ModuleList(
            Layer(width, c["num_attention_heads"], c["ffn_dim"]) for _ in range(c["num_hidden_layers"])
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, ids, mask):
        s = ids.shape[1]
        places = mask.cumsum(1) * mask - 1
        x = self.tok(ids) + self.pos(places + 2)
        causal = torch.ones(s, s, dtype=torch.bool, device=ids.device).tril()
        allowed = causal & mask[:, None, None, :].bool()
        allowed = allowed | ~allowed.any(-1, keepdim=True)
        for layer in self.layers:
            x = layer(x, allowed)
        return self.norm(x) @ self.tok.weight.T
