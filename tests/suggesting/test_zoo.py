"""Twelve ways of writing a BERT, given to ``suggest`` without their tables: what it writes is what a person wrote."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import porting
from porting.suggesting import Suggestion, Verdict, suggest
from tests.suggesting.oracle import Drafted, drafted
from tests.zoo.position_buffer import PositionAttribute
from tests.zoo.test_zoo import HERE, ZOO, Animal

pytestmark = pytest.mark.few(1)


def same_weights(source: Path, animal: Animal, found: Suggestion | Drafted) -> list[str]:
    """The names whose values through the suggested table are not those through the table of the zoo."""
    warnings.simplefilter("ignore", porting.PortingWarning)  # one table says that it is approximate
    mine = porting.load(source, animal.kind, found.table).state_dict()
    theirs = porting.load(source, animal.kind, HERE / f"{animal.table}.toml").state_dict()
    return [name for name, value in theirs.items() if not torch.equal(mine[name], value)]


@pytest.mark.parametrize("animal", ZOO[:1], ids=str)  # of all of them, the proven table is compared below
def test_the_draft_is_what_a_person_wrote(animal: Animal, source: Path) -> None:
    assert same_weights(source, animal, drafted(source, animal.kind)) == []


@pytest.mark.slow
@pytest.mark.parametrize("animal", ZOO, ids=str)
def test_the_table_is_found_and_proven(animal: Animal, source: Path) -> None:
    found = suggest(source, animal.kind)
    assert found.verdict is (Verdict.TRUNK if animal.approximate is None else Verdict.APPROXIMATE), str(found)
    assert found.proven is (animal.approximate is None)
    assert found.missing == ("bert.pooler", "cls")
    assert [one for one in found.unmapped if one.side == "module"] == []
    assert same_weights(source, animal, found) == []
    assert len(found.text.splitlines()) < 90


@pytest.mark.slow
def test_positions_in_a_plain_attribute_are_named_as_the_reason(source: Path) -> None:
    found = suggest(source, PositionAttribute)
    assert found.verdict is Verdict.IMPOSSIBLE
    assert any("pe is neither a parameter nor a persistent buffer" in reason.said for reason in found.reasons)
