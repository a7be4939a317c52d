"""Soft caps, ``cap * tanh(x / cap)``, of scores and logits (Gemma Team 2024, section 2), and clamps of activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from porting.causes.capping import Cap, Clamp
from porting.causes.cause import (
    Cause,
    FreeParameters,
    alter,
    alter_each,
    free_parameter,
    map_result,
    replace_with,
    run_with,
    solve_each,
)
from porting.causes.fitting import FreeParameter, geometric
from porting.causes.model_parts import ModelParts
from porting.causes.projections import role_of
from porting.causes.replay import Alteration, Rewrite
from porting.causes.tape import Call, Ref

SCORES, LOGITS = "scores", "logits"
CAP_STARTS = geometric(0.1, 1e3, 3)
CLAMP_STARTS = geometric(1e-2, 1e3, 3)


def capped(value: Tensor, cap: float) -> Tensor:
    """Return ``cap * tanh(x / cap)``."""
    return cap * torch.tanh(value / cap)


def _caps(of: str) -> Callable[[ModelParts], list[Cap]]:
    """Return what finds the soft caps of scores, or all others."""

    def caps(model_parts: ModelParts) -> list[Cap]:
        score_calls = {call.number for attention in model_parts.attentions for call in attention.steps}
        return [cap for cap in model_parts.caps if (cap.bend.number in score_calls) == (of == SCORES)]

    return caps


def _cap_of_size(cap: Cap, size: float) -> Rewrite:
    return replace_with(cap.input, lambda value: capped(value, size))


def _solved_extra_cap(of: str) -> FreeParameters:
    """Return the size of a cap in each attention, or at each decoder, if the model has none of this kind."""

    def free_parameters(model_parts: ModelParts) -> Iterator[FreeParameter]:
        detail = f"{of} are capped at {{}} where the reference has no cap".format
        for call, where in () if _caps(of)(model_parts) else _uncapped(of, model_parts):
            yield free_parameter(call, _capped_at, detail, CAP_STARTS, where=where)

    return free_parameters


def _uncapped(of: str, model_parts: ModelParts) -> Iterator[tuple[Call, str]]:
    if of == LOGITS:
        yield from ((linear.call, "") for linear in model_parts.linears if role_of(linear, model_parts) == "decoder")
        return
    for attention in model_parts.attentions:
        call = model_parts.tape.maker(attention.raw)
        if call is not None:
            yield call, attention.where


def _capped_at(size: float) -> Rewrite:
    return map_result(lambda value: capped(value, size))


def _capped_after_mask(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each attention whose scores are capped, with ``-cap`` for hidden ones, which leaves them a probability."""
    caps = {cap.call.number: cap for cap in _caps(SCORES)(model_parts)}
    for attention in model_parts.attentions:
        cap = next((caps[call.number] for call in attention.steps if call.number in caps), None)
        last = model_parts.tape.maker(attention.masked)
        if cap is not None and last is not None and last is not cap.call:
            hidden = partial(Tensor.masked_fill, mask=~attention.allowed, value=-cap.size)
            yield alter(last, replace_with(cap.call.result, hidden), where=attention.where)


def _cap_causes(of: str) -> tuple[Cause, ...]:
    fix = "cap * tanh(x / cap)"
    field = {SCORES: "attn_logit_softcapping", LOGITS: "final_logit_softcapping"}[of]
    return (
        Cause(
            name=f"soft cap of {of} missing",
            what=f"the {of} are not capped",
            looks=f"no difference where {of} are small; large ones are too large",
            fix=f"{fix}; see {field} in the config",
            alterations=alter_each(_caps(of), lambda cap: replace_with(cap.input), lambda cap: f"of {cap.size:g}"),
        ),
        Cause(
            name=f"soft cap of {of} of another size",
            what=f"the {of} are capped at a different number",
            looks=f"no difference where {of} are small",
            fix=f"{fix}; see {field} in the config",
            free_parameters=solve_each(
                _caps(of),
                _cap_of_size,
                lambda cap: f"{of} are capped at {{}} where the reference has {cap.size:g}",
                CAP_STARTS,
            ),
        ),
        Cause(
            name=f"soft cap of {of} that should not be there",
            what=f"the {of} are capped, unlike in the reference",
            looks=f"no difference where {of} are small; large ones are too small",
            fix=f"see {field} in the config: Gemma 2 has one, Gemma and Gemma 3 have none",
            free_parameters=_solved_extra_cap(of),
        ),
    )


def clamp_text(clamp: Clamp) -> str:
    """Return the limits of a clamp for a report."""
    limits = [f"{end:g}" if end is not None else "nothing" for end in (clamp.least, clamp.most)]
    return f"between {limits[0]} and {limits[1]}"


def _on_other_sides(model_parts: ModelParts) -> Iterator[Alteration]:
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


def _clamped_to(clamp: Clamp, least: float | None, most: float | None) -> Rewrite:
    return replace_with(clamp.input, lambda value: value.clamp(least, most))


def _clamp_of_size(clamp: Clamp, size: float) -> Rewrite:
    return _clamped_to(clamp, None if clamp.least is None else -size, None if clamp.most is None else size)


def _solved_extra_clamp(model_parts: ModelParts) -> Iterator[FreeParameter]:
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
    Cause(
        name="soft cap behind the mask",
        what="the scores are masked before they are capped, so that hidden keys get attention",
        looks="the probabilities of hidden keys are not 0",
        fix="cap the scores first, then mask them",
        alterations=_capped_after_mask,
    ),
    *_cap_causes(LOGITS),
    Cause(
        name="clamp missing",
        what="activations are not clamped",
        looks="no difference where activations are small; large ones are too large",
        fix="see clip_qkv or swiglu_limit in the config",
        alterations=alter_each(
            lambda parts: parts.clamps, lambda clamp: replace_with(clamp.input), lambda clamp: f"to {clamp_text(clamp)}"
        ),
    ),
    Cause(
        name="clamp at another number",
        what="activations are clamped at a different number, or on one side only",
        looks="no difference where activations are small",
        fix="see clip_qkv or swiglu_limit in the config",
        alterations=_on_other_sides,
        free_parameters=solve_each(
            lambda parts: parts.clamps,
            _clamp_of_size,
            lambda clamp: f"at {{}} where the reference has {clamp_text(clamp)}",
            CLAMP_STARTS,
        ),
    ),
    Cause(
        name="clamp that should not be there",
        what="queries, keys or values are clamped, unlike in the reference",
        looks="no difference where activations are small",
        fix="see clip_qkv in the config: None means no clamp",
        free_parameters=_solved_extra_clamp,
    ),
)
