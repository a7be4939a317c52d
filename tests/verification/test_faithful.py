"""Faithful ports raise no alarm, however they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from porting.loading import load
from porting.models.bert import ScaledDotProductAttention
from porting.verification import Case, verify
from tests.small_checkpoint import CONFIG, MLM, NSP, TRUNK, tensors, write_checkpoint
from tests.verification.flags import FLAGS, complete_but_for_flags

pytestmark = pytest.mark.few(1)


class WrittenOut(ScaledDotProductAttention):
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        return super().forward(query, key, value, bias, output_attentions=True)


class Einsum(ScaledDotProductAttention):
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (one.view(*one.shape[:2], -1, self.head_size) for one in (query, key, value))
        scores = torch.einsum("bqhd,bkhd->bhqk", q * self.head_size**-0.5, k)
        if bias is not None:
            scores += bias
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v).flatten(2), None


class KeysFirst(ScaledDotProductAttention):
    """Scores [b h k q], and a softmax over the axis before the last one; the mask shifted by a constant."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.split_heads(query), self.split_heads(key), self.split_heads(value)
        scores = (k @ q.mT * self.head_size**-0.5).mT
        if bias is not None:
            scores = scores.masked_fill(bias != 0, -10000.0)
        return (torch.nn.functional.softmax(input=scores, dim=3) @ v).transpose(1, 2).flatten(2), None


class HandNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own signature
        mean = input.mean(-1, keepdim=True)
        variance = input.var(-1, keepdim=True, unbiased=False)
        return (input - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


class HandGelu(nn.GELU):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own signature
        return input * 0.5 * (1.0 + torch.erf(input / 2.0**0.5))


class MatmulLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own signature
        return torch.addmm(self.bias, input.flatten(0, -2), self.weight.T).view(*input.shape[:-1], -1)


REWRITTEN: dict[str, dict[type[nn.Module], type[nn.Module]]] = {
    "fused kernel": {},
    "written out": {ScaledDotProductAttention: WrittenOut},
    "einsum": {ScaledDotProductAttention: Einsum},
    "keys first": {ScaledDotProductAttention: KeysFirst},
    "norm by hand": {nn.LayerNorm: HandNorm},
    "GELU by hand": {nn.GELU: HandGelu},
    "addmm": {nn.Linear: MatmulLinear},
    "all by hand": {
        ScaledDotProductAttention: Einsum, nn.LayerNorm: HandNorm, nn.GELU: HandGelu, nn.Linear: MatmulLinear
    },
}  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rewritten(path: Path, kinds: dict[type[nn.Module], type[nn.Module]]) -> nn.Module:
    model = load(path)
    for part in model.modules():
        part.__class__ = kinds.get(type(part), type(part))  # the same weights, other code
    return model


@pytest.mark.slow
@pytest.mark.parametrize("how", REWRITTEN)
def test_other_code_for_the_same_mathematics(tmp_path: Path, how: str) -> None:
    """Eight variants, each in float32, bfloat16 and float16; other weights and inputs are tried below."""
    path = write_checkpoint(tmp_path / "bert", values=tensors(1))
    report = verify(path, rewritten(path, REWRITTEN[how]), loaded=True, dtypes=DTYPES, seed=1)
    assert report.faithful, str(report)
    assert max(probe.meaning.worst for probe in report.probes) <= 1e-12
    assert {name for probe in report.probes for name in probe.rounding} == {"float32", "bfloat16", "float16"}
    assert report.skipped == ()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_other_weights_and_inputs(tmp_path: Path, seed: int) -> None:
    path = write_checkpoint(tmp_path / "bert", values=tensors(seed + 50))
    report = verify(path, seed=seed)
    assert report.faithful, str(report)
    assert complete_but_for_flags(report)


def batch(rows: int, width: int, *, padded: bool = True, segments: bool = True) -> Case:
    generator = torch.Generator().manual_seed(rows * width)
    ids = torch.randint(0, CONFIG["vocab_size"], (rows, width), generator=generator)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator) if padded else torch.full((rows, 1), width)
    mask = (torch.arange(width) < lengths).long()
    kinds = (torch.arange(width) >= lengths // 2).long() * mask * segments
    return Case(f"{rows} x {width}", {"input_ids": ids, "attention_mask": mask, "token_type_ids": kinds})


@pytest.mark.parametrize(
    "case",
    [
        batch(1, 1),
        batch(1, 24, padded=False),
        batch(2, 2),
        batch(3, 7),
        batch(9, 5),
        batch(5, 24),
        batch(4, 11, segments=False),
    ],
    ids=lambda case: case.name,
)
def test_other_batch_shapes(checkpoint: Path, case: Case) -> None:
    report = verify(checkpoint, inputs=[case], dtypes=DTYPES)
    assert report.faithful, str(report)
    assert report.cases == (case.name,)


CHANGES: dict[str, dict[str, Any]] = {  # Any: fields of several types
    "tanh GELU": {"hidden_act": "gelu_new"},
    "relu": {"hidden_act": "relu"},
    "silu": {"hidden_act": "silu"},
    "a large eps": {"layer_norm_eps": 1e-3},
    "six heads": {"num_attention_heads": 6},
    "one head": {"num_attention_heads": 1},
    "another padding id": {"pad_token_id": 5},
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_other_configs(tmp_path: Path, change: str) -> None:
    report = verify(write_checkpoint(tmp_path / "bert", change=CHANGES[change]))
    assert report.faithful, str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "parts", "probe"),
    [
        ("BertModel", (TRUNK,), "pooler"),
        ("BertForMaskedLM", (TRUNK, MLM), "mlm"),
        ("BertForNextSentencePrediction", (TRUNK, NSP), "nsp"),
        ("BertForPreTraining", (TRUNK, MLM, NSP), "nsp"),
    ],
)
def test_other_heads(tmp_path: Path, architecture: str, parts: tuple[str, ...], probe: str) -> None:
    report = verify(write_checkpoint(tmp_path / "bert", parts=parts, architecture=architecture))
    assert report.faithful, str(report)
    assert report.reference == f"transformers.{architecture}"
    assert [one.port for one in report.probes if not one.port.startswith(".")][-1] == probe
    assert report.scope.returned is not None
    assert report.scope.returned.compared


@pytest.mark.parametrize(
    ("architecture", "probe"),
    [
        ("BertForSequenceClassification", "classifier"),
        ("BertForTokenClassification", "classifier"),
        ("BertForMultipleChoice", "classifier"),
        ("BertForQuestionAnswering", "span"),
    ],
)
def test_a_new_head_is_compared_with_the_references_initialisation(
    checkpoint: Path, architecture: str, probe: str
) -> None:
    report = verify(checkpoint, architecture=architecture, fresh=True)
    assert report.faithful, str(report)
    assert [one.port for one in report.probes if not one.port.startswith(".")][-1] == probe
    assert report.scope.returned is not None
    assert report.scope.returned.compared
    assert "new and untrained" in report.warnings[0]
    assert f"{probe}.weight" in report.shown.activation


@pytest.mark.slow
def test_segments_that_an_older_config_does_not_speak_of_are_shown(tmp_path: Path) -> None:
    change = {"type_vocab_size": None, "layer_norm_eps": None, "hidden_act": None, "pad_token_id": None}
    report = verify(write_checkpoint(tmp_path / "bert", change=change))
    assert report.faithful
    assert complete_but_for_flags(report), report.unseen


@pytest.mark.slow
def test_a_long_row_is_a_case_of_its_own(tmp_path: Path) -> None:
    values = {"bert.embeddings.position_embeddings.weight": torch.randn(40, 24)}
    path = write_checkpoint(tmp_path / "bert", change={"max_position_embeddings": 40}, values=values)
    report = verify(path)
    assert report.cases[:2] == ("8 rows of 1 to 24 tokens, padded", "1 row of 40 tokens")
    assert report.faithful
    assert complete_but_for_flags(report)
    short = verify(path, longest=30)
    assert tuple(map(str, short.unseen)) == ("positions 30 to 39 (rows of at most 30 tokens)", FLAGS)
    assert short.shown.activation["bert.embeddings.position.weight"] == pytest.approx(30 / 40)
    assert "; positions 30 to 39; the arguments " in " ".join(short.details().split())
