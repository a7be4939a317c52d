"""What a cause is: one mistake that people make when they write a model again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from porting.causes.fitting import Dial
from porting.causes.model_parts import ModelParts
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.tape import Call, Ref


@dataclass(frozen=True, kw_only=True)
class Cause(ABC):
    """One entry of the catalogue.

    Attributes:
        name: what it is called in a report, ``"LayerNorm eps"``.
        what: what the port does, in a sentence.
        looks: how it looks from outside.
        fix: what to do about it.
        rough: it reproduces a rounding error, which another order of the same sums changes in its last digits.
        wide: it shows in several places at once; in one alone it looks like something simpler.
        pinned: its alterations say what a part computes from the reference's values, and do not make up a whole model.
        absorbed_by_weights: with other weights (moved, scaled, in another order, as a table can make them) a port with
            the mistake may compute what the reference does; without it, it computes another function whatever they are.
    """

    name: str
    what: str
    looks: str
    fix: str
    rough: bool = False
    wide: bool = False
    pinned: bool = False
    absorbed_by_weights: bool = False

    @abstractmethod
    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """The ways in which the reference would compute, had it this mistake, one place at a time."""

    def dials(self, model_parts: ModelParts) -> Iterator[Dial]:
        """The places at which a number may be another one: where no alteration fits, it is solved for."""
        del model_parts
        return iter(())


def reads(ref: Ref, function: Callable[[Tensor], Tensor] = lambda value: value) -> Rewrite:
    """A rewrite to another value of the pass, or to a function of it."""
    return lambda values, call: function(values[ref])


def joins(first: Ref, two: Ref, function: Callable[[Tensor, Tensor], Tensor]) -> Rewrite:
    """A rewrite to a function of two other values of the pass."""
    return lambda values, call: function(values[first], values[two])


def given_instead(values: Values, call: Call, ref: Ref, instead: Tensor) -> Any:  # what the call gives
    """What a call gives that is given another tensor in one place."""
    return replace(values, changed={**values.changed, ref: instead}).run(call)


def after(function: Callable[[Tensor], Tensor]) -> Rewrite:
    """A rewrite to a function of what the call gives."""
    return lambda values, call: function(values.run(call))


def other(call: Call, rewrite: Rewrite, detail: str = "", *, where: str = "") -> Alteration:
    """An alteration of one call."""
    return Alteration(where=where or call.module, rewrites={call.number: rewrite}, detail=detail)


def dial(
    call: Call,
    rewrite: Callable[[float], Rewrite],
    detail: Callable[[str], str],
    starts: Sequence[float],
    *,
    where: str = "",
    whole: bool = False,
) -> Dial:
    """A number of one call."""

    def turned(value: float) -> dict[int, Rewrite]:
        return {call.number: rewrite(value)}

    return Dial(where or call.module, frozenset({call.number}), turned, detail, starts, whole)
