"""Every source tensor is read once or dropped; every target is written once, tied or new."""

from __future__ import annotations

import torch

from tests.plan.shapes import Headers, Info, headers, module, put
from tests.plan.toy import CONFIG, LAYERS, TABLE, checkpoint, plan, refused, target


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


def test_a_parameter_that_nothing_writes() -> None:
    assert refused(None, target(l__0__gate=(4, 4), l__1__gate=(4, 4))) == [
        (
            "toy.toml: 'l.0.gate' and 1 more like it [4, 4] of the module: nothing writes it "
            "(map it in [tensors], or list it in [ties], [make] or [fresh]) [unwritten-parameter]"
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
            "(toy.toml:14:1 has 'trunk.l.1.norm.bias': is it this one?) [unread-tensor]"
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
            "(fresh=True keeps the module's own initialisation there) [fresh-not-allowed]"
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
