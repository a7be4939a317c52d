"""Names find their patterns without trying them all."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from porting.notation.name import Name
from porting.plan import matching
from porting.plan.matching import MOST_SKELETONS, Matcher

PATTERNS = [
    "a.{i}.weight",
    "a.{i}.{w:weight,bias}",
    "a.{2*i}.bias",
    "a1.b{i}.c",
    "a.1.{w:weight,bias}",
    "a.{i}.b{p:1,x1}",
    "b1",
    "{p:a,b,c}.{q:x1,y2}.{i}",
    "{*all}",
    "a.{*rest}",
    "trunk.{*rest}",
    "{i}.weight",
    "many." + ".".join(f"{{p{number}:a,b,c,d,e}}" for number in range(3)),
]


def matcher(patterns: list[str], prefix: str = "") -> Matcher[int]:
    return Matcher(((Name.parse(text), number) for number, text in enumerate(patterns)), prefix)


@given(
    st.one_of(
        st.from_regex(r"\A(a|a1|b|trunk|many|[0-9])(\.(a|b|c|b1|[0-9]{1,3}|weight|bias|x1|y2)){0,3}\Z"),
        st.text(max_size=10),
    )
)
def test_it_finds_what_trying_every_pattern_finds(name: str) -> None:
    found = {match.line: match.bindings for match in matcher(PATTERNS).read(name)}
    tried = {number: Name.parse(text).read(name) for number, text in enumerate(PATTERNS)}
    assert found == {number: bindings for number, bindings in tried.items() if bindings is not None}


def test_a_name_is_matched_with_the_prefix_and_without() -> None:
    made = matcher(["trunk.l.{i}", "head", "trunk.{*rest}"], "trunk.")
    assert [match.line for match in made.read("trunk.l.3")] == [0, 2]
    assert [match.bindings for match in made.read("l.3")] == [{"i": 3}, {"rest": "l.3"}]
    assert [match.line for match in made.read("head")] == [1, 2]
    assert matcher(["l.{i}"], "trunk.").read("trunk.l.3") == []


def test_a_pattern_is_found_once() -> None:
    made = matcher(["{p:a,b/c}.{i}"])
    assert [match.line for match in made.read("c.1")] == [0]


def test_matches_come_in_the_order_of_the_patterns() -> None:
    made = matcher(["{*rest}", "a.{i}", "a.{*rest}"])
    assert [match.line for match in made.read("a.1")] == [0, 1, 2]


def test_a_name_is_tried_against_few_of_many_patterns() -> None:
    made = matcher(
        [*(f"part{number}.{{i}}.weight" for number in range(1000)), *(f"p{n}x.{{*rest}}" for n in range(1000))]
    )
    assert len(list(made._candidates("part7.3.weight"))) == 1
    lettered = matcher([f"{chr(97 + n % 26)}{chr(97 + n // 26)}.{{i}}.weight" for n in range(600)])
    assert len(list(lettered._candidates("ab.3.weight"))) == 1
    rests = matcher([f"{chr(97 + n % 26)}{chr(97 + n // 26)}.{{*rest}}" for n in range(600)])
    assert len(list(rests._candidates("ab.3.weight"))) == 1


def test_a_pattern_that_spells_numbers_out_is_found_by_them() -> None:
    made = matcher([f"t{number}" for number in range(1000)] + [f"{{i}}.t{n}.x{{p:1,2}}" for n in range(1000)])
    assert [match.line for match in made.read("t7")] == [7]
    assert len(list(made._candidates("t7"))) == 1
    assert [(match.line, match.bindings) for match in made.read("3.t7.x2")] == [(1007, {"i": 3, "p": 1})]
    assert len(list(made._candidates("3.t7.x2"))) == 1


def test_a_pattern_of_too_many_spellings_is_found_by_its_beginning() -> None:
    wide = "many." + ".".join(f"{{p{number}:a,b,c,d,e}}" for number in range(3))
    assert MOST_SKELETONS < 5**3
    made = matcher([wide])
    assert [match.bindings for match in made.read("many.a.e.c")] == [{"p0": 0, "p1": 4, "p2": 2}]
    assert list(made._candidates("few.a.e.c")) == []


def test_a_rest_is_read_behind_the_prefix_where_the_name_has_it() -> None:
    found = matcher(["trunk.{*rest}"], "trunk.")
    assert [match.bindings for match in found.read("trunk.a.weight")] == [{"rest": "a.weight"}]
    assert [match.bindings for match in found.read("a.weight")] == [{"rest": "a.weight"}]


def test_a_name_that_no_pattern_can_spell_is_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint may have as many bytes of names as its header has room for, and each is matched several times."""
    passes: list[str] = []

    class Counted:
        def sub(self, by: str, name: str) -> str:
            passes.append("sub")
            return re.sub("[0-9]+", by, name)

        def findall(self, name: str) -> list[str]:
            passes.append("findall")
            return re.findall("[0-9]+", name)

    pattern = Name.parse("layer.{i}.weight")
    matcher = Matcher([(pattern, 1)])
    monkeypatch.setattr(matching, "_DIGITS", Counted())
    assert matcher.read("z" * 3000 + "1") == []
    assert passes == ["sub"]
    passes.clear()
    assert [match.line for match in matcher.read("layer.3.weight")] == [1]
    assert passes == ["sub", "findall"]
    passes.clear()
    rest = Matcher([(Name.parse("{*rest}"), 1)])
    assert len(rest.read("z" * 3000)) == 1
    assert passes == []
