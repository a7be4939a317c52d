"""A table has as few letters and sizes as it can be read with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import porting
from porting import models
from porting.checkpoint import open_checkpoint
from porting.notation.table import parse_table
from porting.suggesting import Verdict, suggest
from porting.suggesting.draft.index_letters import needed
from porting.suggesting.draft.layer_patterns import Line, indexed, lines
from porting.suggesting.draft.table_draft import _for_deeper
from porting.suggesting.draft.table_writer import TableDraft, write
from porting.suggesting.pipeline import _depths
from porting.suggesting.search.layouts import CandidateRule, RuleTerm, single_rule
from tests.suggesting.llama import FIELDS, builder, halves
from tests.suggesting.oracle import drafted, source

TEXTS = {"h": "heads", "g": "groups", "s": "2", "y": "2", "r": "width // 2", "z": "width // 2"}


def test_what_a_shape_says_is_not_said_again() -> None:
    alone = Line((("q", "(h s r) e"),), (("wq", "(h r s) e"),))
    fused = Line((("q", "(h s r|g y z|f) e"),), (("wq", "(h r s|g z y|f) e"),))
    assert needed(TEXTS, [alone]) == {"h": "heads", "s": "2"}
    assert needed(TEXTS, [fused]) == TEXTS, "one number for three unknown ones"
    joined = Line((("q", "(h s r) e"), ("k", "(g y z) e"), ("v", "f e")), (("wqkv", "(h r s|g z y|f) e"),))
    assert needed(TEXTS, [joined]) == TEXTS, (
        "the module alone, as its digest reads it, has one number for three as well"
    )


@pytest.mark.slow
def test_a_table_with_rotary_pairs_states_what_nothing_else_says(tmp_path: Path) -> None:
    source("LlamaForCausalLM", FIELDS, tmp_path)
    build = builder(rotate="neighbours")
    found = suggest(tmp_path, build)
    assert found.verdict is Verdict.EXACT, str(found)
    assert set(found.table.sizes) == {"s", "h", "g"}, found.text
    path = found.write(tmp_path / "mine.toml")
    loaded = porting.load(tmp_path, into=build, table=path)
    assert not any(one.is_meta for one in loaded.state_dict().values())


@pytest.mark.parametrize("between", [".", "/", ",", " ", ": {i} -> ", "[", "{0x2f}"])
def test_a_line_stands_for_names_with_any_character(between: str) -> None:
    kinds = {"weight": "g", "bias": "b"}
    moves = [
        single_rule(f"h.{layer}.{kind}", f"bag.{layer}{between}n{between}{short}")
        for layer in range(2)
        for kind, short in kinds.items()
    ]
    found = parse_table(write(TableDraft(name="a", description="", lines=lines(moves))))
    for one in moves:
        (rule,) = [rule for rule in found.rules if rule.sources[0].name.read(one.reads[0]) is not None]
        read = rule.sources[0].name.read(one.reads[0])
        assert rule.targets[0].name.spell(read or {}) == one.writes[0]


def move(theirs: str, ours: str, axes: str = "") -> CandidateRule:
    return CandidateRule((RuleTerm(theirs, (theirs,), axes),), (RuleTerm(ours, (ours,), axes and "e o"),))


def test_an_index_is_spelled_out_where_another_layer_goes_another_way() -> None:
    moves = [move(f"h.{layer}.out.weight", f"blocks.{layer}.o.weight") for layer in range(2)]
    found = lines([*moves, move("h.2.out.weight", "blocks.2.o.weight", "o e")])
    assert [line.sources[0][0] for line in found] == ["h.{i:0,1}.out.weight", "h.2.out.weight"]
    assert found[0].targets[0][0] == "blocks.{i:0,1}.o.weight"
    (alone,) = lines(moves)
    assert alone.sources[0][0] == "h.{i}.out.weight"
    assert parse_table(f'[tensors]\n"{found[0].sources[0][0]}" = "{found[0].targets[0][0]}"\n').rules


def test_an_index_stands_once_in_a_name() -> None:
    moves = [(f"stages.{n}.blocks.{n}.norm", f"s.{n}.b.{n}.n") for n in range(3)]
    assert indexed(moves) == moves
    assert indexed([(f"stages.{n}.blocks.0.norm", f"s.{n}.b.0.n") for n in range(3)]) == [
        ("stages.{i}.blocks.0.norm", "s.{i}.b.0.n")
    ]


def test_an_index_that_is_computed_with_is_a_line_for_each_layer_where_it_would_match_another_line() -> None:
    pairs = [("a.0.b.0.n", "x.0.n"), ("a.1.b.0.n", "x.2.n"), ("a.2.b.0.n", "other.n")]
    moves = [move(*pair) for pair in pairs]
    assert sorted((line.sources[0][0], line.targets[0][0]) for line in lines(moves)) == sorted(pairs)
    assert [line.sources[0][0] for line in lines(moves[:2])] == ["a.{i}.b.0.n"]


def test_blocks_in_stages_have_an_index_of_their_own_however_many_a_stage_has() -> None:
    moves = [
        move(f"stages.{stage}.layers.{block}.fc.weight", f"layer{stage + 1}.{block}.fc.weight")
        for stage, blocks in enumerate((2, 1, 3))
        for block in range(blocks)
    ]
    (line,) = lines(moves)
    assert line.sources[0][0] == "stages.{i}.layers.{j}.fc.weight"
    assert line.targets[0][0] == "layer{i+1}.{j}.fc.weight"
    assert parse_table(f'[tensors]\n"{line.sources[0][0]}" = "{line.targets[0][0]}"\n').rules


def test_norms_that_a_number_tells_apart_have_no_index_of_their_own() -> None:
    moves = [move(f"h.{layer}.ln_{n}.weight", f"b.{layer}.norms.{n}.weight") for layer in range(3) for n in (1, 2)]
    assert [line.sources[0][0] for line in lines(moves)] == ["h.{i}.ln_1.weight", "h.{i}.ln_2.weight"]


class FirstIsOther(nn.Module):
    """ModernBERT: the first layer has no norm of its input, and each third one sees all tokens."""

    def __init__(self, config: Any) -> None:  # it reads what it needs
        super().__init__()
        width, self.config = config.hidden_size, config
        self.words, self.first = nn.Embedding(config.vocab_size, width), self.norm()
        self.layers = nn.ModuleList(self.layer(number) for number in range(config.num_hidden_layers))
        self.last = self.norm()

    def norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(self.config.hidden_size, self.config.norm_eps, bias=False)

    def layer(self, number: int) -> nn.ModuleDict:
        width, inner = self.config.hidden_size, self.config.intermediate_size
        parts = {"n1": self.norm() if number else nn.Identity(), "n2": self.norm()}
        sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 2 * inner), "down": (inner, width)}
        return nn.ModuleDict(parts | {name: nn.Linear(*size, bias=False) for name, size in sizes.items()})

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        x, places = self.first(self.words(ids)), torch.arange(ids.shape[1])
        near = (places[:, None] - places).abs() <= self.config.local_attention // 2
        layers: list[Any] = [*self.layers]  # torch does not type what a list of modules holds
        for number, layer in enumerate(layers):
            q, k, v = layer["qkv"](layer["n1"](x)).unflatten(-1, (3, self.config.num_attention_heads, -1)).unbind(2)
            local = number % self.config.global_attn_every_n_layers != 0
            angles = places[:, None] * (1e4 if local else 1.6e5) ** -torch.arange(0, 1, 2 / q.shape[-1])
            q, k = (halves(one, angles.cos()[:, None], angles.sin()[:, None]) for one in (q, k))
            seen = keep[:, None, None].bool() & (near if local else torch.ones_like(near))
            q, k, v = (one.transpose(1, 2) for one in (q, k, v))
            heads = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            x = x + layer["out"](heads.transpose(1, 2).flatten(2))
            one, gate = layer["up"](layer["n2"](x)).chunk(2, -1)
            x = x + layer["down"](F.gelu(one) * gate)
        found: Tensor = self.last(x)
        return found


@pytest.mark.slow
def test_a_deeper_twin_tells_what_only_later_layers_have(tmp_path: Path) -> None:
    fields = {
        "vocab_size": 113, "hidden_size": 48, "num_hidden_layers": 7, "num_attention_heads": 6, "intermediate_size": 40,
        "max_position_embeddings": 64, "local_attention": 8, "global_attn_every_n_layers": 3, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
    }  # fmt: skip
    source("ModernBertModel", fields, tmp_path)
    found = suggest(tmp_path, FirstIsOther, limit=600)
    assert found.verdict is Verdict.EXACT, str(found)
    assert '"layers.{i+1}.attn_norm.weight" = "layers.{i+1}.n1.weight"' in found.text


def test_the_depths_of_the_twins_are_the_usual_one_a_deeper_one_and_the_checkpoints(tmp_path: Path) -> None:
    for layers, depths in ((2, [0]), (3, [0, 3]), (12, [0, 4, 12])):
        source("LlamaForCausalLM", FIELDS | {"num_hidden_layers": layers}, tmp_path / str(layers))
        assert [*_depths(open_checkpoint(tmp_path / str(layers)), "LlamaForCausalLM")] == depths


def test_a_line_of_the_second_layer_is_one_of_those_behind_it_where_these_are_unread() -> None:
    line = Line((("layers.1.norm.{w:weight,bias}", ""),), (("h.1.n.{w:weight,bias}", ""),))
    unread = {f"layers.{number}.norm.{name}" for number in (2, 3) for name in ("weight", "bias")}
    assert _for_deeper(line, unread).sources == (("layers.{i+1}.norm.{w:weight,bias}", ""),)
    assert _for_deeper(line, unread).targets == (("h.{i+1}.n.{w:weight,bias}", ""),)
    assert _for_deeper(line, set()) == line
    assert _for_deeper(line, unread - {"layers.2.norm.bias"}, {"layers.2.norm.bias"}) == line
    other = replace(line, targets=(("first.n.{w:weight,bias}", ""),))
    assert _for_deeper(other, unread) == other


MODERN = {
    "vocab_size": 60, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def test_a_norm_that_the_first_layer_lacks_is_filled_in_all_others(tmp_path: Path) -> None:
    """The small model has two layers, so that it shows the second layer's norm alone."""
    source("ModernBertModel", MODERN, tmp_path)
    found = drafted(tmp_path, models.ModernBert)
    assert '"layers.{i+1}.attn_norm.weight" = "layers.{i+1}.attention_norm.weight"' in found.text
    assert "no counterpart was found" not in found.text


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        pytest.param(
            [(f"b.{i}.se.{j}.w", f"f.{i + 13}.fc.{j}.w") for i in (0, 1) for j in (0, 2)],
            [("b.{i}.se.{2*j}.w", "f.{i+13}.fc.{2*j}.w")],
            id="every second",
        ),
        pytest.param(
            [(f"s.{i}.b.{j}.w", f"f.{i}.{2 * j + 1}.w") for i in (0, 1) for j in range(2 + i)],
            [("s.{i}.b.{j}.w", "f.{i}.{2*j+1}.w")],
            id="every second of one side",
        ),
        pytest.param(
            [(f"s.{i}.b.{j}.w", f"f.{i}.{j}.w") for i, j in ((0, 0), (0, 1), (1, 2), (1, 3))],
            [("s.0.b.{i}.w", "f.0.{i}.w"), ("s.1.b.{i+2}.w", "f.1.{i+2}.w")],
            id="a stage that does not begin at 0",
        ),
    ],
)
def test_blocks_of_stages_that_are_not_numbered_one_by_one(
    pairs: list[tuple[str, ...]], expected: list[tuple[str, ...]]
) -> None:
    """An index stands for every number from 0 on: with a gap the table could not be read."""
    assert indexed(pairs) == expected
