"""Heads that are tied by hand, lazy parameters, and parameters where no state_dict lists them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import porting
from porting.suggesting import Verdict, suggest
from porting.target import TargetError
from tests.suggesting.oracle import BOUND, apart, drafted, source

FIELDS = {
    "vocab_size": 113, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 52,
    "max_position_embeddings": 30, "type_vocab_size": 1,
}  # fmt: skip


class Encoder(nn.Module):
    """BERT without token types."""

    def __init__(self, vocab: int, width: int, depth: int, heads: int, inner: int, positions: int) -> None:
        super().__init__()
        self.word, self.pos = nn.Embedding(vocab, width), nn.Embedding(positions, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(self.layer(width, heads, inner) for _ in range(depth))

    def layer(self, width: int, heads: int, inner: int) -> nn.Module:
        return nn.TransformerEncoderLayer(
            width, heads, inner, activation="gelu", batch_first=True, layer_norm_eps=1e-12, dropout=0.0
        )

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        x: Tensor = self.norm(self.word(ids) + self.pos(torch.arange(ids.shape[1])))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=~keep.bool())
        return x


class ByHand(Encoder):
    """Its decoder is the word table, and no module."""

    def __init__(self, vocab: int, width: int, depth: int, heads: int, inner: int, positions: int) -> None:
        super().__init__(vocab, width, depth, heads, inner, positions)
        self.dense, self.norm2 = self.first(width), nn.LayerNorm(width, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(vocab))

    def first(self, width: int) -> nn.Module:
        return nn.Linear(width, width)

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        return self.head(self.norm2(F.gelu(self.dense(super().forward(ids, keep)))))

    def head(self, x: Tensor) -> Tensor:
        return x @ self.word.weight.T + self.bias


class WithoutBias(ByHand):
    def head(self, x: Tensor) -> Tensor:
        return x @ self.word.weight.T


class Lazy(ByHand):
    def first(self, width: int) -> nn.Module:
        return nn.LazyLinear(width)


class Hidden(Encoder):
    """Its feed-forward part is in a list of dictionaries."""

    def __init__(self, vocab: int, width: int, depth: int, heads: int, inner: int, positions: int) -> None:
        super().__init__(vocab, width, depth, heads, inner, positions)
        self.more = [{"w": nn.Parameter(torch.randn(width, width))}]

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        return F.gelu(super().forward(ids, keep) @ self.more[0]["w"])


class Normed(ByHand):
    def first(self, width: int) -> nn.Module:
        normed: nn.Module = torch.nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        return normed


def given() -> tuple[dict[str, Tensor], Tensor]:
    ids = torch.randint(3, 100, (4, 20), generator=torch.Generator().manual_seed(1))
    keep = (torch.arange(20) < torch.tensor([20, 15, 20, 20])[:, None]).long()
    return {"input_ids": ids, "attention_mask": keep}, keep


@pytest.fixture
def reference(tmp_path: Path) -> Any:  # one of transformers' models
    return source("BertForMaskedLM", FIELDS, tmp_path)


def test_the_draft_folds_the_token_types_beside_a_head_that_is_tied_by_hand(tmp_path: Path, reference: Any) -> None:
    found = drafted(tmp_path, ByHand)
    assert '"cls.predictions.bias" = "bias"' in found.text
    assert "embeddings.token_type_embeddings.weight [0 e]" in found.text
    theirs, keep = given()
    assert apart(reference, tmp_path, ByHand, found, theirs, {"ids": theirs["input_ids"], "keep": keep}) < BOUND


@pytest.mark.slow
def test_a_head_that_is_tied_by_hand_is_the_decoder_also_with_the_token_types_folded(
    tmp_path: Path, reference: Any
) -> None:
    found = suggest(tmp_path, ByHand)
    assert found.verdict is Verdict.EXACT, str(found)
    assert '"cls.predictions.bias" = "bias"' in found.text
    assert "embeddings.token_type_embeddings.weight [0 e]" in found.text
    theirs, keep = given()
    assert apart(reference, tmp_path, ByHand, found, theirs, {"ids": theirs["input_ids"], "keep": keep}) < BOUND


@pytest.mark.slow
def test_a_decoder_of_its_own_is_never_taken_for_the_word_table(tmp_path: Path) -> None:
    source("BertForMaskedLM", {**FIELDS, "tie_word_embeddings": False}, tmp_path)
    assert not suggest(tmp_path, ByHand).proven


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (WithoutBias, "word.weight has no bias, and the checkpoint's cls.predictions.bias is not zero"),
        (Hidden, "more.0.w is not a parameter in the module's state_dict"),
    ],
)
def test_what_cannot_be_loaded_is_named(
    tmp_path: Path, reference: Any, kind: Callable[..., nn.Module], said: str
) -> None:
    found = suggest(tmp_path, kind)
    assert not found.proven
    assert said in " | ".join(reason.said for reason in found.reasons)


@pytest.mark.slow
def test_lazy_parameters_take_shape_in_a_dry_run(tmp_path: Path, reference: Any) -> None:
    found = suggest(tmp_path, Lazy)
    assert found.verdict is Verdict.EXACT, str(found)
    assert "# The module has lazy parameters: run it once, and load into it then." in found.text
    with pytest.raises(TargetError, match=r"Lazy has lazy parameters without a shape: dense\.weight, dense\.bias"):
        porting.load(tmp_path, Lazy(113, 24, 2, 4, 52, 30), found.table)
    theirs, keep = given()
    module = Lazy(113, 24, 2, 4, 52, 30).double().eval()
    module(theirs["input_ids"], keep)
    assert apart(reference, tmp_path, module, found, theirs, {"ids": theirs["input_ids"], "keep": keep}) < BOUND


def test_a_weight_that_is_computed_from_others_is_refused(tmp_path: Path, reference: Any) -> None:
    with pytest.raises(TargetError, match=r"dense\.weight is computed by a parametrization \(WeightNorm\)"):
        suggest(tmp_path, Normed)
