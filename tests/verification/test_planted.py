"""Each bug is caught, and placed in the module that has it; no other module is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from porting.loading import load
from porting.models.bert_heads import BertForPreTraining
from porting.verification import Report, verify
from tests.small_checkpoint import tensors, write_checkpoint
from tests.verification.planted import BUGS, FAR_FROM_ZERO, LAYERS, ROUNDS_WORSE, Bug, Transposed, attention, becomes

pytestmark = pytest.mark.few(2)

SEEDS = range(3)
"""Other weights change how large a difference is, and nothing else: so the smallest ones are looked at with each."""


@pytest.fixture(scope="module", params=SEEDS, ids=lambda seed: f"seed {seed}")
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with weights of its own."""
    return write_checkpoint(tmp_path_factory.mktemp("drawn") / "bert", values=tensors(request.param))


def verified(path: Path, bug: Bug, *dtypes: torch.dtype) -> Report:
    """Without the search for its cause, which is test_causes.py's."""
    model = load(path)
    assert isinstance(model, BertForPreTraining)
    bug.plant(model)
    return verify(path, model, loaded=True, dtypes=dtypes or (torch.float32,), causes=False, trials=False)


@pytest.mark.few(1)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_caught_and_placed(checkpoint: Path, bug: Bug) -> None:
    assert_placed(verified(checkpoint, bug), bug)


@pytest.mark.slow
def test_the_smallest_difference_is_caught_with_other_weights(drawn: Path) -> None:
    eps = next(bug for bug in BUGS if bug.name == "LayerNorm eps 1e-5")
    assert_placed(verified(drawn, eps), eps)


def assert_placed(report: Report, bug: Bug) -> None:
    assert report.verdict == "different"
    assert [probe.port for probe in report.guilty] == list(bug.guilty)
    assert report.first_difference is report.guilty[0]
    assert report.shown.differing == ()
    assert min(probe.meaning.isolated or 0.0 for probe in report.guilty) > 1e-7


def test_the_module_behind_a_probe_is_named(checkpoint: Path) -> None:
    """What is compared is the head's output, which a projection in it spoils: the report lists all of its parts."""
    report = verified(checkpoint, Bug("head's weight transposed", becomes("mlm.dense", Transposed), ("mlm",)))
    assert report.guilty[0].span == ("bert", "mlm.dense", "mlm.activation", "mlm.norm", "mlm")
    assert "code run since the last matching probe: bert, mlm.dense, mlm.activation" in report.details()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_mask_precedence_bug_is_of_rounding_and_not_of_meaning(drawn: Path, dtype: torch.dtype) -> None:
    report = verified(drawn, ROUNDS_WORSE, torch.float32, dtype)
    assert report.verdict == "imprecise"
    assert report.guilty == ()
    assert report.first_difference is None
    assert [probe.port for probe in report.imprecise] == list(attention(*range(LAYERS)))
    name = str(dtype).removeprefix("torch.")
    worst = max(probe.rounding[name].isolated or 0.0 for probe in report.imprecise)
    assert worst > 28
    assert "rounds worse than the reference: bert.layers.{0-2}.attention.core -> scores" in report.details()
    assert "the rounding comes from before" in report.details()


@pytest.mark.slow
def test_what_shrinks_with_the_unit_roundoff_is_rounding(drawn: Path) -> None:
    """Here the float64 difference is far above 1e-12, and as small as the float32 one says that it should be."""
    report = verified(drawn, FAR_FROM_ZERO)
    assert max(probe.meaning.isolated or 0.0 for probe in report.probes) > 1e-11
    assert report.verdict == "imprecise"
    assert report.guilty == ()
    assert max(probe.bound.isolated or 0.0 for probe in report.probes) < 1e-8


@pytest.mark.slow
def test_weights_that_are_not_the_checkpoints_are_named(checkpoint: Path) -> None:
    model = load(checkpoint)
    assert isinstance(model, BertForPreTraining)
    with torch.no_grad():
        model.nsp.weight[0, 0] += 1e-3
    report = verify(checkpoint, model, loaded=True, causes=False)
    assert report.verdict == "different"
    assert report.shown.differing == ("nsp.weight",)
    assert [probe.port for probe in report.guilty] == ["nsp"]
    assert "weights that are not the checkpoint's: nsp.weight" in report.details()
