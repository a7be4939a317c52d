"""The library's face: every name it promises is there, once, and none is a module by mistake."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

import pytest

import porting


@pytest.mark.parametrize("name", porting.__all__)
def test_every_name_is_what_it_says(name: str) -> None:
    found = getattr(porting, name)
    assert not isinstance(found, ModuleType)
    assert found.__name__ == name
    assert name in dir(porting)


@pytest.mark.parametrize("name", [name for name in porting.__all__ if name != "Suggestion"])  # suggest shows one
def test_every_name_is_explained_with_an_example(name: str) -> None:
    """The examples are executed by the tests; functions also say what they raise, unless nothing can go wrong."""
    found = getattr(porting, name)
    said = inspect.getdoc(found) or ""
    assert "\n>>> " in said
    if inspect.isfunction(found) and name not in {"embedded_checkpoint", "provenance"}:
        assert "\nRaises:\n" in said


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'porting' has no attribute 'laod'"):
        _ = porting.laod


def test_a_function_and_its_home_do_not_share_a_name() -> None:
    """Importing a module sets its name in the package: a function of that name would be hidden by it."""
    homes = {name.removeprefix("porting.") for name in sys.modules if name.startswith("porting.")}
    assert not homes & set(porting.__all__)
