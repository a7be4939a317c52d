"""What a forward's arguments mean, by their names and their order."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn

from porting.suggesting import Verdict, suggest
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


class Embeddings(nn.Module):
    """What comes before the layers: no position depends on another."""

    def __init__(self, vocab_size: int, hidden_size: int, max_position_embeddings: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, hidden_size)
        self.places = nn.Embedding(max_position_embeddings, hidden_size)
        self.kinds = nn.Embedding(2, hidden_size)
        self.norm = nn.LayerNorm(hidden_size, eps=1e-12)

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:
        x: Tensor = self.norm(self.words(ids) + self.places.weight[: ids.shape[1]] + self.kinds(segments))
        return x


def test_a_module_without_attention_is_matched(source: Path) -> None:
    found = suggest(source, Embeddings)
    assert found.verdict is Verdict.TRUNK, str(found)
    assert "encoder" in " ".join(found.missing)
    assert '"embeddings.word_embeddings.weight" = "words.weight"' in found.text.replace("bert.", "")
