"""Arithmetic over the config, and nothing else."""

from __future__ import annotations

import pytest

from porting.errors import Code
from porting.notation.expression import Expression
from porting.notation.faults import NotationError

CONFIG: dict[str, object] = {"hidden_size": 768, "heads": 12, "eps": 1e-12, "zero": 0, "flag": True, "name": "gelu"}
CONFIG |= {"none": None, "nan": float("nan"), "huge": 10**200, "big": 10**12}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("hidden_size", 768),
        ("hidden_size // heads", 64),
        ("hidden_size // heads * 0.25 // 2", 8),
        ("hidden_size / heads", 64.0),
        ("2 + 3 * 4 - 1", 13),
        ("(2 + 3) * 4", 20),
        ("-hidden_size", -768),
        (" heads ** 2 ", 144),
        ("16 ** -0.5", 0.25),
        ("hidden_size ** -0.5", 768**-0.5),
        ("eps * 1e12", 1.0),
    ],
)
def test_it_is_arithmetic(text: str, value: float) -> None:
    assert Expression.parse(text).evaluate(CONFIG) == value


def test_it_knows_its_names() -> None:
    assert Expression.parse("(a + b) // a").names == {"a", "b"}
    expression = Expression.parse("text.heads[i + 1] * sizes[0]")
    assert (expression.names, expression.indices) == (frozenset({"text", "sizes"}), frozenset({"i"}))


LISTED: dict[str, object] = {"text": {"heads": [2, 3], "width": 8}, "grid": [[1, 2], [3, 4]]}


@pytest.mark.parametrize(
    ("text", "value"), [("text.width", 8), ("text.heads[1]", 3), ("grid[1][0] * 2", 6), ("text.heads[i - 1]", 2)]
)
def test_it_reads_inner_fields_and_elements(text: str, value: int) -> None:
    assert Expression.parse(text).size(LISTED, {"i": 1}) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text.hight", "the config has no 'text.hight'"),
        ("text.width.x", "the config has no 'text.width.x'"),
        ("text.heads", "the config's 'text.heads' is [2, 3], expected a number"),
        ("text.width[0]", "the config's 'text.width' is 8, expected a list"),
        ("text.heads[2]", "the config's 'text.heads' has 2 elements, and none of number 2"),
        ("text.heads[-1]", "the config's 'text.heads' has 2 elements, and none of number -1"),
        ("text.heads[0.5]", "the config's 'text.heads' has 2 elements, and none of number 0.5"),
        ("text.heads[j]", "'text.heads[j]' needs the index 'j', which is not in every name of the rule"),
    ],
)
def test_what_is_not_in_the_config_is_refused(text: str, message: str) -> None:
    with pytest.raises(NotationError) as caught:
        Expression.parse(text).size(LISTED, {"i": 1})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not an expression"),
        ("2 +", "'2 +' is not an expression"),
        ("a; b", "'a; b' is not an expression"),
        ("a\nb", r"'a\nb' is not an expression"),
        ("(" * 150, f"'{'(' * 150}' is not an expression"),
        ("\0", r"'\x00' is not an expression"),
        ("__import__('os')", ": Call is not allowed"),
        ("f(a).b", ": Attribute is not allowed"),
        ("(1).real", ": Attribute is not allowed"),
        ("(a + b)[0]", ": Subscript is not allowed"),
        ("a[0:1]", ": Slice is not allowed"),
        ("a['b']", "the constant 'b'"),
        ("[1]", ": List is not allowed"),
        ("{}", ": Dict is not allowed"),
        ("a if b else c", ": IfExp is not allowed"),
        ("1if 1else 2", ": IfExp is not allowed"),
        ("a and b", ": BoolOp is not allowed"),
        ("a < b", ": Compare is not allowed"),
        ("not a", ": Not is not allowed"),
        ("~a", ": Invert is not allowed"),
        ("+a", ": UAdd is not allowed"),
        ("a % b", ": Mod is not allowed"),
        ("a << b", ": LShift is not allowed"),
        ("a @ b", ": MatMult is not allowed"),
        ("a & b", ": BitAnd is not allowed"),
        ("(a := 3)", ": NamedExpr is not allowed"),
        ("lambda: 1", ": Lambda is not allowed"),
        ("f'{a}'", ": JoinedStr is not allowed"),
        ("[a for a in b]", ": ListComp is not allowed"),
        ("'text'", "the constant 'text'"),
        ("True", "the constant True"),
        ("None", "the constant None"),
        ("1j", "the constant 1j"),
        ("...", "the constant Ellipsis"),
        ("1e999", "the constant inf"),
        ("9" * 100, f"the constant {'9' * 100}"),
        ("a" * 201, "expression of 201 characters, at most 200 are read"),
    ],
)
def test_anything_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(NotationError) as caught:
        Expression.parse(text)
    assert caught.value.code is Code.BAD_EXPRESSION
    assert message in str(caught.value)


def test_what_is_refused_is_placed_in_the_text() -> None:
    with pytest.raises(NotationError) as caught:
        Expression.parse("hidden_size // f(heads)")
    assert caught.value.offset == len("hidden_size // ")
    assert str(caught.value) == ("'hidden_size // f(heads)': Call is not allowed; names, numbers and + - * / // ** are")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("9 ** 9 ** 9", "exponent 387420489, at most 64 is computed"),
        ("9 ** -9999", "exponent -9999, at most 64 is computed"),
        ("big ** 10", "outside of what a size or a constant of a rule can be"),
        ("huge ** 64", "a number of about 12"),
        ("big * big", "outside of what a size or a constant of a rule can be"),
        ("big * big * 1.0", "outside of what a size or a constant of a rule can be"),
        ("(0 - 2) ** 0.5", "outside of what a size or a constant of a rule can be"),
        ("1 / zero", "division by zero"),
        ("1 // zero", "by zero"),
        ("zero ** -1", "0 and -1: "),
        ("flag", "the config's 'flag' is True, expected a number"),
        ("name", "the config's 'name' is 'gelu', expected a number"),
        ("none", "the config's 'none' is None, expected a number"),
        ("nan", "the config's 'nan' is nan, expected a number"),
        ("hiden_size", "the config has no 'hiden_size'"),
    ],
)
def test_what_cannot_be_computed_says_why(text: str, message: str) -> None:
    with pytest.raises(NotationError) as caught:
        Expression.parse(text).evaluate(CONFIG)
    assert caught.value.code is Code.BAD_EXPRESSION
    assert message in str(caught.value)


def test_a_field_that_is_missing_is_hinted_at() -> None:
    with pytest.raises(NotationError) as caught:
        Expression.parse("hiden_size").evaluate(CONFIG)
    assert caught.value.hint == "did you mean 'hidden_size'?"


@pytest.mark.parametrize("text", ["hidden_size / heads", "zero", "-heads", "0.5", "heads - 12"])
def test_a_size_is_a_positive_integer(text: str) -> None:
    with pytest.raises(NotationError, match="expected a positive integer"):
        Expression.parse(text).size(CONFIG)


def test_a_size_is_given_as_it_is() -> None:
    assert Expression.parse("hidden_size // heads").size(CONFIG) == 64
    assert Expression.parse("hidden_size // heads * 0.3 // 2").size(CONFIG) == 9, "rounded down, as transformers does"
