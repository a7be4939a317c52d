"""Models run on the CPU whatever device their code names, on machines with an accelerator and without."""

# mypy: disable-error-code="no-untyped-call,index"
# The models that are changed here are written as users write them.

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import porting
from porting.tracing.devices import on_cpu
from tests.generating import checkpoints, scratch

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "a constructor": lambda x: torch.arange(3, device="cuda"),
    "a constructor with a number": lambda x: torch.zeros(3, device="cuda:1"),
    "a constructor with an index": lambda x: torch.zeros(3, device=0),
    "torch.tensor": lambda x: torch.tensor([1.0], device=torch.device("cuda")),
    "as_tensor": lambda x: torch.as_tensor([1.0], device="mps"),
    "new_zeros": lambda x: x.new_zeros(2, device="cuda"),
    "zeros_like": lambda x: torch.zeros_like(x, device="xpu:0"),
    "to": lambda x: x.to("cuda"),
    "to with a dtype": lambda x: x.to("cuda", torch.float64, non_blocking=True),
    "to by name": lambda x: x.to(device=torch.device("cuda", 1)),
    "to an index": lambda x: x.to(0),
    "cuda": lambda x: x.cuda(),
    "cuda with an index": lambda x: x.cuda(1, non_blocking=True),
    "type": lambda x: x.type("torch.cuda.FloatTensor"),
    "a module": lambda x: nn.Linear(2, 2).to("cuda").weight,
    "a module by cuda": lambda x: nn.Linear(2, 2).cuda().weight,
    "a module's argument": lambda x: nn.Linear(2, 2, device="cuda").weight,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_made_for_the_cpu(name: str) -> None:
    with on_cpu(always=True):
        assert CALLS[name](torch.ones(2)).device.type == "cpu"


def test_an_equation_that_looks_like_a_device_stays_as_it_is() -> None:
    with on_cpu(always=True):
        assert torch.einsum("cu,da->cuda", torch.ones(2, 3), torch.ones(4, 5)).shape == (2, 3, 4, 5)
        assert torch.ones(2, device="meta").is_meta


def test_outside_nothing_is_changed() -> None:
    with on_cpu(always=True):
        pass
    with pytest.raises((AssertionError, RuntimeError), match=r"(?i)cuda|device"):
        torch.ones(2, device="cuda:99")


class OnADevice(scratch.Gpt):
    """Names the device that it was trained on, in its constructor and in its forward."""

    def __init__(self, vocab: int, width: int, depth: int, heads: int, window: int) -> None:
        super().__init__(vocab, width, depth, heads, window)
        self.register_buffer("places", torch.arange(window).cuda(), persistent=False)
        self.to("cuda")

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:  # as the model that it is made of
        x = self.tok(idx.to("cuda")) + self.pos(self.places[: idx.shape[1]])
        for block in self.blocks:
            x = block(x) + torch.zeros(1, device=torch.device("cuda"), dtype=x.dtype)
        return (self.ln(x)[:, [-1]] @ self.tok.weight.T, None)


def build(config: Any) -> nn.Module:  # whatever the table gives
    return OnADevice(*(config[name] for name in ("vocab", "width", "depth", "heads", "window")))


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    return checkpoints.gpt2(tmp_path / "c")


def test_a_device_that_is_written_into_a_module_is_no_difference(gpt2: Path) -> None:
    assert porting.verify(gpt2, build, scratch.GPT_TABLE).faithful


@pytest.mark.slow
def test_a_table_is_found_for_a_module_that_names_a_device(gpt2: Path) -> None:
    found = porting.suggest(gpt2, build)
    assert found.proven, found


def test_it_generates_on_the_cpu(gpt2: Path) -> None:
    expected = porting.generate("I read", gpt2, into=scratch.build_gpt, table=scratch.GPT_TABLE, max_length=8)
    assert porting.generate("I read", gpt2, into=build, table=scratch.GPT_TABLE, max_length=8).text == expected.text


def test_an_error_behind_it_is_told_once(gpt2: Path) -> None:
    class Fails(OnADevice):
        def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
            super().forward(idx)
            raise ValueError("no such luck")

    with pytest.raises(porting.PortingError, match="no such luck"):
        porting.verify(gpt2, lambda config: Fails(*config.values()), scratch.GPT_TABLE)


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """The default device is one that is not there."""
    torch.set_default_device("cuda:0")
    try:
        yield
    finally:
        torch.set_default_device(None)


def test_a_default_device_is_left_aside_and_put_back(gpt2: Path, elsewhere: None) -> None:
    assert porting.verify(gpt2, scratch.build_gpt, scratch.GPT_TABLE).faithful
    assert str(torch.get_default_device()) == "cuda:0"


def test_a_compiled_module_is_compared_as_what_it_wraps(gpt2: Path) -> None:
    compiled: Any = torch.compile(porting.load(gpt2, scratch.build_gpt, scratch.GPT_TABLE), backend="eager")
    assert porting.verify(gpt2, compiled, scratch.GPT_TABLE).faithful
    assert porting.verify(gpt2, compiled, scratch.GPT_TABLE, loaded=True).faithful


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@needs_gpu
def test_a_module_on_a_gpu_stays_there(gpt2: Path) -> None:
    module = porting.load(gpt2, scratch.build_gpt, scratch.GPT_TABLE).cuda()
    assert porting.verify(gpt2, module, scratch.GPT_TABLE).faithful
    assert porting.verify(gpt2, module, scratch.GPT_TABLE, loaded=True).faithful
    assert {one.device.type for one in module.parameters()} == {"cuda"}


@needs_gpu
def test_what_a_module_keeps_outside_of_itself_on_a_gpu_is_copied(gpt2: Path) -> None:
    places = torch.arange(512).cuda()

    class Outside(scratch.Gpt):
        def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
            return super().forward(idx + 0 * places[: idx.shape[1]])

    assert porting.verify(gpt2, lambda config: Outside(*config.values()), scratch.GPT_TABLE).faithful


@needs_gpu
def test_a_module_is_loaded_where_its_builder_puts_it(gpt2: Path) -> None:
    module = porting.load(gpt2, build, scratch.GPT_TABLE)
    assert {one.device.type for one in module.parameters()} == {"cuda"}
    expected = porting.load(gpt2, scratch.build_gpt, scratch.GPT_TABLE).state_dict()
    assert all(torch.equal(value.cpu(), expected[name]) for name, value in module.state_dict().items())
    assert module(torch.tensor([[1, 2, 3]]).cuda())[0].isfinite().all()
