"""Mistakes that somebody made in the source of other models: rotations, windows, sinusoids, fused projections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from porting.models import modern_bert
from porting.models.mpnet import MPNet
from porting.models.seq2seq import Seq2Seq
from porting.models.unpadded import Rows
from porting.notation.table import parse_table
from porting.verification import verify
from tests.families.pairs import PAIRS
from tests.families.ported import Ported, make
from tests.small_checkpoint import CONFIG
from tests.verification.conftest import checkpoint, one_thread
from tests.verification.planted import becomes
from tests.verification.user_bert import FUSED_TABLE, HEADS, FusedAttention, MyBert

pytestmark = pytest.mark.few(2)

__all__ = ["checkpoint", "one_thread"]  # fixtures

Plant = Callable[[pytest.MonkeyPatch, Any], None]


@pytest.fixture(scope="module")
def ported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ported]:
    @cache
    def made(name: str) -> Ported:
        return make(next(pair for pair in PAIRS if str(pair) == name), tmp_path_factory.mktemp("pair"))

    return made


def thetas(change: Callable[[float], float]) -> Plant:
    """Its author overlooked that local layers have another base, or mistyped it."""

    def plant(patch: pytest.MonkeyPatch, module: Any) -> None:
        right = modern_bert.rotation
        patch.setattr(modern_bert, "rotation", lambda *args, theta, like: right(*args, theta=change(theta), like=like))

    return plant


def rotates(rotate: Callable[[Tensor, modern_bert.Rotation], Tensor]) -> Plant:
    return lambda patch, module: patch.setattr(modern_bert, "rotate", rotate)


def backwards(states: Tensor, turn: modern_bert.Rotation) -> Tensor:
    """The minus stands before the other half."""
    first, second = states.chunk(2, dim=-1)
    return (states * turn[0] + torch.cat((second, -first), dim=-1) * turn[1]).to(states.dtype)


def half_of_the_head(states: Tensor, turn: modern_bert.Rotation) -> Tensor:
    """As some models rotate: the rest of each head stays as it is."""
    size = states.shape[-1] // 2
    cosine, sine = (tensor[:, : size // 2] for tensor in turn)
    first, second = states[..., :size].chunk(2, dim=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine, states[..., size:])
    return torch.cat(turned, dim=-1).to(states.dtype)


def windows(change: Callable[[int | None], int | None]) -> Plant:
    def plant(patch: pytest.MonkeyPatch, module: Any) -> None:
        right = modern_bert.window_bias

        def bias(length: int, window: int, bias: Tensor | None, *, like: Tensor) -> Tensor:
            return right(length, change(window) or length, bias, like=like)

        patch.setattr(modern_bert, "window_bias", bias)

    return plant


MODERN: Mapping[str, tuple[Plant, str, str]] = {
    "one theta for all layers": (thetas(lambda theta: 10_000.0), "rotary theta", "theta is 10000 where the reference"),
    "a mistyped theta": (
        thetas(lambda theta: theta * 0.7),
        "rotary theta",
        "theta is 112000 where the reference has 160000",
    ),
    "the minus in the other half": (rotates(backwards), "rotary direction", ""),
    "half of the head": (rotates(half_of_the_head), "rotary on a part of the head", "the first 4 of 8 channels"),
    "no window": (windows(lambda window: None), "local window missing", ""),
    "the whole width to each side": (
        windows(lambda window: 2 * (window or 0)),
        "local window of another width",
        "48 positions to each side are seen where the reference has 24 to each side",
    ),
    "one too few": (windows(lambda window: (window or 0) - 1), "local window of another width", "23 positions"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MODERN)
def test_rotations_and_windows(mistake: str, ported: Callable[[str], Ported], monkeypatch: pytest.MonkeyPatch) -> None:
    plant, name, detail = MODERN[mistake]
    port = ported("modern_bert-ModernBertForMaskedLM")
    module = port.load()
    plant(monkeypatch, module)
    report = verify(port.directory, module, table=port.pair.table, loaded=True, longest=80)
    assert report.causes
    for found in report.causes:
        assert name in found.names, [(cause.name, cause.detail, cause.probes, cause.nearest) for cause in report.causes]
    assert any(detail in found.detail for found in report.causes)


def unscaled(patch: pytest.MonkeyPatch, module: Any) -> None:
    """``self.embedding(ids)``, and no more."""
    patch.setattr(Seq2Seq, "embed", lambda self, ids: self.embedding(ids))


def scaled_by_eight(patch: pytest.MonkeyPatch, module: Any) -> None:
    patch.setattr(Seq2Seq, "embed", lambda self, ids: 8 * self.embedding(ids))


def sines_first(patch: pytest.MonkeyPatch, module: Any) -> None:
    """The reference's own layout, in a module whose channels the table has put into the paper's order."""
    for half in (module.encoder, module.decoder):
        length, width = half.positions.table.shape
        speeds = 10000.0 ** -(torch.arange(width // 2, dtype=torch.float64) / (width // 2))
        angles = torch.arange(length, dtype=torch.float64)[:, None] * speeds
        half.positions.table = torch.cat((angles.sin(), angles.cos()), dim=1).float()


class Forgetful(MPNet):
    def encode(
        self, hidden: Tensor, bias: Tensor | Rows | None, *, output_hidden_states: bool, output_attentions: bool
    ) -> tuple[Tensor, tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
        for layer in self.layers:
            hidden, _ = layer(hidden, bias)
        return hidden, None, None


def forgetful(patch: pytest.MonkeyPatch, module: Any) -> None:
    becomes("bert", Forgetful)(module)


def stream_of_norms(patch: pytest.MonkeyPatch, module: Any) -> None:
    """``x = norm(x)`` before the branch, and then ``x + f(x)``."""

    def forward(self: Any, hidden: Tensor, bias: Tensor | None = None, **options: bool) -> tuple[Tensor, None]:
        hidden = self.attention_norm(hidden)
        hidden = hidden + self.attention(hidden, bias)[0]
        hidden = self.intermediate_norm(hidden)
        return hidden + self.output(self.activation(self.intermediate(hidden))), None

    patch.setattr(type(module.bert.layers[0]), "forward", forward)


PAIRED: Mapping[str, tuple[str, Plant, str, str]] = {
    "unscaled": ("marian-MarianMTModel", unscaled, "embedding scale missing", ""),
    "by eight": (
        "marian-MarianMTModel",
        scaled_by_eight,
        "embeddings scaled by another factor",
        "word embeddings are multiplied by 8 where the reference has sqrt(24)",
    ),
    "sines first": ("marian-MarianMTModel", sines_first, "sinusoid layout", "in halves, not in pairs"),
    "no relative bias": ("mpnet-MPNetForMaskedLM", forgetful, "relative position bias missing", ""),
    "normed stream": (
        "roberta_prelayernorm-RobertaPreLayerNormForMaskedLM",
        stream_of_norms,
        "residual taken after the norm",
        "",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", PAIRED)
def test_embeddings_biases_and_residuals(
    mistake: str, ported: Callable[[str], Ported], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, plant, name, detail = PAIRED[mistake]
    port = ported(pair)
    module = port.load()
    plant(monkeypatch, module)
    report = verify(port.directory, module, table=port.pair.table, loaded=True, longest=24)
    assert report.causes
    for found in report.causes:
        assert name in found.names, [(cause.name, cause.detail, cause.probes, cause.nearest) for cause in report.causes]
    assert any(detail in found.detail for found in report.causes)


class HeadsFirst(FusedAttention):
    """GPT-NeoX's order, read from a matrix that has all queries first."""

    def cut(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.view(*qkv.shape[:2], HEADS, 3, -1).permute(3, 1, 2, 0, 4)
        return q, k, v

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        q, k, v = self.cut(self.qkv(x))  # [b h s d] each
        scores = q @ k.mT / q.shape[-1] ** 0.5
        shares = scores.masked_fill(padding[:, None, None, :], -1e4).softmax(-1)
        projected: Tensor = self.proj((shares @ v).permute(2, 0, 1, 3).flatten(2))
        return projected


class TwelveHeads(HeadsFirst):
    def cut(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.view(*qkv.shape[:2], 3, 12, -1).permute(2, 1, 3, 0, 4)
        return q, k, v


FUSED = (
    (HeadsFirst, "query, key and value interleaved wrongly", "read as (h p d) where it is (p h d)"),
    (TwelveHeads, "number of heads", "12 heads where the reference has 3"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "detail"), FUSED, ids=["interleaved", "heads"])
def test_fused_projections(checkpoint: Path, kind: type[nn.Module], name: str, detail: str) -> None:
    def build() -> MyBert:
        model = MyBert(vocabulary=CONFIG["vocab_size"])
        for number in range(len(model.blocks)):
            becomes(f"blocks.{number}.attn", kind)(model)  # type: ignore[arg-type]  # it has modules, too
        return model

    inside = [line for line in FUSED_TABLE.splitlines() if "-> scores" not in line and "-> probabilities" not in line]
    table = parse_table("\n".join(inside) + "\n")  # which nobody with another number of heads could compare
    report = verify(checkpoint, build, table, architecture="BertModel", longest=24)
    (found,) = report.causes
    assert (found.name, found.detail) == (name, detail)
