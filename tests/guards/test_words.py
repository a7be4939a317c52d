"""What a reader is told to pass is what they can pass: an argument of a function, or an option of a command."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
import typer

from porting.cli.app import app
from tests.guards.tree import ROOT, modules, parse

ARGUMENT = re.compile(r"\b([a-z_]{3,})=(?:True|False|None|['\"]|$|[ ,;:)])")
"""An argument of a function in the middle of a sentence: ``table=``, ``reverse=True``."""

TORCHS = {"bytes", "persistent", "requires_grad"}
"""Not of this library: torch's own arguments, which a module's author writes, and a header of HTTP."""

ELSEWHERE = (
    "porting.causes",
    "porting.cli",
    "porting.models",
    "porting.pages",
    "porting.pytest_plugin",
    "porting.reporting.figures",
    "porting.seeing.webpage",
)
"""Written for one reader alone: code that mends a module, commands, pytest, pages."""


def is_docstring(tree: ast.Module, node: ast.Constant) -> bool:
    return any(isinstance(one, ast.Expr) and one.value is node for one in ast.walk(tree))


def is_call(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def constants(node: ast.AST, *, worded: bool = False) -> Iterator[tuple[ast.Constant, str, bool]]:
    """Every string below a node, its text, and whether it stands in a ``Wording`` or ``Option``."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node, node.value, worded
    for child in ast.iter_child_nodes(node):
        yield from constants(child, worded=worded or is_call(node, "Wording", "Option"))


def wrong_words(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Strings that speak Python, or options, to whoever reads them."""
    for node, text, worded in constants(tree):
        arguments = {found[1] for found in ARGUMENT.finditer(text)} - TORCHS
        options = " " in text and re.search(r"(?<![\w-])--[a-z]", text)  # by itself it is a command's word
        if not worded and (arguments or options) and not is_docstring(tree, node):
            yield node.lineno, text


def test_no_message_speaks_to_one_reader_alone() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text!r}"
        for module, path in modules().items()
        if not module.startswith(ELSEWHERE)
        for line, text in wrong_words(parse(path))
    ]
    assert wrong == [], "say it with porting.errors.Option or Wording"


@pytest.mark.parametrize("text", ["pass into=", "reverse=True takes no module", "say which: --dtype", "table='x'"])
def test_such_a_message_is_seen(text: str) -> None:
    assert list(wrong_words(ast.parse(f"hint = {text!r}"))) == [(1, text)]
    assert list(wrong_words(ast.parse(f"hint = Wording(python={text!r}, command='')"))) == []


def messages_in_f_strings(tree: ast.Module) -> list[int]:
    """Lines with an f-string around a message or a part of one: it would keep the wording for Python alone."""
    inner = (node for string in ast.walk(tree) if isinstance(string, ast.JoinedStr) for node in ast.walk(string))
    return [node.lineno for node in inner if is_call(node, "Message", "Option", "Wording")]  # type: ignore[attr-defined]  # a call has one


def test_no_f_string_loses_a_wording() -> None:
    assert {str(path) for path in modules().values() if messages_in_f_strings(parse(path))} == set()
    assert messages_in_f_strings(ast.parse("""hint = f'pass {Option("table")}'""")) == [1]


def test_every_option_that_is_named_is_one_of_a_command() -> None:
    group = typer.main.get_command(app)
    commands = group.commands.values()  # type: ignore[attr-defined]  # it is a group, and has them
    known = {name for command in commands for param in command.params for name in param.opts}
    named: set[str] = set()
    for path in modules().values():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                first = node.args[0]
                if node.func.id == "Option" and isinstance(first, ast.Constant):
                    named.add(f"--{str(first.value).replace('_', '-')}")
            if isinstance(node, ast.keyword) and node.arg == "command":
                for _, text, _ in constants(node.value):
                    named |= set(re.findall(r"(?<![\w-])--[a-z-]+", text))
    assert {"--table", "--into", "--reverse"} <= named
    assert named <= known
