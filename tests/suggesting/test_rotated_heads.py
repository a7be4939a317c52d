"""Features of heads in an order that only the rotation shows: a norm stands between, or a part is rotated."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.suggesting import Verdict, suggest
from porting.suggesting.search.attention_layouts import Heads, arrangements, gain_axes, orders
from porting.suggesting.search.feature_permutation import FeatureOrder
from porting.suggesting.search.layouts import Matrix
from porting.suggesting.subjects.config_fields import rotated
from porting.suggesting.subjects.model_pair import completed_config
from porting.suggesting.subjects.twin import make_twin, shrink
from tests.suggesting.oracle import BOUND, apart, drafted, source
from tests.suggesting.rotated import GROUPED, SIZES, TANH, Decoder, Style, grouped, plain, squared

LAYERED: dict[str, Any] = {"norm": "layer", "gated": False, "biases": "qkv out feed"}
OWN = {**GROUPED, "head_dim": 16}
BASE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
HALF = {**SIZES, "partial_rotary_factor": 0.5}
GPTJ = {"vocab_size": 113, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 80, "n_positions": 64, "rotary_dim": 8}

FOUND: list[tuple[str, str, Mapping[str, object], Callable[..., nn.Module], str]] = [
    ("a norm of each head", "Qwen3", OWN, grouped(Style(normed="head")), "norm_{p:q,k}.g [(r s)]"),
    ("a norm of all heads", "Olmo2", GROUPED, grouped(Style(normed="row", block="after")), "norm_q.g [(h r s)]"),
    (
        "a part of a head out of groups",
        "GPTNeoX",
        {**SIZES, "rotary_pct": 0.25},
        plain(Style(share=0.25, block="two", act=F.gelu, **LAYERED)),
        "query.weight [(h q (r s|u)) e]",
    ),
    (
        "a part of a head within groups",
        "GPTNeoX",
        {**SIZES, "rotary_pct": 0.5},
        plain(Style(share=0.5, lie="groups", block="two", act=F.gelu, **LAYERED)),
        "mixed.bias [(h (q (r s|u)|k (z y|w)|v d))]",
    ),
    ("a norm behind", "HunYuanDenseV1", OWN, grouped(Style(normed="behind")), "norm_{p:q,k}.g [(r s)]"),
    (
        "a part of a head, grouped",
        "StableLm",
        {**HALF, "num_key_value_heads": 2, "layer_norm_eps": 1e-6},
        grouped(Style(share=0.5, norm="layer")),
        "key.weight [(g (r s|u)) e]",
    ),
    (
        "halves of a part of a head",
        "Glm",
        {**OWN, "partial_rotary_factor": 0.5, "attention_bias": True, "pad_token_id": 0, "eos_token_id": 1},
        grouped(Style(rotate="halves", share=0.5, biases="qkv")),
        "query.bias [(h (s r|u))]",
    ),
    (
        "halves of a number of features",
        "GPTJ",
        {**GPTJ, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 1},
        plain(Style(rotate="halves", share=0.5, norm="layer", block="both", gated=False, act=TANH, biases="feed head")),
        "{p:query,key}.weight [(h (s r|u)) e]",
    ),
    (
        "heads that share a key apart",
        "Llama",
        {**GROUPED, "tie_word_embeddings": False},
        grouped(Style(tiled=True)),
        '"model.layers.{i}.self_attn.o_proj.weight [o (g q d)]" = "layers.{i}.attention.out.weight [o (q g d)]"',
    ),
    (
        "heads that share a key apart, with norms",
        "Qwen3",
        {**GROUPED, "head_dim": 16, "tie_word_embeddings": False},
        grouped(Style(rotate="halves", normed="head", tiled=True)),
        ".query.weight [(q g d) e]",
    ),
    ("heads behind", "Llama", {**GROUPED}, grouped(Style(inner=True)), ".key.weight [(r s g) e]"),
    (
        "heads behind, with a norm",
        "Qwen3",
        OWN,
        grouped(Style(normed="head", inner=True)),
        "norm_{p:q,k}.g [(r s)]",
    ),
    (
        "a gain for each head",
        "Cohere",
        {**SIZES, **BASE, "num_key_value_heads": 2, "layer_norm_eps": 1e-6, "use_qk_norm": True, "eos_token_id": 1},
        grouped(Style(rotate="halves", norm="gain", normed="each", block="both", scale=0.0625)),
        "norm_q.g [h (s r)]",
    ),
    (
        "a shift behind a part of a head",
        "Phi",
        {**HALF, "qk_layernorm": True},
        plain(Style(share=0.5, normed="head", block="both", act=TANH, **{**LAYERED, "biases": "qkv out feed head"})),
        "norm_{p:q,k}.{w:weight,bias} [(r s|u)]",
    ),
    (
        "a norm behind groups",
        "Persimmon",
        HALF,
        plain(Style(share=0.5, normed="head", act=squared, **LAYERED)),
        "norm_{p:q,k}.{w:weight,bias} [(r s|u)]",
    ),
]
CASES = pytest.mark.parametrize(
    ("family", "fields", "build", "said"), [pytest.param(*rest, id=name) for name, *rest in FOUND]
)
FAR = {"Cohere": 1e-5, "GPTJ": 1e-6}
"""Where transformers' norms, or its sines, compute in float32."""


def off(reference: Any, folder: Path, build: Callable[..., nn.Module], found: Any) -> float:
    ids = torch.randint(3, 100, (4, 20), generator=torch.Generator().manual_seed(1))
    return apart(reference, folder, build, found, {"input_ids": ids}, {"tokens": ids})


@pytest.mark.slow
@pytest.mark.few(3)
@CASES
def test_the_order_is_in_the_draft(
    family: str, fields: Mapping[str, object], build: Callable[..., nn.Module], said: str, tmp_path: Path
) -> None:
    reference = source(f"{family}ForCausalLM", fields, tmp_path)
    found = drafted(tmp_path, build)
    assert said in found.text
    assert off(reference, tmp_path, build, found) < FAR.get(family, BOUND)


@pytest.mark.slow
@pytest.mark.sampled(1)
@CASES
def test_the_order_is_found_and_proven(
    family: str, fields: Mapping[str, object], build: Callable[..., nn.Module], said: str, tmp_path: Path
) -> None:
    reference = source(f"{family}ForCausalLM", fields, tmp_path)
    found = suggest(tmp_path, build)
    assert found.verdict is Verdict.EXACT, str(found)
    assert said in found.text
    assert off(reference, tmp_path, build, found) < FAR.get(family, BOUND)


@pytest.mark.parametrize("count", [2, 4])
def test_heads_may_stand_behind_their_features(count: int) -> None:
    heads = Heads(count=4, groups=count, width=8)
    sizes = {"query": 32, "key": 8 * count, "value": 8 * count}
    matrices = [
        Matrix((name,), (), (size, 32), None, out=size, summed=32, into_first=False) for name, size in sizes.items()
    ]
    g = "h" if count == heads.count else "g"
    for order, said in zip((FeatureOrder(), *orders(heads)), (("d", "d"), ("s r", "r s"), ("r s", "s r")), strict=True):
        ways = [[*map(str, way)] for way in arrangements(matrices, matrices, heads, order)]
        wanted = [
            f"{name} [({h} {said[0]}) e] = {name} [({said[1]} {h}) e]" for name, h in (("query", "h"), ("key", g))
        ]
        wanted.append(f"value [({g} d) e] = value [(d {g}) e]")
        assert (wanted in ways) == (order.theirs != "" or g == "g"), ways  # else each by itself has the layout


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "style", [Style(normed="one"), Style(normed="one", inner=True), Style(normed="one", rotate="halves")]
)
def test_one_norm_for_queries_and_keys_is_not_two(style: Style, tmp_path: Path) -> None:
    source("Qwen3ForCausalLM", OWN, tmp_path)
    found = suggest(tmp_path, grouped(style))
    assert found.verdict is Verdict.IMPOSSIBLE, str(found)
    said = "is used again where the checkpoint's model uses model.layers.0.self_attn.k_norm.weight"
    assert any(said in reason.said for reason in found.reasons if reason.shown), str(found)


@pytest.mark.slow
def test_one_norm_for_queries_and_keys_may_hold_two_that_are_alike(tmp_path: Path) -> None:
    model = source("Qwen3ForCausalLM", OWN, tmp_path)
    for layer in model.model.layers:
        layer.self_attn.k_norm.load_state_dict(layer.self_attn.q_norm.state_dict())
    model.save_pretrained(tmp_path)
    assert suggest(tmp_path, grouped(Style(normed="one"))).verdict is Verdict.NOT_FOUND


@pytest.mark.slow
def test_a_norm_behind_a_rotation_that_is_rounded_otherwise(tmp_path: Path) -> None:
    """What meets the norm is the reference's but for rounding: the gain has the order of what it meets all the same."""
    reference = source("HunYuanDenseV1ForCausalLM", OWN, tmp_path)
    build = grouped(Style(normed="behind", rounded=False))
    found = suggest(tmp_path, build)
    assert found.verdict is Verdict.EXACT, str(found)
    assert "norm_{p:q,k}.g [(r s)]" in found.text
    assert off(reference, tmp_path, build, found) < 1e-6


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("share", "said", "expected"),
    [(0.5, {"rotary_pct": 0.5}, "hidden_size // num_attention_heads * rotary_pct // 2"),
     (0.25, {}, "hidden_size // num_attention_heads * 0.25 // 2")],
)  # fmt: skip
def test_a_part_that_an_older_config_says_or_leaves_to_the_class(
    share: float, said: dict[str, float], expected: str, tmp_path: Path
) -> None:
    reference = source("GPTNeoXForCausalLM", {**SIZES, "rotary_pct": share}, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps({**config, **said}))
    build = plain(Style(share=share, block="two", act=F.gelu, **LAYERED))
    found = suggest(tmp_path, build)
    assert found.verdict is Verdict.EXACT, str(found)
    assert found.table.sizes["r"].text == expected
    assert off(reference, tmp_path, build, found) < BOUND


def test_a_small_model_has_the_field_that_a_table_reads(tmp_path: Path) -> None:
    config = {"model_type": "gpt_neox", **SIZES, "rotary_pct": 0.5}
    found = make_twin(
        completed_config(config, "GPTNeoXForCausalLM"), "GPTNeoXForCausalLM", tmp_path, small=True, seed=0
    )
    assert found.config["rotary_pct"] == 0.5


def test_an_order_of_a_part_of_each_head() -> None:
    first, second = orders(Heads(2, 1, 8, 6))
    assert (first.theirs, first.ours) == ("(s r|u)", "(r s|u)")
    halves = torch.tensor([0, 2, 4, 1, 3, 5, 6, 7])  # of pairs that are neighbours
    value = torch.arange(16)
    assert second.turned(value).tolist() == [*halves, *(halves + 8)]
    assert first.turned(second.turned(value)).tolist() == value.tolist()
    assert first.turned(value[:5]).tolist() == [0, 1, 2, 3, 4], "no heads of this size"


def test_the_axes_of_a_gain() -> None:
    heads = Heads(4, 2, 8)
    shapes = [(8,), (32,), (16,), (4, 8), (2, 8), (24,), (4, 4), ()]
    assert [gain_axes(shape, heads) for shape in shapes] == ["e", "(h e)", "(g e)", "h e", "g e", "", "", ""]


@pytest.mark.parametrize(
    ("config", "rotated_of_64", "size"),
    [
        ({}, 64, 8),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, 32, 16),
        ({"rotary_pct": 0.25}, 16, 24),
        ({"rotary_dim": 32}, 32, 16),
        ({"rotary_dim": None}, 64, 8),
    ],
)
def test_a_small_model_rotates_three_pairs_of_a_head_at_least(
    config: dict[str, object], rotated_of_64: int, size: int
) -> None:
    known: dict[str, object] = {"hidden_size": 512, "num_attention_heads": 8, "vocab_size": 1000, **config}
    assert rotated(known, 64) == rotated_of_64
    small = shrink(known)
    assert small["hidden_size"] == 5 * size
    assert 6 <= rotated(small, size) <= size


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("wrong", ["late", "apart"])
@pytest.mark.parametrize(
    ("family", "fields", "style"),
    [
        ("Qwen3", OWN, {"normed": "head"}),
        ("Olmo2", GROUPED, {"normed": "row", "block": "after"}),
        ("HunYuanDenseV1", OWN, {"normed": "behind"}),
        ("StableLm", {**HALF, "num_key_value_heads": 2, "layer_norm_eps": 1e-6}, {"share": 0.5, "norm": "layer"}),
    ],
)
def test_a_wrong_rotation_is_not_proven(
    family: str, fields: Mapping[str, object], style: dict[str, Any], wrong: str, tmp_path: Path
) -> None:
    source(f"{family}ForCausalLM", fields, tmp_path)
    found = suggest(tmp_path, grouped(Style(wrong=wrong, **style)))
    assert found.verdict in {Verdict.NOT_FOUND, Verdict.IMPOSSIBLE}, str(found)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_another_part_of_a_head_is_not_proven(share: float, tmp_path: Path) -> None:
    source("StableLmForCausalLM", {**HALF, "num_key_value_heads": 2, "layer_norm_eps": 1e-6}, tmp_path)
    found = suggest(tmp_path, grouped(Style(share=share, norm="layer")))
    assert found.verdict in {Verdict.NOT_FOUND, Verdict.IMPOSSIBLE}, str(found)


class AnglesInEachLayer(Decoder):
    """Each layer reads the frequencies again, which are a buffer of the module."""

    def __init__(self, *sizes: Any) -> None:
        super().__init__(Style(), *sizes)
        self.register_buffer("frequencies", 1.0 / 10000.0 ** (torch.arange(0, self.size, 2) / self.size))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            angles = torch.outer(
                torch.arange(tokens.shape[1], dtype=x.dtype), self.get_buffer("frequencies").to(x.dtype)
            )
            x = layer(x, torch.complex(angles.cos(), angles.sin())[:, None])
        found: Tensor = self.head(self.last(x))
        return found


def test_a_head_of_its_own_is_a_copy_where_layers_share_a_buffer(tmp_path: Path) -> None:
    def build(
        vocab_size: int, dim: int, n_layers: int, n_heads: int, n_kv_heads: int, intermediate_size: int, norm_eps: float
    ) -> nn.Module:
        return AnglesInEachLayer(vocab_size, dim, n_layers, n_heads, n_kv_heads, intermediate_size, norm_eps)

    source("LlamaForCausalLM", {**GROUPED, "tie_word_embeddings": True}, tmp_path)
    made = drafted(tmp_path, build).text.partition("[make]")[2]
    assert '\n"head.weight" = "equals embed.weight"\n' in made
