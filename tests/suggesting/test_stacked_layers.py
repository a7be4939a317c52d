"""Weights of several places in one parameter: of all layers, [layers ...], or a few vectors [n e]."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.suggesting import Verdict, suggest
from porting.suggesting.draft.layer_patterns import fill_slices, lines
from porting.suggesting.search.layouts import CandidateRule, single_rule, single_term
from porting.suggesting.subjects.traced_model import TracedModel, with_slices
from porting.target import named_tensors
from tests.suggesting.oracle import drafted, source


def drawn(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * 0.05)


class Stacked(nn.Module):
    """GPT-2 with a tensor for each kind of weight, whose first axis is that of the layers."""

    def __init__(self, n_embd: int, n_layer: int, n_head: int, vocab_size: int, n_positions: int) -> None:
        super().__init__()
        e, n = n_embd, n_layer
        self.heads = n_head
        self.words, self.places = drawn(vocab_size, e), drawn(n_positions, e)
        self.norms = nn.ParameterList(drawn(n, 2, e) for _ in range(2))
        self.attend, self.attend_shift = drawn(n, e, 3 * e), drawn(n, 3 * e)
        self.mix, self.mix_shift = drawn(n, e, e), drawn(n, e)
        self.up, self.up_shift = drawn(n, e, 4 * e), drawn(n, 4 * e)
        self.down, self.down_shift = drawn(n, 4 * e, e), drawn(n, e)
        self.last = nn.LayerNorm(e)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words[tokens] + self.places[: tokens.shape[1]]
        for i in range(len(self.mix)):
            y = F.layer_norm(x, x.shape[-1:], *self.norms[0][i])
            q, k, v = (
                one.view(*one.shape[:2], self.heads, -1).transpose(1, 2)
                for one in (y @ self.attend[i] + self.attend_shift[i]).chunk(3, -1)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + y @ self.mix[i] + self.mix_shift[i]
            y = F.layer_norm(x, x.shape[-1:], *self.norms[1][i]) @ self.up[i] + self.up_shift[i]
            x = x + F.gelu(y, approximate="tanh") @ self.down[i] + self.down_shift[i]
        out: Tensor = self.last(x) @ self.words.T
        return out


class Block(nn.Module):
    """A layer of DeiT with the gains of both norms in one parameter, and their shifts."""

    def __init__(self, e: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.gains, self.shifts = drawn(2, e), drawn(2, e)
        self.qkv, self.out = nn.Linear(e, 3 * e), nn.Linear(e, e)
        self.up, self.down = nn.Linear(e, inner), nn.Linear(inner, e)
        self.heads, self.eps = heads, eps

    def normed(self, x: Tensor, at: int) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.gains[at], self.shifts[at], self.eps)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.qkv(self.normed(x, 0)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.normed(x, 1))))
        return out


class Vectors(nn.Module):
    """DeiT with both of its tokens in one parameter."""

    def __init__(self, config: Any) -> None:  # it reads what it needs
        super().__init__()
        e, eps = config.hidden_size, config.layer_norm_eps
        self.patch = nn.Conv2d(3, e, config.patch_size, config.patch_size)
        self.tokens = drawn(2, e)
        self.places = drawn((config.image_size // config.patch_size) ** 2 + 2, e)
        count, inner = config.num_attention_heads, config.intermediate_size
        self.blocks = nn.Sequential(*(Block(e, count, inner, eps) for _ in range(config.num_hidden_layers)))
        self.last = nn.LayerNorm(e, eps)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch(images).flatten(2).mT
        x = torch.cat([self.tokens.expand(len(images), -1, -1), patches], 1) + self.places
        out: Tensor = self.last(self.blocks(x))
        return out


def gpt(folder: Path) -> Path:
    source("GPT2LMHeadModel", {"n_embd": 24, "n_layer": 3, "n_head": 3, "vocab_size": 61, "n_positions": 32}, folder)
    return folder


def deit(folder: Path) -> Path:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
    source("DeiTModel", {**sizes, "image_size": 12, "patch_size": 4}, folder)
    return folder


def test_the_draft_counts_layers_along_an_axis(tmp_path: Path) -> None:
    text = drafted(gpt(tmp_path), Stacked).text
    for line in (
        '"transformer.h.{i}.ln_1.{p:weight,bias} [e]" = "norms.0 [i p e]"',
        '"transformer.h.{i}.attn.c_attn.weight [o e]" = "attend [i o e]"',
        '"transformer.h.{i}.mlp.c_proj.bias [o]" = "down_shift [i o]"',
    ):
        assert line in text, text


def test_the_draft_has_vectors_along_an_axis(tmp_path: Path) -> None:
    text = drafted(deit(tmp_path), Vectors).text
    for line in (
        '"encoder.layer.{i}.layernorm_{p:before,after}.{w:weight,bias} [o]" = "blocks.{i}.{w:gains,shifts} [p o]"',
        '"embeddings.{p:cls,distillation}_token [1 1 e]" = "tokens [p e]"',
    ):
        assert line in text, text


@pytest.mark.slow
def test_stacked_layers_are_proven(tmp_path: Path) -> None:
    found = suggest(gpt(tmp_path), Stacked)
    assert found.verdict is Verdict.EXACT, str(found)


@pytest.mark.slow
def test_vectors_in_one_parameter_are_proven(tmp_path: Path) -> None:
    found = suggest(deit(tmp_path), Vectors)
    assert found.verdict is Verdict.TRUNK, str(found)
    assert found.missing == ("pooler",)


class Gated(nn.Module):
    """Two layers, each with a parameter [2 e e] of which it uses both matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.ParameterList(drawn(2, 6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for one in self.both:
            x = x + (x @ one[0]).sigmoid() * (x @ one[1])
        return x


class InTurn(Gated):
    """Two layers that use one matrix of each parameter [2 e e]."""

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            x = x + (x @ self.both[0][i]).sigmoid() * (x @ self.both[1][i])
        return x


@pytest.mark.parametrize(("kind", "sliced"), [(Gated, False), (InTurn, True)])
def test_layers_are_stacked_where_each_uses_its_own_slice(kind: type[nn.Module], *, sliced: bool) -> None:
    x, module = torch.randn(2, 5, 6, dtype=torch.float64), kind().double()
    leaves = dict(named_tensors(module))
    port = with_slices(TracedModel(module, leaves, frozenset(leaves), lambda one: one(x), [x]), {2})
    expected = {"both.0.0": ("both.0", 0), "both.1.0": ("both.0", 1)} if sliced else {}
    assert {name: one for name, one in port.stacked.items() if one[0] == "both.0"} == expected
    if sliced:
        port.leaves["both.1.0"].detach().zero_()
        assert not bool(leaves["both.0"][1].any())
        assert bool(leaves["both.0"][0].any())


def test_a_fused_matrix_of_all_layers_is_one_rule() -> None:
    moves = [
        CandidateRule(
            (single_term(f"l.{n}.q", "a e"), single_term(f"l.{n}.k", "b e")), (single_term(f"{n}.qk", "(a|b) e"),)
        )
        for n in range(2)
    ]
    stacked, shapes = {f"{n}.qk": ("qk", n) for n in range(2)}, {f"{n}.qk": (6, 4) for n in range(2)}
    (line,) = lines(moves, stacked, shapes)
    assert line.sources == (("l.{i}.q", "a e"), ("l.{i}.k", "b e"))
    assert line.targets == (("qk", "i (a|b) e"),)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (
            ["l.0.a", "l.0.b", "l.1.a", "l.1.b", "end"],
            (["l.{i}.{p:a,b} [o]", "end [o]"], "gains [(i p|1) o]"),
        ),
        (["begin", "l.0.a", "l.1.a"], (["begin [o]", "l.{i}.a [o]"], "gains [(1|i) o]")),
        (["l.0.a", "l.1.a"], (["l.{i}.a [o]"], "gains [i o]")),
        (["l.0.a", "l.1.a", "end"], (["l.{i}.a [o]", "end [o]"], "gains [(i|1) o]")),
        (["l.0.a", "l.0.b", "l.1.a", "l.1.b"], (["l.{i}.{p:a,b} [o]"], "gains [(i p) o]")),
        (["x", "y"], (["{p:x,y} [o]"], "gains [p o]")),
        (["l.0.a", "l.1.b", "l.1.a"], None),
    ],
)
def test_rows_of_layers_and_others_are_one_rule(rows: list[str], expected: tuple[list[str], str] | None) -> None:
    moves = [single_rule(name, f"{number}.gains") for number, name in enumerate(rows)]
    stacked = {f"{number}.gains": ("gains", number) for number in range(len(rows))}
    shapes = dict.fromkeys(stacked, (6,))
    found = lines(moves, stacked, shapes)
    assert fill_slices(moves, stacked, shapes) == (expected is not None)
    if expected is not None:
        (line,) = found
        assert [f"{name} [{axes}]" for name, axes in line.sources] == expected[0]
        assert [f"{name} [{axes}]" for name, axes in line.targets] == [expected[1]]
