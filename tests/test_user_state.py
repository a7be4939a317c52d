"""What a user's file keeps is as it was before a builder is run without values."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from porting.build import OWN_CODE, build, build_with_values
from porting.user_state import restored_state

TEXT = """
import functools
import torch
from torch import nn

class Store:
    tables = {}
    listed = []
    alone = None

class Holder:
    def __init__(self):
        self.kept = {}

class Strange(dict):
    __getattr__ = dict.__getitem__  # a KeyError where others raise AttributeError

holder, strange = Holder(), Strange()
table = None

@functools.lru_cache(maxsize=None)
def by_cache(size):
    return torch.arange(float(size))

@functools.lru_cache(maxsize=1)
def by_full(size):
    return torch.arange(float(size))

class Shared:
    @staticmethod
    @functools.cache
    def made(size):
        return torch.arange(float(size))

def by_attribute(size):
    if not hasattr(by_attribute, "kept"):
        by_attribute.kept = {}
    return by_attribute.kept.setdefault(size, torch.arange(float(size)))
by_attribute.kept = {}

def by_default(size, kept={}):
    if size not in kept:
        kept[size] = torch.arange(float(size))
    return kept[size]

def by_class(size):
    if size not in Store.tables:
        Store.tables[size] = torch.arange(float(size))
        Store.listed.append(size)
    return Store.tables[size]

def by_name(size):
    if Store.alone is None:
        Store.alone = torch.arange(float(size))
    return Store.alone

def by_object(size):
    return holder.kept.setdefault(size, torch.arange(float(size)))

def by_global(size):
    global table
    if table is None:
        table = torch.arange(float(size))
    return table

def model(how):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(5, 4)
            self.register_buffer("angles", Shared.made(4) if how == "shared" else globals()[f"by_{how}"](4))
    return Model
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(tmp_path)
    name = f"keeping_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(TEXT)
    return import_module(name)


HOW = ["cache", "full", "shared", "attribute", "default", "class", "name", "object", "global"]


@pytest.mark.parametrize("how", HOW)
def test_a_cache_has_no_tensors_without_values(module: ModuleType, how: str) -> None:
    make = module.model(how)
    assert build(make, OWN_CODE).get_buffer("angles").is_meta
    made = build_with_values(make, OWN_CODE).get_buffer("angles")
    assert torch.equal(made, torch.arange(4.0))
    assert build_with_values(make, OWN_CODE).get_buffer("angles") is made  # what a run with values keeps is kept


def test_a_cache_that_is_full_has_none_either(module: ModuleType) -> None:
    """It keeps one entry, before and after."""
    module.by_full(3)
    make = module.model("full")
    build(make, OWN_CODE)
    assert torch.equal(build_with_values(make, OWN_CODE).get_buffer("angles"), torch.arange(4.0))


def within(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def call() -> nn.Module:
        return make()

    return call


@pytest.mark.parametrize("how", HOW)
def test_a_cache_in_a_file_that_the_builder_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    kept, builder = f"kept_{tmp_path.name}", f"builder_{tmp_path.name}"
    (tmp_path / f"{kept}.py").write_text(TEXT)
    imports = f"from {kept} import model"
    (tmp_path / f"{builder}.py").write_text(f"def make():\n    {imports}\n    return model({how!r})()\n")
    make = within(within(import_module(builder).make))
    for _ in range(2):  # the file is imported in the first run, and is there in the second
        assert build(make, OWN_CODE).get_buffer("angles").is_meta
    assert torch.equal(build_with_values(make, OWN_CODE).get_buffer("angles"), torch.arange(4.0))


def test_what_was_there_before_is_there_afterwards(module: ModuleType) -> None:
    first = module.by_class(3)
    with restored_state(module.model):
        module.by_class(7)
        module.Store.alone = first
        module.by_cache(2)
    assert [*module.Store.tables] == module.Store.listed == [3]
    assert module.Store.tables[3] is first
    assert module.Store.alone is None
    assert module.by_cache.cache_info().currsize == 0


MAKING = """
from collections import OrderedDict, defaultdict
from torch import nn
from transformers.activations import ACT2FN

class Made(OrderedDict):
    def __getitem__(self, name):
        kind, arguments = super().__getitem__(name)
        return kind(**arguments)

class Closed(dict):
    def __setitem__(self, name, value):
        raise TypeError("use add")

    def add(self, name, value):
        super().__setitem__(name, value)

class Repeating(list):
    def __iter__(self):
        return iter([*super().__iter__()] * 2)

made, closed, repeating, counted = Made(a=(nn.Tanh, {})), Closed(a=1), Repeating([1]), defaultdict(list, a=[1])

def build():
    made.move_to_end("a")
    closed.add("b", 2)
    repeating.append(2)
    counted["b"].append(3)
    return nn.Sequential(nn.Linear(2, 2), ACT2FN["silu"], made["a"])
"""


def test_containers_with_methods_of_their_own_keep_their_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.activations import ACT2FN

    monkeypatch.syspath_prepend(tmp_path)
    name = f"making_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MAKING)
    module = import_module(name)
    names = [*ACT2FN]
    for _ in range(2):
        build(module.build, OWN_CODE)
        assert [*ACT2FN] == names
        assert type(ACT2FN["silu"]).__name__ == "SiLUActivation"
        assert isinstance(module.made["a"], nn.Tanh)
        assert [*dict.items(module.closed)] == [("a", 1)]
        assert [*list.__iter__(module.repeating)] == [1]
        assert [*module.counted.items()] == [("a", [1])]
