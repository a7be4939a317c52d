"""Preparing the copy of a module: lazy parameters take shape, all is float64, adapters that begin at zero are found."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from porting.errors import Code, Fault, VerifyError
from porting.printable import text_of
from porting.suggesting.subjects.argument_names import ArgumentMapping, argument_mappings, roles
from porting.suggesting.subjects.sampler import BATCH, Sampler
from porting.suggesting.subjects.traced_model import TracedModel
from porting.target import DEEPEST, TargetError, tensors_within


def is_lazy(module: nn.Module) -> bool:
    """Whether some of its parameters have no shape yet."""
    return any(nn.parameter.is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers()))


def materialized(module: nn.Module, sampler: Sampler) -> nn.Module:
    """The same module, its lazy parameters materialised by one dry run; anything else is left as it is.

    Args:
        module: the module, in eval mode.
        sampler: makes batches of the reference's inputs.

    Raises:
        VerifyError: no way of running it works; carries what the forward said to the most usual one.
    """
    if not is_lazy(module):
        return module
    found, loose = roles(module, sampler.offered)
    first: Exception | None = None
    dtype = torch.get_default_dtype()
    for rules in argument_mappings(found):
        way = ArgumentMapping(rules=rules, loose=loose, width=sampler.width)
        try:
            given = way.given(sampler.batch(way.named), dtype)
            with torch.no_grad():
                module(**{name: one.to(dtype) if one.is_floating_point() else one for name, one in given.items()})
        except Exception as error:  # noqa: BLE001  # the user's own forward may raise anything
            first = first or error
            continue
        break
    if is_lazy(module):
        said = "" if first is None else f": {type(first).__name__}: {' '.join(text_of(first).split())}"
        message = f"{type(module).__name__} has lazy parameters that a run on ids leaves without a shape{said}"
        hint = "run it once and pass it built"
        raise VerifyError(Fault(code=Code.FORWARD_FAILED, message=message, hint=hint)) from first
    return module


def refuse_computed(module: nn.Module, reference: nn.Module) -> None:
    """See that no weight is computed from others, which no table could fill.

    Where the reference computes one in the same way, as wav2vec2 does with its weight norm, both have what it is
    computed from.

    Raises:
        TargetError: one is parametrized, and none of the reference's is: weight norm, spectral norm, ...
    """
    known = {kind for _, kind in _parametrizations(reference)}
    for path, kind in _parametrizations(module):
        if kind not in known:
            message = f"{path} is computed by a parametrization ({kind}), so a checkpoint's weight has no place"
            hint = "torch.nn.utils.parametrize.remove_parametrizations first; put it on again behind the loading"
            raise TargetError(Fault(code=Code.BAD_TARGET, message=message, hint=hint))


def _parametrizations(module: nn.Module) -> Iterator[tuple[str, str]]:
    """The names of weights that are computed from others, and how."""
    for path, part in module.named_modules():
        if parametrize.is_parametrized(part):
            for name, kinds in part.parametrizations.items():
                yield f"{path}.{name}", type(kinds[0]).__name__.removeprefix("_")


def in_float64(module: nn.Module) -> nn.Module:
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


FUSED = 3
"""How many matrices of the reference may lie in one of the module's."""


def zeros_of(module: nn.Module) -> frozenset[str]:
    """The matrices that a module was built with and that are zero."""
    shaped = ((name, one) for name, one in module.named_parameters() if not isinstance(one, nn.UninitializedParameter))
    return frozenset(name for name, one in shaped if one.ndim > 1 and not one.is_meta and not bool(one.any()))


def untrained_adapters(port: TracedModel, reference: TracedModel, zeros: frozenset[str]) -> frozenset[str]:
    """The matrices of the module that change nothing as it is built, and are none of the reference's.

    A matrix that is zero is taken for the end of such a part only if it is of no size of the reference's, and if with
    it at zero another one, which is not zero, changes nothing that the module returns: that is the part's beginning.

    Args:
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
        one.detach().zero_()
    begins = frozenset(name for name, one in odd.items() if name not in ends and not _changes(port, one))
    paths = {name.rpartition(".")[0] for name in begins}
    awake = {name for name in ends if not any(_beside(name, path) for path in paths)}
    for name in awake:
        ends[name].detach().copy_(drawn[name])
    return (begins | ends.keys()) - awake


def _beside(name: str, path: str) -> bool:
    """Whether a tensor is of the module at that path, or of the one around it."""
    return name.startswith(path.rpartition(".")[0])


def _changes(port: TracedModel, weight: Tensor) -> bool:
    """Whether what the module returns depends on a weight."""
    before, kept = list(_returned(port)), weight.detach().clone()
    weight.detach().add_(torch.ones_like(weight))
    after = list(_returned(port))
    weight.detach().copy_(kept)
    return not all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def _returned(port: TracedModel) -> Iterator[Tensor]:
    return (one.nan_to_num() for one in port.run().outputs)


def tells_nothing(outputs: Sequence[Tensor]) -> str:
    """Why a reference's outputs of rows that differ tell nothing: NaN in all of them, or each row is the same."""
    if outputs and all(bool(one.isnan().any()) for one in outputs):
        return "computes NaN"
    rows = [one for one in outputs if one.ndim and len(one) == BATCH]
    if rows and all(torch.allclose(one, one[:1].expand_as(one), rtol=SAME, atol=0) for one in rows):
        return "computes the same of all inputs"
    return ""


SAME = 1e-9
"""The relative difference of numbers that differ by their rounding alone, in float64."""

ODD = 1e15
"""No number of a config is larger, but infinity where there is no limit."""


def odd_numbers(config: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """The fields, nested ones too, with numbers that cannot be meant."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{key}", one) for key, one in odd_numbers(value))
        elif isinstance(value, float) and not abs(value) < ODD:
            yield name, value
