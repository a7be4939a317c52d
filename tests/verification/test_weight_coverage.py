"""What inputs can show of the weights, and what they cannot."""

from __future__ import annotations

from pathlib import Path

from porting.verification import verify
from tests.small_checkpoint import TRUNK, write_checkpoint


def test_the_row_of_the_padding_word_is_shown_like_any_other(tmp_path: Path) -> None:
    """It takes no gradient in training; what it computes at the places of padding is compared all the same."""
    report = verify(write_checkpoint(tmp_path / "bert", parts=(TRUNK,), architecture="BertModel"))
    assert report.shown.activation["embeddings.word.weight"] == 1.0
