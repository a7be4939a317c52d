"""A toy table with one of everything, a checkpoint and a module that it fits, and what it says of others."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from porting.notation.table import parse_table
from porting.plan.check import check
from porting.plan.plan import Plan, PlanError
from tests.plan.shapes import Headers, Shape, headers, module

Shapes = Mapping[str, Shape]

LAYERS = 3
TABLE = """\
[mapping]
name = "toy"
prefix = "trunk."
[config]
vocab = "vocab_size"
hidden = "hidden_size"
layers = "num_layers"
[require]
act = ["gelu", "relu"]
causal = [false]
[tensors]
"trunk.emb.weight [v e]" = "emb.weight [v e]"
"trunk.l.{i}.{p:q,k,v}.weight [o e]" = "l.{i}.qkv [(p o) e]"
"trunk.l.{i}.norm.{w:weight/gamma,bias/beta}" = "l.{i}.norm.{w:weight,bias}"
[optional]
"head.weight [a b]" = "head.weight [b a]"
[drop]
"trunk.ids" = "equals arange"
"head.copy" = "equals trunk.emb.weight"
"old.{*rest}" = "nobody needs it"
[ties]
"decoder.weight" = "emb.weight"
[fresh]
"head.weight" = "to be trained"
"""
CONFIG = {"vocab": 7, "hidden": 4, "layers": LAYERS, "act": "gelu"}


def checkpoint(**changes: Shape | None) -> dict[str, Shape]:
    """A checkpoint that fits; ``changes`` by name with ``__`` for dots, None to leave a tensor out."""
    shapes: dict[str, Shape] = {"trunk.emb.weight": (7, 4)}
    for i in range(LAYERS):
        shapes |= {f"trunk.l.{i}.{p}.weight": (4, 4) for p in "qkv"}
        shapes |= {f"trunk.l.{i}.norm.{w}": (4,) for w in ("weight", "bias")}
    shapes["head.weight"] = (4, 5)
    return changed(shapes, changes)


def target(**changes: Shape | None) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"emb.weight": (7, 4)}
    for i in range(LAYERS):
        shapes |= {f"l.{i}.qkv": (12, 4), f"l.{i}.norm.weight": (4,), f"l.{i}.norm.bias": (4,)}
    shapes["head.weight"] = (5, 4)
    return changed(shapes, changes)


def changed(shapes: dict[str, Shape], changes: Mapping[str, Shape | None]) -> dict[str, Shape]:
    for name, shape in changes.items():
        if shape is None:
            del shapes[name.replace("__", ".")]
        else:
            shapes[name.replace("__", ".")] = shape
    return shapes


def plan(
    source: Headers | Shapes | None = None,
    into: nn.Module | Shapes | None = None,
    table: str = TABLE,
    *,
    dtype: torch.dtype | None = None,
    fresh: bool = False,
) -> Plan:
    source = source if isinstance(source, Headers) else headers(checkpoint() if source is None else source, CONFIG)
    into = into if isinstance(into, nn.Module) else module(target() if into is None else into)
    return check(parse_table(table, where="toy.toml"), source, into, dtype=dtype, fresh=fresh)


def refused(
    source: Headers | Shapes | None = None,
    into: nn.Module | Shapes | None = None,
    table: str = TABLE,
    *,
    dtype: torch.dtype | None = None,
    fresh: bool = False,
) -> list[str]:
    """The faults of what does not fit."""
    with pytest.raises(PlanError) as caught:
        plan(source, into, table, dtype=dtype, fresh=fresh)
    return [str(fault) for fault in caught.value.faults]
