"""An encoder-decoder as Marian has it (Vaswani et al. 2017): post-norm, sinusoids, scaled embeddings."""

# mypy: disable-error-code="no-any-return,no-untyped-call,index"
# As users write a model: what a module gives has no type there.

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, HEADS, INNER, VOCABULARY, LAYERS, LONGEST = 24, 4, 40, 53, 2, 64


def sinusoids(length: int) -> Tensor:
    speeds = 10000.0 ** (torch.arange(0, HIDDEN, 2).double() / HIDDEN)
    turn = torch.arange(length).double()[:, None] / speeds
    return torch.cat((turn.sin(), turn.cos()), dim=-1).float()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HIDDEN)
        self.k_proj = nn.Linear(HIDDEN, HIDDEN)
        self.v_proj = nn.Linear(HIDDEN, HIDDEN)
        self.out_proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, memory: Tensor, allowed: Tensor) -> Tensor:
        b, s, _ = x.shape
        split = lambda y: y.view(b, -1, HEADS, HIDDEN // HEADS).transpose(1, 2)  # noqa: E731
        q = split(self.q_proj(x)) / math.sqrt(HIDDEN // HEADS)
        k, v = split(self.k_proj(memory)), split(self.v_proj(memory))
        scores = q @ k.transpose(-1, -2)
        scores = scores + (~allowed).to(scores.dtype) * -1e30
        shares = scores.softmax(-1)
        return self.out_proj((shares @ v).transpose(1, 2).reshape(b, s, HIDDEN))


class EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.self_attn_layer_norm = nn.LayerNorm(HIDDEN)
        self.fc1 = nn.Linear(HIDDEN, INNER)
        self.fc2 = nn.Linear(INNER, HIDDEN)
        self.final_layer_norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        x = self.self_attn_layer_norm(x + self.self_attn(x, x, allowed))
        return self.final_layer_norm(x + self.fc2(F.silu(self.fc1(x))))


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.self_attn_layer_norm = nn.LayerNorm(HIDDEN)
        self.encoder_attn = Attention()
        self.encoder_attn_layer_norm = nn.LayerNorm(HIDDEN)
        self.fc1 = nn.Linear(HIDDEN, INNER)
        self.fc2 = nn.Linear(INNER, HIDDEN)
        self.final_layer_norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor, memory: Tensor, own: Tensor, allowed: Tensor) -> Tensor:
        x = self.self_attn_layer_norm(x + self.self_attn(x, x, own))
        x = self.encoder_attn_layer_norm(x + self.encoder_attn(x, memory, allowed))
        return self.final_layer_norm(x + self.fc2(F.silu(self.fc1(x))))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(LAYERS))
        self.register_buffer("positions", sinusoids(LONGEST), persistent=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.positions[: x.shape[1]]
        for layer in self.layers:
            x = layer(x, mask[:, None, None, :].bool())
        return x


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.register_buffer("positions", sinusoids(LONGEST), persistent=False)

    def forward(self, x: Tensor, memory: Tensor, own: Tensor, mask: Tensor) -> Tensor:
        length = x.shape[1]
        x = x + self.positions[:length]
        own = torch.ones(length, length, dtype=torch.bool).tril() & own[:, None, None, :].bool()
        for layer in self.layers:
            x = layer(x, memory, own, mask[:, None, None, :].bool())
        return x


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=0)
        self.encoder = Encoder()
        self.decoder = Decoder()

    def forward(self, ids: Tensor, mask: Tensor, targets: Tensor, own: Tensor) -> Tensor:
        memory = self.encoder(self.shared(ids) * math.sqrt(HIDDEN), mask)
        return self.decoder(self.shared(targets) * math.sqrt(HIDDEN), memory, own, mask)


class Port(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Body()
        self.register_buffer("final_logits_bias", torch.zeros(1, VOCABULARY))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor, decoder_attention_mask: Tensor
    ) -> Tensor:
        x = self.model(input_ids, attention_mask, decoder_input_ids, decoder_attention_mask)
        return x @ self.model.shared.weight.T + self.final_logits_bias
