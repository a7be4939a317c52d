"""Which mistakes can make a difference in a port at all: one that makes none, in float64, is no test's fault."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from porting.causes.events import Inventory
from porting.causes.meddling import cure, plant
from porting.causes.planting import PLANTS
from porting.mutating.orders import ABSENT, APPLIES, EQUIVALENT

SAME = 1e-12
"""Relative to the largest value of an output; as in the proof of meaning."""

DRAWS = 2
"""With so many draws of weights and inputs."""


def kinds(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], inventory: Inventory) -> dict[str, str]:
    """For each mistake whether it applies to a port, is equivalent to none, or has no place in it.

    Args:
        model: the port, which is left as it is.
        args, kwargs: what it was called with.
        inventory: what it consists of.
    """
    found = {meddling.name: ABSENT for meddling in PLANTS}
    for seed in range(DRAWS):
        own = _double(model, seed)
        given = _drawn(own, args, dict(kwargs), seed)
        expected = list(_outputs(own, *given))
        for meddling in PLANTS:
            if found[meddling.name] == APPLIES:
                continue
            sites = plant(own, meddling, inventory)
            try:
                differs = not _same(expected, list(_outputs(own, *given)))
            except (RuntimeError, ValueError, IndexError):  # the mistake does not fit this port's shapes
                differs = bool(sites)
            cure(own)
            if sites:
                found[meddling.name] = APPLIES if differs else EQUIVALENT
    return found


def _double(model: nn.Module, seed: int) -> nn.Module:
    """A copy in float64, in eval mode, whose parameters are drawn: no zero bias, no gain of one."""
    own = copy.deepcopy(model)
    cure(own)
    own = own.double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, one in own.named_parameters():
            gain = one.ndim == 1 and name.endswith("weight")
            one.copy_((1.0 if gain else 0.0) + 0.2 * torch.randn(one.shape, generator=generator, dtype=torch.float64))
    return own


def _drawn(model: nn.Module, args: Any, kwargs: Any, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs of the same shapes that show more: other words, padding at the end of rows, two kinds of segment."""
    generator = torch.Generator().manual_seed(seed)
    words = max((part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)), default=2)

    def other(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        if one.is_floating_point():
            return one.double()
        binary = bool(((one == 0) | (one == 1)).all())
        if one.ndim != 2:
            return one
        if binary:
            return _mixed(one)
        return torch.randint(0, words, one.shape, generator=generator).to(one.dtype)

    return tuple(tree_map(other, args)), dict(tree_map(other, kwargs))


def _mixed(one: Tensor) -> Tensor:
    """1 and 0 as in a mask: the last rows are shorter, and no row is empty; for one that begins with 0, turned over."""
    rows, length = one.shape
    kept = [max(length - 2 * row, (length + 1) // 2) for row in range(rows)]
    mask = torch.stack([torch.arange(length) < count for count in kept])
    return (mask if bool(one[:, 0].bool().all()) else ~mask).to(one.dtype)


def _outputs(model: nn.Module, args: Any, kwargs: Any) -> Iterator[Tensor]:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = model(*args, **kwargs)
    values = made if isinstance(made, Tensor | tuple | list | dict) else vars(made)
    yield from (one for one in tree_leaves(values) if isinstance(one, Tensor) and one.is_floating_point())


def _same(expected: list[Tensor], found: list[Tensor]) -> bool:
    if len(expected) != len(found) or any(a.shape != b.shape for a, b in zip(expected, found, strict=True)):
        return False
    return all(bool((a - b).abs().max() <= SAME * a.abs().max()) for a, b in zip(expected, found, strict=True))
