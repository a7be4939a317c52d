"""The source side, imagined from the module alone."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from porting.errors import Code
from porting.notation.table import parse_table
from porting.plan.align import align
from porting.plan.inferred_source import imagine
from porting.plan.plan import PlanError
from tests.plan.shapes import infos

Shapes = Mapping[str, tuple[int, ...]]


def imagined(table: str, targets: Shapes, sizes: Mapping[str, int] | None = None) -> Shapes:
    """What is imagined, after seeing that it fits the targets without a remainder."""
    parsed = parse_table(table)
    found = imagine(parsed, infos(targets), sizes or {})
    aligned = align(parsed.rules, found, targets, sizes=sizes, prefix=parsed.prefix, target_prefix=parsed.target_prefix)
    assert (aligned.unread, aligned.unwritten, aligned.unplaced, aligned.unsourced, aligned.faults) == ((),) * 5
    assert {name for step in aligned.steps for name in step.sources} == set(found)
    return found


@pytest.mark.parametrize(
    ("rule", "targets", "sizes", "expected"),
    [
        pytest.param('"a.weight" = "b.weight"', {"b.weight": (3, 2)}, {}, {"a.weight": (3, 2)}, id="as it is"),
        pytest.param('"a [i o]" = "b [o i]"', {"b": (3, 2)}, {}, {"a": (2, 3)}, id="transposed"),
        pytest.param(
            '"n.{w:weight/gamma,bias/beta}" = "m.{w:scale,shift}"',
            {"m.scale": (4,), "m.shift": (4,)},
            {},
            {"n.weight": (4,), "n.bias": (4,)},
            id="the first spelling",
        ),
        pytest.param(
            '"l.{i+1}.{p:q,k,v}.weight [o e]" = "l.{i}.qkv [(p o) e]"',
            {"l.0.qkv": (12, 5), "l.1.qkv": (12, 5)},
            {},
            {f"l.{i}.{p}.weight": (4, 5) for i in (1, 2) for p in "qkv"},
            id="an enumerated index out of an axis",
        ),
        pytest.param(
            '"experts.{x}.w [f e]" = "experts [x e f]"',
            {"experts": (3, 5, 7)},
            {},
            {f"experts.{x}.w": (7, 5) for x in range(3)},
            id="a number out of an axis",
        ),
        pytest.param(
            '"{p:q,k}.weight [(h d) e]" = "heads.{h}.{p:a,b} [d e]"',
            {f"heads.{h}.{p}": (3, 5) for h in range(2) for p in "ab"},
            {},
            {"q.weight": (6, 5), "k.weight": (6, 5)},
            id="a number into an axis",
        ),
        pytest.param(
            '[[rule]]\nsource = ["q [(g m d) e]", "k [(g d) e]", "v [(g d) e]"]\ntarget = "qkv [(g (m|1|1) d) e]"',
            {"qkv": (2 * 6 * 3, 5)},
            {"g": 2, "m": 4},
            {"q": (24, 5), "k": (6, 5), "v": (6, 5)},
            id="grouped queries, with the sizes that the config gives",
        ),
        pytest.param('"p [(_2|t) e]" = "q [t e]"', {"q": (5, 3)}, {}, {"p": (7, 3)}, id="rows of a known number"),
        pytest.param('"head.{*rest}" = "top.{*rest}"', {"top.a.b": (2,)}, {}, {"head.a.b": (2,)}, id="the rest"),
    ],
)
def test_the_sources_follow_from_the_targets(
    rule: str, targets: Shapes, sizes: Mapping[str, int], expected: Shapes
) -> None:
    assert imagined(rule if rule.startswith("[[") else f"[tensors]\n{rule}", targets, sizes) == expected


FAMILY = """
[mapping]
prefix = "trunk."
target_prefix = "body."
[tensors]
"trunk.layer.{i}.weight" = "body.layers.{i}.weight"
[optional]
"head.weight [a b]" = "head.weight [b a]"
"""


def test_a_bare_trunk_is_saved_without_the_prefix() -> None:
    assert imagined(FAMILY, {"layers.0.weight": (2, 2)}) == {"layer.0.weight": (2, 2)}


def test_a_table_that_knows_no_name_without_the_prefix_keeps_it() -> None:
    table = FAMILY.partition("[optional]")[0]
    assert imagined(table, {"layers.0.weight": (2, 2)}) == {"trunk.layer.0.weight": (2, 2)}


def test_beside_a_head_the_trunk_keeps_its_prefix() -> None:
    targets = {"body.layers.0.weight": (2, 2), "head.weight": (3, 2)}
    assert imagined(FAMILY, targets) == {"trunk.layer.0.weight": (2, 2), "head.weight": (2, 3)}


def test_the_names_come_in_the_order_of_the_table_and_of_the_numbers() -> None:
    targets = {f"body.layers.{i}.weight": (2, 2) for i in (10, 2, *range(2), *range(3, 10))} | {"head.weight": (3, 2)}
    assert list(imagined(FAMILY, targets)) == [*(f"trunk.layer.{i}.weight" for i in range(11)), "head.weight"]


def test_what_the_module_alone_cannot_say_is_asked_for() -> None:
    table = """
    [tensors]
    "p.{i} [(_pad|t) e]" = "q.{i} [t e]"
    "a.{p:q,k} [(h d) e]" = "b [(h p d) e]"
    [[rule]]
    source = ["pos [t e]", "types [0 e]"]
    target = "sum [t e]"
    fold = true
    """
    targets = {"q.0": (5, 3), "q.1": (5, 3), "b": (12, 3), "sum": (5, 3)}
    with pytest.raises(PlanError) as caught:
        imagine(parse_table(table), infos(targets), {})
    assert [str(fault) for fault in caught.value.faults] == [
        (
            "table:3:5: the size of _pad in 'p.{i} [(_pad|t) e]' cannot be known from the right side alone, in "
            "'p.{i} [(_pad|t) e] = q.{i} [t e]' "
            '(give it in [sizes]: _pad = "...", or pass like= a checkpoint that has it) [size-unknown]'
        ),
        (
            "table:4:5: the size of h, d in 'a.{p:q,k} [(h d) e]' cannot be known from the right side alone, in "
            "'a.{p:q,k} [(h d) e] = b [(h p d) e]' "
            '(give it in [sizes]: h = "...", or pass like= a checkpoint that has it) [size-unknown]'
        ),
        (
            "table:6:5: how many rows the axis 0 of 'types [0 e]' has cannot be known from the right side alone, in "
            "'pos [t e] + types [0 e] = sum [t e]' (pass like= a checkpoint that has it) [size-unknown]"
        ),
    ]


ROWS = """
[sizes]
r = "kinds"
[[rule]]
source = ["pos [t e]", "types [r=1 e]"]
target = "sum [t e]"
fold = true
"""


def test_the_rows_of_a_fold_are_known_by_their_index() -> None:
    table = parse_table(ROWS)
    assert imagine(table, infos({"sum": (5, 3)}), {"r": 4}) == {"pos": (5, 3), "types": (4, 3)}
    with pytest.raises(PlanError, match=r'rows the axis r=1 .*\(give it in \[sizes\]: r = "\.\.\.", or pass like='):
        imagine(table, infos({"sum": (5, 3)}), {})


def test_a_module_that_lacks_a_part_or_has_another_shape_is_no_module_of_the_table() -> None:
    table = '[tensors]\n"qk.weight [(p h d) e]" = "heads.{h}.{p:a,b} [d e]"\n"c [i o]" = "d [o i]"\n'
    targets = {"heads.0.a": (3, 5), "heads.1.a": (3, 5), "heads.0.b": (3, 5), "d": (2, 2, 2)}
    with pytest.raises(PlanError) as caught:
        imagine(parse_table(table), infos(targets), {})
    assert [fault.code for fault in caught.value.faults] == [Code.MISSING_MEMBER, Code.SHAPE_MISMATCH]
    assert "the module lacks 'heads.1.b'" in str(caught.value)
    assert "'d' has the shape [2, 2, 2], 'd [o i]' has 2 axes" in str(caught.value)


def test_a_size_that_contradicts_the_module_names_both() -> None:
    with pytest.raises(PlanError, match=r"'b' \[7\]: 7 cannot be divided by 2 in \(h d\)"):
        imagine(parse_table('[tensors]\n"a [(d h)]" = "b [(h d)]"'), infos({"b": (7,)}), {"h": 2})
