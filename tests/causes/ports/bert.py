"""BERT with its three heads (Devlin et al. 2018), attention written out."""

# mypy: disable-error-code="no-any-return,no-untyped-call,index"
# As users write a model: what a module gives has no type there.

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, HEADS, INNER, VOCABULARY, POSITIONS, LAYERS, EPS = 24, 4, 40, 53, 40, 2, 1e-3


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=0)
        self.position_embeddings = nn.Embedding(POSITIONS, HIDDEN)
        self.token_type_embeddings = nn.Embedding(2, HIDDEN)
        self.LayerNorm = nn.LayerNorm(HIDDEN, eps=EPS)

    def forward(self, ids: Tensor, types: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])[None]
        words = self.word_embeddings(ids)
        x = words + self.position_embeddings(places)
        x = x + self.token_type_embeddings(types)
        return self.LayerNorm(x)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.key = nn.Linear(HIDDEN, HIDDEN)
        self.value = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, s, _ = x.shape
        split = lambda y: y.view(b, s, HEADS, HIDDEN // HEADS).transpose(1, 2)  # noqa: E731
        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        scores = q @ k.transpose(-1, -2) / math.sqrt(HIDDEN // HEADS)
        scores = scores.masked_fill(mask[:, None, None, :] == 0, float("-inf"))
        shares = scores.softmax(dim=-1)
        context = shares @ v
        return context.transpose(1, 2).reshape(b, s, HIDDEN)


class SelfOutput(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, HIDDEN)
        self.LayerNorm = nn.LayerNorm(HIDDEN, eps=EPS)

    def forward(self, x: Tensor, around: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + around)


class Intermediate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(HIDDEN, INNER)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.dense(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self = SelfAttention()
        self.output = SelfOutput(HIDDEN)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.output(self.self(x, mask), x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.intermediate = Intermediate()
        self.output = SelfOutput(INNER)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        attended = self.attention(x, mask)
        return self.output(self.intermediate(attended), attended)


class Pooler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dense(x[:, 0]))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer() for _ in range(LAYERS))


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.encoder = Encoder()
        self.pooler = Pooler()

    def forward(self, ids: Tensor, mask: Tensor, types: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embeddings(ids, types)
        for layer in self.encoder.layer:
            x = layer(x, mask)
        return x, self.pooler(x)


class Transform(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.LayerNorm = nn.LayerNorm(HIDDEN, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        return self.LayerNorm(F.gelu(self.dense(x)))


class Predictions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transform = Transform()
        self.decoder = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.transform(x))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.predictions = Predictions()
        self.seq_relationship = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
        return self.predictions(x), self.seq_relationship(pooled)


class Port(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bert = Bert()
        self.cls = Heads()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple[Tensor, Tensor]:
        x, pooled = self.bert(input_ids, attention_mask, token_type_ids)
        return self.cls(x, pooled)
