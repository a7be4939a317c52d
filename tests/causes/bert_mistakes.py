"""Parts of a BERT as people write them who get one thing wrong: source code, with which a catalogue has to cope."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.models.bert import Bert, BertAttention, BertEmbeddings, BertLayer, ScaledDotProductAttention
from porting.models.bert_heads import BertForPreTraining, BertMaskedLMHead
from porting.models.unpadded import Rows
from tests.verification.planted import becomes

Plant = Callable[[BertForPreTraining], None]
LAYERS = range(3)


class Core(ScaledDotProductAttention):
    """Attention that its author wrote out."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None = None,
        *,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.cut(query), self.cut(key), self.cut(value)
        scores = self.scores(q, k)
        scores = scores if bias is None else scores + bias
        shares = self.shares(scores)
        return self.mixed(shares, v).transpose(1, 2).flatten(2), shares

    def cut(self, states: Tensor) -> Tensor:
        return self.split_heads(states)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) / math.sqrt(self.head_size)

    def shares(self, scores: Tensor) -> Tensor:
        return F.softmax(scores, dim=-1)

    def mixed(self, shares: Tensor, v: Tensor) -> Tensor:
        return shares @ v


class ByWidth(Core):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) / math.sqrt(24)  # hidden_size


class ByNumber(Core):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return 0.37 * (q @ k.transpose(-1, -2))


class ByRoot(Core):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) / math.sqrt(10)


class ViewedAtOnce(Core):
    def cut(self, states: Tensor) -> Tensor:
        return states.reshape(states.shape[0], -1, states.shape[1], self.head_size)


class InnermostHeads(Core):
    def cut(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:-1], self.head_size, -1).permute(0, 3, 1, 2)


class HalfScores(Core):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q.half() @ k.half().transpose(-1, -2)).to(q.dtype) / math.sqrt(self.head_size)


class BrainScores(Core):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q.bfloat16() @ k.bfloat16().transpose(-1, -2)).to(q.dtype) / math.sqrt(self.head_size)


class HalfSoftmax(Core):
    def shares(self, scores: Tensor) -> Tensor:
        return F.softmax(scores.half(), dim=-1).to(scores.dtype)


class BrainSoftmax(Core):
    def shares(self, scores: Tensor) -> Tensor:
        return F.softmax(scores.bfloat16(), dim=-1).to(scores.dtype)


class Near(Core):
    """It copies Longformer's window into a model that has none."""

    def shares(self, scores: Tensor) -> Tensor:
        places = torch.arange(scores.shape[-1])
        return F.softmax(scores.masked_fill((places[:, None] - places).abs() > 3, -torch.inf), dim=-1)


class HalfNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own signature
        made = F.layer_norm(input.half(), self.normalized_shape, self.weight.half(), self.bias.half(), self.eps)
        return made.to(input.dtype)


class AnnotatedNorm(nn.LayerNorm):
    """With torch's standard deviation, which is the sample's, and the eps added to it."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own signature
        deviation = input.std(-1, keepdim=True)
        return self.weight * (input - input.mean(-1, keepdim=True)) / (deviation + 1e-6) + self.bias


class KeyForValue(BertAttention):
    places = (0, 2, 1)

    def forward(
        self, hidden: Tensor, bias: Tensor | Rows | None = None, *, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        made = self.query(hidden), self.key(hidden), self.value(hidden)
        query, key, value = (made[place] for place in self.places)
        context, shares = self.core(query, key, value, bias, output_attentions=output_attentions)
        return self.output(context), shares


class QueryForValue(KeyForValue):
    places = (2, 1, 0)


class NormedBranch(BertLayer):
    def forward(
        self, hidden: Tensor, bias: Tensor | Rows | None = None, *, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        attended, shares = self.attention(hidden, bias, output_attentions=output_attentions)
        hidden = hidden + self.attention_norm(attended)
        return hidden + self.output_norm(self.output(self.activation(self.intermediate(hidden)))), shares


class Softer(BertLayer):
    """It scales what a branch adds, as some later models do."""

    def forward(
        self, hidden: Tensor, bias: Tensor | Rows | None = None, *, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        attended, shares = self.attention(hidden, bias, output_attentions=output_attentions)
        hidden = self.attention_norm(hidden + 0.22 * attended)
        expanded = self.activation(self.intermediate(hidden))
        return self.output_norm(hidden + 0.22 * self.output(expanded)), shares


class Embeddings(BertEmbeddings):
    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        hidden: Tensor = self.norm(self.words(input_ids) + self.token_type(self.kinds(types)) + self.placed(input_ids))
        return hidden

    def words(self, ids: Tensor) -> Tensor:
        found: Tensor = self.word(ids)
        return found

    def kinds(self, types: Tensor) -> Tensor:
        return types

    def places(self, ids: Tensor) -> Tensor:
        return torch.arange(ids.shape[1])[None]

    def placed(self, ids: Tensor) -> Tensor:
        found: Tensor = self.position(self.places(ids).clamp(max=self.position.num_embeddings - 1))
        return found


class OtherSegment(Embeddings):
    def kinds(self, types: Tensor) -> Tensor:
        return 1 - types


class Scaled(Embeddings):
    def words(self, ids: Tensor) -> Tensor:
        found: Tensor = self.word(ids) * 12.0
        return found


class AfterFive(Embeddings):
    def places(self, ids: Tensor) -> Tensor:
        return torch.arange(ids.shape[1])[None] + 5


class SkippingPadding(Embeddings):
    def places(self, ids: Tensor) -> Tensor:
        real = (ids != 0).long()
        return (real.cumsum(1) - 1).clamp(min=0) * real


class Untransformed(BertMaskedLMHead):
    def forward(self, hidden: Tensor, word_embeddings: Tensor) -> Tensor:
        return F.linear(hidden, word_embeddings, self.bias)


class Louder(BertMaskedLMHead):
    def forward(self, hidden: Tensor, word_embeddings: Tensor) -> Tensor:
        return super().forward(hidden, word_embeddings) * 24**-0.5


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Tensor) -> Tensor:
        return self.function(value)


class FromTheLast(Bert):
    """The loop goes over the layers from the last one on."""

    order: ClassVar[tuple[int, ...]] = (2, 1, 0)

    def encode(
        self, hidden: Tensor, bias: Tensor | Rows | None, *, output_hidden_states: bool, output_attentions: bool
    ) -> tuple[Tensor, tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
        for number in self.order:
            hidden, _ = self.layers[number](hidden, bias)
        return hidden, None, None


class OneTwice(FromTheLast):
    """The counter stays where it is."""

    order = (0, 1, 1)


def everywhere(path: str, kind: type[nn.Module]) -> Plant:
    """In every layer."""

    def plant(model: BertForPreTraining) -> None:
        for layer in LAYERS:
            becomes(f"bert.layers.{layer}.{path}".rstrip("."), kind)(model)

    return plant


def activates(function: Callable[[Tensor], Tensor]) -> Plant:
    def plant(model: BertForPreTraining) -> None:
        model.bert.layers[1].activation = Function(function)

    return plant


def eps(value: float) -> Plant:
    def plant(model: BertForPreTraining) -> None:
        for part in model.modules():
            if isinstance(part, nn.LayerNorm):
                part.eps = value

    return plant


@dataclass(frozen=True)
class Mistake:
    """Somebody's port.

    Attributes:
        plant: makes it of a faithful one.
        detail: what the report says beside the name.
    """

    plant: Plant
    detail: str = ""


CORE = "attention.core"

MISTAKES: Mapping[str, tuple[Mistake, ...]] = {
    "LayerNorm eps": (
        Mistake(eps(3e-6), "eps is 3e-06 where the reference has 1e-12"),
        Mistake(eps(0.0123), "eps is 0.0123 where the reference has 1e-12"),
        Mistake(eps(2.7182818e-7), "eps is 2.71828"),
        Mistake(eps(0.0), "eps is 0 where the reference has 1e-12"),
    ),
    "LayerNorm with Bessel's correction": (
        Mistake(everywhere("attention_norm", AnnotatedNorm), "eps is added to the standard deviation, and is 1e-06"),
    ),
    "scaled by the model's width": (Mistake(everywhere(CORE, ByWidth)),),
    "attention scaled by another factor": (
        Mistake(everywhere(CORE, ByNumber), "scores are multiplied by 0.37 where 1 / sqrt(8) is expected"),
        Mistake(everywhere(CORE, ByRoot), "scores are multiplied by 1 / sqrt(10) where 1 / sqrt(8) is expected"),
    ),
    "heads split wrongly": (
        Mistake(everywhere(CORE, ViewedAtOnce), "[b s (h d)] viewed as [b h s d] at once"),
        Mistake(everywhere(CORE, InnermostHeads), "(d h) where it is (h d)"),
    ),
    "key and value swapped": (Mistake(everywhere("attention", KeyForValue)),),
    "query and value swapped": (Mistake(everywhere("attention", QueryForValue)),),
    "local window that should not be there": (
        Mistake(everywhere(CORE, Near), "3 positions to each side are seen where the reference has no window"),
    ),
    "token types swapped": (Mistake(becomes("bert.embeddings", OtherSegment)),),
    "embeddings scaled by another factor": (
        Mistake(becomes("bert.embeddings", Scaled), "word embeddings are multiplied by 12 where the reference has 1"),
    ),
    "position offset": (Mistake(becomes("bert.embeddings", AfterFive), "off by +5"),),
    "positions counted around padding": (Mistake(becomes("bert.embeddings", SkippingPadding)),),
    "norm before the sum": (Mistake(everywhere("", NormedBranch)),),
    "branch scaled": (Mistake(everywhere("", Softer), "a branch is multiplied by 0.22 before it is added"),),
    "transform skipped": (Mistake(becomes("mlm", Untransformed)),),
    "logits scaled": (Mistake(becomes("mlm", Louder), "logits are multiplied by 1 / sqrt(24)"),),
    "layers in another order": (
        Mistake(becomes("bert", FromTheLast)),
        Mistake(becomes("bert", OneTwice)),
    ),
    "erf GELU without the root for another activation": (
        Mistake(
            activates(lambda x: 0.5 * x * (1 + torch.erf(x))),
            "erf GELU without the root where the reference has exact GELU",
        ),
    ),
    "squared ReLU for another activation": (
        Mistake(activates(lambda x: x.clamp_min(0) ** 2), "squared ReLU where the reference has exact GELU"),
    ),
    "ELU for another activation": (Mistake(activates(nn.ELU()), "ELU where the reference has exact GELU"),),
    "sigmoid GELU of another steepness": (
        Mistake(
            activates(lambda x: x * torch.sigmoid(1.7 * x)), "x * sigmoid(1.7 x) where the reference has exact GELU"
        ),
    ),
    "leaky ReLU for another activation": (
        Mistake(activates(nn.LeakyReLU(0.2)), "leaky ReLU of slope 0.2 where the reference has exact GELU"),
    ),
    "half-precision attention": (Mistake(everywhere(CORE, HalfScores), "in float16"),),
    "bfloat16 attention": (Mistake(everywhere(CORE, BrainScores), "in bfloat16"),),
    "half-precision softmax": (Mistake(everywhere(CORE, HalfSoftmax), "in float16"),),
    "bfloat16 softmax": (Mistake(everywhere(CORE, BrainSoftmax), "in bfloat16"),),
    "half-precision norm": (Mistake(everywhere("attention_norm", HalfNorm), "in float16"),),
}
