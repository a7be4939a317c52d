"""Each edit of a handwritten model's source is caught, placed where it was made, and named; end to end."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from torch import nn

from porting.verification import verify
from tests.causes.source_edits import EDITS, Edit, edited
from tests.families.pairs import Pair
from tests.families.ported import Ported, make
from tests.verification.conftest import one_thread

pytestmark = pytest.mark.few(3)

__all__ = ["one_thread"]  # a fixture that is used by all


@pytest.fixture(scope="module")
def ported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Pair], Ported]:
    made: dict[str, Ported] = {}

    def of(pair: Pair) -> Ported:
        if str(pair) not in made:
            made[str(pair)] = make(pair, tmp_path_factory.mktemp(pair.table))
        return made[str(pair)]

    return of


@pytest.mark.few(1)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_an_edit_of_the_source_is_named(ported: Callable[[Pair], Ported], edit: Edit) -> None:

    port = ported(edit.pair)
    kind: type[nn.Module] = edited(edit)
    report = verify(port.directory, kind, table=edit.pair.table, longest=80 if edit.pair.single else 24)
    assert report.verdict == "different"
    assert report.causes
    for found in report.causes:
        assert edit.cause in found.names, [(each.names, each.detail, each.probes) for each in report.causes]
        assert edit.detail in found.detail
    for probe in report.guilty:
        assert any(re.search(f"{edit.place}$", path) for path in probe.span), (probe.port, probe.span)
