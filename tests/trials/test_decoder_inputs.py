"""Inputs for encoder-decoders, and for configs that call the usual fields something else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from porting.checkpoint import open_checkpoint
from porting.embedded import embedded_checkpoint
from porting.errors import VerifyError
from porting.tables import find_table
from porting.trials.inputs import Maker
from porting.verification.batches import make_batches, padded_in_front
from porting.verification.reference import usual_fields

CONFIG: dict[str, Any] = {  # Any: fields of several types
    "vocab_size": 50,
    "max_position_embeddings": 30,
    "pad_token_id": 49,
    "is_encoder_decoder": True,
    "decoder_start_token_id": 7,
}


def test_a_decoder_is_given_rows_of_its_own() -> None:
    padded, full = Maker(CONFIG, seed=0).first()
    assert set(padded.inputs) == {"input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"}
    ids, mask = padded.inputs["decoder_input_ids"], padded.inputs["decoder_attention_mask"]
    theirs = padded.inputs["attention_mask"]
    assert ids.shape == mask.shape
    assert len(ids) == len(theirs)
    assert ids.shape[1] != theirs.shape[1]  # no one can take one for the other
    assert torch.equal(ids[:, 0], torch.full((len(ids),), 7))
    assert bool((ids[mask == 0] == 49).all())
    assert bool((mask.diff(dim=1) <= 0).all())
    assert bool((mask.sum(dim=1) >= 1).all())
    assert mask.sum(dim=1).argmax() == theirs.sum(dim=1).argmin()
    assert full.inputs["decoder_input_ids"].shape == full.inputs["input_ids"].shape == (1, 30)  # the last position


def test_a_decoder_s_rows_are_padded_in_front_as_the_encoder_s_are() -> None:
    case = Maker(CONFIG, seed=0).first()[0]
    front = padded_in_front(case, ())
    for mask, ids in (("attention_mask", "input_ids"), ("decoder_attention_mask", "decoder_input_ids")):
        assert bool((front.inputs[mask].diff(dim=1) >= 0).all())
        assert not front.inputs[mask][:, 0].any()  # what hides padding of all rows alone, or none, differs there
        full = case.inputs[mask].all(1)
        assert torch.equal(front.inputs[mask].sum(1), case.inputs[mask].sum(1) - full.long())
        for row, kept, before, seen, first in zip(
            front.inputs[ids], front.inputs[mask], case.inputs[ids], case.inputs[mask], full.long(), strict=True
        ):
            assert torch.equal(row[kept == 1], before[seen == 1][int(first) :])


def test_the_start_is_the_padding_when_the_config_is_silent() -> None:
    config = {field: value for field, value in CONFIG.items() if field != "decoder_start_token_id"}
    for case in Maker(config, seed=0).first():
        assert bool((case.inputs["decoder_input_ids"][:, 0] == 49).all())
    with pytest.raises(VerifyError, match="decoder_start_token_id = 'x'"):
        Maker({**CONFIG, "decoder_start_token_id": "x"}, seed=0).first()


@pytest.mark.parametrize("silent", [{"is_encoder_decoder": False}, {"is_encoder_decoder": None}])
def test_other_models_are_given_none(silent: dict[str, object]) -> None:
    for case in Maker({**CONFIG, **silent}, seed=0).first():
        assert set(case.inputs) == {"input_ids", "attention_mask"}


def test_token_types_are_given_to_models_that_have_some() -> None:
    without, with_ = Maker(CONFIG, seed=0).first()[0], Maker({**CONFIG, "type_vocab_size": 2}, seed=0).first()[0]
    assert "token_type_ids" not in without.inputs
    assert set(with_.inputs["token_type_ids"].flatten().tolist()) == {0, 1}


def test_a_model_without_a_position_table_takes_rows_of_any_length() -> None:
    config = {field: value for field, value in CONFIG.items() if field != "max_position_embeddings"}
    assert max(case.inputs["input_ids"].shape[1] for case in Maker(config, seed=0, longest=77).first()) == 77


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "gpt2", "n_positions": 40, "vocab_size": 9}, {"max_position_embeddings": 40}),
        ({"model_type": "t5", "d_model": 8}, {"hidden_size": 8}),
        ({"model_type": "nobody's", "n_positions": 40}, {}),
        ({"n_positions": 40}, {}),
    ],
)
def test_fields_that_a_family_calls_otherwise_are_known(config: dict[str, object], expected: dict[str, object]) -> None:
    """A table of the user's own need not say what the family calls its positions."""
    assert usual_fields(config) == expected


@pytest.mark.parametrize(
    "given",
    [
        "batch.safetensors",
        {"input_ids": torch.zeros(1, 3)},
        [{"input_ids": 1}],
        torch.ones(2, 3),
        np.ones((2, 3)),
        3,
        {},
    ],
)
def test_inputs_that_are_no_cases_are_refused_in_words(given: Any) -> None:
    table = find_table("bert", {})
    with pytest.raises(VerifyError, match=r"expected a batch by the names of its arguments, or a list \(inputs="):
        make_batches(table, open_checkpoint(embedded_checkpoint()), CONFIG, given, seed=0, longest=9, choices=None)
