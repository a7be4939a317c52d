"""A module that is called otherwise: in float32, without an argument that has a default."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from porting.errors import PortingError
from porting.suggesting.subjects.arguments import DECODER_MASK, MASK, SEGMENTS, sample
from porting.suggesting.subjects.building import Builder, build_for
from porting.suggesting.subjects.fields import Role
from porting.suggesting.subjects.returning import numbers_of
from porting.suggesting.subjects.signals import shapes_of
from porting.suggesting.subjects.subject import Subjects, complete, end_of, number_of
from porting.suggesting.verdict.suggestion import Reason
from porting.target import named_tensors
from porting.tracing.float64 import forced_float64

SAME_CALL = 1e-10
"""Two calls give the same if they are no further from each other, of their scale."""

SINGLE, LESS = 1e-3, 0.1
"""In float32 a module is no further than this from itself in float64, and no further than that where it asks for less
than float32: what differs by more is no rounding."""


def rounds_by_itself(into: Builder, subjects: Subjects) -> Iterator[Reason]:
    """A module that computes something else in float32 than in float64, by more than rounding."""
    module, inputs = subjects.built.module, _batch(subjects)
    single = _in_float32(into, subjects, inputs)
    bound = LESS if _asks_for_less(module, subjects, inputs) else SINGLE
    if single is None:
        return
    far = _apart(_outputs(module, subjects, inputs), single)
    if far > bound:
        said = "another one of it, built and loaded in float32, computes something else than in float64"
        yield Reason(kind="precision", said=f"{said}: off by {far:.0e}")


def lowered(into: Builder, subjects: Subjects) -> Iterator[str]:
    """Operations that compute with less than float32, which the proof in float64 takes out."""
    module, inputs = subjects.built.module, _batch(subjects)
    asked = _asks_for_less(module, subjects, inputs)
    single = _in_float32(into, subjects, inputs) if asked else None
    far = 0.0 if single is None else _apart(_outputs(module, subjects, inputs), single)
    if far > SINGLE:
        yield f"what it rounds to less than float32 by itself, at {asked[0]}: off by {far:.0e} in float32"


def _asks_for_less(module: nn.Module, subjects: Subjects, inputs: Mapping[str, Tensor]) -> list[str]:
    """The parts that ask for less than float64 whatever their weights are."""
    with torch.no_grad(), forced_float64(module) as asked:
        module(**subjects.way.given(inputs))
    return list(asked)


def defaults(subjects: Subjects) -> Iterator[str]:
    """Arguments that may be left out and then are not what the reference takes for them."""
    module, way, inputs = subjects.built.module, subjects.way, _batch(subjects)
    taken = inspect.signature(module.forward).parameters
    inputs |= {SEGMENTS: torch.zeros_like(inputs[SEGMENTS])} if SEGMENTS in inputs else {}
    given = way.given(inputs)
    told = dict(zip(given, way.named, strict=False))
    first = _called(module, given)
    for name in given:
        optional = name in taken and taken[name].default is not inspect.Parameter.empty
        if not optional or told.get(name) not in {MASK, SEGMENTS, DECODER_MASK}:
            continue
        try:
            without = _called(module, {one: value for one, value in given.items() if one != name})
        except Exception:  # noqa: BLE001, S112  # whoever leaves it out is told by the module itself
            continue
        if _apart(first, without) > SAME_CALL:
            yield f"without its argument {name}, which has a default, it is not the reference without {told[name]}"


def _batch(subjects: Subjects) -> dict[str, Tensor]:
    config = subjects.twin.config
    vocabulary, padding = number_of(config, Role.VOCABULARY, 97), number_of(config, Role.PADDING)
    heard = [name for name in subjects.available if name in subjects.way.named]
    return sample(heard, vocabulary, padding, seed=1, shapes=shapes_of(config), end=end_of(config))


def _in_float32(into: Builder, subjects: Subjects, inputs: Mapping[str, Tensor]) -> list[Tensor] | None:
    """What another module of the same builder gives with the same weights in float32; None if it cannot be run so."""
    values = dict(named_tensors(subjects.built.module))
    try:
        config = complete(subjects.twin.config, subjects.twin.architecture)
        other = subjects.readied(build_for(into, config).module).float()
        with torch.no_grad():
            for name, tensor in named_tensors(other):
                tensor.copy_(values[name])
            return [one.double() for one in numbers_of(other(**subjects.way.given(inputs, torch.float32)))]
    except (PortingError, RuntimeError, KeyError):
        return None


def _outputs(module: nn.Module, subjects: Subjects, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    return _called(module, subjects.way.given(inputs))


def _called(module: nn.Module, given: Mapping[str, Tensor]) -> list[Tensor]:
    """The numbers of one call, in float64."""
    with torch.no_grad(), forced_float64(module):
        return [one.detach().clone() for one in numbers_of(module(**given))]


def _apart(some: list[Tensor], others: list[Tensor]) -> float:
    """The largest difference, relative to scale; infinite where there are other tensors."""
    if [one.shape for one in some] != [one.shape for one in others]:
        return math.inf
    far = 0.0
    for one, other in zip(some, others, strict=True):
        if one.numel() and not torch.equal(one.nan_to_num(), other.nan_to_num()):
            far = max(far, float((one - other).abs().max() / one.abs().max().clamp_min(1e-30)))
    return math.inf if math.isnan(far) else far
