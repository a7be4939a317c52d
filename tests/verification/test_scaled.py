"""What a table sums or scales is rounded when it is loaded: that is told as rounding and not as another meaning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import porting
from porting.models.language_model import LanguageModel
from porting.verification import verify
from tests.families.pairs import OPENAI_GPT, Pair
from tests.families.ported import make


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """An OpenAI GPT in float32 whose embeddings are divided by the root of 24, which no power of two is."""
    return make(Pair("openai_gpt", "OpenAIGPTLMHeadModel", OPENAI_GPT), tmp_path / "gpt").directory


def loaded(checkpoint: Path) -> LanguageModel:
    module = porting.load(checkpoint)
    assert isinstance(module, LanguageModel)
    return module


def test_the_port_is_faithful_and_pays_for_the_rounding_in_the_other_tier(checkpoint: Path) -> None:
    report = verify(checkpoint, trials=False)
    assert report.faithful, str(report)
    assert max(probe.meaning.worst for probe in report.probes) <= 1e-14
    [first] = [probe for probe in report.probes if probe.port == "positions"]
    assert 1 < first.rounding["float32"].worst < 4
    assert verify(checkpoint, loaded(checkpoint), loaded=True, trials=False).faithful


@pytest.mark.slow
def test_a_wrong_factor_is_another_meaning(checkpoint: Path) -> None:
    module = loaded(checkpoint)
    with torch.no_grad():
        module.embedding.weight.mul_(1 + 2**-20)
    report = verify(checkpoint, module, loaded=True, trials=False, causes=False)
    assert report.verdict == "different"
    assert report.shown.differing == ("embedding.weight",)


@pytest.mark.slow
def test_one_unit_in_the_last_place_of_one_weight_is_seen(checkpoint: Path) -> None:
    """What is no longer as it was loaded is taken as it is."""
    module = loaded(checkpoint)
    with torch.no_grad():
        weight = module.embedding.weight
        weight[5, 3] = torch.nextafter(weight[5, 3], torch.tensor(torch.inf))
    report = verify(checkpoint, module, loaded=True, trials=False, causes=False)
    assert report.shown.differing == ("embedding.weight",)
    assert max(probe.meaning.worst for probe in report.probes) > 1e-9


@pytest.mark.slow
def test_the_module_that_was_passed_is_left_as_it_was(checkpoint: Path) -> None:
    module = loaded(checkpoint)
    before = {name: one.clone() for name, one in module.state_dict().items()}
    verify(checkpoint, module, loaded=True)
    assert all(torch.equal(one, before[name]) for name, one in module.state_dict().items())
    double = porting.load(checkpoint, dtype=torch.float64)
    before = {name: one.clone() for name, one in double.state_dict().items()}
    assert verify(checkpoint, double, loaded=True).faithful
    assert all(torch.equal(one, before[name]) for name, one in double.state_dict().items())
