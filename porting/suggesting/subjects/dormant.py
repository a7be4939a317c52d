"""Parts that change nothing until they are trained: an update of low rank, an adapter, which begin at zero."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from porting.suggesting.subjects.side import Side

FUSED = 3
"""So many matrices of the reference may lie in one of the module's."""


def zeros_of(module: nn.Module) -> frozenset[str]:
    """The matrices that a module was built with and that are zero."""
    shaped = ((name, one) for name, one in module.named_parameters() if not isinstance(one, nn.UninitializedParameter))
    return frozenset(name for name, one in shaped if one.ndim > 1 and not one.is_meta and not bool(one.any()))


def dormant(port: Side, reference: Side, zeros: frozenset[str]) -> frozenset[str]:
    """The matrices of the module that change nothing as it is built, and are none of the reference's.

    A matrix that is zero is taken for the end of such a part only if it is of no size of the reference's, and if with
    it at zero another one, which is not zero, changes nothing that the module returns: that is the part's beginning.

    Args:
        port, reference: the two models.
        zeros: names of the module's matrices that it was built with at zero.
    """
    theirs = [one.numel() * many for one in reference.leaves.values() if one.ndim > 1 for many in range(1, FUSED + 1)]
    odd = {name: one for name, one in port.leaves.items() if name in port.loadable and one.ndim > 1}
    odd = {name: one for name, one in odd.items() if one.numel() not in theirs}
    ends = {name: one for name, one in odd.items() if name in zeros}
    if not ends:
        return frozenset()
    drawn = {name: one.detach().clone() for name, one in ends.items()}
    for one in ends.values():
        one.data.zero_()
    begins = frozenset(name for name, one in odd.items() if name not in ends and not _changes(port, one))
    paths = {name.rpartition(".")[0] for name in begins}
    awake = {name for name in ends if not any(_beside(name, path) for path in paths)}
    for name in awake:
        ends[name].data.copy_(drawn[name])
    return (begins | ends.keys()) - awake


def _beside(name: str, path: str) -> bool:
    """Whether a tensor is of the module at that path, or of the one around it."""
    return name.startswith(path.rpartition(".")[0])


def _changes(port: Side, weight: Tensor) -> bool:
    """Whether what the module returns depends on a weight."""
    before, kept = list(_returned(port)), weight.detach().clone()
    weight.data.add_(torch.ones_like(weight))
    after = list(_returned(port))
    weight.data.copy_(kept)
    return not all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def _returned(port: Side) -> Iterator[Tensor]:
    return (one.nan_to_num() for one in port.run().outputs)
