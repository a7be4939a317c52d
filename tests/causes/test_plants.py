"""Ports that were met for the first time: each mistake in them or in their tables is named, with what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.causes.carriers import SPECIFICATIONS, Plant, verified
from tests.causes.plants import FORTY, TABLES, TWENTY
from tests.verification.conftest import one_thread

pytestmark = pytest.mark.few(1)

__all__ = ["one_thread"]  # a fixture that is used by all

ALL = {**FORTY, **TABLES, **TWENTY}
QUICK = ("gemma_table_gate", "gpt2_table_heads", "albert_eye", "qwen_mlp_of_x")
"""One of each new kind: a line of a table, a line of the code, a mask, a module's input."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECIFICATIONS)
def test_without_a_mistake_a_carrier_is_faithful(name: str, tmp_path: Path) -> None:
    report = verified(Plant(name, "nothing", names=()), tmp_path)
    assert (report.verdict, report.causes) == ("faithful", ())


def is_named(plant: Plant, folder: Path) -> None:
    report = verified(plant, folder)
    assert report.causes
    for cause in report.causes:
        assert cause.name in plant.names, [(one.names, one.detail, one.probes) for one in report.causes]
    assert any(plant.says in f"{cause.detail} {cause.fix}" for cause in report.causes), report.causes


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_mistake_is_named(name: str, tmp_path: Path) -> None:
    is_named(ALL[name], tmp_path)


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [name for name in ALL if name not in QUICK])
def test_each_other_mistake_is_named(name: str, tmp_path: Path) -> None:
    is_named(ALL[name], tmp_path)
