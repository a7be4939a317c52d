"""The bugs that are planted into a loaded BERT, each with the probes whose modules are then at fault.

A bug changes the code of a module and leaves its weights alone, so that nothing but what it computes can show it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.models.bert import Bert, BertAttention, BertEmbeddings, BertOutput, BertPooler, ScaledDotProductAttention
from porting.models.bert_heads import BertForPreTraining, BertMaskedLMHead
from porting.models.unpadded import Rows

LAYER = 1  # the layer that a bug is planted into
LAYERS = 3


class NoBias(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own signature
        return F.linear(input, self.weight)


class Transposed(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own signature
        return F.linear(input, self.weight.T, self.bias)


class Swapped(BertAttention):
    def forward(
        self, hidden: Tensor, bias: Tensor | Rows | None = None, *, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = self.query(hidden), self.key(hidden), self.value(hidden)
        context, probabilities = self.core(key, query, value, bias, output_attentions=output_attentions)
        return self.output(context), probabilities


class Unscaled(ScaledDotProductAttention):
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None = None,
        *,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.split_heads(query), self.split_heads(key), self.split_heads(value)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0).transpose(1, 2).flatten(2), None


class OneSegment(BertEmbeddings):
    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        return super().forward(input_ids, None, position_ids)


class OffByOne(BertEmbeddings):
    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        places = torch.arange(1, input_ids.shape[-1] + 1).clamp(max=self.position.num_embeddings - 1)
        return super().forward(input_ids, token_type_ids, places[None])


class Linear(BertPooler):
    def forward(self, hidden: Tensor) -> Tensor:
        pooled: Tensor = self.dense(hidden[:, 0])
        return pooled


class Untied(BertMaskedLMHead):
    def forward(self, hidden: Tensor, word_embeddings: Tensor) -> Tensor:
        own = torch.randn(word_embeddings.shape, generator=torch.Generator().manual_seed(1)).to(word_embeddings)
        return super().forward(hidden, own * word_embeddings.std())


class Masked(Bert):
    """A BERT that is given something else for its mask."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> BertOutput:
        assert attention_mask is not None
        hidden = self.embeddings(input_ids, token_type_ids, position_ids)
        bias = self.bias_of(attention_mask)[:, None, None, :].to(hidden.dtype)
        for layer in self.layers:
            hidden, _ = layer(hidden, bias)
        return BertOutput(hidden, None if self.pooler is None else self.pooler(hidden))

    def bias_of(self, mask: Tensor) -> Tensor:
        raise NotImplementedError


class Inverted(Masked):
    def bias_of(self, mask: Tensor) -> Tensor:
        return mask * -10000.0


class WrongPrecedence(Masked):
    def bias_of(self, mask: Tensor) -> Tensor:
        return 1.0 - mask * -10000.0


class FarFromZero(Masked):
    """The same with a constant so large that float64 shows it too; in the dtype of the model."""

    def bias_of(self, mask: Tensor) -> Tensor:
        return 1.0 - mask.double() * -1e7


def becomes(path: str, kind: type[nn.Module]) -> Callable[[BertForPreTraining], None]:
    """The module at ``path`` runs the code of ``kind`` and keeps all that it holds."""

    def plant(model: BertForPreTraining) -> None:
        model.get_submodule(path).__class__ = kind  # its weights and all else that it holds stay

    return plant


def epsilon(model: BertForPreTraining) -> None:
    norm = model.get_submodule(f"bert.layers.{LAYER}.attention_norm")
    assert isinstance(norm, nn.LayerNorm)
    norm.eps = 1e-5


def every_epsilon(model: BertForPreTraining) -> None:
    for part in model.modules():
        if isinstance(part, nn.LayerNorm):
            part.eps = 1e-5


def tanh_gelu(model: BertForPreTraining) -> None:
    model.bert.layers[LAYER].activation = nn.GELU(approximate="tanh")


@dataclass(frozen=True)
class Bug:
    """What is planted, and the points that are then guilty: these and no others."""

    name: str
    plant: Callable[[BertForPreTraining], None]
    guilty: tuple[str, ...]


HERE = f"bert.layers.{LAYER}"


def attention(*layers: int) -> tuple[str, ...]:
    """The scores alone: what is made of them is made of the reference's."""
    return tuple(f"bert.layers.{layer}.attention.core -> scores" for layer in layers)


BUGS = (
    Bug("query bias dropped", becomes(f"{HERE}.attention.query", NoBias), (f"{HERE}.attention.query",)),
    Bug("key bias dropped", becomes(f"{HERE}.attention.key", NoBias), (f"{HERE}.attention.key",)),
    Bug("value bias dropped", becomes(f"{HERE}.attention.value", NoBias), (f"{HERE}.attention.value",)),
    Bug("LayerNorm eps 1e-5", epsilon, (f"{HERE}.attention_norm",)),
    Bug(
        "LayerNorm eps 1e-5 everywhere",
        every_epsilon,
        (
            "bert.embeddings",
            *(f"bert.layers.{layer}{part}" for layer in range(LAYERS) for part in (".attention_norm", "")),
            "mlm",
        ),
    ),
    Bug("tanh GELU", tanh_gelu, (f"{HERE}.activation",)),
    Bug("q and k swapped", becomes(f"{HERE}.attention", Swapped), attention(LAYER)),
    Bug("token types ignored", becomes("bert.embeddings", OneSegment), ("bert.embeddings",)),
    Bug("positions off by one", becomes("bert.embeddings", OffByOne), ("bert.embeddings",)),
    Bug("mask inverted", becomes("bert", Inverted), attention(*range(LAYERS))),
    Bug("no tanh in the pooler", becomes("bert.pooler", Linear), ("bert.pooler",)),
    Bug("decoder untied", becomes("mlm", Untied), ("mlm",)),
    Bug("square weight transposed", becomes(f"{HERE}.attention.query", Transposed), (f"{HERE}.attention.query",)),
    Bug("output weight transposed", becomes(f"{HERE}.attention.output", Transposed), (f"{HERE}.attention.output",)),
    Bug("no 1/sqrt(d)", becomes(f"{HERE}.attention.core", Unscaled), attention(LAYER)),
)

FAR_FROM_ZERO = Bug("ten million added to every score", becomes("bert", FarFromZero), ())
ROUNDS_WORSE = Bug("mask precedence", becomes("bert", WrongPrecedence), ())
"""It means the same: 10,000 is added to every score of a row, which costs each four digits."""
