"""Faults that are alike are told once, and the nearest name is near."""

from __future__ import annotations

from porting.errors import Code, Fault, alike
from porting.plan.fault_grouping import MOST_HINTS, Nearest, group_alike


def fault(message: str, where: str = "t.toml:1:1", hint: str = "") -> Fault:
    return Fault(code=Code.NO_SOURCE, message=message, where=where, hint=hint)


def test_faults_that_differ_in_the_numbers_of_their_names_are_one() -> None:
    faults = [fault(f"'l.{i}.w' [4, 4] -> 'm.{i}.w'", hint="do this") for i in range(12)]
    assert [str(one) for one in alike(faults)] == [
        "t.toml:1:1: 'l.0.w' [4, 4] -> 'm.0.w' (and 11 more like it; do this) [no-source]"
    ]


def test_faults_that_differ_in_shape_place_code_or_words_are_not() -> None:
    faults = [
        fault("'l.0.w' [4, 4]"),
        fault("'l.1.w' [4, 5]"),
        fault("'l.2.w' [4, 4]", where="t.toml:2:1"),
        fault("'l2.w' [4, 4]"),
        Fault(code=Code.NO_TARGET, message="'l.0.w' [4, 4]", where="t.toml:1:1"),
    ]
    assert alike(faults) == faults


def test_the_order_of_the_first_ones_is_kept() -> None:
    assert [one.message for one in alike([fault("'a.0'"), fault("'b'"), fault("'a.1'")])] == ["'a.0'", "'b'"]


def test_names_are_grouped_by_what_they_are_but_for_their_numbers() -> None:
    assert group_alike(["l.0.w", "l.0.b", "l.1.w", "3", "7"]) == [["l.0.w", "l.1.w"], ["l.0.b"], ["3", "7"]]


def test_the_nearest_name_has_the_same_numbers_when_there_is_one() -> None:
    names = [f"layer.{i}.attention.weight" for i in range(12)]
    assert Nearest()("layer.7.atention.weight", names) == "did you mean 'layer.7.attention.weight'?"
    assert Nearest()("layer.99.atention.weight", names) == "did you mean 'layer.0.attention.weight'?"
    assert Nearest()("something.else.entirely", names) == ""
    assert Nearest()("x", []) == ""


def test_looking_is_bounded() -> None:
    near = Nearest()
    names = ["word" * 3000 + str(number) for number in range(3)]
    assert all(near("word" * 2999, names) for _ in range(MOST_HINTS))
    assert near("word" * 2999, names) == ""
