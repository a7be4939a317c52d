"""Mixtures of experts: each on its tokens, or all on all; lists and stacks; gates apart and fused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.suggesting import Verdict, suggest
from porting.suggesting.search.expert_candidates import candidates, expert_tensors
from tests.suggesting.llama import Attention, Block, Llama
from tests.suggesting.oracle import drafted, source

MIXTRAL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}


class Expert(nn.Module):
    """A gated feed-forward part, with the gate and what it opens in one matrix."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.both, self.back = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        out: Tensor = self.back(F.silu(gate) * up)
        return out


class Chosen(nn.Module):
    """Each expert runs on the tokens that chose it."""

    def __init__(self, width: int, inner: int, count: int, most: int) -> None:
        super().__init__()
        self.most, self.router = most, nn.Linear(width, count, bias=False)
        self.pool = nn.ModuleList(Expert(width, inner) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, chosen = self.router(rows).softmax(-1).topk(self.most, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.pool):
            token, place = torch.where(chosen == number)
            if len(token):
                out[token] += expert(rows[token]) * weights[token, place, None]
        return out.view_as(x)


class Stacked(nn.Module):
    """Every expert runs on every token, before the router; all in one tensor, gate and up in halves of one axis."""

    def __init__(self, width: int, inner: int, count: int, most: int) -> None:
        super().__init__()
        self.most, self.router = most, nn.Parameter(torch.zeros(width, count))
        self.wi, self.wo = (
            nn.Parameter(torch.zeros(count, width, 2 * inner)),
            nn.Parameter(torch.zeros(count, inner, width)),
        )

    def weights(self, x: Tensor) -> Tensor:
        """The routing weights [... n]."""
        scores = (x @ self.router).softmax(-1)
        kept = torch.zeros_like(scores).scatter(-1, scores.topk(self.most, -1).indices, 1.0) * scores
        return kept / kept.sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.einsum("bsd,ndf->bnsf", x, self.wi).chunk(2, -1)
        each = torch.einsum("bnsf,nfd->bnsd", F.silu(gate) * up, self.wo)
        return torch.einsum("bsn,bnsd->bsd", self.weights(x), each)


class Unnormed(Stacked):
    """The weights of the experts that were chosen do not sum to 1."""

    def weights(self, x: Tensor) -> Tensor:
        """The routing weights [... n]."""
        scores = (x @ self.router).softmax(-1)
        return torch.zeros_like(scores).scatter(-1, scores.topk(self.most, -1).indices, 1.0) * scores


class Listed(Stacked):
    """A list of parameters for each matrix, each of which is [in out]."""

    def __init__(self, width: int, inner: int, count: int, most: int) -> None:
        super().__init__(width, inner, count, most)
        del self.wi, self.wo
        shapes = {"w1": (width, inner), "w2": (inner, width), "w3": (width, inner)}
        for name, shape in shapes.items():
            setattr(self, name, nn.ParameterList(nn.Parameter(torch.zeros(shape)) for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        out, weights = torch.zeros_like(x), self.weights(x)
        lists = (self.get_submodule(name).parameters() for name in ("w1", "w2", "w3"))
        for number, (first, second, third) in enumerate(zip(*lists, strict=True)):
            out = out + weights[..., number, None] * ((F.silu(x @ first) * (x @ third)) @ second)
        return out


def built(mixture: Callable[..., nn.Module]) -> Callable[[dict[str, int]], nn.Module]:
    """A builder of a decoder whose layers have these feed-forward parts."""

    def build(config: dict[str, int]) -> nn.Module:
        width, heads, groups = (config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
        sizes = [config[name] for name in ("intermediate_size", "num_local_experts", "num_experts_per_tok")]
        blocks = []
        for _ in range(config["num_hidden_layers"]):
            attention = Attention(width, heads, groups, lie="apart", rotate="halves", bias=False)
            blocks.append(Block(width, attention, mixture(width, *sizes), 1e-5))
        return Llama(blocks, config["vocab_size"], width, width // heads, 64, 1e-5, 1e4)

    return build


JOINED = 'source = ["{experts}w1.weight [a e]", "{experts}w3.weight [b e]"]\ntarget = '

LINES = {
    Chosen: [
        f'{JOINED}"layers.{{{{i}}}}.feed_forward.pool.{{{{j}}}}.both.weight [(a|b) e]"',
        '"{experts}w2.weight" = "layers.{{i}}.feed_forward.pool.{{j}}.back.weight"',
    ],
    Stacked: [
        f'{JOINED}"layers.{{{{i}}}}.feed_forward.wi [j e (a|b)]"',
        '"{experts}w2.weight [o e]" = "layers.{{i}}.feed_forward.wo [j e o]"',
    ],
    Listed: [
        f'"{{experts}}{name}.weight [o e]" = "layers.{{{{i}}}}.feed_forward.{name}.{{{{j}}}} [e o]"'
        for name in ("w1", "w2", "w3")
    ],
}


@pytest.mark.parametrize("mixture", LINES)
def test_the_experts_of_each_layer_are_in_the_draft(tmp_path: Path, mixture: type[nn.Module]) -> None:
    source("MixtralForCausalLM", MIXTRAL, tmp_path)
    text = drafted(tmp_path, built(mixture)).text
    for line in LINES[mixture]:
        assert line.format(experts="model.layers.{i}.block_sparse_moe.experts.{j}.") in text, text


@pytest.mark.slow
@pytest.mark.parametrize("mixture", [Chosen, Stacked, Listed])
def test_experts_are_proven(tmp_path: Path, mixture: type[nn.Module]) -> None:
    source("MixtralForCausalLM", MIXTRAL, tmp_path)
    found = suggest(tmp_path, built(mixture))
    assert found.verdict is Verdict.EXACT, str(found)


@pytest.mark.slow
def test_routing_weights_that_do_not_sum_to_one_are_impossible(tmp_path: Path) -> None:
    source("MixtralForCausalLM", MIXTRAL, tmp_path)
    found = suggest(tmp_path, built(Unnormed))
    assert found.verdict is Verdict.IMPOSSIBLE, str(found)
    assert "routing weights not normalised" in " ".join(found.details())


def test_stacked_experts_are_taken_apart_for_a_list() -> None:
    theirs = expert_tensors({"gate_up": (3, 4, 10), "down": (3, 5, 4), "down_bias": (3, 4)}, 3)
    each = {"gate": (5, 4), "up": (5, 4), "down": (4, 5)}
    ours = expert_tensors({f"e.{n}.{name}": shape for n in range(3) for name, shape in each.items()}, 3)
    rules = [[str(rule) for rule in way] for way in candidates(ours, theirs, 3)]
    assert ["gate_up [j e (a|b)] = e.{j}.gate [a e] + e.{j}.up [b e]", "down [j o e] = e.{j}.down [e o]"] in rules


@pytest.mark.parametrize("turned", [False, True])
def test_matrices_of_experts_are_turned_together_or_not_at_all(*, turned: bool) -> None:
    theirs = expert_tensors({f"e.{n}.{name}": (5, 4) for n in range(3) for name in ("gate", "up")}, 3)
    theirs += expert_tensors({f"e.{n}.down": (4, 5) for n in range(3)}, 3)
    shapes = {"a": (4, 5), "b": (4, 5), "c": (5, 4)} if turned else {"a": (5, 4), "b": (5, 4), "c": (4, 5)}
    ours = expert_tensors({f"x.{n}.{name}": shape for n in range(3) for name, shape in shapes.items()}, 3)
    first = next(candidates(ours, theirs, 3))
    assert {rule.writes[0]: rule.reads[0] for rule in first} == {
        "x.0.a": "e.0.gate",
        "x.0.b": "e.0.up",
        "x.0.c": "e.0.down",
    }
    assert all(bool(rule.sources[0].axes) == turned for rule in first)


def test_a_gate_and_a_projection_may_have_an_axis_of_their_own() -> None:
    each = {"gate": (5, 4), "up": (5, 4), "down": (4, 5)}
    theirs = expert_tensors({f"e.{n}.{name}": shape for n in range(3) for name, shape in each.items()}, 3)
    ours = expert_tensors({"enter": (3, 4, 2, 5), "leave": (3, 5, 4)}, 3)
    rules = [[str(rule) for rule in way] for way in candidates(ours, theirs, 3)]
    assert ["e.{j}.{p:gate,up} [o e] = enter [j e p o]", "e.{j}.down [o e] = leave [j e o]"] in rules
