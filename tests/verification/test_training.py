"""A few steps of SGD and AdamW on both sides: what only training shows is caught, and noise is not compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.loading import load
from porting.models.bert_heads import BertForPreTraining
from porting.verification import Report, verify
from tests.small_checkpoint import tensors, write_checkpoint
from tests.verification.planted import becomes
from tests.verification.test_faithful import REWRITTEN, rewritten
from tests.verification.test_gradients import KEYS


def taught(path: Path, module: nn.Module, steps: int = 3) -> Report:
    return verify(path, module, loaded=True, steps=steps, dtypes=(torch.float32, torch.bfloat16))


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["einsum", "all by hand"])
@pytest.mark.parametrize("seed", [3, 4])
def test_other_code_for_the_same_mathematics_learns_the_same(tmp_path: Path, how: str, seed: int) -> None:
    path = write_checkpoint(tmp_path / "bert", values=tensors(seed))
    report = taught(path, rewritten(path, REWRITTEN[how]))
    assert report.faithful, str(report)
    assert report.learned is not None
    sgd, adam = report.learned.steps
    assert (sgd.optimiser, adam.optimiser) == ("SGD(lr=0.01, momentum=0.9)", "AdamW(lr=0.001)")
    for steps in (sgd, adam):
        assert steps.taken == 3
        assert steps.differing == {1: (), 3: ()}
        assert steps.meaning < 1e-11
        assert all(0 < ratio < 2 for ratio in steps.rounding.values())
        assert steps.fixed == ()


@pytest.mark.slow
def test_what_only_rounding_moves_is_said_to_be_undetermined(checkpoint: Path) -> None:
    """AdamW divides by a gradient's size: the key bias goes a whole step up or down, as its rounding has it."""
    report = taught(checkpoint, rewritten(checkpoint, REWRITTEN["all by hand"]))
    assert report.learned is not None
    for steps in report.learned.steps:
        assert {name for name, share in steps.undetermined.items() if share == 1} == set(KEYS)
        assert max(share for share in steps.undetermined.values() if share < 1) < 0.02
    text = " ".join(report.details().split())
    assert "3 steps of AdamW(lr=0.001): the weights move as the reference's, float64: off by" in text
    assert "undetermined, for their gradient is nothing but rounding: bert.layers.{0-2}.attention.key.bias" in text


class Cached(nn.Linear):
    """Keeps the transposed weight of its first call, as inference code does."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own signature
        if not hasattr(self, "kept"):
            self.kept = self.weight.detach().T.contiguous()
        return input @ (self.kept + (self.weight.T - self.weight.T.detach())) + self.bias


@pytest.mark.slow
def test_a_weight_that_is_kept_from_the_first_call_shows_in_the_second_step(checkpoint: Path) -> None:
    model = load(checkpoint)
    assert isinstance(model, BertForPreTraining)
    becomes("bert.layers.1.intermediate", Cached)(model)
    report = taught(checkpoint, model)
    assert report.verdict == "different"
    assert report.learned is not None
    assert report.learned.differing == ()
    for steps in report.learned.steps:
        assert steps.differing[1] == ()
        assert "bert.layers.1.output.weight" in steps.differing[3]
    assert "after step 3 these had moved otherwise" in " ".join(report.details().split())


class Halved(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own signature
        weight = self.weight + (self.weight.detach() - self.weight) / 2  # half of its gradient
        return F.linear(input, weight, self.bias)


@pytest.mark.slow
def test_half_a_gradient_is_caught_in_the_first_step_and_by_its_name(checkpoint: Path) -> None:
    """AdamW hides it, since it divides by the gradient's size; SGD does not, nor does the gradient."""
    model = load(checkpoint)
    becomes("nsp", Halved)(model)  # type: ignore[arg-type]  # the model of this checkpoint
    report = taught(checkpoint, model, steps=1)
    assert report.learned is not None
    assert [one.port for one in report.learned.differing] == [("nsp.weight",)]
    sgd, adam = report.learned.steps
    assert sgd.differing == {1: ("nsp.weight",)}
    assert adam.meaning < 1e-3


@pytest.mark.slow
def test_the_models_that_were_passed_do_not_move(checkpoint: Path) -> None:
    model = load(checkpoint)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    taught(checkpoint, model, steps=1)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert verify(checkpoint, model, loaded=True).faithful
