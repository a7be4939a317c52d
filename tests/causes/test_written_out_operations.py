"""Norms and activations that are written out are known while a model runs, and a mistake can be made in them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.causes.events import Inventory
from porting.causes.fault_injection import cure, plant, watch
from porting.causes.mutants import planted

Function = Callable[[Tensor], Tensor]


class Port(nn.Module):
    """One map, and somebody's function of what it gives."""

    def __init__(self, function: Callable[[Port, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.map = nn.Linear(6, 8)
        self.gain, self.shift = nn.Parameter(1 + 0.2 * torch.randn(8)), nn.Parameter(torch.randn(8))
        self.function = function

    def forward(self, given: Tensor) -> Tensor:
        hidden: Tensor = self.map(given)
        return self.function(self, hidden)


def divided(port: Port, x: Tensor) -> Tensor:
    variance = x.var(-1, keepdim=True, unbiased=False)
    return port.gain * ((x - x.mean(-1, keepdim=True)) / torch.sqrt(variance + 1e-12)) + port.shift


def rooted(port: Port, x: Tensor) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-12)
    return normed * port.gain + port.shift


def halved(port: Port, x: Tensor) -> Tensor:
    """A power of a half, and everything twice."""
    mean = torch.mean(x, -1, True)
    return (x - mean) / ((x - mean) ** 2).mean(-1, True).add(1e-12).pow(0.5) * port.gain + port.shift


def annotated(port: Port, x: Tensor) -> Tensor:
    """The gain before the division, as "The Annotated Transformer" has it."""
    centred = x - x.mean(-1, keepdim=True)
    return port.gain * centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-12) + port.shift


def root_mean_square(port: Port, x: Tensor) -> Tensor:
    return port.gain * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)


def given(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(1)).to(dtype)


@torch.no_grad()
def with_mistake(port: Port, name: str) -> tuple[Tensor, Tensor, list[str]]:
    """What comes out as it is, and with a mistake, and where that was made."""
    inventory = watch(port)
    right = port(given())
    cure(port)
    torch.testing.assert_close(right, port(given()), rtol=0, atol=0)
    sites = plant(port, next(planted(name)), inventory)
    return right, port(given()), sites


@pytest.mark.parametrize("function", [divided, rooted, halved, annotated])
def test_a_layer_norm_that_is_written_out(function: Callable[[Port, Tensor], Tensor]) -> None:
    port = Port(function)
    hidden = port.map(given())
    right, wrong, sites = with_mistake(port, "LayerNorm eps")
    assert sites
    torch.testing.assert_close(wrong, F.layer_norm(hidden, (8,), port.gain, port.shift, 1e-5), rtol=1e-5, atol=1e-6)
    for name, expected in {
        "LayerNorm gain missing": F.layer_norm(hidden, (8,), None, port.shift, 1e-12),
        "LayerNorm bias missing": F.layer_norm(hidden, (8,), port.gain, None, 1e-12),
        "RMSNorm for LayerNorm": F.rms_norm(hidden, (8,), port.gain, 1e-12) + port.shift,
        "norm missing": hidden,
    }.items():
        again, wrong, sites = with_mistake(Port(function), name)
        torch.testing.assert_close(again, right, rtol=0, atol=0)
        torch.testing.assert_close(wrong, expected, rtol=1e-5, atol=1e-5)
        assert set(sites) == {""}


def test_a_root_mean_square_norm_that_is_written_out_and_one_of_torch() -> None:
    for port in (Port(root_mean_square), Port(lambda port, x: F.rms_norm(x, (8,), port.gain, 1e-6))):
        hidden = port.map(given())
        _, wrong, _ = with_mistake(port, "LayerNorm for RMSNorm")
        torch.testing.assert_close(wrong, F.layer_norm(hidden, (8,), port.gain, None, 1e-6), rtol=1e-4, atol=1e-5)
        cure(port)
        _, wrong, _ = with_mistake(port, "RMSNorm gain missing")
        torch.testing.assert_close(wrong, F.rms_norm(hidden, (8,), None, 1e-6), rtol=1e-4, atol=1e-5)


def test_a_gain_that_is_kept_as_its_distance_from_one() -> None:
    port = Port(lambda port, x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1.0 + port.shift))
    hidden = port.map(given())
    _, wrong, _ = with_mistake(port, "norm gain without 1 added")
    torch.testing.assert_close(wrong, F.rms_norm(hidden, (8,), port.shift, 1e-6), rtol=1e-4, atol=1e-5)
    cure(port)
    right, wrong, sites = with_mistake(port, "norm gain with 1 added")
    assert (sites, torch.equal(right, wrong)) == ([], True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
        lambda x: x * 0.5 * (1.0 + torch.erf(x * 2**-0.5)),
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        lambda x: x * torch.sigmoid(1.702 * x),
        lambda x: x / (1 + torch.exp(-x)),
    ],
    ids=["erf", "erf later", "tanh", "quick", "SiLU"],
)
def test_an_activation_that_is_written_out(function: Function) -> None:
    """Its steps are none: not the tanh inside, and not the sum."""
    port = Port(lambda port, x: function(x))
    hidden = port.map(given())
    right, wrong, sites = with_mistake(port, "ReLU for another activation")
    torch.testing.assert_close(wrong, hidden.relu())
    assert sites == [""]
    assert not torch.allclose(right, wrong, atol=1e-3)
    _, wrong, sites = with_mistake(Port(lambda port, x: function(x)), "residual missing")
    assert sites == []


def test_what_is_none_is_left_alone() -> None:
    """A sigmoid gate of something else, a sum of squares, a cosine."""
    port = Port(lambda port, x: torch.sigmoid(x) * port.gain + x.flip(-1) / x.norm(dim=-1, keepdim=True) + x.cos())
    for name in ("LayerNorm eps", "norm missing", "ReLU for another activation"):
        right, wrong, sites = with_mistake(port, name)
        assert sites == []
        torch.testing.assert_close(right, wrong, rtol=0, atol=0)
        cure(port)


def test_attention_by_einsum_is_attention() -> None:
    def attend(port: Port, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:2], 2, 4).transpose(1, 2)
        scores = torch.einsum("bhqd,bhkd->bhqk", heads, heads) * 0.5
        return torch.einsum("bhqk, bhkd -> bhqd", scores.softmax(-1), heads).transpose(1, 2).flatten(2)

    port = Port(attend)
    heads = port.map(given()).view(3, 5, 2, 4).transpose(1, 2)
    _, wrong, sites = with_mistake(port, "1/sqrt(d) missing")
    expected = F.scaled_dot_product_attention(heads, heads, heads, scale=1.0).transpose(1, 2).flatten(2)
    torch.testing.assert_close(wrong, expected)
    assert sites == [""]


def test_inputs_of_any_name_are_words_and_types() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words, self.kinds = nn.Embedding(30, 4), nn.Embedding(2, 4)

        def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
            found: Tensor = self.words(x) + self.kinds(kinds)
            return found

    words, kinds = torch.tensor([[3, 7, 9]]), torch.tensor([[0, 0, 1]])
    for name in ("vocabulary shifted", "token types ignored"):
        model = Named()
        sites = plant(model, next(planted(name)), Inventory())
        with torch.no_grad():
            model(words, kinds)
        assert sites == ["words" if name == "vocabulary shifted" else "kinds"]
