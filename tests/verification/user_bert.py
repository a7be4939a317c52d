"""BERTs as somebody else writes them, with tables of their own: other names, other layouts, other mathematics."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS = 3


class FusedAttention(nn.Module):
    """q, k and v from one matrix, sequence first, True in the mask = padding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        s, b, e = x.shape
        q, k, v = self.qkv(x).view(s, b, 3, HEADS, e // HEADS).permute(2, 1, 3, 0, 4)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / (e // HEADS) ** 0.5
        shares = scores.masked_fill(padding[:, None, None, :], -1e4).softmax(-1)
        mixed = torch.einsum("bhqk,bhkd->qbhd", shares, v).reshape(s, b, e)
        projected: Tensor = self.proj(mixed)
        return projected


class HandNorm(nn.Module):
    """Layer normalisation, written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt() * self.scale + self.shift


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.attn = FusedAttention(width)
        self.ln1 = HandNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.ln2 = HandNorm(width)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = self.ln1(x + self.attn(x, padding))
        wide = self.up(x)
        wide = wide * 0.5 * (1.0 + torch.erf(wide / 2.0**0.5))
        y: Tensor = self.ln2(x + self.down(wide))
        return y


class MyBert(nn.Module):
    """Sequence first; it knows of no pooler and no heads."""

    def __init__(
        self, *, vocabulary: int = 40, width: int = 24, depth: int = 3, inner: int = 40, length: int = 24
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.segments = nn.Embedding(2, width)
        self.ln = HandNorm(width)
        self.blocks = nn.ModuleList([Block(width, inner) for _ in range(depth)])

    def forward(self, tokens: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
        x = self.ln(self.tokens(tokens) + self.segments(segments) + self.places[: len(tokens), None])
        for block in self.blocks:
            x = block(x, mask)
        found: Tensor = x
        return found


FUSED_TABLE = """
[mapping]
name = "mine"
prefix = "bert."

[tensors]
"bert.embeddings.word_embeddings.weight" = "tokens.weight"
"bert.embeddings.position_embeddings.weight" = "places"
"bert.embeddings.token_type_embeddings.weight" = "segments.weight"
"bert.embeddings.LayerNorm.{w:weight,bias}" = "ln.{w:scale,shift}"
"bert.encoder.layer.{i}.attention.self.{p:query,key,value}.weight [o e]" = "blocks.{i}.attn.qkv.weight [(p o) e]"
"bert.encoder.layer.{i}.attention.self.{p:query,key,value}.bias [o]" = "blocks.{i}.attn.qkv.bias [(p o)]"
"bert.encoder.layer.{i}.attention.output.dense.{w:weight,bias}" = "blocks.{i}.attn.proj.{w:weight,bias}"
"bert.encoder.layer.{i}.attention.output.LayerNorm.{w:weight,bias}" = "blocks.{i}.ln1.{w:scale,shift}"
"bert.encoder.layer.{i}.intermediate.dense.{w:weight,bias}" = "blocks.{i}.up.{w:weight,bias}"
"bert.encoder.layer.{i}.output.dense.{w:weight,bias}" = "blocks.{i}.down.{w:weight,bias}"
"bert.encoder.layer.{i}.output.LayerNorm.{w:weight,bias}" = "blocks.{i}.ln2.{w:scale,shift}"

[drop]
"bert.pooler.{*rest}" = "no pooler"
"cls.{*rest}" = "no heads"

[inputs]
"input_ids [b s]" = "tokens [s b]"
"attention_mask [b s]" = "mask -> padding [b s]"
"token_type_ids [b s]" = "segments [s b]"

[probes]
"bert.embeddings [b s e]" = "ln [s b e]"
"bert.encoder.layer.{i}.attention.self.{p:query,key,value} [b s e]" = "blocks.{i}.attn.qkv [s b (p e)]"
"bert.encoder.layer.{i}.attention.self -> scores" = "blocks.{i}.attn -> scores"
"bert.encoder.layer.{i}.attention.self -> probabilities" = "blocks.{i}.attn -> probabilities"
"bert.encoder.layer.{i}.attention.output [b s e]" = "blocks.{i}.ln1 [s b e]"
"bert.encoder.layer.{i}.intermediate.dense [b s f]" = "blocks.{i}.up [s b f]"
"bert.encoder.layer.{i} [b s e]" = "blocks.{i} [s b e]"
". -> last_hidden_state [b s e]" = ". [s b e]"
"""


class Head(nn.Module):
    """One head of attention, a module of its own; it returns a dictionary."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, size) for _ in range(3))

    def forward(self, x: Tensor, bias: Tensor) -> dict[str, Tensor]:
        scores = self.q(x) @ self.k(x).mT * self.q.out_features**-0.5 + bias
        shares = F.softmax(scores, -1)
        return {"mixed": shares @ self.v(x), "shares": shares}


class HeadedBlock(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Head(width, width // HEADS) for _ in range(HEADS)])
        self.proj = nn.Linear(width, width)
        self.ln1 = nn.LayerNorm(width, eps=1e-12)
        self.ffn = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
        self.ln2 = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        mixed = self.proj(torch.cat([head(x, bias)["mixed"] for head in self.heads], -1))
        mixed += x  # in place: what a probe saw must not change behind it
        x = self.ln1(mixed)
        y: Tensor = self.ln2(x + self.ffn(x))
        return y


class HeadedBert(nn.Module):
    """A module for each head, an additive mask, and the encoder called by position."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.place, self.kind = nn.Embedding(40, 24), nn.Embedding(24, 24), nn.Embedding(2, 24)
        self.ln = nn.LayerNorm(24, eps=1e-12)
        self.blocks = nn.ModuleList([HeadedBlock(24, 40) for _ in range(3)])
        self.pool = nn.Linear(24, 24)

    def forward(self, ids: Tensor, bias: Tensor, /, kinds: Tensor) -> Tensor:
        x = self.ln(self.word(ids) + self.kind(kinds) + self.place(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = block(x, bias)
        return torch.tanh(self.pool(x[:, 0]))


HEADED_TABLE = """
[mapping]
name = "headed"
prefix = "bert."

[sizes]
h = "num_attention_heads"

[tensors]
"bert.embeddings.{t:word,position,token_type}_embeddings.weight" = "{t:word,place,kind}.weight"
"bert.embeddings.LayerNorm.{w:weight,bias}" = "ln.{w:weight,bias}"
"bert.encoder.layer.{i}.attention.self.{p:query,key,value}.weight [(h d) e]" = "blocks.{i}.heads.{h}.{p:q,k,v}.weight [d e]"
"bert.encoder.layer.{i}.attention.self.{p:query,key,value}.bias [(h d)]" = "blocks.{i}.heads.{h}.{p:q,k,v}.bias [d]"
"bert.encoder.layer.{i}.attention.output.dense.{w:weight,bias}" = "blocks.{i}.proj.{w:weight,bias}"
"bert.encoder.layer.{i}.attention.output.LayerNorm.{w:weight,bias}" = "blocks.{i}.ln1.{w:weight,bias}"
"bert.encoder.layer.{i}.intermediate.dense.{w:weight,bias}" = "blocks.{i}.ffn.0.{w:weight,bias}"
"bert.encoder.layer.{i}.output.dense.{w:weight,bias}" = "blocks.{i}.ffn.2.{w:weight,bias}"
"bert.encoder.layer.{i}.output.LayerNorm.{w:weight,bias}" = "blocks.{i}.ln2.{w:weight,bias}"
"bert.pooler.dense.{w:weight,bias}" = "pool.{w:weight,bias}"

[drop]
"cls.{*rest}" = "no heads"

[inputs]
"input_ids" = "0"
"attention_mask [b s]" = "1 -> additive [b 1 s]"
"token_type_ids" = "kinds"

[probes]
"bert.embeddings" = "ln"
"bert.encoder.layer.{i}.attention.self.{p:query,key,value} [b s (h d)]" = "blocks.{i}.heads.{h}.{p:q,k,v} [b s d]"
"bert.encoder.layer.{i}.attention.self -> scores [b h q k]" = "blocks.{i}.heads.{h} -> scores [b q k]"
"bert.encoder.layer.{i}.attention.self -> 1 [b h q k]" = "blocks.{i}.heads.{h} -> shares [b q k]"
"bert.encoder.layer.{i}.attention.self -> 0 [b s (h d)]" = "blocks.{i}.heads.{h} -> mixed [b s d]"
"bert.encoder.layer.{i}.attention.output.dense" = "blocks.{i}.proj"
"bert.encoder.layer.{i}.attention.output" = "blocks.{i}.ln1"
"bert.encoder.layer.{i}.intermediate" = "blocks.{i}.ffn.1"
"bert.encoder.layer.{i}" = "blocks.{i}"
"bert.pooler" = "."
"""  # noqa: E501 - a rule is one line


class TorchBert(nn.Module):
    """torch's own encoder, whose fast path in evaluation would call none of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.place, self.kind = nn.Embedding(40, 24), nn.Embedding(24, 24), nn.Embedding(2, 24)
        self.ln = nn.LayerNorm(24, eps=1e-12)
        layer = nn.TransformerEncoderLayer(24, HEADS, 40, activation="gelu", layer_norm_eps=1e-12, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.pool = nn.Linear(24, 24)

    def forward(self, ids: Tensor, padding: Tensor, kinds: Tensor) -> Tensor:
        x = self.ln(self.word(ids) + self.kind(kinds) + self.place(torch.arange(ids.shape[1])))
        x = self.encoder(x, src_key_padding_mask=padding)
        return torch.tanh(self.pool(x[:, 0]))


TORCH_TABLE = """
[mapping]
name = "torch"
prefix = "bert."

[tensors]
"bert.embeddings.{t:word,position,token_type}_embeddings.weight" = "{t:word,place,kind}.weight"
"bert.embeddings.LayerNorm.{w:weight,bias}" = "ln.{w:weight,bias}"
"bert.encoder.layer.{i}.attention.self.{p:query,key,value}.weight [o e]" = "encoder.layers.{i}.self_attn.in_proj_weight [(p o) e]"
"bert.encoder.layer.{i}.attention.self.{p:query,key,value}.bias [o]" = "encoder.layers.{i}.self_attn.in_proj_bias [(p o)]"
"bert.encoder.layer.{i}.attention.output.dense.{w:weight,bias}" = "encoder.layers.{i}.self_attn.out_proj.{w:weight,bias}"
"bert.encoder.layer.{i}.attention.output.LayerNorm.{w:weight,bias}" = "encoder.layers.{i}.norm1.{w:weight,bias}"
"bert.encoder.layer.{i}.intermediate.dense.{w:weight,bias}" = "encoder.layers.{i}.linear1.{w:weight,bias}"
"bert.encoder.layer.{i}.output.dense.{w:weight,bias}" = "encoder.layers.{i}.linear2.{w:weight,bias}"
"bert.encoder.layer.{i}.output.LayerNorm.{w:weight,bias}" = "encoder.layers.{i}.norm2.{w:weight,bias}"
"bert.pooler.dense.{w:weight,bias}" = "pool.{w:weight,bias}"

[drop]
"cls.{*rest}" = "no heads"

[inputs]
"input_ids" = "ids"
"attention_mask" = "padding -> padding"
"token_type_ids" = "kinds"

[probes]
"bert.embeddings" = "ln"
"bert.encoder.layer.{i}.attention.self -> scores" = "encoder.layers.{i}.self_attn -> scores"
"bert.encoder.layer.{i}.attention.output.dense" = "encoder.layers.{i}.self_attn -> 0"
"bert.encoder.layer.{i}.attention.output" = "encoder.layers.{i}.norm1"
"bert.encoder.layer.{i}" = "encoder.layers.{i}"
"bert.pooler" = "."
"""  # noqa: E501 - a rule is one line
