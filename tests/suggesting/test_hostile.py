"""Odd builders and modules are refused in a line that names the user's own; and nothing of the user's is changed."""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as every
from transformers import BertModel

from porting.errors import PortingError, VerifyError
from porting.suggesting import Verdict, suggest
from porting.target import TargetError
from tests.suggesting.hostile import FAULTS, FINE, Interrupted, Replaces, a_history, a_lock, modules
from tests.suggesting.oracle import drafted
from tests.zoo.parts import Config

pytestmark = pytest.mark.few(3)

IMPORTED = BertModel  # importing it sets a variable of the environment, once

SIZES = {"width": 24, "depth": 3, "heads": 3, "inner": 40, "vocab": 40, "positions": 24, "segments": 2}


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Whatever a test does, the next one finds things as they were."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("HOSTILE", "0")
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(mode=True)


@contextmanager
def as_before() -> Iterator[None]:
    """What is run inside leaves the process as it found it."""
    before = everything()
    yield
    now = everything()
    assert [name for name in before if before[name] != now[name]] == []


def everything() -> dict[str, object]:
    """What a process has that a builder can change."""
    numbers: Any = np.random.get_state()  # what people seed
    return {
        "random": random.getstate(),
        "numpy": (numbers[0], numbers[1].tobytes(), *numbers[2:]),
        "torch": torch.get_rng_state().tolist(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "folder": os.getcwd(),
        "modes": (torch.is_inference_mode_enabled(), torch.get_default_device(), torch.is_autocast_enabled("cpu")),
        "hooks": {name: len(one) for name, one in vars(every).items() if re.fullmatch("_global_.*_hooks", name)},
        "path": list(sys.path),
        "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_it_is_refused_in_a_line(source: Path, name: str) -> None:
    build, said = FAULTS[name]
    with as_before(), pytest.raises(PortingError, match=said) as raised:
        suggest(source, build)
    for fault in raised.value.faults:
        assert "\n" not in str(fault)
        assert "hostile.py:" in str(fault), "the user's own line"


@pytest.mark.parametrize("name", list(FINE)[:1])  # all of them are proven below
def test_a_table_is_drafted_all_the_same(source: Path, name: str) -> None:
    with as_before():
        assert len(drafted(source, FINE[name]).table.rules) > 8


@pytest.mark.slow
@pytest.mark.parametrize("name", FINE)
def test_it_can_be_run_all_the_same(source: Path, name: str) -> None:
    with as_before():
        found = suggest(source, FINE[name])
    assert found.verdict is Verdict.TRUNK, str(found)


def snapshot(module: nn.Module) -> dict[str, object]:
    """All that a module is."""
    found: dict[str, object] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        found[name] = (tensor.data_ptr(), tensor.dtype, tensor.requires_grad, tensor.grad, tensor.tolist())
    for path, part in module.named_modules():
        hooks = [list(getattr(part, name)) for name in vars(part) if name.endswith("_hooks")]
        found[f"{path}()"] = (part.training, hooks, type(part), sorted(vars(part)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*modules()], ids=lambda kind: kind.__name__)
def test_a_module_that_was_passed_is_as_it_was(source: Path, kind: Callable[..., nn.Module]) -> None:
    """Of every kind, also when it is refused."""
    torch.manual_seed(0)
    module = kind(SIZES).train()
    module.layers[0].eval()  # type: ignore[index, union-attr]  # a list of layers
    module.register_forward_hook(lambda *_: None)
    next(module.parameters()).requires_grad_(False)
    before = snapshot(module)
    expected = pytest.raises(PortingError, match=r"hostile\.py:") if kind.__name__ in FAULTS else nullcontext()
    with as_before(), expected:
        suggest(source, module)
    assert snapshot(module) == before


@pytest.mark.parametrize("built", [True, False])
def test_an_interruption_leaves_everything_as_it_was(source: Path, *, built: bool) -> None:
    module = Interrupted(SIZES).train()
    before = snapshot(module)
    with as_before(), pytest.raises(KeyboardInterrupt):
        suggest(source, module if built else Interrupted)
    assert snapshot(module) == before


@pytest.mark.slow
def test_what_replaces_a_function_of_torch_is_refused_and_it_is_put_back(source: Path) -> None:
    """The reference would compute with it as well, and the proof would hold for that alone."""
    gelu = F.gelu
    with (
        as_before(),
        pytest.raises(VerifyError, match=r"running the module replaces torch\.nn\.functional\.gelu, for the"),
    ):
        suggest(source, Replaces)
    assert F.gelu is gelu


@pytest.mark.slow
@pytest.mark.parametrize("kind", [a_lock, a_history])
def test_a_module_that_deepcopy_refuses_is_taken_all_the_same(
    source: Path, kind: Callable[[Config], nn.Module]
) -> None:
    module = kind(SIZES)
    before = snapshot(module)
    with as_before():
        found = suggest(source, module)
    assert found.verdict is Verdict.TRUNK, str(found)
    assert snapshot(module) == before
    assert suggest(source, kind).verdict is Verdict.TRUNK


@pytest.mark.parametrize("wrong", [3, "my_model:build", None])
def test_what_builds_nothing_is_refused(source: Path, wrong: Any) -> None:
    with pytest.raises(TargetError, match=r"is neither a module nor something that builds one"):
        suggest(source, wrong)
