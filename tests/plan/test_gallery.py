"""What a rule can say, with real tensors: each against einops, or against torch code that does the same by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn

from tests.plan.carrying import Port, drawn, port, same
from tests.plan.shapes import Shape

Tensors = Mapping[str, Tensor]
Shapes = Mapping[str, Shape]

RENAMED = {"pooler.dense.weight": (3, 3), "pooler.dense.bias": (3,)}
SPELLED = {"emb.LayerNorm.gamma": (4,), "emb.LayerNorm.beta": (4,)}
SELF = {f"l.{i}.self.{p}.weight": (6, 5) for i in range(2) for p in ("query", "key", "value")}
EXPERTS = {f"experts.{x}.w1.weight": (6, 5) for x in range(3)}

GALLERY = [
    pytest.param(
        '"pooler.dense.{w:weight,bias}" = "top.{w:weight,bias}"',
        RENAMED,
        {"top.weight": (3, 3), "top.bias": (3,)},
        {},
        lambda t: {"top.weight": t["pooler.dense.weight"], "top.bias": t["pooler.dense.bias"]},
        id="rename",
    ),
    pytest.param(
        '"emb.LayerNorm.{w:weight/gamma,bias/beta}" = "emb.norm.{w:scale,shift}"',
        SPELLED,
        {"emb.norm.scale": (4,), "emb.norm.shift": (4,)},
        {},
        lambda t: {"emb.norm.scale": t["emb.LayerNorm.gamma"], "emb.norm.shift": t["emb.LayerNorm.beta"]},
        id="older spellings",
    ),
    pytest.param(
        '"h.{i}.mlp.c_fc.weight [in out]" = "layers.{i}.linear1.weight [out in]"',
        {f"h.{i}.mlp.c_fc.weight": (3, 12) for i in range(2)},
        {f"layers.{i}.linear1.weight": (12, 3) for i in range(2)},
        {},
        lambda t: {f"layers.{i}.linear1.weight": t[f"h.{i}.mlp.c_fc.weight"].T for i in range(2)},
        id="Conv1D transposed",
    ),
    pytest.param(
        '"l.{i}.self.{p:query,key,value}.weight [o e]" = "layers.{i}.self_attn.in_proj_weight [(p o) e]"',
        SELF,
        {f"layers.{i}.self_attn.in_proj_weight": (18, 5) for i in range(2)},
        {},
        lambda t: {
            f"layers.{i}.self_attn.in_proj_weight": torch.cat(
                [t[f"l.{i}.self.{p}.weight"] for p in ("query", "key", "value")]
            )
            for i in range(2)
        },
        id="q, k and v fused one after the other",
    ),
    pytest.param(
        '"l.{i}.self.{p:query,key,value}.weight [(h d) e]" = "layers.{i}.qkv [(h p d) e]"\n[sizes]\nh = "heads"',
        SELF,
        {f"layers.{i}.qkv": (18, 5) for i in range(2)},
        {"heads": 3},
        lambda t: {
            f"layers.{i}.qkv": rearrange(
                [t[f"l.{i}.self.{p}.weight"] for p in ("query", "key", "value")], "p (h d) e -> (h p d) e", h=3
            )
            for i in range(2)
        },
        id="q, k and v interleaved per head",
    ),
    pytest.param(
        '"l.{i}.self.{p:query,key,value}.weight [(h d) e]" = "l.{i}.heads.{h}.{p:q,k,v}.weight [d e]"',
        SELF,
        {f"l.{i}.heads.{h}.{p}.weight": (2, 5) for i in range(2) for h in range(3) for p in "qkv"},
        {},
        lambda t: {
            f"l.{i}.heads.{h}.{p[0]}.weight": t[f"l.{i}.self.{p}.weight"][2 * h : 2 * h + 2]
            for i in range(2)
            for h in range(3)
            for p in ("query", "key", "value")
        },
        id="one Linear per head",
    ),
    pytest.param(
        '"experts.{x}.w1.weight [f e]" = "experts.w1 [x e f]"',
        EXPERTS,
        {"experts.w1": (3, 5, 6)},
        {},
        lambda t: {"experts.w1": rearrange([t[f"experts.{x}.w1.weight"] for x in range(3)], "x f e -> x e f")},
        id="experts stacked",
    ),
    pytest.param(
        '"shared.weight [v (s k)]" = "embedding.weight [v (k s)]"\n[sizes]\ns = 2',
        {"shared.weight": (7, 8)},
        {"embedding.weight": (7, 8)},
        {},
        lambda t: {"embedding.weight": rearrange(t["shared.weight"], "v (s k) -> v (k s)", s=2)},
        id="sines then cosines, interleaved",
    ),
    pytest.param(
        """
        [[rule]]
        source = "positions.weight [(_2|t) e]"
        target = "position.weight [t e]"
        fill = 0.0
        """,
        {"positions.weight": (9, 4)},
        {"position.weight": (7, 4)},
        {},
        lambda t: {"position.weight": t["positions.weight"][2:]},
        id="two padding rows dropped",
    ),
    pytest.param(
        """
        [[rule]]
        source = ["q.weight [(g m d) e]", "k.weight [(g d) e]", "v.weight [(g d) e]"]
        target = "qkv.weight [(g (m|1|1) d) e]"
        [sizes]
        g = "kv_heads"
        d = "head_dim"
        """,
        {"q.weight": (2 * 3 * 4, 5), "k.weight": (8, 5), "v.weight": (8, 5)},
        {"qkv.weight": (2 * 5 * 4, 5)},
        {"kv_heads": 2, "head_dim": 4},
        lambda t: {
            "qkv.weight": torch.cat(
                [
                    part
                    for group in range(2)
                    for part in (
                        t["q.weight"][12 * group : 12 * (group + 1)],
                        t["k.weight"][4 * group : 4 * (group + 1)],
                        t["v.weight"][4 * group : 4 * (group + 1)],
                    )
                ]
            )
        },
        id="grouped queries",
    ),
    pytest.param(
        '"{p:q,k}.weight [(h s d) e]" = "{p:q,k}.weight [(h d s) e]"\n[sizes]\nh = 3\ns = 2',
        {"q.weight": (12, 5), "k.weight": (12, 5)},
        {"q.weight": (12, 5), "k.weight": (12, 5)},
        {},
        lambda t: {name: rearrange(t[name], "(h s d) e -> (h d s) e", h=3, s=2) for name in t},
        id="rotary halves interleaved",
    ),
    pytest.param(
        """
        [[rule]]
        source = ["gate.weight [f e]", "up.weight [u e]"]
        target = "gate_up.weight [(f|u) e]"
        """,
        {"gate.weight": (6, 4), "up.weight": (3, 4)},
        {"gate_up.weight": (9, 4)},
        {},
        lambda t: {"gate_up.weight": torch.cat([t["gate.weight"], t["up.weight"]])},
        id="concatenated, of different sizes",
    ),
    pytest.param(
        '"conv.weight [o i 1 k]" = "linear.weight [o (k i)]"',
        {"conv.weight": (3, 2, 1, 4)},
        {"linear.weight": (3, 8)},
        {},
        lambda t: {"linear.weight": rearrange(t["conv.weight"], "o i 1 k -> o (k i)")},
        id="a patch convolution as a Linear",
    ),
    pytest.param(
        '"top.{*rest}" = "crown.{*rest}"',
        {"top.a.b": (2, 3), "top.c": ()},
        {"crown.a.b": (2, 3), "crown.c": ()},
        {},
        lambda t: {"crown.a.b": t["top.a.b"], "crown.c": t["top.c"]},
        id="the rest of the name",
    ),
    pytest.param(
        '"seq.{2*i}.weight [a b]" = "even.{i}.weight [b a]"\n"seq.{2*i+1}.weight [a b]" = "odd.{i+1}.weight [b a]"',
        {f"seq.{i}.weight": (2, 3) for i in range(4)},
        {"even.0.weight": (3, 2), "even.1.weight": (3, 2), "odd.1.weight": (3, 2), "odd.2.weight": (3, 2)},
        {},
        lambda t: {
            "even.0.weight": t["seq.0.weight"].T,
            "even.1.weight": t["seq.2.weight"].T,
            "odd.1.weight": t["seq.1.weight"].T,
            "odd.2.weight": t["seq.3.weight"].T,
        },
        id="affine numbers",
    ),
]


@pytest.mark.parametrize(("rule", "sources", "targets", "config", "expected"), GALLERY)
def test_a_rule_does_what_is_done_by_hand(
    rule: str,
    sources: Shapes,
    targets: Shapes,
    config: Mapping[str, object],
    expected: Callable[[Tensors], Tensors],
) -> None:
    table = rule if "[[rule]]" in rule else f"[tensors]\n{rule}"
    made: Port = port(table, sources, targets, config)
    tensors = drawn(sources, torch.float64)
    found = made.forward(tensors)
    same(found, expected(tensors))
    back = made.backward(found, base=tensors)
    same(back, tensors)


def test_a_rename_and_a_transposition_are_views() -> None:
    """The target's values are the very memory of the source."""
    made = port('"a.{i} [x y]" = "b.{i} [y x]"\n"c" = "d"', {"a.0": (3, 2), "c": (4,)}, {"b.0": (2, 3), "d": (4,)})
    tensors = drawn(made.sources)
    found = made.forward(tensors)
    assert found["b.0"].data_ptr() == tensors["a.0"].data_ptr()
    assert found["d"].data_ptr() == tensors["c"].data_ptr()
    assert found["b.0"].stride() == (1, 2)


def test_one_head_is_a_view_of_the_whole() -> None:
    made = port('"q [(h d) e]" = "heads.{h} [d e]"', {"q": (6, 5)}, {f"heads.{h}": (2, 5) for h in range(3)})
    tensors = drawn(made.sources)
    found = made.forward(tensors)
    assert {value.untyped_storage().data_ptr() for value in found.values()} == {tensors["q"].data_ptr()}


FOLD = """
[[rule]]
source = ["positions.weight [t e]", "token_types.weight [0 e]"]
target = "positions.weight [t e]"
fold = true
"""
FOLD_SHAPES = {"positions.weight": (7, 4), "token_types.weight": (2, 4)}


def test_a_fold_adds_its_row_to_every_position() -> None:
    made = port(FOLD, FOLD_SHAPES, {"positions.weight": (7, 4)})
    tensors = drawn(FOLD_SHAPES)
    found = made.forward(tensors)["positions.weight"]
    exact = tensors["positions.weight"].double() + tensors["token_types.weight"][0].double()
    assert torch.equal(found, exact.float())


def test_the_inverse_of_a_fold_gives_the_sum_to_the_first() -> None:
    made = port(FOLD, FOLD_SHAPES, {"positions.weight": (7, 4)})
    tensors = drawn(FOLD_SHAPES)
    folded = made.forward(tensors)
    back = made.backward(folded)
    same(back, {"positions.weight": folded["positions.weight"], "token_types.weight": torch.zeros(2, 4)})
    same(made.forward(back), folded)  # the same function


def test_the_inverse_of_a_fold_leaves_the_rows_that_it_did_not_take() -> None:
    made = port(FOLD, FOLD_SHAPES, {"positions.weight": (7, 4)})
    tensors = drawn(FOLD_SHAPES)
    back = made.backward(made.forward(tensors), base=tensors)
    assert torch.equal(back["token_types.weight"][0], torch.zeros(4))
    assert torch.equal(back["token_types.weight"][1], tensors["token_types.weight"][1])


def test_another_row_of_another_axis() -> None:
    table = FOLD.replace("[0 e]", "[e 1]")
    made = port(table, {"positions.weight": (7, 4), "token_types.weight": (4, 3)}, {"positions.weight": (7, 4)})
    tensors = drawn(made.sources, torch.float64)
    found = made.forward(tensors)["positions.weight"]
    assert torch.equal(found, tensors["positions.weight"] + tensors["token_types.weight"][:, 1])


def test_a_fold_serves_every_layer() -> None:
    table = """
    [[rule]]
    source = ["l.{i}.bias [e]", "shared.bias [e]"]
    target = "m.{i}.bias [e]"
    fold = true
    """
    sources = {"l.0.bias": (3,), "l.1.bias": (3,), "shared.bias": (3,)}
    made = port(table, sources, {"m.0.bias": (3,), "m.1.bias": (3,)})
    tensors = drawn(sources, torch.float64)
    found = made.forward(tensors)
    same(found, {f"m.{i}.bias": tensors[f"l.{i}.bias"] + tensors["shared.bias"] for i in range(2)})


SCALE = '[[rule]]\nsource = "q.weight [o e]"\ntarget = "q.weight [e o]"\nscale = "n_embd ** -0.5"\n'


def test_a_scale_multiplies_and_its_inverse_divides() -> None:
    made = port(SCALE, {"q.weight": (6, 4)}, {"q.weight": (4, 6)}, {"n_embd": 48})
    tensors = drawn(made.sources)
    found = made.forward(tensors)["q.weight"]
    assert torch.equal(found, (tensors["q.weight"].double() * 48**-0.5).float().T)
    back = made.backward({"q.weight": found})["q.weight"]
    assert torch.equal(back, (found.double() / 48**-0.5).float().T)
    assert (back - tensors["q.weight"]).abs().max() <= torch.finfo(torch.float32).eps * tensors["q.weight"].abs().max()


def test_a_scale_by_a_power_of_two_comes_back_bit_by_bit() -> None:
    made = port(SCALE, {"q.weight": (6, 4)}, {"q.weight": (4, 6)}, {"n_embd": 64})
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        tensors = drawn(made.sources, dtype)
        same(made.backward(made.forward(tensors)), tensors)


def test_dropped_parts_come_back_as_their_fill_or_as_they_were() -> None:
    table = '[[rule]]\nsource = "p [(_2|t|_1) e]"\ntarget = "q [t e]"\nfill = -7.0\n'
    made = port(table, {"p": (8, 3)}, {"q": (5, 3)})
    tensors = drawn(made.sources)
    found = made.forward(tensors)
    assert torch.equal(found["q"], tensors["p"][2:7])
    filled = made.backward(found)["p"]
    assert torch.equal(filled, torch.cat([torch.full((2, 3), -7.0), tensors["p"][2:7], torch.full((1, 3), -7.0)]))
    same(made.backward(found, base=tensors), tensors)


def test_parts_that_no_source_has_are_filled() -> None:
    table = '[[rule]]\nsource = "p [t e]"\ntarget = "q [(_2|t) e]"\nfill = 0.5\n'
    made = port(table, {"p": (5, 3)}, {"q": (7, 3)})
    tensors = drawn(made.sources)
    found = made.forward(tensors)
    assert torch.equal(found["q"], torch.cat([torch.full((2, 3), 0.5), tensors["p"]]))
    same(made.backward(found), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_no_move_brings_is_not_computed(dtype: torch.dtype) -> None:
    """A fill is the value that the rule says, and an element of the base is the one that it was."""
    table = '[[rule]]\nsource = "p [(_2|t) e]"\ntarget = "q [(t|_1) e]"\nfill = 0.3\nscale = 3\n'
    made = port(table, {"p": (7, 3)}, {"q": (6, 3)})
    tensors = drawn(made.sources, dtype)
    found = made.forward(tensors)
    last = torch.full((1, 3), 0.3, dtype=dtype)
    same(found, {"q": torch.cat([(tensors["p"][2:].double() * 3).to(dtype), last])})
    kept = (found["q"][:5].double() / 3).to(dtype)
    same(made.backward(found), {"p": torch.cat([torch.full((2, 3), 0.3, dtype=dtype), kept])})
    same(made.backward(found, base=tensors), {"p": torch.cat([tensors["p"][:2], kept])})


def test_without_a_fill_there_is_no_way_back() -> None:
    made = port('"p [(_2|t) e]" = "q [t e]"', {"p": (7, 3)}, {"q": (5, 3)})
    with pytest.raises(ValueError, match="6 elements of 'p' have no counterpart and no fill"):
        made.backward(made.forward(drawn(made.sources)))


def test_the_base_is_not_written_to() -> None:
    made = port('"p [(_2|t) e]" = "q [t e]"', {"p": (7, 3)}, {"q": (5, 3)})
    tensors = drawn(made.sources)
    before = tensors["p"].clone()
    made.backward({"q": torch.zeros(5, 3)}, base=tensors)
    assert torch.equal(tensors["p"], before)


def test_the_openai_and_the_torch_attention_agree() -> None:
    """A gallery rule in use: q, k, v of three Linears in nn.MultiheadAttention give the same attention."""
    e, h = 8, 2
    table = """
    "{p:q,k,v}.weight [o e]" = "in_proj_weight [(p o) e]"
    "{p:q,k,v}.bias [o]" = "in_proj_bias [(p o)]"
    """
    sources: dict[str, Shape] = {f"{p}.weight": (e, e) for p in "qkv"} | {f"{p}.bias": (e,) for p in "qkv"}
    made = port(table, sources, {"in_proj_weight": (3 * e, e), "in_proj_bias": (3 * e,)})
    tensors = drawn(sources, torch.float64)
    module = nn.MultiheadAttention(e, h, batch_first=True, dtype=torch.float64)
    module.load_state_dict(made.forward(tensors), strict=False)
    x = torch.randn(2, 5, e, dtype=torch.float64)
    q, k, v = (
        rearrange(nn.functional.linear(x, tensors[f"{p}.weight"], tensors[f"{p}.bias"]), "b s (h d) -> b h s d", h=h)
        for p in "qkv"
    )
    context = rearrange((q @ k.transpose(-1, -2) / math.sqrt(e // h)).softmax(-1) @ v, "b h s d -> b s (h d)")
    expected = nn.functional.linear(context, module.out_proj.weight, module.out_proj.bias)
    assert torch.allclose(module(x, x, x)[0], expected, rtol=0, atol=1e-13)
