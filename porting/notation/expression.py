"""Arithmetic over the checkpoint's config: ``hidden_size // num_attention_heads``, ``n_embd ** -0.5``.

Names, numbers, parentheses and ``+ - * / // **``, fields inside of others, ``text_config.hidden_size``, and elements of
lists, ``depths[2]``; in ``[sizes]`` an index of a name chooses the element, ``num_heads[i]``.  Nothing can be called,
so a table never runs code.  Results are bounded, so that ``9 ** 9 ** 9`` is a fault and not a hang.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from reprlib import repr as short

from porting.errors import Code, nearest
from porting.notation.faults import NotationError
from porting.ops.syntax import OPERATORS, ArithmeticSyntaxError, described, is_plain, parse, walk

LONGEST = 200
LARGEST = 2**62
LARGEST_EXPONENT = 64

Number = int | float


@dataclass(frozen=True)
class Expression:
    """A parsed expression.

    Attributes:
        text: as it was written.
        names: the fields of the config that it reads, those that are inside of others by the outermost.
        indices: the names between brackets: indices of a rule, which choose the elements of lists.
        where: its place in a table; empty if it is not known.

    >>> Expression.parse("hidden_size // num_attention_heads").evaluate({"hidden_size": 768, "num_attention_heads": 12})
    64
    """

    text: str
    names: frozenset[str]
    indices: frozenset[str] = frozenset()
    where: str = field(default="", compare=False, repr=False)

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> Expression:
        """Parse ``text``."""
        body = _parse(text)
        chosen = [node.slice for node in ast.walk(body) if isinstance(node, ast.Subscript)]
        inside = {id(node) for one in chosen for node in ast.walk(one)}
        for node in ast.walk(body):
            match node:
                case ast.Constant(value=int() | float() as value) if is_plain(node) and abs(value) > LARGEST:
                    pass
                case ast.Attribute(value=ast.Name() | ast.Attribute() | ast.Subscript()) | ast.FloorDiv():
                    continue
                case ast.Subscript(value=ast.Name() | ast.Attribute() | ast.Subscript()):
                    continue
                case _ if is_plain(node):
                    continue
            raise NotationError(
                Code.BAD_EXPRESSION,
                f"{text!r}: {described(node)} is not allowed; names, numbers and + - * / // ** are",
                getattr(node, "col_offset", 0) + len(text) - len(text.lstrip()),
            )
        named = [node for node in ast.walk(body) if isinstance(node, ast.Name)]
        names = {node.id for node in named if id(node) not in inside}
        indices = frozenset(node.id for node in named if id(node) in inside)
        return cls(text, frozenset(names), indices)

    def evaluate(self, values: Mapping[str, object], bindings: Mapping[str, object] | None = None) -> Number:
        """The expression's value, its names looked up in ``values``.

        Args:
            bindings: values of the indices that stand between brackets.
        """
        return walk(_parse(self.text), partial(_field_number, values, bindings or {}), _apply)

    def size(self, values: Mapping[str, object], bindings: Mapping[str, object] | None = None) -> int:
        """The value as the size of an axis: a positive integer."""
        value = self.evaluate(values, bindings)
        if not isinstance(value, int) or value < 1:
            under = "".join(f" for {index} = {(bindings or {}).get(index)}" for index in sorted(self.indices))
            given = f"{value}" if self.text == str(value) else f"{self.text!r} is {value}{under}"
            raise NotationError(Code.BAD_EXPRESSION, f"{given}, expected a positive integer")
        return value


def _parse(text: str) -> ast.expr:
    try:
        return parse(text, "expression", LONGEST)
    except ArithmeticSyntaxError as fault:
        raise NotationError(Code.BAD_EXPRESSION, str(fault)) from fault


def _field_number(values: Mapping[str, object], bindings: Mapping[str, object], node: ast.expr) -> Number:
    """The number that a leaf is, or that the config has for it."""
    found = node.value if isinstance(node, ast.Constant) else _field(node, values, bindings)
    if not isinstance(found, int | float) or not is_plain(ast.Constant(found)):
        message = f"the config's {ast.unparse(node)!r} is {short(found)}, expected a number"
        raise NotationError(Code.BAD_EXPRESSION, message)
    return found


def _field(node: ast.expr, values: Mapping[str, object], bindings: Mapping[str, object]) -> object:
    """The config's value for a name, for an attribute of a value, or for an item of a list."""
    match node:
        case ast.Name(id=name):
            if name not in values:
                hint = nearest(name, list(values))
                raise NotationError(Code.BAD_EXPRESSION, f"the config has no {name!r}", hint=hint)
            return values[name]
        case ast.Attribute(value=outer, attr=name):
            fields = _field(outer, values, bindings)
            if not isinstance(fields, Mapping) or name not in fields:
                hint = nearest(name, [*map(str, fields)]) if isinstance(fields, Mapping) else ""
                raise NotationError(Code.BAD_EXPRESSION, f"the config has no {ast.unparse(node)!r}", hint=hint)
            return fields[name]
        case ast.Subscript(value=outer, slice=place):
            elements = _field(outer, values, bindings)
            lacking = sorted({one.id for one in ast.walk(place) if isinstance(one, ast.Name)} - bindings.keys())
            if lacking:
                message = (
                    f"{ast.unparse(node)!r} needs the index {lacking[0]!r}, which is not in every name of the rule"
                )
                raise NotationError(Code.BAD_EXPRESSION, message)
            number = walk(place, partial(_field_number, bindings, bindings), _apply)
            if not isinstance(elements, list | tuple):
                message = f"the config's {ast.unparse(outer)!r} is {short(elements)}, expected a list"
                raise NotationError(Code.BAD_EXPRESSION, message)
            if not isinstance(number, int) or not 0 <= number < len(elements):
                message = (
                    f"the config's {ast.unparse(outer)!r} has {len(elements)} elements, and none of number {number}"
                )
                raise NotationError(Code.BAD_EXPRESSION, message)
            return elements[number]
    raise NotationError(Code.BAD_EXPRESSION, f"unexpected {type(node).__name__}")  # parse() lets nothing else through


def _apply(op: ast.operator, left: Number, right: Number) -> Number:
    try:
        if isinstance(op, ast.Pow) and abs(right) > LARGEST_EXPONENT:
            raise NotationError(Code.BAD_EXPRESSION, f"exponent {right}, at most {LARGEST_EXPONENT} is computed")
        value: Number | complex = OPERATORS[type(op)](left, right)
        value = int(value) if isinstance(op, ast.FloorDiv) and isinstance(value, float) else value
    except (ZeroDivisionError, OverflowError, ValueError) as error:
        raise NotationError(Code.BAD_EXPRESSION, f"{left} and {right}: {error}") from error
    if isinstance(value, complex) or not abs(value) <= LARGEST:
        raise NotationError(
            Code.BAD_EXPRESSION,
            f"{_shown(left)} and {_shown(right)} give {_shown(value)}, "
            "outside of what a size or a constant of a rule can be",
        )
    return value


def _shown(value: Number | complex) -> str:
    """A number for a message; of a long one about how many digits it has, for Python refuses to write thousands."""
    if isinstance(value, int) and value.bit_length() > LONG:
        return f"a number of about {value.bit_length() * 3 // 10} digits"
    return str(value)


LONG = 200
"""Bits of a whole number that is written out."""
