"""One small change to a line of the user's code that mends the port: the line and what should stand there.

A mistake is often one word: another variable, a number, an operator, an argument. Each such change to the lines on the
way to the first difference is made for one pass; what the port then computes decides.

Code that is changed at random may do anything. So only functions are changed that compute and do nothing else: no loop
of theirs can run on for ever, and they keep no state and reach no file, process or module but torch's and the like.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import sys
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations, permutations
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor

from porting.frames import from_here

MAX_LINE = 160
"""Number of characters of a line that are shown."""

OPERATORS: tuple[tuple[type[ast.AST], ...], ...] = (
    (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq),
    (ast.Add, ast.Sub, ast.Mult, ast.Div),
    (ast.BitAnd, ast.BitOr),
    (ast.And, ast.Or),
)
"""Operators that are mistaken for one another."""

FUNCTIONS: tuple[tuple[str, ...], ...] = (
    ("tril", "triu"),
    ("cos", "sin"),
    ("gelu", "relu", "silu", "tanh", "sigmoid"),
    ("ones", "zeros"),
    ("ones_like", "zeros_like"),
    ("minimum", "maximum"),
    ("amax", "mean", "sum"),
)
"""Functions that take the same arguments."""

COMPUTING = frozenset(
    {"torch", "math", "numpy", "einops", "functools", "itertools", "operator", "typing", "dataclasses"}
)
"""Packages whose functions may be called in a function that is changed; not all of them: see :data:`REACHING`."""

REACHING = frozenset({
    "save", "load", "dump", "dumps", "loads", "write", "write_text", "write_bytes", "writelines", "open", "tofile",
    "fromfile", "savez", "savetxt", "loadtxt", "memmap", "remove", "unlink", "rename", "rmdir", "rmtree", "mkdir",
    "system", "popen", "run", "call", "exec", "eval", "compile", "execute", "setattr", "delattr", "hub", "distributed",
})  # fmt: skip
"""Functions and parts of packages that reach files, processes or state, by their last name."""

BUILTINS = frozenset({
    "abs", "all", "any", "bool", "callable", "complex", "dict", "divmod", "enumerate", "filter", "float", "frozenset",
    "getattr", "hasattr", "hash", "id", "int", "isinstance", "issubclass", "iter", "len", "list", "map", "max", "min",
    "next", "pow", "range", "repr", "reversed", "round", "set", "slice", "sorted", "str", "sum", "super", "tuple",
    "type", "zip", "AssertionError", "NotImplementedError", "RuntimeError", "TypeError", "ValueError",
})  # fmt: skip
"""Builtin functions that only compute."""

NOTHING = "pass"
"""What stands in the place of a statement that is left out."""

COMPARED = "_porting_compared"
"""The name under which a changed function tells what its changed comparison gave."""

_NO_COMPUTATION = (ast.While, ast.Global, ast.Nonlocal, ast.Delete, ast.Import, ast.ImportFrom)

_GROUPED = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Lambda)


@dataclass(frozen=True)
class LineEdit:
    """A change to one place in a function.

    Attributes:
        line: the number of the changed line.
        old, new: the line as it is, and as it should be.
        outcomes: what the changed comparison gave in all passes so far, if it is one that is changed.
        moved: what to do, where whole statements change places.
    """

    file: str
    line: int
    old: str
    new: str
    code: CodeType
    function: FunctionType
    outcomes: set[bool] = field(default_factory=set, compare=False)
    moved: str = ""

    @property
    def decides_nothing(self) -> bool:
        """Whether the changed comparison always gave the same: such a change only takes a branch out of the pass."""
        return len(self.outcomes) == 1

    @property
    def place(self) -> str:
        """The place of the line, ``file:line``."""
        return f"{from_here(self.file)}:{self.line}"

    @property
    def fix(self) -> str:
        """The line, and what should stand there."""
        plain = self.new != NOTHING and not self.moved
        return f"{self.place}: {f'replace `{self.old}` by `{self.new}`' if plain else self.instruction}"

    @property
    def instruction(self) -> str:
        """What to do at the line."""
        if self.moved:
            return self.moved
        return f"write `{self.new}`" if self.new != NOTHING else f"leave out `{self.old}`"

    @contextmanager
    def made(self) -> Iterator[None]:
        """Return a context in which the function is the changed one."""
        before, names = self.function.__code__, self.function.__globals__
        self.function.__code__ = self.code
        names[COMPARED] = self._compared
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            self.function.__code__ = before
            del names[COMPARED]

    def _compared(self, outcome: Any) -> Any:  # whatever a comparison gives
        self.outcomes.update(
            {bool(one) for one in ((outcome.any(), outcome.all()) if isinstance(outcome, Tensor) else (outcome,))}
        )
        return outcome


def line_edits(lines: Sequence[str]) -> Iterator[LineEdit]:
    """Yield the changes to lines of code, and then to the other lines of the function that has the first of them.

    Args:
        lines: ``file:line``, the likeliest first.
    """
    first: list[tuple[_Source, ast.FunctionDef, ast.stmt | ast.expr]] = []
    rest: list[tuple[_Source, ast.FunctionDef, ast.stmt | ast.expr]] = []
    for source, function, number in _located(lines):
        for each in (function, *source.called_by(function)):
            for node in _changeable(each):
                (first if _covers(node, number) else rest).append((source, each, node))
    seen: set[tuple[str, int, int]] = set()
    for source, function, node in (*first, *rest):
        place = source.file, node.lineno, node.col_offset
        if place not in seen:
            seen.add(place)
            yield from source.edits(node, function)
            yield from source.moves(node, function)


def condition_edits(lines: Sequence[str]) -> Iterator[LineEdit]:
    """Yield the changes that decide a condition the same way for all inputs: the condition, or one part of it.

    Args:
        lines: ``file:line`` of conditions.
    """
    for source, function, number in _located(lines):
        for node in _changeable(function):
            if _covers(node, number):
                yield from source.edits(node, function, (_decisions,))


def _located(lines: Sequence[str]) -> Iterator[tuple[_Source, ast.FunctionDef, int]]:
    """Yield each line that is in a function, with its file, the function and its number."""
    for file, _, number in (line.rpartition(":") for line in dict.fromkeys(lines)):
        source = _Source.of(str(Path.cwd() / file))
        function = None if source is None else source.function_at(int(number))
        if source is not None and function is not None:
            yield source, function, int(number)


def _covers(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _changeable(function: ast.FunctionDef) -> Iterator[ast.stmt | ast.expr]:
    """Yield the statements of a function, of those that have others in them the heads."""
    for node in ast.walk(function):
        if isinstance(node, ast.For | ast.If):
            yield node.iter if isinstance(node, ast.For) else node.test
        elif isinstance(node, ast.stmt) and not hasattr(node, "body"):
            yield node


class _Source:
    """A file of the user's code.

    Args:
        names: the globals of the module that it is.
    """

    def __init__(self, file: str, text: str, names: Mapping[str, object]) -> None:
        self.file, self.text, self.names = file, text, names
        self.tree = ast.parse(text)
        self._functions = [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)]
        self._computing: dict[ast.FunctionDef, bool] = {}
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    @classmethod
    def of(cls, file: str) -> _Source | None:
        """Return the file; None where it is not a module that was imported, or has changed."""
        module = next((one for one in [*sys.modules.values()] if getattr(one, "__file__", None) == file), None)
        text = "".join(linecache.getlines(file))
        try:
            return None if module is None or not text.isascii() else cls(file, text, vars(module))
        except SyntaxError:
            return None

    def function_at(self, line: int) -> ast.FunctionDef | None:
        """Return the innermost function that has a line."""
        found = [node for node in self._functions if _covers(node, line)]
        return max(found, key=lambda node: node.lineno, default=None)

    def called_by(self, function: ast.FunctionDef) -> list[ast.FunctionDef]:
        """Return the functions of the file that a function calls."""
        called = {
            node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
        }
        return [node for node in self._functions if node.name in called and node is not function]

    def only_computes(self, function: ast.FunctionDef) -> bool:
        """Whether a function and those of the file that it calls do nothing that a change could turn into harm."""
        if function not in self._computing:
            found, open_ = [function], [function]
            while open_:
                called = [other for other in self.called_by(open_.pop()) if other not in found]
                found, open_ = [*found, *called], [*open_, *called]
            harmless = all(self._is_harmless(node) for each in found for node in ast.walk(each))
            self._computing[function] = harmless
        return self._computing[function]

    def _is_harmless(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            return self._may_be_called(node)
        keeps_state = isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)  # it outlives the pass
        return not keeps_state and not isinstance(node, _NO_COMPUTATION)

    def _may_be_called(self, call: ast.Call) -> bool:
        names, callee = [], call.func
        while isinstance(callee, ast.Attribute | ast.Call | ast.Subscript):
            names += [callee.attr] if isinstance(callee, ast.Attribute) else []
            callee = callee.func if isinstance(callee, ast.Call) else callee.value
        if not REACHING.isdisjoint(names) or not isinstance(callee, ast.Name):
            return REACHING.isdisjoint(names)
        value = self.names.get(callee.id)
        if isinstance(value, ModuleType):
            return value.__name__.partition(".")[0] in COMPUTING
        if isinstance(value, FunctionType) and value.__code__.co_filename != self.file:
            return value.__module__.partition(".")[0] in COMPUTING
        return callee.id in BUILTINS or not hasattr(builtins, callee.id)

    def edits(
        self, statement: ast.AST, function: ast.FunctionDef, changes: Sequence[Change] | None = None
    ) -> Iterator[LineEdit]:
        """Yield the changes to a statement of a function: of these kinds, or of all kinds and with values exchanged."""
        owner = self._object(function)
        if owner is None or not self.only_computes(function):
            return
        for node, texts in _changes(statement, function, self.tree, changes):
            start, end = self._span(node)
            inside = self.text[start - 1] == "(" and self.text[end : end + 1] == ")"
            compared = [one for one in ast.walk(statement) if isinstance(one, ast.Compare) and _inside(node, one)]
            first, last = self._span(compared[0]) if compared else (start, start)  # the outermost
            for text in dict.fromkeys(texts):
                bare = text[1:-1] if inside and text.startswith("(") and text.endswith(")") else text
                changed = self.text[:start] + bare + self.text[end:]
                part = f"{self.text[first:start]}{bare}{self.text[end:last]}"
                watched = f"{self.text[:first]}{COMPARED}({part}){self.text[last:]}" if compared else changed
                code = self._compiled(watched, function)
                if code is not None and code.co_freevars == owner.__code__.co_freevars:
                    line = bisect_right(self._starts, start)
                    begin = self._starts[line - 1]
                    old, new = (f"{whole}\n"[begin : f"{whole}\n".index("\n", start)] for whole in (self.text, changed))
                    yield LineEdit(self.file, line, old.strip()[:MAX_LINE], new.strip()[:MAX_LINE], code, owner)

    def moves(self, statement: ast.AST, function: ast.FunctionDef) -> Iterator[LineEdit]:
        """Yield the ways in which a statement stands behind, or before, one of the next that has to do with it."""
        owner = self._object(function)
        if owner is None or not self.only_computes(function):
            return
        for behind in _following(statement, function):
            start, end = self._span(statement)
            first, last = self._span(behind)
            line, other, between = self.text[start:end], self.text[first:last], self.text[end:first]
            ways = [
                (f"{between.lstrip()}{other}{_break(between)}{line}", f"move `{_head(line)}` behind `{_head(other)}`")
            ]
            if between.strip():
                moved = f"move `{_head(other)}` before `{_head(line)}`"
                ways.append((f"{other}{_break(between)}{line}{between.rstrip()}", moved))
            for text, instruction in ways:
                code = self._compiled(self.text[:start] + text + self.text[last:], function)
                if code is not None and code.co_freevars == owner.__code__.co_freevars:
                    number = bisect_right(self._starts, start)
                    yield LineEdit(self.file, number, _head(line), _head(other), code, owner, moved=instruction)

    def _span(self, node: ast.AST) -> tuple[int, int]:
        place: ast.expr = node  # type: ignore[assignment]  # only nodes with a place are changed
        return (
            self._starts[place.lineno - 1] + place.col_offset,
            self._starts[(place.end_lineno or place.lineno) - 1] + (place.end_col_offset or 0),
        )

    def _object(self, function: ast.FunctionDef) -> FunctionType | None:
        """Return the function that the module has at a place."""
        classes = [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef) and function in node.body]
        holder = self.names.get(classes[0].name) if classes else None
        found = vars(holder).get(function.name) if isinstance(holder, type) else self.names.get(function.name)
        return found if isinstance(found, FunctionType) and found.__code__.co_filename == self.file else None

    def _compiled(self, text: str, function: ast.FunctionDef) -> CodeType | None:
        """Return the code of a function in a text that was changed within it."""
        end = self._span(function)[1] + len(text) - len(self.text)
        lines = text[self._starts[function.lineno - 1] : end]
        above = "if True:\n" if function.col_offset else ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a change that makes no sense
            try:
                tree = ast.parse(above + lines)
                ast.increment_lineno(tree, function.lineno - 1 - bool(above))
                whole = compile(tree, self.file, "exec", dont_inherit=True, flags=_FUTURE)
            except SyntaxError:
                return None
        return next((const for const in whole.co_consts if isinstance(const, CodeType)), None)


_FUTURE = 0x1000000  # annotations are not evaluated
"""The flag of ``from __future__ import annotations``."""


def _changes(
    statement: ast.AST, function: ast.FunctionDef, tree: ast.Module, changes: Sequence[Change] | None
) -> Iterator[tuple[ast.AST, list[str]]]:
    """Yield each place of a statement, with the texts that may stand there."""
    parents = {child: node for node in ast.walk(statement) for child in ast.iter_child_nodes(node)}
    variables = [arg.arg for arg in function.args.args if arg.arg != "self"]
    variables += [node.id for node in ast.walk(function) if isinstance(node, ast.Name) and _stored(node)]
    attributes = _attributes(function, tree)
    types = _types(function)

    def grouped(node: ast.AST, new: ast.AST) -> str:
        parent = parents.get(node)
        inner = isinstance(parent, ast.BinOp | ast.UnaryOp | ast.Compare | ast.Attribute | ast.BoolOp | ast.Starred)
        inner = inner or (isinstance(parent, ast.Subscript) and parent.value is node)
        return f"({ast.unparse(new)})" if inner and isinstance(new, _GROUPED) else ast.unparse(new)

    checked = {part for node in ast.walk(statement) if _checks_type(node) for part in ast.walk(node)}
    written = _written(statement)
    if written is not None and changes is None:
        yield statement, [NOTHING]
        checked |= {*ast.walk(written)}  # to write to another tensor is only to leave it out
    for change in _CHANGES if changes is None else changes:
        for node in ast.walk(statement):
            if node in checked:
                continue
            ways = (new for new in change(node, variables, attributes) if not _of_another_type(node, new, types))
            texts = [grouped(node, new) for new in ways if not _is_senseless(node, new, parents)]
            if texts:
                yield node, texts
    if changes is not None:
        return
    values = [node for node in ast.walk(statement) if _is_value(node) and node not in checked]
    for first, second in combinations(values, 2):  # two values in each other's place
        if ast.dump(first) != ast.dump(second) and not _inside(first, second) and not _inside(second, first):
            texts = [ast.unparse(first), ast.unparse(second)]
            yield statement, [_swapped(statement, first, second)] if texts[0] != texts[1] else []


MOST_MOVED = 3
"""Over how many statements one is moved at most."""


def _following(statement: ast.AST, function: ast.FunctionDef) -> list[ast.stmt]:
    """Return the next statements of a block that write what a statement reads, or read what it writes."""
    blocks = (getattr(node, name, None) for node in ast.walk(function) for name in ("body", "orelse"))
    block = next((one for one in blocks if isinstance(one, list) and any(each is statement for each in one)), [])
    place = next((place for place, one in enumerate(block) if one is statement), len(block))
    found = []
    for other in block[place + 1 : place + 1 + MOST_MOVED]:
        if hasattr(other, "body") or isinstance(other, ast.Return | ast.Raise | ast.Break | ast.Continue):
            break
        writes, reads = ([{*_names_in(one, stored=stored)} for one in (statement, other)] for stored in (True, False))
        if not writes[0].isdisjoint(reads[1] | writes[1]) or not writes[1].isdisjoint(reads[0]):
            found.append(other)
    return found


def _names_in(statement: ast.AST, *, stored: bool) -> Iterator[str]:
    """Yield the names that a statement writes, or those that it reads."""
    written = _written(statement)
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and (
            _stored(node) or (stored and written is not None and _inside(node, written))
        ):
            yield from [node.id] if stored else []
        elif isinstance(node, ast.Name) and not stored:
            yield node.id


def _break(between: str) -> str:
    """Return the end of a line, and the indentation of the next one."""
    return between[between.rfind("\n") :] if "\n" in between else "; "


def _head(text: str) -> str:
    return text.partition("\n")[0].strip()[:MAX_LINE]


_TURNED = frozenset({"transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "where", "minimum", "maximum", "lerp"})
"""Functions whose last two arguments differ in any code that is written on purpose."""


def _is_senseless(node: ast.AST, new: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> bool:
    """Whether code with a change in it has no sense, such as an axis that is exchanged with itself, or ``x - x``."""
    around = parents.get(node)
    if around is not None and isinstance(node, ast.expr):
        holder = _with_child(around, node, new)
        return _does_nothing(new) or _does_nothing(holder)
    return _does_nothing(new)


def _with_child(parent: ast.AST, child: ast.AST, new: ast.AST) -> ast.AST:
    """Return a copy of a node with one of its children exchanged."""
    changed = _shallow(parent)
    for name, value in ast.iter_fields(parent):
        if value is child:
            setattr(changed, name, new)
        elif isinstance(value, list):
            setattr(changed, name, [new if one is child else one for one in value])
    return changed


def _does_nothing(node: ast.AST) -> bool:
    """Whether a node is an operation of a value with itself, or one that gives back what it is given."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name), args=[*_, first, second]) if name in _TURNED:
            negative = {number < 0 for one in (first, second) if (number := _number(one)) is not None}
            return len(negative) > 1 or ast.dump(first) == ast.dump(second)  # -1 may be the axis 3
        case ast.BinOp(left=left, op=ast.Sub() | ast.Div() | ast.FloorDiv() | ast.Mod(), right=right):
            return ast.dump(left) == ast.dump(right)
        case ast.Compare(left=left, comparators=[right]):
            return ast.dump(left) == ast.dump(right)
        case ast.IfExp(body=first, orelse=second):
            return ast.dump(first) == ast.dump(second)
    return False


def _written(statement: ast.AST) -> ast.expr | None:
    """Return what a statement changes in place: ``x`` of ``x += y``, of ``x[...] = y`` and of ``x.add_(y)``."""
    match statement:
        case ast.AugAssign(target=target):
            return target
        case ast.Assign(targets=[ast.Subscript(value=value)]):
            return value
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=value, attr=name))):
            return value if name.endswith("_") and not name.endswith("__") else None
    return None


def _types(function: ast.FunctionDef) -> dict[str, str]:
    """The arguments that are annotated as a tensor or as a number."""
    arguments = [*function.args.args, *function.args.kwonlyargs]
    found: dict[str, str] = {}
    for argument in arguments:
        text = "" if argument.annotation is None else ast.unparse(argument.annotation)
        if "Tensor" in text:
            found[argument.arg] = "tensor"
        elif text in ("float", "int", "bool"):
            found[argument.arg] = "number"
    return found


def _of_another_type(node: ast.AST, new: ast.AST, types: Mapping[str, str]) -> bool:
    """Whether a name is exchanged for one of another type: a rate of 0 in the place of a mask only takes it away."""
    if not isinstance(node, ast.Name) or not isinstance(new, ast.Name):
        return False
    kinds = types.get(node.id), types.get(new.id)
    return None not in kinds and kinds[0] != kinds[1]


def _checks_type(node: ast.AST) -> bool:
    """Whether a call only asks what a value is: with another argument it only takes a branch out."""
    names = ("isinstance", "issubclass", "hasattr", "callable")
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _is_value(node: ast.AST) -> bool:
    loaded = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
    return loaded and (isinstance(node, ast.Name) or ast.unparse(node).startswith("self."))


def _inside(inner: ast.AST, outer: ast.AST) -> bool:
    return any(node is inner for node in ast.walk(outer))


def _swapped(statement: ast.AST, first: ast.AST, second: ast.AST) -> str:
    """Return a statement with two of its parts in each other's place."""

    class Swap(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            other = {id(first): second, id(second): first}.get(id(node))
            return self.generic_visit(_shallow(node)) if other is None else other

    return ast.unparse(Swap().visit(statement))


def _shallow(node: ast.AST) -> ast.AST:
    """Return a copy of a node whose lists are its own."""
    fields = {name: [*value] if isinstance(value, list) else value for name, value in ast.iter_fields(node)}
    return ast.copy_location(type(node)(**fields), node)


def _attributes(function: ast.FunctionDef, tree: ast.Module) -> list[str]:
    """Return the attributes that the function's class sets."""
    owner = next((node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and function in node.body), None)
    set_here = (node for node in ast.walk(owner or function) if isinstance(node, ast.Attribute))
    return list(dict.fromkeys(node.attr for node in set_here if isinstance(node.ctx, ast.Store)))


Change = Callable[[ast.AST, Sequence[str], Sequence[str]], Iterator[ast.AST]]
"""A node, the function's variables and the attributes of its class -> what may stand in the node's place."""


def _names(node: ast.AST, variables: Sequence[str], attributes: Sequence[str]) -> Iterator[ast.AST]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in variables:
        yield from (ast.Name(name, ast.Load()) for name in dict.fromkeys(variables) if name != node.id)
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self" and isinstance(node.ctx, ast.Load):
        yield from (ast.Attribute(node.value, name, ast.Load()) for name in attributes if name != node.attr)
    if isinstance(node, ast.Attribute):
        family = next((family for family in FUNCTIONS if node.attr in family), ())
        yield from (ast.Attribute(node.value, name, ast.Load()) for name in family if name != node.attr)


def _numbers(node: ast.AST, variables: Sequence[str], attributes: Sequence[str]) -> Iterator[ast.AST]:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield from (
            ast.Constant(number) for number in (node.value - 1, node.value + 1, 0, 1, 2, -1) if number != node.value
        )
    if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant) and isinstance(node.operand.value, int):
        yield from (ast.Constant(number) for number in (0, 1, 1 - node.operand.value, -1 - node.operand.value))


_FILLING = ("masked_fill", "masked_fill_", "where", "full", "full_like", "fill_")
"""Functions that write a number, with which scores are hidden."""


def _fills(node: ast.AST, variables: Sequence[str], attributes: Sequence[str]) -> Iterator[ast.AST]:
    """Yield minus infinity for a number with which scores are filled, and the other sign of one in a product or sum."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FILLING and node.args:
        *others, last = node.args
        if _number(last) is not None:
            lowest = ast.Call(ast.Name("float", ast.Load()), [ast.Constant("-inf")], [])
            yield ast.Call(node.func, [*others, lowest], node.keywords)
    if isinstance(node, ast.BinOp) and (number := _number(node.right)):
        yield ast.BinOp(node.left, node.op, _negative(node.right) if number > 0 else ast.Constant(-number))


def _number(node: ast.expr) -> float | None:
    """Return the number that is written, if it is one."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _operators(node: ast.AST, variables: Sequence[str], attributes: Sequence[str]) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp):
        yield from (node.left, node.right, ast.BinOp(node.right, node.op, node.left))
    operator = {ast.BinOp: "op", ast.BoolOp: "op"}.get(type(node))
    present = getattr(node, operator) if operator else node.ops[0] if isinstance(node, ast.Compare) else None
    family = next((family for family in OPERATORS if isinstance(present, family)), ())
    for kind in family:
        if not isinstance(present, kind):
            changed = _shallow(node)
            if isinstance(changed, ast.Compare):
                changed.ops = [kind(), *changed.ops[1:]]  # type: ignore[list-item]  # it is one of them
            else:
                changed.op = kind()  # type: ignore[attr-defined]  # as above
            yield changed
    if isinstance(node, ast.UnaryOp):
        yield node.operand
    if isinstance(node, ast.Compare):
        yield ast.UnaryOp(ast.Invert(), node)


def _calls(node: ast.AST, variables: Sequence[str], attributes: Sequence[str]) -> Iterator[ast.AST]:
    if not isinstance(node, ast.Call):
        return
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    if owner is not None and (not isinstance(owner, ast.Name) or owner.id in variables):
        yield owner  # x.f(...) -> x
    if node.args and not isinstance(node.args[0], ast.Starred):
        yield node.args[0]  # f(x, ...) -> x
    for place in range(len(node.args)):
        yield ast.Call(node.func, [arg for number, arg in enumerate(node.args) if number != place], node.keywords)
    for keyword in node.keywords:
        yield ast.Call(node.func, node.args, [other for other in node.keywords if other is not keyword])


def _inside_out(node: ast.AST, variables: Sequence[str], attributes: Sequence[str]) -> Iterator[ast.AST]:
    """Yield ``w * f(x)`` for ``f(w * x)``, and the reverse; and so with a sum, as of a norm before or behind it."""
    if isinstance(node, ast.Call) and len(node.args) == 1 and isinstance(node.args[0], ast.BinOp):
        inner = node.args[0]
        if isinstance(inner.op, ast.Mult | ast.Add):
            yield ast.BinOp(inner.left, inner.op, ast.Call(node.func, [inner.right], node.keywords))
            yield ast.BinOp(ast.Call(node.func, [inner.left], node.keywords), inner.op, inner.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Add):
        for call, other in ((node.left, node.right), (node.right, node.left)):
            if isinstance(call, ast.Call) and len(call.args) == 1 and not isinstance(call.args[0], ast.Starred):
                yield ast.Call(call.func, [ast.BinOp(call.args[0], node.op, other)], call.keywords)


def _orders(node: ast.AST, variables: Sequence[str], attributes: Sequence[str]) -> Iterator[ast.AST]:
    if isinstance(node, ast.Tuple | ast.List) and 1 < len(node.elts) <= 4:  # more has too many orders
        for order in permutations(node.elts):
            if list(order) != node.elts:
                yield type(node)(list(order), node.ctx)


def _slices(node: ast.AST, variables: Sequence[str], attributes: Sequence[str]) -> Iterator[ast.AST]:
    """Yield the other end of what is cut off, and cuts at a variable: ``x[n:]`` for ``x[:n]``, and so on."""
    if not isinstance(node, ast.Slice) or node.step is not None:
        return
    first, last = node.lower, node.upper
    if (first is None) != (last is None):
        yield ast.Slice(last, first)
        names = [ast.Name(name, ast.Load()) for name in dict.fromkeys(variables)]
        yield from (ast.Slice(None, name) for name in names)
        yield from (ast.Slice(name, None) for name in names)
        yield ast.Slice(*(None if one is None else _negative(one) for one in (last, first)))
    elif first is not None and last is not None:
        yield from (ast.Slice(None, last), ast.Slice(first, None))


def _negative(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return node.operand
    return ast.UnaryOp(ast.USub(), node)


_OTHER_EDGE: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
"""The comparison that counts the edge as well, or no more."""


def _edges(node: ast.AST, variables: Sequence[str], attributes: Sequence[str]) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OTHER_EDGE:
        yield ast.Compare(node.left, [_OTHER_EDGE[type(node.ops[0])]()], node.comparators)


def _decisions(node: ast.AST, variables: Sequence[str], attributes: Sequence[str]) -> Iterator[ast.AST]:
    """Yield a condition that is always true or false, one arm of an expression, and what is left of ``and``, ``or``."""
    if isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)
    if isinstance(node, ast.BoolOp):
        for left in combinations(node.values, len(node.values) - 1):
            yield left[0] if len(left) == 1 else ast.BoolOp(node.op, list(left))
    if isinstance(node, ast.Compare | ast.BoolOp | ast.Call | ast.UnaryOp):
        yield from (ast.Constant(False), ast.Constant(True))


_CHANGES: tuple[Change, ...] = (_edges, _names, _operators, _numbers, _fills, _orders, _slices, _inside_out, _calls)
"""The likeliest first."""
