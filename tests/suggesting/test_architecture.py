"""What no weights can change is shown, also where the search finds a part of the table only."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from porting.suggesting import Verdict, suggest
from porting.suggesting.search.search_result import DifferingPlace, SearchResult
from porting.suggesting.subjects.operation_trace import OperationTrace, Unit, WeightUse
from porting.suggesting.subjects.traced_model import TracedModel
from porting.suggesting.verdict import part_differences
from porting.suggesting.verdict.architecture import Place, matrices, missing_tables, other_axes
from porting.target import named_tensors
from tests.suggesting import llama
from tests.suggesting.oracle import drafted, source
from tests.suggesting.rotated import GROUPED, Style, grouped
from tests.suggesting.test_llama_mistakes import edited
from tests.suggesting.test_operation_trace import traced

FORWARD = "x = x + self.attention(self.attention_norm(x), cos, sin, seen)"
BEHIND = "out: Tensor = x + self.feed_forward(self.ffn_norm(x))"
GATED = "out: Tensor = self.w2(F.silu(gate) * up)"
NORMS = "self.attention_norm, self.ffn_norm = Norm(dim, eps), Norm(dim, eps)"
FOUR = f"{NORMS}; self.norm3, self.norm4 = Norm(dim, eps), Norm(dim, eps)"
QUERIES = "query, key = self.rotate(query, cos, sin), self.rotate(key, cos, sin)"
WIDE = "self.wo = nn.Linear(dim, dim, bias=False)"
LAYERS = "for layer in self.layers:"
WORDS = "x = self.tok_embeddings(tokens)"
TABLES = "self.norm, self.output = Norm(dim, eps), nn.Linear(dim, vocabulary, bias=False)"

OTHERS: Mapping[str, tuple[Mapping[str, str], str]] = {
    "norms behind the sums": (
        {
            FORWARD: "x = self.attention_norm(x + self.attention(x, cos, sin, seen))",
            BEHIND: "out: Tensor = self.ffn_norm(x + self.feed_forward(x))",
        },
        "post-norm for pre-norm",
    ),
    "norms behind the branches": (
        {
            FORWARD: "x = x + self.attention_norm(self.attention(x, cos, sin, seen))",
            BEHIND: "out: Tensor = x + self.ffn_norm(self.feed_forward(x))",
        },
        "norm behind the branch (in all layers)",
    ),
    "more norms": (
        {
            NORMS: FOUR,
            FORWARD: "x = x + self.norm3(self.attention(self.attention_norm(x), cos, sin, seen))",
            BEHIND: "out: Tensor = x + self.norm4(self.feed_forward(self.ffn_norm(x)))",
        },
        "after 2 weight matrices and 1 to 3 norms, depending on the path",
    ),
    "norms of queries and keys": (
        {
            WIDE: f"{WIDE}; self.q_norm, self.k_norm = Norm(dim // heads, 1e-5), Norm(dim // heads, 1e-5)",
            QUERIES: f"query, key = self.q_norm(query), self.k_norm(key)\n        {QUERIES}",
        },
        "after 1 weight matrix and 1 to 2 norms, depending on the path",
    ),
    "parallel": (
        {
            FORWARD: "y = self.attention(self.attention_norm(x), cos, sin, seen)",
            BEHIND: "out: Tensor = x + y + self.feed_forward(self.ffn_norm(x))",
        },
        "branches side by side",
    ),
    "no gate": (
        {"self.w1, self.w3 = (nn.Linear(dim, inner, bias=False) for _ in range(2))": (
            "self.w1 = nn.Linear(dim, inner, bias=False)"
        ), "(self.w1(x), self.w3(x))": "(self.w1(x), self.w1(x))", GATED: "out: Tensor = self.w2(F.silu(gate))"},
        "your module has no model.layers.",
    ),
    "activation of the product": (
        {GATED: "out: Tensor = self.w2(F.silu(gate * up))"},
        "activation of a product (silu comes after mul in model.layers.{i}.mlp",
    ),
    "one layer for all": (
        {LAYERS: "for layer in [self.layers[0]] * len(self.layers):", "nn.ModuleList(blocks)": (
            "nn.ModuleList(blocks[:1] * len(blocks))"
        )},
        "is used again where the checkpoint's model uses model.layers.1.input_layernorm.weight",
    ),
    "positions in a table": (
        {
            TABLES: f"{TABLES}; self.places = nn.Embedding(length, dim)",
            WORDS: f"{WORDS} + self.places(torch.arange(length))",
            QUERIES: "pass",
        },
        "rotary missing",
    ),
    "a sum over the batch": (
        {FORWARD: "x = x + self.attention(self.attention_norm(x), cos, sin, seen); x = x + x.sum(0)"},
        "a row of the batch depends on the other rows",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("family", "normed"), [("Llama", ""), ("Qwen3", "head")])
def test_a_norm_of_another_kind_is_named(family: str, normed: str, tmp_path: Path) -> None:
    source(f"{family}ForCausalLM", {**GROUPED, "head_dim": 16}, tmp_path)
    found = suggest(tmp_path, grouped(Style(rotate="halves", norm="layer", normed=normed)))
    assert found.verdict is Verdict.IMPOSSIBLE, str(found)
    assert [reason.said.partition(",")[0] for reason in found.reasons] == ["LayerNorm for RMSNorm"], str(found)


def test_a_norm_of_another_kind_has_its_place(tmp_path: Path) -> None:
    source("LlamaForCausalLM", GROUPED, tmp_path)
    text = drafted(tmp_path, grouped(Style(rotate="halves", norm="layer"))).text
    assert '"model.layers.{i}.input_layernorm.weight" = "layers.{i}.norm1.weight"' in text
    assert '"layers.{i}.norm1.bias" = "zeros"' in text.partition("[make]")[2]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", OTHERS)
def test_another_architecture_is_impossible(name: str, tmp_path: Path) -> None:
    changes, said = OTHERS[name]
    source("LlamaForCausalLM", llama.FIELDS, tmp_path)
    found = suggest(tmp_path, edited(changes).builder())
    assert found.verdict is Verdict.IMPOSSIBLE, str(found)
    assert any(said in reason.said for reason in found.reasons if reason.shown), str(found)


@pytest.mark.slow
def test_a_sequential_module_is_not_a_parallel_model(tmp_path: Path) -> None:
    fields = {**llama.FIELDS, "num_key_value_heads": 6, "layer_norm_eps": 1e-5, "partial_rotary_factor": 1.0}
    source("PhiForCausalLM", fields, tmp_path)
    changes = {**OTHERS["no gate"][0], "bias=False": "bias=True", "F.silu": "F.gelu"}
    found = suggest(tmp_path, edited(changes).builder(bias=True))
    assert found.verdict is Verdict.IMPOSSIBLE, str(found)


NEUTRAL: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "a table of positions": (
        {
            TABLES: f"{TABLES}; self.places = nn.Embedding(length, dim)",
            WORDS: f"{WORDS} + self.places(torch.arange(length))",
        },
        {"places.weight": "zeros"},
    ),
    "a matrix behind the words": (
        {TABLES: f"{TABLES}; self.lift = nn.Linear(dim, dim)", WORDS: "x = self.lift(self.tok_embeddings(tokens))"},
        {"lift.weight": "eye", "lift.bias": "zeros"},
    ),
    "a matrix in the feed-forward part": (
        {
            "self.w2 = nn.Linear(inner, dim, bias=False)": (
                "self.w2, self.mid = nn.Linear(inner, dim, bias=False), nn.Linear(inner, inner, bias=False)"
            ),
            GATED: "out: Tensor = self.w2(self.mid(F.silu(gate) * up))",
        },
        {"layers.{i}.feed_forward.mid.weight": "eye"},
    ),
    "a matrix in front of attention's last": (
        {
            WIDE: f"{WIDE}; self.mid = nn.Linear(dim, dim, bias=False)",
            "self.wo((scores": "self.wo(self.mid((scores",
            ".flatten(2))\n": ".flatten(2)))\n",
        },
        {"layers.{i}.attention.mid.weight": "eye"},
    ),
    "a matrix behind the last norm": (
        {
            TABLES: f"{TABLES}; self.lift = nn.Linear(dim, dim, bias=False)",
            "self.output(self.norm(x))": "self.output(self.lift(self.norm(x)))",
        },
        {"lift.weight": "eye"},
    ),
}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", NEUTRAL)
def test_what_can_do_nothing_is_made_and_no_reason(name: str, tmp_path: Path) -> None:
    changes, made = NEUTRAL[name]
    source("LlamaForCausalLM", llama.FIELDS, tmp_path)
    found = suggest(tmp_path, edited(changes).builder())
    assert found.verdict is Verdict.EXACT, str(found)
    assert tomllib.loads(found.text)["make"] == made


@pytest.mark.slow
def test_one_layer_for_all_may_hold_layers_that_are_alike(tmp_path: Path) -> None:
    """No table can say so; but it is not impossible."""
    model = source("LlamaForCausalLM", llama.FIELDS, tmp_path)
    for layer in model.model.layers[1:]:
        layer.load_state_dict(model.model.layers[0].state_dict())
    model.save_pretrained(tmp_path)
    changes, said = OTHERS["one layer for all"]
    found = suggest(tmp_path, edited(changes).builder())
    assert found.verdict is Verdict.NOT_FOUND, str(found)
    assert any(said in reason.said for reason in found.reasons)


@pytest.mark.parametrize(("size", "guessed"), [(0.1, True), (0.01, False)])
def test_what_is_due_behind_a_place_that_fits_nothing_is_a_guess(size: float, *, guessed: bool) -> None:
    units = [
        Unit(kind=WeightUse.LINEAR, weights=(name,), number=number, output=torch.zeros(2, 3), scope="")
        for number, name in enumerate(["embed", "first", "embed"])
    ]
    places = [
        DifferingPlace(what="shared", port="embed", reference="second", at=2),
        DifferingPlace(what="activation", port="first", reference="first", size=size, at=1),
    ]
    found = SearchResult(trace=OperationTrace(units=units), divergences=places)
    assert part_differences._is_behind_a_guess(found, places[0]) == guessed
    assert not part_differences._is_behind_a_guess(found, replace(places[0], at=0))


class NormedQueries(nn.Module):
    """Queries whose features are normed in each of some heads, or all together."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.ask = heads, nn.Linear(12, 12, bias=False)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 12 // heads))

    def forward(self, x: Tensor) -> Tensor:
        queries = self.ask(x).unflatten(-1, (self.heads, -1))
        normed: Tensor = self.gain * queries * torch.rsqrt(queries.square().mean(-1, keepdim=True) + 1e-6)
        return normed.flatten(-2)


@pytest.mark.parametrize(
    ("heads", "same", "said"),
    [
        ((3, 1), True, " is a norm of 4 features, and the checkpoint's gain one of 12"),
        ((1, 3), True, " is a norm of 12 features, and the checkpoint's gain one of 4"),
        ((3, 1), False, ""),
        ((3, 3), True, ""),
    ],
)
def test_a_norm_of_each_head_is_none_of_all_heads(heads: tuple[int, int], said: str, *, same: bool) -> None:
    torch.manual_seed(0)
    sides = [NormedQueries(count) for count in heads]
    if same:
        sides[1].ask.load_state_dict(sides[0].ask.state_dict())
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    found = SearchResult(trace=traced(sides[0], x), reference=traced(sides[1], x))
    reason = other_axes(DifferingPlace(what="shape", port="gain", reference="gain"), found)
    assert (reason.said if reason else "").removeprefix("gain") == said
    assert reason is None or reason.shown


class Scores(nn.Module):
    """Attention with a table that is added to its scores, or without; it may have a tensor of zeros for one."""

    def __init__(self, *, table: bool, spare: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ask, self.match, self.tell = (nn.Linear(6, 6) for _ in range(3))
        self.table = nn.Parameter(torch.randn(5, 5)) if table else 0.0
        self.register_buffer("spare", torch.zeros(25) if spare else None)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.ask(x) @ self.match(x).mT + self.table
        found: Tensor = self.tell(scores.softmax(-1) @ x)
        return found


@pytest.mark.parametrize(("table", "spare", "count"), [(False, False, 1), (False, True, 0), (True, False, 0)])
def test_a_table_that_the_module_lacks_is_shown_unless_a_tensor_of_zeros_may_hold_it(
    count: int, *, table: bool, spare: bool
) -> None:
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    sides = [Scores(table=table, spare=spare).double(), Scores(table=True).double()]
    port, reference = (
        TracedModel(one, leaves := dict(named_tensors(one)), frozenset(leaves), lambda module: module(x), [x])
        for one in sides
    )
    found = SearchResult(trace=port.run(), reference=reference.run(), models=(port, reference))
    reasons = [*missing_tables(found)]
    assert [one.kind for one in reasons] == ["missing table"] * count
    assert all(one.shown and one.said.startswith("your module has no table: ") for one in reasons)


def test_a_table_beside_a_mask_is_no_way_from_the_input() -> None:
    """The biases of T5's distances reach the scores behind no norm, wherever they are looked up."""

    def unit(kind: WeightUse, name: str, number: int, *behind: int) -> Unit:
        rows = torch.ones(2, 3, 4)
        return Unit(
            kind=kind,
            weights=(name,),
            number=number,
            output=rows,
            operand=rows,
            scope="",
            behind=frozenset(behind),
            eps=1e-6,
        )

    units = [
        unit(WeightUse.LOOKUP, "words", 1),
        unit(WeightUse.OTHER, "distances", 2),
        unit(WeightUse.NORM, "norm", 3, 1),
        unit(WeightUse.LINEAR, "v", 4, 3),
        unit(WeightUse.LINEAR, "o", 5, 2, 4),
    ]
    names = [one.weights[0] for one in units]
    found = matrices(OperationTrace(units=units, roots=1), names, names, words=99)
    assert found.places["o"] == {Place(1, 1, 1)}
