"""Tensors under several names: table, module and checkpoint agree on them."""

from __future__ import annotations

import torch
from torch import nn

from tests.plan.shapes import Headers, Shape, headers, module, put
from tests.plan.toy import CONFIG, TABLE, checkpoint, plan, refused, target


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


def test_one_tensor_in_every_layer_is_one_line() -> None:
    into = tied()
    for layer in range(3):
        put(into, f"l.{layer}.words", into.get_parameter("emb.weight"))
    table = TABLE.replace("[fresh]", '"l.{i}.words" = "emb.weight"\n[fresh]')
    assert plan(None, into, table).tied == {
        "decoder.weight": "emb.weight", **{f"l.{layer}.words": "emb.weight" for layer in range(3)},
    }  # fmt: skip


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
    assert [str(warning) for warning in plan(shared, tied(shared=False), table).warnings] == [
        (
            "dec.weight: 'dec.weight' and 'trunk.emb.weight' are one tensor in the checkpoint, 'decoder.weight' and "
            "'emb.weight' two in the module "
            "(they start equal and part in training; share them in the module to keep them one) [tie-mismatch]"
        )
    ]
    assert plan(source, tied(shared=False), table).warnings == ()


def test_a_buffer_that_layers_share_is_the_module_s_own_matter() -> None:
    """One build may share a cached mask where another one does not; the module computes it either way."""
    into = tied()
    mask = torch.ones(4, 4)
    for layer in range(3):
        into.get_submodule(f"l.{layer}").register_buffer("mask", mask)
    assert any("'l.1.mask' is the same tensor as 'l.0.mask'" in one for one in refused(None, into))
    assert plan(None, into, TABLE.replace("[fresh]", '[fresh]\n"l.{i}.mask" = "computed"')).tied == {
        "decoder.weight": "emb.weight"
    }
