"""Code coverage of a port: which instructions of its own code ran, and which branches no input reached."""

from __future__ import annotations

import ast
import linecache
import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from porting.frames import from_here, is_installed
from porting.tracing.constant_conditions import ConditionEvaluator, assigned

MODELS = "porting.models"
"""The only package of this library whose modules may be a port."""

_LIBRARY = MODELS.partition(".")[0]


@dataclass
class EnteredFunction:
    """A function that was entered."""

    code: CodeType
    globals: dict[str, Any] = field(repr=False)
    offsets: set[int] = field(default_factory=set)


class Executed:
    """Records which instructions of a port's own functions ran, over several passes.

    Args:
        besides: code that is not recorded, since nothing new can run in it: see :func:`exhausted`.
    """

    def __init__(self, module: nn.Module, besides: Iterable[CodeType] = ()) -> None:
        self.functions: list[EnteredFunction] = []
        self._package = type(module).__module__.partition(".")[0]
        self._codes = [*besides]  # keeps the codes alive, so that no id is reused
        self._by_code: dict[int, EnteredFunction | None] = {id(code): None for code in self._codes}

    def lacks(self, other: Executed) -> bool:
        """Return whether instructions ran in another recording that did not run here."""
        return any(function.offsets - self._offsets(function) for function in other.functions)

    def add(self, other: Executed) -> None:
        """Add what ran in another recording."""
        for function in other.functions:
            entered = self._by_code.get(id(function.code))
            if entered is None:
                self._codes.append(function.code)
                entered = self._by_code[id(function.code)] = EnteredFunction(function.code, function.globals)
                self.functions.append(entered)
            entered.offsets |= function.offsets

    def _offsets(self, function: EnteredFunction) -> set[int]:
        entered = self._by_code.get(id(function.code))
        return set() if entered is None else entered.offsets

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Return a context that records the port's code in this thread; an outer trace function is paused."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def would_watch(self, name: str, code: CodeType) -> bool:
        """Return whether code of a module would be recorded if its source were readable."""
        outermost = name.partition(".")[0]
        return outermost != "torch" and (
            not linecache.getlines(code.co_filename) or is_own(name, code.co_filename, self._package)
        )

    def _enter(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if id(code) not in self._by_code:
            self._codes.append(code)
            own = is_own(str(frame.f_globals.get("__name__", "")), code.co_filename, self._package)
            entered = self._by_code[id(code)] = EnteredFunction(code, frame.f_globals) if own else None
            if entered is not None:
                self.functions.append(entered)
        entered = self._by_code[id(code)]
        if entered is None:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        offsets = entered.offsets

        def step(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
            if event == "opcode":
                offsets.add(frame.f_lasti)
            return step

        return step


def is_own(name: str, file: str, package: str) -> bool:
    """Return whether code belongs to a port.

    Args:
        name: the import path of the code's module.
        package: the outermost package of the port's class.
    """
    outermost = name.partition(".")[0]
    if outermost == _LIBRARY:
        return name == MODELS or name.startswith(f"{MODELS}.")
    if outermost == "torch" or not linecache.getlines(file):
        return False
    return outermost == package or not is_installed(file)


INPUTS, TRAINING, RAISES, FIXED = "inputs", "training", "raises", "fixed"

Place = tuple[int, int]
"""A line, from 1, and a column in bytes, from 0."""

Span = tuple[Place, Place]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NOTHING = (ast.Pass, ast.Global, ast.Nonlocal)


@dataclass(frozen=True, kw_only=True)
class Branch:
    """Code that never ran.

    Attributes:
        where: ``file:line`` of the condition.
        condition: its source text, ``if output_attentions:`` or ``else of if mask is None:``.
        function: the name of its function.
        lines: the number of lines that never ran.
        first: the first of these lines.
        why: ``inputs`` if other inputs might reach it, ``raises`` if it ends in an error, ``training`` if it runs only
            in training, ``fixed`` if the module's attributes rule it out for all inputs.
        constants: the integers in the condition.
    """

    where: str
    condition: str
    function: str
    lines: int
    first: int
    why: str = INPUTS
    constants: tuple[int, ...] = ()


def never_ran_in(executed: Executed, module: nn.Module) -> tuple[Branch, ...]:
    """Return the branches that never ran in functions that were entered.

    Args:
        module: the port, whose attributes decide some conditions.
    """
    files: dict[str, list[EnteredFunction]] = {}
    for function in executed.functions:
        files.setdefault(function.code.co_filename, []).append(function)
    sources = {file: _SourceFile(file, functions_of_file) for file, functions_of_file in files.items()}
    assigned_names = frozenset[str]().union(*(source.parsed.assigned for source in sources.values() if source.parsed))
    branches = [branch for source in sources.values() for branch in source.branches(module, assigned_names)]
    return tuple(dict.fromkeys(branches))


def untaken(executed: Executed, module: nn.Module) -> list[Branch]:
    """Return the branches that never ran and that some input may take."""
    return [one for one in never_ran_in(executed, module) if one.why == INPUTS]


def exhausted(executed: Executed, open_: Iterable[Branch]) -> list[CodeType]:
    """Return the code that was entered and holds no branch that an input may still take.

    Recording calls a Python function for each instruction, which takes longer than the instruction.

    Args:
        open_: the branches that some input may take, from :func:`untaken`.
    """
    first_lines: dict[str, list[int]] = {}
    for branch in open_:
        first_lines.setdefault(branch.where.rpartition(":")[0], []).append(branch.first)
    found = []
    for code in (function.code for function in executed.functions):
        last = max((line for one in nested_code(code) for *_, line in one.co_lines() if line), default=0)
        lines = first_lines.get(from_here(code.co_filename), [])
        if not any(code.co_firstlineno <= line <= last for line in lines):
            found.append(code)
    return found


def branches_apart(passing: Sequence[Executed], failing: Sequence[Executed], module: nn.Module) -> tuple[Branch, ...]:
    """Return the branches that ran in all failing passes and not in all passing ones, or in no failing one and in some.

    They are sorted by how few of the passing ones they have in common with the failing ones.
    """
    never = [[set(never_ran_in(one, module)) for one in some] for some in (passing, failing)]
    skipped, ran = set.intersection(*never[1]), set[Branch]().union(*never[0]).difference(*never[1])
    alike = {one: sum(one in some for some in never[0]) for one in skipped}
    alike |= {one: sum(one not in some for some in never[0]) for one in ran}
    apart = [one for one, number in alike.items() if number < len(passing)]
    return tuple(sorted(apart, key=lambda one: (alike[one], one.where, one.first)))


def not_watched(executed: Executed, module: nn.Module, ran: Collection[str]) -> tuple[str, ...]:
    """Return the classes of modules that ran and could not be recorded: compiled ones, or without readable source."""
    entered = {id(function.code) for function in executed.functions}
    classes: dict[str, None] = {}
    for path, part in module.named_modules():
        if path and path not in ran:
            continue
        code, name = getattr(part.forward, "__code__", None), type(part).__qualname__
        if isinstance(part, torch.jit.ScriptModule):
            classes[part.original_name] = None
        elif (
            isinstance(code, CodeType) and id(code) not in entered and executed.would_watch(type(part).__module__, code)
        ):
            classes[name] = None
    return tuple(classes)


@dataclass(frozen=True)
class _ParsedFile:
    """The syntax tree of a source file."""

    tree: ast.Module

    @cached_property
    def definitions(self) -> tuple[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str, str], ...]:
        return tuple(_definitions(self.tree))

    @cached_property
    def assigned(self) -> frozenset[str]:
        return assigned(self.tree)


@lru_cache(maxsize=64)
def _parse(text: str) -> _ParsedFile | None:
    """Parse a file once, since a search for inputs asks for its branches after every batch."""
    try:
        return _ParsedFile(ast.parse(text))
    except SyntaxError:  # a cell of a notebook with its own commands, say
        return None


@dataclass
class _SourceFile:
    """A source file, and which of its instructions ran."""

    file: str
    functions: Sequence[EnteredFunction]

    def __post_init__(self) -> None:
        self._executed, self._all = _SpanIndex(), _SpanIndex()

    @cached_property
    def lines(self) -> list[str]:
        return linecache.getlines(self.file)

    @cached_property
    def parsed(self) -> _ParsedFile | None:
        return _parse("".join(self.lines))

    def branches(self, module: nn.Module, written: frozenset[str]) -> Iterator[Branch]:
        if self.parsed is None:
            return
        for function in self.functions:
            for code in nested_code(function.code):
                self._all.add(span for _, span in _spans(code))
            self._executed.add(span for offset, span in _spans(function.code) if offset in function.offsets)
        for node, name, kind in self.parsed.definitions:
            entered = next((function for function in self.functions if _is_code_of(function.code, node)), None)
            if entered is not None:
                yield from self._statements(
                    node.body, _Scope(name, ConditionEvaluator(node, kind, entered.globals, module, written))
                )

    def ran(self, node: ast.AST) -> bool:
        return self._executed.within(_span(node))

    def compiled(self, node: ast.AST) -> bool:
        """Return whether a node has any instruction; a docstring, for example, has none."""
        return not isinstance(node, _NOTHING) and self._all.within(_span(node))

    def _statements(self, block: Sequence[ast.stmt], scope: _Scope) -> Iterator[Branch]:
        """Yield the branches that never ran in statements of which the first ran."""
        previous: ast.stmt | None = None
        for number, statement in enumerate(block):
            if not self.compiled(statement):
                continue
            if not self.ran(statement):
                yield self._unreached(block[number:], previous or statement, "after ", scope)
                return
            yield from self._inside_statement(statement, scope)
            previous = statement

    def _inside_statement(self, node: ast.stmt, scope: _Scope) -> Iterator[Branch]:
        """Yield the branches that never ran in a statement that ran."""
        for expression in _expressions(node):
            yield from self._expression_arms(expression, scope)
        match node:
            case ast.If():
                yield from self._block(node.body, node, "", scope, taken=True)
                yield from self._block(node.orelse, node, "else of ", scope, taken=False)
            case ast.For() | ast.AsyncFor() | ast.While():
                yield from self._block(node.body, node, "", scope)
                yield from self._block(node.orelse, node, "else of ", scope)
            case ast.With() | ast.AsyncWith():
                yield from self._statements(node.body, scope)
            case ast.Try():
                yield from self._statements(node.body, scope)
                for handler in node.handlers:
                    yield from self._block(handler.body, handler, "", scope, why=RAISES)
                yield from self._block(node.orelse, node, "else of ", scope)
                yield from self._statements(node.finalbody, scope)
            case ast.Match():
                for case in node.cases:
                    yield from self._block(case.body, case.pattern, "case ", scope)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                inner = _Scope(f"{scope.function}.{node.name}", scope.conditions.for_nested())
                yield from self._block(node.body, node, "", inner)

    def _block(
        self,
        block: Sequence[ast.stmt],
        condition: ast.AST,
        prefix: str,
        scope: _Scope,
        *,
        taken: bool | None = None,
        why: str = "",
    ) -> Iterator[Branch]:
        first = next((statement for statement in block if self.compiled(statement)), None)
        if first is None:
            return
        if self.ran(first):
            yield from self._statements(block, scope)
        else:
            yield self._unreached(block, condition, prefix, scope, taken=taken, why=why)

    def _unreached(
        self,
        block: Sequence[ast.AST],
        condition: ast.AST,
        prefix: str,
        scope: _Scope,
        *,
        taken: bool | None = None,
        why: str = "",
    ) -> Branch:
        """Return the branch for statements after a condition that never ran."""
        if prefix == "else of " and isinstance(block[0], ast.If) and self._line(block[0]).startswith("elif "):
            condition, prefix, taken = block[0], "", None
        test = getattr(condition, "test", None)
        if not why and isinstance(block[-1], ast.Raise):
            why = RAISES
        if prefix == "after " and isinstance(condition, ast.If) and not condition.orelse:
            taken = False
        first, last = block[0], block[-1]
        lines = range(getattr(first, "lineno", 0), (getattr(last, "end_lineno", 0) or 0) + 1)
        return Branch(
            where=f"{from_here(self.file)}:{_span(condition)[0][0]}",
            condition=prefix + self._line(condition),
            function=scope.function,
            lines=sum(bool(self.lines[number - 1].strip()) for number in lines),
            first=lines.start,
            why=why or scope.why(test, taken=taken),
            constants=scope.conditions.numbers(test) if isinstance(test, ast.expr) else (),
        )

    def _line(self, node: ast.AST) -> str:
        """Return the first line of a condition's source."""
        number, column = _span(node)[0]
        line = self.lines[number - 1].encode()[column:].decode(errors="replace")
        return line.partition("#")[0].strip()

    def _expression_arms(self, expression: ast.expr, scope: _Scope) -> Iterator[Branch]:
        """Yield the arms of conditional expressions, boolean operators and comprehensions that never ran."""
        if not self.compiled(expression) or not self.ran(expression):
            return
        for arm, taken in _arms(expression):
            if self.compiled(arm) and not self.ran(arm):
                yield self._unreached_arm(arm, expression, scope, taken=taken)
        for child in ast.iter_child_nodes(expression):
            inner = child.value if isinstance(child, ast.keyword) else child
            if isinstance(inner, ast.expr) and inner is not getattr(expression, "test", None):
                yield from self._expression_arms(inner, scope)

    def _unreached_arm(self, arm: ast.expr, whole: ast.expr, scope: _Scope, *, taken: bool | None) -> Branch:
        test = getattr(whole, "test", None)
        return Branch(
            where=f"{from_here(self.file)}:{arm.lineno}",
            condition=f"{ast.unparse(whole)} -> {ast.unparse(arm)}",
            function=scope.function,
            lines=1,
            first=arm.lineno,
            why=scope.why(test, taken=taken),
            constants=scope.conditions.numbers(test) if isinstance(test, ast.expr) else (),
        )


@dataclass(frozen=True)
class _Scope:
    """A function, and what its conditions evaluate to for all inputs."""

    function: str
    conditions: ConditionEvaluator

    def why(self, test: object, *, taken: bool | None) -> str:
        """Return why a branch never ran that is taken if its condition is ``taken``."""
        if not isinstance(test, ast.expr) or taken is None or self.conditions.value(test) is not (not taken):
            return INPUTS
        return TRAINING if self.conditions.asks_training(test) else FIXED


class _SpanIndex:
    """Ranges of a source file, searchable by a range that contains them."""

    def __init__(self) -> None:
        self._sorted: list[Span] = []
        self._by_code: set[Span] = set()

    def add(self, spans: Iterable[Span]) -> None:
        for span in spans:
            if span not in self._by_code:
                self._by_code.add(span)
                insort(self._sorted, span)

    def within(self, span: Span) -> bool:
        start, end = span
        for place in range(bisect_left(self._sorted, (start, start)), len(self._sorted)):
            first, last = self._sorted[place]
            if first > end:
                return False
            if last <= end:
                return True
        return False


def _definitions(
    tree: ast.AST, prefix: str = "", kind: str = ""
) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str, str]]:
    """Yield each function of a file that is not nested in another one, with its qualified name and its class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _FUNCTIONS):
            yield node, f"{prefix}{node.name}", kind
            yield from ((inner, name, "") for inner, name, _ in _methods_inside(node, f"{prefix}{node.name}."))
        elif isinstance(node, ast.ClassDef):
            yield from _definitions(node, f"{prefix}{node.name}.", node.name)
        elif not isinstance(node, ast.expr):
            yield from _definitions(node, prefix, kind)


def _methods_inside(tree: ast.AST, prefix: str) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str, str]]:
    """Yield the methods of classes inside a function; functions inside it are treated as part of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from _definitions(node, f"{prefix}{node.name}.", node.name)


def _is_code_of(code: CodeType, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return code.co_name == node.name and code.co_firstlineno == first


def nested_code(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code, and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested_code(constant)


def _spans(code: CodeType) -> Iterator[tuple[int, Span]]:
    """Yield the offset of each instruction with its range in the source."""
    for number, (line, end_line, column, end_column) in enumerate(code.co_positions()):
        if line is not None and end_line is not None and column is not None and end_column is not None:
            yield 2 * number, ((line, column), (end_line, end_column))


def _span(node: ast.AST) -> Span:
    start = getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
    return start, (getattr(node, "end_lineno", 0) or 0, getattr(node, "end_col_offset", 0) or 0)


def _arms(expression: ast.expr) -> list[tuple[ast.expr, bool | None]]:
    """Return the parts of an expression that need not run, with the value of its condition with which each does."""
    match expression:
        case ast.IfExp():
            return [(expression.body, True), (expression.orelse, False)]
        case ast.BoolOp():
            return [(arm, None) for arm in expression.values[1:]]
        case ast.ListComp(elt=arm) | ast.SetComp(elt=arm) | ast.GeneratorExp(elt=arm) | ast.Lambda(body=arm):
            return [(arm, None)]
    return []


def _expressions(node: ast.stmt) -> Iterable[ast.expr]:
    """Return the expressions of a statement; those of a condition compute nothing of the model."""
    if isinstance(node, ast.If | ast.While | ast.Assert):
        return ()
    return [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
