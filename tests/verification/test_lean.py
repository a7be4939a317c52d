"""What keeps a verification of a large model small changes none of its numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from porting.checkpoint import Checkpoint, open_checkpoint
from porting.models import Bert, BertConfig
from porting.tracing import activations
from porting.tracing.running import Clock
from porting.trials.inputs import Case
from porting.verification import VerifyError, module_checkpoint, proof, references, verify
from porting.verification.module_checkpoint import share
from porting.verification.reference import load_reference
from porting.verification.references import LiveReference
from porting.verification.subject import Subject, exactly
from tests.small_checkpoint import write_checkpoint


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is a large one."""
    monkeypatch.setattr(module_checkpoint, "LARGE", 0)
    monkeypatch.setattr(references, "LARGE", 0)
    monkeypatch.setattr(activations, "HELD", 0)


def test_the_report_is_the_same(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint(tmp_path / "bert")
    before = verify(path, architecture="BertModel", trials=False)
    assert "kept for what they show" in before.search  # batches that are run on a lean reference
    request.getfixturevalue("small")
    lean: list[object] = []
    made = LiveReference.lean

    def counted(self: LiveReference, *arguments: object) -> object:
        lean.append(made(self, *arguments))  # type: ignore[arg-type]  # handed on as they are
        return lean[-1]

    monkeypatch.setattr(LiveReference, "lean", counted)
    after = verify(path, architecture="BertModel", trials=False)
    assert [type(one).__name__ for one in lean] == ["Side"]
    assert after.faithful
    assert after.cases == before.cases
    assert after.shown == before.shown
    for one, other in zip(before.probes, after.probes, strict=True):
        assert (one.port, one.reference) == (other.port, other.reference)
        assert other.meaning.end_to_end < 1e-13
        assert other.rounding["float32"].end_to_end == pytest.approx(one.rounding["float32"].end_to_end, rel=1e-3)


def tanh_gelu(config: BertConfig) -> Bert:
    return Bert(config=replace(config, hidden_act="gelu_new"))


@pytest.mark.slow
def test_the_search_for_a_cause_casts_each_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint(tmp_path / "bert")
    made: list[torch.dtype] = []

    def counted(subject: Subject, checkpoint: Checkpoint) -> nn.Module:
        made.append(torch.float64)
        return exactly(subject, checkpoint)

    monkeypatch.setattr(proof, "exactly", counted)
    told: list[str] = []

    def tell(what: str, done: int, total: int) -> None:
        told.append(what)

    counts = []
    for causes in (False, True):
        made.clear()
        options = {"trials": False, "dtypes": (), "causes": causes, "progress": tell}
        report = verify(path, tanh_gelu, architecture="BertModel", **options)  # type: ignore[arg-type]  # options of several types
        assert ("looking for the cause" in told) == causes
        counts.append(len(made))
    assert [cause.name for cause in report.causes] == ["tanh GELU for another activation"]
    assert counts[1] == counts[0] + 1


class Odd(nn.Module):
    """Asks its weight for what only a plain tensor has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.from_numpy(self.linear.weight.detach().numpy()).T


def test_a_lean_run_is_the_run() -> None:
    living = LiveReference.of(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)))
    living.keep(torch.float32)
    case = Case("", {"input": torch.randn(5, 3)})
    assert living.lean(torch.float64, (), "", [case], Clock()) is None  # a copy is small
    expected = living.side(torch.float64, (), "", [case], Clock())
    references_large, references.LARGE = references.LARGE, 0
    try:
        lean = living.lean(torch.float64, (), "", [case], Clock())
        odd = LiveReference.of(Odd())
        odd.keep(torch.float32)
        refused = odd.lean(torch.float64, (), "", [Case("", {"x": torch.randn(5, 3)})], Clock())
    finally:
        references.LARGE = references_large
    assert lean is not None
    assert refused is not None
    expected.wanted = lean.wanted = ["."]
    values = [next(iter(side.record(0).values())) for side in (expected, lean)]
    assert values[0].dtype == values[1].dtype == torch.float64
    assert (values[0] - values[1]).abs().max() < 1e-15
    with pytest.raises(VerifyError):  # and then meaning.py goes on with a copy
        refused.run(0, lambda point, value: None)


def test_a_reference_shares_what_its_file_holds(tmp_path: Path, small: None) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "bert"))
    module = load_reference(checkpoint, "BertForPreTraining", torch.float32)
    with torch.no_grad():
        module.get_parameter("bert.pooler.dense.bias")[0] += 1
    before = {name: one.clone() for name, one in module.state_dict().items()}
    private = {name: one.data_ptr() for name, one in module.named_parameters()}
    share(module, checkpoint)
    assert all(torch.equal(one, before[name]) for name, one in module.state_dict().items())
    views = {checkpoint.read(name).data_ptr() for name in checkpoint.tensors}
    kept = [name for name, one in module.named_parameters() if one.data_ptr() not in views]
    assert kept == ["bert.pooler.dense.bias"]
    assert module.get_parameter(kept[0]).data_ptr() == private[kept[0]]
