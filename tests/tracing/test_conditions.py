"""Conditions on tensors inside ``torch.vmap`` and ``torch.func.grad``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from porting.tracing.conditions import Conditions


class Own(nn.Module):
    """The owner of the code that is watched."""


def by_row(ids: Tensor) -> Any:  # torch does not type its transforms
    return torch.vmap(lambda row: torch.where(row == 17, 2.0, 1.0))(ids)


def by_element(ids: Tensor) -> Any:  # torch does not type its transforms
    return torch.vmap(torch.vmap(lambda one: torch.where(one == 17, 2.0, 1.0)))(ids)


def clamped(ids: Tensor) -> Any:  # torch does not type its transforms
    return torch.vmap(lambda row: row.clamp(max=17))(ids)


def in_parts(ids: Tensor) -> Any:  # torch does not type its transforms
    return torch.vmap(lambda row: row.masked_fill(row.eq(17), 0), chunk_size=1)(ids)


def differentiated(ids: Tensor) -> Any:
    return torch.func.grad(lambda x: torch.where(x == 17, 2 * x, x).sum())(ids.double())


WAYS = [by_row, by_element, clamped, in_parts, differentiated]


@pytest.mark.parametrize("way", WAYS)
def test_a_condition_on_the_rows_of_a_vmap_is_seen(way: Callable[[Tensor], Any]) -> None:
    ids = torch.arange(6).view(2, 3)
    conditions = Conditions(Own())
    with conditions:
        found = way(ids)
    assert torch.equal(found, way(ids))
    assert conditions.open
    with conditions:
        way(ids + 14)
    assert not conditions.open
