"""What the package of handwritten models offers: every room is named, and none is imported before it is used."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from torch import nn

from porting import models

FILES = {path.stem for path in Path(models.__file__).parent.glob("*.py")} - {"__init__"}
PARTS = {"checks", "bert_config", "modern_bert_config", "seq2seq_config"}  # of which the modules are made


def test_every_room_is_in_the_list_of_rooms() -> None:
    assert models.__doc__ is not None
    listed = {word.strip(",") for line in models.__doc__.splitlines() if line[:4] == "    " for word in line.split()}
    assert FILES - PARTS - listed == set()


@pytest.mark.parametrize("name", models.__all__)
def test_every_name_is_that_of_its_room(name: str) -> None:
    found = getattr(models, name)
    assert getattr(importlib.import_module(found.__module__), name) is found
    assert found.__doc__


def test_every_room_with_a_model_offers_one() -> None:
    """Heads, parts and searches are found in their modules; BERT's heads are the exception."""
    homes = {getattr(models, name).__module__.rpartition(".")[2] for name in models.__all__}
    others = {"attention", "modern_bert_heads", "positions", "roberta", "seq2seq_search", "unpadded", "checks"}
    assert FILES - homes == others
    found = {name: getattr(models, name) for name in models.__all__}
    modules = {one.__module__.rpartition(".")[2] for one in found.values() if issubclass(one, nn.Module)}
    assert homes - PARTS == modules


def test_a_name_that_is_not_there_is_said_so() -> None:
    with pytest.raises(AttributeError, match=r"module 'porting\.models' has no attribute 'Berd'"):
        models.Berd  # noqa: B018  # that it is not there is the point
    assert {"Bert", "MPNet"} <= set(dir(models))
