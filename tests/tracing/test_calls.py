"""Arguments are bound in one place: whoever sees a call finds them, however they were passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.causes.fault_injection import cure, plant, watch
from porting.causes.model_parts import ModelParts
from porting.causes.mutants import PLANTS
from porting.causes.tape import Recorder
from porting.tracing.calls import argument, argument_names, changed, in_order

CALLS: dict[str, tuple[Callable[..., Any], str, dict[str, str], str, dict[str, str]]] = {
    "all by name": (F.linear, "", {"weight": "w", "bias": "b", "input": "x"}, "xwb", {}),
    "one is missing": (F.layer_norm, "x", {"normalized_shape": "s", "eps": "e"}, "xs", {"eps": "e"}),
    "by name alone": (F.scaled_dot_product_attention, "qk", {"value": "v", "scale": "s"}, "qkv", {"scale": "s"}),
    "a method": (Tensor.softmax, "x", {"dim": "d"}, "xd", {}),
    "a function written in Python": (F.dropout, "", {"input": "x", "p": "p"}, "xp", {}),
    "one that the table does not have": (
        torch.lerp,
        "x",
        {"weight": "w", "end": "y"},
        "x",
        {"weight": "w", "end": "y"},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_are_put_in_order(name: str) -> None:
    function, args, kwargs, positional, rest = CALLS[name]
    assert in_order(function, tuple(args), kwargs) == (tuple(positional), rest)


def test_an_argument_is_found_and_changed_wherever_it_stands() -> None:
    function = F.scaled_dot_product_attention
    for args, kwargs in ((("q", "k", "v", None, 0.5), {}), (("q", "k", "v"), {"dropout_p": 0.5})):
        assert argument(function, args, kwargs, "dropout_p", 0.0) == 0.5
        others = changed(function, args, kwargs, dropout_p=0.25)
        assert argument(function, *others, "dropout_p", 0.0) == 0.25
    assert argument(function, ("q", "k", "v"), {}, "dropout_p", 0.0) == 0.0


class Named(nn.Module):
    """All that it calls is given its arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(9, 8)
        self.maps = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.LayerNorm(8)
        nn.init.normal_(self.norm.bias)

    def mapped(self, number: int, x: Tensor) -> Tensor:
        layer = self.maps[number]
        assert isinstance(layer, nn.Linear)
        return F.linear(bias=layer.bias, weight=layer.weight, input=x)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = F.embedding(weight=self.words.weight, input=ids)
        normed = F.layer_norm(
            eps=self.norm.eps, bias=self.norm.bias, weight=self.norm.weight, normalized_shape=(8,), input=hidden
        )
        q, k, v = (self.mapped(number, normed).view(2, 5, 2, 4).transpose(1, 2) for number in range(3))
        shares = torch.softmax(dim=-1, input=torch.mul(other=0.5, input=torch.matmul(other=k.mT, input=q)))
        context = torch.matmul(other=v, input=F.dropout(training=False, input=shares))
        branch = self.mapped(3, F.gelu(input=context.transpose(1, 2).flatten(2)))
        return torch.add(other=branch, input=hidden)


IDS = torch.arange(10).view(2, 5) % 9


@torch.no_grad()
def test_mistakes_are_planted_where_arguments_are_passed_by_name() -> None:
    model = Named().double()
    expected = model(IDS)
    inventory = watch(model)
    assert torch.equal(model(IDS), expected)
    assert inventory.roles == ["query", "key", "value", "output"]
    cure(model)
    made = set()
    for fault in PLANTS:
        plant(model, fault, inventory)
        if not torch.equal(model(IDS), expected):
            made.add(fault.name)
        cure(model)
    assert made >= {
        "LayerNorm eps", "LayerNorm bias missing", "tanh GELU for another activation", "activation missing",
        "query bias missing", "value bias missing", "attention output bias missing", "1/sqrt(d) twice",
        "softmax over the queries", "heads merged in the wrong order", "residual missing", "branch missing",
        "dropout active", "vocabulary shifted", "square weight transposed",
    }  # fmt: skip


@torch.no_grad()
def test_the_search_for_a_cause_finds_parts_whose_arguments_are_passed_by_name() -> None:
    model = Named().double()
    with Recorder(model) as recorder:
        model(IDS)
    model_parts = ModelParts(recorder.tape, {"input_ids": IDS})
    assert (len(model_parts.linears), len(model_parts.norms), len(model_parts.embeddings)) == (4, 1, 1)
    assert [activation.name for activation in model_parts.activations] == ["exact GELU"]
    (known,) = model_parts.attentions
    assert known.scale == 0.5
    assert len(known.linears) == 3
    assert len(model_parts.residuals) == 1


def test_an_operator_that_python_wraps_around_c_has_no_names() -> None:
    assert argument_names(torch.Tensor.__pow__) == ()
