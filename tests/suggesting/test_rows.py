"""Modules without an axis for a batch: they are called once for each row, and what they return is stacked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting import verify
from porting.errors import VerifyError
from porting.notation.table import parse_table
from porting.suggesting import Verdict, suggest
from porting.suggesting.subjects.argument_names import ArgumentMapping
from porting.suggesting.subjects.forward_arguments import find_argument_mapping
from porting.suggesting.subjects.questions import Asker
from porting.suggesting.subjects.sampler import Sampler
from porting.target import stacked, with_arguments
from porting.trials.modalities import IDS, PIXELS
from porting.trials.padding import MASK
from tests.suggesting.oracle import drafted
from tests.suggesting.oracle import source as reference_source


class Block(nn.Module):
    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.heads = n_head
        self.before, self.after = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv, self.out = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.up, self.down = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Compute one row [s e]."""
        q, k, v = (part.unflatten(1, (self.heads, -1)).transpose(0, 1) for part in self.qkv(self.before(x)).chunk(3, 1))
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, float("-inf"))
        x = x + self.out((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        found: Tensor = x + self.down(F.gelu(self.up(self.after(x))))
        return found


class RowGpt(nn.Module):
    """GPT-2 for one row."""

    def __init__(self, vocab_size: int, n_positions: int, n_embd: int, n_layer: int, n_head: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab_size, n_embd), nn.Embedding(n_positions, n_embd)
        self.blocks = nn.ModuleList(Block(n_embd, n_head) for _ in range(n_layer))
        self.norm = nn.LayerNorm(n_embd)

    def forward(self, ids: Tensor) -> Tensor:
        assert ids.ndim == 1
        x = self.words(ids) + self.places(torch.arange(len(ids)))
        for block in self.blocks:
            x = block(x, torch.ones(len(ids), len(ids)).triu(1).bool())
        found: Tensor = self.norm(x)
        return found


GPT = {"vocab_size": 97, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 40, "activation_function": "gelu"}


def test_a_module_of_one_row_has_its_table(tmp_path: Path) -> None:
    reference_source("GPT2Model", GPT, tmp_path)
    found = drafted(tmp_path, RowGpt)
    assert '"input_ids [b s]" = "ids [s]"' in found.text
    assert '"h.{i}.attn.c_attn.weight [e o]" = "blocks.{i}.qkv.weight [o e]"' in found.text
    assert "a guess" not in found.text


@pytest.mark.slow
def test_a_module_of_one_row_is_proven(tmp_path: Path) -> None:
    reference_source("GPT2Model", GPT, tmp_path)
    found = suggest(tmp_path, RowGpt)
    assert found.verdict is Verdict.EXACT, str(found)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.picture = nn.Embedding(97, 8).double(), nn.Linear(3, 8).double()

    def seen(self, ids: Tensor, seen: Tensor) -> Tensor:
        """Attention of one row [s] that sees what ``seen`` [q k] or [k] says."""
        assert ids.ndim == 1
        x = self.words(ids)
        found: Tensor = (x @ x.mT).masked_fill(seen.expand(len(ids), len(ids)) == 0, -1e9).softmax(-1) @ x
        return found


class Hides(Words):
    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        assert padding.dtype == torch.bool
        return self.seen(ids, ~padding)


class Square(Words):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        assert mask.shape == (len(ids), len(ids))
        return self.seen(ids, mask)


class Optional(Words):
    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.seen(ids, torch.ones(len(ids)) if mask is None else mask)


class Picture(Words):
    def forward(self, image: Tensor) -> Tensor:
        channels, height, width = image.shape
        assert channels == 3
        found: Tensor = self.picture(image.reshape(channels, height * width).mT)
        return found


class PictureOfChannelsLast(Words):
    def forward(self, image: Tensor) -> Tensor:
        height, width, channels = image.shape
        assert channels == 3
        found: Tensor = self.picture(image.reshape(height * width, channels))
        return found


@pytest.mark.parametrize(
    ("kind", "causal", "lines"),
    [
        (Hides, False, {"input_ids [b s]": "ids [s]", "attention_mask [b s]": "padding -> padding [s]"}),
        (Square, False, {"input_ids [b s]": "ids [s]", "square_attention_mask [b q k]": "mask [q k]"}),
        (Square, True, {"input_ids [b s]": "ids [s]", "causal_attention_mask [b q k]": "mask [q k]"}),
        (Optional, False, {"input_ids [b s]": "ids [s]", "attention_mask [b s]": "mask [s]"}),
        (Picture, False, {"pixel_values [b c h w]": "image [c h w]"}),
        (PictureOfChannelsLast, False, {"pixel_values [b c h w]": "image [h w c]"}),
    ],
)
def test_one_row_is_given_where_no_batch_is_taken(kind: type[Words], lines: dict[str, str], *, causal: bool) -> None:
    available = (PIXELS,) if "pixel_values [b c h w]" in lines else (IDS, MASK)
    sampler = Sampler(available=available)
    found = find_argument_mapping(kind(), sampler, causal=causal, ask=Asker())
    assert dict(found.rules) == lines
    assert found.by_row


class Mixes(Words):
    """It runs on batches, and takes their rows for the tokens of one."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.seen(ids.reshape(-1), torch.ones(ids.numel())).reshape(*ids.shape, -1)


def test_a_module_that_runs_on_a_batch_and_mixes_its_rows_is_given_no_single_rows() -> None:
    found = find_argument_mapping(Mixes(), Sampler(available=(IDS, MASK)), causal=False, ask=Asker())
    assert found.mixes_rows
    assert not found.by_row


class Nothing(Words):
    """It takes no row either."""

    def forward(self, ids: Tensor) -> Tensor:
        raise ValueError(ids.shape)


def test_what_a_module_said_to_a_batch_is_reported_where_it_takes_no_row() -> None:
    with pytest.raises(VerifyError, match=r"ValueError: torch.Size\(\[3, 7\]\)"):
        find_argument_mapping(Nothing(), Sampler(available=(IDS, MASK)), causal=False, ask=Asker())


class Both(NamedTuple):
    one: Tensor
    other: None


@dataclass
class Held:
    states: list[Tensor]
    length: int


def test_what_is_returned_for_each_row_is_stacked_whatever_holds_it() -> None:
    parts = [
        (Both(torch.full((2,), value), None), {"loss": torch.tensor(value)}, Held([torch.full((3,), value)], 3))
        for value in (1.0, 2.0)
    ]
    both, named, held = stacked(parts)
    assert torch.equal(both.one, torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
    assert torch.equal(named["loss"], torch.tensor([1.0, 2.0]))
    assert (held.states[0].shape, held.length, both.other) == ((2, 3), 3, None)


def test_rows_are_taken_apart_once() -> None:
    way = ArgumentMapping(rules=(("input_ids [b s]", "ids [s]"),), constants={"other": 1})

    class Takes(nn.Module):
        def forward(self, ids: Tensor, other: int) -> Tensor:
            assert (ids.ndim, other) == (1, 1)
            return ids.double()

    ids = torch.arange(6).view(2, 3)
    module = way.adapted(way.adapted(Takes()))
    assert torch.equal(module(**way.given({"input_ids": ids})), ids.double())
    assert torch.equal(with_arguments(Takes(), {"other": 1})(ids[0]), ids[0].double())


TABLE = """
[mapping]
name = "rows"
prefix = "transformer."
[tensors]
"wte.weight" = "words.weight"
"wpe.weight" = "places.weight"
"h.{i}.ln_1.{*w}" = "blocks.{i}.before.{*w}"
"h.{i}.ln_2.{*w}" = "blocks.{i}.after.{*w}"
"h.{i}.attn.c_attn.weight [e o]" = "blocks.{i}.qkv.weight [o e]"
"h.{i}.attn.c_attn.bias" = "blocks.{i}.qkv.bias"
"h.{i}.attn.c_proj.weight [e o]" = "blocks.{i}.out.weight [o e]"
"h.{i}.attn.c_proj.bias" = "blocks.{i}.out.bias"
"h.{i}.mlp.c_fc.weight [e o]" = "blocks.{i}.up.weight [o e]"
"h.{i}.mlp.c_fc.bias" = "blocks.{i}.up.bias"
"h.{i}.mlp.c_proj.weight [e o]" = "blocks.{i}.down.weight [o e]"
"h.{i}.mlp.c_proj.bias" = "blocks.{i}.down.bias"
"ln_f.{*w}" = "norm.{*w}"
[inputs]
"input_ids [b s]" = "ids [s]"
[probes]
"." = "."
"""


class First(RowGpt):
    """It leaves the last token out of what it returns first."""

    def forward(self, ids: Tensor) -> Tensor:
        found = super().forward(ids)
        return torch.cat([found[:-1], found[-1:] * (1 + 1e-7)])


@pytest.mark.parametrize(("kind", "same"), [(RowGpt, True), (First, False)])
def test_a_table_says_that_a_module_takes_one_row(kind: type[RowGpt], tmp_path: Path, *, same: bool) -> None:
    reference_source("GPT2Model", GPT, tmp_path)
    table = parse_table(TABLE, where="rows")
    assert str(table.inputs[0]) == "input_ids [b s] = ids [s]"
    assert table.row_inputs == ("ids",)

    report = verify(tmp_path, lambda: kind(97, 40, 24, 2, 3), table)
    assert report.faithful is same
