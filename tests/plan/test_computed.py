"""Buffers that the table lists in [fresh]: the module computes them, so that no one has to allow it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import porting
from porting.errors import PortingWarning
from porting.plan.plan import Plan, PlanError
from porting.target import TargetError
from tests import own

TABLE = own.TABLE.replace("[fresh]", '[fresh]\n"angles" = "the module computes them"')


class Turning(own.Own):
    """The own model, with a buffer that is saved and that no checkpoint has."""

    angles: Tensor

    def __init__(self, config: own.Config, *, head: bool = False) -> None:
        super().__init__(config, head=head)
        self.register_buffer("angles", torch.arange(3) / 3)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return own.table(tmp_path, TABLE)


def plan(module: nn.Module) -> Plan:
    record = porting.provenance(module)
    assert record is not None
    return record.plan


def test_a_buffer_needs_no_leave_and_gives_no_warning(tmp_path: Path, table: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = porting.load(own.write(tmp_path / "own"), Turning, table, trust=True)
    assert (plan(module).fresh, plan(module).computed) == ((), ("angles",))
    assert torch.equal(module.get_buffer("angles"), torch.arange(3) / 3)
    assert "1 computed" in plan(module).summary


def test_a_parameter_still_does(tmp_path: Path, table: Path) -> None:
    directory = own.write(tmp_path / "own")
    with pytest.raises(PlanError, match=r"has nothing for 'head\.weight', 'head\.bias' \(fresh=True") as caught:
        porting.load(directory, lambda config: Turning(config, head=True), table, trust=True)
    assert "angles" not in str(caught.value)
    with pytest.warns(PortingWarning, match="2 parameters are new and untrained: head.weight, head.bias"):
        module = porting.load(directory, lambda config: Turning(config, head=True), table, fresh=True, trust=True)
    assert (plan(module).fresh, plan(module).computed) == (("head.weight", "head.bias"), ("angles",))


def test_a_buffer_that_the_table_does_not_list_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"'angles' \[3\] of the module: nothing writes it"):
        porting.load(own.write(tmp_path / "own"), Turning, own.table(tmp_path), trust=True)


def test_a_module_that_was_passed_keeps_its_own(tmp_path: Path, table: Path) -> None:
    module = Turning(own.Config(width=6, depth=2, words=11))
    module.angles.fill_(7.0)
    porting.load(own.write(tmp_path / "own"), module, table)
    assert torch.equal(module.angles, torch.full((3,), 7.0))


def test_a_module_without_values_cannot_be_left_so(tmp_path: Path, table: Path) -> None:
    with torch.device("meta"):
        module = Turning(own.Config(width=6, depth=2, words=11))
    with pytest.raises(TargetError, match="nothing gives a value to 'powers', 'angles'"):
        porting.load(own.write(tmp_path / "own"), module, table)


def test_it_takes_the_dtype_of_what_is_loaded(tmp_path: Path, table: Path) -> None:
    values = own.tensors(torch.float16)
    module = porting.load(own.write(tmp_path / "own", values), Turning, table, trust=True)
    assert torch.equal(module.get_buffer("angles"), (torch.arange(3) / 3).half())


def test_it_is_not_exported_to_a_checkpoint_that_does_not_have_it(tmp_path: Path, table: Path) -> None:
    directory = own.write(tmp_path / "own")
    porting.export(porting.load(directory, Turning, table, trust=True), table, tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()
