"""Linear maps that are not the reference's: biases, orientation, and which one is taken for which."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from porting.causes.attention import Attention
from porting.causes.cause import Cause, alter, map_result, replace_with
from porting.causes.functions import CASTING, SUM
from porting.causes.linear import Linear
from porting.causes.model_parts import ModelParts
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.tape import Call, Ref

ROLES = ("query", "key", "value")


def role_of(linear: Linear, model_parts: ModelParts) -> str:
    """What a linear map is to the model: query, key, value, fused, output (of attention), decoder, or other."""
    for attention in model_parts.attentions:
        if linear in attention.linears:
            return ROLES[attention.linears.index(linear)] if len(attention.linears) == len(ROLES) else "fused"
        if attention.merge is not None and linear is _reader(attention.merge, model_parts):
            return "output"
    word = model_parts.words
    if word is not None and model_parts.tape[linear.weight].shape[0] == model_parts.tape[word].shape[0]:
        return "decoder"
    return "other"


def _reader(merge: Call, model_parts: ModelParts) -> Linear | None:
    """The first linear map after the heads were merged."""
    known = {linear.call.number: linear for linear in model_parts.linears}
    return next((known[number] for number in sorted(known) if number > merge.number), None)


@dataclass(frozen=True, kw_only=True)
class BiasMissing(Cause):
    """No bias, in the maps of one role."""

    role: str

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each map that has one; of a fused map the role's third."""
        for linear in model_parts.linears:
            if linear.bias is None:
                continue
            role = role_of(linear, model_parts)
            if role == self.role:
                yield alter(linear.call, without(linear))
            elif role == "fused" and self.role in ROLES:
                yield alter(linear.call, without(linear, ROLES.index(self.role)))
        for call, linear, _ in added_biases(model_parts):
            if role_of(linear, model_parts) == self.role:
                yield alter(call, replace_with(linear.call.result))


def added_biases(model_parts: ModelParts) -> Iterator[tuple[Call, Linear, Ref]]:
    """The sums that add a bias to what a linear map without one has given, with the map and the bias."""
    made = {linear.call.result: linear for linear in model_parts.linears if linear.bias is None}
    for call in model_parts.called(*SUM):
        linear = next((made[ref] for ref in call.reads if ref in made), None)
        bias = next((ref for ref in call.reads if _stored(model_parts, ref)), None)
        if linear is not None and bias is not None:
            yield call, linear, bias


def _stored(model_parts: ModelParts, ref: Ref) -> bool:
    """Whether a tensor is a weight, or one that was cast."""
    while (call := model_parts.tape.maker(ref)) is not None and call.name in CASTING:
        ref = call.reads[0]
    return ref in model_parts.tape.weights


def without(linear: Linear, third: int | None = None) -> Rewrite:
    """The map without its bias, or without a third of it."""

    def rewrite(values: Values, call: Call) -> Tensor:
        bias = linear.offset(values)
        if third is None or bias is None:
            return linear.apply(values, linear.matrix(values), None)
        kept = torch.ones_like(bias)
        kept.view(len(ROLES), -1)[third] = 0
        return linear.apply(values, linear.matrix(values), bias * kept)

    return rewrite


class BiasDoubled(Cause):
    """The bias twice."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each map that has one."""
        for linear in model_parts.linears:
            bias = linear.bias
            if bias is not None:
                yield alter(linear.call, map_result(partial(torch.add, model_parts.tape[bias])))
        for call, _, added in added_biases(model_parts):
            yield alter(call, map_result(partial(torch.add, model_parts.tape[added])))


class Transposed(Cause):
    """The weight the other way round."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each square one, and each square third of a fused one."""
        for linear in model_parts.linears:
            rows, columns = model_parts.tape[linear.weight].shape[:: -1 if linear.transposed else 1]
            if rows % columns == 0:
                yield alter(linear.call, turned(linear, rows // columns))


def turned(linear: Linear, blocks: int) -> Rewrite:
    """The map with each square block of its weight transposed."""

    def rewrite(values: Values, call: Call) -> Tensor:
        weight = linear.matrix(values)
        blocked = weight.reshape(blocks, weight.shape[1], weight.shape[1]).mT.reshape(weight.shape)
        return linear.apply(values, blocked, linear.offset(values))

    return rewrite


@dataclass(frozen=True, kw_only=True)
class Swapped(Cause):
    """Two of query, key and value in each other's place."""

    first: int
    second: int

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """In the weights, and after the projections."""
        for attention in model_parts.attentions:
            if len(attention.linears) == len(ROLES):
                first, two = attention.linears[self.first], attention.linears[self.second]
                if first.input == two.input:
                    rewrites = {first.call.number: like(first, two), two.call.number: like(two, first)}
                    yield Alteration(where=attention.where, rewrites=rewrites)
            if attention.own:
                yield Alteration(where=attention.where, rewrites=self._later(attention))

    def _later(self, attention: Attention) -> dict[int, Rewrite]:
        """Swapped when the heads are split already."""
        order = [0, 1, 2]
        order[self.first], order[self.second] = order[self.second], order[self.first]

        def found(values: Values) -> list[Tensor]:
            heads = [values[attention.query], values[attention.key].mT, values[attention.value]]
            return [heads[place] for place in order]

        def product(values: Values, call: Call) -> Tensor:
            query, key, _ = found(values)
            return query @ key.mT

        def context(values: Values, call: Call) -> Tensor:
            return values[call.reads[0]] @ found(values)[2]

        return {attention.product.number: product, attention.context.number: context}


def like(first: Linear, two: Linear) -> Rewrite:
    """The first map's input through the second's weights."""
    return lambda values, call: first.apply(values, two.matrix(values), two.offset(values))


class GateSwapped(Cause):
    """The two halves of a gated feed-forward network in each other's place."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Where one tensor is cut into two halves, and where two maps of one input are multiplied."""
        for call in model_parts.called("chunk", "split", "tensor_split", "unbind"):
            if (
                len(call.writes) == 2
                and model_parts.tape[call.writes[0]].shape == model_parts.tape[call.writes[1]].shape
            ):
                yield alter(call, lambda values, call: tuple(reversed(values.run(call))))
        known = {linear.call.result: linear for linear in model_parts.linears}
        for site in model_parts.activations:
            first = known.get(site.input)
            if first is None:
                continue
            for product in model_parts.tape.users(site.call.result):
                second = next((known[ref] for ref in product.reads if ref in known), None)
                if second is not None and second.input == first.input:
                    rewrites = {first.call.number: like(first, second), second.call.number: like(second, first)}
                    yield Alteration(where=first.call.module, rewrites=rewrites)


def _bias(role: str, name: str, looks: str) -> BiasMissing:
    return BiasMissing(
        name=f"{name} bias missing",
        what=f"the {name} projection does not add its bias" if role in ROLES else f"the {name} does not add its bias",
        looks=looks,
        fix="bias=True, and load the bias: the checkpoint has one",
        role=role,
        absorbed_by_weights=True,
    )


def _swap(first: int, second: int, looks: str) -> Swapped:
    first_role, two = ROLES[first], ROLES[second]
    return Swapped(
        name=f"{first_role} and {two} swapped",
        what=f"what should be the {first_role} is used as the {two}, and the other way round",
        looks=looks,
        fix=f"check the table's lines for {first_role} and {two}, and the order of the fused projection's parts",
        first=first,
        second=second,
        absorbed_by_weights=True,
    )


CAUSES: tuple[Cause, ...] = (
    _bias("query", "query", "attention is a little different; nothing on a fresh model, whose biases are 0"),
    _bias("key", "key", "nothing but the projection's own output: softmax does not see a key bias"),
    _bias("value", "value", "a constant is missing in each layer's attention output"),
    _bias("output", "attention output", "a constant is missing after each attention"),
    _bias("decoder", "decoder", "each word's logit is off by a constant of its own"),
    _bias("other", "linear layer", "a constant is missing; nothing on a fresh model, whose biases are 0"),
    BiasDoubled(
        name="bias added twice",
        what="a linear layer's bias is added by the layer and again by hand",
        looks="off by the bias",
        fix="add it once",
        absorbed_by_weights=True,
    ),
    Transposed(
        name="square weight transposed",
        what="a square weight is used the other way round",
        looks="large differences; the shapes fit, so nothing complains",
        fix="torch.nn.Linear keeps [out in]; Conv1D of GPT-2 and matrices of TensorFlow keep [in out]",
        absorbed_by_weights=True,
    ),
    _swap(0, 1, "each row of scores is what a column should be"),
    _swap(1, 2, "both scores and context are wrong"),
    _swap(0, 2, "both scores and context are wrong"),
    GateSwapped(
        name="gate and up swapped",
        what="the activation is applied to the half that should be multiplied by it",
        looks="the gated feed-forward network's output differs; its first projection agrees",
        fix="check which half of the fused projection the activation belongs to",
        absorbed_by_weights=True,
    ),
)
