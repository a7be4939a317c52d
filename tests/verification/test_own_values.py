"""A module that was passed keeps what the checkpoint does not fill: new parameters, and buffers that it computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import porting
from porting import models
from porting.models.seq2seq import Seq2Seq
from porting.verification import verify
from tests.families.pairs import MARIAN, Pair
from tests.families.ported import make
from tests.small_checkpoint import TRUNK, write_checkpoint


@pytest.mark.slow
def test_buffers_that_the_module_computes(tmp_path: Path) -> None:
    checkpoint = make(Pair("marian", "MarianMTModel", MARIAN), tmp_path / "marian").directory
    loaded = porting.load(checkpoint)
    assert isinstance(loaded, Seq2Seq)
    module = Seq2Seq(config=loaded.config)
    before = {name: one.clone() for name, one in module.state_dict().items()}
    assert verify(checkpoint, module, "marian").faithful
    assert all(torch.equal(one, before[name]) for name, one in module.state_dict().items())
    module.decoder.positions.table[3] += 1e-6  # and they are really its own
    report = verify(checkpoint, module, "marian", causes=False)
    assert report.verdict == "different"
    first = report.first_difference
    assert first is not None
    assert first.port.startswith("decoder.layers.0.attention")


def test_parameters_that_are_new(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "bert", parts=(TRUNK,), architecture="BertForSequenceClassification")
    made = porting.load(checkpoint, architecture="BertModel")
    assert isinstance(made, models.Bert)
    module: nn.Module = models.BertForSequenceClassification(config=made.config)
    assert verify(checkpoint, module, fresh=True).faithful
