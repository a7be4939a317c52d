"""A few of the generated variants; ``scripts/suggest_zoo.py`` has hundreds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import porting
from porting.suggesting import Verdict
from scripts.suggest_zoo import Outcome, difference_from, source, tried
from tests.suggesting.oracle import drafted
from tests.suggesting.styles import FLAWS, SIZES, drawn
from tests.suggesting.variants import Variant, builder

pytestmark = pytest.mark.few(1)

WITHOUT = (4, 7, 8, 9, 11)
"""Seeds of BERT with a head that is tied by hand, ELECTRA, ALBERT, GPT-NeoX and ViT."""

PLAIN_POSITIONS = 2
"""The seed of a RoBERTa whose positions are counted from the left, padding included."""

MUTE = {"query": "ma", "key": "mb", "value": "mc", "query norm": "md", "key norm": "me"}
"""Names that say nothing."""


@pytest.mark.parametrize("seed", WITHOUT[:1])  # of all of them, the proven table is compared below
def test_what_is_drafted_is_right(seed: int, tmp_path: Path) -> None:
    style = drawn(seed, flawed=False)
    reference, build = source(style, tmp_path), builder(style)
    loaded = porting.load(tmp_path, build, drafted(tmp_path, build).table)
    assert difference_from(style, reference, loaded) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("seed", WITHOUT)
def test_what_is_called_proven_is_right(seed: int) -> None:
    one = tried(drawn(seed, flawed=False))
    assert one.found is not None, one.said
    assert (one.verdict, one.false_proof) == (True, False), str(one.found)
    assert one.difference is not None
    assert one.difference <= 1e-10
    assert one.tensors[0] == one.tensors[1]


@pytest.mark.slow
def test_positions_that_count_padding_are_not_robertas() -> None:
    """Right where padding stands at the end, and wrong where it stands in front."""
    one = tried(drawn(PLAIN_POSITIONS, flawed=False))
    assert one.found is not None
    assert one.found.verdict is Verdict.IMPOSSIBLE
    assert "left padding" in one.found.reasons[0].said


@pytest.mark.slow
def test_features_that_are_returned_in_another_order_are_said_to_be() -> None:
    """The table is right, and a user who read the output as the reference's would be wrong."""
    style = next(style for seed in range(1000) if (style := drawn(seed, flawed=False)).turned)
    one = tried(style)
    assert one.found is not None
    assert one.found.verdict is Verdict.TRUNK
    assert "What it returns has its features in the order (n s), where the reference's is (s n)." in one.found.proof


@pytest.mark.slow
def test_words_and_positions_in_one_table_beside_segments_and_without_a_norm() -> None:
    """Nothing but the sum of all tables shows which is which."""
    one = tried(replace(drawn(0, flawed=False), tables="joint", flaw="no embedding norm", lazy=False))
    assert one.found is not None, one.said
    assert one.found.verdict is Verdict.IMPOSSIBLE, str(one.found)
    assert "the module has no embeddings.LayerNorm before" in one.said


@pytest.mark.slow
@pytest.mark.parametrize("qkv", ["separate", "fused"])
def test_keys_and_values_of_one_size_are_told_by_the_norm_of_the_keys(qkv: str) -> None:
    """The queries' norm stands behind the three first, and shows nothing of the other two."""
    style = next(style for seed in range(1000) if (style := drawn(seed, flawed=False)).family.normed)
    one = tried(replace(style, qkv=qkv, order=("query", "value", "key"), lazy=False, names={**style.names, **MUTE}))
    assert (one.came, one.false_proof) == ("exact", False), str(one.found)


@pytest.mark.slow
def test_a_head_that_is_not_tied_is_a_copy() -> None:
    """The checkpoint has one tensor for both."""
    one = tried(replace(drawn(4, flawed=False), flaw="head not tied", lazy=False))
    assert one.found is not None, one.said
    assert (one.found.proven, one.false_proof) == (True, False), str(one.found)
    assert '"vocabulary_matrix" = "equals ' in one.found.text.partition("[make]")[2]
    assert not [some.name for some in one.found.unmapped if some.side == "module"]


@pytest.mark.slow
@pytest.mark.parametrize("flaw", ["causal off by one", "other gelu"])
def test_a_flaw_is_never_called_proven(flaw: str) -> None:
    seed = next(seed for seed in range(1000) if drawn(seed, flawed=True).flaw == flaw)
    one = tried(drawn(seed, flawed=True))
    assert one.found is not None, one.said
    assert not one.found.proven
    assert one.found.verdict in FLAWS[flaw][0], str(one.found)


@pytest.mark.slow
def test_a_flaw_that_weights_take_in_is_proven_with_these() -> None:
    seed = next(seed for seed in range(1000) if drawn(seed, flawed=True).flaw == "unscaled attention")
    one = tried(drawn(seed, flawed=True))
    assert one.found is not None, one.said
    assert one.found.proven, str(one.found)
    assert not one.false_proof
    assert "scale = " in one.found.text


@pytest.mark.slow
def test_a_wrong_table_would_be_counted() -> None:
    """The count of false proofs does not believe the verdict: two layers changed about are seen."""
    style = drawn(0, flawed=False)
    one = tried(style)
    assert not one.false_proof
    spoilt = Outcome(style, one.found, one.said, 1e-3, one.tensors, one.seconds)
    assert spoilt.false_proof


def test_a_seed_is_a_variant() -> None:
    sizes = {**SIZES, "depth": 2}
    one, two, other = (list(Variant(drawn(seed), sizes).state_dict()) for seed in (5, 5, 9))
    assert one == two
    assert one != other


@pytest.mark.slow
def test_a_lazy_module_that_looks_at_pictures_takes_shape() -> None:
    one = tried(replace(drawn(71, flawed=False), lazy=True))
    assert one.style.family.architecture == "ViTModel"
    assert (one.verdict, one.false_proof) == (True, False), one.said


@pytest.mark.slow
@pytest.mark.parametrize("qkv", ["heads", "raw heads"])
def test_heads_of_their_own_out_of_a_tensor_that_has_all_of_a_head_together(qkv: str) -> None:
    style = drawn(9, flawed=False)
    assert style.family.architecture == "GPTNeoXModel"
    one = tried(replace(style, qkv=qkv, lazy=False))
    assert (one.came, one.false_proof) == ("exact", False), one.said
    assert one.found is not None
    assert ".query_key_value.weight [(h p d) e]" in one.found.text


@pytest.mark.slow
def test_what_the_last_layer_gives_is_what_a_module_without_a_last_norm_returns() -> None:
    """The twin has two layers, the checkpoint three."""
    one = tried(replace(drawn(6, flawed=False), flaw="no last norm", lazy=False))
    assert one.style.family.architecture == "CTRLModel"
    assert (one.came, one.false_proof) == ("trunk only", False), one.said
    assert one.found is not None
    assert '"h.2 ' in one.found.text
