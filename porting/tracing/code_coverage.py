"""Code coverage of a port: which of its own instructions ran, and which branches no input reached."""

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
"""The one part of the library that may be somebody's port."""

_LIBRARY = MODELS.partition(".")[0]


@dataclass
class Ran:
    """One function that was entered.

    Attributes:
        code: its code.
        globals: where it looks names up.
        offsets: those of its instructions that ran.
    """

    code: CodeType
    globals: dict[str, Any] = field(repr=False)
    offsets: set[int] = field(default_factory=set)


class Executed:
    """Gathers, over several passes, which instructions of a port's own functions ran.

    Args:
        module: the port.

    Attributes:
        functions: those that were entered.
    """

    def __init__(self, module: nn.Module) -> None:
        self.functions: list[Ran] = []
        self._package = type(module).__module__.partition(".")[0]
        self._known: dict[int, Ran | None] = {}
        self._codes: list[CodeType] = []  # what is known by its id must live on

    def lacks(self, other: Executed) -> bool:
        """Whether another has instructions that ran and did not here."""
        return any(function.offsets - self._offsets(function) for function in other.functions)

    def add(self, other: Executed) -> None:
        """Take over what ran in another."""
        for function in other.functions:
            here = self._known.get(id(function.code))
            if here is None:
                self._codes.append(function.code)
                here = self._known[id(function.code)] = Ran(function.code, function.globals)
                self.functions.append(here)
            here.offsets |= function.offsets

    def _offsets(self, function: Ran) -> set[int]:
        here = self._known.get(id(function.code))
        return set() if here is None else here.offsets

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within it, in this thread, the port's code is watched.  Who watched before waits until it is over."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def would_watch(self, name: str, code: CodeType) -> bool:
        """Whether code of the module of that import path is watched, or would be if its source were there."""
        outermost = name.partition(".")[0]
        return outermost != "torch" and (
            not linecache.getlines(code.co_filename) or is_own(name, code.co_filename, self._package)
        )

    def _enter(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if id(code) not in self._known:
            self._codes.append(code)
            own = is_own(str(frame.f_globals.get("__name__", "")), code.co_filename, self._package)
            ran = self._known[id(code)] = Ran(code, frame.f_globals) if own else None
            if ran is not None:
                self.functions.append(ran)
        ran = self._known[id(code)]
        if ran is None:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        offsets = ran.offsets

        def step(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
            if event == "opcode":
                offsets.add(frame.f_lasti)
            return step

        return step


def is_own(name: str, file: str, package: str) -> bool:
    """Whether code belongs to a port.

    Args:
        name: the import path of the code's module.
        file: where its source is.
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
"""A line and a column."""

Span = tuple[Place, Place]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NOTHING = (ast.Pass, ast.Global, ast.Nonlocal)


@dataclass(frozen=True, kw_only=True)
class Branch:
    """Code that never ran.

    Attributes:
        where: ``file:line`` of the condition.
        condition: its source, ``if output_attentions:`` or ``else of if mask is None:``.
        function: what it is a part of.
        lines: how many lines of code never ran.
        first: the first of them.
        why: ``inputs``: other inputs might have taken it; ``raises``: it ends in an error; ``training``: it runs in
            training only; ``fixed``: what the module's own attributes hold rules it out, whatever the inputs are.
        constants: the whole numbers in the condition.
    """

    where: str
    condition: str
    function: str
    lines: int
    first: int
    why: str = INPUTS
    constants: tuple[int, ...] = ()


def never_ran_in(executed: Executed, module: nn.Module) -> tuple[Branch, ...]:
    """The code that never ran of the functions that did.

    Args:
        executed: what ran.
        module: the port, for what its attributes hold.
    """
    files: dict[str, list[Ran]] = {}
    for function in executed.functions:
        files.setdefault(function.code.co_filename, []).append(function)
    sources = {file: _Source(file, found) for file, found in files.items()}
    written = frozenset[str]().union(*(source.parsed.assigned for source in sources.values() if source.parsed))
    branches = [branch for source in sources.values() for branch in source.branches(module, written)]
    return tuple(dict.fromkeys(branches))


def not_watched(executed: Executed, module: nn.Module, ran: Collection[str]) -> tuple[str, ...]:
    """The kinds of modules that ran and could not be watched: compiled ones, and those whose source is not there.

    Args:
        executed: what ran of the port's own code.
        module: the port.
        ran: the names of the modules that ran.
    """
    seen = {id(function.code) for function in executed.functions}
    found: dict[str, None] = {}
    for path, part in module.named_modules():
        if path and path not in ran:
            continue
        code, name = getattr(part.forward, "__code__", None), type(part).__qualname__
        if isinstance(part, torch.jit.ScriptModule):
            found[part.original_name] = None
        elif isinstance(code, CodeType) and id(code) not in seen and executed.would_watch(type(part).__module__, code):
            found[name] = None
    return tuple(found)


@dataclass(frozen=True)
class _Parsed:
    """What the text of a file says, whatever ran of it."""

    tree: ast.Module

    @cached_property
    def definitions(self) -> tuple[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str, str], ...]:
        return tuple(_definitions(self.tree))

    @cached_property
    def assigned(self) -> frozenset[str]:
        return assigned(self.tree)


@lru_cache(maxsize=64)
def _parsed(text: str) -> _Parsed | None:
    """A file, parsed once: a search for inputs asks for its branches after every batch."""
    try:
        return _Parsed(ast.parse(text))
    except SyntaxError:  # a cell of a notebook with its own commands, say
        return None


@dataclass
class _Source:
    """A file, and what ran of it."""

    file: str
    functions: Sequence[Ran]

    def __post_init__(self) -> None:
        self._ran, self._every = _Spans(), _Spans()

    @cached_property
    def lines(self) -> list[str]:
        return linecache.getlines(self.file)

    @cached_property
    def parsed(self) -> _Parsed | None:
        return _parsed("".join(self.lines))

    def branches(self, module: nn.Module, written: frozenset[str]) -> Iterator[Branch]:
        if self.parsed is None:
            return
        for function in self.functions:
            for code in nested_code(function.code):
                self._every.add(span for _, span in _spans(code))
            self._ran.add(span for offset, span in _spans(function.code) if offset in function.offsets)
        for node, name, kind in self.parsed.definitions:
            found = next((function for function in self.functions if _is_of(function.code, node)), None)
            if found is not None:
                yield from self._of(
                    node.body, _Within(name, ConditionEvaluator(node, kind, found.globals, module, written))
                )

    def ran(self, node: ast.AST) -> bool:
        return self._ran.within(_span(node))

    def compiled(self, node: ast.AST) -> bool:
        """Whether there is an instruction of it at all: a docstring, say, leaves none."""
        return not isinstance(node, _NOTHING) and self._every.within(_span(node))

    def _of(self, block: Sequence[ast.stmt], within: _Within) -> Iterator[Branch]:
        """What never ran of statements of which the first did."""
        before: ast.stmt | None = None
        for number, statement in enumerate(block):
            if not self.compiled(statement):
                continue
            if not self.ran(statement):
                yield self._gap(block[number:], before or statement, "after ", within)
                return
            yield from self._inside(statement, within)
            before = statement

    def _inside(self, node: ast.stmt, within: _Within) -> Iterator[Branch]:
        """What never ran of a statement that did."""
        for expression in _expressions(node):
            yield from self._arms(expression, within)
        match node:
            case ast.If():
                yield from self._block(node.body, node, "", within, taken=True)
                yield from self._block(node.orelse, node, "else of ", within, taken=False)
            case ast.For() | ast.AsyncFor() | ast.While():
                yield from self._block(node.body, node, "", within)
                yield from self._block(node.orelse, node, "else of ", within)
            case ast.With() | ast.AsyncWith():
                yield from self._of(node.body, within)
            case ast.Try():
                yield from self._of(node.body, within)
                for handler in node.handlers:
                    yield from self._block(handler.body, handler, "", within, why=RAISES)
                yield from self._block(node.orelse, node, "else of ", within)
                yield from self._of(node.finalbody, within)
            case ast.Match():
                for case in node.cases:
                    yield from self._block(case.body, case.pattern, "case ", within)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                inner = _Within(f"{within.function}.{node.name}", within.foreseen.unknowing())
                yield from self._block(node.body, node, "", inner)

    def _block(
        self,
        block: Sequence[ast.stmt],
        condition: ast.AST,
        how: str,
        within: _Within,
        *,
        taken: bool | None = None,
        why: str = "",
    ) -> Iterator[Branch]:
        first = next((statement for statement in block if self.compiled(statement)), None)
        if first is None:
            return
        if self.ran(first):
            yield from self._of(block, within)
        else:
            yield self._gap(block, condition, how, within, taken=taken, why=why)

    def _gap(
        self,
        block: Sequence[ast.AST],
        condition: ast.AST,
        how: str,
        within: _Within,
        *,
        taken: bool | None = None,
        why: str = "",
    ) -> Branch:
        """Statements that never ran, behind a condition."""
        if how == "else of " and isinstance(block[0], ast.If) and self._line(block[0]).startswith("elif "):
            condition, how, taken = block[0], "", None
        test = getattr(condition, "test", None)
        if not why and isinstance(block[-1], ast.Raise):
            why = RAISES
        if how == "after " and isinstance(condition, ast.If) and not condition.orelse:
            taken = False
        first, last = block[0], block[-1]
        lines = range(getattr(first, "lineno", 0), (getattr(last, "end_lineno", 0) or 0) + 1)
        return Branch(
            where=f"{from_here(self.file)}:{_span(condition)[0][0]}",
            condition=how + self._line(condition),
            function=within.function,
            lines=sum(bool(self.lines[number - 1].strip()) for number in lines),
            first=lines.start,
            why=why or within.why(test, taken=taken),
            constants=within.foreseen.numbers(test) if isinstance(test, ast.expr) else (),
        )

    def _line(self, node: ast.AST) -> str:
        """The source of a condition, its first line."""
        number, column = _span(node)[0]
        line = self.lines[number - 1].encode()[column:].decode(errors="replace")
        return line.partition("#")[0].strip()

    def _arms(self, expression: ast.expr, within: _Within) -> Iterator[Branch]:
        """The arms of conditional expressions that never ran, ``x or y`` and comprehensions among them."""
        if not self.compiled(expression) or not self.ran(expression):
            return
        match expression:
            case ast.IfExp():
                for arm, taken in ((expression.body, True), (expression.orelse, False)):
                    if self.compiled(arm) and not self.ran(arm):
                        yield self._arm(arm, expression, within, taken=taken)
            case ast.BoolOp():
                for arm in expression.values[1:]:
                    if self.compiled(arm) and not self.ran(arm):
                        yield self._arm(arm, expression, within)
            case ast.ListComp(elt=arm) | ast.SetComp(elt=arm) | ast.GeneratorExp(elt=arm) | ast.Lambda(body=arm):
                if self.compiled(arm) and not self.ran(arm):
                    yield self._arm(arm, expression, within)
        for child in ast.iter_child_nodes(expression):
            inner = child.value if isinstance(child, ast.keyword) else child
            if isinstance(inner, ast.expr) and inner is not getattr(expression, "test", None):
                yield from self._arms(inner, within)

    def _arm(self, arm: ast.expr, whole: ast.expr, within: _Within, *, taken: bool | None = None) -> Branch:
        test = getattr(whole, "test", None)
        return Branch(
            where=f"{from_here(self.file)}:{arm.lineno}",
            condition=f"{ast.unparse(whole)} -> {ast.unparse(arm)}",
            function=within.function,
            lines=1,
            first=arm.lineno,
            why=within.why(test, taken=taken),
            constants=within.foreseen.numbers(test) if isinstance(test, ast.expr) else (),
        )


@dataclass(frozen=True)
class _Within:
    """A function, and what is known of its conditions without running it."""

    function: str
    foreseen: ConditionEvaluator

    def why(self, test: object, *, taken: bool | None) -> str:
        """Why a branch never ran that is taken when its condition is ``taken``."""
        if not isinstance(test, ast.expr) or taken is None or self.foreseen.value(test) is not (not taken):
            return INPUTS
        return TRAINING if self.foreseen.asks_training(test) else FIXED


class _Spans:
    """Places in a source, to be found by what they lie within."""

    def __init__(self) -> None:
        self._sorted: list[Span] = []
        self._known: set[Span] = set()

    def add(self, spans: Iterable[Span]) -> None:
        for span in spans:
            if span not in self._known:
                self._known.add(span)
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
    tree: ast.AST, within: str = "", kind: str = ""
) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str, str]]:
    """Every function of a file that is no part of another: it, its name, and its class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _FUNCTIONS):
            yield node, f"{within}{node.name}", kind
            yield from ((inner, name, "") for inner, name, _ in _hidden(node, f"{within}{node.name}."))
        elif isinstance(node, ast.ClassDef):
            yield from _definitions(node, f"{within}{node.name}.", node.name)
        elif not isinstance(node, ast.expr):
            yield from _definitions(node, within, kind)


def _hidden(tree: ast.AST, within: str) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str, str]]:
    """The methods of classes within a function: functions within it are judged with it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from _definitions(node, f"{within}{node.name}.", node.name)


def _is_of(code: CodeType, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return code.co_name == node.name and code.co_firstlineno == first


def nested_code(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested_code(constant)


def _spans(code: CodeType) -> Iterator[tuple[int, Span]]:
    """Each instruction's offset, and where in the source it comes from."""
    for number, (line, end_line, column, end_column) in enumerate(code.co_positions()):
        if line is not None and end_line is not None and column is not None and end_column is not None:
            yield 2 * number, ((line, column), (end_line, end_column))


def _span(node: ast.AST) -> Span:
    start = getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
    return start, (getattr(node, "end_lineno", 0) or 0, getattr(node, "end_col_offset", 0) or 0)


def _expressions(node: ast.stmt) -> Iterable[ast.expr]:
    """The expressions of a statement itself; a condition computes nothing of the model."""
    if isinstance(node, ast.If | ast.While | ast.Assert):
        return ()
    return [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
