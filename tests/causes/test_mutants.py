"""A mistake that is planted into a port is made there, and by nothing else; and the proof names it."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.causes.events import InjectedFault, Inventory
from porting.causes.fault_injection import cure, plant, watch
from porting.causes.mutants import PLANTS, planted
from porting.loading import load
from porting.verification import verify
from scripts.causes_score import MISSED, NONE, TIE, UNIQUE, score
from tests.families.pairs import PAIRS
from tests.small_checkpoint import write_checkpoint
from tests.verification.conftest import one_thread

pytestmark = pytest.mark.few(1)

__all__ = ["one_thread"]  # a fixture that is used by all


def small() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1)
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return layer.double().eval()


def given(shape: tuple[int, ...] = (5, 3, 8)) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_watching_changes_nothing_and_learns_the_roles() -> None:
    """Also of torch's own attention, which is taken apart for it; with a mask, too."""
    model, hidden = small(), given()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
    expected = model(hidden, src_key_padding_mask=padding)
    inventory = watch(model)
    torch.testing.assert_close(model(hidden, src_key_padding_mask=padding), expected, rtol=0, atol=1e-14)
    assert inventory.roles == ["query", "key", "value", "output", "", ""]


class Grouped(nn.Module):
    """Four heads of queries, two of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.output = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (
            projection(hidden).unflatten(-1, (-1, 2)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        found: Tensor = self.output(context.transpose(1, 2).flatten(2))
        return found


@torch.no_grad()
def test_heads_that_share_keys_are_watched_like_others() -> None:
    torch.manual_seed(0)
    model, hidden = Grouped().double().eval(), given((3, 5, 8))
    expected = model(hidden)
    inventory = watch(model)
    torch.testing.assert_close(model(hidden), expected, rtol=0, atol=1e-14)
    assert inventory.roles == ["query", "key", "value", "output"]


@torch.no_grad()
def test_a_mistake_is_made_in_copies_too_and_can_be_taken_out() -> None:
    model, hidden = small(), given()
    expected = model(hidden)
    kind = type(model)
    sites = plant(model, next(planted("LayerNorm gain missing")), Inventory())
    with torch.no_grad():
        model.norm1.weight.mul_(2)  # type: ignore[union-attr, operator]  # a layer norm
        expected = copy.deepcopy(model)(hidden)
    assert set(sites) == {"norm1", "norm2"}
    torch.testing.assert_close(model(hidden), expected)
    cure(model)
    assert type(model) is kind
    assert not torch.allclose(model(hidden), expected)


@torch.no_grad()
def test_a_mistake_can_be_made_at_one_place_alone() -> None:
    model = small()
    everywhere = next(planted("square weight transposed"))
    fault = InjectedFault(name=everywhere.name, actions=everywhere.actions, only=frozenset({2}))
    sites = plant(model, fault, Inventory())
    model(given())
    assert sites == ["self_attn"]


@torch.no_grad()
def test_what_is_added_to_the_embeddings_by_a_branch_is_a_residual_sum() -> None:
    """Also in a model whose stream begins with the embeddings themselves, without a norm between."""

    class PreNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places, self.branch = nn.Embedding(9, 8), nn.Embedding(5, 8), nn.Linear(8, 8)

        def forward(self, ids: Tensor) -> Tensor:
            hidden = self.words(ids) + self.places(torch.arange(5))
            for _ in range(2):
                hidden = hidden + F.gelu(self.branch(hidden))
            result: Tensor = hidden
            return result

    model = PreNorm()
    sites = plant(model, next(planted("residual missing")), Inventory())
    model(torch.arange(10).reshape(2, 5) % 9)
    assert sites == ["", ""]


def test_every_mistake_is_another_one() -> None:
    assert len({plant.name for plant in PLANTS}) == len(PLANTS) >= 50


BERT = (
    "norm gain with 1 added", "ReLU for another activation", "value bias missing", "square weight transposed",
    "1/sqrt(d) twice", "softmax over the queries", "padding mask inverted", "token types ignored", "residual doubled",
    "pooled from the wrong place", "dropout active",
)  # fmt: skip
"""One of each kind of event; make causes plants all mistakes, everywhere."""


@pytest.mark.slow
@pytest.mark.sampled(1)  # the first of them has a mistake of each kind
@pytest.mark.parametrize(
    ("table", "names"),
    [
        ("bert", BERT),
        (
            "openai_gpt",
            ["causal mask missing", "padding mask ignored", "key bias missing", "LayerNorm over the wrong axis"],
        ),
        ("mpnet", ["relative position bias missing"]),
        ("modern_bert", ["padding word zeroed", "padding mask after the softmax"]),
        ("albert", ["pooler tanh missing"]),
        (
            "bert_into_torch_encoder",
            ["query bias missing", "softmax over the heads"],
        ),
    ],
)
def test_what_is_planted_is_named(table: str, names: Sequence[str]) -> None:
    pair = next(pair for pair in PAIRS if pair.table == table)
    scored = score(pair, names, alone=False)
    found = scored.everywhere
    assert found.keys() <= set(names)
    assert len(found) > len(names) / 2
    assert {name: result for name, result in found.items() if result.outcome not in (UNIQUE, TIE, NONE)} == {}
    assert all(result.placed and result.strict for result in found.values())
    assert not any(result.outcome == MISSED for result in found.values())
    if table == "openai_gpt":
        assert found["key bias missing"].outcome == NONE  # no probe sees it there, and no softmax


@pytest.mark.slow
def test_a_mistake_in_one_layer_accuses_no_other() -> None:
    pair = next(pair for pair in PAIRS if pair.table == "marian")
    (found,) = score(pair, ["softmax over the queries"]).alone.values()
    assert (found.outcome, found.placed, found.strict) == (UNIQUE, True, True)
    assert re.fullmatch(r"(en|de)coder\.layers\.\d", found.where)


@pytest.mark.slow
def test_one_layer_of_three_is_placed(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "bert")
    model = load(path)
    everywhere = next(planted("LayerNorm eps"))
    plant(model, InjectedFault(name="", actions=everywhere.actions, only=frozenset({3})), Inventory())
    report = verify(path, model, loaded=True)
    assert [probe.port for probe in report.guilty] == ["bert.layers.1.attention_norm"]
    assert [cause.name for cause in report.causes] == ["LayerNorm eps"]
