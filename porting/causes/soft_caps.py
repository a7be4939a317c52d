"""Soft caps, ``cap * tanh(x / cap)``, of scores and of logits (Gemma Team 2024, section 2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from porting.causes.capping import Cap
from porting.causes.cause import Cause, alter, free_parameter, map_result, replace_with
from porting.causes.fitting import FreeParameter, geometric
from porting.causes.model_parts import ModelParts
from porting.causes.projections import role_of
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.tape import Call

SCORES, LOGITS = "scores", "logits"


def capped(value: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``."""
    return cap * torch.tanh(value / cap)


@dataclass(frozen=True, kw_only=True)
class OfCaps(Cause):
    """A mistake in the caps of one kind."""

    of: str

    def caps(self, model_parts: ModelParts) -> Iterator[Cap]:
        """Those of scores, or all others."""
        inside = {call.number for attention in model_parts.attentions for call in attention.steps}
        return (cap for cap in model_parts.caps if (cap.bend.number in inside) == (self.of == SCORES))


class CapMissing(OfCaps):
    """None."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each cap."""
        for cap in self.caps(model_parts):
            yield alter(cap.call, replace_with(cap.input), f"of {cap.size:g}")


class OtherCap(OfCaps):
    """Of another size."""

    def free_parameters(self, model_parts: ModelParts) -> Iterator[FreeParameter]:
        """Each cap."""
        for cap in self.caps(model_parts):
            detail = f"{self.of} are capped at {{}} where the reference has {cap.size:g}".format
            yield free_parameter(cap.call, partial(_sized, cap), detail, geometric(0.1, 1e3, 3))


def _sized(cap: Cap, size: float) -> Rewrite:
    return replace_with(cap.input, lambda value: capped(value, size))


class CapExtra(OfCaps):
    """One that should not be there."""

    def free_parameters(self, model_parts: ModelParts) -> Iterator[FreeParameter]:
        """Each attention, or each decoder, without one."""
        if any(True for _ in self.caps(model_parts)):
            return
        detail = f"{self.of} are capped at {{}} where the reference has no cap".format
        for call, where in self._places(model_parts):
            yield free_parameter(call, _extra, detail, geometric(0.1, 1e3, 3), where=where)

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


def _extra(size: float) -> Rewrite:
    return map_result(lambda value: capped(value, size))


class CapBehindMask(OfCaps):
    """The mask first, and then the cap: what is masked has the lowest score that there is, and a share."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each attention whose scores are capped."""
        caps = {cap.call.number: cap for cap in self.caps(model_parts)}
        for attention in model_parts.attentions:
            cap = next((caps[call.number] for call in attention.steps if call.number in caps), None)
            last = model_parts.tape.maker(attention.masked)
            if cap is not None and last is not None and last is not cap.call:
                closed = ~attention.allowed
                yield alter(last, self._closed(cap, closed), where=attention.where)

    @staticmethod
    def _closed(cap: Cap, closed: Tensor) -> Rewrite:
        def rewrite(values: Values, call: Call) -> Tensor:
            return values[cap.call.result].masked_fill(closed, -cap.size)

        return rewrite


def _of(of: str) -> tuple[Cause, ...]:
    fix = "cap * tanh(x / cap)"
    where = {SCORES: "attn_logit_softcapping", LOGITS: "final_logit_softcapping"}[of]
    return (
        CapMissing(
            name=f"soft cap of {of} missing",
            what=f"the {of} are not capped",
            looks=f"nothing where {of} are small; the large ones are too large",
            fix=f"{fix}; see {where} in the config",
            of=of,
        ),
        OtherCap(
            name=f"soft cap of {of} of another size",
            what=f"the {of} are capped at another number",
            looks=f"nothing where {of} are small",
            fix=f"{fix}; see {where} in the config",
            of=of,
        ),
        CapExtra(
            name=f"soft cap of {of} that should not be there",
            what=f"the {of} are capped where the reference does not",
            looks=f"nothing where {of} are small; the large ones are too small",
            fix=f"see {where} in the config: Gemma 2 has one, Gemma and Gemma 3 have none",
            of=of,
        ),
    )


CAUSES: tuple[Cause, ...] = (
    *_of(SCORES),
    CapBehindMask(
        name="soft cap behind the mask",
        what="the scores are masked first and then capped, so that what is masked has a share",
        looks="the probabilities of what is masked are not 0",
        fix="cap the scores, and then mask them",
        of=SCORES,
    ),
    *_of(LOGITS),
)
