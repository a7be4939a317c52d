"""The catalogue is complete, documented, and the page is what it says."""

from __future__ import annotations

from collections import Counter

from porting.causes.catalogue import CATALOGUE, ROUNDING
from porting.causes.dropout import NAME
from porting.causes.mutants import PLANTS, truth
from porting.causes.weights import UNTIED
from scripts.causes import PAGE
from scripts.causes_page import page
from tests.causes.bert_mistakes import MISTAKES
from tests.causes.decoder_edits import EDITS
from tests.causes.listed import LISTED
from tests.causes.plants import FORTY, TABLES, TWENTY
from tests.causes.test_other_mistakes import FUSED, MODERN, PAIRED
from tests.causes.test_wrong_ports import MORE, OF_CONVOLUTIONS, OF_WINDOWS
from tests.causes.thirty import THIRTY
from tests.causes.twelve import TWELVE
from tests.verification.test_causes import NAMES
from tests.verification.test_causes_structure import STRUCTURE


def test_there_are_many_and_each_has_its_own_name() -> None:
    assert len(CATALOGUE) >= 40
    assert [name for name, count in Counter(cause.name for cause in CATALOGUE).items() if count > 1] == []


def test_each_says_what_it_is_how_it_looks_and_what_to_do() -> None:
    for cause in CATALOGUE:
        assert all(
            len(text) > 3 and text.strip(" .") == text for text in (cause.name, cause.what, cause.looks, cause.fix)
        )


def test_causes_of_rounding_are_marked() -> None:
    assert {cause.name for cause in ROUNDING} >= {"mask precedence", "half-precision linear layer", "bfloat16 softmax"}


def test_the_page_is_what_the_catalogue_gives() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m scripts.causes --write"


def test_every_planted_mistake_has_names_that_a_report_may_give() -> None:
    known = {*(cause.name for cause in CATALOGUE), NAME, UNTIED}
    assert [name for plant in PLANTS for name in truth(plant.name) if name not in known] == []


def test_every_entry_is_seen_to_name_a_mistake() -> None:
    """One that somebody made in the source of a port, or one that is planted there; each has its test."""
    planted = {name for plant in PLANTS for name in truth(plant.name)}
    written = {
        *EDITS,
        *MISTAKES,
        *(name for name, _ in NAMES.values()),
        *STRUCTURE,
        "mask precedence",
        OF_CONVOLUTIONS,
        *OF_WINDOWS,
    }
    written |= {name for ports in (LISTED, THIRTY, TWELVE, MORE) for port in ports.values() for name in port.names}
    written |= {name for _, name, _ in (*MODERN.values(), *FUSED)} | {name for _, _, name, _ in PAIRED.values()}
    written |= {name for plants in (FORTY, TABLES, TWENTY) for plant in plants.values() for name in plant.names}
    assert [cause.name for cause in CATALOGUE if cause.name not in planted | written] == []
