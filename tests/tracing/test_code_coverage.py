"""Which of a port's own code ran: every kind of branch, what would never run, and what is nobody's business."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from porting.tracing.code_coverage import Branch, Executed, is_own, never_ran_in, not_watched

SOURCE = '''\
import torch
from torch import nn


def helper(x, scale=None):
    """A docstring is no code."""
    if scale is None:
        return x
    return x * scale  # helper


def never_called(x):
    return x + 1


class Model(nn.Module):
    """As a user writes one."""

    def __init__(self, fused=False):
        super().__init__()
        self.fused = fused
        self.calls = 0
        self.norm = None
        self.linear = nn.Linear(4, 4)

    def forward(self, x, mask=None, mode="a", cut=6):
        if x.dim() != 3:
            raise ValueError("three axes")
        if mask is not None:
            x = x * mask  # masked
            x = x + 0
        else:
            x = x + 0.0  # unmasked
        if mode == "a":
            x = x + 1
        elif mode == "b":  # elif
            x = x + 2
        if self.training:
            x = torch.dropout(x, 0.1, True)
        if not self.fused and x.shape[1] > cut:
            x = x[:, :cut]  # long
        if self.fused:
            x = x * 1.5
        if self.calls > 3:
            x = x * 2  # state
        self.calls += 1
        if self.norm is not None:
            x = self.norm(x)
        y = self.linear(x) if mode == "a" else x @ self.linear.weight  # arms
        bias = mask or torch.zeros(1)
        for row in x[9:]:
            y = y + row.sum()  # loop
        try:
            y = y + 0
        except RuntimeError:
            y = y - 1

        def inner(z):
            return z.relu()

        def unused(z):
            return z.tanh()  # unused

        parts = [one + 1 for one in y if one.sum() > 1e9]  # parts
        match mode:
            case "a":
                y = inner(y)
            case "z":
                y = y - 3  # case
        return helper(y + bias.sum() + len(parts))
'''


def load(folder: Path, source: str = SOURCE, name: str = "somebodys_model") -> Any:  # a module of its own names
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(model: nn.Module, *calls: Callable[[nn.Module], object]) -> list[Branch]:
    executed = Executed(model)
    for call in calls:
        with executed.watched():
            call(model)
    return list(never_ran_in(executed, model))


def named(found: list[Branch], why: str) -> list[str]:
    """By the comment that the line ends in."""
    lines = SOURCE.splitlines()
    return [lines[branch.first - 1].partition("# ")[2] or branch.condition for branch in found if branch.why == why]


def test_every_kind_of_branch(tmp_path: Path) -> None:
    model = load(tmp_path).Model().eval()
    found = run(model, lambda watched: watched(torch.randn(2, 5, 4)))
    assert named(found, "inputs") == [
        "helper", "masked", "elif", "long", "state", "arms", "loop", "unused", "parts", "case",
    ]  # fmt: skip
    assert named(found, "raises") == ["if x.dim() != 3:", "except RuntimeError:"]
    assert named(found, "training") == ["if self.training:"]
    assert named(found, "fixed") == ["if self.fused:", "if self.norm is not None:"]
    by_comment = {SOURCE.splitlines()[branch.first - 1].partition("# ")[2]: branch for branch in found}
    masked = by_comment["masked"]
    assert (masked.condition, masked.function, masked.lines) == ("if mask is not None:", "Model.forward", 2)
    assert masked.where.endswith(f"somebodys_model.py:{masked.first - 1}")
    assert by_comment["helper"].condition == "after if scale is None:"
    assert by_comment["elif"].condition == 'elif mode == "b":'
    arms = "self.linear(x) if mode == 'a' else x @ self.linear.weight -> x @ self.linear.weight"
    assert by_comment["arms"].condition == arms


def test_what_other_inputs_reach_is_gone(tmp_path: Path) -> None:
    model = load(tmp_path).Model().eval()
    long, mask = torch.randn(2, 12, 4), torch.tensor(1.0)
    found = run(model, lambda watched: watched(long), lambda watched: watched(torch.randn(2, 5, 4), mask, "b"))
    assert named(found, "inputs") == ["helper", "state", "loop", "unused", "parts", "case"]
    found = run(model, lambda watched: watched(torch.randn(2, 5, 4), mask))
    assert "unmasked" in named(found, "inputs")
    assert "masked" not in named(found, "inputs")
    (other,) = [branch for branch in found if branch.condition.startswith("else of")]
    assert other.condition == "else of if mask is not None:"


def test_what_an_attribute_rules_out_depends_on_what_it_holds(tmp_path: Path) -> None:
    fused = load(tmp_path).Model(fused=True).eval()
    found = run(fused, lambda watched: watched(torch.randn(2, 12, 4)))
    assert "long" not in named(found, "inputs")
    assert "long" in named(found, "fixed")
    both = nn.Sequential(load(tmp_path).Model(fused=True), nn.Identity()).eval()
    assert "long" in named(run(both, lambda watched: watched(torch.randn(2, 12, 4))), "fixed")


THRESHOLD = """\
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.window = 16

    def forward(self, x):
        if x.shape[1] > self.window + 0 or x.shape[1] > 128:
            x = x[:, :3]
        return x
"""


def test_whole_numbers_of_a_condition_are_kept(tmp_path: Path) -> None:
    """They are lengths at which it may turn; an attribute's are what it holds."""
    block = load(tmp_path, THRESHOLD, "with_a_threshold").Block().eval()
    (found,) = run(block, lambda watched: watched(torch.randn(2, 5)))
    assert {16, 128} <= set(found.constants)


def test_who_watched_before_watches_again(tmp_path: Path) -> None:
    model = load(tmp_path).Model().eval()
    seen: list[str] = []

    def watcher(frame: object, event: str, arg: object) -> None:
        seen.append(event)

    before = sys.gettrace()
    sys.settrace(watcher)
    try:
        run(model, lambda watched: watched(torch.randn(2, 5, 4)))
        assert sys.gettrace() is watcher
    finally:
        sys.settrace(before)


@pytest.mark.parametrize(
    ("name", "file", "package", "own"),
    [
        ("porting.models.bert", __file__, "porting", True),
        ("porting.models.bert", __file__, "mine", True),
        ("porting.tracing.trace", __file__, "porting", False),
        ("torch.nn.functional", torch.__file__, "torch", False),
        ("transformers.modeling_utils", pytest.__file__, "mine", False),
        ("transformers.modeling_utils", pytest.__file__, "transformers", True),
        ("mine.blocks", __file__, "mine", True),
        ("mine.blocks", "<string>", "mine", False),
    ],
)
def test_whose_code_it_is(name: str, file: str, package: str, own: bool) -> None:
    assert is_own(name, file, package) == own


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def test_what_cannot_be_watched_is_named() -> None:
    made: dict[str, Any] = {"nn": nn}
    exec("class Hidden(nn.Module):\n    def forward(self, x):\n        return x * 2\n", made)  # noqa: S102  # no source
    with pytest.deprecated_call():
        scripted = torch.jit.script(nn.Tanh())
    model = nn.Sequential(Plain(), made["Hidden"](), nn.ReLU(), scripted).eval()
    executed = Executed(model)
    with executed.watched():
        model(torch.randn(3))
    assert not_watched(executed, model, {"0", "1", "2", "3"}) == ("Hidden", "Tanh")
    assert not_watched(Executed(model), model, {"0"}) == ("Plain",)  # it ran, as the hooks say, and was not seen
