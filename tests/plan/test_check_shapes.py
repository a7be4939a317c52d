"""Indices are conserved, shapes and sizes agree, and no number is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from porting.notation.table import read_table
from porting.plan.check import check
from porting.plan.plan import PlanError
from tests.plan.shapes import Shape, headers, module
from tests.plan.toy import CONFIG, LAYERS, TABLE, checkpoint, plan, refused, target


def test_a_rule_that_matches_nothing() -> None:
    table = TABLE.replace("[optional]", '"trunk.embb.weight" = "embb.weight"\n[optional]')
    (fault,) = refused(None, None, table)
    assert fault == (
        "toy.toml:15:1: 'trunk.embb.weight = embb.weight' matches nothing in the checkpoint and nothing in the module "
        "(take it away, or move it to [optional] if not every checkpoint has it) [rule-matches-nothing]"
    )


def test_a_rule_that_names_a_module_is_told_the_tensors_of_it() -> None:
    added = '"trunk.out" = "out"\n"trunk.l.{i}.{w:mlp}" = "l.{i}.{w:mlp}"\n"trunk.rest" = "rest"\n[optional]'
    more: dict[str, tuple[int, ...] | None] = {"trunk__out__bias": (3,), "trunk__out__weight": (3, 4)}
    more |= {f"trunk__l__{i}__mlp__weight": (4, 4) for i in range(LAYERS)}
    faults = refused(checkpoint(**more), None, TABLE.replace("[optional]", added))
    hints = [fault.partition("nothing in the module (")[2].partition(") [")[0] for fault in faults[:3]]
    assert hints == [
        'a rule names tensors, and this is a module: write "trunk.out.{w:bias,weight}" = "out.{w:bias,weight}"',
        'a rule names tensors, and this is a module: write "trunk.l.{i}.{w:mlp}.weight" = "l.{i}.{w:mlp}.weight"',
        "take it away, or move it to [optional] if not every checkpoint has it",
    ]  # first, since what no rule reads is read by none because of them
    assert [fault.rpartition(" ")[2] for fault in faults[3:]] == ["[unread-tensor]"] * 3


def test_a_rule_that_is_inherited_and_matches_nothing_is_taken_away_in_the_table_that_inherits(tmp_path: Path) -> None:
    parent = TABLE.replace("[optional]", '"trunk.embb.weight [v e]" = "embb.weight [v e]"\n[optional]')
    (tmp_path / "parent.toml").write_text(parent)
    child = 'extends = "parent"\n[mapping]\nname = "child"\n[tensors]\n'
    for lines in ("", '"trunk.embb.weight [v e]" = false\n'):
        (tmp_path / "child.toml").write_text(child + lines)
        table = read_table(tmp_path / "child.toml")
        if lines:
            check(table, headers(checkpoint(), CONFIG), module(target()))
            continue
        with pytest.raises(PlanError, match=r'\(in child.toml, "trunk.embb.weight \[v e\]" = false takes it away\)'):
            check(table, headers(checkpoint(), CONFIG), module(target()))


def test_an_optional_rule_may_match_nothing() -> None:
    plan(checkpoint(head__weight=None), target(head__weight=None))


def test_a_gap_in_the_layers() -> None:
    source = {name.replace("l.2.", "l.3."): shape for name, shape in checkpoint().items()}
    faults = refused(source)
    assert faults[0] == (
        "toy.toml:13:1: 'trunk.l.{i}' has i = 0, 1, 3 in the checkpoint: 2 is missing "
        "(every number from 0 on must be there) [index-gap]"
    )
    assert [fault.rpartition(" ")[2] for fault in faults[1:]] == [
        "[no-target]",
        "[no-target]",
        "[no-source]",
        "[no-source]",
    ]


def test_a_gap_that_the_module_shares_is_a_gap() -> None:
    source = {name.replace("l.2.", "l.3."): shape for name, shape in checkpoint().items()}
    into = {name.replace("l.2.", "l.3."): shape for name, shape in target().items()}
    (fault,) = refused(source, into)
    assert "has i = 0, 1, 3 in the checkpoint: 2 is missing" in fault


def test_layers_of_two_kinds_count_together() -> None:
    table = '[tensors]\n"l.{i}.mlp" = "m.{i}.mlp"\n"l.{i}.moe" = "m.{i}.moe"\n"seq.{2*i}" = "s.{i}"\n'
    source = {"l.0.mlp": (2,), "l.1.moe": (2,), "l.2.mlp": (2,), "l.3.moe": (2,), "seq.0": (2,), "seq.2": (2,)}
    into = {name.replace("l.", "m."): shape for name, shape in source.items() if name[0] == "l"}
    plan(headers(source), {**into, "s.0": (2,), "s.1": (2,)}, table)


EXPERTS = {f"experts.{x}.w": (3, 2) for x in (0, 1, 3)}


def test_experts_0_1_3_do_not_fill_the_slots_0_1_2_of_a_list() -> None:
    table = '[tensors]\n"experts.{x}.w [f e]" = "slots.{x}.w [e f]"\n'
    faults = refused(headers(EXPERTS), {f"slots.{x}.w": (2, 3) for x in range(3)}, table)
    assert faults[0] == (
        "toy.toml:2:1: 'experts.{i}' has i = 0, 1, 3 in the checkpoint: 2 is missing "
        "(every number from 0 on must be there) [index-gap]"
    )
    assert "'experts.3.w' [3, 2] -> 'slots.3.w': the module does not have it" in faults[1]
    assert "'experts.2.w' -> 'slots.2.w' [2, 3]: the checkpoint does not have it" in faults[2]


def test_experts_0_1_3_do_not_fill_a_stacked_axis_of_3() -> None:
    table = '[tensors]\n"experts.{x}.w [f e]" = "stacked [x e f]"\n'
    assert refused(headers(EXPERTS), {"stacked": (3, 2, 3)}, table) == [
        (
            "toy.toml:2:1: 'experts.{x}.w' has x = 0, 1, 3 in the checkpoint: 2 is missing "
            "(every number from 0 on must be there) [index-gap]"
        )
    ]


def test_three_experts_do_not_fill_a_stacked_axis_of_four() -> None:
    table = '[tensors]\n"experts.{x}.w [f e]" = "stacked [x e f]"\n'
    (fault,) = refused(headers({f"experts.{x}.w": (3, 2) for x in range(3)}), {"stacked": (4, 2, 3)}, table)
    assert fault == (
        "toy.toml:2:1: 'experts.0.w' [3, 2] (one of 3) -> 'stacked' [4, 2, 3]: x is 3 and 4, in "
        "'experts.{x}.w [f e] = stacked [x e f]' [shape-mismatch]"
    )


def test_a_gap_of_thousands_is_told_in_a_line() -> None:
    table = '[tensors]\n"experts.{x}.w" = "slots.{x}.w"\n'
    faults = refused(headers({"experts.0.w": (2,), "experts.999999999.w": (2,)}), {"slots.0.w": (2,)}, table)
    assert "has i = 0, 999999999 in the checkpoint: 1, 2, 3, ... are missing" in faults[0]


def test_two_indices_that_call_for_billions_of_members_are_counted_and_not_listed() -> None:
    table = '[tensors]\n"w.{a}.{b} [x]" = "all [a b x]"\n'
    names = {f"w.{n}.0": (2,) for n in range(300)} | {f"w.0.{n}": (2,) for n in range(300)}
    (fault,) = refused(headers(names), {"all": (300, 300, 2)}, table)
    assert fault == (
        "toy.toml:2:1: the checkpoint lacks 'w.1.1', 'w.1.2', 'w.1.3' and 89398 more of 'w.{a}.{b} [x] = all [a b x]' "
        "(it has 'w.0.0') [missing-member]"
    )


def test_a_missing_member_of_a_concatenation() -> None:
    table = '[[rule]]\nsource = ["q.{i} [o e]", "k.{i} [p e]"]\ntarget = "qk.{i} [(o|p) e]"\n'
    source = headers({"q.0": (2, 3), "k.0": (2, 3), "q.1": (2, 3), "q.2": (2, 3)})
    assert refused(source, {f"qk.{i}": (4, 3) for i in range(3)}, table) == [
        (
            "toy.toml:2:1: the checkpoint lacks 'k.1' of 'q.{i} [o e] + k.{i} [p e] = qk.{i} [(o|p) e]' "
            "(and 1 more like it) [missing-member]"
        )
    ]


def test_a_missing_member_of_a_fused_axis() -> None:
    assert refused(checkpoint(trunk__l__1__k__weight=None)) == [
        (
            "toy.toml:13:1: the checkpoint lacks 'trunk.l.1.k.weight' of "
            "'trunk.l.{i}.{p:q,k,v}.weight [o e] = l.{i}.qkv [(p o) e]' (it has 'trunk.l.1.q.weight') [missing-member]"
        )
    ]


def test_a_missing_member_of_the_module() -> None:
    table = '[tensors]\n"q [(h d) e]" = "heads.{h}.{p:a} [d e]"\n'.replace(".{p:a}", "")
    faults = refused(headers({"q": (6, 2)}), {"heads.0": (2, 2), "heads.2": (2, 2)}, table)
    assert faults == [
        (
            "toy.toml:2:1: 'heads.{h}' has h = 0, 2 in the module: 1 is missing "
            "(every number from 0 on must be there) [index-gap]"
        )
    ]


def test_a_shape_that_does_not_fit_names_both_tensors_both_shapes_the_rule_and_the_config() -> None:
    assert refused(checkpoint(trunk__emb__weight=(6, 4))) == [
        (
            "toy.toml:12:1: 'trunk.emb.weight' [6, 4] -> 'emb.weight' [7, 4]: v is 6 and 7, in "
            "'trunk.emb.weight [v e] = emb.weight [v e]' (config.json has vocab = 7) [shape-mismatch]"
        )
    ]


def test_twelve_layers_of_another_shape_are_one_line() -> None:
    source = checkpoint(**{f"trunk__l__{i}__norm__weight": (5,) for i in range(LAYERS)})
    assert refused(source) == [
        (
            "toy.toml:14:1: 'trunk.l.0.norm.weight' [5] -> 'l.0.norm.weight' [4]: axis0 is 5 and 4, in "
            "'trunk.l.{i}.norm.{w:weight/gamma,bias/beta} = l.{i}.norm.{w:weight,bias}' "
            "(and 2 more like it; config.json has hidden = 4) [shape-mismatch]"
        )
    ]


def test_layers_that_the_config_and_the_checkpoint_count_differently() -> None:
    fewer = {name: shape for name, shape in checkpoint().items() if ".2." not in name}
    faults = refused(fewer)
    assert len(faults) == 2
    assert faults[0] == (
        "toy.toml:13:1: 'trunk.l.2.{p:q,k,v}.weight' -> 'l.2.qkv' [12, 4]: the checkpoint does not have it "
        "(config.json has layers = 3, and the checkpoint has 2) [no-source]"
    )
    more = {name: shape for name, shape in target().items() if ".2." not in name}
    faults = refused(headers(checkpoint(), {**CONFIG, "layers": 2, "segments": 2}), more)  # the same number by chance
    assert faults[0] == (
        "toy.toml:13:1: 'trunk.l.2.q.weight' and 2 more like it [4, 4] -> 'l.2.qkv': the module does not have it "
        "(config.json has layers = 2, and the checkpoint has 3) [no-target]"
    )


def test_a_tensor_with_another_number_of_axes() -> None:
    assert refused(checkpoint(trunk__emb__weight=(7, 4, 1)))[0].startswith(
        "toy.toml:12:1: 'trunk.emb.weight' [7, 4, 1] -> 'emb.weight' [7, 4]: "
        "'trunk.emb.weight [v e]' has 2 axes, and the tensor 3, in "
    )
    assert refused(checkpoint(trunk__l__0__norm__weight=(4, 1)))[0].startswith(
        "toy.toml:14:1: 'trunk.l.0.norm.weight' [4, 1] -> 'l.0.norm.weight' [4]: "
        "the tensors have different numbers of axes, in "
    )


def test_members_of_different_shapes() -> None:
    assert refused(checkpoint(trunk__l__0__k__weight=(3, 4)))[0].startswith(
        "toy.toml:13:1: 'trunk.l.0.q.weight' [4, 4] (one of 3) -> 'l.0.qkv' [12, 4]: "
        "'trunk.l.0.k.weight' has another shape, [3, 4], in "
    )


GQA = """
[tensors]
"l.{i}.q [(h s d) e]" = "l.{i}.q [(h d s) e]"
"l.{i}.k [(%s s d) e]" = "l.{i}.k [(%s d s) e]"
[sizes]
h = "heads"
s = 2
"""
GROUPED: dict[str, Shape] = {"l.0.q": (32, 5), "l.0.k": (8, 5)}


def test_a_grouped_query_key_permuted_with_the_wrong_number_of_heads() -> None:
    right = GQA % ("g", "g") + 'g = "kv_heads"\n'
    plan(headers(GROUPED, {"heads": 4, "kv_heads": 1}), GROUPED, right)
    (fault,) = refused(headers(GROUPED, {"heads": 4}), GROUPED, GQA % ("h", "h"))
    assert fault == (
        "toy.toml:4:1: 'l.0.k' [8, 5] -> 'l.0.k' [8, 5]: d comes out as 1 here and as 4 at toy.toml:3:1, in "
        "'l.{i}.k [(h s d) e] = l.{i}.k [(h d s) e]' (a part of an axis has one size in the whole table: "
        "use another index, or give the sizes in [sizes]) [size-conflict]"
    )


def test_a_key_whose_heads_do_not_divide() -> None:
    (fault,) = refused(
        headers({**GROUPED, "l.0.k": (6, 5)}, {"heads": 4}), {**GROUPED, "l.0.k": (6, 5)}, GQA % ("h", "h")
    )
    assert "'l.0.k' [6, 5] -> 'l.0.k' [6, 5]: 6 cannot be divided by 8 in (h s d), in " in fault
    assert fault.endswith("([sizes] gives h = 4; [sizes] gives s = 2) [size-conflict]")


def test_a_size_that_follows_from_nothing() -> None:
    table = '[tensors]\n"a.{p:q,k} [(h d) e]" = "b [(h p d) e]"\n'
    (fault,) = refused(headers({"a.q": (6, 2), "a.k": (6, 2)}), {"b": (12, 2)}, table)
    assert fault == (
        "toy.toml:2:1: 'a.q' [6, 2] (one of 2) -> 'b' [12, 2]: the size of d, h follows from no shape, in "
        "'a.{p:q,k} [(h d) e] = b [(h p d) e]' (give it in [sizes]: d = \"...\", "
        "or, where h has the size of d, write it d') [size-unknown]"
    )


def test_a_size_that_contradicts_the_names() -> None:
    table = '[tensors]\n"q [(h d) e]" = "heads.{h} [d e]"\n[sizes]\nh = "heads"\n'
    (fault,) = refused(headers({"q": (6, 2)}, {"heads": 2}), {f"heads.{h}": (2, 2) for h in range(3)}, table)
    assert "h is 2 in [sizes] and 3 in the names, in " in fault
    assert fault.endswith("([sizes] gives h = 2) [size-conflict]")
