"""Random tables with checkpoints that they fit, on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)


@dataclass(frozen=True)
class Drawn:
    """A table, a checkpoint that it fits, and the port's tensors in memory."""

    table: str
    sources: Mapping[str, Tensor]
    targets: Mapping[str, Tensor]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random bits of a dtype: NaN, infinities and signed zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    noise = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return noise.view(dtype).reshape(shape)


@st.composite
def tables(draw: st.DrawFn) -> Drawn:
    """Several rules: each carries a canonical tensor whose indices stand in names or among the axes of either side."""
    rules: list[str] = []
    given: list[str] = []
    sources: dict[str, Tensor] = {}
    targets: dict[str, Tensor] = {}
    for number in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(DTYPES))
        names = [f"{letter}{number}" for letter in "abcd"[: draw(st.integers(1, 4))]]
        sizes = {name: draw(st.integers(1, 6)) for name in names}
        canonical = values(tuple(sizes.values()), dtype, seed=draw(st.integers(0, 10**6)))
        given += [f"{name} = {size}" for name, size in sizes.items()]
        sides = []
        for stem, found in ((f"x{number}", sources), (f"y{number}", targets)):
            order = list(draw(st.permutations(names)))
            named = order[: draw(st.integers(0, min(2, len(order))))]
            groups = _groups(draw, order[len(named) :])
            _cut(canonical, names, sizes, stem, named, groups, found)
            spelled = "".join(f".{{{name}}}" for name in named)
            axes = " ".join(f"({' '.join(group)})" for group in groups)
            sides.append(f'"{stem}{spelled} [{axes}]"')
        rules.append(" = ".join(sides))
    text = '[mapping]\nname = "drawn"\n[tensors]\n' + "\n".join(rules) + "\n[sizes]\n" + "\n".join(given) + "\n"
    return Drawn(text, sources, targets)


def _groups(draw: st.DrawFn, axes: list[str]) -> list[list[str]]:
    groups = []
    while axes:
        size = draw(st.integers(1, len(axes)))
        groups.append(axes[:size])
        axes = axes[size:]
    return groups


def _cut(
    canonical: Tensor,
    names: list[str],
    sizes: Mapping[str, int],
    stem: str,
    named: list[str],
    groups: list[list[str]],
    found: dict[str, Tensor],
) -> None:
    inner = [name for group in groups for name in group]
    turned = canonical.permute([names.index(name) for name in (*named, *inner)])
    shape = [math.prod(sizes[name] for name in group) for group in groups]
    for place in product(*(range(sizes[name]) for name in named)):
        chosen = turned[place] if place else turned
        found[stem + "".join(f".{at}" for at in place)] = chosen.reshape(shape).contiguous()


def write(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, object] | None = None) -> Path:
    """A checkpoint of one file."""
    folder.mkdir()
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


def bits(tensor: Tensor) -> bytes:
    """Dtype, shape and bytes."""
    return f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + elements(tensor)


def elements(tensor: Tensor) -> bytes:
    """The bytes of the elements, in row-major order."""
    flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
