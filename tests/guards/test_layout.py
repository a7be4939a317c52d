"""The layout: where packages are, and what an installation contains."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.guards.tree import ROOT, files, modules, parse

PYPROJECT: Mapping[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
PACKAGES = sorted(name for name, path in modules().items() if path.name == "__init__.py")


def test_the_list_of_packages_is_the_folders_that_have_an_init() -> None:
    assert sorted(SETUPTOOLS["packages"]) == PACKAGES


def test_every_folder_of_code_has_an_init() -> None:
    folders = {path.parent for path in modules().values()}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_an_installation_has_one_top_level_package() -> None:
    assert {name.partition(".")[0] for name in SETUPTOOLS["packages"]} == {"porting"}
    assert SETUPTOOLS["package-dir"] == {
        "porting": "porting",
        "porting.models": "models",
        "porting.mappings": "mappings",
    }
    assert "py-modules" not in SETUPTOOLS


@pytest.mark.parametrize("name", ["models", "mappings"])
def test_the_links_lead_to_the_real_folders(name: str) -> None:
    link = ROOT / "porting" / name
    assert link.is_symlink()
    assert link.readlink().as_posix() == f"../{name}"
    assert link.resolve() == ROOT / name


def test_a_handwritten_model_is_imported_once() -> None:
    """Its real folder stands on the tests' path too: ``models.bert`` would be a second set of classes."""
    model = importlib.import_module("porting.models.bert")
    assert model.__file__ is not None
    assert Path(model.__file__).resolve() == ROOT / "models" / "bert.py"
    assert [name for name in sys.modules if name.partition(".")[0] in {"models", "mappings"}] == []


def test_every_file_that_is_not_python_is_package_data() -> None:
    data = [path for folder in ("porting", "models", "mappings") for path in files(folder) if path.suffix != ".py"]
    patterns = SETUPTOOLS["package-data"]
    installed = {ROOT / "porting" / "py.typed", ROOT / "porting" / "errors.md"}
    assert patterns == {
        "porting": ["py.typed", "demo/*", "errors.md"],
        "porting.mappings": ["**/*.toml"],
        "porting.pages": ["*.html", "*.css", "*.js"],
        "porting.suggesting": ["synonyms.toml"],
    }
    installed |= {ROOT / "porting" / "suggesting" / "synonyms.toml"}
    installed |= {path for path in (ROOT / "porting" / "demo").glob("*") if path.is_file()}
    installed |= set((ROOT / "mappings").rglob("*.toml"))
    installed |= {path for pattern in patterns["porting.pages"] for path in (ROOT / "porting" / "pages").glob(pattern)}
    assert sorted(set(data) ^ installed) == []
    assert (ROOT / "porting" / "py.typed").read_bytes() == b""


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_says_what_it_offers(package: str) -> None:
    names = offered(parse(modules()[package]))
    assert isinstance(names, list | tuple), f"{package} has no __all__"
    assert all(isinstance(name, str) for name in names)
    assert len(set(names)) == len(names)


def offered(tree: ast.Module) -> object:
    """What ``__all__`` is, None where there is none."""
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.expr() as value):
                return ast.literal_eval(value)
            case ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.expr() as value):
                return ast.literal_eval(value)
    return None


def test_constraints_are_exact_versions_of_everything_asked_for() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line)] == []

    project = PYPROJECT["project"]
    asked = [
        *project["dependencies"],
        *project["optional-dependencies"]["dev"],
        *project["optional-dependencies"]["docs"],
        *PYPROJECT["build-system"]["requires"],
    ]
    pinned = {canonical(line.partition("==")[0]) for line in pins}
    assert {canonical(re.split(r"[<>=!~ \[]", line)[0]) for line in asked} <= pinned


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
