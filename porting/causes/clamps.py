"""Activations that are clamped, as those of MPT, OLMo, DBRX and gpt-oss are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from porting.causes.capping import Clamp
from porting.causes.cause import Cause, alter, free_parameter, replace_with, run_with
from porting.causes.fitting import FreeParameter, geometric
from porting.causes.model_parts import ModelParts
from porting.causes.projections import role_of
from porting.causes.replay import Alteration, Rewrite
from porting.causes.tape import Ref

SIZES = geometric(1e-2, 1e3, 3)


class ClampMissing(Cause):
    """None."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each clamp."""
        for clamp in model_parts.clamps:
            yield alter(clamp.call, replace_with(clamp.input), f"to {said(clamp)}")


def said(clamp: Clamp) -> str:
    """Its two numbers."""
    ends = [f"{end:g}" if end is not None else "nothing" for end in (clamp.least, clamp.most)]
    return f"between {ends[0]} and {ends[1]}"


class OtherClamp(Cause):
    """At another number."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Those that clamp on one side alone, and those that do so on both."""
        for clamp in model_parts.clamps:
            size = clamp.most if clamp.most is not None else -(clamp.least or 0.0)
            ways = {(None, size): "from above alone", (-size, None): "from below alone", (-size, size): "on both sides"}
            for (least, most), detail in ways.items():
                if (least, most) != (clamp.least, clamp.most):
                    yield alter(clamp.call, _within(clamp, least, most), detail)

    def free_parameters(self, model_parts: ModelParts) -> Iterator[FreeParameter]:
        """Each clamp."""
        for clamp in model_parts.clamps:
            yield free_parameter(
                clamp.call, _sized(clamp), f"at {{}} where the reference has {said(clamp)}".format, SIZES
            )


def _within(clamp: Clamp, least: float | None, most: float | None) -> Rewrite:
    return replace_with(clamp.input, lambda value: value.clamp(least, most))


def _sized(clamp: Clamp) -> Callable[[float], Rewrite]:
    return lambda size: _within(clamp, None if clamp.least is None else -size, None if clamp.most is None else size)


class ClampExtra(Cause):
    """One that should not be there."""

    def free_parameters(self, model_parts: ModelParts) -> Iterator[FreeParameter]:
        """Each projection into query, key or value, as what reads it shows."""
        clamped = {clamp.input for clamp in model_parts.clamps}
        for linear in model_parts.linears:
            given = linear.call.result
            readers = model_parts.tape.users(given)
            if role_of(linear, model_parts) in ("query", "key", "value", "fused") and given not in clamped and readers:
                calls = frozenset(call.number for call in readers)
                turned = partial(_clamped, given, calls)
                detail = "at {} where the reference has no clamp".format
                yield FreeParameter(linear.call.module, calls, turned, detail, SIZES)


def _clamped(ref: Ref, calls: frozenset[int], size: float) -> dict[int, Rewrite]:
    return dict.fromkeys(calls, lambda values, call: run_with(values, call, ref, values[ref].clamp(-size, size)))


CAUSES: tuple[Cause, ...] = (
    ClampMissing(
        name="clamp missing",
        what="activations are not clamped",
        looks="nothing where they are small; the large ones are too large",
        fix="see clip_qkv, swiglu_limit and the like in the config",
    ),
    OtherClamp(
        name="clamp at another number",
        what="activations are clamped at another number, or on one side alone",
        looks="nothing where they are small",
        fix="see clip_qkv, swiglu_limit and the like in the config",
    ),
    ClampExtra(
        name="clamp that should not be there",
        what="queries, keys or values are clamped where the reference does not",
        looks="nothing where they are small",
        fix="see clip_qkv in the config: none means that nothing is clamped",
    ),
)
