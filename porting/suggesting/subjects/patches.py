"""Torch as it was: what the user's code replaces in it would be replaced in the reference as well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from porting.errors import Code, Fault, VerifyError


@contextmanager
def unpatched() -> Iterator[None]:
    """Functions and classes of torch that are replaced inside are put back.

    Raises:
        VerifyError: one that computes was replaced, so that what was compared holds for that one alone.
    """
    kinds = [one for one in vars(nn).values() if isinstance(one, type)]
    before = [(owner, _computing(owner)) for owner in (torch, F, nn, *kinds)]
    replaced: list[str] = []
    try:
        yield
    finally:
        for owner, values in before:
            for name, value in values.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)
                    replaced += [f"{_named(owner)}.{name}"] if name != "reset_parameters" else []
    if replaced:
        message = f"building or running the module replaces {replaced[0]}, for the reference as well"
        hint = "put what computes otherwise into a function or class of your own"
        raise VerifyError(Fault(code=Code.FORWARD_FAILED, message=message, hint=hint))


def _computing(owner: Any) -> dict[str, object]:
    """What of a module, or of a class of layers, says what is computed; and what draws weights, which many replace."""
    if owner is torch:
        return {name: one for name, one in vars(torch).items() if isinstance(one, BuiltinFunctionType)}
    if isinstance(owner, type):
        return {name: vars(owner)[name] for name in ("forward", "reset_parameters") if name in vars(owner)}
    return {
        name: one for name, one in vars(owner).items() if isinstance(one, type | FunctionType | BuiltinFunctionType)
    }


def _named(owner: Any) -> str:
    return owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__name__}"
