"""``suggest`` and ``verify`` say the same of a module, and ``suggest`` says of it only what is so."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import porting
from porting.suggesting import Suggestion, Verdict, suggest
from porting.suggesting.verdict.extra_checks import untried_checks
from tests.suggesting import oracle
from tests.suggesting.attacks import Rounded
from tests.suggesting.test_verdicts import Plain
from tests.zoo.parts import EPS, Config
from tests.zoo.plain import Layer

ROUNDING = re.compile(r"\d+e-1\d")
"""How a difference is written that is rounding in float64."""


def reasons(found: Suggestion) -> str:
    return " | ".join(reason.said for reason in found.reasons)


class KeepsItsMask(Plain):
    """A mask is kept for each shape, and stale in the second call of that shape."""

    def change(self) -> None:
        self.kept: dict[torch.Size, Tensor] = {}

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        return super().forward(ids, self.kept.setdefault(keep.shape, keep.clone()), segments)


class IgnoresItsMask(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        return super().forward(ids, torch.ones_like(keep), segments)


class MasksOneLayer(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x: Tensor = self.norm(self.tok(ids) + self.pe[:, : ids.shape[1]] + self.seg(segments))
        for number, layer in enumerate(self.layers):
            x = layer(x, keep if number == 0 else torch.ones_like(keep))
        return x


class ForgetsItsMask(Plain):
    """The first mask of all stays, where it fits."""

    first: Tensor

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        if not hasattr(self, "first") or self.first.shape != keep.shape:
            self.first = keep.clone()
        return super().forward(ids, self.first, segments)


class MasksSoftly(Plain):
    """Masked tokens are weakened and not left out."""

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x: Tensor = self.norm(self.tok(ids) + self.pe[:, : ids.shape[1]] + self.seg(segments))
        x = x * (0.5 + 0.5 * keep[..., None])
        for layer in self.layers:
            x = layer(x, torch.ones_like(keep))
        return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (KeepsItsMask, "the forward takes keep and keeps the mask of an earlier call"),
        (ForgetsItsMask, "the forward takes keep and keeps the mask of an earlier call"),
        (IgnoresItsMask, "the forward takes keep and ignores it"),
        (MasksOneLayer, "the forward takes keep, but tokens that it masks still change"),
        (MasksSoftly, "the forward takes keep, but tokens that it masks still change"),
    ],
)
def test_a_mask_that_is_there_is_not_said_to_be_missing(source: Path, kind: type[nn.Module], said: str) -> None:
    found = suggest(source, kind)
    assert found.verdict is Verdict.IMPOSSIBLE, str(found)
    assert said in reasons(found)
    assert "takes no attention mask" not in " ".join(found.details())
    assert not ROUNDING.search(found.proof), found.proof


class Padded(Plain):
    """Right on rows that are padded behind, and wrong where padding is in front."""

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1]) < keep.long().sum(1, keepdim=True)
        return super().forward(ids, places, segments)


@pytest.mark.slow
def test_rounding_is_no_headline_of_what_is_impossible(source: Path) -> None:
    found = suggest(source, Padded)
    assert found.verdict is Verdict.IMPOSSIBLE, str(found)
    assert not ROUNDING.search(found.proof), found.proof
    assert found.proof.startswith(
        "On the first batches it agrees with the reference in float64; on others it is off by"
    )
    assert found.difference is not None
    assert found.difference > 0.01


@pytest.mark.slow
def test_what_verify_calls_imprecise_is_not_called_proven(source: Path) -> None:
    found = suggest(source, Rounded)
    assert found.verdict is Verdict.APPROXIMATE, str(found)
    assert "its rounding errors in float32 are larger than the reference's" in reasons(found)
    assert not ROUNDING.search(found.proof), found.proof
    assert porting.verify(source, Rounded, found.table, causes=False).verdict == "imprecise"


class Placed(Plain):
    """It can be told the positions, as the reference can."""

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor, position_ids: Tensor | None = None) -> Tensor:
        places = torch.arange(ids.shape[1])[None] if position_ids is None else self.placed(position_ids)
        x: Tensor = self.norm(self.tok(ids) + self.pe[0][places] + self.seg(segments))
        for layer in self.layers:
            x = layer(x, keep)
        return x

    def placed(self, positions: Tensor) -> Tensor:
        return positions


class PlacedFromZero(Placed):
    def placed(self, positions: Tensor) -> Tensor:
        return positions - positions.min()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "right"), [(Placed, True), (PlacedFromZero, False)])
def test_positions_that_both_take_are_an_input_of_the_table(source: Path, kind: type[nn.Module], right: bool) -> None:
    found = suggest(source, kind)
    assert '"position_ids" = "position_ids"' in found.text
    assert found.proven is right, str(found)
    report = porting.verify(source, kind, found.table, causes=False)
    assert report.faithful is right, str(report)
    assert "positions from 3" in (report.scope.positions if right else reasons(found))


class Every(Plain):
    """All layers' outputs in a list, beside the first token of the last."""

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> tuple[list[Tensor], Tensor]:  # type: ignore[override]  # as said
        x: Tensor = self.norm(self.tok(ids) + self.pe[:, : ids.shape[1]] + self.seg(segments))
        every = [x]
        for layer in self.layers:
            every.append(layer(every[-1], keep))
        return every, every[-1][:, 0]


@pytest.mark.slow
def test_each_output_of_a_list_within_a_tuple_is_compared(source: Path) -> None:
    found = suggest(source, Every)
    assert found.proven, str(found)
    depth = porting.open_checkpoint(source).config["num_hidden_layers"]
    assert isinstance(depth, int)
    for layer in range(depth):
        assert re.search(rf'"bert\.encoder\.layer\.{layer}\S*" = "\. -> 0\.{layer + 1}"', found.text), found.text
    assert '"bert.embeddings" = "."' not in found.text
    assert porting.verify(source, Every, found.table, causes=False).faithful


ROBERTA = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40,
    "max_position_embeddings": 40, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": EPS,
}  # fmt: skip


class Roberta(nn.Module):
    """No segments: one learned row is added to every token."""

    row: Callable[[], Tensor]

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tok = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.pos = nn.Embedding(config["max_position_embeddings"], config["hidden_size"])
        self.norm = nn.LayerNorm(config["hidden_size"], eps=EPS)
        names = {"width": "hidden_size", "heads": "num_attention_heads", "inner": "intermediate_size"}
        part = {ours: config[theirs] for ours, theirs in names.items()}
        self.layers = nn.ModuleList(Layer(part) for _ in range(config["num_hidden_layers"]))
        self.make(config["hidden_size"])

    def make(self, width: int) -> None:
        self.seg = nn.Embedding(1, width)

    def added(self) -> Tensor:
        return self.seg.weight[0]

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        real = (ids != 1).long()
        x: Tensor = self.norm(self.tok(ids) + self.pos(real.cumsum(1) * real + 1) + self.added())
        for layer in self.layers:
            x = layer(x, keep)
        return x


class RowOfItsOwn(Roberta):
    def make(self, width: int) -> None:
        self.seg = nn.Parameter(torch.zeros(width))  # type: ignore[assignment]  # a row in the place of a table

    def added(self) -> Tensor:
        row: object = self.seg
        assert isinstance(row, Tensor)
        return row


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Roberta, RowOfItsOwn])
def test_one_learned_row_is_the_table_of_segments(tmp_path: Path, kind: type[nn.Module]) -> None:
    oracle.source("RobertaModel", ROBERTA, tmp_path)
    found = suggest(tmp_path, kind)
    assert found.proven, str(found)
    assert re.search(r'"(roberta\.)?embeddings.token_type_embeddings.weight[^"]*" = "seg', found.text), found.text
    assert "tie" not in " ".join(found.details())


class FirstSegment(Plain):
    """The first row of the checkpoint's two segments."""

    def change(self) -> None:
        self.seg = nn.Parameter(torch.zeros(1, self.norm.normalized_shape[0]))  # type: ignore[assignment]  # a row

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:  # type: ignore[override]  # it has no segments
        row: object = self.seg
        assert isinstance(row, Tensor)
        x: Tensor = self.norm(self.tok(ids) + self.pe[:, : ids.shape[1]] + row)
        for layer in self.layers:
            x = layer(x, keep)
        return x


@pytest.mark.slow
def test_one_learned_row_is_the_first_of_several_segments(source: Path) -> None:
    found = suggest(source, FirstSegment)
    assert found.verdict is Verdict.TRUNK, str(found)
    assert "bert.embeddings.token_type_embeddings.weight but for row 0" in found.missing
    assert "tie" not in " ".join(found.details())


class RowBehindAScale(Plain):
    """Embeddings are scaled, which the checkpoint's are not, and a learned row is added to them."""

    def change(self) -> None:
        self.row = nn.Parameter(torch.zeros(self.norm.normalized_shape[0]))

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x: Tensor = 1.5 * (self.tok(ids) + self.pe[:, : ids.shape[1]] + self.seg(segments))
        x = self.norm(x + self.row)
        for layer in self.layers:
            x = layer(x, keep)
        return x


@pytest.mark.slow
def test_no_tie_is_advised_behind_a_place_that_fits_nothing(source: Path) -> None:
    found = suggest(source, RowBehindAScale)
    assert not found.proven, str(found)
    assert "tie them" not in " ".join(found.details())
    assert "tie it to" not in found.text


def test_a_proof_without_trials_is_none() -> None:
    """Where the time is over before they were run, and the checkpoint itself was not tried either."""
    (reason,) = untried_checks(None).reasons
    assert reason.kind == "bound"
    assert "before other rows, masks and calls were tried" in reason.said


class SlightlyOff(Plain):
    """Three short rows are off by a little, which the first batches do not show."""

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x = super().forward(ids, keep, segments)
        return x * (1 + 1e-5) if ids.shape[0] == 3 and ids.shape[1] < 6 else x


@pytest.mark.slow
def test_the_bound_of_an_approximate_table_holds_for_the_trials_as_well(source: Path) -> None:
    """What the trials alone show is within the bound that ``suggest`` wrote, and ``verify`` reads it so."""
    found = suggest(source, SlightlyOff)
    assert found.verdict is Verdict.APPROXIMATE, str(found)
    assert found.table.approximate is not None
    assert 1e-5 < found.table.approximate.within < 1e-3
    report = porting.verify(source, SlightlyOff, found.table, causes=False)
    assert report.scope.differing
    assert report.verdict == "approximate", str(report)


class OneTokenBackwards(Plain):
    """Wrong on rows of one token alone; it has no pooler."""

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        states = super().forward(ids, keep, segments)
        return -states if ids.shape[1] == 1 else states


@pytest.mark.slow
def test_a_trunk_that_is_right_on_some_inputs_is_a_table(source: Path) -> None:
    found = suggest(source, OneTokenBackwards)
    assert found.verdict is Verdict.SOME_INPUTS, str(found)
    assert found.missing
    assert found.meaning.startswith("The table loads what both sides have.")
    assert any("one token" in one.said or "1 token" in one.said for one in found.reasons), str(found)
