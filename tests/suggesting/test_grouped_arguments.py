"""Forwards that take several tensors as one argument, and arguments that nothing explains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from porting.suggesting.subjects.argument_names import ArgumentMapping
from porting.suggesting.subjects.forward_arguments import find_argument_mapping
from porting.suggesting.subjects.questions import Asker
from porting.suggesting.subjects.sampler import Sampler
from porting.target import GroupingForward, NamedTensors
from porting.trials.modalities import SEGMENTS
from porting.trials.padding import MASK

IDS = "input_ids"
AVAILABLE = (IDS, MASK, SEGMENTS, "position_ids")


class Encoder(nn.Module):
    """Attention that sees no padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.segments = nn.Embedding(97, 8).double(), nn.Embedding(2, 8).double()

    def encode(self, ids: Tensor, mask: Tensor, segments: Tensor | None = None) -> Tensor:
        x = self.words(ids) if segments is None else self.words(ids) + self.segments(segments)
        found: Tensor = (x @ x.mT).masked_fill(mask[:, None] == 0, -torch.inf).softmax(-1) @ x
        return found


class ByKey(Encoder):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.encode(batch["tokens"], batch["mask"], batch["segment_ids"])


class ByAttribute(Encoder):
    def forward(self, sample: Any) -> Tensor:
        return self.encode(sample.input_ids, sample.attention_mask, sample.token_type_ids)


class ByGet(Encoder):
    def forward(self, features: dict[str, Tensor]) -> Tensor:
        mask = features["valid"] if "valid" in features else torch.ones_like(features["x"])
        return self.encode(features["x"], mask, features.get("token_types"))


class BoolMask(Encoder):
    """What it reads behind the mask is read only if the mask is of the right kind."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = batch["hidden_mask"]
        if hidden.dtype is not torch.bool:
            raise TypeError(hidden.dtype)
        return self.encode(batch["sentences"], ~hidden, batch["sentence_type"])


class Unpacked(Encoder):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = self.inner(**batch)
        return found

    def inner(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        return self.encode(input_ids, attention_mask, token_type_ids)


class Pair(Encoder):
    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        ids, mask = inputs
        return self.encode(ids, mask)


class Triple(Encoder):
    """A batch of three rows could be taken apart in the same way."""

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        ids, segments, mask = inputs
        return self.encode(ids, mask, segments)


def way_of(module: nn.Module) -> ArgumentMapping:
    return find_argument_mapping(module, Sampler(available=AVAILABLE), causal=False, ask=Asker())


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (ByKey, {IDS: "batch.tokens", MASK: "batch.mask", SEGMENTS: "batch.segment_ids"}),
        (ByAttribute, {IDS: f"sample.{IDS}", MASK: f"sample.{MASK}", SEGMENTS: f"sample.{SEGMENTS}"}),
        (ByGet, {IDS: "features.x", MASK: "features.valid", SEGMENTS: "features.token_types"}),
        (BoolMask, {IDS: "batch.sentences", MASK: "batch.hidden_mask", SEGMENTS: "batch.sentence_type"}),
        (Unpacked, {IDS: f"batch.{IDS}", MASK: f"batch.{MASK}", SEGMENTS: f"batch.{SEGMENTS}"}),
        (Pair, {IDS: "inputs.0", MASK: "inputs.1"}),
        (Triple, {IDS: "inputs.0", SEGMENTS: "inputs.1", MASK: "inputs.2"}),
    ],
)
def test_the_parts_of_an_argument_are_found_by_what_the_forward_reads(
    kind: type[Encoder], names: dict[str, str]
) -> None:
    found = way_of(kind())
    assert {theirs: ours for ours, theirs in found.sources.items()} == names
    assert found.unmasked is None
    assert not found.mixes_rows


def test_a_polarity_in_a_dictionary_is_found_by_what_it_hides() -> None:
    rules = dict(way_of(BoolMask()).rules)
    assert rules[f"{MASK} [b s]"] == "batch.hidden_mask -> padding [b s]"


class Flags(Encoder):
    def forward(self, ids: Tensor, mask: Tensor, verbose, step) -> Tensor:  # type: ignore[no-untyped-def]  # a user's
        found: Tensor = self.encode(ids, mask) * (2 if verbose else 1) + self.segments.weight[0] * step
        return found


def test_what_no_name_explains_gets_the_first_value_with_which_the_forward_runs() -> None:
    found = way_of(Flags())
    assert found.constants == {"verbose": 0, "step": 0}
    assert found.named == (IDS, MASK)


class Sums(Encoder):
    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.words(ids)
        return x + x.mean((0, 1))


def test_rows_that_depend_on_each_other_are_noted() -> None:
    found = find_argument_mapping(Sums(), Sampler(available=(IDS,)), causal=False, ask=Asker())
    assert found.mixes_rows


def test_dotted_names_become_dictionaries_and_tuples() -> None:
    forward = GroupingForward(lambda batch, pair, scale=1: (batch, pair, scale))
    batch, pair, scale = forward(**{"batch.ids": 1, "pair.1": 3, "pair.0": 2, "scale": 4})
    assert isinstance(batch, NamedTensors)
    assert (batch["ids"], batch.ids, pair, scale) == (1, 1, (2, 3), 4)
    with pytest.raises(AttributeError):
        _ = batch.mask
    assert SimpleNamespace(**batch).ids == 1
    assert GroupingForward(lambda *args, scale=1: (args, scale))(**{"1": 6, "0": 5, "scale": 4}) == ((5, 6), 4)
