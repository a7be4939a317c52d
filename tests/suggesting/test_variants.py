"""A few of the generated variants; ``scripts/suggest_zoo.py`` has hundreds."""

from __future__ import annotations

import pytest

from porting.suggesting import Verdict
from scripts.suggest_zoo import Outcome, tried
from tests.suggesting.styles import FLAWS, drawn
from tests.suggesting.variants import Variant

WITHOUT = (2, 3, 4, 12, 13)
"""Seeds of RoBERTa, GPT-2, BERT with a head that is tied by hand, Llama with grouped heads and lazy, and CTRL."""


@pytest.mark.parametrize("seed", WITHOUT)
def test_what_is_called_proven_is_right(seed: int) -> None:
    one = tried(drawn(seed, flawed=False))
    assert one.found is not None, one.said
    assert (one.verdict, one.false_proof) == (True, False), str(one.found)
    assert one.difference is not None
    assert one.difference <= 1e-10
    assert one.tensors[0] == one.tensors[1]


def test_features_that_are_returned_in_another_order_are_said_to_be() -> None:
    """The table is right, and a user who read the output as the reference's would be wrong."""
    one = tried(drawn(13, flawed=False))
    assert one.found is not None
    assert one.found.verdict is Verdict.TRUNK
    assert "What it returns has its features in the order (n s), where the reference's is (s n)." in one.found.proof


@pytest.mark.parametrize("flaw", ["unscaled attention", "other gelu"])
def test_a_flaw_is_never_called_proven(flaw: str) -> None:
    seed = next(seed for seed in range(1000) if drawn(seed, flawed=True).flaw == flaw)
    one = tried(drawn(seed, flawed=True))
    assert one.found is not None, one.said
    assert not one.found.proven
    assert one.found.verdict is FLAWS[flaw][0], str(one.found)


def test_a_wrong_table_would_be_counted() -> None:
    """The count of false proofs does not believe the verdict: two layers changed about are seen."""
    style = drawn(0, flawed=False)
    one = tried(style)
    assert not one.false_proof
    spoilt = Outcome(style, one.found, one.said, 1e-3, one.tensors, one.seconds)
    assert spoilt.false_proof


def test_a_seed_is_a_variant() -> None:
    sizes = {"vocabulary": 107, "hidden": 24, "depth": 2, "heads": 4, "inner": 52, "positions": 30, "segments": 2}
    one, two, other = (list(Variant(drawn(seed), sizes).state_dict()) for seed in (5, 5, 9))
    assert one == two
    assert one != other
