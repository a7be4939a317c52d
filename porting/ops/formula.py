"""Formulas of rules: ``w * g / sqrt(v + eps)``, ``w + 2 * sum(b * a, r)``, ``fp4(x, n) * 2 ** (s - 127)``.

A formula computes the elements of a target from operands, each a term of the rule with its indices.  Operands are
broadcast by index, not by place: ``w`` over ``o i`` times ``g`` over ``o`` multiplies row by row.  ``sum(x, i)`` takes
an index away, ``fp4(x, n)``, ``unpack_low(x, 4, n=8)`` and ``bicubic(x, h=H)`` give one, ``take(s, g=j)`` looks up what
stands in ``s`` at the numbers ``j``.  What indices come out is known before any tensor is read, so that a formula is
checked like any other rule.

The text is parsed by Python's parser and evaluated here; only what is listed is accepted.  Values are float64,
complex128 where a source is complex, and int64 where all are whole numbers (:mod:`porting.ops.exactness`).
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar

from porting.ops.exactness import InexactError, extremes, require_room, require_within
from porting.ops.operations import Operation
from porting.ops.syntax import OPERATORS, ArithmeticSyntaxError, described, is_plain, parse, walk

if TYPE_CHECKING:  # a table is read without torch, which takes longer to import than all tables to read
    from torch import Tensor

    _Value = tuple[Tensor, tuple[str, ...]] | float

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

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The values of 4-bit NormalFloat (Dettmers et al., QLoRA, 2023, appendix E), by their numbers."""

WHOLE = ("abs", "sum", "repeat", "blocks", "take", "unpack_low", "unpack_high")
"""Functions that make whole numbers of whole numbers."""

UNPACKED = ("unpack_low", "unpack_high")
"""Functions that take whole numbers apart: the lowest bits first, or the highest."""

WIDEST = 32
"""Bits of a number that is taken apart: float64 holds it exactly."""

KNOWN = (*ELEMENTWISE, "sum", "repeat", "nf4", "fp4", *UNPACKED, "blocks", "take", "json", *RESIZED)

LONGEST_JSON = 4096
"""Bytes of a text of JSON in a tensor."""


class FormulaError(ArithmeticSyntaxError):
    """A text that is not a formula, or one whose indices do not fit; ``offset`` is a place in the text."""

    def __init__(self, message: str, node: ast.AST | None = None) -> None:
        super().__init__(message, getattr(node, "col_offset", None))


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
        """Parse ``text``."""
        try:
            body = parse(text, "formula", LONGEST)
        except ArithmeticSyntaxError as fault:
            raise FormulaError(str(fault)) from fault
        _require_known(body, text)
        return cls(text.strip(), body)

    @cached_property
    def names(self) -> frozenset[str]:
        """The operands and the fields of the config that it reads."""
        found: frozenset[str] = walk(
            self.body,
            lambda leaf: frozenset((ast.unparse(leaf),) if isinstance(leaf, ast.Name | ast.Attribute) else ()),
            lambda _, left, right: left | right,
            lambda call, inner: inner | {*_looked_up(call)},
        )
        return found

    def indices(self, operands: Mapping[str, Sequence[str]]) -> frozenset[str]:
        """The indices of its value."""
        call = partial(_call_indices, operands)
        return walk(self.body, partial(_leaf_indices, operands), lambda _, left, right: left | right, call)

    def most_held(self, operands: Mapping[str, Sequence[str]], sizes: Mapping[str, int]) -> int:
        """The most values of float64 that are held at once while it is evaluated, beside its operands."""

        def count(indices: frozenset[str]) -> int:
            return math.prod(sizes[index] for index in indices)

        def leaf(node: ast.expr) -> _Held:
            return _Held(0, 0, _leaf_indices(operands, node))

        def combine(_: ast.operator, left: _Held, right: _Held) -> _Held:
            indices = left.indices | right.indices
            most = max(left.most, left.kept + right.most, left.kept + right.kept + count(indices))
            return _Held(most, count(indices), indices)

        def call(node: ast.Call, inner: _Held) -> _Held:
            indices = _call_indices(operands, node, inner.indices)
            # unpacking holds bits and what they are looked up as; resizing brings what it is given into another order
            name = ast.unparse(node.func)
            beside = {"fp4": 5, "nf4": 1}.get(name, int(name in RESIZED)) * count(inner.indices)
            beside += count(indices) if name == "take" else 0
            beside += count(inner.indices) + 2 * count(indices) if name in UNPACKED else 0
            return _Held(max(inner.most, inner.kept + beside + 2 * count(indices)), count(indices), indices)

        found = walk(self.body, leaf, combine, call)
        return found.most + found.kept  # it is brought into the order of the result

    @property
    def unpacked_sizes(self) -> dict[str, int]:
        """The sizes of the indices of numbers that are unpacked: 2 of a pair of 4-bit numbers."""
        calls = [node for node in ast.walk(self.body) if isinstance(node, ast.Call)]
        found = {ast.unparse(one.args[1]): 2 for one in calls if ast.unparse(one.func) == "fp4"}
        for call in calls:
            found |= dict(_parts(call)) if ast.unparse(call.func) in UNPACKED else {}
        return found

    def work(self, operands: Mapping[str, Sequence[str]], sizes: Mapping[str, int]) -> int:
        """The elements of all values that come about while it is computed.

        Args:
            sizes: the size of every index.
        """
        computed = (node for node in ast.walk(self.body) if isinstance(node, ast.BinOp | ast.UnaryOp | ast.Call))
        return sum(math.prod(sizes[index] for index in replace(self, body=node).indices(operands)) for node in computed)

    def is_whole(self, numbers: Mapping[str, float]) -> bool:
        """Whether it makes whole numbers of whole numbers."""
        for node in ast.walk(self.body):
            match node:
                case ast.Constant(value=int() | float() as value) if not float(value).is_integer():
                    return False
                case ast.Name() | ast.Attribute() if not float(numbers.get(ast.unparse(node), 0)).is_integer():
                    return False
                case ast.Div() | ast.Pow():
                    return False
                case ast.Call() if ast.unparse(node.func) not in WHOLE:
                    return False
        return True

    def refused_numbers(self, numbers: Mapping[str, float]) -> str:
        """The reason why what it computes of numbers alone has no value; empty where it has.

        Args:
            numbers: the fields of the config that it reads.
        """

        def leaf(node: ast.expr) -> float | None:
            found = node.value if isinstance(node, ast.Constant) else numbers.get(ast.unparse(node))
            return None if found is None else float(found)  # type: ignore[arg-type]  # a number, as in _evaluate

        def combine(op: ast.operator, left: float | None, right: float | None) -> float | None:
            if right is not None:
                _require_divisor(op, right)
            return None if left is None or right is None else _computed(op, left, right)

        def call(node: ast.Call, inner: float | None) -> float | None:
            function = ast.unparse(node.func)
            return None if inner is None or function not in ELEMENTWISE else _number_of(function, inner)

        try:
            walk(self.body, leaf, combine, call)
        except ArithmeticError as error:
            return str(error)
        return ""

    def narrow_source(self, bits_of: Mapping[str, int]) -> str:
        """The reason why a source has fewer bits than are taken apart; empty where none has."""
        for node in ast.walk(self.body):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in UNPACKED:
                source, bits = ast.unparse(node.args[0]), _unpacked_bits(node)
                if bits_of.get(source, bits) < bits:
                    return f"{ast.unparse(node)} takes {bits} bits of each number, and {source} has {bits_of[source]}"
        return ""

    def unfit_blocks(self, sizes: Mapping[str, int]) -> str:
        """The reason why blocks are too few or too many for the index that they are given for; empty if they fit."""
        for node in ast.walk(self.body):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "blocks":
                length = _number(node)
                for old, news in map(_replaced, node.keywords):
                    count = math.prod(sizes[new] for new in news)
                    used = -(-count // length)
                    if sizes[old] != used:
                        named = ", ".join(map(repr, news))
                        wrong = f"{sizes[old]} blocks of {length} end before the {count} elements of {named}"
                        if sizes[old] > used:
                            wrong = f"the {count} elements of {named} fill {used} of {sizes[old]} blocks of {length}"
                        return f"{ast.unparse(node)}: {wrong}"
        return ""

    def kept(self, index: str) -> bool:
        """Whether each element along an index is computed of elements at the same place alone."""
        return not any(index in _mixed(node) for node in ast.walk(self.body) if isinstance(node, ast.Call))

    def evaluate(
        self,
        operands: Mapping[str, tuple[Tensor, tuple[str, ...]]],
        numbers: Mapping[str, float],
        sizes: Mapping[str, int],
        result: Sequence[str],
        offsets: Mapping[str, int] | None = None,
    ) -> Tensor:
        """The value, in float64 or what else its operands have.

        Args:
            operands: the tensors, each with the index of each of its axes: float64, complex128, or all int64.
            numbers: the fields of the config that it reads.
            sizes: the size of every index.
            result: the indices of the axes of the value, in their order.
            offsets: where indices begin of which a part is computed, 0 for others.
        """
        try:
            return self._evaluate(operands, numbers, sizes, result, offsets or {})
        except InexactError:
            raise
        except (ArithmeticError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            # whatever Python and torch refuse: which functions take which numbers and shapes is not listed here
            reason = " ".join(str(error).split())[:LONGEST]
            raise FormulaError(f"formula = {self.text!r} cannot be computed: {reason}") from error

    def _evaluate(
        self,
        operands: Mapping[str, tuple[Tensor, tuple[str, ...]]],
        numbers: Mapping[str, float],
        sizes: Mapping[str, int],
        result: Sequence[str],
        offsets: Mapping[str, int],
    ) -> Tensor:
        import torch  # noqa: PLC0415  # tables are read without it

        whole = all(tensor.dtype == torch.int64 for tensor, _ in operands.values())

        def leaf(node: ast.expr) -> _Value:
            name = ast.unparse(node)
            if name in operands:
                return operands[name]
            number: float = node.value if isinstance(node, ast.Constant) else numbers[name]  # type: ignore[assignment]  # a number: parse() lets nothing else through
            if not whole:
                return float(number)
            require_within([int(number)])
            return int(number)

        value: _Value = walk(self.body, leaf, _combined, partial(_called, operands, sizes, offsets))
        if not isinstance(value, tuple):
            return torch.full([sizes[index] for index in result], value, dtype=torch.int64 if whole else torch.float64)
        tensor, indices = value
        extents = dict(zip(indices, tensor.shape, strict=True))
        return _aligned(tensor, indices, result).expand([extents.get(index, sizes[index]) for index in result])

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Formula) and other.text == self.text


@dataclass(frozen=True)
class _Held:
    """The memory that the evaluation of a part needs, at most and in the end, and the indices of its value."""

    most: int
    kept: int
    indices: frozenset[str]


def _require_known(body: ast.expr, text: str) -> None:
    for node in ast.walk(body):
        match node:
            case ast.keyword(value=ast.Name() | ast.Constant(value=int())):
                pass
            case ast.Attribute(value=ast.Name() | ast.Attribute()):
                pass
            case ast.keyword(value=ast.Tuple()) | ast.Tuple():
                pass  # only blocks() takes it, which is seen there
            case ast.Call(func=ast.Name(id=name)) if name in KNOWN:
                _require_arguments(node, name)
            case ast.Call(func=ast.Name(id=name)):
                raise FormulaError(f"{name} is not a function of formulas; known: {', '.join(KNOWN)}", node)
            case _ if not is_plain(node):
                raise FormulaError(f"{text!r}: {described(node)} is not allowed in a formula", node)


def _require_arguments(node: ast.Call, name: str) -> None:
    """Raise FormulaError when a function is not called as it has to be."""
    indices = [one.id for one in node.args[1:] if isinstance(one, ast.Name)]
    plain = len(node.args) >= 1 and len(indices) == len(node.args) - 1
    if name not in (*UNPACKED, "blocks") and not all(isinstance(one.value, ast.Name) for one in node.keywords):
        plain = False
    if name in (*ELEMENTWISE, "nf4"):
        good, usage = plain and not indices and not node.keywords, f"{name}(x)"
    elif name == "sum":
        good, usage = plain and bool(indices) and not node.keywords, "sum(x, i), with the indices that are summed"
    elif name == "repeat":
        good, usage = plain and bool(indices) and not node.keywords, "repeat(x, m), with the indices that are added"
    elif name == "fp4":
        good, usage = plain and len(indices) == 1 and not node.keywords, "fp4(x, n), n being the index of the pair"
    elif name in UNPACKED:
        bits, sizes = _number(node), [size for _, size in _parts(node)]
        good = bits > 0 and bool(sizes) and min(sizes) > 0 and bits * math.prod(sizes) <= WIDEST
        usage = f"{name}(x, 4, n=8), with the bits of each number and how many there are, of at most {WIDEST} bits"
    elif name == "blocks":
        named = all(_replaced(one)[1] for one in node.keywords)
        good, usage = _number(node) > 0 and bool(node.keywords) and named, "blocks(s, 128, a=o, b=i)"
    elif name == "take":
        good, usage = plain and not indices and len(node.keywords) == 1, "take(s, g=j), j being the source of numbers"
    elif name == "json":
        good = plain and len(indices) == 1 and not node.keywords and isinstance(node.args[0], ast.Name)
        usage = "json(x, offset), x being a source and offset a field of the JSON in it"
    else:
        count = RESIZED[name][2]
        pairs = ", ".join(f"{index}={index.upper()}" for index in "hw"[-count:])
        good, usage = plain and not indices and len(node.keywords) == count, f"{name}(x, {pairs})"
    if not good:
        raise FormulaError(f"{name} is written {usage}", node)


def _number(node: ast.Call) -> int:
    """The number of ``blocks(s, 128, a=o)`` or ``unpack_low(x, 4, n=8)``; 0 where it is not written so."""
    match node.args:
        case [_, ast.Constant(value=int() as length)]:
            return length
    return 0


def _parts(node: ast.Call) -> list[tuple[str, int]]:
    """The indices that unpacking gives, the slowest first, with their sizes; 0 where one is not written so."""
    return [
        (
            str(one.arg),
            one.value.value if isinstance(one.value, ast.Constant) and isinstance(one.value.value, int) else 0,
        )
        for one in node.keywords
    ]


def _resized(keyword: ast.keyword) -> tuple[str, str]:
    """The index that is resized and the one that it becomes, of ``h=H``."""
    return str(keyword.arg), keyword.value.id if isinstance(keyword.value, ast.Name) else ""


def _replaced(keyword: ast.keyword) -> tuple[str, tuple[str, ...]]:
    """The index of blocks and those that count their elements, of ``a=o`` or ``a=(o, q)``; none if it is neither."""
    named = keyword.value.elts if isinstance(keyword.value, ast.Tuple) else [keyword.value]
    found = [one.id for one in named if isinstance(one, ast.Name)]
    return str(keyword.arg), tuple(found) if len(found) == len(named) else ()


def _looked_up(node: ast.Call) -> list[str]:
    """The operands that a call reads beside what it is given."""
    return [_resized(one)[1] for one in node.keywords] if ast.unparse(node.func) == "take" else []


def _mixed(node: ast.Call) -> list[str]:
    """The indices along which a call mixes elements of different places, so that all of them are needed at once."""
    function = ast.unparse(node.func)
    if function == "blocks":  # of several indices that count together, the first may be taken apart
        return [new for one in node.keywords for new in _replaced(one)[1][1:]]
    if function == "take":
        return [_resized(one)[0] for one in node.keywords]
    return [*(ast.unparse(one) for one in node.args[1:]), *(name for one in node.keywords for name in _resized(one))]


def _leaf_indices(operands: Mapping[str, Sequence[str]], node: ast.expr) -> frozenset[str]:
    return frozenset(operands.get(node.id, ()) if isinstance(node, ast.Name) else ())


def _call_indices(operands: Mapping[str, Sequence[str]], node: ast.Call, inner: frozenset[str]) -> frozenset[str]:
    """The indices of a call's value, of those of what it is given."""
    function, first = ast.unparse(node.func), ast.unparse(node.args[0])
    named = [one.id for one in node.args[1:] if isinstance(one, ast.Name)]
    pairs = [_resized(one) for one in node.keywords]
    taken = named if function == "sum" else [] if function in UNPACKED else [old for old, _ in pairs]
    given = named if function in {"fp4", "repeat"} else [new or old for old, new in pairs]
    if function == "json":
        return frozenset()
    if function == "blocks":
        given = [new for one in node.keywords for new in _replaced(one)[1]]
    if function == "take":
        foreign = next((name for name in _looked_up(node) if name not in operands), None)
        if foreign is not None:
            raise FormulaError(f"{ast.unparse(node)}: {foreign!r} is not a source of the rule", node)
        given = [index for name in _looked_up(node) for index in operands[name]]
    for place, index in enumerate(taken):
        if index not in inner or index in taken[:place]:
            trouble = f"has no index {index!r}" if index not in inner else f"has the index {index!r} once only"
            raise FormulaError(f"{ast.unparse(node)}: {first} {trouble}", node)
    left = inner - {*taken}
    for place, index in enumerate(given):
        if index in left or index in given[:place]:
            raise FormulaError(f"{ast.unparse(node)}: {first} has the index {index!r} already", node)
    return left | {*given}


def _combined(op: ast.operator, left: _Value, right: _Value) -> _Value:
    import torch  # noqa: PLC0415  # tables are read without it

    if not isinstance(right, tuple):
        _require_divisor(op, right)
        if not isinstance(left, tuple):
            return _computed(op, left, right)
    indices = tuple(dict.fromkeys(index for one in (left, right) if isinstance(one, tuple) for index in one[1]))
    a, b = (
        _aligned(*one, indices)
        if isinstance(one, tuple)
        else torch.tensor(one, dtype=torch.int64 if isinstance(one, int) else torch.float64)
        for one in (left, right)
    )
    if a.dtype == b.dtype == torch.int64:
        ends = [(int(one), int(other)) for one in extremes(a) for other in extremes(b)]
        require_within(OPERATORS[type(op)](*pair) for pair in ends)
    return OPERATORS[type(op)](a, b), indices


def _computed(op: ast.operator, left: float, right: float) -> float:
    """Apply an operator to two numbers."""
    _require_divisor(op, right)
    try:
        found = OPERATORS[type(op)](left, right)
    except ArithmeticError as error:  # a power of zero, or one that is too large
        raise ArithmeticError(f"{left:g} {SIGNS[type(op)]} {right:g} is not a finite number") from error
    if isinstance(found, complex) or not math.isfinite(found):
        raise ArithmeticError(f"{left:g} {SIGNS[type(op)]} {right:g} is not a finite number")
    return found  # type: ignore[no-any-return]  # OPERATORS takes any


SIGNS: Mapping[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"}
"""How operations are written, for messages."""


def _require_divisor(op: ast.operator, right: float) -> None:
    """Raises: ArithmeticError when it is a division by zero."""
    if isinstance(op, ast.Div) and right == 0:
        raise ArithmeticError("it divides by zero")


def _number_of(function: str, number: float) -> float:
    """Apply a function to a number."""
    import torch  # noqa: PLC0415  # tables are read without it

    if isinstance(number, int):
        return abs(number)  # no other function makes whole numbers
    found = float(getattr(torch, function)(torch.tensor(number, dtype=torch.float64)))
    if not math.isfinite(found):
        raise ArithmeticError(f"{function}({number:g}) is not a finite number")
    return found


def _aligned(tensor: Tensor, indices: Sequence[str], result: Sequence[str]) -> Tensor:
    """The tensor with one axis for each of the indices of a result, of one element where it has no such index."""
    present = [index for index in result if index in indices]
    ordered = tensor.permute([indices.index(index) for index in present])
    for place, index in enumerate(result):
        if index not in indices:
            ordered = ordered.unsqueeze(place)
    return ordered


def _with_more(
    function: str, node: ast.Call, tensor: Tensor, indices: tuple[str, ...], sizes: Mapping[str, int]
) -> tuple[Tensor, tuple[str, ...]]:
    """Apply a function that repeats a value or unpacks numbers: it adds indices and removes none."""
    import torch  # noqa: PLC0415  # tables are read without it

    if function == "repeat":
        more = [ast.unparse(one) for one in node.args[1:]]
        whole = tensor.reshape(*tensor.shape, *(1 for _ in more))
        return whole.expand(*tensor.shape, *(sizes[index] for index in more)), (*indices, *more)
    if function == "nf4":
        return torch.tensor(NF4, dtype=torch.float64)[_whole_numbers(node, tensor, 0, 15)], indices
    width = 8 if function == "fp4" else _unpacked_bits(node)
    bits = _whole_numbers(node, tensor, -(1 << width - 1), (1 << width) - 1)  # signed or not
    if function == "fp4":
        table = torch.tensor(FP4, dtype=torch.float64)
        return torch.stack([table[bits & 15], table[(bits >> 4) & 15]], -1), (*indices, ast.unparse(node.args[1]))
    width, parts = _number(node), _parts(node)
    places = torch.arange(math.prod(size for _, size in parts)) * width
    places = places if function == "unpack_low" else places.flip(0)
    numbers = bits.unsqueeze(-1) >> places & (1 << width) - 1
    shape = (*tensor.shape, *(size for _, size in parts))
    return numbers.to(tensor.dtype).reshape(shape), (*indices, *(index for index, _ in parts))


def _unpacked_bits(node: ast.Call) -> int:
    """The bits of a number that unpacking takes apart."""
    return _number(node) * math.prod(size for _, size in _parts(node))


def _whole_numbers(node: ast.Call, values: Tensor, least: int, most: int) -> Tensor:
    """Values as int64."""
    import torch  # noqa: PLC0415  # tables are read without it

    if values.numel() == 0:
        return values.to(torch.int64)
    if values.is_complex():
        raise ValueError(f"{ast.unparse(node)}: whole numbers are looked up, and these are complex")
    for one in extremes(values):
        if not least <= one <= most:
            raise ValueError(f"{ast.unparse(node)}: {one:g} is not from {least} to {most}")
    numbers = values.to(torch.int64)
    if values.is_floating_point():
        other = numbers != values
        if bool(other.any()):
            raise ValueError(f"{ast.unparse(node)}: {float(values[other][0]):g} is not whole")
    return numbers


def _selected(
    tensor: Tensor, indices: tuple[str, ...], old: str, numbers: Tensor, news: tuple[str, ...]
) -> tuple[Tensor, tuple[str, ...]]:
    """Select numbers along an index, which is replaced by new indices."""
    at = indices.index(old)
    found = tensor.index_select(at, numbers.reshape(-1))
    shape = (*tensor.shape[:at], *numbers.shape, *tensor.shape[at + 1 :])
    return found.reshape(shape), (*indices[:at], *news, *indices[at + 1 :])


def _field_of_json(node: ast.Call, tensor: Tensor) -> Tensor:
    """A number that a text of JSON has in a field, the text being the bytes of a tensor."""
    import torch  # noqa: PLC0415  # tables are read without it

    from porting.checkpoint.strict_json import parse as parse_json  # noqa: PLC0415  # few tables read JSON

    name = ast.unparse(node.args[1])
    if tensor.numel() > LONGEST_JSON:
        raise ValueError(f"{tensor.numel()} bytes of JSON, at most {LONGEST_JSON} are read")
    text = bytes(_whole_numbers(node, tensor.reshape(-1), 0, 255).tolist())
    fields = parse_json(text, where=ast.unparse(node))
    value = fields.get(name) if isinstance(fields, dict) else None
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return torch.tensor(float(value), dtype=torch.float64)
    raise ValueError(f"the JSON has no finite number {name!r}")


def _looked_at(
    operands: Mapping[str, tuple[Tensor, tuple[str, ...]]],
    sizes: Mapping[str, int],
    offsets: Mapping[str, int],
    node: ast.Call,
    tensor: Tensor,
    indices: tuple[str, ...],
) -> tuple[Tensor, tuple[str, ...]]:
    """Apply a function that selects some numbers of a tensor."""
    import torch  # noqa: PLC0415  # tables are read without it

    function = ast.unparse(node.func)
    if function == "json":
        return _field_of_json(node, tensor), ()
    if function == "take":
        ((old, source),) = [_resized(one) for one in node.keywords]
        numbers, names = operands[source]
        last = tensor.shape[indices.index(old)] - 1
        return _selected(tensor, indices, old, _whole_numbers(node, numbers, 0, last), names)
    length = _number(node)
    for old, news in map(_replaced, node.keywords):
        numbers = torch.zeros((), dtype=torch.int64)
        for new in news:
            first = offsets.get(new, 0)
            numbers = numbers.unsqueeze(-1) * sizes[new] + torch.arange(first, first + sizes[new])
        tensor, indices = _selected(tensor, indices, old, numbers // length, news)
    return tensor, indices


def _called(
    operands: Mapping[str, tuple[Tensor, tuple[str, ...]]],
    sizes: Mapping[str, int],
    offsets: Mapping[str, int],
    node: ast.Call,
    inner: _Value,
) -> _Value:
    import torch  # noqa: PLC0415  # tables are read without it

    function, named = ast.unparse(node.func), [one.id for one in node.args[1:] if isinstance(one, ast.Name)]
    if not isinstance(inner, tuple):  # only a function of one value takes a number: an index has to be there
        return _number_of(function, inner)
    tensor, indices = inner
    if function == "abs":
        require_room(tensor, abs)
    if function in ELEMENTWISE:
        return getattr(torch, function)(tensor), indices
    if function == "sum":
        count = math.prod(tensor.shape[indices.index(index)] for index in named)
        require_room(tensor, lambda one: one * count)
        return tensor.sum([indices.index(index) for index in named]), tuple(one for one in indices if one not in named)
    if function in {"repeat", "nf4", "fp4", *UNPACKED}:
        return _with_more(function, node, tensor, indices, sizes)
    if function in {"blocks", "take", "json"}:
        return _looked_at(operands, sizes, offsets, node, tensor, indices)
    mode, antialias, _ = RESIZED[function]
    pairs = [_resized(one) for one in node.keywords]
    olds, news = [old for old, _ in pairs], [new for _, new in pairs]
    others = [index for index in indices if index not in olds]
    moved = tensor.permute([indices.index(index) for index in (*others, *olds)])
    rows = moved.reshape(-1, 1, *moved.shape[len(others) :])
    options = {"align_corners": False} if mode != "nearest-exact" else {}
    options |= {"antialias": True} if antialias else {}
    sized = [sizes[index] for index in news]
    found = torch.nn.functional.interpolate(rows, size=sized, mode=mode, **options)
    return found.reshape(*moved.shape[: len(others)], *sized), (*others, *news)
