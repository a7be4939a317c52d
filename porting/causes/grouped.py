"""Heads of keys and values that several queries share (Ainslie et al. 2023, section 2.2)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from porting.causes.cause import Cause
from porting.causes.heads import Cut, Heads


def tiled(heads: Heads, size: int) -> Iterator[tuple[str, Heads]]:
    """Each query head with the key and value head of another group."""
    query, key, value = heads
    count = key.shape[1]
    for times in (divisor for divisor in range(count, 1, -1) if count % divisor == 0):
        groups = count // times
        each, whole = torch.arange(count) // times, torch.arange(count) % groups
        if groups == 1 or all(_repeats(tensor, each, times) for tensor in (key, value)):
            orders = (each * times, whole * times, f"h % {groups}", f"h // {times}")
        elif all(torch.equal(tensor, tensor[:, whole]) for tensor in (key, value)):
            orders = (whole, each, f"h // {times}", f"h % {groups}")
        else:
            continue
        if groups > 1:
            _, order, reads, known = orders
            for what, new in (
                ("keys and values", (query, key[:, order], value[:, order])),
                ("values alone", (query, key, value[:, order])),
                ("keys alone", (query, key[:, order], value)),
            ):
                yield f"head h reads head {reads} of the {what}, where the reference reads {known}", new
            return


def _repeats(heads: Tensor, each: Tensor, times: int) -> bool:
    """Whether each head stands so many times beside itself."""
    return torch.equal(heads, heads[:, each * times])


CAUSES: tuple[Cause, ...] = (
    Cut(
        name="key and value heads tiled",
        what="the heads of keys or values are repeated as a whole and not each by itself, or the other way round",
        looks="the projections agree; the first and the last head agree, those between do not",
        fix="repeat_interleave(n, dim=heads), or expand [b g 1 s d] to [b g n s d]; not repeat, which tiles",
        cut=tiled,
        absorbed_by_weights=True,
    ),
)
