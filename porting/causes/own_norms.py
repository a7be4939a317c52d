"""Norms of queries and keys that are not the reference's (Dehghani et al. 2023, section 2.2; Henry et al. 2020)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from porting.causes.attention import Attention
from porting.causes.cause import Cause, alter, replace_with
from porting.causes.model_parts import ModelParts
from porting.causes.norming import Norm
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.rotations import Rotation, rotations
from porting.causes.tape import Call, Ref


class OwnNormMissing(Cause):
    """Queries or keys, or both, are not normed."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """The norms of each attention: both, and those of either side alone."""
        for attention in model_parts.attentions:
            sides = {
                f"of the {side} alone": {
                    norm.call.number: replace_with(norm.input) for norm in _behind(attention, ref, model_parts)
                }
                for side, ref in (("queries", attention.query), ("keys", attention.key))
            }
            every = {number: rewrite for rewrites in sides.values() for number, rewrite in rewrites.items()}
            if every:
                yield Alteration(where=attention.where, rewrites=every)
            for detail, rewrites in sides.items():
                if 0 < len(rewrites) < len(every):
                    yield Alteration(where=attention.where, rewrites=rewrites, detail=detail)


class OverWidth(Cause):
    """One norm for all heads at once."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each norm of single heads, [b s h d] or [b h s d]."""
        lengths = {
            model_parts.tape[ref].shape[axis]
            for attention in model_parts.attentions
            for ref, axis in _places(attention)
        }
        for norm in model_parts.own_norms:
            shape = model_parts.tape[norm.input].shape
            if len(shape) == 4:
                yield alter(norm.call, self._joined(norm, -2 if shape[-3] in lengths else -3))

    @staticmethod
    def _joined(norm: Norm, axis: int) -> Rewrite:
        def rewrite(values: Values, call: Call) -> Tensor:
            whole = values[norm.input].movedim(axis, -2)
            made = norm.of(whole.flatten(-2)).view(whole.shape).movedim(-2, axis)
            gain = norm.gain(values)
            return made if gain is None else made * gain

        return rewrite


def _places(attention: Attention) -> tuple[tuple[Ref, int], ...]:
    """Query and key, with the axis of their positions."""
    return (attention.query, -2), (attention.key, -1)


class OverHeads(Cause):
    """A norm for each head."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each norm of all heads at once."""
        for attention in model_parts.attentions:
            for norm in dict.fromkeys(
                [*_behind(attention, attention.query, model_parts), *_behind(attention, attention.key, model_parts)]
            ):
                width = model_parts.tape[norm.input].shape[-1]
                if model_parts.tape[norm.input].ndim == 3 and width % attention.size == 0 and width > attention.size:
                    yield alter(norm.call, self._apart(norm, attention.size))

    @staticmethod
    def _apart(norm: Norm, size: int) -> Rewrite:
        def rewrite(values: Values, call: Call) -> Tensor:
            whole = values[norm.input]
            made = norm.of(whole.view(*whole.shape[:-1], -1, size)).flatten(-2)
            gain = norm.gain(values)
            return made if gain is None else made * gain

        return rewrite


def _behind(attention: Attention, ref: Ref, model_parts: ModelParts) -> list[Norm]:
    """The norms between a projection and an attention's query or key."""
    makers = {linear.call.number for linear in model_parts.linears}
    calls = {call.number for call in attention.tape.before(ref, lambda call: call.number in makers)}
    return [norm for norm in model_parts.own_norms if norm.call.number in calls]


class BehindRotation(Cause):
    """The rotation first, and then the norm."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each rotation of what was normed by heads."""
        for rotation, norm in _rotated(model_parts):
            if norm.call.number < rotation.call.number:
                rewrites = {norm.call.number: replace_with(norm.input), rotation.whole.number: self._normed(norm)}
                yield Alteration(where=norm.call.module, rewrites=rewrites)

    @staticmethod
    def _normed(norm: Norm) -> Rewrite:
        return lambda values, call: norm.whole(values.run(call), values)


class BeforeRotation(Cause):
    """The norm first, and then the rotation."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each norm of a head that was rotated."""
        for rotation, norm in _rotated(model_parts):
            if norm.call.number > rotation.call.number:
                rewrites = {
                    rotation.call.number: self._turned(rotation, norm),
                    norm.call.number: replace_with(norm.input),
                }
                yield Alteration(where=norm.call.module, rewrites=rewrites)

    @staticmethod
    def _turned(rotation: Rotation, norm: Norm) -> Rewrite:
        return lambda values, call: rotation.turned(values, norm.whole(values[rotation.input], values))


def _rotated(model_parts: ModelParts) -> Iterator[tuple[Rotation, Norm]]:
    """Each rotation with the norm of the same heads, before or behind it."""
    tape = model_parts.tape
    heads = [
        norm
        for norm in model_parts.own_norms
        if norm.weight is None or tape[norm.weight].shape == tape[norm.input].shape[-1:]
    ]
    for rotation in dict.fromkeys(rotations(model_parts)):
        for norm in heads:
            early, late = sorted((norm.call, rotation.call), key=lambda call: call.number)
            between = tape.before(late.result, lambda call: call.name == "linear")
            if tape[norm.input].ndim == 4 and any(call is early for call in between):
                yield rotation, norm


CAUSES: tuple[Cause, ...] = (
    OwnNormMissing(
        name="query and key norm missing",
        what="queries and keys are not normed",
        looks="the scores are too large or too small",
        fix="norm queries and keys before they are rotated, as Qwen 3, Gemma 3 and OLMo 2 do",
    ),
    OverWidth(
        name="query and key norm over the whole width",
        what="one norm is taken over all heads at once, where the reference norms each",
        looks="each head's scores are off by a factor that differs from position to position",
        fix="split into heads first, and norm [b s h d] over d: Qwen 3 and Gemma 3; OLMo 2 norms the whole width",
    ),
    OverHeads(
        name="query and key norm over each head",
        what="each head is normed by itself, where the reference norms all at once",
        looks="each head's scores are off by a factor that differs from position to position",
        fix="norm [b s (h d)] before it is split into heads: OLMo 2; Qwen 3 and Gemma 3 norm each head",
    ),
    BehindRotation(
        name="query and key norm behind the rotation",
        what="queries and keys are rotated first, and then normed",
        looks="position 0 agrees; nothing at all where all gains are alike",
        fix="norm, and then rotate",
    ),
    BeforeRotation(
        name="query and key norm before the rotation",
        what="queries and keys are normed first, and then rotated",
        looks="position 0 agrees; nothing at all where all gains are alike",
        fix="rotate, and then norm, as Hunyuan does",
    ),
)
