"""A model that is not bundled: its module, a checkpoint, and a table that uses each kind of line."""

from __future__ import annotations

import filecmp
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import porting

TABLE = """
[mapping]
name = "own"
model_types = ["own"]
config = "tests.own:Config"
prefix = "model."

[config]
n_embd = "width"
n_layer = "depth"
vocab_size = "words"

[require]
causal = [true]

[sizes]
e = "n_embd"

[tensors]
"model.tokens.weight [v e]" = "tokens.weight [v e]"
"model.layer.{i}.{p:query,key,value}.weight [o e]" = "layers.{i}.qkv.weight [(p o) e]"
"model.layer.{i}.{p:query,key,value}.bias [o]" = "layers.{i}.qkv.bias [(p o)]"
"model.layer.{i}.kernel [in out]" = "layers.{i}.out.weight [out in]"
"model.layer.{i}.norm.{w:weight/gamma,bias/beta}" = "layers.{i}.norm.{w:weight,bias}"
"model.positions.weight [(_2|t) e]" = "positions.weight [t e]"

[[rule]]
source = ["model.shift [e]", "model.types [0 e]"]
target = "shift [e]"
fold = true

[[rule]]
source = "model.scaled [e]"
target = "scaled [e]"
scale = "n_embd ** -0.5"

[optional]
"head.{w:weight,bias}" = "head.{w:weight,bias}"

[ties]
"decoder.weight" = "tokens.weight"

[drop]
"decoder.weight" = "equals model.tokens.weight"
"steps" = "a counter of the trainer's"

[fresh]
"head.{w:weight,bias}" = "a head to be trained"
"""

CONFIG = {"model_type": "own", "n_embd": 6, "n_layer": 2, "vocab_size": 11, "causal": True}


@dataclass(frozen=True)
class Config:
    width: int
    depth: int
    words: int


SIZES = Config(width=6, depth=2, words=11)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, 4, bias=False)
        self.norm = nn.LayerNorm(width)


class Own(nn.Module):
    def __init__(self, config: Config, *, head: bool = False) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.words, config.width)
        self.positions = nn.Embedding(5, config.width)
        self.layers = nn.ModuleList([Layer(config.width) for _ in range(config.depth)])
        self.shift = nn.Parameter(torch.zeros(config.width))
        self.scaled = nn.Parameter(torch.zeros(config.width))
        self.decoder = nn.Linear(config.width, config.words, bias=False)
        self.decoder.weight = self.tokens.weight
        self.head = nn.Linear(config.width, 3) if head else None
        self.powers: Tensor
        self.register_buffer("powers", 2.0 ** torch.arange(4), persistent=False)

    def layer(self, number: int) -> Layer:
        found = self.layers[number]
        assert isinstance(found, Layer)
        return found


def with_head(config: Config) -> Own:
    return Own(config, head=True)


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The checkpoint's tensors, in an order of their own, spelled with the prefix and without, old and new."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    found = {"steps": torch.tensor([7]), "scaled": draw(6), "model.types": draw(2, 6)}
    for number in (1, 0):
        for part in ("value", "query", "key"):
            found[f"model.layer.{number}.{part}.weight"] = draw(6, 6)
            found[f"layer.{number}.{part}.bias"] = draw(6)
        found[f"model.layer.{number}.kernel"] = draw(6, 4)
        older = number == 1
        found[f"layer.{number}.norm.{'gamma' if older else 'weight'}"] = 1 + draw(6)
        found[f"layer.{number}.norm.{'beta' if older else 'bias'}"] = draw(6)
    found |= {"model.tokens.weight": draw(11, 6), "positions.weight": draw(7, 6), "shift": draw(6)}
    return {**found, "decoder.weight": found["model.tokens.weight"].clone()}


def write(directory: Path, values: dict[str, Tensor] | None = None, **changes: object) -> Path:
    """The checkpoint as a directory, with a tokenizer's file beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors() if values is None else values, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}, indent=4))
    (directory / "vocab.txt").write_text("a\nb\n")
    return directory


def table(directory: Path, text: str = TABLE) -> Path:
    """The table as a file."""
    path = directory / "own.toml"
    path.write_text(text)
    return path


def filled(source: Path, mapping: Path) -> Own:
    """A module with the weights of a checkpoint."""
    module = Own(SIZES)
    porting.load(source, module, mapping)
    return module


def assert_same_files(first: Path, other: Path) -> None:
    """See that two directories hold the same files, byte for byte."""
    names = sorted(path.name for path in first.iterdir())
    assert sorted(path.name for path in other.iterdir()) == names
    assert [name for name in names if not filecmp.cmp(first / name, other / name, shallow=False)] == []
