"""Attention's heads: how they are split, scaled and joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from porting.causes.attention import BLOCKS, BY_GROUPS, ORDERS, Attention, Heads, Projections, flat, unflat, with_heads
from porting.causes.cause import Cause, alter, free_parameter, map_result, replace_with, run_with
from porting.causes.fitting import FreeParameter, geometric
from porting.causes.functions import SUM, factor_of
from porting.causes.model_parts import ModelParts
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.tape import Call, Ref


@dataclass(frozen=True, kw_only=True)
class Rescaled(Cause):
    """The scores are multiplied by a factor.

    Attributes:
        factor: a head's width, the number of heads, and the reference's scale -> the factor; 0 or 1 for none.
    """

    factor: Callable[[int, int, float], float]

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield the product of query and key in each attention."""
        for attention in model_parts.attentions:
            query = model_parts.tape[attention.query]
            factor = self.factor(attention.size, query.shape[1] if query.ndim == 4 else 1, attention.scale)
            if factor and not math.isclose(factor, 1.0):
                yield alter(attention.product, _times(factor), where=attention.where)


class OtherScale(Cause):
    """The scores are multiplied by an unusual factor."""

    def free_parameters(self, model_parts: ModelParts) -> Iterator[FreeParameter]:
        """Yield the scale of each attention."""
        for attention in model_parts.attentions:
            scale = attention.scale * scaled_before(attention)
            expected = f"{_scale_text(scale, attention.size)} is expected"
            yield free_parameter(
                attention.product,
                partial(_scaled_to, scale),
                partial(_scale_detail, expected),
                geometric(2e-5, 2e2, 4),
                where=attention.where,
            )


def _scaled_to(scale: float, new_scale: float) -> Rewrite:
    return _times(new_scale / scale)


def _scale_detail(expected: str, found: str) -> str:
    return f"scores are multiplied by {found} where {expected}"


def _scale_text(scale: float, size: int) -> str:
    return f"1 / sqrt({size})" if math.isclose(scale, size**-0.5, rel_tol=1e-6) else f"{scale:.6g}"


def scaled_before(attention: Attention) -> float:
    """Return what query and key are multiplied by between their projections and their product."""
    scale = 1.0
    for ref in (attention.query, attention.key):
        for call in attention.tape.before(ref, lambda call: call.name in ("linear", "addmm", *SUM)):
            scale *= factor_of(call) or 1.0
    return scale


def _times(factor: float) -> Rewrite:
    return map_result(lambda scores: scores * factor)


@dataclass(frozen=True, kw_only=True)
class HeadsSplit(Cause):
    """Query, key and value are split into heads in another way, before a rotation.

    Attributes:
        variants: the projections, and the heads -> the details and the heads of each variant.
    """

    variants: Callable[[Projections, Heads], Iterator[tuple[str, Heads]]]

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each variant of each self-attention whose projections are known."""
        for attention in model_parts.attentions:
            projections = Projections.of(attention)
            if projections is None:
                continue
            recorded = projections.split(Values(model_parts.tape))
            for index, (detail, _) in enumerate(self.variants(projections, recorded)):
                rewrites = projections.rewrites(partial(self._variant, projections, index=index))
                yield Alteration(where=attention.where, rewrites=rewrites, detail=detail)

    def _variant(self, projections: Projections, heads: Heads, *, index: int) -> Heads:
        return list(self.variants(projections, heads))[index][1]


def interleaved(projections: Projections, heads: Heads) -> Iterator[tuple[str, Heads]]:
    """Yield the heads that result from reading the fused projection's output in another order."""
    fused, order = projections.fused(heads), projections.order
    for other in ORDERS[:-1] if order in ORDERS else (BLOCKS, BY_GROUPS):  # (p d h) is a mistake with heads alone
        if other != order:
            yield f"read as {other} where it is {order}", projections.read(fused, other)


def untransposed(projections: Projections, heads: Heads) -> Iterator[tuple[str, Heads]]:
    """Yield ``view(b, h, s, d)`` of [b s (h d)], and heads of every h-th channel."""
    query, key, value = (flat(head).reshape(head.shape) for head in heads)
    yield "[b s (h d)] viewed as [b h s d] at once", (query, key, value)
    size = projections.attention.size
    query, key, value = (unflat(flat(head), size, head.shape[1]).permute(0, 3, 1, 2) for head in heads)
    yield "(d h) where it is (h d)", (query, key, value)


class HeadsReversed(Cause):
    """The heads are in reverse order."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each attention with its joined heads, its queries, its keys, or its values reversed."""
        for attention in model_parts.attentions:
            if any(model_parts.tape[ref].ndim != 4 for ref in (attention.query, attention.key, attention.value)):
                continue
            flipped = map_result(lambda heads: heads.flip(1))
            yield alter(attention.context, flipped, "when they are put together", where=attention.where)
            for place, name in enumerate(("queries", "keys")):
                yield alter(attention.product, self._flipped(place), f"of the {name}", where=attention.where)
            yield alter(attention.context, self._flipped(1), "of the values", where=attention.where)

    @staticmethod
    def _flipped(place: int) -> Rewrite:
        def rewrite(values: Values, call: Call) -> Tensor:
            result: Tensor = run_with(values, call, call.reads[place], values[call.reads[place]].flip(1))
            return result

        return rewrite


class HeadCount(Cause):
    """Another number of heads."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each attention of four axes, with each other number of heads that divides the width."""
        for attention in model_parts.attentions:
            query = model_parts.tape[attention.query]
            if query.ndim != 4 or attention.merge is None:
                continue
            heads, width = query.shape[1], query.shape[1] * query.shape[3]
            for count in (number for number in range(1, min(width, 64) + 1) if width % number == 0 and number != heads):
                detail = f"{count} heads where the reference has {heads}"
                yield alter(attention.merge, self._with_count(attention, count), detail, where=attention.where)

    @staticmethod
    def _with_count(attention: Attention, count: int) -> Rewrite:
        def rewrite(values: Values, call: Call) -> Tensor:
            query, key, value = (
                unflat(flat(ref), count, -1).transpose(1, 2)
                for ref in (values[attention.query], values[attention.key].mT, values[attention.value])
            )
            scores = query @ key.mT * query.shape[-1] ** -0.5
            allowed = attention.allowed.any(1, keepdim=True)
            return flat(scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value)

        return rewrite


@dataclass(frozen=True, kw_only=True)
class HeadsJoined(Cause):
    """The heads are joined in another way.

    Attributes:
        join: the context [b h s d] -> [b s (h d)].
    """

    join: Callable[[Tensor], Tensor]

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each attention whose heads are joined."""
        for attention in model_parts.attentions:
            if attention.merge is not None:
                yield alter(attention.merge, replace_with(attention.context.result, self.join), where=attention.where)


@dataclass(frozen=True, kw_only=True)
class SoftmaxAxis(Cause):
    """The softmax is taken over another axis."""

    axis: int

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each attention with its mask as it is, low, and infinitely low, since a whole column may be masked."""
        for attention in model_parts.attentions:
            if model_parts.tape[attention.masked].ndim < -self.axis:
                continue
            for lowest in (None, -1e30, -torch.inf):
                yield Alteration(
                    where=attention.where, rewrites=self._rewrites(attention, self._masked(attention, lowest))
                )

    def _rewrites(self, attention: Attention, masked: Callable[[Tensor], Tensor]) -> dict[int, Rewrite]:
        """Rewrite the softmax, and the calls that make the scores visible, relative to the largest along the axis."""
        rewrites: dict[int, Rewrite] = {
            attention.softmax.number: replace_with(attention.masked, lambda scores: masked(scores).softmax(self.axis))
        }
        for user in attention.tape.users(attention.masked):
            if user.name == "amax":
                rewrites[user.number] = replace_with(
                    attention.masked, lambda scores: masked(scores).amax(self.axis, keepdim=True)
                )
            elif user.name in ("sub", "__sub__"):
                rewrites[user.number] = self._relative(attention, masked)
        return rewrites

    @staticmethod
    def _masked(attention: Attention, lowest: float | None) -> Callable[[Tensor], Tensor]:
        return lambda scores: scores if lowest is None else scores.masked_fill(~attention.allowed, lowest)

    def _relative(self, attention: Attention, masked: Callable[[Tensor], Tensor]) -> Rewrite:
        def rewrite(values: Values, call: Call) -> Tensor:
            scores = masked(values[attention.masked])
            return scores - scores.amax(self.axis, keepdim=True)

        return rewrite


@dataclass(frozen=True, kw_only=True)
class OtherPositionBias(Cause):
    """The learned bias is not added to the scores, or another one is.

    Attributes:
        bias: the bias [... q k] -> what is added instead; None where nothing is.
    """

    bias: Callable[[Tensor], Tensor] | None = None

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each step between product and softmax that adds a learned bias."""
        for attention in model_parts.attentions:
            previous = attention.product.result
            for step in attention.steps:
                biases = [ref for ref in step.reads if model_parts.tape.learned(ref) and ref != previous]
                if biases and previous in step.reads and self.bias is None:
                    yield alter(step, replace_with(previous), where=attention.where)
                elif biases and previous in step.reads and attention.own:
                    yield alter(step, self._with_other(biases[0]), where=attention.where)
                previous = step.result

    def _with_other(self, bias: Ref) -> Rewrite:
        function = self.bias or torch.zeros_like
        return lambda values, call: run_with(values, call, bias, function(values[bias]))


class HeadsTiled(Cause):
    """Keys and values of groups of heads are repeated in another order."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each order in each self-attention with four axes."""
        for attention in model_parts.attentions:
            tape = model_parts.tape
            refs = (attention.query, attention.key, attention.value)
            if not attention.own or any(tape[ref].ndim != 4 for ref in refs):
                continue
            if len({tape[ref].shape[1] for ref in refs}) > 1:  # the product shares keys by itself
                continue
            recorded = (tape[attention.query], tape[attention.key].mT, tape[attention.value])
            for index, (detail, _) in enumerate(tiled(recorded)):
                rewrites = with_heads(attention, partial(_tiled, index=index))
                yield Alteration(where=attention.where, rewrites=rewrites, detail=detail)


def _tiled(heads: Heads, *, index: int) -> Heads:
    return list(tiled(heads))[index][1]


def tiled(heads: Heads) -> Iterator[tuple[str, Heads]]:
    """Yield grouped heads of keys and values (Ainslie et al. 2023, section 2.2) that are repeated in another order."""
    query, key, value = heads
    count = key.shape[1]
    for repeats in (divisor for divisor in range(count, 1, -1) if count % divisor == 0):
        groups = count // repeats
        group_of, place_in_groups = torch.arange(count) // repeats, torch.arange(count) % groups
        if groups == 1 or all(_repeats(tensor, group_of, repeats) for tensor in (key, value)):
            orders = (group_of * repeats, place_in_groups * repeats, f"h % {groups}", f"h // {repeats}")
        elif all(torch.equal(tensor, tensor[:, place_in_groups]) for tensor in (key, value)):
            orders = (place_in_groups, group_of, f"h // {repeats}", f"h % {groups}")
        else:
            continue
        if groups > 1:
            _, order, actual, expected = orders
            for names, changed in (
                ("keys and values", (query, key[:, order], value[:, order])),
                ("values alone", (query, key, value[:, order])),
                ("keys alone", (query, key[:, order], value)),
            ):
                yield f"head h reads head {actual} of the {names}, where the reference reads {expected}", changed
            return


def _repeats(heads: Tensor, group_of: Tensor, repeats: int) -> bool:
    """Return whether each head occurs as often as it should beside itself."""
    return torch.equal(heads, heads[:, group_of * repeats])


CAUSES: tuple[Cause, ...] = (
    Rescaled(
        name="1/sqrt(d) missing",
        what="the scores are not divided by the root of the head size",
        looks="attention is too sharp; almost no difference on a new model, whose scores are near 0",
        fix="scores = q @ k.T / sqrt(head_size); scaled_dot_product_attention divides by default",
        factor=lambda size, heads, scale: 1 / scale if scale != 1 else size**0.5,
        absorbed_by_weights=True,
    ),
    Rescaled(
        name="1/sqrt(d) twice",
        what=(
            "the scores are divided by sqrt(d) once more than the reference divides them: by hand and again by the "
            "kernel, or where the reference does not at all"
        ),
        looks="attention is too flat",
        fix="scale=1.0 for scaled_dot_product_attention, where the query is scaled already or nothing is",
        factor=lambda size, heads, scale: size**-0.5,
        absorbed_by_weights=True,
    ),
    Rescaled(
        name="scaled by the model's width",
        what="the scores are divided by the root of hidden_size instead of the head size",
        looks="attention is too flat, by the root of the number of heads",
        fix="divide by sqrt(hidden_size / num_attention_heads)",
        factor=lambda size, heads, scale: heads**-0.5,
        absorbed_by_weights=True,
    ),
    OtherScale(
        name="attention scaled by another factor",
        what="the scores are multiplied by an unusual number",
        looks="attention is too flat or too sharp",
        fix="scores = q @ k.T / sqrt(head_size), unless the config says otherwise; scale= of the kernel",
        absorbed_by_weights=True,
    ),
    HeadsSplit(
        name="query, key and value interleaved wrongly",
        what="the rows of the fused projection are read in a different order than they are stored",
        looks="every head mixes queries, keys and values",
        fix="give the order in the table: [(p h d) e] for query, key and value in turn, [(h p d) e] by heads",
        variants=interleaved,
        absorbed_by_weights=True,
    ),
    HeadsSplit(
        name="heads split wrongly",
        what="the projection's output is cut into heads along the wrong axes",
        looks="the projections agree, the scores do not; the shapes fit",
        fix="view(b, s, h, d).transpose(1, 2), not view(b, h, s, d)",
        variants=untransposed,
        absorbed_by_weights=True,
    ),
    HeadsReversed(
        name="heads reversed",
        what="the heads are in reverse order",
        looks="the projections agree; all shapes fit",
        fix="check what flips the axis of the heads",
        absorbed_by_weights=True,
    ),
    HeadCount(
        name="number of heads",
        what="attention has a different number of heads",
        looks="all shapes fit, because the weights do not depend on it",
        fix="take num_attention_heads from the config",
    ),
    HeadsJoined(
        name="heads not transposed back",
        what="[b h s d] is reshaped to [b s e] without transposing heads and positions first",
        looks="the probabilities agree, the context does not",
        fix="context.transpose(1, 2).reshape(b, s, e)",
        join=lambda context: context.reshape(context.shape[0], context.shape[2], -1),
        absorbed_by_weights=True,
    ),
    HeadsJoined(
        name="heads merged in the wrong order",
        what="the channels are joined as (d h) instead of (h d)",
        looks="the probabilities agree, the context is shuffled",
        fix="heads first, then the channels of each head: rearrange 'b h s d -> b s (h d)'",
        join=lambda context: context.permute(0, 2, 3, 1).flatten(2),
        absorbed_by_weights=True,
    ),
    SoftmaxAxis(
        name="softmax over the queries",
        what="the softmax is taken over the queries instead of the keys",
        looks="the columns of the probabilities sum to 1, the rows do not",
        fix="softmax(dim=-1) of scores [b h q k]",
        axis=-2,
    ),
    SoftmaxAxis(
        name="softmax over the heads",
        what="the softmax is taken over the heads instead of the keys",
        looks="the probabilities sum to 1 over the heads",
        fix="softmax(dim=-1) of scores [b h q k]",
        axis=-3,
    ),
    OtherPositionBias(
        name="relative position bias of the other sign",
        what="the learned bias for each distance is added at the distance of the other sign",
        looks="the difference is 0 for a token itself, and the scores of a query are reversed around it",
        fix="the distance is the key's position minus the query's, as in T5",
        bias=lambda bias: bias.mT,
        absorbed_by_weights=True,
    ),
    OtherPositionBias(
        name="relative position bias missing",
        what="the learned bias for each distance is not added to the scores",
        looks="the scores differ by the same amounts in every layer",
        fix="add it before the softmax, in every layer",
        absorbed_by_weights=True,
    ),
    HeadsTiled(
        name="key and value heads tiled",
        what="the heads of keys or values are repeated as a whole instead of one by one, or vice versa",
        looks="the projections agree; the first and the last head agree, the others do not",
        fix="repeat_interleave(n, dim=heads), or expand [b g 1 s d] to [b g n s d]; not repeat, which tiles",
        absorbed_by_weights=True,
    ),
)
