"""Every pair of a family and a module: it fits, comes back, computes the same, exports, and bugs are caught."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import porting
from porting.plan.check import check
from porting.plan.move import backward, forward
from porting.plan.plan import Plan
from porting.tracing.measure import MEANING, luck
from porting.verification import verify
from tests.families.pairs import PAIRS
from tests.families.ported import Ported, inexact, make

pytestmark = pytest.mark.few(2)

FIRST_PAIRS = {pair.table: pair for pair in reversed(PAIRS)}
"""The pair of each table with which the trials are run: the others have the same body, in the same batches."""


@pytest.fixture(scope="module", params=PAIRS, ids=str)
def ported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ported:
    return make(request.param, tmp_path_factory.mktemp("family"))


def plan_of(module: nn.Module) -> Plan:
    record = porting.provenance(module)
    assert record is not None
    return record.plan


def test_the_table_fits_and_leaves_nothing_over(ported: Ported) -> None:
    module = ported.load()
    plan = check(ported.table, ported.checkpoint, module)
    targets = {architecture.target: architecture.name for architecture in ported.table.architectures}
    assert targets[f"{type(module).__module__}:{type(module).__qualname__}"] == ported.pair.architecture
    assert (plan.fresh, plan.warnings) == ((), ())
    written = {name for step in plan.steps for name in step.targets}
    assert written | set(plan.tied) | set(plan.computed) == set(module.state_dict())
    read = {name for step in plan.steps for name in step.sources}
    assert read | {left.name for left in plan.left_out} == set(ported.checkpoint.tensors)


def test_every_tensor_comes_back_bit_for_bit(ported: Ported, tmp_path: Path) -> None:
    """Through each rule read backwards; what a rule sums or scales comes back to what gives the same again."""
    module = ported.load()
    plan, values, source = plan_of(module), module.state_dict(), ported.checkpoint
    for step in plan.steps:
        back = dict(backward(step, plan.sources, values.__getitem__, plan.arithmetic(step), source.read))
        if inexact(step.rule):
            for name, again in forward(step, plan.targets, back.__getitem__, plan.arithmetic(step)):
                torch.testing.assert_close(again, values[name], rtol=torch.finfo(again.dtype).eps, atol=0.0)
        else:
            assert all(torch.equal(back[name], source.read(name)) for name in step.sources), step.rule
    porting.export(module, ported.pair.table, tmp_path / "again")
    before, after = (load_file(place / "model.safetensors") for place in (ported.directory, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.few(1)
def test_it_computes_the_same(ported: Ported) -> None:
    first = FIRST_PAIRS[ported.pair.table] == ported.pair
    report = verify(ported.directory, table=ported.pair.table, trials=None if first else False)
    assert report.faithful, str(report)
    assert max(probe.meaning.worst for probe in report.probes) <= MEANING
    assert any("the reference casts to less" in note for note in report.notes) == ported.pair.single
    assert all(one.worst <= luck(probe.count) for probe in report.probes for one in probe.rounding.values())
    assert (report.shown.copy, report.shown.nothing, report.skipped) == ((), (), ())


@pytest.mark.few(1)
def test_what_was_trained_here_is_exported_and_computes_the_same_there(ported: Ported, tmp_path: Path) -> None:
    module = ported.load()
    generator = torch.Generator().manual_seed(1)
    weights = module.state_dict()
    with torch.no_grad():
        for name in (name for step in plan_of(module).steps for name in step.targets):  # a buffer as well
            weights[name].add_(0.05 * torch.randn(weights[name].shape, generator=generator))
    porting.export(module, ported.pair.table, tmp_path / "trained")
    kind = getattr(transformers, ported.pair.architecture)
    _, info = kind.from_pretrained(tmp_path / "trained", output_loading_info=True)
    assert {key: found for key, found in info.items() if found} == {}
    again = porting.load(tmp_path / "trained", table=ported.pair.table)
    for step in plan_of(again).steps:
        rounded = 1.0 if step.rule.constants else 0.0  # divided on the way out, multiplied on the way in
        for name in step.targets:
            tolerance = rounded * torch.finfo(weights[name].dtype).eps
            torch.testing.assert_close(again.state_dict()[name], weights[name], rtol=tolerance, atol=0.0)
    report = verify(tmp_path / "trained", table=ported.pair.table, trials=False, dtypes=())  # the code is known already
    assert report.faithful, str(report)
    before, after = (load_file(place / "model.safetensors") for place in (ported.directory, tmp_path / "trained"))
    assert all(
        not torch.equal(before[name], after[name]) for step in plan_of(module).steps for name in step.sources[:1]
    )


def transposed(module: nn.Module) -> str:
    """A square matrix, transposed: shapes cannot tell."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear) and part.in_features == part.out_features:
            part.weight.data = part.weight.data.T.contiguous()
            return f"{name}.weight"
    raise AssertionError("the module has no square matrix to transpose")


def misread_eps(module: nn.Module) -> None:
    """The eps of the last norm, another model's: 1e-3."""
    norms = [part for part in module.modules() if hasattr(part, "eps") or hasattr(part, "variance_epsilon")]
    setattr(norms[-1], "eps" if hasattr(norms[-1], "eps") else "variance_epsilon", 1e-3)


@pytest.mark.slow
def test_planted_bugs_are_caught(ported: Ported) -> None:
    module = ported.load()
    name = transposed(module)
    report = verify(ported.directory, module, ported.pair.table, loaded=True, causes=False, trials=False, dtypes=())
    assert (report.verdict, report.shown.differing) == ("different", (name,))
    assert report.guilty

    module = ported.load()
    misread_eps(module)
    report = verify(ported.directory, module, ported.pair.table, loaded=True, causes=False, trials=False, dtypes=())
    assert (report.verdict, report.shown.differing) == ("different", ())
    assert report.guilty
