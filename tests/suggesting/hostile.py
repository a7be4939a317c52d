"""Builders and modules as people write them on a bad day; each is named after what is wrong with it."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.parts import Config
from tests.zoo.position_buffer import PositionBuffer


class Usual(PositionBuffer):
    """The usual BERT, without a pooler."""


Build = Callable[..., Any]  # what comes back is often no module

FAULTS: dict[str, tuple[Build, str]] = {}
"""Name -> what is handed over, and what is said of it."""

FINE: dict[str, Build] = {}
"""What is odd, and can be run all the same."""


def refused(said: str) -> Callable[[Build], Build]:
    def keep(build: Build) -> Build:
        FAULTS[build.__name__] = (build, said)
        return build

    return keep


def fine(build: Build) -> Build:
    FINE[build.__name__] = build
    return build


# ------------------------------------------------------------------------------------------------- builders


@refused(r"hostile\.py:\d+: build_a_tuple gave a tuple, expected a torch.nn.Module \(return its first")
def build_a_tuple(config: Config) -> object:
    return Usual(config), "tokenizer"


@refused(r"hostile\.py:\d+: build_a_class gave the class Usual, expected a torch.nn.Module \(call it: return Usual")
def build_a_class(config: Config) -> object:
    return Usual


@refused(r"hostile\.py:\d+: build_nothing gave None, expected a torch.nn.Module \(is a return missing\?")
def build_nothing(config: Config) -> None:
    Usual(config)


@refused(r"hostile\.py:\d+: build_later gave a coroutine, expected a torch.nn.Module")
async def build_later(config: Config) -> object:
    await asyncio.sleep(0)
    return Usual(config)


@refused(r"building the module failed: ZeroDivisionError: .* \(at .*hostile\.py:\d+\)")
def divides_by_nothing(config: Config) -> object:
    config["hidden_size"] // (config["num_attention_heads"] - config["num_attention_heads"])
    return Usual(config)


@refused(r"asks for 'heads_per_island', and no field of config\.json is known by that")
def compares_a_field_that_is_not_there(config: Config) -> object:
    assert str(config["heads_per_island"]) == "as many as there are"
    return Usual(config)


@refused(r"building the module failed: FileNotFoundError: .*nowhere\.txt.* \(at .*hostile\.py:\d+\)")
def needs_a_file(config: Config) -> object:
    Path("nowhere.txt").read_text()
    return Usual(config)


@refused(r"building the module failed: SystemExit: 3 \(at .*hostile\.py:\d+\)")
def leaves_the_program(config: Config) -> object:
    sys.exit(3)


@refused(r"building the module failed: RecursionError: .* \(at .*hostile\.py:\d+\)")
def calls_itself(config: Config) -> object:
    return calls_itself(config)


@refused(r"hostile\.py:\d+: asks_for_what_nobody_has asks for 'island', and no field of config.json is known by that")
def asks_for_what_nobody_has(hidden_size: int, island: int) -> object:
    raise AssertionError


@refused(r"hostile\.py:\d+: without_elements gave Bare, whose table.weight is of no size, \[0, 24\]")
def without_elements(config: Config) -> object:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Linear(24, 0)

        def forward(self, ids: Tensor) -> Tensor:
            return ids.double()

    return Bare()


@refused(r"hostile\.py:\d+: without_weights gave Bare, which has no weights")
def without_weights(config: Config) -> object:
    class Bare(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return ids.double()

    return Bare()


@refused(r"hostile\.py:\d+: on_meta gave PositionBuffer, whose .* is on the device meta \(build it with values")
def on_meta(config: Config) -> object:
    with torch.device("meta"):
        return PositionBuffer(config)


class RaisesAtOnce(nn.Module):
    def __init__(self, config: Config) -> None:
        raise RuntimeError("not today,\nnor tomorrow")


FAULTS["RaisesAtOnce"] = (RaisesAtOnce, r"failed: RuntimeError: not today, nor tomorrow \(at .*hostile\.py:\d+\)")


@fine
def prints(config: Config) -> object:
    print("a builder that tells the world")  # noqa: T201  # the point
    return Usual(config)


@fine
def moves_to_cuda(config: Config) -> object:
    return Usual(config).to("cuda:7")


@fine
def trains(config: Config) -> object:
    return Usual(config).train()


def set_everything() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # what people write
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.chdir("/")
    os.environ["HOSTILE"] = "1"
    os.environ.pop("HOME", None)
    sys.path.insert(0, "/nowhere")


@fine
def sets_everything(config: Config) -> object:
    set_everything()
    return Usual(config)


@fine
def freezes(config: Config) -> object:
    return Usual(config).requires_grad_(False)


@fine
def in_half_precision(config: Config) -> object:
    return Usual(config).half()


# ------------------------------------------------------------------------------------------------- modules


def refused_module(said: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def keep(kind: type[nn.Module]) -> type[nn.Module]:
        FAULTS[kind.__name__] = (kind, said)
        return kind

    return keep


def fine_module(kind: type[nn.Module]) -> type[nn.Module]:
    FINE[kind.__name__] = kind
    return kind


@refused_module(r"RaisesInForward.forward failed on .*: ValueError: nothing works \(at .*hostile\.py:\d+\)")
class RaisesInForward(Usual):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        raise ValueError("nothing works")


@refused_module(r"hostile\.py:\d+: IsRandom.forward gives something else each time")
class IsRandom(Usual):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        return F.dropout(super().forward(ids, keep, segments), 0.1)


@refused_module(r"hostile\.py:\d+: MakesModules.forward makes parameters while it runs")
class MakesModules(Usual):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x = super().forward(ids, keep, segments)
        out: Tensor = nn.Linear(x.shape[-1], x.shape[-1], dtype=x.dtype)(x)
        return out


@refused_module(r"MovesAway.forward moves data to another device: what it returns is on meta \(keep it where its")
class MovesAway(Usual):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        return super().forward(ids, keep, segments).to("meta")


@fine_module
class MovesToCuda(Usual):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        return super().forward(ids.to("cuda:7"), keep, segments)


@fine_module
class MakesOnCuda(Usual):
    """Behind much else, at which other ways of giving it a mask end earlier."""

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        return super().forward(ids, keep, segments) + torch.zeros(1, device="cuda")


@refused_module(r"FailsOnPadding.forward failed on .*: ValueError: no padding \(at .*hostile\.py:\d+\)")
class FailsOnPadding(Usual):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        if not keep.all():
            raise ValueError("no padding")
        return super().forward(ids, keep, segments)


@refused_module(r"hostile\.py:\d+: IsRandomNowAndThen.forward gives something else each time")
class IsRandomNowAndThen(Usual):
    calls = 0

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        IsRandomNowAndThen.calls += 1
        return super().forward(ids, keep, segments) * (1 + 1e-3 * (IsRandomNowAndThen.calls % 5 == 0))


@refused_module(r"hostile\.py:\d+: ReturnsNothing.forward returns no tensor of floating-point numbers, but None")
class ReturnsNothing(Usual):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> None:  # type: ignore[override]  # the point
        super().forward(ids, keep, segments)


@refused_module(r"IsDeaf.forward gives the same whatever words it is given")
class IsDeaf(Usual):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        return super().forward(torch.zeros_like(ids), keep, segments)


@refused_module(r"IsNoNumber.forward gives numbers that are none")
class IsNoNumber(Usual):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        return super().forward(ids, keep, segments) * float("nan")


@refused_module(r"hostile\.py:\d+: TakesTheUnknown.forward takes 'island', and nothing tells what to give it")
class TakesTheUnknown(Usual):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor, island: Tensor) -> Tensor:  # type: ignore[override]
        raise AssertionError


@refused_module(r"hostile\.py:\d+: TakesAnything.forward takes no argument by name")
class TakesAnything(Usual):
    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return super().forward(*args, **kwargs)


@refused_module(r"hostile\.py:\d+: ChangesItself.forward gives something else each time")
class ChangesItself(Usual):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        with torch.no_grad():
            self.norm.bias.add_(1)
        return super().forward(ids, keep, segments)


@fine_module
class SetsEverything(Usual):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        set_everything()
        torch.set_grad_enabled(True)
        self.train()
        self.register_forward_hook(lambda *_: None)
        self.layers[0].register_forward_hook(lambda *_: None)
        return super().forward(ids, keep, segments)


class Interrupted(Usual):
    """Somebody presses Ctrl-C in the middle of a run."""

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        set_everything()
        self.register_forward_hook(lambda *_: None)
        with torch.no_grad():
            self.norm.bias.add_(1)
        raise KeyboardInterrupt


class Replaces(Usual):
    """It computes with a function of torch that it has replaced for all others, too."""

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        F.gelu = lambda x, approximate="none": F.relu(x)  # type: ignore[assignment]  # the point
        return super().forward(ids, keep, segments)


@fine_module
class ReturnsDict(Usual):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"out": super().forward(ids, keep, segments)}


@dataclass
class Output:
    out: Tensor
    more: Tensor | None = None


@fine_module
class ReturnsDataclass(Usual):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Output:  # type: ignore[override]
        return Output(super().forward(ids, keep, segments))


@fine_module
class ReturnsTuple(Usual):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(ids, keep, segments), None


@fine_module
class CountsItsCalls(Usual):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(ids, keep, segments)


@refused_module(r"hostile\.py:\d+: ChangesItsInput.forward changes what it is given, so that whoever runs it twice")
class ChangesItsInput(Usual):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        out = super().forward(ids, keep, segments)
        ids *= 0
        return out


def a_lock(config: Config) -> nn.Module:
    """Built, :func:`copy.deepcopy` refuses it."""
    module = Usual(config)
    module.lock = threading.Lock()  # type: ignore[assignment]  # what cannot be copied
    return module


def a_history(config: Config) -> nn.Module:
    """It keeps what it returned: a tensor that is no leaf."""
    module = Usual(config)
    ids = torch.ones(1, 4, dtype=torch.long)
    module.last = module(ids, ids.bool(), 0 * ids)  # what people keep
    return module


def modules() -> Iterator[type[nn.Module]]:
    """Those that can be built, and handed over so."""
    for build in (*(one for one, _ in FAULTS.values()), ReturnsDict, CountsItsCalls, SetsEverything):
        if isinstance(build, type) and issubclass(build, Usual):
            yield build
