"""Mistakes in the text of a decoder are named; and without one there is nothing to name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from porting.causes.events import Inventory
from porting.causes.fault_injection import plant
from porting.causes.mutants import planted
from porting.loading import load
from porting.verification import Report, verify
from tests.causes.decoder_edits import EDITS, Edit, edited
from tests.causes.decoders import FAMILIES, written
from tests.verification.conftest import one_thread

pytestmark = pytest.mark.few(3)

__all__ = ["one_thread"]  # a fixture that is used by all

Verified = Callable[..., Report]


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> Verified:
    @cache
    def checkpoint(name: str) -> Path:
        return written(FAMILIES[name], tmp_path_factory.mktemp(name))

    def report(edit: Edit, mistake: str = "") -> Report:
        family, path = FAMILIES[edit.family], checkpoint(edit.family)
        model = load(path, lambda: edited(edit, family.config), family.table)
        for fault in planted(mistake):
            plant(model, fault, Inventory())
        architecture = family.architecture
        return verify(path, model, family.table, architecture=architecture, dtypes=(), longest=16, loaded=True)

    return report


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_without_a_mistake_nothing_is_named(verified: Verified, name: str) -> None:
    report = verified(Edit(name, {}))
    assert (report.verdict, report.causes) == ("faithful", ())


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "edit"),
    [
        pytest.param(name, edit, id=f"{name}, {edit.family}, {number}")
        for name, many in EDITS.items()
        for number, edit in enumerate(many)
    ],
)
def test_a_mistake_is_named(verified: Verified, name: str, edit: Edit) -> None:
    report = verified(edit)
    assert report.causes
    for found in report.causes:
        assert found.name == name, [(cause.names, cause.detail, cause.probes, cause.nearest) for cause in report.causes]
        assert edit.detail in found.detail


PLANTED = {
    "llama": ("RMSNorm eps", "RMSNorm gain missing", "norm gain with 1 added", "key and value heads tiled"),
    "gemma2": ("LayerNorm for RMSNorm", "norm gain without 1 added", "soft cap of scores missing"),
    "mpt": ("ALiBi missing", "ALiBi of the other sign", "soft cap of scores that should not be there"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in PLANTED.items() for name in names])
def test_a_planted_mistake_is_named(verified: Verified, family: str, name: str) -> None:
    report = verified(Edit(family, {}), name)
    assert [found.name for found in report.causes] == [name]
