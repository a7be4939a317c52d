"""A cause: one mistake that people make when they write a model again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import Tensor

from porting.causes.fitting import FreeParameter
from porting.causes.model_parts import ModelParts
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.tape import Call, Ref

Alterations = Callable[[ModelParts], Iterable[Alteration]]
"""The parts of a model -> the ways in which the reference would compute if it had a mistake."""

FreeParameters = Callable[[ModelParts], Iterable[FreeParameter]]
"""The parts of a model -> the numbers that a mistake may have changed."""


def _none(model_parts: ModelParts) -> tuple[()]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One entry of the catalogue.

    Attributes:
        name: its name in a report, ``"LayerNorm eps"``.
        what: what the port does wrong, in a sentence.
        looks: how the mistake shows in the model's values.
        fix: what to do about it.
        alterations: the mistake, in one place at a time.
        whole: the mistake in a whole model, where the alterations do not add up to one.
        free_parameters: each number that is solved for where no alteration fits.
        rough: the mistake only changes rounding, so its alterations agree with the port up to the last digits.
        wide: the mistake shows at several probes at once; where only one probe differs, a simpler entry is preferred.
        absorbed_by_weights: other weights (moved, scaled or reordered, as by a table) could undo the mistake.
            Where False, no choice of weights makes such a port compute what the reference computes.
    """

    name: str
    what: str
    looks: str
    fix: str
    alterations: Alterations = _none
    whole: Alterations = _none
    free_parameters: FreeParameters = _none
    rough: bool = False
    wide: bool = False
    absorbed_by_weights: bool = False


def replace_with(ref: Ref, function: Callable[[Tensor], Tensor] = lambda value: value) -> Rewrite:
    """Return a rewrite that gives another tensor of the pass, or a function of it, in place of the call's result."""
    return lambda values, call: function(values[ref])


def combine(first: Ref, second: Ref, function: Callable[[Tensor, Tensor], Tensor]) -> Rewrite:
    """Return a rewrite that gives a function of two other tensors of the pass."""
    return lambda values, call: function(values[first], values[second])


def map_result(function: Callable[[Tensor], Tensor]) -> Rewrite:
    """Return a rewrite that gives a function of the call's own result."""
    return lambda values, call: function(values.run(call))


def run_with(values: Values, call: Call, ref: Ref, tensor: Tensor) -> Any:  # what the call gives
    """Run a call with another tensor in place of one that it reads."""
    return replace(values, changed={**values.changed, ref: tensor}).run(call)


def alter(call: Call, rewrite: Rewrite, detail: str = "", *, where: str = "") -> Alteration:
    """Return the alteration of one call; ``where`` defaults to the module that made the call."""
    return Alteration(where=where or call.module, rewrites={call.number: rewrite}, detail=detail)


def free_parameter(
    call: Call,
    rewrite: Callable[[float], Rewrite],
    detail: Callable[[str], str],
    starts: Sequence[float],
    *,
    where: str = "",
    integer: bool = False,
) -> FreeParameter:
    """Return a number of one call that can be solved for; the arguments are those of :class:`FreeParameter`."""

    def rewrites(value: float) -> dict[int, Rewrite]:
        return {call.number: rewrite(value)}

    return FreeParameter(where or call.module, frozenset({call.number}), rewrites, detail, starts, integer)


class Site(Protocol):
    """A part of a model that one call computes."""

    @property
    def call(self) -> Call:
        """The call."""


AnySite = TypeVar("AnySite", bound=Site)


def alter_each(
    sites: Callable[[ModelParts], Iterable[AnySite]],
    rewrite: Callable[[AnySite], Rewrite],
    detail: Callable[[AnySite], str] = lambda site: "",
) -> Alterations:
    """Return the alterations that rewrite the call of each site of a model."""
    return lambda model_parts: (alter(site.call, rewrite(site), detail(site)) for site in sites(model_parts))


def solve_each(
    sites: Callable[[ModelParts], Iterable[AnySite]],
    rewrite: Callable[[AnySite, float], Rewrite],
    detail: Callable[[AnySite], str],
    starts: Sequence[float],
) -> FreeParameters:
    """Return the free parameters that rewrite the call of each site of a model.

    Args:
        rewrite: a site and the number -> the rewrite of its call.
        detail: a site -> the text of the report, with ``{}`` for the number.
        starts: as of :class:`FreeParameter`.
    """
    return lambda model_parts: (
        free_parameter(site.call, partial(rewrite, site), detail(site).format, starts) for site in sites(model_parts)
    )
