"""An index in several segments of one concatenation, segments of equal size, and sizes that differ per layer."""

from __future__ import annotations

import pytest
import torch
from einops import rearrange

from porting.notation.table import parse_table
from porting.plan.align import align
from porting.plan.config import sizes
from porting.plan.inferred_source import imagine
from tests.plan.carrying import drawn, port, same
from tests.plan.shapes import Shape, infos


def faults(
    table: str, sources: dict[str, Shape], targets: dict[str, Shape], config: dict[str, object] | None = None
) -> list[str]:
    parsed = parse_table(f"[tensors]\n{table}")
    known, _ = sizes(parsed, config or {})
    return [str(fault) for fault in align(parsed.rules, sources, targets, sizes=known).faults]


def test_grouped_queries_are_regrouped_into_one_concatenation() -> None:
    table = '"a [(g (m|1|1) d) e]" = "b [(g m d|g d|g d) e]"\n[sizes]\ng = 2\nm = 3\n'
    made = port(table, {"a": (40, 5)}, {"b": (40, 5)})
    tensors = drawn(made.sources)
    parts = rearrange(tensors["a"], "(g p d) e -> p g d e", g=2, p=5)
    queries = rearrange(parts[:3], "m g d e -> (g m d) e")
    expected = torch.cat([queries, parts[3].reshape(-1, 5), parts[4].reshape(-1, 5)])
    found = made.forward(tensors)
    same(found, {"b": expected})
    same(made.backward(found), tensors)


def test_a_gated_delta_net_is_regrouped_by_key_head() -> None:
    """Query, key, value and gate of each key head beside each other, into one after the other."""
    table = (
        "\"in_proj [(k (d|d'|r v|r' v) ) e]\" = \"qkvz [(k d|k d'|k r v|k r' v) e]\"\n[sizes]\nk = 2\nd = 3\nr = 2\n"
    )
    made = port(table, {"in_proj": (2 * (3 + 3 + 8 + 8), 5)}, {"qkvz": (44, 5)})
    tensors = drawn(made.sources)
    query, key, value, gate = torch.split(rearrange(tensors["in_proj"], "(k x) e -> k x e", k=2), [3, 3, 8, 8], 1)
    expected = torch.cat([part.reshape(-1, 5) for part in (query, key, value, gate)])
    found = made.forward(tensors)
    same(found, {"qkvz": expected})
    same(made.backward(found), tensors)


def test_halves_change_places_without_a_number() -> None:
    made = port('"a [(f|f\') e]" = "b [(f\'|f) e]"', {"a": (6, 2)}, {"b": (6, 2)})
    tensors = drawn(made.sources)
    found = made.forward(tensors)
    same(found, {"b": torch.cat([tensors["a"][3:], tensors["a"][:3]])})
    same(made.backward(found), tensors)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('"a [(f|f\') e]" = "b [(f\'|f) e]"', "no size of f makes (f|f') 7 long"),
        ('"a [(f|g) e]" = "b [(g|f) e]"', "where g has the size of f, write it f'"),
    ],
)
def test_halves_that_cannot_be_told_are_refused(table: str, message: str) -> None:
    (fault,) = faults(table, {"a": (7, 2)}, {"b": (7, 2)})
    assert message in fault


def test_equal_parts_of_a_source_need_no_module() -> None:
    """As for ``convert --derive`` and its reverse: one side is imagined from the other."""
    table = parse_table('[[rule]]\nsource = ["b [f e]", "c [f\' e]"]\ntarget = "a [(f|f\') e]"\n')
    assert imagine(table, infos({"a": (6, 2)}), {}) == {"b": (3, 2), "c": (3, 2)}


BY_LAYER = '"l.{i}.qkv [(p h d) e]" = "m.{i}.qkv [(h p d) e]"\n[sizes]\nh = "text.heads[i]"\np = 3\n'
LAYERS: dict[str, Shape] = {"l.0.qkv": (24, 5), "l.1.qkv": (36, 5)}
OURS: dict[str, Shape] = {"m.0.qkv": (24, 5), "m.1.qkv": (36, 5)}


def test_a_list_of_the_config_has_a_size_for_each_layer() -> None:
    made = port(BY_LAYER, LAYERS, OURS, {"text": {"heads": [2, 3]}})
    tensors = drawn(made.sources)
    found = made.forward(tensors)
    same(
        found,
        {
            f"m.{i}.qkv": rearrange(tensors[f"l.{i}.qkv"], "(p h d) e -> (h p d) e", p=3, h=heads)
            for i, heads in enumerate((2, 3))
        },
    )
    same(made.backward(found), tensors)


def test_layers_of_equal_shapes_may_have_different_heads() -> None:
    """The same rule and the same shapes, so that what was solved for a layer does not hold for the next."""
    table = BY_LAYER + 'd = "dims[i]"\n'
    config: dict[str, object] = {"text": {"heads": [2, 3]}, "dims": [6, 4]}
    equal = port(table, {"l.0.qkv": (36, 5), "l.1.qkv": (36, 5)}, {"m.0.qkv": (36, 5), "m.1.qkv": (36, 5)}, config)
    tensors = drawn(equal.sources)
    found = equal.forward(tensors)
    for i, heads in enumerate((2, 3)):
        expected = rearrange(tensors[f"l.{i}.qkv"], "(p h d) e -> (h p d) e", p=3, h=heads)
        assert torch.equal(found[f"m.{i}.qkv"], expected)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([2], "[sizes]: the config's 'text.heads' has 1 elements, and none of number 1"),
        ([2, 0], "[sizes]: 'text.heads[i]' is 0 for i = 1, expected a positive integer"),
        (3, "[sizes]: the config's 'text.heads' is 3, expected a list"),
    ],
)
def test_a_list_that_does_not_serve_is_refused(heads: object, message: str) -> None:
    assert any(message in fault for fault in faults(BY_LAYER, LAYERS, OURS, {"text": {"heads": heads}}))


def test_the_index_that_chooses_has_to_be_in_every_name() -> None:
    (fault, *_) = faults(
        '"q [(h d) e]" = "q [(d h) e]"\n[sizes]\nh = "heads[i]"\n', {"q": (6, 2)}, {"q": (6, 2)}, {"heads": [2]}
    )
    assert "'heads[i]' needs the index 'i', which is not in every name of the rule" in fault
