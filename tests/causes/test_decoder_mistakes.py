"""Mistakes in the text of a decoder are named; and without one there is nothing to name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from porting.verification import Report, verify
from tests.causes.decoder_edits import EDITS, Edit, edited
from tests.causes.decoders import FAMILIES, written
from tests.verification.conftest import one_thread

__all__ = ["one_thread"]  # a fixture that is used by all

Verified = Callable[[Edit], Report]


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> Verified:
    @cache
    def checkpoint(name: str) -> Path:
        return written(FAMILIES[name], tmp_path_factory.mktemp(name))

    def report(edit: Edit, dtypes: tuple[torch.dtype, ...] = ()) -> Report:
        family = FAMILIES[edit.family]
        return verify(
            checkpoint(edit.family),
            lambda: edited(edit, family.config),
            family.table,
            architecture=family.architecture,
            dtypes=dtypes,
            longest=16,
        )

    return report


@pytest.mark.parametrize("name", FAMILIES)
def test_without_a_mistake_nothing_is_named(verified: Verified, name: str) -> None:
    report = verified(Edit(name, {}))
    assert (report.verdict, report.causes) == ("faithful", ())


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        pytest.param(name, one, id=f"{name}, {one.family}, {number}")
        for name, many in EDITS.items()
        for number, one in enumerate(many)
    ],
)
def test_a_mistake_is_named(verified: Verified, name: str, edit: Edit) -> None:
    report = verified(edit)
    assert report.causes
    for found in report.causes:
        assert found.name == name, [(one.names, one.detail, one.probes, one.nearest) for one in report.causes]
        assert edit.detail in found.detail
