"""``check`` finds every fault before a weight is read, and all of them at once."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from porting.errors import Code
from porting.notation.table import parse_table
from porting.plan.check import check
from porting.plan.plan import Plan, PlanError
from tests.plan.shapes import Headers, Info, Shape, headers, module, put

Shapes = Mapping[str, Shape]

LAYERS = 3
TABLE = """\
[mapping]
name = "toy"
prefix = "trunk."
[config]
vocab = "vocab_size"
hidden = "hidden_size"
layers = "num_layers"
[require]
act = ["gelu", "relu"]
causal = [false]
[tensors]
"trunk.emb.weight [v e]" = "emb.weight [v e]"
"trunk.l.{i}.{p:q,k,v}.weight [o e]" = "l.{i}.qkv [(p o) e]"
"trunk.l.{i}.norm.{w:weight/gamma,bias/beta}" = "l.{i}.norm.{w:weight,bias}"
[optional]
"head.weight [a b]" = "head.weight [b a]"
[drop]
"trunk.ids" = "equals arange"
"head.copy" = "equals trunk.emb.weight"
"old.{*rest}" = "nobody needs it"
[ties]
"decoder.weight" = "emb.weight"
[fresh]
"head.weight" = "to be trained"
"""
CONFIG = {"vocab": 7, "hidden": 4, "layers": LAYERS, "act": "gelu"}


def checkpoint(**changes: Shape | None) -> dict[str, Shape]:
    """A checkpoint that fits; ``changes`` by name with ``__`` for dots, None to leave a tensor out."""
    shapes: dict[str, Shape] = {"trunk.emb.weight": (7, 4)}
    for i in range(LAYERS):
        shapes |= {f"trunk.l.{i}.{p}.weight": (4, 4) for p in "qkv"}
        shapes |= {f"trunk.l.{i}.norm.{w}": (4,) for w in ("weight", "bias")}
    shapes["head.weight"] = (4, 5)
    return changed(shapes, changes)


def target(**changes: Shape | None) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"emb.weight": (7, 4)}
    for i in range(LAYERS):
        shapes |= {f"l.{i}.qkv": (12, 4), f"l.{i}.norm.weight": (4,), f"l.{i}.norm.bias": (4,)}
    shapes["head.weight"] = (5, 4)
    return changed(shapes, changes)


def changed(shapes: dict[str, Shape], changes: Mapping[str, Shape | None]) -> dict[str, Shape]:
    for name, shape in changes.items():
        if shape is None:
            del shapes[name.replace("__", ".")]
        else:
            shapes[name.replace("__", ".")] = shape
    return shapes


def plan(
    source: Headers | Shapes | None = None,
    into: nn.Module | Shapes | None = None,
    table: str = TABLE,
    *,
    dtype: torch.dtype | None = None,
    fresh: bool = False,
) -> Plan:
    source = source if isinstance(source, Headers) else headers(checkpoint() if source is None else source, CONFIG)
    into = into if isinstance(into, nn.Module) else module(target() if into is None else into)
    return check(parse_table(table, where="toy.toml"), source, into, dtype=dtype, fresh=fresh)


def refused(
    source: Headers | Shapes | None = None,
    into: nn.Module | Shapes | None = None,
    table: str = TABLE,
    *,
    dtype: torch.dtype | None = None,
    fresh: bool = False,
) -> list[str]:
    """The faults of what does not fit."""
    with pytest.raises(PlanError) as caught:
        plan(source, into, table, dtype=dtype, fresh=fresh)
    return [str(fault) for fault in caught.value.faults]


# ------------------------------------------------------------------------------------------------------- what fits


def test_what_fits_is_planned() -> None:
    made = plan()
    assert {name for step in made.steps for name in step.sources} == set(checkpoint())
    assert {name for step in made.steps for name in step.targets} == set(target())
    assert (made.left_out, made.fresh, made.tied, made.warnings) == ((), (), {}, ())
    assert made.summary == "17 of 17 tensors fill 11 of 11 places"


@pytest.mark.parametrize("prefix", ["", "trunk."])
def test_the_prefix_may_be_there_or_not(prefix: str) -> None:
    shapes = {prefix + name.removeprefix("trunk."): shape for name, shape in checkpoint(head__weight=None).items()}
    made = plan(shapes, target(head__weight=None))
    assert {name for step in made.steps for name in step.sources} == set(shapes)


def test_what_is_dropped_is_listed_with_its_reason() -> None:
    made = plan(checkpoint(trunk__ids=(1, 9), head__copy=(7, 4), old__a__b=(3,)))
    assert [(one.name, one.reason, one.equals) for one in made.left_out] == [
        ("trunk.ids", "equals arange", "arange"),
        ("head.copy", "equals trunk.emb.weight", "trunk.emb.weight"),
        ("old.a.b", "nobody needs it", ""),
    ]
    assert made.summary == "17 of 20 tensors fill 11 of 11 places, 3 left out"


# ------------------------------------------------------ 1. every source tensor is read by one rule, or dropped


def test_a_tensor_that_no_rule_reads_is_told_with_its_shape_and_what_to_do() -> None:
    assert refused(checkpoint(trunk__extra=(3, 2))) == [
        (
            "toy.toml: 'trunk.extra' [3, 2] of the checkpoint: no rule reads it "
            "(map it in [tensors], or list it in [drop] with a reason) [unread-tensor]"
        )
    ]


def test_what_a_module_lacks_must_be_dropped() -> None:
    assert refused(None, target(head__weight=None)) == [
        (
            "toy.toml:16:1: 'head.weight' [4, 5] -> 'head.weight': the module does not have it "
            "(list it in [drop] with a reason if the module has no such part) [no-target]"
        )
    ]
    made = plan(None, target(head__weight=None), TABLE.replace('"old.{*rest}"', '"{*rest}"'))
    assert [one.name for one in made.left_out] == ["head.weight"]


def test_twelve_layers_that_fail_alike_are_one_line() -> None:
    source = checkpoint(**{f"trunk__l__{i}__mlp__weight": (4, 4) for i in range(LAYERS)})
    assert refused(source) == [
        (
            "toy.toml: 'trunk.l.0.mlp.weight' and 2 more like it [4, 4] of the checkpoint: no rule reads it "
            "(map it in [tensors], or list it in [drop] with a reason) [unread-tensor]"
        )
    ]


def test_two_rules_that_read_one_tensor() -> None:
    table = TABLE.replace("[optional]", '"trunk.l.{i}.q.{*rest}" = "z.{i}.{*rest}"\n[optional]')
    assert refused(None, None, table) == [
        (
            "trunk.l.0.q.weight: read by 2 rules: 'trunk.l.{i}.{p:q,k,v}.weight [o e]' at toy.toml:13:1 and "
            "'trunk.l.{i}.q.{*rest}' at toy.toml:15:1 "
            "(and 2 more like it; make one pattern narrower, or take one rule away) [read-twice]"
        ),
        (
            "toy.toml:15:1: 'trunk.l.{i}.q.{*rest} = z.{i}.{*rest}' matches nothing in the checkpoint and nothing in "
            "the module (take it away, or move it to [optional] if not every checkpoint has it) [rule-matches-nothing]"
        ),
    ]


def test_gamma_and_weight_both_present() -> None:
    assert refused(checkpoint(trunk__l__1__norm__gamma=(4,))) == [
        (
            "toy.toml:14:1: 'trunk.l.1.norm.weight' and 'trunk.l.1.norm.gamma' are two spellings of one tensor of "
            "'trunk.l.{i}.norm.{w:weight/gamma,bias/beta}' "
            "(keep one of them in the checkpoint, or map the other by a rule of its own) [spelled-twice]"
        )
    ]


def test_a_tensor_with_and_without_the_prefix() -> None:
    (fault,) = refused(checkpoint(emb__weight=(7, 4)))
    assert "'trunk.emb.weight' and 'emb.weight' are two spellings of one tensor" in fault


def test_a_drop_whose_counterpart_is_missing_or_cannot_be_equal() -> None:
    table = TABLE.replace('"equals trunk.emb.weight"', '"equals trunk.embed.weight"')
    assert refused(checkpoint(head__copy=(7, 4)), None, table) == [
        (
            "head.copy: 'head.copy' is dropped because it equals 'trunk.embed.weight', which the checkpoint does not "
            "have (did you mean 'trunk.emb.weight'?) [no-source]"
        )
    ]
    assert refused(checkpoint(head__copy=(4, 7))) == [
        (
            "head.copy: 'head.copy' [4, 7] float32 is dropped because it equals 'trunk.emb.weight', and that is "
            "[7, 4] float32 (map it in [tensors] instead) [drop-differs]"
        )
    ]
    source = headers(checkpoint(), CONFIG)
    tensors = {**source.tensors, "head.copy": Info(shape=(7, 4), dtype=torch.float16)}
    (fault,) = refused(Headers(tensors=tensors, config=CONFIG))
    assert "[7, 4] float16 is dropped because it equals 'trunk.emb.weight', and that is [7, 4] float32" in fault


# ------------------------------------------------- 2. every target is written once, or listed in [ties] or [fresh]


def test_a_parameter_that_nothing_writes() -> None:
    assert refused(None, target(l__0__gate=(4, 4), l__1__gate=(4, 4))) == [
        (
            "toy.toml: 'l.0.gate' and 1 more like it [4, 4] of the module: nothing writes it "
            "(map it in [tensors], or list it in [ties] or [fresh]) [unwritten-parameter]"
        )
    ]


def test_a_persistent_buffer_counts_and_another_does_not() -> None:
    into = module(target())
    put(into, "l.0.steps", torch.zeros(2))
    into.register_buffer("cache", torch.zeros(2), persistent=False)
    (fault,) = refused(None, into)
    assert fault.startswith("toy.toml: 'l.0.steps' [2] of the module: nothing writes it")


def test_a_missing_source_is_told_with_the_nearest_name() -> None:
    source = checkpoint(trunk__l__1__norm__bias=None, trunk__l__1__norm__bais=(4,))
    assert refused(source) == [
        (
            "toy.toml: 'trunk.l.1.norm.bais' [4] of the checkpoint: no rule reads it "
            "(did you mean 'trunk.l.1.norm.bias'?) [unread-tensor]"
        ),
        (
            "toy.toml:14:1: 'trunk.l.1.norm.bias' -> 'l.1.norm.bias' [4]: the checkpoint does not have it "
            "(did you mean 'trunk.l.1.norm.bais'?) [no-source]"
        ),
    ]


def test_a_missing_head_is_fresh_only_by_leave() -> None:
    source = checkpoint(head__weight=None)
    assert refused(source) == [
        (
            "toy.toml: the checkpoint has nothing for 'head.weight' "
            "(fresh=True (--fresh) keeps the module's own initialisation there) [fresh-not-allowed]"
        )
    ]
    made = plan(source, fresh=True)
    assert made.fresh == ("head.weight",)
    assert made.summary == "16 of 16 tensors fill 10 of 11 places, 1 new"


def test_leave_to_be_fresh_covers_only_what_the_table_lists() -> None:
    (fault,) = refused(checkpoint(trunk__emb__weight=None), fresh=True)
    assert fault.startswith("toy.toml:12:1: 'trunk.emb.weight' -> 'emb.weight' [7, 4]: the checkpoint does not have it")


def test_two_keys_renamed_to_one_target() -> None:
    """Two rules may not have one target, and two names that one rule reads as the same are told too."""
    table = '[tensors]\n"a.{i}" = "x.{i}"\n"b" = "x.0"\n'
    faults = refused(headers({"a.0": (2,), "b": (2,)}), {"x.0": (2,)}, table)
    assert faults[0] == (
        "x.0: written by 2 rules: 'x.{i}' at toy.toml:2:1 and 'x.0' at toy.toml:3:1 "
        "(make one pattern narrower, or take one rule away) [written-twice]"
    )


# ------------------------------------------- 3. indices are conserved, shapes agree, no gap in a layer's numbers


def test_a_rule_that_matches_nothing() -> None:
    table = TABLE.replace("[optional]", '"trunk.embb.weight" = "embb.weight"\n[optional]')
    (fault,) = refused(None, None, table)
    assert fault == (
        "toy.toml:15:1: 'trunk.embb.weight = embb.weight' matches nothing in the checkpoint and nothing in the module "
        "(take it away, or move it to [optional] if not every checkpoint has it) [rule-matches-nothing]"
    )


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
    faults = refused(headers(checkpoint(), {**CONFIG, "layers": 2}), more)
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
        "'a.{p:q,k} [(h d) e] = b [(h p d) e]' (give it in [sizes]: d = \"...\") [size-unknown]"
    )


def test_a_size_that_contradicts_the_names() -> None:
    table = '[tensors]\n"q [(h d) e]" = "heads.{h} [d e]"\n[sizes]\nh = "heads"\n'
    (fault,) = refused(headers({"q": (6, 2)}, {"heads": 2}), {f"heads.{h}": (2, 2) for h in range(3)}, table)
    assert "h is 2 in [sizes] and 3 in the names, in " in fault
    assert fault.endswith("([sizes] gives h = 2) [size-conflict]")


# -------------------------------------------------------------------------------------------------------- 4. ties


def tied(*, shared: bool = True, **changes: Shape | None) -> nn.Module:
    into = module(target(**changes))
    weight = into.get_parameter("emb.weight")
    put(into, "decoder.weight", weight if shared else nn.Parameter(torch.empty(7, 4, device="meta")))
    return into


def test_a_declared_tie_is_not_written_twice() -> None:
    made = plan(None, tied())
    assert made.tied == {"decoder.weight": "emb.weight"}
    assert made.summary == "17 of 17 tensors fill 11 of 12 places, 1 tied"


def test_a_tie_of_the_table_that_the_module_does_not_have() -> None:
    assert refused(None, tied(shared=False)) == [
        (
            "toy.toml:22:1: 'decoder.weight' and 'emb.weight' are tied in the table and two tensors in the module "
            "(share them in the module, or write 'decoder.weight' by a rule) [tie-mismatch]"
        )
    ]


def test_a_tie_of_the_module_that_the_table_does_not_declare() -> None:
    table = TABLE.replace('"decoder.weight" = "emb.weight"', "")
    assert refused(None, tied(), table) == [
        (
            "toy.toml: 'decoder.weight' is the same tensor as 'emb.weight' in the module, and the table does not say "
            'so (add to [ties]: "decoder.weight" = "emb.weight") [tie-mismatch]'
        )
    ]


def test_a_tie_to_something_that_is_not_there() -> None:
    table = TABLE.replace('"decoder.weight" = "emb.weight"', '"decoder.weight" = "embedding.weight"')
    assert refused(None, tied(), table) == [
        "toy.toml:22:1: 'decoder.weight' is tied to 'embedding.weight', which the module does not have [tie-mismatch]"
    ]


def test_a_tie_that_is_also_written() -> None:
    table = TABLE.replace("[optional]", '[optional]\n"dec.weight" = "decoder.weight"')
    assert refused(checkpoint(dec__weight=(7, 4)), tied(), table) == [
        (
            "toy.toml:23:1: 'decoder.weight' is tied to 'emb.weight' and written by a rule as well "
            "(take the rule or the tie away) [written-twice]"
        )
    ]


def test_one_tensor_of_the_module_that_two_rules_write() -> None:
    """Two tensors that may differ in value are never tied silently."""
    table = TABLE.replace("[optional]", '[optional]\n"dec.weight" = "decoder.weight"')
    table = table.replace('"decoder.weight" = "emb.weight"', "")
    assert refused(checkpoint(dec__weight=(7, 4)), tied(), table) == [
        (
            "toy.toml: 'emb.weight' and 'decoder.weight' are one tensor in the module, and both are written "
            "(list one in [ties], and drop its source as equal to the other's) [tie-mismatch]"
        )
    ]


def test_one_tensor_of_the_checkpoint_that_the_module_has_twice_is_a_warning() -> None:
    source = headers(checkpoint(dec__weight=(7, 4)), CONFIG)
    shared = Headers(tensors=source.tensors, config=CONFIG, shared=(frozenset({"trunk.emb.weight", "dec.weight"}),))
    table = TABLE.replace("[optional]", '[optional]\n"dec.weight" = "decoder.weight"')
    table = table.replace('"decoder.weight" = "emb.weight"', "")
    assert [str(one) for one in plan(shared, tied(shared=False), table).warnings] == [
        (
            "dec.weight: 'dec.weight' and 'trunk.emb.weight' are one tensor in the checkpoint, 'decoder.weight' and "
            "'emb.weight' two in the module "
            "(they start equal and part in training; share them in the module to keep them one) [tie-mismatch]"
        )
    ]
    assert plan(source, tied(shared=False), table).warnings == ()


# ------------------------------------------------------------------------------------------------------ 5. dtypes


def with_dtype(dtype: torch.dtype, *names: str) -> Headers:
    tensors = dict(headers(checkpoint(), CONFIG).tensors)
    for name in names or tuple(tensors):
        tensors[name] = Info(shape=tensors[name].shape, dtype=dtype)
    return Headers(tensors=tensors, config=CONFIG)


def test_an_integer_is_never_cast_to_a_float() -> None:
    for dtype in (None, torch.float32):
        assert refused(with_dtype(torch.int8, "trunk.emb.weight"), dtype=dtype) == [
            (
                "toy.toml:12:1: 'trunk.emb.weight' -> 'emb.weight': int8 would become float32; integers and floats are "
                "never cast into each other (a quantised tensor needs its scales; a mask or a table of positions is no "
                "weight: drop it) [dtype-change]"
            )
        ]


def test_a_float_is_never_cast_to_an_integer() -> None:
    into = module(target(l__0__norm__weight=None))
    put(into, "l.0.norm.weight", torch.zeros(4, dtype=torch.int64, device="meta"))
    (fault,) = refused(None, into)
    assert "'trunk.l.0.norm.weight' -> 'l.0.norm.weight': float32 would become int64; integers and floats" in fault


def test_an_integer_keeps_its_width() -> None:
    into = module(target(l__0__norm__weight=None))
    put(into, "l.0.norm.weight", torch.zeros(4, dtype=torch.int64, device="meta"))
    (fault,) = refused(with_dtype(torch.int32, "trunk.l.0.norm.weight"), into)
    assert "'trunk.l.0.norm.weight' -> 'l.0.norm.weight': the checkpoint has int32, the module int64" in fault


def test_a_module_on_the_meta_device_takes_the_checkpoints_dtype() -> None:
    plan(with_dtype(torch.bfloat16))


def test_a_module_with_values_keeps_its_dtype_unless_a_cast_is_declared() -> None:
    into = module(target(), device="cpu")
    faults = refused(with_dtype(torch.bfloat16), into)
    assert faults[0] == (
        "toy.toml:12:1: 'trunk.emb.weight' -> 'emb.weight': the checkpoint has bfloat16, the module float32 "
        "(declare the cast with dtype=float32 (--dtype), or cast the module first) [dtype-change]"
    )
    assert faults[1].startswith("toy.toml:13:1: 'trunk.l.0.q.weight' -> 'l.0.qkv': ")
    assert "(and 2 more like it; declare" in faults[1]
    assert plan(with_dtype(torch.bfloat16), into, dtype=torch.float32).dtype == torch.float32


def test_sources_of_two_dtypes_need_a_declared_one() -> None:
    mixed = with_dtype(torch.float16, "trunk.l.0.k.weight")
    assert refused(mixed) == [
        (
            "toy.toml:13:1: 'trunk.l.0.q.weight' -> 'l.0.qkv': the sources are float16 and float32, and one tensor has "
            "one dtype (say which: dtype= (--dtype)) [dtype-change]"
        )
    ]
    plan(mixed, dtype=torch.float32)


# ----------------------------------------------------------------------------------------- config, scale, fill


def test_a_config_that_the_table_cannot_represent() -> None:
    assert refused(headers(checkpoint(), {**CONFIG, "act": "silu", "causal": True})) == [
        (
            "toy.toml: config.json has act = 'silu', 'toy' can represent 'gelu', 'relu' "
            "(another table or another module is needed: porting tables lists what there is) [config-refused]"
        ),
        (
            "toy.toml: config.json has causal = True, 'toy' can represent False "
            "(another table or another module is needed: porting tables lists what there is) [config-refused]"
        ),
    ]


@pytest.mark.parametrize("value", [0, None, "false", 0.0])
def test_a_required_value_has_its_type(value: object) -> None:
    (fault,) = refused(headers(checkpoint(), {**CONFIG, "causal": value}))
    assert f"config.json has causal = {value!r}, 'toy' can represent False" in fault


def test_a_size_that_the_config_does_not_give() -> None:
    table = TABLE.replace("[require]", '[sizes]\no = "hiden // 1"\n[require]')
    assert refused(None, None, table)[0] == (
        "toy.toml: [sizes] o = 'hiden // 1': the config has no 'hiden' (did you mean 'hidden'?) [bad-expression]"
    )


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        ('"n_embd ** -0.5"', "scale = 'n_embd ** -0.5': the config has no 'n_embd'"),
        ('"hidden - 4"', "scale = 'hidden - 4' is 0, and the inverse divides by it"),
        ('"1 / (hidden - 4)"', "scale = '1 / (hidden - 4)': 1 and 0: division by zero"),
        ("0", "scale = '0' is 0, and the inverse divides by it"),
    ],
)
def test_a_scale_must_have_a_value_and_an_inverse(scale: str, message: str) -> None:
    table = f'[[rule]]\nsource = "a"\ntarget = "b"\nscale = {scale}\n'
    (fault,) = refused(headers({"a": (2,)}, CONFIG), {"b": (2,)}, table)
    assert f"toy.toml:2:1: {message}" in fault
    assert fault.endswith("[bad-expression]")


def test_the_scale_of_a_step_is_known_to_the_plan() -> None:
    table = '[[rule]]\nsource = "a"\ntarget = "b"\nscale = "hidden ** -0.5"\n[tensors]\n"c" = "d"\n'
    made = plan(headers({"a": (2,), "c": (2,)}, CONFIG), {"b": (2,), "d": (2,)}, table)
    assert {step.targets[0]: made.scale(step) for step in made.steps} == {"b": 0.5, "d": None}


def test_a_part_of_the_module_that_no_source_fills_needs_a_fill() -> None:
    table = '[[rule]]\nsource = "a [t]"\ntarget = "b [(_2|t)]"\n'
    (fault,) = refused(headers({"a": (3,)}), {"b": (5,)}, table)
    assert fault == (
        "toy.toml:2:1: 'a [t] = b [(_2|t)]' has a part on the right that no source fills "
        "(write it as a [[rule]] with fill = 0.0, or another value) [irreversible]"
    )
    plan(headers({"a": (3,)}), {"b": (5,)}, table + "fill = 0.0\n")


# ---------------------------------------------------------------------------------------------------- all at once


def test_all_faults_are_told_at_once_and_no_weight_is_read() -> None:
    source = checkpoint(
        trunk__emb__weight=(6, 4), trunk__extra=(1,), trunk__l__1__k__weight=None, trunk__l__0__norm__gamma=(4,)
    )
    into = target(l__9__x=(1,))
    with pytest.raises(PlanError) as caught:
        plan(headers(source, {**CONFIG, "act": "silu"}), into)
    assert {fault.code for fault in caught.value.faults} == {
        Code.CONFIG_REFUSED,
        Code.SHAPE_MISMATCH,
        Code.UNREAD_TENSOR,
        Code.MISSING_MEMBER,
        Code.SPELLED_TWICE,
        Code.UNWRITTEN_PARAMETER,
    }
    assert all("\n" not in str(fault) for fault in caught.value.faults)


def test_an_empty_checkpoint_and_an_empty_module() -> None:
    assert {fault.rpartition(" ")[2] for fault in refused(headers({}, CONFIG))} == {
        "[no-source]",
        "[fresh-not-allowed]",
    }
    assert {fault.rpartition(" ")[2] for fault in refused(None, {})} == {"[no-target]"}


def test_tensors_without_axes_or_without_elements() -> None:
    table = '[tensors]\n"a" = "b"\n"c [x y]" = "d [y x]"\n"e []" = "f []"\n'
    made = plan(headers({"a": (), "c": (0, 3), "e": ()}), {"b": (), "d": (3, 0), "f": ()}, table)
    assert [copy.numel for step in made.steps for copy in step.copies] == [1, 0, 1]
