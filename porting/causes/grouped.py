"""Heads of keys and values that several queries share (Ainslie et al. 2023, section 2.2)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from porting.causes.cause import Cause
from porting.causes.heads import Cut, Heads


def tiled(heads: Heads, size: int) -> Iterator[tuple[str, Heads]]:
    """Each query head with the key and value head of another group."""
    query, key, value = heads
    count = key.shape[1]
    for times in (one for one in range(2, count) if count % one == 0):
        groups = count // times
        first = torch.arange(groups).repeat_interleave(times) * times
        if torch.equal(key, key[:, first]) and torch.equal(value, value[:, first]):
            order = torch.arange(groups).repeat(times) * times
            detail = f"head h reads head h % {groups} of the keys and values, where the reference reads h // {times}"
            yield detail, (query, key[:, order], value[:, order])
            return


CAUSES: tuple[Cause, ...] = (
    Cut(
        name="key and value heads tiled",
        what="the heads of keys and values are repeated as a whole, and not each by itself",
        looks="the projections agree; the first and the last head agree, those between do not",
        fix="repeat_interleave(n, dim=heads), or expand [b g 1 s d] to [b g n s d]; not repeat, which tiles",
        cut=tiled,
    ),
)
