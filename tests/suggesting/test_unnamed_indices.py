"""Arguments of whole numbers whose names tell nothing: segments and positions, by what they do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from porting.errors import VerifyError
from porting.suggesting.subjects.argument_names import ArgumentMapping, roles
from porting.suggesting.subjects.forward_arguments import find_argument_mapping
from porting.suggesting.subjects.questions import Asker
from porting.suggesting.subjects.sampler import Sampler
from porting.trials.modalities import IDS, POSITIONS, SEGMENTS
from porting.trials.padding import MASK


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.kinds, self.places = (nn.Embedding(rows, 8).double() for rows in (97, 2, 20))

    def attend(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        seen = torch.ones(x.shape[:2]) if mask is None else mask
        found: Tensor = (x @ x.mT).masked_fill(seen[:, None] == 0, -1e9).softmax(-1) @ x
        return found


class Half(Encoder):
    """Its segments are required."""

    def forward(self, ids: Tensor, half, attention_mask: Tensor) -> Tensor:  # type: ignore[no-untyped-def]  # neither name nor type tells what half is
        return self.attend(self.words(ids) + self.kinds(half), attention_mask)


class HalfByDefault(Encoder):
    """It fails without its segments, though they have a default."""

    def forward(self, ids: Tensor, half: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:
        return self.attend(self.words(ids) + self.kinds(half), attention_mask)


class MaybeHalf(Encoder):
    """It is called with None or with segments."""

    def forward(self, ids: Tensor, attention_mask: Tensor, half) -> Tensor:  # type: ignore[no-untyped-def]  # neither name nor type tells what half is
        x = self.words(ids)
        return self.attend(x if half is None else x + self.kinds(half), attention_mask)


class AllUnnamed(Encoder):
    def forward(self, ids: Tensor, one: Tensor, other: Tensor, third: Tensor) -> Tensor:
        return self.attend(self.words(ids) + self.places(one) + self.kinds(third), other)


class Turned(Encoder):
    """Of its places only the distances count; there is no table of them."""

    def forward(self, ids: Tensor, counted: Tensor, attention_mask: Tensor) -> Tensor:
        far = (counted[:, :, None] - counted[:, None]).abs()
        x = self.words(ids)
        scores = (x @ x.mT - far).masked_fill(attention_mask[:, None] == 0, -1e9)
        found: Tensor = scores.softmax(-1) @ x
        return found


class NoMask(Encoder):
    def forward(self, ids: Tensor, half: Tensor) -> Tensor:
        return self.attend(self.words(ids) + self.kinds(half))


def found(module: nn.Module) -> ArgumentMapping:
    available = (IDS, MASK, SEGMENTS, POSITIONS)
    return find_argument_mapping(module, Sampler(available=available), causal=False, ask=Asker())


@pytest.mark.parametrize(
    ("kind", "roles"),
    [
        (Half, {"ids": IDS, "half": SEGMENTS, "attention_mask": MASK}),
        (HalfByDefault, {"ids": IDS, "half": SEGMENTS, "attention_mask": MASK}),
        (MaybeHalf, {"ids": IDS, "half": SEGMENTS, "attention_mask": MASK}),
        (AllUnnamed, {"ids": IDS, "one": POSITIONS, "other": MASK, "third": SEGMENTS}),
        (Turned, {"ids": IDS, "counted": POSITIONS, "attention_mask": MASK}),
        (NoMask, {"ids": IDS, "half": SEGMENTS}),
    ],
)
def test_segments_and_positions_are_found_by_what_they_do(kind: type[nn.Module], roles: dict[str, str]) -> None:
    assert found(kind()).sources == roles


class Shift(Encoder):
    """A number that is added to places."""

    def forward(self, ids: Tensor, attention_mask: Tensor, shift) -> Tensor:  # type: ignore[no-untyped-def]  # neither name nor type tells what half is
        places = self.places(torch.arange(ids.shape[1]) + shift)
        return self.attend(self.words(ids) + places, attention_mask)


class Loss(Encoder):
    """Whole numbers that change nothing of a token."""

    def forward(self, ids: Tensor, attention_mask: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        x = self.attend(self.words(ids), attention_mask)
        return x, nn.functional.cross_entropy(x.flatten(0, 1), wanted.flatten())


def test_a_number_that_is_a_batch_s_is_none_and_neither_is_what_the_loss_takes() -> None:
    assert found(Shift()).constants == {"shift": 0}
    with pytest.raises(VerifyError, match="takes 'wanted', and nothing tells what to give it"):
        found(Loss())


class TensorFlow(nn.Module):
    def forward(self, input_word_ids: Tensor, input_mask: Tensor, input_type_ids: Tensor) -> None: ...


def test_the_names_of_tensorflow_s_bert_are_known() -> None:
    meant = {"input_word_ids": IDS, "input_mask": MASK, "input_type_ids": SEGMENTS}
    assert roles(TensorFlow(), (IDS, MASK, SEGMENTS))[0] == meant
