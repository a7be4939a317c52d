"""ALBERT (Lan et al. 2020) as a user writes it, without annotations."""

# mypy: ignore-errors

import math

import torch
from torch import nn


def gelu_new(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        width, self.heads, eps = c["hidden_size"], c["num_attention_heads"], c["layer_norm_eps"]
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.attn_norm = nn.LayerNorm(width, eps=eps)
        self.inner = nn.Linear(width, c["intermediate_size"])
        self.outer = nn.Linear(c["intermediate_size"], width)
        self.norm = nn.LayerNorm(width, eps=eps)

    def attend(self, x, keep):
        b, s, e = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q.view(b, s, self.heads, e // self.heads).permute(0, 2, 1, 3)
        k = k.view(b, s, self.heads, e // self.heads).permute(0, 2, 1, 3)
        v = v.view(b, s, self.heads, e // self.heads).permute(0, 2, 1, 3)
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(e // self.heads)
        scores = scores + (1.0 - keep[:, None, None, :].to(x.dtype)) * -1e9
        probs = scores.softmax(dim=-1)
        return torch.matmul(probs, v).permute(0, 2, 1, 3).reshape(b, s, e)

    def forward(self, x, keep):
        x = self.attn_norm(x + self.out(self.attend(x, keep)))
        return self.norm(x + self.outer(gelu_new(self.inner(x))))


class Embed(nn.Module):
    def __init__(self, c):
        super().__init__()
        width = c["embedding_size"]
        self.word = nn.Embedding(c["vocab_size"], width)
        self.place = nn.Embedding(c["max_position_embeddings"], width)
        self.kind = nn.Embedding(c["type_vocab_size"], width)
        self.norm = nn.LayerNorm(width, eps=c["layer_norm_eps"])

    def forward(self, ids, kinds):
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.norm(self.word(ids) + self.place(places) + self.kind(kinds))


class Net(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = Embed(c)
        self.lift = nn.Linear(c["embedding_size"], c["hidden_size"])
        self.layer = Layer(c)
        self.depth = c["num_hidden_layers"]
        self.pool = nn.Linear(c["hidden_size"], c["hidden_size"])
        self.classify = nn.Linear(c["hidden_size"], len(c["id2label"]))

    def forward(self, ids, keep, kinds):
        x = self.lift(self.embed(ids, kinds))
        for _ in range(self.depth):
            x = self.layer(x, keep)
        pooled = torch.tanh(self.pool(x[:, 0]))
        return self.classify(pooled)
