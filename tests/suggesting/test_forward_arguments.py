"""What a forward's arguments mean, by their names and their order."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from porting.suggesting.subjects.forward_arguments import roles

IDS, DECODER = "input_ids", "decoder_input_ids"
BOTH = (IDS, "attention_mask", DECODER, "decoder_attention_mask")


class SourceTarget(nn.Module):
    def forward(self, src_seq: Tensor, trg_seq: Tensor, src_mask: Tensor, trg_mask: Tensor) -> None: ...


class InputsTargets(nn.Module):
    def forward(self, inputs: Tensor, targets: Tensor) -> None: ...


class XY(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> None: ...


class TwoTexts(nn.Module):
    def forward(self, text: Tensor, words: Tensor, labels: Tensor | None = None) -> None: ...


@pytest.mark.parametrize("kind", [SourceTarget, InputsTargets, XY, TwoTexts])
def test_the_second_words_are_the_decoders(kind: type[nn.Module]) -> None:
    found, _ = roles(kind(), BOTH)
    assert list(found.values())[:2] == [IDS, DECODER]
    assert "labels" not in found


def test_each_side_has_its_mask() -> None:
    found, _ = roles(SourceTarget(), BOTH)
    assert found["src_mask"] == "attention_mask"
    assert found["trg_mask"] == "decoder_attention_mask"
