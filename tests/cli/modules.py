"""Modules of a user's own, as files, and the table that loads a checkpoint into them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

OWN = ("--table", "own.toml", "--into", "own_model.py:build")


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test imports its own ``own_model``."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_model", raising=False)


OWN_MODEL = '''
"""Somebody's own encoder: other names, q, k and v in one matrix, written without a look at the library."""

import math

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width, heads, inner, eps):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.norm2 = nn.LayerNorm(width, eps=eps)

    def forward(self, x, mask):
        b, s, e = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(e // self.heads)
        scores = scores.masked_fill(~mask[:, None, None, :].bool(), torch.finfo(x.dtype).min)
        x = self.norm1(x + self.mix((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, e)))
        return self.norm2(x + self.down(GELU(self.up(x))))


GELU = nn.functional.gelu


class Encoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        e = config["width"]
        self.words = nn.Embedding(config["words"], e)
        self.places = nn.Embedding(config["places"], e)
        self.kinds = nn.Embedding(2, e)
        self.norm = nn.LayerNorm(e, eps=config["eps"])
        self.blocks = nn.ModuleList(
            Layer(e, config["heads"], config["inner"], config["eps"]) for _ in range(config["depth"])
        )

    def forward(self, ids, mask, kinds):
        x = self.words(ids) + self.kinds(kinds) + self.places(torch.arange(ids.shape[1], device=ids.device))
        x = self.norm(x)
        for block in self.blocks:
            x = block(x, mask)
        return x


def build(config):
    return Encoder(config)
'''

OWN_TABLE = """
[mapping]
name = "own"
prefix = "bert."

[architectures]
BertModel = { target = "own_model:Encoder" }

[config]
hidden_size = "width"
vocab_size = "words"
max_position_embeddings = "places"
num_attention_heads = "heads"
intermediate_size = "inner"
layer_norm_eps = "eps"
num_hidden_layers = "depth"

[tensors]
"bert.embeddings.word_embeddings.weight" = "words.weight"
"bert.embeddings.position_embeddings.weight" = "places.weight"
"bert.embeddings.token_type_embeddings.weight" = "kinds.weight"
"bert.embeddings.LayerNorm.{w:weight,bias}" = "norm.{w:weight,bias}"
"bert.encoder.layer.{i}.attention.self.{p:query,key,value}.weight [o e]" = "blocks.{i}.qkv.weight [(p o) e]"
"bert.encoder.layer.{i}.attention.self.{p:query,key,value}.bias [o]" = "blocks.{i}.qkv.bias [(p o)]"
"bert.encoder.layer.{i}.attention.output.dense.{w:weight,bias}" = "blocks.{i}.mix.{w:weight,bias}"
"bert.encoder.layer.{i}.attention.output.LayerNorm.{w:weight,bias}" = "blocks.{i}.norm1.{w:weight,bias}"
"bert.encoder.layer.{i}.intermediate.dense.{w:weight,bias}" = "blocks.{i}.up.{w:weight,bias}"
"bert.encoder.layer.{i}.output.dense.{w:weight,bias}" = "blocks.{i}.down.{w:weight,bias}"
"bert.encoder.layer.{i}.output.LayerNorm.{w:weight,bias}" = "blocks.{i}.norm2.{w:weight,bias}"

[drop]
"bert.pooler.{*rest}" = "no pooler here"
"cls.{*rest}" = "no heads here"

[inputs]
"input_ids [b s]" = "ids [b s]"
"attention_mask [b s]" = "mask [b s]"
"token_type_ids [b s]" = "kinds [b s]"

[probes]
"bert.embeddings" = "norm"
"bert.encoder.layer.{i}.attention.output" = "blocks.{i}.norm1"
"bert.encoder.layer.{i}" = "blocks.{i}"
"""


def write_own(folder: Path, *, bug: tuple[str, str] = ("", "")) -> None:
    """Write ``own_model.py`` and ``own.toml``; ``bug`` is a piece of the module and what stands there instead."""
    before, after = bug
    if before not in OWN_MODEL:
        raise ValueError(f"{before!r} is not in the module")
    (folder / "own_model.py").write_text(OWN_MODEL.replace(before, after) if before else OWN_MODEL)
    (folder / "own.toml").write_text(OWN_TABLE)
