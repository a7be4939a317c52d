"""Sources and modules that exist as names, shapes and dtypes only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Info:
    """What is known of a tensor before it is read."""

    shape: Shape
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, kw_only=True)
class Headers:
    """A checkpoint whose values nobody may ask for."""

    tensors: Mapping[str, Info]
    config: Mapping[str, object] = field(default_factory=dict)
    shared: Sequence[frozenset[str]] = ()


def infos(shapes: Mapping[str, Shape], **dtypes: torch.dtype) -> dict[str, Info]:
    """Float32 tensors of these shapes; ``dtypes`` changes those whose name ends in a word."""
    found = {name: Info(shape=shape) for name, shape in shapes.items()}
    for name, info in found.items():
        dtype = dtypes.get(name.rpartition(".")[2])
        if dtype is not None:
            found[name] = Info(shape=info.shape, dtype=dtype)
    return found


def headers(shapes: Mapping[str, Shape], config: Mapping[str, object] | None = None) -> Headers:
    return Headers(tensors=infos(shapes), config=config or {})


def module(shapes: Mapping[str, Shape], *, dtype: torch.dtype = torch.float32, device: str = "meta") -> nn.Module:
    """A module that has parameters of these names and shapes."""
    root = nn.Module()
    for name, shape in shapes.items():
        put(
            root,
            name,
            nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=dtype.is_floating_point),
        )
    return root


def put(root: nn.Module, name: str, tensor: Tensor) -> None:
    """Give ``root`` a parameter (or, for a plain tensor, a persistent buffer) of a dotted name."""
    *path, last = name.split(".")
    part = root
    for step in path:
        if step not in dict(part.named_children()):
            part.add_module(step, nn.Module())
        part = part.get_submodule(step)
    if isinstance(tensor, nn.Parameter):
        part.register_parameter(last, tensor)
    else:
        part.register_buffer(last, tensor)
