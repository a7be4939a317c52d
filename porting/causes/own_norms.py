"""Norms of queries and keys that differ from the reference's (Dehghani et al. 2023, section 2.2; Henry et al. 2020)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from porting.causes.attention import Attention, unflat
from porting.causes.cause import Cause, alter, replace_with
from porting.causes.model_parts import ModelParts
from porting.causes.norming import Norm
from porting.causes.norms import affine
from porting.causes.replay import Alteration, Rewrite
from porting.causes.rotations import Rotation, rotations
from porting.causes.tape import Ref


def _missing(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each attention without both norms, and without either."""
    for attention in model_parts.attentions:
        sides = {
            f"of the {side} alone": {
                norm.call.number: replace_with(norm.input) for norm in _norms_of(attention, ref, model_parts)
            }
            for side, ref in (("queries", attention.query), ("keys", attention.key))
        }
        both = {number: rewrite for rewrites in sides.values() for number, rewrite in rewrites.items()}
        if both:
            yield Alteration(where=attention.where, rewrites=both)
        for detail, rewrites in sides.items():
            if 0 < len(rewrites) < len(both):
                yield Alteration(where=attention.where, rewrites=rewrites, detail=detail)


def _over_width(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each norm of single heads, [b s h d] or [b h s d], taken over all heads."""
    tape = model_parts.tape
    lengths = {
        tape[ref].shape[axis]
        for attention in model_parts.attentions
        for ref, axis in ((attention.query, -2), (attention.key, -1))
    }
    for norm in model_parts.own_norms:
        shape = tape[norm.input].shape
        if len(shape) == 4:
            yield alter(norm.call, _over_all_heads(norm, -2 if shape[-3] in lengths else -3))


def _over_all_heads(norm: Norm, axis: int) -> Rewrite:
    def formula(value: Tensor, norm: Norm) -> Tensor:
        moved = value.movedim(axis, -2)
        return norm.of(moved.flatten(-2)).view(moved.shape).movedim(-2, axis)

    return affine(norm, formula, bias=False)


def _over_heads(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each norm of all heads, taken over each head."""
    for attention in model_parts.attentions:
        both = [norm for ref in (attention.query, attention.key) for norm in _norms_of(attention, ref, model_parts)]
        for norm in dict.fromkeys(both):
            width = model_parts.tape[norm.input].shape[-1]
            if model_parts.tape[norm.input].ndim == 3 and width % attention.size == 0 and width > attention.size:
                yield alter(norm.call, _over_each_head(norm, attention.size))


def _over_each_head(norm: Norm, size: int) -> Rewrite:
    return affine(norm, lambda value, norm: norm.of(unflat(value, -1, size)).flatten(-2), bias=False)


def _norms_of(attention: Attention, ref: Ref, model_parts: ModelParts) -> list[Norm]:
    """Return the norms between a projection and an attention's query or key."""
    projections = {linear.call.number for linear in model_parts.linears}
    calls = {call.number for call in attention.tape.before(ref, lambda call: call.number in projections)}
    return [norm for norm in model_parts.own_norms if norm.call.number in calls]


def _after_rotation(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each rotation of normalised heads, with the norm after it."""
    for rotation, norm in _rotated_heads(model_parts):
        if norm.call.number < rotation.call.number:
            rewrites = {norm.call.number: replace_with(norm.input), rotation.whole.number: _normed(norm)}
            yield Alteration(where=norm.call.module, rewrites=rewrites)


def _normed(norm: Norm) -> Rewrite:
    return lambda values, call: norm.whole(values.run(call), values)


def _before_rotation(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each norm of rotated heads, with the rotation after it."""
    for rotation, norm in _rotated_heads(model_parts):
        if norm.call.number > rotation.call.number:
            rewrites = {
                rotation.call.number: _rotated_norm(rotation, norm),
                norm.call.number: replace_with(norm.input),
            }
            yield Alteration(where=norm.call.module, rewrites=rewrites)


def _rotated_norm(rotation: Rotation, norm: Norm) -> Rewrite:
    return lambda values, call: rotation.rotate(values, norm.whole(values[rotation.input], values))


def _rotated_heads(model_parts: ModelParts) -> Iterator[tuple[Rotation, Norm]]:
    """Yield each rotation with the norm of the same heads, before or after it."""
    tape = model_parts.tape
    norms = [
        norm
        for norm in model_parts.own_norms
        if norm.weight is None or tape[norm.weight].shape == tape[norm.input].shape[-1:]
    ]
    for rotation in dict.fromkeys(rotations(model_parts)):
        for norm in norms:
            first, second = sorted((norm.call, rotation.call), key=lambda call: call.number)
            calls = tape.before(second.result, lambda call: call.name == "linear")
            if tape[norm.input].ndim == 4 and any(call is first for call in calls):
                yield rotation, norm


CAUSES: tuple[Cause, ...] = (
    Cause(
        name="query and key norm missing",
        what="queries and keys are not normalised",
        looks="the scores are too large or too small",
        fix="normalise queries and keys before the rotation, as Qwen 3, Gemma 3 and OLMo 2 do",
        alterations=_missing,
    ),
    Cause(
        name="query and key norm over the whole width",
        what="one norm is taken over all heads; the reference normalises each head",
        looks="the scores of each head are off by a factor that depends on the position",
        fix="split into heads, then normalise over d: Qwen 3 and Gemma 3; OLMo 2 normalises the whole width",
        alterations=_over_width,
    ),
    Cause(
        name="query and key norm over each head",
        what="each head is normalised on its own; the reference normalises all heads at once",
        looks="the scores of each head are off by a factor that depends on the position",
        fix="normalise [b s (h d)] before splitting into heads, as OLMo 2; Qwen 3 and Gemma 3 normalise each head",
        alterations=_over_heads,
    ),
    Cause(
        name="query and key norm behind the rotation",
        what="queries and keys are rotated before they are normalised",
        looks="position 0 agrees; no difference at all if all gains are equal",
        fix="normalise, then rotate",
        alterations=_after_rotation,
    ),
    Cause(
        name="query and key norm before the rotation",
        what="queries and keys are normalised before they are rotated",
        looks="position 0 agrees; no difference at all if all gains are equal",
        fix="rotate, then normalise, as Hunyuan does",
        alterations=_before_rotation,
    ),
)
