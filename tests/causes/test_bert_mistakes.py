"""Mistakes that somebody made in the source of a BERT are named, with the number that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from porting.causes.catalogue import ROUNDING
from porting.loading import load
from porting.models.bert_heads import BertForPreTraining
from porting.verification import verify
from tests.causes.bert_mistakes import MISTAKES, Mistake
from tests.verification.conftest import checkpoint, one_thread

pytestmark = pytest.mark.few(3)

__all__ = ["checkpoint", "one_thread"]  # fixtures


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        pytest.param(name, mistake, id=f"{name}, {number}")
        for name, many in MISTAKES.items()
        for number, mistake in enumerate(many, 1)
    ],
)
def test_a_mistake_in_the_source_is_named(checkpoint: Path, name: str, mistake: Mistake) -> None:
    model = load(checkpoint)
    assert isinstance(model, BertForPreTraining)
    mistake.plant(model)
    rounds = any(cause.name == name for cause in ROUNDING)
    report = verify(checkpoint, model, loaded=True, dtypes=(torch.float32, torch.bfloat16) if rounds else ())
    assert report.causes
    for found in report.causes:
        assert name in found.names, [(cause.name, cause.detail, cause.probes, cause.nearest) for cause in report.causes]
        assert mistake.detail in found.detail if found.name == name else found.ties
