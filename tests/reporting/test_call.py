"""The call, as it would be typed again."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from porting.checkpoint import open_checkpoint
from porting.reporting.call import spelled_call
from porting.verification import verify

DEFAULTS = {
    name: None if parameter.default is parameter.empty else parameter.default
    for name, parameter in inspect.signature(verify).parameters.items()
}


class Mine(nn.Module):
    """A module of a user's own."""


def build() -> nn.Module:
    return Mine()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "verify('c')"),
        ({"source": Path("a b")}, "verify('a b')"),
        ({"into": Mine(), "table": "mine.toml"}, f"verify('c', {__name__}.Mine(...), 'mine.toml')"),
        ({"into": build, "table": Path("t.toml")}, f"verify('c', {__name__}.build, 't.toml')"),
        ({"into": Mine}, f"verify('c', {__name__}.Mine)"),
        ({"table": "mine.toml", "seed": 3}, "verify('c', table='mine.toml', seed=3)"),
        ({"dtypes": (torch.float32, torch.float16)}, "verify('c', dtypes=(torch.float32, torch.float16))"),
        ({"dtypes": (torch.bfloat16,), "loaded": True}, "verify('c', dtypes=(torch.bfloat16,), loaded=True)"),
        ({"progress": print, "longest": 64}, "verify('c', longest=64)"),
    ],
)
def test_what_differs_from_the_defaults_is_spelled(given: dict[str, Any], expected: str) -> None:
    assert spelled_call("verify", verify, {**DEFAULTS, "source": "c", **given}) == expected


def test_an_open_checkpoint_is_its_place(checkpoint: Path) -> None:
    given = {**DEFAULTS, "source": open_checkpoint(checkpoint)}
    assert spelled_call("porting.verify", verify, given) == f"porting.verify('{checkpoint}')"
