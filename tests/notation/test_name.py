"""Names with placeholders: reading, spelling and everything that is not a name."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from porting.errors import Code
from porting.notation.faults import NotationError
from porting.notation.name import LONGEST, Name, spelled
from porting.notation.rule import Term


def read(pattern: str, name: str) -> Mapping[str, int | str] | None:
    return Name.parse(pattern).read(name)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("pooler.weight", "pooler.weight", {}),
        ("layer.{i}.weight", "layer.0.weight", {"i": 0}),
        ("layer.{i}.weight", "layer.11.weight", {"i": 11}),
        ("{i}.weight", "3.weight", {"i": 3}),
        ("layer.{i+1}.weight", "layer.1.weight", {"i": 0}),
        ("layer.{i-2}.weight", "layer.0.weight", {"i": 2}),
        ("mlp.{2*i}.weight", "mlp.6.weight", {"i": 3}),
        ("mlp.{2*i+1}.weight", "mlp.7.weight", {"i": 3}),
        ("l.{i}.{p:query,key,value}.w", "l.4.value.w", {"i": 4, "p": 2}),
        ("norm.{w:weight/gamma,bias/beta}", "norm.gamma", {"w": 0}),
        ("norm.{w:weight/gamma,bias/beta}", "norm.bias", {"w": 1}),
        ("norm.{w : weight / gamma, bias / beta}", "norm.beta", {"w": 1}),
        ("{p:w,ww}.x", "ww.x", {"p": 1}),
        ("{p:a.b,a}.b", "a.b.b", {"p": 0}),
        ("{p:a.b,a}.b", "a.b", {"p": 1}),
        ("head.{*rest}", "head.dense.0.bias", {"rest": "dense.0.bias"}),
        ("{*all}", "anything at all", {"all": "anything at all"}),
        ("a.{i}.b.{j}.{*rest}", "a.1.b.2.c", {"i": 1, "j": 2, "rest": "c"}),
        ("émile.{i}", "émile.2", {"i": 2}),
        ("a{0x20}b.{i}", "a b.2", {"i": 2}),
        ("{0x7B}{i}{0x7d}{0x20}{*rest}", "{7} all of it", {"i": 7, "rest": "all of it"}),
        ("{p:a,b}{0x2c}{0x2F}c", "b,/c", {"p": 1}),
        ("{0x5b}o{0x5d}{0x20}-{0x3e}{0x20}1", "[o] -> 1", {}),
    ],
)
def test_a_name_is_read_and_spelled_again(pattern: str, name: str, expected: Mapping[str, int | str]) -> None:
    parsed = Name.parse(pattern)
    bindings = parsed.read(name)
    assert bindings == expected
    older = {"norm.gamma": "norm.weight", "norm.beta": "norm.bias"}
    assert parsed.spell(bindings or {}) == older.get(name, name)


@pytest.mark.parametrize("name", ["a b", "{i}", "{0x20}", "a -> 1 [o e]", "\t\u202e\ud800", "{*rest}", "7{p:q,k}/,=#*"])
def test_every_name_has_a_spelling(name: str) -> None:
    pattern = spelled(name)
    assert Name.parse(pattern).read(name) == {}
    assert str(Name.parse(pattern)) == pattern
    assert Term.parse(f"{pattern} [o e]").name == Name.parse(pattern)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("pooler.weight", "pooler.weights"),
        ("pooler.weight", "a.pooler.weight"),
        ("layer.{i}.weight", "layer..weight"),
        ("layer.{i}.weight", "layer.-1.weight"),
        ("layer.{i}.weight", "layer.01.weight"),
        ("layer.{i}.weight", "layer.1234567890.weight"),
        ("layer.{i}.weight", "layer.x.weight"),
        ("layer.{i}.weight", "layer.\u0663.weight"),  # a digit, but not one of ours
        ("layer.{i+1}.weight", "layer.0.weight"),
        ("mlp.{2*i}.weight", "mlp.7.weight"),
        ("mlp.{2*i+1}.weight", "mlp.6.weight"),
        ("{p:query,key}", "value"),
        ("{p:query,key}", ""),
        ("head.{*rest}", "head."),
    ],
)
def test_what_a_pattern_does_not_spell_is_not_read(pattern: str, name: str) -> None:
    assert read(pattern, name) is None


@pytest.mark.parametrize(
    ("text", "code", "message", "offset"),
    [
        ("", Code.BAD_NAME, "a name has 1 to 1000 characters, this one 0", None),
        ("x" * (LONGEST + 1), Code.BAD_NAME, "a name has 1 to 1000 characters, this one 1001", None),
        ("a b", Code.BAD_NAME, "' ' cannot stand in a name", 1),
        ("a\nb", Code.BAD_NAME, r"'\n' cannot stand in a name", 1),
        ("a\x1b[31m", Code.BAD_NAME, r"'\x1b' cannot stand in a name", 1),
        ("a.{i", Code.BAD_NAME, "'{' cannot stand in a name", 2),
        ("a.}i", Code.BAD_NAME, "'}' cannot stand in a name", 2),
        ("a.{}", Code.BAD_NAME, "{} is not a placeholder", 2),
        ("a.{3}", Code.BAD_NAME, "{3} is not a placeholder", 2),
        ("a.{i}{0x31}", Code.BAD_NAME, "nothing separates {i} from the digit after it", 5),
        ("a.{0x31}{i}", Code.BAD_NAME, "nothing separates {i} from what precedes it", 8),
        ("{*rest}{0x20}", Code.BAD_NAME, "{*rest} must be the last part of a name", 7),
        ("a.{0x110000}", Code.BAD_NAME, "{0x110000} is no character", 2),
        ("a.{0x}", Code.BAD_NAME, "{0x} is not a placeholder", 2),
        ("a.{i*2}", Code.BAD_NAME, "{i*2} is not a placeholder", 2),
        ("a.{0*i}", Code.BAD_NAME, "{0*i} is not a placeholder", 2),
        ("a.{i+}", Code.BAD_NAME, "{i+} is not a placeholder", 2),
        ("a.{_i}", Code.BAD_NAME, "{_i} is not a placeholder", 2),
        ("a.{*}", Code.BAD_NAME, "{*} is not a placeholder", 2),
        ("a.{p:}", Code.BAD_NAME, "{p:} has an empty spelling", 2),
        ("a.{p:q,,k}", Code.BAD_NAME, "{p:q,,k} has an empty spelling", 2),
        ("a.{p:q/,k}", Code.BAD_NAME, "{p:q/,k} has an empty spelling", 2),
        ("a.{p:q,k/q}", Code.BAD_NAME, "{p:q,k/q} has the same spelling twice", 2),
        ("a.{p:q,k k}", Code.BAD_NAME, "' ' cannot stand in a name", 2),
        ("a.{:q,k}", Code.BAD_NAME, "'' is not an index: letters and digits", 2),
        ("a.{i}.{i}", Code.INDEX_TWICE, "index 'i' stands twice in one name", 6),
        ("a.{i}{j}", Code.BAD_NAME, "nothing separates {j} from what precedes it", 5),
        ("a.{p:q,k}{j}", Code.BAD_NAME, "nothing separates {j} from what precedes it", 9),
        ("a1{i}", Code.BAD_NAME, "nothing separates {i} from what precedes it", 2),
        ("a.{i}1", Code.BAD_NAME, "nothing separates {i} from the digit after it", 5),
        ("{*rest}.a", Code.BAD_NAME, "{*rest} must be the last part of a name", 7),
        ("a.{*rest}{i}", Code.BAD_NAME, "nothing separates {i} from what precedes it", 9),
    ],
)
def test_what_is_no_name_is_refused_at_its_place(text: str, code: Code, message: str, offset: int | None) -> None:
    with pytest.raises(NotationError) as caught:
        Name.parse(text)
    assert (caught.value.code, str(caught.value), caught.value.offset) == (code, message, offset)


def test_the_hint_shows_what_placeholders_look_like() -> None:
    with pytest.raises(NotationError) as caught:
        Name.parse("a.{i/2}")
    assert (
        caught.value.hint
        == "write {i}, {i+1}, {2*i+1}, {i:03}, {i:3..60}, {p:query,key,value}, {w:weight/gamma,bias/beta} or {*rest}"
    )


def test_a_stroke_in_a_word_is_what_the_hint_of_a_repeated_spelling_names() -> None:
    for text, expected in {
        "h{i}/{m:attn/c_attn,attn/c_proj}/w": "a stroke separates spellings of one word, so no word has one",
        "{p:q,k,q}": "",
    }.items():
        with pytest.raises(NotationError, match="same spelling twice") as caught:
            Name.parse(text)
        assert caught.value.hint == expected


def test_a_value_outside_of_the_spellings_leaves_the_placeholder() -> None:
    assert Name.parse("a.{p:q,k}").spell({"p": 7}) == "a.{p:q,k}"
    assert Name.parse("a.{i}.b").spell({}) == "a.{i}.b"


@pytest.mark.parametrize(
    ("pattern", "prefix", "expected"),
    [
        ("trunk.layer.{i}", "trunk.", "layer.{i}"),
        ("trunk.{i}", "trunk.", "{i}"),
        ("head.weight", "trunk.", None),
        ("{i}.weight", "trunk.", None),
        ("trunk.", "trunk.", None),
        ("trunk.layer", "", None),
    ],
)
def test_a_prefix_can_be_left_away(pattern: str, prefix: str, expected: str | None) -> None:
    bare = Name.parse(pattern).without(prefix)
    assert (None if bare is None else str(bare)) == expected


HOSTILE = [  # patterns that a backtracking matcher tries in exponentially many ways
    "a".join(f"{{p{number}:a,aa,aaa}}" for number in range(20)),
    "".join(f"{{p{number}:a,aa}}a" for number in range(40)) + "b",
    "".join(f"{{p{number}:a.,a.a.,a.a.a.}}a." for number in range(30)) + "b",
    "x".join(f"{{i{number}}}" for number in range(100)),
]


@pytest.mark.parametrize("pattern", HOSTILE, ids=["touching", "pairs", "dotted", "numbers"])
def test_no_pattern_explodes(pattern: str) -> None:
    """Counted in steps, not in seconds: lines of the matcher that run for names of 1000 and of 4000 characters."""
    parsed = Name.parse(pattern)
    for unit in ("a", "a.", "1x"):
        short, long = (steps(parsed, unit * (length // len(unit)) + "c") for length in (1000, 4000))
        assert long <= 6 * short + 1000
        assert long < 2_000_000


def steps(pattern: Name, name: str) -> int:
    """How many lines ``pattern.read(name)`` runs."""
    count = 0

    def trace(frame: object, event: str, argument: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]  # a trace function that returns itself has no finite type
    try:
        pattern.read(name)
    finally:
        sys.settrace(before)
    return count


def test_the_steps_of_an_exploding_matcher_would_be_seen() -> None:
    """The same patterns as regular expressions: what is avoided here."""
    pattern = re.compile("".join("(?:a|aa)a" for _ in range(12)) + "b")
    assert pattern.fullmatch("a" * 30) is None  # 12 pairs are still quick; 40 would not end
    assert steps(Name.parse(HOSTILE[1]), "a" * 60 + "c") < 100_000


def test_names_of_thousands_of_characters_are_read() -> None:
    stem = "deep." * 190
    assert read(stem + "{i}", stem + "7") == {"i": 7}
    assert read("{*rest}", "x" * 100_000) == {"rest": "x" * 100_000}
    assert read("{p:a,b}.{i}", "a." + "9" * 100_000) is None


LETTERS = st.text("abcxyz_", min_size=1, max_size=4)


@st.composite
def patterns(draw: st.DrawFn) -> tuple[Name, dict[str, int | str]]:
    """A pattern whose placeholders stand between dots, and values for its indices."""
    parts: list[str] = []
    bindings: dict[str, int | str] = {}
    for number in range(draw(st.integers(1, 5))):
        index = f"n{number}"
        match draw(st.sampled_from(["literal", "decimal", "affine", "enumerated"])):
            case "literal":
                parts.append(draw(LETTERS))
            case "decimal":
                parts.append(f"{{{index}}}")
                bindings[index] = draw(st.integers(0, 99_999))
            case "affine":
                parts.append(f"{{{draw(st.integers(1, 9))}*{index}+{draw(st.integers(0, 99))}}}")
                bindings[index] = draw(st.integers(0, 9_999))
            case _:
                spellings = draw(st.lists(LETTERS, min_size=1, max_size=5, unique=True))
                parts.append(f"{{{index}:{','.join(spellings)}}}")
                bindings[index] = draw(st.integers(0, len(spellings) - 1))
    if draw(st.booleans()):
        parts.append("{*rest}")
        bindings["rest"] = draw(st.text(min_size=1, max_size=20))
    return Name.parse(".".join(parts)), bindings


@given(patterns())
def test_what_is_spelled_is_read_again(drawn: tuple[Name, dict[str, int | str]]) -> None:
    name, bindings = drawn
    assert name.read(name.spell(bindings)) == bindings
    assert name._walk(name.spell(bindings)) == bindings  # the same by both ways of reading
    assert Name.parse(str(name)) == name


@pytest.mark.parametrize(
    ("pattern", "values"),
    [
        ("a{i:03}", {"a007": 7, "a000": 0, "a1000": 1000, "a7": None, "a0007": None, "a01000": None}),
        ("a{i+1:02}.w", {"a01.w": 0, "a10.w": 9, "a00.w": None, "a1.w": None}),
        ("a{i:3..60}", {"a2": None, "a3": 3, "a60": 60, "a61": None, "a03": None}),
        ("a{2*i+1:3..7}", {"a1": None, "a3": 1, "a4": None, "a7": 3, "a9": None}),
        ("a{i:02,3..60}", {"a03": 3, "a3": None, "a02": None, "a60": 60}),
    ],
)
def test_numbers_that_are_padded_or_bounded(pattern: str, values: dict[str, int | None]) -> None:
    name = Name.parse(pattern)
    assert str(name) == pattern
    for text, value in values.items():
        found = name.read(text)
        assert found == (None if value is None else {"i": value}), text
        assert name._walk(text) == found
        if value is not None:
            assert name.spell({"i": value}) == text
