"""Which functions are changed to find the line of a mistake: those that compute, and do nothing else."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from porting.causes.line_edits import line_edits
from porting.verification.cause_case import CHANGED_PASS, PassCost

HEAD = """\
import os
import torch
import torch.nn.functional as F
from pathlib import Path
from torch import nn

def doubled(x):
    return x * 2

def kept(x):
    torch.save(x, "x.pt")
    return x

class Port(nn.Module):
    def forward(self, x):
"""

COMPUTES = {
    "an expression": "y = F.gelu(x * 1.5)",
    "a function of the file": "y = doubled(x).transpose(0, 1)",
    "a loop over modules": "y = x\n        for part in self.children():\n            y = part(y) + 1",
    "builtins": "y = sum(x.unbind(0)) * max(1, len(x))",
}
HARMS = {
    "a loop without an end": "y, n = x, 0\n        while n < 3:\n            y, n = y + 1, n + 1",
    "a file": 'y = x * 2\n        open(self.log, "a").write("x")',
    "a file by pathlib": 'y = x * 2\n        Path(self.log).write_text("x")',
    "a process": 'y = x * 2\n        os.system("true")',
    "state": "y = self.last = x * 2",
    "a tensor that is saved": "y = x * 2\n        torch.save(y, self.log)",
    "a function of the file that saves": "y = kept(x) * 2",
}


@pytest.fixture
def imported(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    path = tmp_path / "a_port.py"
    path.write_text(f"{HEAD}        {request.param}\n        return y\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location("a_port", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["a_port"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules["a_port"]


def lines_of(module: ModuleType) -> list[str]:
    first = HEAD.count("\n") + 1
    return [f"{module.__file__}:{first}"]


@pytest.mark.parametrize("imported", COMPUTES.values(), ids=COMPUTES, indirect=True)
def test_code_that_computes_is_changed(imported: ModuleType) -> None:
    assert next(line_edits(lines_of(imported)), None) is not None


@pytest.mark.parametrize("imported", HARMS.values(), ids=HARMS, indirect=True)
def test_code_that_a_change_could_turn_into_harm_is_not(imported: ModuleType) -> None:
    assert not list(line_edits(lines_of(imported)))


@pytest.mark.parametrize("imported", ["y = x\n        for _ in range(3):\n            y = y + 1"], indirect=True)
def test_a_changed_pass_that_goes_on_and_on_or_makes_huge_tensors_is_ended(imported: ModuleType) -> None:
    port: nn.Module = imported.Port()
    four, large = torch.ones(4), torch.ones(4 * CHANGED_PASS + 1)
    usual = PassCost()
    with usual:
        port(four)
    assert (usual.calls, usual.largest) == (3, 16)
    with PassCost(usual):
        for _ in range(CHANGED_PASS):
            port(four)
    message = "far more calls or memory"
    with pytest.raises(RuntimeError, match=message), PassCost(usual):
        nn.Sequential(*(port for _ in range(CHANGED_PASS + 1)))(four)
    with pytest.raises(RuntimeError, match=message), PassCost(usual):
        port(large)
