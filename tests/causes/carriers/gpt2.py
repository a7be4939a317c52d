"""GPT-2 (Radford et al. 2019), with its fused projection split as a user writes it, without annotations."""

# mypy: ignore-errors

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width)

    def forward(self, x, allowed):
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads, eps):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.fc = nn.Linear(width, 4 * width)
        self.proj = nn.Linear(4 * width, width)

    def forward(self, x, allowed):
        x = x + self.attn(self.norm1(x), allowed)
        return x + self.proj(F.gelu(self.fc(self.norm2(x)), approximate="tanh"))


class Net(nn.Module):
    def __init__(self, c):
        super().__init__()
        width, eps = c["n_embd"], c["layer_norm_epsilon"]
        self.tok = nn.Embedding(c["vocab_size"], width)
        self.pos = nn.Embedding(c["n_positions"], width)
        self.blocks = nn.ModuleList(Block(width, c["n_head"], eps) for _ in range(c["n_layer"]))
        self.norm = nn.LayerNorm(width, eps=eps)

    def forward(self, ids, mask):
        s = ids.shape[1]
        x = self.tok(ids) + self.pos(torch.arange(s, device=ids.device))
        causal = torch.ones(s, s, dtype=torch.bool, device=ids.device).tril()
        allowed = causal & mask[:, None, None, :].bool()
        allowed = allowed | ~allowed.any(-1, keepdim=True)
        for block in self.blocks:
            x = block(x, allowed)
        return self.norm(x) @ self.tok.weight.T
