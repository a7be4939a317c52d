"""All passes side by side, with weights that are read when they are reached: the same report in fixed memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from porting.checkpoint import open_checkpoint
from porting.models import BertConfig, BertForPreTraining
from porting.tracing.lazy_weights import LazyWeight, with_lazy_weights
from porting.tracing.lockstep import Lockstep
from porting.verification import Report, VerifyError, batch_search, verify
from porting.verification.reference import load_reference
from tests.families.pairs import PAIRS
from tests.families.ported import make
from tests.small_checkpoint import write_checkpoint
from tests.verification.planted import BUGS, Bug

pytestmark = pytest.mark.few(2)

TABLES = (
    "bert_into_torch_encoder",  # torch's own attention, which is looked into by patching torch
    "bert_into_interleaved",  # what is not moved as it is
    "openai_gpt",  # scaled, folded, transposed
    "marian",  # an encoder and a decoder; a permuted residual stream
    "albert",  # one layer that runs at every depth
    "modern_bert",  # computed in float32 in places
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("streamed") / "bert")


def close(one: Report, other: Report) -> bool:
    """The same but for what the order of sums does to the last digits."""
    same = (one.verdict, one.skipped, len(one.warnings)) == (other.verdict, other.skipped, len(other.warnings))
    return same and all(
        (a.reference, a.port, bool(a.lowered), a.guilty) == (b.reference, b.port, bool(b.lowered), b.guilty)
        and math.isclose(a.meaning.worst, b.meaning.worst, rel_tol=0.01, abs_tol=1e-14)
        and all(0.5 < b.rounding[name].worst / max(a.rounding[name].worst, 0.1) < 2 for name in a.rounding)
        for a, b in zip(one.probes, other.probes, strict=True)
    )


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("table", TABLES)
def test_it_finds_what_passes_in_turn_find(table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_search, "BUDGET", 0)  # a streamed run does not look for more batches
    pair = next(pair for pair in PAIRS if pair.table == table)
    source = make(pair, tmp_path).directory
    report = verify(source, table=table, stream=True)
    assert close(verify(source, table=table), report), str(report)
    assert report.verdict == "faithful"
    assert report.shown.activation == {}
    said = " ".join(report.details().split())  # however long the names are by which its lines are folded
    assert "not shown: which weights reach a probe (a streamed run does not measure it)" in said
    assert "not run: " in said


def test_no_value_is_read_before_it_is_used(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's own reading has the kernel fetch half of each file ahead, which is read again when it is used."""

    def refused(*args: object, **kwargs: object) -> None:
        raise AssertionError(args)

    monkeypatch.setattr("transformers.modeling_utils.safe_open", refused)
    assert verify(checkpoint, stream=True, longest=24).faithful
    opened = open_checkpoint(checkpoint)
    views = {opened.read(name).data_ptr() for name in opened.tensors}
    for untouched in (True, False):
        module = load_reference(opened, "BertForPreTraining", torch.float32, untouched=untouched)
        shared = [one.data_ptr() in views for one in module.parameters()]
        assert any(shared) == untouched


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_it_places_a_bug(checkpoint: Path, bug: Bug) -> None:
    def build(config: BertConfig) -> BertForPreTraining:
        model = BertForPreTraining(config=config)
        bug.plant(model)
        return model

    report = verify(checkpoint, build, stream=True, longest=24)
    assert report.verdict == "different"
    assert [probe.port for probe in report.guilty] == list(bug.guilty)


def test_a_forward_that_fails_is_told_and_nothing_is_left_running(checkpoint: Path) -> None:
    class Failing(BertForPreTraining):
        def forward(self, *args: Any, **kwargs: Any) -> Any:  # Any: whatever it is given
            super().forward(*args, **kwargs)
            raise RuntimeError("on purpose")

    before, softmax = threading.active_count(), F.softmax
    with pytest.raises(VerifyError, match=r"the port failed on .*RuntimeError: on purpose"):
        verify(checkpoint, Failing, stream=True)
    assert threading.active_count() == before
    assert F.softmax is softmax


def test_what_needs_a_whole_model_is_refused(checkpoint: Path) -> None:
    with pytest.raises(VerifyError) as caught:
        verify(checkpoint, nn.Linear(2, 2), loaded=True, gradients=True, stream=True)
    assert [fault.message.removeprefix("stream=True cannot take ") for fault in caught.value.faults] == [
        "a module that is built already: pass its class, or a function that builds it",
        "gradients and training: they keep every layer's weights",
    ]


# ----------------------------------------------------------------------------------------------------- lazy weights


def lazily(module: nn.Module, dtype: torch.dtype, *, hollow: bool = False) -> tuple[nn.Module, list[int]]:
    """A lazy copy, and how many elements each read gave."""
    read: list[int] = []

    def source(tensor: Tensor) -> Callable[[], Tensor]:
        def give() -> Tensor:
            read.append(tensor.numel())
            return tensor.detach()

        return give

    return with_lazy_weights(
        module, dtype, {id(parameter): source(parameter) for parameter in module.parameters()}, hollow=hollow
    ), read


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (nn.Linear(6, 5), torch.randn(2, 3, 6)),
        (nn.Linear(6, 5, bias=False), torch.randn(3, 6)),
        (nn.Embedding(7, 4, padding_idx=0), torch.tensor([[1, 6], [0, 3]])),
        (nn.LayerNorm(6), torch.randn(2, 6)),
        (nn.Conv1d(6, 4, 3), torch.randn(2, 6, 9)),
        (nn.Bilinear(6, 6, 2), (torch.randn(2, 6), torch.randn(2, 6))),
        (nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), torch.randn(2, 5, 6)),
    ],
    ids=["linear", "without bias", "embedding", "norm", "convolution", "bilinear", "torch's layer"],
)
def test_a_lazy_module_computes_the_same(module: nn.Module, inputs: Tensor | tuple[Tensor, ...]) -> None:
    lazy, read = lazily(module.eval(), torch.float64)
    several = inputs if isinstance(inputs, tuple) else (inputs,)
    given = [one.double() if one.is_floating_point() else one for one in several]
    assert read == []
    with torch.no_grad():
        found = lazy(*given)
        torch.testing.assert_close(found, module.double()(*given), rtol=1e-14, atol=1e-14)
    assert not isinstance(found, LazyWeight)
    assert sum(read) >= sum(parameter.numel() for parameter in module.parameters())
    hollow, nothing = lazily(module, torch.float64, hollow=True)
    with torch.no_grad():
        assert hollow(*given).shape == found.shape
    assert nothing == []


def test_a_large_map_is_cast_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows at a time as PIECE allows: here two of five."""
    monkeypatch.setattr("porting.tracing.lazy_weights.PIECE", 2 * 6 * 8)
    module, x = nn.Linear(6, 5), torch.randn(2, 3, 6).double()
    lazy, _ = lazily(module, torch.float64)
    widths: list[int] = []

    class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type its modes
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.addmm.default:
                widths.append(result.shape[-1])
            return result

    with torch.no_grad(), Products():  # type: ignore[no-untyped-call]  # as above
        found = lazy(x)
    assert widths == [2, 2, 1]
    torch.testing.assert_close(found, F.linear(x, module.weight.double(), module.bias.double()), rtol=0, atol=1e-14)


def test_a_lazy_weight_is_shared_where_the_original_is() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    lazy, _ = lazily(module, torch.float32)
    first, second = lazy.get_submodule("0").weight, lazy.get_submodule("1").weight
    assert first is second
    assert isinstance(first, nn.Parameter)
    assert repr(first) == "LazyWeight([4, 4], torch.float32)"


# ------------------------------------------------------------------------------------------------------------ convoy


def test_followers_go_before_leaders_and_one_at_a_time() -> None:
    convoy, said, there = Lockstep(), list[str](), set[int]()

    def lead() -> None:
        for number in range(3):
            there.add(number)
            said.append(f"lead {number}")
            convoy.wait()

    def follow(name: str) -> None:
        for number in range(3):
            convoy.wait(lambda number=number: number in there)  # type: ignore[misc]  # mypy knows no type of it
            said.append(f"{name} {number}")

    convoy.add(lead, leads=True)
    convoy.add(lambda: follow("a"))
    convoy.add(lambda: follow("b"))
    convoy.run()
    assert said == [f"{name} {number}" for number in range(3) for name in ("lead", "a", "b")]


def test_when_one_fails_all_leave() -> None:
    convoy, left = Lockstep(), list[str]()

    def waits() -> None:
        try:
            convoy.wait(lambda: False)
        finally:
            left.append("waits")

    def fails() -> None:
        convoy.wait()
        raise ValueError("on purpose")

    convoy.add(waits)
    convoy.add(fails, leads=True)
    before = threading.active_count()
    with pytest.raises(ValueError, match="on purpose"):
        convoy.run()
    assert left == ["waits"]
    assert threading.active_count() == before


def test_passes_that_wait_for_each_other_are_no_hang() -> None:
    convoy = Lockstep()
    convoy.add(lambda: convoy.wait(lambda: False))
    with pytest.raises(RuntimeError, match="wait for activations that no pass computes"):
        convoy.run()
