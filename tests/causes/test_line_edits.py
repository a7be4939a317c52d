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

from porting.causes.finding import Finding
from porting.causes.line_edits import line_edits
from porting.reporting.outcome import Probe, View
from porting.verification.cause_case import CHANGED_PASS, PassCost
from porting.verification.fixes import _hopeless, _leaves_its_module_wrong

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


WRITES = {
    "a product": "y = x * 1\n        z = x + 1\n        y *= z",
    "places": "y = x * 1\n        z = x + 1\n        y[:, 0] = z[:, 1]",
    "a method": "y = x * 1\n        z = x + 1\n        y.add_(z)",
}


@pytest.fixture
def imported(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    path = tmp_path / "a_port.py"
    end = "    return y" if "def " in request.param else "        return y"
    path.write_text(f"{HEAD}        {request.param}\n{end}\n", encoding="utf-8")
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


BRANCHES = {
    "isinstance": "y = x * 2\n        if isinstance(x, torch.Tensor):\n            y = y * 3",
    "hasattr": 'y = x * 2\n        if hasattr(self, "training"):\n            y = y * 3',
}


@pytest.mark.parametrize("imported", BRANCHES.values(), ids=BRANCHES, indirect=True)
def test_a_question_of_types_is_not_changed(imported: ModuleType) -> None:
    """With another argument it would only take a branch out."""
    line = HEAD.count("\n") + 2
    edits = list(line_edits([f"{imported.__file__}:{line}"]))
    assert edits
    assert not [edit.fix for edit in edits if edit.line == line and edit.old != edit.new]


SIZES = {
    "always": "y = x * 2\n        if x.shape[0] > 0:\n            y = y * 3",
    "sometimes": "y = x * 2\n        if x.shape[0] > 2:\n            y = y * 3",
}


@pytest.mark.parametrize("imported", SIZES.values(), ids=SIZES, indirect=True)
def test_a_changed_comparison_that_always_gives_the_same_decides_nothing(imported: ModuleType) -> None:
    line = HEAD.count("\n") + 2
    edits = [edit for edit in line_edits([f"{imported.__file__}:{line}"]) if edit.line == line]
    never = next(edit for edit in edits if edit.new in {"if x.shape[0] < 0:", "if x.shape[0] < 2:"})
    for rows in (1, 2, 3):
        with never.made():
            imported.Port()(torch.ones(rows))
    assert never.decides_nothing is ("0" in never.new.rpartition("<")[2])


@pytest.mark.parametrize("imported", SIZES.values(), ids=SIZES, indirect=True)
def test_a_changed_function_has_the_lines_of_the_file(imported: ModuleType) -> None:
    """Its errors name them, and so does the tape of a pass."""
    edits = [*line_edits([f"{imported.__file__}:{HEAD.count(chr(10)) + 2}"])]
    assert edits
    for edit in edits:
        assert edit.code.co_firstlineno == edit.function.__code__.co_firstlineno, edit.fix


def test_a_pass_of_changed_code_ends_when_it_can_mend_nothing_more() -> None:
    limits = dict.fromkeys("abcd", 0.1)
    hopeless = _hopeless({"a": 1.0, "b": 1.0, "c": 0.0, "d": 1.0}, limits, "abd", [["a", "d"]])
    assert not hopeless("a", 0.05)
    assert not hopeless("c", 0.0)
    assert not hopeless("b", 0.5)  # a and d may still be mended
    assert hopeless("d", 0.5)  # a counts only with d
    assert _hopeless({"c": 0.0, "a": 1.0}, limits, "a", [])("c", 0.5)  # it was right


def probe(path: str, off: float) -> Probe:
    return Probe(reference=path, port=path, meaning=View(end_to_end=off, isolated=off))


def test_what_is_mended_inside_of_a_module_that_stays_wrong_is_no_cause() -> None:
    """A norm behind a rotation has the reference's values without the rotation, and the scores have not."""
    probes = [probe("layers.0.attn.norm", 1.0), probe("layers.0.attn", 1.0), probe("layers.0", 0.0), probe("head", 1.0)]
    assert _leaves_its_module_wrong(["layers.0.attn.norm"], probes, [])
    assert not _leaves_its_module_wrong(["layers.0.attn.norm", "layers.0.attn"], probes, [])
    assert not _leaves_its_module_wrong(["head"], probes, [])
    known = Finding(name="softmax temperature", detail="", probes=("layers.0.attn",), difference=1.0, residual=0.0)
    assert not _leaves_its_module_wrong(["layers.0.attn.norm"], probes, [known])


def test_what_makes_up_for_the_first_wrong_module_inside_is_no_cause() -> None:
    """``norm(words) + positions`` is right without positions where the norm has the reference's values."""
    probes = [probe("embeddings.norm", 1.0), probe("embeddings", 1.0), probe("layers.0", 1.0), probe("layers.0.a", 1.0)]
    assert _leaves_its_module_wrong(["embeddings"], probes, [])
    assert not _leaves_its_module_wrong(["embeddings", "embeddings.norm"], probes, [])
    assert not _leaves_its_module_wrong(["layers.0"], probes, [])


TYPED = """y = masked(x, x, 0.0)
        return y

def masked(scores: torch.Tensor, mask: torch.Tensor, rate: float) -> torch.Tensor:
    y = scores + mask"""


@pytest.mark.parametrize("imported", [TYPED], indirect=True)
def test_a_tensor_is_not_exchanged_for_a_number(imported: ModuleType) -> None:
    """A rate of 0 in the place of a mask would only take the mask away."""
    line = HEAD.count("\n") + 5
    news = {edit.new for edit in line_edits([f"{imported.__file__}:{line}"]) if edit.line == line}
    assert "y = mask + mask" in news
    assert not [new for new in news if "rate" in new]


@pytest.mark.parametrize("imported", WRITES.values(), ids=WRITES.keys(), indirect=True)
def test_what_is_changed_in_place_is_left_out_and_not_taken_for_another(imported: ModuleType) -> None:
    """To write to another tensor is no more than not to write to this one."""
    line = HEAD.count("\n") + 3
    edits = [edit for edit in line_edits([f"{imported.__file__}:{line}"]) if edit.line == line]
    assert edits[0].new == "pass"
    assert edits[0].instruction == f"leave out `{edits[0].old}`"
    assert edits[0].fix.endswith(edits[0].instruction)
    assert not [edit.new for edit in edits if edit.new.startswith(("x *", "x[", "x.", "z *", "z[", "z."))]


MENDED = {
    "the other end of a slice": ("y = x[:, 1:]", "y = x[:, :1]"),
    "a slice to a length": ("n = len(x)\n        y = x[:, 2:]", "y = x[:, :n]"),
    "a slice from the end": ("y = x[:, 2:]", "y = x[:, :-2]"),
    "scores filled with 0": ("y = x.masked_fill(x > 1, 0)", "y = x.masked_fill(x > 1, float('-inf'))"),
    "where with 0": ("y = torch.where(x > 1, x, 0.0)", "y = torch.where(x > 1, x, float('-inf'))"),
    "the sign of a factor": ("y = x + (x > 1) * 1e9", "y = x + ((x > 1) * -1000000000.0)"),
    "a factor inside": ("y = doubled(x.mean() * x)", "y = x.mean() * doubled(x)"),
    "a factor outside": ("y = doubled(x) * x", "y = doubled(x * x)"),
    "a sum inside": ("y = torch.tanh(x + x.mean())", "y = torch.tanh(x) + x.mean()"),
}


@pytest.mark.parametrize(("imported", "mended"), MENDED.values(), ids=MENDED, indirect=["imported"])
def test_a_line_is_mended(imported: ModuleType, mended: str) -> None:
    line = HEAD.count("\n") + 1
    edits = [edit.new for number in (line, line + 1) for edit in line_edits([f"{imported.__file__}:{number}"])]
    assert mended in edits


SENSELESS = ["y = x.transpose(0, 1)", "y = torch.where(x > 1, x, -x)", "n = 2\n        y = x.swapaxes(0, n - 1)"]


@pytest.mark.parametrize("imported", SENSELESS, indirect=True)
def test_no_change_makes_a_step_that_does_nothing(imported: ModuleType) -> None:
    new = [edit.new for edit in line_edits(lines_of(imported))]
    for nothing in ("(0, 0)", "(1, 1)", "(-1, 1)", "(0, -1)", "x, x)", "x > x", "n - n"):
        assert not [one for one in new if nothing in one]


LOOPS = {
    "read before the update": "y = x * 0\n        for one in x:\n            z = y + 1\n            y = y + one",
    "kept before the update": "s, y = x, []\n        for one in x:\n            y += [s]\n            s = s + one",
    "two before": "s = x\n        for one in x:\n            z = s\n            y = z + 1\n            s = s + one",
}


@pytest.mark.parametrize("imported", LOOPS.values(), ids=LOOPS, indirect=True)
def test_a_statement_is_moved_behind_the_update(imported: ModuleType) -> None:
    line = HEAD.count("\n") + 3
    moves = [edit for edit in line_edits([f"{imported.__file__}:{line}"]) if edit.moved]
    assert [one for one in moves if one.new.endswith("+ one") and one.line == line]
    assert moves[0].instruction in moves[0].fix
