"""Linear layers that differ from the reference's: biases, orientation, and exchanged projections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from porting.causes.attention import Heads, with_heads
from porting.causes.cause import Cause, alter, map_result, replace_with
from porting.causes.functions import ACTIVATIONS, CASTING, SCALING, SUM
from porting.causes.linear import Linear
from porting.causes.model_parts import ModelParts
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.tape import Call, Ref

ROLES = ("query", "key", "value")


def role_of(linear: Linear, model_parts: ModelParts) -> str:
    """Return the role of a linear layer: query, key, value, fused, output (of attention), decoder, or other."""
    for attention in model_parts.attentions:
        if linear in attention.linears:
            return ROLES[attention.linears.index(linear)] if len(attention.linears) == len(ROLES) else "fused"
        if attention.merge is not None and linear is _reader(attention.merge, model_parts):
            return "output"
    table = model_parts.token_table
    if table is not None and model_parts.tape[linear.weight].shape[0] == model_parts.tape[table].shape[0]:
        return "decoder"
    return "other"


def _reader(merge: Call, model_parts: ModelParts) -> Linear | None:
    """Return the first linear layer after the heads were joined."""
    by_number = {linear.call.number: linear for linear in model_parts.linears}
    return next((by_number[number] for number in sorted(by_number) if number > merge.number), None)


def _missing_bias(role: str, name: str, looks: str) -> Cause:
    def alterations(model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each layer of the role with a bias; of a fused projection the role's third of the bias."""
        for linear in (linear for linear in model_parts.linears if linear.bias is not None):
            own = role_of(linear, model_parts)
            if own == role:
                yield alter(linear.call, without_bias(linear))
            elif own == "fused" and role in ROLES:
                yield alter(linear.call, without_bias(linear, ROLES.index(role)))
        for call, linear, _ in added_biases(model_parts):
            if role_of(linear, model_parts) == role:
                yield alter(call, replace_with(linear.call.result))

    return Cause(
        name=f"{name} bias missing",
        what=f"the {name} projection does not add its bias" if role in ROLES else f"the {name} does not add its bias",
        looks=looks,
        fix="bias=True, and load the bias: the checkpoint has one",
        alterations=alterations,
        absorbed_by_weights=True,
    )


def added_biases(model_parts: ModelParts) -> Iterator[tuple[Call, Linear, Ref]]:
    """Yield the sums that add a bias to the result of a layer without one, with the layer and the bias."""
    tape = model_parts.tape
    by_result = {linear.call.result: linear for linear in model_parts.linears if linear.bias is None}
    for call in model_parts.called(*SUM):
        linear = next((by_result[ref] for ref in call.reads if ref in by_result), None)
        bias = next((ref for ref in call.reads if tape.past(ref, CASTING)[-1] in tape.weights), None)
        if linear is not None and bias is not None:
            yield call, linear, bias


def without_bias(linear: Linear, third: int | None = None) -> Rewrite:
    """Return the rewrite of a layer without its bias, or without a third of it."""

    def rewrite(values: Values, call: Call) -> Tensor:
        bias = linear.offset(values)
        if third is None or bias is None:
            return linear.apply(values, linear.matrix(values), None)
        kept = torch.ones_like(bias)
        kept.view(len(ROLES), -1)[third] = 0
        return linear.apply(values, linear.matrix(values), bias * kept)

    return rewrite


def _bias_doubled(model_parts: ModelParts) -> Iterator[Alteration]:
    biases = [(linear.call, linear.bias) for linear in model_parts.linears if linear.bias is not None]
    for call, bias in (*biases, *((call, added) for call, _, added in added_biases(model_parts))):
        yield alter(call, map_result(partial(torch.add, model_parts.tape[bias])))


def _transposed(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each layer with a square weight, or a fused one of square blocks."""
    for linear in model_parts.linears:
        rows, columns = model_parts.tape[linear.weight].shape[:: -1 if linear.transposed else 1]
        if rows % columns == 0:
            yield alter(linear.call, transposed(linear, rows // columns))


def transposed(linear: Linear, blocks: int) -> Rewrite:
    """Return the rewrite of a layer with each square block of its weight transposed."""

    def rewrite(values: Values, call: Call) -> Tensor:
        weight = linear.matrix(values)
        blocked = weight.reshape(blocks, weight.shape[1], weight.shape[1]).mT.reshape(weight.shape)
        return linear.apply(values, blocked, linear.offset(values))

    return rewrite


def _swapped(first: int, second: int, looks: str) -> Cause:
    order = [0, 1, 2]
    order[first], order[second] = second, first

    def exchange(heads: Heads) -> Heads:
        query, key, value = (heads[index] for index in order)
        return query, key, value

    def alterations(model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each attention with the weights exchanged, and with the heads exchanged."""
        for attention in model_parts.attentions:
            if len(attention.linears) == len(ROLES):
                one, other = attention.linears[first], attention.linears[second]
                if one.input == other.input:
                    yield Alteration(where=attention.where, rewrites=exchanged(one, other))
            if attention.own:
                yield Alteration(where=attention.where, rewrites=with_heads(attention, exchange))

    first_role, second_role = ROLES[first], ROLES[second]
    return Cause(
        name=f"{first_role} and {second_role} swapped",
        what=f"the {first_role} is used as the {second_role}, and vice versa",
        looks=looks,
        fix=f"check {first_role} and {second_role} in the table, and the order of the fused projection's parts",
        alterations=alterations,
        absorbed_by_weights=True,
    )


def exchanged(first: Linear, second: Linear) -> dict[int, Rewrite]:
    """Return the rewrites of two layers, each of which computes with the weights of the other."""
    return {first.call.number: _with_weights_of(first, second), second.call.number: _with_weights_of(second, first)}


def _with_weights_of(layer: Linear, other: Linear) -> Rewrite:
    return lambda values, call: layer.apply(values, other.matrix(values), other.offset(values))


def _gate_swapped(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each tensor that is cut into halves, and each two layers with multiplied results."""
    for call in model_parts.called("chunk", "split", "tensor_split", "unbind"):
        if len(call.writes) == 2 and len({model_parts.tape[half].shape for half in call.writes}) == 1:
            yield alter(call, lambda values, call: tuple(reversed(values.run(call))))
    by_result = {linear.call.result: linear for linear in model_parts.linears}
    for site in model_parts.activations:
        first = by_result.get(site.input)
        if first is None:
            continue
        for product in model_parts.tape.users(site.call.result):
            second = next((by_result[ref] for ref in product.reads if ref in by_result), None)
            if second is not None and second.input == first.input:
                yield Alteration(where=first.call.module, rewrites=exchanged(first, second))
                # The layers may have their own weights, and the activation the other's result.
                if site.name and product.name in SCALING:
                    other = _gated_by(ACTIVATIONS[site.name], second.call.result, first.call.result)
                    yield alter(product, other, where=first.call.module)


def _gated_by(activation: Callable[[Tensor], Tensor], gate: Ref, value: Ref) -> Rewrite:
    return lambda values, call: activation(values[gate]) * values[value]


CAUSES: tuple[Cause, ...] = (
    _missing_bias("query", "query", "attention differs slightly; no difference on a new model, whose biases are 0"),
    _missing_bias("key", "key", "only the projection's own output differs, because key biases cancel in softmax"),
    _missing_bias("value", "value", "a constant is missing in each layer's attention output"),
    _missing_bias("output", "attention output", "a constant is missing after each attention"),
    _missing_bias("decoder", "decoder", "each token's logit is off by its own constant"),
    _missing_bias("other", "linear layer", "a constant is missing; no difference on a new model, whose biases are 0"),
    Cause(
        name="bias added twice",
        what="the bias of a linear layer is added by the layer and once more by the code",
        looks="off by the bias",
        fix="add it once",
        alterations=_bias_doubled,
        absorbed_by_weights=True,
    ),
    Cause(
        name="square weight transposed",
        what="a square weight is used transposed",
        looks="large differences without an error, because the shapes fit",
        fix="torch.nn.Linear stores [out in]; GPT-2's Conv1D and TensorFlow store [in out]",
        alterations=_transposed,
        absorbed_by_weights=True,
    ),
    _swapped(0, 1, "the scores are transposed"),
    _swapped(1, 2, "both scores and context are wrong"),
    _swapped(0, 2, "both scores and context are wrong"),
    Cause(
        name="gate and up swapped",
        what="the activation is applied to the wrong half of the projection",
        looks="the gated feed-forward network's output differs; its first projection agrees",
        fix="act(gate(x)) * up(x): check which of the two, or which half of a fused projection, is the gate",
        alterations=_gate_swapped,
        absorbed_by_weights=True,
    ),
)
