"""bert-base-uncased in small: its config and the names of its files, and a BERT from scratch with all its heads.

The hub's ``config.json`` says ``BertForMaskedLM``; the files hold a pooler and a next-sentence head as well, norms as
gamma and beta, and ``position_ids``.  The pickle has the decoder's matrix beside the words that it is tied to.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.small_checkpoint import CONFIG, tensors, tokenizer_json

BASE: dict[str, Any] = {  # Any: fields of several types
    "architectures": ["BertForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "transformers_version": "4.6.0.dev0",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30522,
}

DECODER, WORDS = "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"


def write_base(folder: Path, *, file: str = "model.safetensors", decoder: bool = False, **sizes: object) -> Path:
    """Write a checkpoint like bert-base-uncased.

    Args:
        folder: where to; it is made.
        file: ``"model.safetensors"`` or ``"pytorch_model.bin"``.
        decoder: have the decoder's matrix in the file, a copy of the words' (in a pickle: in the same storage).
        sizes: fields of the config in the place of a small model's.
    """
    small = {name: value for name, value in CONFIG.items() if isinstance(value, int)}
    config = {**BASE, **small, **sizes}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    held = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors(config=config).items()
        if name not in {"cls.predictions.decoder.bias", DECODER}
    }
    held["bert.embeddings.position_ids"] = torch.arange(config["max_position_embeddings"])[None]
    if decoder:
        held[DECODER] = held[WORDS].clone() if file.endswith(".safetensors") else held[WORDS]
    if file.endswith(".safetensors"):
        save_file(held, folder / file, metadata={"format": "pt"})
    else:
        torch.save(held, folder / file)
    return folder


SCRATCH = '''
"""A BERT as a book has it, with pooler, masked-language and next-sentence heads."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, mask):
        b, s, e = x.shape
        q, k, v = (one(x).view(b, s, self.heads, -1).transpose(1, 2) for one in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(e // self.heads)
        scores = scores.masked_fill(mask[:, None, None, :] == 0, torch.finfo(scores.dtype).min)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, e))


class Block(nn.Module):
    def __init__(self, width, heads, inner, eps):
        super().__init__()
        self.attn = Attention(width, heads)
        self.ln1 = nn.LayerNorm(width, eps=eps)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.ln2 = nn.LayerNorm(width, eps=eps)

    def forward(self, x, mask):
        x = self.ln1(x + self.attn(x, mask))
        return self.ln2(x + self.down(F.gelu(self.up(x))))


class Words(nn.Module):
    def __init__(self, width, words, eps):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=eps)
        self.decoder = nn.Linear(width, words)

    def forward(self, x):
        return self.decoder(self.norm(F.gelu(self.dense(x))))


class Bert(nn.Module):
    def __init__(
        self, vocab_size, hidden_size, num_hidden_layers, num_attention_heads, intermediate_size,
        max_position_embeddings, type_vocab_size, layer_norm_eps,
    ):
        super().__init__()
        sizes = hidden_size, num_attention_heads, intermediate_size, layer_norm_eps
        self.tok = nn.Embedding(vocab_size, hidden_size)
        self.pos = nn.Embedding(max_position_embeddings, hidden_size)
        self.seg = nn.Embedding(type_vocab_size, hidden_size)
        self.ln = nn.LayerNorm(hidden_size, eps=layer_norm_eps)
        self.blocks = nn.ModuleList(Block(*sizes) for _ in range(num_hidden_layers))
        self.pool = nn.Linear(hidden_size, hidden_size)
        self.mlm = Words(hidden_size, vocab_size, layer_norm_eps)
        self.nsp = nn.Linear(hidden_size, 2)

    def forward(self, input_ids, attention_mask, token_type_ids):
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.ln(self.tok(input_ids) + self.seg(token_type_ids) + self.pos(places))
        for block in self.blocks:
            x = block(x, attention_mask)
        pooled = torch.tanh(self.pool(x[:, 0]))
        return self.mlm(x), self.nsp(pooled)


class Tied(Bert):
    def __init__(
        self, vocab_size, hidden_size, num_hidden_layers, num_attention_heads, intermediate_size,
        max_position_embeddings, type_vocab_size, layer_norm_eps,
    ):
        super().__init__(
            vocab_size, hidden_size, num_hidden_layers, num_attention_heads, intermediate_size,
            max_position_embeddings, type_vocab_size, layer_norm_eps,
        )
        self.mlm.decoder.weight = self.tok.weight
'''

TABLE = """
[mapping]
name = "scratch"
prefix = "bert."

[config]
vocab_size = "vocab_size"
hidden_size = "hidden_size"
num_hidden_layers = "num_hidden_layers"
num_attention_heads = "num_attention_heads"
intermediate_size = "intermediate_size"
max_position_embeddings = "max_position_embeddings"
type_vocab_size = "type_vocab_size"
layer_norm_eps = "layer_norm_eps"

[tensors]
"bert.embeddings.word_embeddings.weight" = "tok.weight"
"bert.embeddings.position_embeddings.weight" = "pos.weight"
"bert.embeddings.token_type_embeddings.weight" = "seg.weight"
"bert.embeddings.LayerNorm.{w:weight/gamma,bias/beta}" = "ln.{w:weight,bias}"
"bert.encoder.layer.{i}.attention.self.{p:query,key,value}.weight" = "blocks.{i}.attn.{p:q,k,v}.weight"
"bert.encoder.layer.{i}.attention.self.{p:query,key,value}.bias" = "blocks.{i}.attn.{p:q,k,v}.bias"
"bert.encoder.layer.{i}.attention.output.dense.{w:weight,bias}" = "blocks.{i}.attn.o.{w:weight,bias}"
"bert.encoder.layer.{i}.attention.output.LayerNorm.{w:weight/gamma,bias/beta}" = "blocks.{i}.ln1.{w:weight,bias}"
"bert.encoder.layer.{i}.intermediate.dense.{w:weight,bias}" = "blocks.{i}.up.{w:weight,bias}"
"bert.encoder.layer.{i}.output.dense.{w:weight,bias}" = "blocks.{i}.down.{w:weight,bias}"
"bert.encoder.layer.{i}.output.LayerNorm.{w:weight/gamma,bias/beta}" = "blocks.{i}.ln2.{w:weight,bias}"
"bert.pooler.dense.{w:weight,bias}" = "pool.{w:weight,bias}"
"cls.predictions.transform.dense.{w:weight,bias}" = "mlm.dense.{w:weight,bias}"
"cls.predictions.transform.LayerNorm.{w:weight/gamma,bias/beta}" = "mlm.norm.{w:weight,bias}"
"cls.predictions.bias" = "mlm.decoder.bias"
"cls.seq_relationship.{w:weight,bias}" = "nsp.{w:weight,bias}"

[optional]
"cls.predictions.decoder.weight" = "mlm.decoder.weight"

[drop]
"bert.embeddings.position_ids" = "equals arange"

[fresh]
"mlm.decoder.weight" = "not every file has it"

[probes]
"bert.embeddings" = "ln"
"bert.encoder.layer.{i}.attention.self.{p:query,key,value}" = "blocks.{i}.attn.{p:q,k,v}"
"bert.encoder.layer.{i}" = "blocks.{i}"
"bert.pooler.dense" = "pool"
"cls.predictions" = "mlm"
"cls.seq_relationship" = "nsp"
"""

TIES = """
[ties]
"mlm.decoder.weight" = "tok.weight"
"""


def tied(table: str = TABLE) -> str:
    """The table for the module that ties its decoder."""
    drop = f'"{DECODER}" = "equals {WORDS}"\n'
    start, _, rest = table.partition("[optional]")
    _, _, rest = rest.partition("[drop]\n")
    dropped, _, rest = rest.partition("[fresh]")
    return f"{start}[drop]\n{drop}{dropped}{TIES}\n[probes]{rest.partition('[probes]')[2]}"


def write_scratch(folder: Path) -> None:
    """Write ``scratch.py``, ``scratch.toml`` and ``tied.toml``; Bert's decoder is of its own, Tied's is the words'."""
    (folder / "scratch.py").write_text(SCRATCH)
    (folder / "scratch.toml").write_text(TABLE)
    (folder / "tied.toml").write_text(tied())
