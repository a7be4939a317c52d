"""Parameters that the module has and the reference has not: they are made where some content of them does nothing."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import transformers
from torch import Tensor, nn

import porting
from porting.suggesting import Verdict, suggest
from tests.suggesting import llama
from tests.suggesting.oracle import drafted


class ShiftedNorm(llama.Norm):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class OnePlus(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.gamma)


Change = Callable[[llama.Llama, int], None]


Part = TypeVar("Part", bound=nn.Module)


def parts(model: nn.Module, kind: type[Part]) -> list[Part]:
    return [module for module in model.modules() if isinstance(module, kind)]


def in_feed_forward(model: llama.Llama, dim: int) -> None:
    for feed in parts(model, llama.Feed):
        inner = feed.w1.out_features
        feed.w1, feed.w2 = nn.Linear(dim, inner), nn.Linear(inner, dim)


def in_norms(model: llama.Llama, dim: int) -> None:
    for block in parts(model, llama.Block):
        block.attention_norm = ShiftedNorm(dim, block.attention_norm.eps)


def behind_attention(part: Callable[[int], nn.Module]) -> Change:
    def change(model: llama.Llama, dim: int) -> None:
        for attention in parts(model, llama.Attention):
            attention.wo = nn.Sequential(nn.Linear(dim, dim, bias=False), part(dim))  # type: ignore[assignment]  # it may

    return change


def in_the_head(model: llama.Llama, dim: int) -> None:
    model.output = nn.Linear(dim, model.output.out_features)


def nothing(model: llama.Llama, dim: int) -> None:
    """The projections' own biases are all that is too many."""


def builder(change: Change, **options: object) -> Callable[..., nn.Module]:
    plain = llama.builder(**options)  # type: ignore[arg-type]  # its keywords

    def build(
        vocab_size: int, dim: int, n_layers: int, n_heads: int, n_kv_heads: int, intermediate_size: int,
        max_seq_len: int, norm_eps: float, rope_theta: float = 10000.0,
    ) -> nn.Module:  # fmt: skip
        sizes = (vocab_size, dim, n_layers, n_heads, n_kv_heads, intermediate_size, max_seq_len, norm_eps, rope_theta)
        made = plain(*sizes)
        assert isinstance(made, llama.Llama)
        change(made, dim)
        return made

    return build


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("llama")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(llama.FIELDS))
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    model.save_pretrained(path)
    return path


CASES: dict[str, tuple[Callable[..., nn.Module], dict[str, str]]] = {
    "a bias of a norm": (builder(in_norms), {"layers.{i}.attention_norm.bias": "zeros"}),
    "biases of one of two projections, and of the last": (
        builder(in_feed_forward),
        {"layers.{i}.feed_forward.w1.bias": "zeros", "layers.{i}.feed_forward.w2.bias": "zeros"},
    ),
    "biases of query, key and value": (
        builder(nothing, bias=True),
        {f"layers.{{i}}.attention.{name}.bias": "zeros" for name in ("wq", "wk", "wv")},
    ),
    "a bias of query, key and value in one": (
        builder(nothing, bias=True, lie="blocks"),
        {"layers.{i}.attention.wqkv.bias": "zeros"},
    ),
    "a scale that is stored as what it adds to 1": (
        builder(behind_attention(OnePlus)),
        {"layers.{i}.attention.wo.1.gamma": "zeros"},
    ),
    "a bias of the head": (builder(in_the_head), {"output.bias": "zeros"}),
    "a scale of each channel": (builder(behind_attention(Scale)), {"layers.{i}.attention.wo.1.gamma": "ones"}),
    "a scale of one number": (
        builder(behind_attention(lambda dim: Scale(1))),
        {"layers.{i}.attention.wo.1.gamma": "ones"},
    ),
}


@pytest.fixture(scope="module")
def draft(checkpoint: Path) -> Callable[[str], str]:
    """The table of a case, drafted once."""

    @cache
    def drawn_up(case: str) -> str:
        return drafted(checkpoint, CASES[case][0]).text

    return drawn_up


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES)
def test_what_does_nothing_is_made(case: str, checkpoint: Path, draft: Callable[[str], str], tmp_path: Path) -> None:
    make, made = CASES[case]
    assert tomllib.loads(draft(case))["make"] == made
    (tmp_path / "made.toml").write_text(draft(case))
    model = porting.load(checkpoint, make, tmp_path / "made.toml")
    reference = transformers.LlamaForCausalLM.from_pretrained(checkpoint)
    words = torch.randint(0, llama.FIELDS["vocab_size"], (2, 9))  # type: ignore[call-overload]  # a number
    torch.testing.assert_close(model(words), reference(words).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a bias of a norm", "a scale of each channel"])
def test_a_table_that_makes_something_is_proven(case: str, checkpoint: Path) -> None:
    make, made = CASES[case]
    found = suggest(checkpoint, make)
    assert found.verdict is Verdict.EXACT, found
    assert tomllib.loads(found.text)["make"] == made


@pytest.mark.slow
def test_a_norm_that_does_something_whatever_its_gain_is_not_made(checkpoint: Path) -> None:
    found = suggest(checkpoint, builder(behind_attention(lambda dim: llama.Norm(dim, 1e-5))), limit=60)
    assert found.verdict in {Verdict.IMPOSSIBLE, Verdict.NOT_FOUND}
    assert "make" not in tomllib.loads(found.text)


@pytest.mark.slow
def test_a_bias_that_is_not_zero_is_a_difference_to_verify(
    checkpoint: Path, draft: Callable[[str], str], tmp_path: Path
) -> None:
    """The proof is of the values that are made: another one is seen, in float64."""
    make, text, path = builder(in_norms), draft("a bias of a norm"), tmp_path / "made.toml"
    path.write_text(text)
    report = porting.verify(checkpoint, make, path, trials=False)
    assert report.faithful
    assert report.shown.made == {f"layers.{i}.attention_norm.bias": "zeros" for i in range(3)}
    assert set(report.shown.made) <= set(report.shown.activation)
    path.write_text(text.replace('bias" = "zeros"', 'bias" = 1e-6'))
    assert not porting.verify(checkpoint, make, path, causes=False, trials=False).faithful
