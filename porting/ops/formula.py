"""Formulas of rules: ``w * g / sqrt(v + eps)``, ``w + 2 * sum(b * a, r)``, ``fp4(x, n) * 2 ** (s - 127)``.

A formula computes the elements of a target from operands, each a term of the rule with its indices.  Operands are
broadcast by index, not by place: ``w`` over ``o i`` times ``g`` over ``o`` multiplies row by row.  ``sum(x, i)`` takes
an index away, ``fp4(x, n)`` and ``bicubic(x, h=H)`` give one.  What indices come out is known before any tensor is
read, so that a formula is checked like any other rule.

The text is parsed by Python's parser and evaluated here; only what is listed is accepted.  Values are float64.
"""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from porting.ops.operations import Operation

if TYPE_CHECKING:  # a table is read without torch, which takes longer to import than all tables to read
    from torch import Tensor

LONGEST = 300
"""Characters of a formula."""

ELEMENTWISE = ("abs", "exp", "log", "sqrt")
"""Functions of one value."""

RESIZED = {
    "linear": ("linear", False, 1),
    "bilinear": ("bilinear", False, 2),
    "bilinear_antialias": ("bilinear", True, 2),
    "bicubic": ("bicubic", False, 2),
    "bicubic_antialias": ("bicubic", True, 2),
    "nearest": ("nearest-exact", False, 2),
}
"""Functions that give indices other sizes: torch's mode, whether it is antialiased, and how many indices it takes."""

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the 4-bit numbers of the OCP Microscaling Formats Specification 1.0 (E2M1), by their bits."""

KNOWN = (*ELEMENTWISE, "sum", "fp4", "blocks", *RESIZED)


class FormulaError(ValueError):
    """A text that is no formula, or one whose indices do not fit; ``offset`` is a place in the text."""

    def __init__(self, message: str, node: ast.AST | None = None) -> None:
        super().__init__(message)
        self.offset = None if node is None else getattr(node, "col_offset", None)


@dataclass(frozen=True)
class Formula(Operation):
    """A parsed formula.

    Attributes:
        text: as it was written.
        body: what Python's parser made of it.
    """

    text: str
    body: ast.expr

    key: ClassVar[str] = "formula"
    done: ClassVar[str] = "computed"
    effect: ClassVar[str] = "computes values of others"

    @classmethod
    def parse(cls, text: str) -> Formula:
        """Parse ``text``.

        Raises:
            FormulaError: it is no formula.
        """
        if len(text) > LONGEST:
            raise FormulaError(f"a formula of {len(text)} characters, at most {LONGEST} are read")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                body = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise FormulaError(f"{text!r} is not a formula") from error
        _require_known(body, text)
        return cls(text.strip(), body)

    @cached_property
    def names(self) -> frozenset[str]:
        """The operands and the fields of the config that it reads."""
        return frozenset(_names(self.body))

    def indices(self, operands: Mapping[str, Sequence[str]]) -> frozenset[str]:
        """The indices of its value.

        Args:
            operands: the indices of each operand; other names are numbers.

        Raises:
            FormulaError: an index is summed or resized that is not there, or given that is there already.
        """
        return _indices(self.body, operands)

    @property
    def pair_indices(self) -> frozenset[str]:
        """The indices of pairs of 4-bit numbers, whose size is 2."""
        calls = (node for node in ast.walk(self.body) if isinstance(node, ast.Call))
        return frozenset(ast.unparse(one.args[1]) for one in calls if ast.unparse(one.func) == "fp4")

    def work(self, operands: Mapping[str, Sequence[str]], sizes: Mapping[str, int]) -> int:
        """The elements of all values that come about while it is computed.

        Args:
            operands: the indices of each operand.
            sizes: the size of every index.
        """
        computed = (node for node in ast.walk(self.body) if isinstance(node, ast.BinOp | ast.UnaryOp | ast.Call))
        return sum(math.prod(sizes[index] for index in _indices(node, operands)) for node in computed)

    def short_blocks(self, sizes: Mapping[str, int]) -> str:
        """The reason why blocks do not reach over the index that they are given for; empty where they do."""
        for node in ast.walk(self.body):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "blocks":
                length = _block_length(node)
                for old, new in map(_resized, node.keywords):
                    if sizes[old] * length < sizes[new]:
                        reach = f"{sizes[old]} blocks of {length} end before the {sizes[new]} elements of {new!r}"
                        return f"{ast.unparse(node)}: {reach}"
        return ""

    def kept(self, index: str) -> bool:
        """Whether each element along an index is computed of elements at the same place alone."""
        return not any(
            isinstance(node, ast.Call)
            and ast.unparse(node.func) != "blocks"
            and (
                index in [ast.unparse(one) for one in node.args[1:]]
                or any(index in _resized(one) for one in node.keywords)
            )
            for node in ast.walk(self.body)
        )

    def evaluate(
        self,
        operands: Mapping[str, tuple[Tensor, tuple[str, ...]]],
        numbers: Mapping[str, float],
        sizes: Mapping[str, int],
        result: Sequence[str],
        offsets: Mapping[str, int] | None = None,
    ) -> Tensor:
        """The value, in float64.

        Args:
            operands: the tensors, each with the index of each of its axes.
            numbers: the fields of the config that it reads.
            sizes: the size of every index.
            result: the indices of the axes of the value, in their order.
            offsets: where indices begin of which a part is computed, 0 for others.
        """
        import torch  # noqa: PLC0415  # tables are read without it

        value = _evaluate(self.body, _Values(operands, numbers, sizes, offsets or {}))
        if isinstance(value, float):
            return torch.full([sizes[index] for index in result], value, dtype=torch.float64)
        tensor, indices = value
        extents = dict(zip(indices, tensor.shape, strict=True))
        return _aligned(tensor, indices, result).expand([extents.get(index, sizes[index]) for index in result])

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Formula) and other.text == self.text


def _require_known(body: ast.expr, text: str) -> None:
    for node in ast.walk(body):
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool) and abs(value) < math.inf:
                pass
            case ast.Name() | ast.Load() | ast.BinOp() | ast.UnaryOp(op=ast.USub()) | ast.USub():
                pass
            case ast.Add() | ast.Sub() | ast.Mult() | ast.Div() | ast.Pow() | ast.keyword(value=ast.Name()):
                pass
            case ast.Call(func=ast.Name(id=name)) if name in KNOWN:
                _require_arguments(node, name)
            case ast.Call(func=ast.Name(id=name)):
                raise FormulaError(f"{name} is no function of formulas; known: {', '.join(KNOWN)}", node)
            case _:
                what = type(node.op if isinstance(node, ast.UnaryOp) else node).__name__
                raise FormulaError(f"{text!r}: {what} is not allowed in a formula", node)


def _require_arguments(node: ast.Call, name: str) -> None:
    """Raise FormulaError when a function is not called as it has to be."""
    indices = [one.id for one in node.args[1:] if isinstance(one, ast.Name)]
    plain = len(node.args) >= 1 and len(indices) == len(node.args) - 1
    if name in ELEMENTWISE:
        good, usage = plain and not indices and not node.keywords, f"{name}(x)"
    elif name == "sum":
        good, usage = plain and bool(indices) and not node.keywords, "sum(x, i), with the indices that are summed"
    elif name == "fp4":
        good, usage = plain and len(indices) == 1 and not node.keywords, "fp4(x, n), n being the index of the pair"
    elif name == "blocks":
        good, usage = _block_length(node) > 0 and bool(node.keywords), "blocks(s, 128, a=o, b=i)"
    else:
        count = RESIZED[name][2]
        pairs = ", ".join(f"{index}={index.upper()}" for index in "hw"[-count:])
        good, usage = plain and not indices and len(node.keywords) == count, f"{name}(x, {pairs})"
    if not good:
        raise FormulaError(f"{name} is written {usage}", node)


def _block_length(node: ast.Call) -> int:
    """The elements of a block, of ``blocks(s, 128, a=o)``; 0 where it is not written so."""
    match node.args:
        case [_, ast.Constant(value=int() as length)]:
            return length
    return 0


def _names(node: ast.expr) -> set[str]:
    match node:
        case ast.Name(id=name):
            return {name}
        case ast.UnaryOp(operand=operand):
            return _names(operand)
        case ast.BinOp(left=left, right=right):
            return _names(left) | _names(right)
        case ast.Call(args=[first, *_]):
            return _names(first)
    return set()


def _resized(keyword: ast.keyword) -> tuple[str, str]:
    """The index that is resized and the one that it becomes, of ``h=H``."""
    return str(keyword.arg), keyword.value.id if isinstance(keyword.value, ast.Name) else ""


def _indices(node: ast.expr, operands: Mapping[str, Sequence[str]]) -> frozenset[str]:
    match node:
        case ast.Name(id=name):
            return frozenset(operands.get(name, ()))
        case ast.UnaryOp(operand=operand):
            return _indices(operand, operands)
        case ast.BinOp(left=left, right=right):
            return _indices(left, operands) | _indices(right, operands)
        case ast.Call(func=ast.Name(id=function), args=[first, *others]):
            inner = _indices(first, operands)
            named = [one.id for one in others if isinstance(one, ast.Name)]
            pairs = [_resized(one) for one in node.keywords]
            taken = named if function == "sum" else [old for old, _ in pairs]
            given = named if function == "fp4" else [new for _, new in pairs]
            inner = inner - _present(taken, inner, node)
            return inner | _new(given, inner, node)
    return frozenset()


def _present(named: Sequence[str], inner: frozenset[str], node: ast.Call) -> frozenset[str]:
    for place, index in enumerate(named):
        if index not in inner or index in named[:place]:
            trouble = f"has no index {index!r}" if index not in inner else f"has the index {index!r} once only"
            raise FormulaError(f"{ast.unparse(node)}: {ast.unparse(node.args[0])} {trouble}", node)
    return frozenset(named)


def _new(named: Sequence[str], inner: frozenset[str], node: ast.Call) -> frozenset[str]:
    for place, index in enumerate(named):
        if index in inner or index in named[:place]:
            raise FormulaError(
                f"{ast.unparse(node)}: {ast.unparse(node.args[0])} has the index {index!r} already", node
            )
    return frozenset(named)


@dataclass(frozen=True)
class _Values:
    operands: Mapping[str, tuple[Tensor, tuple[str, ...]]]
    numbers: Mapping[str, float]
    sizes: Mapping[str, int]
    offsets: Mapping[str, int]


def _evaluate(node: ast.expr, values: _Values) -> tuple[Tensor, tuple[str, ...]] | float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.Name(id=name):
            return values.operands[name] if name in values.operands else values.numbers[name]
        case ast.UnaryOp(operand=operand):
            inner = _evaluate(operand, values)
            return -inner if isinstance(inner, float) else (-inner[0], inner[1])
        case ast.BinOp(left=left, op=op, right=right):
            return _combined(op, _evaluate(left, values), _evaluate(right, values))
        case ast.Call(func=ast.Name(id=function), args=[first, *others]):
            named = [one.id for one in others if isinstance(one, ast.Name)]
            return _called(function, _evaluate(first, values), named, node, values)
    raise TypeError(f"unexpected {type(node).__name__}")  # parse() lets nothing else through


def _combined(
    op: ast.operator, left: tuple[Tensor, tuple[str, ...]] | float, right: tuple[Tensor, tuple[str, ...]] | float
) -> tuple[Tensor, tuple[str, ...]] | float:
    import torch  # noqa: PLC0415  # tables are read without it

    indices = tuple(dict.fromkeys(index for one in (left, right) if not isinstance(one, float) for index in one[1]))
    a, b = (
        torch.tensor(one, dtype=torch.float64) if isinstance(one, float) else _aligned(*one, indices)
        for one in (left, right)
    )
    match op:
        case ast.Add():
            found = a + b
        case ast.Sub():
            found = a - b
        case ast.Mult():
            found = a * b
        case ast.Div():
            found = a / b
        case _:
            found = a**b
    return float(found) if isinstance(left, float) and isinstance(right, float) else (found, indices)


def _aligned(tensor: Tensor, indices: Sequence[str], result: Sequence[str]) -> Tensor:
    """The tensor with one axis for each of the indices of a result, of one element where it has no such index."""
    present = [index for index in result if index in indices]
    ordered = tensor.permute([indices.index(index) for index in present])
    for place, index in enumerate(result):
        if index not in indices:
            ordered = ordered.unsqueeze(place)
    return ordered


def _called(
    function: str,
    inner: tuple[Tensor, tuple[str, ...]] | float,
    named: Sequence[str],
    node: ast.Call,
    values: _Values,
) -> tuple[Tensor, tuple[str, ...]] | float:
    import torch  # noqa: PLC0415  # tables are read without it

    if isinstance(inner, float):  # only a function of one value takes a number: an index has to be there
        return float(getattr(torch, function)(torch.tensor(inner, dtype=torch.float64)))
    tensor, indices = inner
    if function in ELEMENTWISE:
        return getattr(torch, function)(tensor), indices
    if function == "sum":
        return tensor.sum([indices.index(index) for index in named]), tuple(one for one in indices if one not in named)
    if function == "fp4":
        table = torch.tensor(FP4, dtype=torch.float64)
        bits = tensor.to(torch.int64)
        return torch.stack([table[bits & 15], table[(bits >> 4) & 15]], -1), (*indices, named[0])
    if function == "blocks":
        length = _block_length(node)
        for old, new in map(_resized, node.keywords):
            first = values.offsets.get(new, 0)
            numbers = torch.arange(first, first + values.sizes[new]) // length
            tensor = tensor.index_select(indices.index(old), numbers)
            indices = tuple(new if index == old else index for index in indices)
        return tensor, indices
    mode, antialias, _ = RESIZED[function]
    pairs = [_resized(one) for one in node.keywords]
    olds, news = [old for old, _ in pairs], [new for _, new in pairs]
    others = [index for index in indices if index not in olds]
    moved = tensor.permute([indices.index(index) for index in (*others, *olds)])
    rows = moved.reshape(-1, 1, *moved.shape[len(others) :])
    options = {"align_corners": False} if mode != "nearest-exact" else {}
    options |= {"antialias": True} if antialias else {}
    sized = [values.sizes[index] for index in news]
    found = torch.nn.functional.interpolate(rows, size=sized, mode=mode, **options)
    return found.reshape(*moved.shape[: len(others)], *sized), (*others, *news)
