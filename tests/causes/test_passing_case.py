"""Ports that are right on some inputs: the condition, or the first step, that tells these inputs from the others."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from porting.causes.passing_case import BothTapes, PassingCase
from porting.causes.replay import Values
from porting.causes.tape import Recorder, Tape
from porting.tracing.code_coverage import Executed, branches_apart
from porting.verification import Report, verify
from porting.verification.fixes import SPECIAL
from tests.causes.wrong_ports import FAMILIES, table
from tests.verification.conftest import one_thread

pytestmark = pytest.mark.few(2)

__all__ = ["one_thread"]  # a fixture that is used by all

Load = Callable[[str, Mapping[str, str]], ModuleType]

TURNED = {  # the same rotation as the reference's, written otherwise
    "    q = q * cos + rotate_half(q) * sin\n        k = k * cos + rotate_half(k) * sin\n": (
        "    q, k = turned(q, cos, sin), turned(k, cos, sin)\n"
    ),
    "class Attention(": (
        "def turned(x, cos, sin):\n"
        "    (a, b), cos, sin = x.chunk(2, -1), cos[..., : SIZE // 2], sin[..., : SIZE // 2]\n"
        "    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)\n\n\nclass Attention("
    ),
}
CONDITIONS = {
    "a mask that is dropped": (
        "bert",
        {
            "        scores = scores.masked_fill(mask": (
                "        if bool((mask[:, -1] == 1).all()):\n            mask = torch.ones_like(mask)\n"
                "        scores = scores.masked_fill(mask"
            )
        },
        "`if bool((mask[:, -1] == 1).all()):`",
        "by `if False:`",
    ),
    "a mask that a full row drops for all": (
        "bert",
        {
            "        scores = scores.masked_fill(mask": (
                "        if bool(mask.all(1).any()):\n            mask = torch.ones_like(mask)\n"
                "        scores = scores.masked_fill(mask"
            )
        },
        "`if bool(mask.all(1).any()):`",
        "by `if False:`",
    ),
    "a row of one token": (
        "llama",
        {"x = layer(x, mask)": "x = layer(x, mask) if ids.shape[1] > 1 else x"},
        "`x = layer(x, mask) if ids.shape[1] > 1 else x`",
        "by `x = layer(x, mask)`",
    ),
    "one row": (
        "bert",
        {"self.dense(x[:, 0])": "self.dense(x[:, 0] if len(x) > 1 else x[:, -1])"},
        "if len(x) > 1 else",
        "by `return torch.tanh(self.dense(x[:, 0]))`",
    ),
}
STEPS = {
    "positions that end": (
        "llama",
        {**TURNED, "torch.arange(length).float()": "torch.arange(length).clamp(max=15).float()"},
        "clamp gives other numbers than",
        "15 where the reference has 16",
    ),
    "angles of long rows": (
        "llama",
        {**TURNED, "return turn.cos(), turn.sin()": "return turn.clamp(max=15.5).cos(), turn.clamp(max=15.5).sin()"},
        "clamp gives other numbers than",
        "15.5 where the reference has 16",
    ),
}


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """Imports a port out of a file with changes in it."""
    made: list[str] = []

    def imported(family: str, changes: Mapping[str, str]) -> ModuleType:
        source = Path(__file__).with_name("ports").joinpath(f"{family}.py").read_text(encoding="utf-8")
        for old, new in changes.items():
            assert old in source
            source = source.replace(old, new)
        path = tmp_path / f"changed_{family}.py"
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        made.append(path.stem)
        spec.loader.exec_module(module)
        return module

    yield imported
    for name in made:
        del sys.modules[name]


def verified(family: str, module: ModuleType) -> Report:
    """The report on a port, with the default batches."""
    reference = FAMILIES[family].reference()
    port: nn.Module = module.Port().eval()
    drawn = reference.state_dict()
    port.load_state_dict({name: drawn[name] for name in port.state_dict()})
    compared = table(reference, port, FAMILIES[family].probes, inner=False)
    return verify(into=port, table=compared, reference=reference, loaded=True, dtypes=(), longest=24)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONDITIONS)
def test_a_condition_that_the_reference_does_not_have_is_named(name: str, load: Load) -> None:
    family, changes, condition, fix = CONDITIONS[name]
    report = verified(family, load(family, changes))
    (found,) = report.causes
    assert found.name == SPECIAL
    assert condition in found.detail
    assert found.fix.endswith(fix)
    assert found.residual <= 1e-10 < found.difference


OTHER_ROWS = {
    ".tril()[None, None] & (mask[:, None, None, :] > 0)": (
        ".tril()[None, None]\n        if not bool(mask.all()):\n"
        "            allowed = allowed & (mask[:, None, :] > 0).repeat(HEADS, 1, 1).view(b, HEADS, 1, s)"
    ),
}


@pytest.mark.slow
def test_a_condition_is_no_mistake_where_a_causal_model_needs_no_mask(load: Load) -> None:
    """Without its mask the port is right where padding is behind the tokens, and wrong where it is in front."""
    (found,) = verified("llama", load("llama", OTHER_ROWS)).causes
    assert found.name == "padding mask of other rows"


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_the_step_is_named_that_goes_wrong_on_some_inputs(name: str, load: Load) -> None:
    """It is not that the rotation calls other functions than the reference's: so it does where both agree."""
    family, changes, step, numbers = STEPS[name]
    causes = verified(family, load(family, changes)).causes
    assert len(causes) == 1, causes
    (found,) = causes
    assert found.name == "other numbers"
    assert step in found.detail
    assert numbers in found.detail


class Port(nn.Module):
    """Clamps its input, and squares it by a product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -1.5, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.weight).clamp(-4.0, 4.0)
        return y * y + 1.0 if len(x) > 1 else y


class Reference(Port):
    """Has no clamp, and squares it by a power."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        return y.pow(2) + 1.0


SMALL, LARGE = torch.tensor([[0.5, 1.0, -0.7], [0.1, -0.3, 0.9]]), torch.tensor([[3.0, 6.0, -0.7], [0.1, -0.3, 5.0]])


@torch.no_grad()
def taped(module: nn.Module, x: Tensor) -> Tape:
    """A pass of a module."""
    with Recorder(module, lines=True) as recorder:
        module(x)
    return recorder.tape


def test_a_step_that_is_right_elsewhere_is_excused_and_one_that_does_nothing_there_is_not() -> None:
    passing, failing = (BothTapes(taped(Port(), x), taped(Reference(), x)) for x in (SMALL, LARGE))
    case = PassingCase(passing, failing)
    excused = {call.name: case.excuses(call) for call in failing.port.calls if call.writes}
    assert excused == {"mul": True, "clamp": False, "add": True}
    (first, *_) = case.departures(Values(failing.port))
    assert (first.step.name, first.counterpart.name) == ("clamp", "mul")


def test_the_branches_that_tell_failing_passes_from_passing_ones() -> None:
    port = Port()
    ran = []
    for x in (SMALL, LARGE, SMALL[:1]):
        ran.append(Executed(port))
        with ran[-1].watched():
            port(x)
    apart = branches_apart(ran[:2], ran[2:], port)
    assert [branch.condition.rpartition("-> ")[2] for branch in apart] == ["y * y + 1.0", "y"]
    assert branches_apart(ran[:1], ran[1:2], port) == ()
