"""Mistakes that no entry of the catalogue was written for: repairing the port's steps tells what they are."""

# ruff: noqa: E501  # the lines of other files, as they stand there

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.causes.diverging import Kind as DivergenceKind
from porting.causes.diverging import Region, TensorIndex, divergence
from porting.causes.repairs import RepairSearch, _Replacement
from porting.causes.replay import Values
from porting.causes.step_differences import Kind, StepComparison, _index_text, same_but_rounded
from porting.causes.tape import Recorder, Tape
from porting.tracing.measure import Anchor
from porting.verification import cause_search
from porting.verification.cause_case import CauseCase
from tests.causes.wrong_ports import Wrong, verified
from tests.verification.conftest import one_thread

__all__ = ["one_thread"]  # a fixture that is used by all

LAYER = "x = x + self.attn(self.ln_1(x), mask)\n        return x + self.mlp(self.ln_2(x))"
CROSS = "x = self.encoder_attn_layer_norm(x + self.encoder_attn(x, memory, allowed))"
OWN = "x = self.self_attn_layer_norm(x + self.self_attn(x, x, own))"

MISTAKES = {
    "sigmoid for tanh": Wrong(
        "bert",
        {"torch.tanh(self.dense(x[:, 0]))": "torch.sigmoid(self.dense(x[:, 0]))"},
        ("another function",),
        "sigmoid, where bert.pooler.activation of the reference has tanh",
    ),
    "cosine for the activation": Wrong(
        "bert",
        {"return F.gelu(self.dense(x))\n\n\nclass Attention": "return torch.cos(self.dense(x))\n\n\nclass Attention"},
        ("another function",),
        "cos, where bert.encoder.layer.{i}.intermediate",
    ),
    "residual from the layer's input": Wrong(
        "bert",
        {"self.output(self.intermediate(attended), attended)": "self.output(self.intermediate(attended), x)"},
        ("wrong tensor",),
        "where the reference's reads the output of layer_norm in bert.encoder.layer.{i}.attention.output.LayerNorm",
    ),
    "values of the keys' projection": Wrong(
        "bert",
        {"split(self.value(x))": "split(self.key(x))"},
        ("wrong tensor",),
        "where the reference's reads the output of linear in bert.encoder.layer.{i}.attention.self.value",
    ),
    "shares cubed": Wrong(
        "bert",
        {"shares = scores.softmax(dim=-1)": "shares = scores.softmax(dim=-1).pow(3)"},
        ("a step too many",),
        "pow by 3, which the reference does not do",
    ),
    "norm's other eps in one place": Wrong(
        "bert",
        {
            "return self.LayerNorm(self.dense(x) + around)": "return F.layer_norm(self.dense(x) + around, (HIDDEN,), self.LayerNorm.weight, self.LayerNorm.bias, 3e-3)"
        },
        ("another number",),
        "eps is 0.003 where the reference has 0.001",
    ),
    "last two heads exchanged": Wrong(
        "bert",
        {"context = shares @ v": "context = (shares @ v)[:, [0, 1, 3, 2]]"},
        ("another order",),
        "(in the order 0 1 2 3 4 5 6 7 8 9 10 11 18 19 20 21 ... along an axis of 24)",
    ),
    "logits of the layers' norm": Wrong(
        "bert",
        {
            "return self.predictions(x), self.seq_relationship(pooled)": "return self.predictions(F.layer_norm(x, (HIDDEN,))), self.seq_relationship(pooled)"
        },
        ("a step too many",),
        "layer_norm, which the reference does not do",
    ),
    "scores times the mask": Wrong(
        "gpt2",
        {"scores = scores.masked_fill(~allowed, -1e30)": "scores = scores * allowed"},
        ("another function",),
        "mul, where transformer.h.{i}.attn of the reference has",
    ),
    "mask rolled by a token": Wrong(
        "bert",
        {"mask[:, None, None, :] == 0": "mask.roll(1, -1)[:, None, None, :] == 0"},
        ("other mask",),
        "that the reference hides",
    ),
    "one padding token is seen": Wrong(
        "bert",
        {
            "mask[:, None, None, :] == 0": "torch.cat((torch.ones_like(mask[:, :1]), mask[:, :-1]), 1)[:, None, None, :] == 0"
        },
        ("other mask",),
        "shows",
    ),
    "a token before the last is hidden": Wrong(
        "gpt2",
        {
            "scores = scores.masked_fill(~allowed, -1e30)": "scores = scores.masked_fill(~allowed | torch.ones_like(allowed).tril(-1).triu(-1), -1e30)"
        },
        ("other mask",),
        "that the reference shows",
    ),
    "feed-forward network of the attention's norm": Wrong(
        "gpt2",
        {LAYER: "y = self.ln_1(x)\n        x = x + self.attn(y, mask)\n        return x + self.mlp(y)"},
        ("wrong tensor",),
        "reads the output of layer_norm in transformer.h.{i}.ln_1, where the reference's reads the output of layer_norm in transformer.h.{i}.ln_2",
    ),
    "parallel branches": Wrong(
        "gpt2",
        {LAYER: "return x + self.attn(self.ln_1(x), mask) + self.mlp(self.ln_2(x))"},
        ("step left out",),
        "add in transformer.h.{i} of the reference is left out",
    ),
    "cube for the fourth power": Wrong(
        "gpt2", {"torch.pow(x, 3.0)": "torch.pow(x, 4.0)"}, ("another number",), "is 4 where the reference has 3"
    ),
    "context halved": Wrong(
        "gpt2",
        {"y = scores.softmax(-1) @ v": "y = scores.softmax(-1) @ v * 0.5"},
        ("a step too many",),
        "mul by 0.5, which the reference does not do",
    ),
    "queries and keys of one split": Wrong(
        "gpt2",
        {"k = k.view(b, s, HEADS, -1).transpose(1, 2)": "k = q"},
        ("wrong tensor",),
        "matmul in transformer.h.{i}.attn reads part 0 of the output",
    ),
    "channels of a head dealt out": Wrong(
        "gpt2",
        {"y = y.transpose(1, 2).contiguous().view(b, s, HIDDEN)": "y = y.permute(0, 2, 3, 1).reshape(b, s, HIDDEN)"},
        ("another order",),
        "in another order",
    ),
    "groups of queries interleaved": Wrong(
        "llama",
        {
            "context = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)": "q = q.unflatten(1, (SHARED, -1)).transpose(1, 2).flatten(1, 2)\n        context = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)"
        },
        ("another order",),
        "(in the order 0 4 1 5 2 6 3 7 along an axis of 8)",
    ),
    "sum for the product": Wrong(
        "llama",
        {"F.silu(self.gate_proj(x)) * self.up_proj(x)": "F.silu(self.gate_proj(x)) + self.up_proj(x)"},
        ("another function",),
        "add, where model.layers.{i}.mlp of the reference has mul",
    ),
    "second norm for both": Wrong(
        "llama",
        {"self.self_attn(self.input_layernorm(x), mask)": "self.self_attn(self.post_attention_layernorm(x), mask)"},
        ("wrong tensor",),
        "reads model.layers.{i}.post_attention_layernorm.weight, where the reference's reads model.layers.{i}.input_layernorm.weight",
    ),
    "variance of the absolute": Wrong(
        "llama",
        {"variance = x.pow(2).mean(-1, keepdim=True)": "variance = x.abs().mean(-1, keepdim=True)"},
        ("another function",),
        "abs, where model.layers.{i}.input_layernorm of the reference has pow",
    ),
    "cross attention first": Wrong(
        "marian",
        {OWN + "\n        " + CROSS: CROSS + "\n        " + OWN},
        ("parts in another order",),
        "model.decoder.layers.{i}.encoder_attn runs before model.decoder.layers.{i}.self_attn",
    ),
    "memory for the stream": Wrong(
        "marian",
        {"self.encoder_attn(x, memory, allowed))": "self.encoder_attn(x, x[:, :1] + memory, allowed))"},
        ("wrong tensor",),
        "where the reference's reads the output of layer_norm in model.encoder.layers.{i}.final_layer_norm",
    ),
    "positions subtracted": Wrong(
        "marian",
        {"x = x + self.positions[:length]": "x = x - self.positions[:length]"},
        ("another function",),
        "sub, where model.decoder of the reference has add",
    ),
    "segments added behind the norm": Wrong(
        "bert",
        {
            "x = x + self.token_type_embeddings(types)\n        return self.LayerNorm(x)": (
                "return self.LayerNorm(x) + self.token_type_embeddings(types)"
            )
        },
        ("step in another place",),
        "add in bert.embeddings of the reference is left out there, and done here",
    ),
    "layers reversed": Wrong(
        "gpt2",
        {"for block in self.h:": "for block in reversed(self.h):"},
        ("parts in another order",),
        "transformer.h.1 runs before transformer.h.0",
    ),
    "queries of the next layer": Wrong(
        "llama",
        {
            "for layer in self.layers:": "self.layers[0].self_attn.q_proj = self.layers[1].self_attn.q_proj\n        for layer in self.layers:"
        },
        ("wrong tensor",),
        "reads model.layers.1.self_attn.q_proj.weight, where the reference's reads model.layers.0.self_attn.q_proj.weight",
    ),
    "positions of the patches only": Wrong(
        "vit",
        {
            "return x + self.position_embeddings": "return torch.cat((x[:, :1], x[:, 1:] + self.position_embeddings[:, 1:]), 1)"
        },
        ("another function",),
        "at 0 of an axis of 17 only",
    ),
    "the middle patch is seen": Wrong(
        "vit",
        {"self.vit(pixel_values)[:, 0]": "self.vit(pixel_values)[:, 8]"},
        ("another order",),
        "reads another part of the output of layer_norm in vit.layernorm",
    ),
    "positions from the next row of the table": Wrong(
        "gpt2",
        {"self.wpe(torch.arange(ids.shape[1])[None])": "self.wpe.weight.roll(-1, 0)[: ids.shape[1]]"},
        ("wrong tensor",),
        "add in transformer reads",
    ),
    "patches in columns": Wrong(
        "vit",
        {".flatten(2).transpose(1, 2)": ".transpose(2, 3).flatten(2).transpose(1, 2)"},
        ("another order",),
        "(in the order 0 1 5 9 13 2 6 10 14",
    ),
    "positions that repeat at the start": Wrong(
        "llama",
        {"torch.arange(length).float()": "(torch.arange(length) - 1).clamp(min=0).float()"},
        ("other constants",),
        "takes other numbers than the reference's (in the order 0 0 1 2 3",
    ),
}


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_that_the_catalogue_does_not_have(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty catalogue, and with no probe but what the model returns."""
    monkeypatch.setattr(cause_search, "CATALOGUE", ())
    wrong = replace(MISTAKES[name], probes=r"\.", inner=False)
    (found,) = verified(wrong, trials=False).causes
    assert found.name == wrong.names[0]
    assert wrong.detail in found.detail
    assert f"ports/{wrong.family}.py:" in found.detail
    assert found.residual <= 1e-10 < found.difference


def test_two_mistakes_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cause_search, "CATALOGUE", ())
    changes = {**MISTAKES["sigmoid for tanh"].changes, **MISTAKES["shares cubed"].changes}
    (found,) = verified(Wrong("bert", changes, probes=r"\.", inner=False), trials=False).causes
    assert "sigmoid" in found.detail
    assert "pow" in found.detail


@pytest.mark.slow
def test_a_port_that_is_another_model_has_no_repairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps at more lines than a mistake has; what is unknown stays unknown."""
    monkeypatch.setattr(cause_search, "CATALOGUE", ())
    changes = {
        "q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))": (
            "q, k, v = split(self.query(x).sin()), split(self.key(x).cos()), split(self.value(x).tanh())"
        ),
        "x = words + self.position_embeddings(places)": "x = words.exp() * self.position_embeddings(places)",
        "return self.LayerNorm(self.dense(x) + around)": "return self.LayerNorm(self.dense(x).sin() + around.cos())",
        "return self.LayerNorm(F.gelu(self.dense(x)))": "return self.LayerNorm(self.dense(x).cos())",
        "return torch.tanh(self.dense(x[:, 0]))": "return torch.sin(self.dense(x[:, 0]))",
    }
    found = verified(Wrong("bert", changes, probes=r"\.", inner=False), trials=False).causes
    assert not any(finding.name for finding in found)


class Multiplied(nn.Module):
    """An activation and a product: with another part of the input, or with a gain that the weights give."""

    def __init__(self, *, gate: bool, port: bool) -> None:
        super().__init__()
        self.first, self.second, self.out = (nn.Linear(6, 6) for _ in range(3))
        self.gain = nn.Parameter(torch.linspace(-0.5, 0.5, 6))
        self.gate, self.port = gate, port

    def forward(self, x: Tensor) -> Tensor:
        by = self.second(x) if self.gate else 1 + self.gain
        y = F.silu(self.first(x) * by) if self.port else F.silu(self.first(x)) * by
        found: Tensor = self.out(y)
        return found


def kinds_of(reference: nn.Module, port: nn.Module, x: Tensor) -> set[Kind]:
    """The kinds of the repairs that turn one module into the other, with the same weights."""
    for module in (reference, port):
        module.double()
    port.load_state_dict(reference.state_dict())
    tapes = []
    for module in (reference, port):
        with Recorder(module, lines=True) as recorder:
            recorder.mark("out", module(x))
        tapes.append(recorder.tape)
    theirs, ours = tapes
    end, goal = ours.marks["out"], theirs.marks["out"]

    def left(values: Values) -> float:
        return float((values[end] - theirs[goal]).abs().max())

    found = RepairSearch(ours, theirs, {end: [goal]}, left, bound=1e-12, until=math.inf).find()
    assert found
    return {one.kind for way in found for one in way.repairs}


@pytest.mark.parametrize(("gate", "kind"), [(True, Kind.GATED), (False, Kind.EXCHANGED)])
@torch.no_grad()
def test_weights_can_make_up_for_a_gain_and_not_for_a_gate(gate: bool, kind: Kind) -> None:
    reference, port = (Multiplied(gate=gate, port=one) for one in (False, True))
    kinds = kinds_of(reference, port, torch.randn(3, 5, 6, dtype=torch.float64))
    assert kinds & {Kind.GATED, Kind.EXCHANGED} == {kind}


class Scores(nn.Module):
    """Attention whose scores something is added to, or nothing."""

    def __init__(self, added: Tensor | None = None) -> None:
        super().__init__()
        self.query, self.key, self.added = nn.Linear(6, 6), nn.Linear(6, 6), added

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        scores = scores if self.added is None else scores + self.added
        found: Tensor = scores.softmax(-1) @ x
        return found


@pytest.mark.parametrize(
    ("added", "kind"),
    [
        (-100.0 * torch.ones(5, 5, dtype=torch.float64).triu(1), Kind.MASK),
        (torch.arange(25.0, dtype=torch.float64).view(5, 5), Kind.LEFT_OUT),
    ],
)
@torch.no_grad()
def test_a_mask_that_is_not_added_is_told_from_another_step(added: Tensor, kind: Kind) -> None:
    kinds = kinds_of(Scores(added), Scores(), torch.randn(3, 5, 6, dtype=torch.float64))
    assert kinds & {Kind.MASK, Kind.LEFT_OUT} == {kind}


def test_a_repair_without_which_nothing_fits_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands behind a step of another shape cannot be run without it: no traceback ends a report."""
    with Recorder(nn.Identity()) as recorder:
        recorder.mark("out", torch.ones(2).sin().cos())
    tape = recorder.tape
    search = RepairSearch(tape, tape, {}, lambda values: 0.0, bound=0.0, until=math.inf)
    first, last = (_Replacement(step, torch.ones(2), None) for step in tape.calls[-2:])

    def refuse(search: RepairSearch, replacements: object) -> Values:
        raise RuntimeError("the size of tensor a must match the size of tensor b")

    monkeypatch.setattr(RepairSearch, "_with_all", refuse)
    monkeypatch.setattr(tape, "before", lambda result: [])
    assert search._needed([first], last) == [first, last]
    assert search._without_chance([first, last]) == [first, last]


def test_tables_of_other_lengths_are_compared_where_both_have_rows() -> None:
    table = torch.randn(9, 4, dtype=torch.float64)
    longer = torch.cat([table.float().double(), torch.randn(3, 4, dtype=torch.float64)])
    assert same_but_rounded(table, longer)
    assert same_but_rounded(longer, table[None])
    assert not same_but_rounded(table + 1e-3, longer)


def test_parts_of_one_tensor_are_told_apart_by_their_shapes() -> None:
    """The mean of all hidden states, where the reference has that of those behind the class token."""
    inner = nn.Linear(6, 8)
    with Recorder(inner) as recorder:
        hidden = inner(torch.randn(3, 7, 6))
        recorder.mark("all", hidden)
        recorder.mark("some", hidden[:, 1:])
    tape = recorder.tape
    index = TensorIndex(tape)
    region = Region(tape, tape, index, {}, Values(tape))
    comparison = StepComparison(tape, tape, index, index, Values(tape), region)
    one, other = comparison._described_apart(tape.marks["all"], tape.marks["some"])
    assert (one, other) == (f"{one.partition(',')[0]}, [3, 7, 8]", f"{one.partition(',')[0]}, [3, 6, 8]")


@torch.no_grad()
def recorded(module: nn.Module, x: Tensor, finish: Callable[[Tensor], Tensor]) -> Tape:
    """What a module and a last step do, with the result marked as ``out``."""
    with Recorder(module, lines=True) as recorder:
        recorder.mark("out", finish(module(x)))
    return recorder.tape


def test_the_same_numbers_at_the_same_places_are_in_no_other_order() -> None:
    inner, x = nn.Linear(6, 6).double(), torch.randn(4, 6, dtype=torch.float64)
    port = recorded(inner, x, lambda value: value * (1 + 1e-13))
    for finish, moved in ((torch.Tensor.clone, False), (lambda value: value.flip(0), True)):
        reference = recorded(inner, x, finish)
        found = divergence(port, reference, "out", port.marks["out"], [reference.marks["out"]])
        assert (found is not None and found.kind == DivergenceKind.ORDER) == moved


def test_a_step_with_another_word_is_no_other_order() -> None:
    inner, x = nn.Linear(6, 6).double(), torch.randn(4, 6, dtype=torch.float64)
    port, reference = recorded(inner, x, partial(F.gelu, approximate="tanh")), recorded(inner, x, F.gelu)
    end, goal = port.marks["out"], reference.marks["out"]

    def left(values: Values) -> float:
        return float((values[end] - reference[goal]).abs().max())

    found = RepairSearch(port, reference, {end: [goal]}, left, bound=1e-12, until=math.inf).find()
    assert found
    (repair,) = found[0].repairs
    assert repair.kind is Kind.FUNCTION
    assert "approximate='tanh', where the reference has its defaults" in repair.detail


def test_a_value_of_another_shape_is_as_far_from_the_reference_as_can_be() -> None:
    """Where all rows are put in the place of one, a step behind them gives another shape."""
    anchors = {"out": Anchor.of(torch.ones(2, 3))}
    case: Any = SimpleNamespace(
        _values={}, anchors=anchors, exact={}, pairing=SimpleNamespace(pairs={"out": SimpleNamespace(whole=True)})
    )
    assert CauseCase._distance(case, "out", {}, {"out": torch.ones(5, 2, 3)}).largest == math.inf
    assert CauseCase._distance(case, "out", {}, {"out": torch.ones(2, 3)}).largest == 0.0


@pytest.mark.parametrize("rows", [(), (3,)])
def test_indices_of_distances_are_told_apart_for_each_row_of_a_batch(rows: tuple[int, ...]) -> None:
    distances = (torch.arange(5)[None] - torch.arange(5)[:, None]).expand(*rows, 5, 5)
    earlier = distances.clamp(max=0)
    assert "both directions, as in an encoder" not in _index_text(distances, distances + 1)
    assert "earlier keys only, as in a decoder" in _index_text(earlier, distances)
