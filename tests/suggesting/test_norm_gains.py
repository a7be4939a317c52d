"""A norm's gain that one side stores as what it adds to 1: the table adds the 1, in either direction."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.suggesting import Verdict, suggest
from tests.small_checkpoint import write_checkpoint
from tests.suggesting import llama
from tests.suggesting.oracle import BOUND, apart, drafted, source
from tests.suggesting.test_llama_mistakes import edited
from tests.suggesting.test_verdicts import Plain, each
from tests.zoo.parts import EPS

GAIN = "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight"
GAIN_FIRST = "return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)"
FIRST = "return (1 + self.weight) * (x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())"
SCALED = {"x = self.tok_embeddings(tokens)": "x = self.tok_embeddings(tokens) * self.norm.weight.shape[0] ** 0.5"}
TANH = {"F.silu(gate)": "F.gelu(gate, approximate='tanh')"}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("architecture", "changes", "offset"),
    [
        pytest.param("LlamaForCausalLM", {"* self.weight": "* (1 + self.weight)"}, -1, id="1 added by the module"),
        pytest.param("GemmaForCausalLM", {**SCALED, **TANH}, 1, id="1 added by the reference"),
        pytest.param("LlamaForCausalLM", {GAIN: FIRST}, -1, id="before the division"),
        pytest.param("MistralForCausalLM", {"* self.weight": "* self.weight.add(1.0)"}, -1, id="another family"),
    ],
)
def test_the_table_adds_the_1(architecture: str, changes: dict[str, str], offset: int, tmp_path: Path) -> None:
    fields: dict[str, object] = {
        **llama.FIELDS,
        **({"head_dim": 8, "eos_token_id": 1} if architecture == "GemmaForCausalLM" else {}),
    }
    fields |= {"sliding_window": None} if architecture == "MistralForCausalLM" else {}
    reference = source(architecture, fields, tmp_path)
    build = edited(changes).builder()
    found = drafted(tmp_path, build)
    rules = {one["target"]: one.get("offset") for one in tomllib.loads(found.text)["rule"]}
    assert rules == {
        "layers.{i}.attention_norm.weight": offset,
        "layers.{i}.ffn_norm.weight": offset,
        "norm.weight": offset,
    }
    far = 1e-5 if architecture == "GemmaForCausalLM" else BOUND  # whose norms compute in float32
    words = torch.randint(0, 113, (3, 9), generator=torch.Generator().manual_seed(0))
    assert apart(reference, tmp_path, build, found, {"input_ids": words}, {"tokens": words}) < far


@pytest.mark.slow
def test_a_gain_may_be_multiplied_before_the_division(tmp_path: Path) -> None:
    """The norm ends at its division; what the gain alone gives is nothing of the reference."""
    source("LlamaForCausalLM", llama.FIELDS, tmp_path)
    found = suggest(tmp_path, edited({GAIN: GAIN_FIRST}).builder(gate="first"))
    assert found.verdict is Verdict.EXACT, str(found)


@pytest.mark.slow
def test_norms_of_queries_and_keys_have_gains_of_their_own(tmp_path: Path) -> None:
    """What stands behind the norm of the queries first is the norm of the keys, which shows nothing of its gain."""
    fields = {**llama.FIELDS, "head_dim": 8}
    source("Qwen3ForCausalLM", fields, tmp_path)
    normed = {
        "self.wo = nn.Linear(dim, dim, bias=False)": (
            "self.wo, self.q_norm, self.k_norm = nn.Linear(dim, dim, bias=False), Norm(dim // heads, 1e-5),"
            " Norm(dim // heads, 1e-5)"
        ),
        "query, key = self.rotate(query, cos, sin)": (
            "query, key = self.q_norm(query), self.k_norm(key)\n        query, key = self.rotate(query, cos, sin)"
        ),
    }
    found = suggest(
        tmp_path, edited({**normed, "+ self.eps) * self.weight": "+ self.eps) * (1 + self.weight)"}).builder()
    )
    assert found.verdict is Verdict.EXACT, str(found)
    assert [one.get("offset") for one in tomllib.loads(found.text)["rule"]] == [-1] * 5


def test_another_eps_is_no_bessel_s_correction(tmp_path: Path) -> None:
    """On average a norm with a larger eps may be smaller by just as much; in each row by itself it is not."""
    source("LlamaForCausalLM", {**llama.FIELDS, "hidden_size": 24, "num_attention_heads": 4}, tmp_path)
    for eps in (1e-3, 3e-3, 1e-2):
        found = drafted(tmp_path, edited({"+ self.eps": f"+ {eps}"}).builder())
        assert "Bessel" not in found.text


WITHOUT_FINAL = {"self.output(self.norm(x))": "self.output(x)"}


def test_a_head_that_is_tied_in_the_reference_is_one_behind_a_norm_that_is_left_out(tmp_path: Path) -> None:
    source("LlamaForCausalLM", {**llama.FIELDS, "tie_word_embeddings": True}, tmp_path)
    found = tomllib.loads(drafted(tmp_path, edited(WITHOUT_FINAL).builder()).text)
    assert found["make"]["output.weight"] == "equals tok_embeddings.weight"


@pytest.mark.slow
def test_a_final_norm_that_is_left_out_in_front_of_a_tied_head(tmp_path: Path) -> None:
    """The part in front of the norm is right, and is not all that the module computes."""
    source("LlamaForCausalLM", {**llama.FIELDS, "tie_word_embeddings": True}, tmp_path)
    found = suggest(tmp_path, edited(WITHOUT_FINAL).builder())
    assert found.verdict is Verdict.IMPOSSIBLE, str(found)
    assert "final norm missing" in " ".join(found.details())


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("norms") / "bert")


class Joint(nn.Module):
    """A norm with its gain and its shift in one parameter.

    Args:
        shape: of the parameter, with -1 for the features.
        by_hand: it is written out, and not torch's function.
        shift_first: the shift is the first of the two.
    """

    def __init__(self, width: int, shape: tuple[int, ...], *, by_hand: bool = False, shift_first: bool = False) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn([abs(one) * width if one < 0 else one for one in shape]) * 0.1)
        self.axis = next((axis for axis, size in enumerate(shape) if size == 2), 0)
        self.by_hand, self.shift_first = by_hand, shift_first

    def forward(self, x: Tensor) -> Tensor:
        gain, shift = (one.reshape(-1) for one in self.both.chunk(2, self.axis))
        if self.shift_first:
            gain, shift = shift, gain
        if not self.by_hand:
            return F.layer_norm(x, x.shape[-1:], gain, shift, EPS)
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * gain + shift


JOINT: list[tuple[tuple[int, ...], dict[str, bool], str]] = [
    ((2, -1), {}, "[p e]"),
    ((-1, 2), {}, "[e p]"),
    ((-2,), {}, "[(p e)]"),
    ((2, 1, -1), {"by_hand": True}, "[p 1 e]"),
    ((2, -1), {"shift_first": True}, "[p e]"),
]


def joint(shape: tuple[int, ...], options: dict[str, bool]) -> type[Plain]:
    class Model(Plain):
        def change(self) -> None:
            width = self.norm.weight.shape[0]
            self.norm = Joint(width, shape, **options)  # type: ignore[assignment]  # another norm
            for layer in each(self):
                layer.norm1, layer.norm2 = Joint(width, shape, **options), Joint(width, shape, **options)  # type: ignore[assignment]  # others

    return Model


@pytest.mark.few(1)
@pytest.mark.parametrize(("shape", "options", "axes"), JOINT)
def test_a_gain_and_a_shift_may_be_one_parameter(
    shape: tuple[int, ...], options: dict[str, bool], axes: str, bert: Path
) -> None:
    text = drafted(bert, joint(shape, options)).text
    words = "bias,weight" if options.get("shift_first") else "weight,bias"
    assert f'LayerNorm.{{p:{words}}} [e]" = "norm.both {axes}"' in text
    assert f'output.LayerNorm.{{p:{words}}} [e]" = "layers.{{i}}.norm2.both {axes}"' in text


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "options", "axes"), JOINT)
def test_one_parameter_for_gain_and_shift_is_proven(
    shape: tuple[int, ...], options: dict[str, bool], axes: str, bert: Path
) -> None:
    found = suggest(bert, joint(shape, options))
    assert found.verdict is Verdict.TRUNK, str(found)


class Third(Joint):
    """One parameter with a row that is not used."""

    def __init__(self, width: int) -> None:
        super().__init__(width, (3, -1))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.both[0], self.both[2], EPS)


class WithThird(Plain):
    def change(self) -> None:
        self.norm = Third(self.norm.weight.shape[0])  # type: ignore[assignment]  # another norm


@pytest.mark.slow
def test_a_shift_that_stands_in_the_gains_parameter_is_not_said_to_be_missing(bert: Path) -> None:
    found = suggest(bert, WithThird)
    assert found.verdict is Verdict.NOT_FOUND, str(found)
    assert not any("has no bias" in one.said for one in found.reasons)


class Affine(nn.Module):
    """A linear layer with its bias in the last column of its matrix."""

    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(out, inside + 1) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)

    def used(self, x: Tensor) -> Tensor:
        return torch.cat([x, torch.ones_like(x[..., :1])], -1) @ self.matrix.T


class Sliced(Affine):
    """The bias is taken out of the matrix."""

    def used(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix[:, :-1], self.matrix[:, -1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Affine, Sliced])
def test_a_bias_in_its_matrix_is_not_said_to_be_missing(kind: type[Affine], bert: Path) -> None:
    class Model(Plain):
        def change(self) -> None:
            for layer in each(self):
                for name, one in [*layer.named_children()]:
                    if isinstance(one, nn.Linear):
                        setattr(layer, name, kind(one.in_features, one.out_features))

    found = suggest(bert, Model)
    assert found.verdict is not Verdict.IMPOSSIBLE, str(found)
