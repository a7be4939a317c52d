"""What is done to the copy of a module before it is looked into: lazy parameters take shape, all of it in float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from porting.errors import Code, Fault, VerifyError
from porting.suggesting.subjects.arguments import Way, roles, sample, ways
from porting.target import DEEPEST, TargetError, tensors_within


def is_lazy(module: nn.Module) -> bool:
    """Whether some of its parameters have no shape yet."""
    return any(nn.parameter.is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers()))


def warm(
    module: nn.Module,
    available: Sequence[str],
    vocabulary: int,
    padding: int,
    shapes: Mapping[str, tuple[int, ...]],
) -> nn.Module:
    """The same module, its lazy parameters materialised by one dry run; anything else is left as it is.

    Args:
        module: the module, in eval mode.
        available: the reference's inputs.
        vocabulary: how many words there are.
        padding: the padding word.
        shapes: of one image or sound.

    Raises:
        VerifyError: no way of running it works; carries what the forward said to the most usual one.
    """
    if not is_lazy(module):
        return module
    found, loose = roles(module, available)
    first: Exception | None = None
    dtype = torch.get_default_dtype()
    for rules in ways(found):
        way = Way(rules=rules, loose=loose)
        try:
            given = way.given(sample(way.named, vocabulary, padding, shapes=shapes), dtype)
            with torch.no_grad():
                module(**{name: one.to(dtype) if one.is_floating_point() else one for name, one in given.items()})
        except Exception as error:  # noqa: BLE001  # the user's own forward may raise anything
            first = first or error
            continue
        break
    if is_lazy(module):
        said = "" if first is None else f": {type(first).__name__}: {' '.join(str(first).split())}"
        message = f"{type(module).__name__} has lazy parameters that a run on ids leaves without a shape{said}"
        hint = "run it once and pass it built"
        raise VerifyError(Fault(code=Code.FORWARD_FAILED, message=message, hint=hint)) from first
    return module


def refuse_computed(module: nn.Module) -> None:
    """See that no weight is computed from others, which no table could fill.

    Raises:
        TargetError: one is parametrized: weight norm, spectral norm, ...
    """
    for path, part in module.named_modules():
        if parametrize.is_parametrized(part):
            name = next(iter(part.parametrizations))
            kind = type(part.parametrizations[name][0]).__name__.removeprefix("_")
            message = f"{path}.{name} is computed by a parametrization ({kind}), so a checkpoint's weight has no place"
            hint = "torch.nn.utils.parametrize.remove_parametrizations first; put it on again behind the loading"
            raise TargetError(Fault(code=Code.BAD_TARGET, message=message, hint=hint))


def doubled(module: nn.Module) -> nn.Module:
    """The same module in float64, with the tensors that ``Module.double`` does not reach."""
    module.double()
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if not name.startswith("_") and any(tensors_within(name, value)):
                vars(part)[name] = _doubled(value, DEEPEST)
    return module


def _doubled(value: Any, deep: int) -> Any:  # tensors, and whatever holds them
    """A copy in float64: a list that a builder hands out may be others' as well."""
    if isinstance(value, Tensor) and value.is_floating_point():
        taken = value.detach().double()
        return nn.Parameter(taken) if isinstance(value, nn.Parameter) else taken
    if deep and isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({key: _doubled(one, deep - 1) for key, one in value.items()})
        return copied
    if deep and type(value) in {list, tuple}:
        return type(value)(_doubled(one, deep - 1) for one in value)
    return value
