"""Arithmetic as text: read by Python's parser, accepted piece by piece, and walked in one way by all who read it.

Expressions over the config and formulas over tensors are both written in it.  Nothing is run: a text becomes a tree, of
which each reader makes its own values with :func:`walk`.
"""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Value = TypeVar("Value")

OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
"""The function of each operator of a syntax tree."""


class ArithmeticSyntaxError(ValueError):
    """A text that is not arithmetic; ``offset`` is a place in it, None when it concerns the whole."""

    def __init__(self, message: str, offset: int | None = None) -> None:
        super().__init__(message)
        self.offset = offset


def parse(text: str, kind: str, longest: int) -> ast.expr:
    """The tree of a text."""
    article = "an" if kind[0] in "aeiou" else "a"
    if len(text) > longest:
        raise ArithmeticSyntaxError(f"{article} {kind} of {len(text)} characters, at most {longest} are read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of "1if x else 2", which the caller refuses
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ArithmeticSyntaxError(f"{text!r} is not {article} {kind}") from error


def is_plain(node: ast.AST) -> bool:
    """Whether a node is what all arithmetic has: names, finite numbers, ``+ - * / **`` and the sign ``-``."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return not isinstance(value, bool) and abs(value) < math.inf
        case ast.Name() | ast.Load() | ast.BinOp() | ast.UnaryOp(op=ast.USub()) | ast.USub():
            return True
        case ast.Add() | ast.Sub() | ast.Mult() | ast.Div() | ast.Pow():
            return True
    return False


def described(node: ast.AST) -> str:
    """The name, in messages, of a node that is not allowed: ``Call``, ``Not``, ``the constant 'x'``."""
    if isinstance(node, ast.Constant):
        return f"the constant {node.value!r}"
    return type(node.op if isinstance(node, ast.UnaryOp) else node).__name__


def walk(
    node: ast.expr,
    leaf: Callable[[ast.expr], Value],
    combine: Callable[[ast.operator, Value, Value], Value],
    call: Callable[[ast.Call, Value], Value] | None = None,
) -> Value:
    """Evaluate a syntax tree.

    Args:
        leaf: what a number, or a name with what follows it, comes to.
        combine: what an operation makes of what its sides come to; ``-x`` is ``-1 * x``, of which -1 is a leaf.
        call: what a call makes of what its first argument comes to.
    """
    match node:
        case ast.UnaryOp(operand=operand):
            return combine(ast.Mult(), leaf(ast.Constant(-1)), walk(operand, leaf, combine, call))
        case ast.BinOp(left=left, op=op, right=right):
            return combine(op, walk(left, leaf, combine, call), walk(right, leaf, combine, call))
        case ast.Call(args=[first, *_]) if call is not None:
            return call(node, walk(first, leaf, combine, call))
    return leaf(node)
