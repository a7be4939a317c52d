"""Attention's heads: how they are split, scaled and joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from porting.causes.attention import BLOCKS, BY_GROUPS, ORDERS, Attention, Heads, Projections, flat, unflat, with_heads
from porting.causes.cause import Alterations, Cause, alter, free_parameter, map_result, replace_with, run_with
from porting.causes.fitting import FreeParameter, geometric
from porting.causes.functions import SUM, factor_of
from porting.causes.model_parts import ModelParts
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.tape import Call, Ref


def _rescaled(factor: Callable[[Attention], float]) -> Alterations:
    """Return the alterations that multiply the product of query and key by a factor; 0 or 1 stand for none."""

    def alterations(model_parts: ModelParts) -> Iterator[Alteration]:
        for attention in model_parts.attentions:
            number = factor(attention)
            if number and not math.isclose(number, 1.0):
                yield alter(attention.product, _times(number), where=attention.where)

    return alterations


def _number_of_heads(attention: Attention) -> int:
    """Return the number of heads; 1 where they have no axis of their own."""
    query = attention.tape[attention.query]
    return query.shape[1] if query.ndim == 4 else 1


def _solved_scale(model_parts: ModelParts) -> Iterator[FreeParameter]:
    """Yield the scale of each attention."""
    for attention in model_parts.attentions:
        scale = attention.scale * scaled_before(attention)
        detail = f"scores are multiplied by {{}} where {_scale_text(scale, attention.size)} is expected".format
        starts = geometric(2e-5, 2e2, 4)
        yield free_parameter(attention.product, partial(_scaled_to, scale), detail, starts, where=attention.where)


def _scaled_to(scale: float, new_scale: float) -> Rewrite:
    return _times(new_scale / scale)


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


Variants = Callable[[Projections, Heads], Iterator[tuple[str, Heads]]]
"""The projections, and the heads -> the details and the heads of each way to split them."""


def _split(variants: Variants) -> Alterations:
    """Return the alterations that split query, key and value into heads in another way, before a rotation."""

    def alterations(model_parts: ModelParts) -> Iterator[Alteration]:
        for attention in model_parts.attentions:
            projections = Projections.of(attention)
            if projections is None:
                continue
            of_these = partial(variants, projections)
            for index, (detail, _) in enumerate(of_these(projections.split(Values(model_parts.tape)))):
                rewrites = projections.rewrites(partial(_variant, of_these, index))
                yield Alteration(where=attention.where, rewrites=rewrites, detail=detail)

    return alterations


def _variant(variants: Callable[[Heads], Iterator[tuple[str, Heads]]], index: int, heads: Heads) -> Heads:
    return list(variants(heads))[index][1]


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


def _with_axes(model_parts: ModelParts) -> list[Attention]:
    """Return the attentions whose queries, keys and values are [b h s d]."""
    tape = model_parts.tape
    return [
        attention
        for attention in model_parts.attentions
        if all(tape[ref].ndim == 4 for ref in (attention.query, attention.key, attention.value))
    ]


def _heads_reversed(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each attention with its joined heads, its queries, its keys, or its values reversed."""
    flipped = map_result(lambda heads: heads.flip(1))
    for attention in _with_axes(model_parts):
        yield alter(attention.context, flipped, "when they are put together", where=attention.where)
        yield alter(attention.product, _read_flipped(attention.query), "of the queries", where=attention.where)
        yield alter(attention.product, _read_flipped(attention.key), "of the keys", where=attention.where)
        yield alter(attention.context, _read_flipped(attention.value), "of the values", where=attention.where)


def _read_flipped(ref: Ref) -> Rewrite:
    return lambda values, call: run_with(values, call, ref, values[ref].flip(1))


def _other_head_count(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each attention of four axes, with each other number of heads that divides the width."""
    for attention in model_parts.attentions:
        query = model_parts.tape[attention.query]
        if query.ndim != 4 or attention.merge is None:
            continue
        heads, width = query.shape[1], query.shape[1] * query.shape[3]
        for count in (number for number in range(1, min(width, 64) + 1) if width % number == 0 and number != heads):
            detail = f"{count} heads where the reference has {heads}"
            yield alter(attention.merge, _with_count(attention, count), detail, where=attention.where)


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


def _joined(join: Callable[[Tensor], Tensor]) -> Alterations:
    """Return the alterations that join the heads in another way, [b h s d] -> [b s (h d)]."""

    def alterations(model_parts: ModelParts) -> Iterator[Alteration]:
        for attention in model_parts.attentions:
            if attention.merge is not None:
                yield alter(attention.merge, replace_with(attention.context.result, join), where=attention.where)

    return alterations


def _softmax_over(axis: int) -> Alterations:
    """Return the alterations that take the softmax over another axis."""

    def alterations(model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each attention with its mask as it is, low, and infinitely low, since a whole column may be masked."""
        for attention in model_parts.attentions:
            if model_parts.tape[attention.masked].ndim >= -axis:
                for lowest in (None, -1e30, -torch.inf):
                    rewrites = _softmax_rewrites(attention, partial(_hidden, attention, lowest), axis)
                    yield Alteration(where=attention.where, rewrites=rewrites)

    return alterations


def _hidden(attention: Attention, lowest: float | None, scores: Tensor) -> Tensor:
    return scores if lowest is None else scores.masked_fill(~attention.allowed, lowest)


def _softmax_rewrites(attention: Attention, masked: Callable[[Tensor], Tensor], axis: int) -> dict[int, Rewrite]:
    """Rewrite the softmax, and the calls that make the scores visible, relative to the largest along the axis."""

    def largest(scores: Tensor) -> Tensor:
        return masked(scores).amax(axis, keepdim=True)

    rewrites: dict[int, Rewrite] = {
        attention.softmax.number: replace_with(attention.masked, lambda scores: masked(scores).softmax(axis))
    }
    for user in attention.tape.users(attention.masked):
        if user.name == "amax":
            rewrites[user.number] = replace_with(attention.masked, largest)
        elif user.name in ("sub", "__sub__"):
            rewrites[user.number] = replace_with(attention.masked, lambda scores: masked(scores) - largest(scores))
    return rewrites


def _other_position_bias(rewrite: Callable[[Ref, Ref], Rewrite], *, own: bool) -> Alterations:
    """Return the alterations of each step between product and softmax that adds a learned bias.

    Args:
        rewrite: the scores before the step and the bias, [... q k] -> the rewrite of the step.
        own: of self-attention only.
    """

    def alterations(model_parts: ModelParts) -> Iterator[Alteration]:
        for attention in model_parts.attentions:
            previous = attention.product.result
            for step in attention.steps:
                biases = [ref for ref in step.reads if model_parts.tape.learned(ref) and ref != previous]
                if biases and previous in step.reads and (attention.own or not own):
                    yield alter(step, rewrite(previous, biases[0]), where=attention.where)
                previous = step.result

    return alterations


def _mirrored(previous: Ref, bias: Ref) -> Rewrite:
    return lambda values, call: run_with(values, call, bias, values[bias].mT)


def _heads_tiled(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each order of keys and values of groups of heads, in each self-attention with four axes."""
    tape = model_parts.tape
    for attention in _with_axes(model_parts):
        query, key, value = (tape[ref] for ref in (attention.query, attention.key, attention.value))
        if attention.own and len({one.shape[1] for one in (query, key, value)}) == 1:  # else the product shares keys
            for index, (detail, _) in enumerate(tiled((query, key.mT, value))):
                rewrites = with_heads(attention, partial(_variant, tiled, index))
                yield Alteration(where=attention.where, rewrites=rewrites, detail=detail)


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
    Cause(
        name="1/sqrt(d) missing",
        what="the scores are not divided by the root of the head size",
        looks="attention is too sharp; almost no difference on a new model, whose scores are near 0",
        fix="scores = q @ k.T / sqrt(head_size); scaled_dot_product_attention divides by default",
        alterations=_rescaled(lambda one: 1 / one.scale if one.scale != 1 else one.size**0.5),
        absorbed_by_weights=True,
    ),
    Cause(
        name="1/sqrt(d) twice",
        what=(
            "the scores are divided by sqrt(d) once more than the reference divides them: by hand and again by the "
            "kernel, or where the reference does not at all"
        ),
        looks="attention is too flat",
        fix="scale=1.0 for scaled_dot_product_attention, where the query is scaled already or nothing is",
        alterations=_rescaled(lambda attention: attention.size**-0.5),
        absorbed_by_weights=True,
    ),
    Cause(
        name="scaled by the model's width",
        what="the scores are divided by the root of hidden_size instead of the head size",
        looks="attention is too flat, by the root of the number of heads",
        fix="divide by sqrt(hidden_size / num_attention_heads)",
        alterations=_rescaled(lambda attention: _number_of_heads(attention) ** -0.5),
        absorbed_by_weights=True,
    ),
    Cause(
        name="attention scaled by another factor",
        what="the scores are multiplied by an unusual number",
        looks="attention is too flat or too sharp",
        fix="scores = q @ k.T / sqrt(head_size), unless the config says otherwise; scale= of the kernel",
        free_parameters=_solved_scale,
        absorbed_by_weights=True,
    ),
    Cause(
        name="query, key and value interleaved wrongly",
        what="the rows of the fused projection are read in a different order than they are stored",
        looks="every head mixes queries, keys and values",
        fix="give the order in the table: [(p h d) e] for query, key and value in turn, [(h p d) e] by heads",
        alterations=_split(interleaved),
        absorbed_by_weights=True,
    ),
    Cause(
        name="heads split wrongly",
        what="the projection's output is cut into heads along the wrong axes",
        looks="the projections agree, the scores do not; the shapes fit",
        fix="view(b, s, h, d).transpose(1, 2), not view(b, h, s, d)",
        alterations=_split(untransposed),
        absorbed_by_weights=True,
    ),
    Cause(
        name="heads reversed",
        what="the heads are in reverse order",
        looks="the projections agree; all shapes fit",
        fix="check what flips the axis of the heads",
        alterations=_heads_reversed,
        absorbed_by_weights=True,
    ),
    Cause(
        name="number of heads",
        what="attention has a different number of heads",
        looks="all shapes fit, because the weights do not depend on it",
        fix="take num_attention_heads from the config",
        alterations=_other_head_count,
    ),
    Cause(
        name="heads not transposed back",
        what="[b h s d] is reshaped to [b s e] without transposing heads and positions first",
        looks="the probabilities agree, the context does not",
        fix="context.transpose(1, 2).reshape(b, s, e)",
        alterations=_joined(lambda context: context.reshape(context.shape[0], context.shape[2], -1)),
        absorbed_by_weights=True,
    ),
    Cause(
        name="heads merged in the wrong order",
        what="the channels are joined as (d h) instead of (h d)",
        looks="the probabilities agree, the context is shuffled",
        fix="heads first, then the channels of each head: rearrange 'b h s d -> b s (h d)'",
        alterations=_joined(lambda context: context.permute(0, 2, 3, 1).flatten(2)),
        absorbed_by_weights=True,
    ),
    Cause(
        name="softmax over the queries",
        what="the softmax is taken over the queries instead of the keys",
        looks="the columns of the probabilities sum to 1, the rows do not",
        fix="softmax(dim=-1) of scores [b h q k]",
        alterations=_softmax_over(-2),
    ),
    Cause(
        name="softmax over the heads",
        what="the softmax is taken over the heads instead of the keys",
        looks="the probabilities sum to 1 over the heads",
        fix="softmax(dim=-1) of scores [b h q k]",
        alterations=_softmax_over(-3),
    ),
    Cause(
        name="relative position bias of the other sign",
        what="the learned bias for each distance is added at the distance of the other sign",
        looks="the difference is 0 for a token itself, and the scores of a query are reversed around it",
        fix="the distance is the key's position minus the query's, as in T5",
        alterations=_other_position_bias(_mirrored, own=True),
        absorbed_by_weights=True,
    ),
    Cause(
        name="relative position bias missing",
        what="the learned bias for each distance is not added to the scores",
        looks="the scores differ by the same amounts in every layer",
        fix="add it before the softmax, in every layer",
        alterations=_other_position_bias(lambda previous, bias: replace_with(previous), own=False),
        absorbed_by_weights=True,
    ),
    Cause(
        name="key and value heads tiled",
        what="the heads of keys or values are repeated as a whole instead of one by one, or vice versa",
        looks="the projections agree; the first and the last head agree, the others do not",
        fix="repeat_interleave(n, dim=heads), or expand [b g 1 s d] to [b g n s d]; not repeat, which tiles",
        alterations=_heads_tiled,
        absorbed_by_weights=True,
    ),
)
