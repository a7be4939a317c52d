"""Soft caps, ``cap * tanh(x / cap)``, of scores and logits (Gemma Team 2024, section 2), and clamps of activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from porting.causes.capping import Cap, Clamp
from porting.causes.cause import Cause, alter, free_parameter, map_result, replace_with, run_with
from porting.causes.fitting import FreeParameter, geometric
from porting.causes.model_parts import ModelParts
from porting.causes.projections import role_of
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.tape import Call, Ref

SCORES, LOGITS = "scores", "logits"


def capped(value: Tensor, cap: float) -> Tensor:
    """Return ``cap * tanh(x / cap)``."""
    return cap * torch.tanh(value / cap)


@dataclass(frozen=True, kw_only=True)
class OfCaps(Cause):
    """A mistake in the soft caps of one kind.

    Attributes:
        of: ``scores`` or ``logits``.
    """

    of: str

    def caps(self, model_parts: ModelParts) -> Iterator[Cap]:
        """Return the soft caps of scores, or all others."""
        score_calls = {call.number for attention in model_parts.attentions for call in attention.steps}
        return (cap for cap in model_parts.caps if (cap.bend.number in score_calls) == (self.of == SCORES))


class CapMissing(OfCaps):
    """A soft cap that is missing."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each soft cap of this kind."""
        for cap in self.caps(model_parts):
            yield alter(cap.call, replace_with(cap.input), f"of {cap.size:g}")


class OtherCap(OfCaps):
    """A soft cap of another size."""

    def free_parameters(self, model_parts: ModelParts) -> Iterator[FreeParameter]:
        """Yield the size of each soft cap of this kind."""
        for cap in self.caps(model_parts):
            detail = f"{self.of} are capped at {{}} where the reference has {cap.size:g}".format
            yield free_parameter(cap.call, partial(_cap_of_size, cap), detail, geometric(0.1, 1e3, 3))


def _cap_of_size(cap: Cap, size: float) -> Rewrite:
    return replace_with(cap.input, lambda value: capped(value, size))


class CapExtra(OfCaps):
    """A soft cap that the reference does not have."""

    def free_parameters(self, model_parts: ModelParts) -> Iterator[FreeParameter]:
        """Yield the size of a cap in each attention, or at each decoder, if the model has none of this kind."""
        if any(True for _ in self.caps(model_parts)):
            return
        detail = f"{self.of} are capped at {{}} where the reference has no cap".format
        for call, where in self._places(model_parts):
            yield free_parameter(call, _capped_at, detail, geometric(0.1, 1e3, 3), where=where)

    def _places(self, model_parts: ModelParts) -> Iterator[tuple[Call, str]]:
        if self.of == LOGITS:
            yield from (
                (linear.call, "") for linear in model_parts.linears if role_of(linear, model_parts) == "decoder"
            )
            return
        for attention in model_parts.attentions:
            call = model_parts.tape.maker(attention.raw)
            if call is not None:
                yield call, attention.where


def _capped_at(size: float) -> Rewrite:
    return map_result(lambda value: capped(value, size))


class CapAfterMask(OfCaps):
    """The mask is applied before the soft cap, which gives hidden scores ``-cap`` and so a probability."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each attention whose scores are capped."""
        caps = {cap.call.number: cap for cap in self.caps(model_parts)}
        for attention in model_parts.attentions:
            cap = next((caps[call.number] for call in attention.steps if call.number in caps), None)
            last = model_parts.tape.maker(attention.masked)
            if cap is not None and last is not None and last is not cap.call:
                yield alter(last, self._mask_capped(cap, ~attention.allowed), where=attention.where)

    @staticmethod
    def _mask_capped(cap: Cap, hidden: Tensor) -> Rewrite:
        def rewrite(values: Values, call: Call) -> Tensor:
            return values[cap.call.result].masked_fill(hidden, -cap.size)

        return rewrite


def _cap_causes(of: str) -> tuple[Cause, ...]:
    fix = "cap * tanh(x / cap)"
    field = {SCORES: "attn_logit_softcapping", LOGITS: "final_logit_softcapping"}[of]
    return (
        CapMissing(
            name=f"soft cap of {of} missing",
            what=f"the {of} are not capped",
            looks=f"no difference where {of} are small; large ones are too large",
            fix=f"{fix}; see {field} in the config",
            of=of,
        ),
        OtherCap(
            name=f"soft cap of {of} of another size",
            what=f"the {of} are capped at a different number",
            looks=f"no difference where {of} are small",
            fix=f"{fix}; see {field} in the config",
            of=of,
        ),
        CapExtra(
            name=f"soft cap of {of} that should not be there",
            what=f"the {of} are capped, unlike in the reference",
            looks=f"no difference where {of} are small; large ones are too small",
            fix=f"see {field} in the config: Gemma 2 has one, Gemma and Gemma 3 have none",
            of=of,
        ),
    )


CLAMP_STARTS = geometric(1e-2, 1e3, 3)


class ClampMissing(Cause):
    """A clamp that is missing."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each clamp."""
        for clamp in model_parts.clamps:
            yield alter(clamp.call, replace_with(clamp.input), f"to {clamp_text(clamp)}")


def clamp_text(clamp: Clamp) -> str:
    """Return the limits of a clamp for a report."""
    limits = [f"{end:g}" if end is not None else "nothing" for end in (clamp.least, clamp.most)]
    return f"between {limits[0]} and {limits[1]}"


class OtherClamp(Cause):
    """A clamp with other limits."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each clamp with one limit alone, and with both."""
        for clamp in model_parts.clamps:
            size = clamp.most if clamp.most is not None else -(clamp.least or 0.0)
            variants = {
                (None, size): "from above alone",
                (-size, None): "from below alone",
                (-size, size): "on both sides",
            }
            for (least, most), detail in variants.items():
                if (least, most) != (clamp.least, clamp.most):
                    yield alter(clamp.call, _clamped_to(clamp, least, most), detail)

    def free_parameters(self, model_parts: ModelParts) -> Iterator[FreeParameter]:
        """Yield the size of each clamp."""
        for clamp in model_parts.clamps:
            yield free_parameter(
                clamp.call,
                _clamp_of_size(clamp),
                f"at {{}} where the reference has {clamp_text(clamp)}".format,
                CLAMP_STARTS,
            )


def _clamped_to(clamp: Clamp, least: float | None, most: float | None) -> Rewrite:
    return replace_with(clamp.input, lambda value: value.clamp(least, most))


def _clamp_of_size(clamp: Clamp) -> Callable[[float], Rewrite]:
    return lambda size: _clamped_to(clamp, None if clamp.least is None else -size, None if clamp.most is None else size)


class ClampExtra(Cause):
    """A clamp that the reference does not have."""

    def free_parameters(self, model_parts: ModelParts) -> Iterator[FreeParameter]:
        """Yield the clamp of each query, key or value projection's result, as the calls that read it see it."""
        clamped = {clamp.input for clamp in model_parts.clamps}
        for linear in model_parts.linears:
            result = linear.call.result
            readers = model_parts.tape.users(result)
            if role_of(linear, model_parts) in ("query", "key", "value", "fused") and result not in clamped and readers:
                calls = frozenset(call.number for call in readers)
                rewrites = partial(_clamped, result, calls)
                detail = "at {} where the reference has no clamp".format
                yield FreeParameter(linear.call.module, calls, rewrites, detail, CLAMP_STARTS)


def _clamped(ref: Ref, calls: frozenset[int], size: float) -> dict[int, Rewrite]:
    return dict.fromkeys(calls, lambda values, call: run_with(values, call, ref, values[ref].clamp(-size, size)))


CAUSES: tuple[Cause, ...] = (
    *_cap_causes(SCORES),
    CapAfterMask(
        name="soft cap behind the mask",
        what="the scores are masked before they are capped, so that hidden keys get attention",
        looks="the probabilities of hidden keys are not 0",
        fix="cap the scores first, then mask them",
        of=SCORES,
    ),
    *_cap_causes(LOGITS),
    ClampMissing(
        name="clamp missing",
        what="activations are not clamped",
        looks="no difference where activations are small; large ones are too large",
        fix="see clip_qkv or swiglu_limit in the config",
    ),
    OtherClamp(
        name="clamp at another number",
        what="activations are clamped at a different number, or on one side only",
        looks="no difference where activations are small",
        fix="see clip_qkv or swiglu_limit in the config",
    ),
    ClampExtra(
        name="clamp that should not be there",
        what="queries, keys or values are clamped, unlike in the reference",
        looks="no difference where activations are small",
        fix="see clip_qkv in the config: None means no clamp",
    ),
)
