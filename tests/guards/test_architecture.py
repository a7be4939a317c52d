"""Who may import whom, and what the engine may know."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Collection, Iterator

import pytest

from tests.guards.tree import ROOT, imports, modules, parse

# Data flows one way.  The lowest packages, with all that each may import of the library beside itself.
PACKAGES = {
    "porting.causes": ("porting.frames", "porting.printable", "porting.tracing"),
    "porting.atomic": ("porting.errors", "porting.opening", "porting.printable", "porting.write_failure"),
    "porting.write_failure": ("porting.printable",),
    "porting.errors": ("porting.printable",),
    "porting.limits": ("porting.errors",),
    "porting.opening": ("porting.errors", "porting.printable"),
    "porting.scratch": (),
    "porting.models": (),
    "porting.mappings": (),
    "porting.notation": ("porting.errors", "porting.limits", "porting.opening", "porting.ops"),
    "porting.checkpoint": (
        "porting.atomic",
        "porting.errors",
        "porting.limits",
        "porting.opening",
        "porting.printable",
        "porting.scratch",
        "porting.write_failure",
    ),
    "porting.ops": ("porting.checkpoint.strict_json", "porting.printable"),
    "porting.pages": ("porting.errors", "porting.printable"),
    "porting.plotting": (),
    "porting.printable": (),
    "porting.reporting": (
        "porting.atomic",
        "porting.causes",
        "porting.checkpoint",
        "porting.errors",
        "porting.notation",
        "porting.pages",
        "porting.plotting",
        "porting.printable",
        "porting.target",
        "porting.tracing",
        "porting.trials.scope",
    ),
    "porting.target": ("porting.errors", "porting.printable", "porting.users_code"),
    "porting.users_code": ("porting.errors",),
    "porting.tracing": ("porting.errors", "porting.frames", "porting.notation", "porting.plan", "porting.printable"),
    "porting.trials": (
        "porting.checkpoint.strict_json",
        "porting.errors",
        "porting.frames",
        "porting.limits",
        "porting.notation",
        "porting.opening",
        "porting.plan",
        "porting.printable",
        "porting.target",
        "porting.tracing",
    ),
    "porting.plan": (
        "porting.errors",
        "porting.limits",
        "porting.notation",
        "porting.ops",
        "porting.pages",
        "porting.printable",
        "porting.target",
    ),
}

# So does a suggestion: no stage imports a later one.
STAGES = tuple(f"porting.suggesting.{stage}" for stage in ("subjects", "search", "draft", "verdict", "pipeline"))

# A family is what the tables are for; modules such as an encoder have the field's common names and are no families.
FAMILIES = {
    re.sub("[-_]", "[-_]?", family)
    for path in (ROOT / "mappings").glob("*.toml")
    for family in tomllib.loads(path.read_text(encoding="utf-8"))["mapping"].get("model_types", ())
}


def inside(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_lower_package_imports_no_higher_one(package: str) -> None:
    allowed = (package, *PACKAGES[package])
    wrong = [
        f"{module} line {line} imports {name}"
        for module, path in modules().items()
        if inside(module, (package,))
        for name, line in imports(parse(path))
        if inside(name, ("porting",)) and not inside(name, allowed)
    ]
    assert wrong == []


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_no_later_one(stage: str) -> None:
    later = STAGES[STAGES.index(stage) + 1 :]
    wrong = [
        f"{module} line {line} imports {name}"
        for module, path in modules().items()
        if inside(module, (stage,))
        for name, line in imports(parse(path))
        if inside(name, later)
    ]
    assert wrong == []


def test_handwritten_models_are_pure_torch() -> None:
    wrong = [
        f"{module} line {line} imports {name}"
        for module, path in modules().items()
        if inside(module, ("porting.models",))
        for name, line in imports(parse(path))
        if not inside(name, ("torch", "porting.models", *sys.stdlib_module_names))
    ]
    assert wrong == []


def test_all_modes_of_torch_are_of_one_of_two_kinds() -> None:
    """Another one would see arguments in another order, or fail at an operator of higher order."""
    kinds = ("torch.overrides.TorchFunctionMode", "torch.utils._python_dispatch.TorchDispatchMode")
    found = {
        module
        for module, path in modules().items()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ImportFrom)
        for name in node.names
        if f"{node.module}.{name.name}" in kinds
    }
    assert found == {"porting.tracing.torch_modes"}


def test_nobody_imports_the_folders_at_the_root() -> None:
    wrong = [
        f"{module} line {line} imports {name}"
        for module, path in modules().items()
        for name, line in imports(parse(path))
        if inside(name, ("models", "mappings"))
    ]
    assert wrong == []


def test_the_engine_knows_no_family() -> None:
    """No name and no string in its code; docstrings and comments may take an example from one."""
    assert FAMILIES
    pattern = re.compile("|".join(sorted(FAMILIES)), re.IGNORECASE)
    wrong = [
        f"{module} line {line}: {text!r}"
        for module, path in modules().items()
        if not inside(module, ("porting.models", "porting.mappings", "porting.demo"))
        for text, line in spoken(parse(path))
        if pattern.search(text)
    ]
    assert wrong == []


def test_the_library_does_not_print() -> None:
    wrong = [
        f"{module} line {node.lineno}"
        for module, path in modules().items()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert wrong == []


def spoken(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The names and strings of a module's code, docstrings left out."""
    documentation = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                documentation.add(first.value)
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if node not in documentation:
                yield text, node.lineno
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.keyword(arg=str(text)) | ast.arg(arg=text):
                yield text, node.lineno
            case ast.FunctionDef(name=text) | ast.AsyncFunctionDef(name=text) | ast.ClassDef(name=text):
                yield text, node.lineno
    yield from imports(tree)


def at_any_time(tree: ast.AST, known: Collection[str]) -> Iterator[str]:
    """The library's modules that one imports, be it when a function runs; not for annotations alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module
        yield from at_any_time(node, known)


def test_no_module_is_imported_by_what_it_imports_itself() -> None:
    """Not even in a function: data flows one way, and a circle shows that two files are one idea."""
    found = modules()
    left = {name: {*at_any_time(parse(path), found)} & {*found} - {name} for name, path in found.items()}
    while free := [name for name, needed in left.items() if not needed & left.keys()]:
        left = {name: needed for name, needed in left.items() if name not in free}
    assert left == {}
