"""Figures that are known of bert-base-uncased, where the hub can be reached: ``make test ARGS="-m hub"``."""

from __future__ import annotations

import pytest

from porting.checkpoint import HubError, open_checkpoint
from porting.errors import Code
from porting.text import fill_mask, next_sentence, open_text_model
from scripts.contextual_vectors import SENTENCES, WORD, similarities

pytestmark = [pytest.mark.hub, pytest.mark.timeout(1800)]  # the first call fetches 440 MB

MODEL = "google-bert/bert-base-uncased"
FIRST, SECOND = "I accessed the bank account.", "We play soccer at the [MASK] of the river."


@pytest.fixture(scope="module", autouse=True)
def reachable() -> None:
    try:
        open_checkpoint(MODEL)
    except HubError as error:
        if error.faults[0].code in (Code.HUB_UNREACHABLE, Code.HUB_CACHE):
            pytest.skip(f"the hub cannot be reached and {MODEL} is not cached: {error.faults[0].message}")
        raise


def test_the_masked_word_is_bank() -> None:
    (blank,) = fill_mask(FIRST, MODEL, pair=SECOND)
    assert blank.position == 13
    assert blank.guesses[0].token == "bank"  # noqa: S105 - a word, no secret


def test_the_second_sentence_does_not_follow() -> None:
    """The logits of the masked pair: class 0 is "follows"."""
    verdict = next_sentence(FIRST, SECOND, MODEL)
    assert verdict.logits == pytest.approx((-1.53, 3.17), abs=0.01)
    assert verdict.follows < 0.01


def test_the_cosines_of_bank() -> None:
    static, second, third = similarities(open_text_model(MODEL), WORD, SENTENCES)
    assert (static.first, static.last) == pytest.approx((0.681, 0.228), abs=0.001)
    assert (second.first, third.first) == pytest.approx((0.897, 0.758), abs=0.001)
    assert (second.last, third.last) == pytest.approx((0.880, 0.481), abs=0.001)
