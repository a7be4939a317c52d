"""float32 inside of a float64 run: casts are left out, what cannot be left out is bounded, and both are placed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from torch import Tensor, nn

import porting
from porting.models.bert_heads import BertForPreTraining
from porting.reporting.report import Report
from porting.reporting.terminal import render
from porting.tracing.float64 import forced_float64, spelled_operations
from porting.verification import Case, verify
from tests.families.ported import draw
from tests.verification.planted import becomes
from tests.verification.test_hostile_ports import Single


class Norm(nn.Module):
    """As RMS norms are written: in float32 whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8) / 5 + 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Turned(nn.Module):
    """Rotary positions of float32 numbers, on queries and keys in float32, and a softmax in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query, self.key = Norm(), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("frequencies", 1.0 / 100.0 ** (torch.arange(0, 8, 2).float() / 8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.frequencies, Tensor)
        angles = torch.arange(x.shape[1]).float()[:, None] * self.frequencies.float()
        turn = torch.cat((angles, angles), -1)
        cos, sin = turn.cos().to(x.dtype), turn.sin().to(x.dtype)
        q, k = (
            self.turn(projected.float(), cos, sin).to(x.dtype) for projected in (self.query(self.norm(x)), self.key(x))
        )
        shares = torch.softmax(q @ k.mT * 0.35, dim=-1, dtype=torch.float32).to(x.dtype)
        return shares @ x

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat((-right, left), -1) * sin


class Plain(Turned):
    """The same in the dtype of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = PlainNorm()

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.frequencies, Tensor)
        angles = torch.arange(x.shape[1]).float()[:, None] * self.frequencies.float()
        turn = torch.cat((angles, angles), -1)
        cos, sin = turn.cos().to(x.dtype), turn.sin().to(x.dtype)
        q, k = self.turn(self.query(self.norm(x)), cos, sin), self.turn(self.key(x), cos, sin)
        return torch.softmax(q @ k.mT * 0.35, dim=-1) @ x


class PlainNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


BATCH = [Case("a batch", {"x": torch.randn(3, 7, 8, generator=torch.Generator().manual_seed(0))})]


@pytest.mark.parametrize(("reference", "port", "side"), [(Turned, Plain, "the reference"), (Plain, Turned, "the port")])
def test_a_norm_a_rotation_and_a_softmax_in_float32(reference: type[Turned], port: type[Turned], side: str) -> None:
    """On either side the true bound holds, and the modules that cast are named."""
    torch.manual_seed(0)
    report = verify(reference=reference(), into=port, inputs=BATCH, gradients=True)
    assert report.faithful, str(report)
    assert max(probe.meaning.worst for probe in report.probes) <= 1e-14
    (casts,) = [note for note in report.notes if "casts to less" in note]
    named = "norm (aten._to_copy), the model itself (aten._to_copy)"
    assert casts == f"{side} casts to less than float64 in {named}: the float64 run leaves these casts out"
    assert f"note: {casts[:60]}" in report.details()
    brief = shown(report, verbose=False)
    assert "less than float64" not in brief
    assert len(brief.splitlines()) <= 12  # with two of gradients


class Rough(nn.Module):
    """A layer whose constants are made in float32."""

    fault = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        constants = 3.7 ** (torch.arange(8, dtype=torch.float32) / 8)
        found: Tensor = self.linear(x * constants.to(x.dtype) + self.fault)
        return found


class Wrong(Rough):
    fault = 0.3


class Layers(nn.Module):
    def __init__(self, kind: type[nn.Module] = Rough) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        found: Tensor = self.head(x)
        return found


def test_without_verbose_float32_inside_is_one_line_and_rows_that_are_right_are_left_out() -> None:
    torch.manual_seed(0)
    report = verify(reference=Layers(), into=Layers(Wrong), inputs=BATCH)
    assert report.verdict == "different"
    full, brief = (shown(report, verbose=verbose) for verbose in (True, False))
    assert "computes in less than float64" in full
    assert "head " in full
    assert "comes from before" in full
    (line,) = [line for line in brief.splitlines() if "less than float64" in line]
    assert line.startswith("computed in less than float64: layers.{0-2}")
    assert [row.split()[0] for row in brief.splitlines() if "comes from before" in row] in ([], ["output"])


class Gelu(Rough):
    """A constant in float32, a projection that is not a module, so no probe stands in between, and an activation."""

    def forward(self, x: Tensor) -> Tensor:
        constants = torch.arange(1, 9, dtype=torch.float32).cos()
        found = F.linear(x * constants.to(x.dtype), self.linear.weight, self.linear.bias)
        return F.gelu(found)


class RoundsOtherwise(Gelu):
    """The same constants by another way, which rounds otherwise, and a mistake behind them."""

    def forward(self, x: Tensor) -> Tensor:
        constants = (torch.arange(1, 9, dtype=torch.float32) + math.pi / 2).sin()
        found = F.linear(x * constants.to(x.dtype), self.linear.weight, self.linear.bias)
        return F.gelu(found, approximate="tanh")


def test_the_line_is_that_of_the_mistake_and_not_of_a_constant_that_rounds_otherwise() -> None:
    torch.manual_seed(0)
    report = verify(reference=Layers(Gelu), into=Layers(RoundsOtherwise), inputs=BATCH)
    assert report.verdict == "different"
    assert report.divergence is not None
    assert report.divergence.code == 'return F.gelu(found, approximate="tanh")'


def shown(report: Report, *, verbose: bool) -> str:
    console = Console(width=200, record=True, file=StringIO())
    console.print(render(report, verbose=verbose))
    return console.export_text()


def llama(kind: str) -> nn.Module:
    config: Any = transformers.LlamaConfig  # it types its fields, and a dictionary's values are of all kinds
    sizes = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "use_cache": False}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": kind}
    return transformers.LlamaModel(config(**sizes, **heads))


def t5(kind: str) -> nn.Module:
    config: Any = transformers.T5Config  # as above; it has no fused attention
    sizes = {"vocab_size": 40, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4}
    return transformers.T5EncoderModel(config(**sizes))


def without_casts(module: nn.Module) -> nn.Module:
    """torch's own norm in the place of each that casts."""
    for name, part in list(module.named_modules()):
        if type(part).__name__ in ("LlamaRMSNorm", "T5LayerNorm"):
            weight, eps = part.get_parameter("weight"), part.__dict__["variance_epsilon"]
            module.set_submodule(name, nn.RMSNorm(len(weight), eps=eps))
    return module


@pytest.mark.few(1)
@pytest.mark.parametrize(("make", "norms"), [(llama, "layers.{0,1}.input_layernorm"), (t5, "encoder.final_layer_norm")])
def test_models_of_transformers_that_cast(make: Callable[[str], nn.Module], norms: str) -> None:
    reference = make("eager")
    draw(reference)
    ids = torch.randint(0, 40, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(9) < torch.tensor([[9], [5], [7]])).long()
    batch = [Case("three rows", {"input_ids": ids, "attention_mask": mask})]
    report = verify(reference=reference, into=lambda: without_casts(make("sdpa")), inputs=batch)
    assert report.faithful, str(report)
    assert max(probe.meaning.worst for probe in report.probes) <= 1e-14
    assert any(f"{norms} (aten._to_copy)" in note for note in report.notes)


class Slightly(Plain):
    """A mistake that is a thousand times smaller than what float32 rounds."""

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return super().turn(x, cos, sin * (1 + 1e-10))


@pytest.mark.slow
def test_a_mistake_below_float32_s_rounding_is_caught_behind_the_cast() -> None:
    torch.manual_seed(0)
    report = verify(reference=Turned(), into=Slightly, inputs=BATCH)
    assert report.verdict == "different"
    assert max(probe.meaning.worst for probe in report.probes) < 1e-9


class Elsewhere(Single):
    """What numpy computes, no mode of torch sees: the result is float32, and nothing can be left out."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        context, shares = super().forward(query, key, value, bias, output_attentions=output_attentions)
        lowered = torch.from_numpy(context.detach().numpy().astype("float32")) * 1.0
        return context + (lowered.to(context.dtype) - context).detach(), shares


@pytest.mark.slow
def test_what_cannot_be_left_out_is_bounded_where_it_is_and_end_to_end_behind_it(checkpoint: Path) -> None:
    """The float32 of layer 0 is carried over to all that lies behind, and to nothing that is isolated from it."""
    model = porting.load(checkpoint)
    assert isinstance(model, BertForPreTraining)
    becomes("bert.layers.0.attention.core", Elsewhere)(model)
    report = verify(checkpoint, model, loaded=True, trials=False)
    assert report.faithful, str(report)
    (here,) = [probe for probe in report.probes if probe.lowered]
    core = "bert.layers.0.attention.core"
    assert here.port == f"{core} -> 0"
    (lowered,) = here.lowered
    assert lowered.startswith(f"{core} (")
    places = [probe.port for probe in report.probes]
    before, behind = report.probes[: places.index(here.port)], report.probes[places.index(here.port) + 1 :]
    assert all(probe.bound.end_to_end == 1e-12 for probe in before if "scores" not in probe.port)
    assert all(probe.bound.end_to_end > 1e-9 for probe in behind)
    assert max(probe.meaning.end_to_end for probe in behind) > 1e-12
    assert all(probe.meaning.isolated is None or probe.meaning.isolated <= 1e-12 for probe in behind)
    assert all((probe.bound.isolated or 0.0) < 1e-11 for probe in behind)
    assert here.bound.isolated is not None
    assert 1e-9 < (here.meaning.isolated or 0.0) <= here.bound.isolated < 1e-5
    assert f"{core} -> 0 computes in less than float64 ({lowered})" in " ".join(report.details().split())


def test_only_what_would_be_rounded_is_left_out() -> None:
    part = nn.Linear(2, 2).double()
    table = torch.tensor([0.5, 2.0], dtype=torch.float64)
    part.register_buffer("table", table)
    with forced_float64(part) as found:
        assert torch.arange(3).float().dtype == torch.float32
        assert table[1:].float().dtype == torch.float32
        assert found == {}
        assert table.clone().float().dtype == torch.float64  # what is computed with may be round by chance
        third = torch.tensor([1 / 3, float("nan")], dtype=torch.float64)
        assert third.float().dtype == third.bfloat16().dtype == third.to(torch.float16).dtype == torch.float64
        assert third.sum(dtype=torch.float32).dtype == torch.float64
    assert found == {"the model itself": {"aten._to_copy": None, "aten.sum": None}}
    assert third.float().dtype == torch.float32


def test_modules_that_differ_in_a_number_are_one() -> None:
    assert spelled_operations({"a.1.b": ["x"], "a.10.b": ["x"], "a.2.c": ["x"], "d": ["y", "z"]}) == (
        "a.{1,10}.b (x), a.2.c (x), d (y, z)"
    )


def _half(x: Tensor) -> Tensor:
    return x.to(torch.float32) * 0.5


def _scripted() -> Callable[[Tensor], Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # models have it all the same
        scripted: Callable[[Tensor], Tensor] = torch.jit.script(_half)
    return scripted


def test_a_cast_under_inference_mode_is_left_out_as_well() -> None:
    norm, x = Norm().double(), torch.randn(3, 8, dtype=torch.float64)
    with forced_float64(norm):
        expected = norm(x)
    with torch.inference_mode(), forced_float64(norm) as found:
        inferred = norm(x)
    assert torch.equal(inferred, expected)
    assert found


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.mean(-1, dtype=torch.float32),
        lambda x: torch.mean(x, dim=-1, dtype=torch.float32),
        lambda x: x.softmax(-1, torch.float32),
        lambda x: x.view(torch.float64).to(torch.float32),
        _scripted(),
    ],
    ids=["method", "function", "by position", "to", "scripted"],
)
def test_however_a_cast_is_written_it_is_left_out(cast: Callable[[Tensor], Tensor]) -> None:
    module, x = nn.Identity(), torch.randn(3, 8, dtype=torch.float64)
    assert cast(x).dtype == torch.float32
    with forced_float64(module) as found:
        assert cast(x.add(1.0)).dtype == torch.float64
    assert found


def test_the_least_number_of_float64_can_be_made_where_nothing_says_its_dtype() -> None:
    """As a mask is filled with it; without a dtype it is float32's to hold, and is none of its numbers."""

    class Filled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.maximum(x, torch.full((), torch.finfo(x.dtype).min))

    module, x = Filled(), torch.randn(3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="cannot be converted"):
        module(x)
    with forced_float64(module):
        assert torch.equal(module(x), x)
        assert torch.full((), 3.0).dtype == torch.float32
        assert torch.full((), math.inf).dtype == torch.float32


class Masked(nn.Module):
    """Hides tokens with a float32 mask, by the lowest number of the dtype that it computes in."""

    def __init__(self, *, fused: bool, causal: bool) -> None:
        super().__init__()
        self.fused, self.causal = fused, causal
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        mask = (1.0 - keep[:, None, None].float()) * torch.finfo(x.dtype).min
        q, k = (one(x).unflatten(-1, (2, 8)).transpose(1, 2) for one in (self.query, self.key))
        if self.fused:
            return F.scaled_dot_product_attention(q, k, k, attn_mask=mask, is_causal=self.causal)
        scores = q @ k.mT / math.sqrt(8) + mask
        if self.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        weighted: Tensor = scores.softmax(-1) @ k
        return weighted


@pytest.mark.parametrize("causal", [False, True])
def test_a_float32_mask_hides_in_float64_what_it_hides_in_float32(*, causal: bool) -> None:
    torch.manual_seed(0)
    x, keep = torch.randn(2, 24, 16), torch.arange(24) < torch.tensor([[24], [16]])
    fused, spelled_out = Masked(fused=True, causal=causal), Masked(fused=False, causal=causal)
    spelled_out.load_state_dict(fused.state_dict())
    outputs = {}
    with torch.no_grad():
        expected = spelled_out(x, keep).double()
        for module in (fused.double(), spelled_out.double()):
            with forced_float64(module):
                outputs[module.fused] = module(x.double(), keep)
    assert outputs[True].dtype == torch.float64
    torch.testing.assert_close(outputs[True], outputs[False], rtol=0, atol=1e-14)
    torch.testing.assert_close(outputs[True], expected, rtol=0, atol=1e-5)


def test_only_the_range_is_float32s_and_only_inside() -> None:
    with forced_float64(nn.Linear(2, 2).double()), forced_float64(nn.Linear(2, 2).double()):
        inside: Any = torch.finfo(torch.float64)
        assert (inside.min, inside.max) == (torch.finfo(torch.float32).min, torch.finfo(torch.float32).max)
        assert (inside.eps, inside.bits) == (2.0**-52, 64)
        assert torch.finfo(torch.float16).max == 65504
    assert torch.finfo(torch.float64).max > 1e300
    assert isinstance(torch.finfo, type)
