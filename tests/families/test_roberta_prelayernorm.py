"""What the pairs do not show of RoBERTa-PreLayerNorm: its own positions, and the sum in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import porting
from tests.families.pairs import ROBERTA_PRE_NORM
from tests.families.ported import draw

TABLE = "roberta_prelayernorm_into_encoder"


def checkpoint(directory: Path, architecture: str, dtype: torch.dtype) -> Any:  # Any: a model of transformers
    """The model that was written to the directory."""
    kind = getattr(transformers, architecture)
    model = kind(kind.config_class(**ROBERTA_PRE_NORM)).eval()
    draw(model)
    model.to(dtype).save_pretrained(directory)
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Ids [3 29] and a mask of rows of 29, 20 and 4 tokens; 1 is the padding token."""
    ids = torch.randint(2, 37, (3, 29), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(29) < torch.tensor([[29], [20], [4]])).long()
    return torch.where(mask.bool(), ids, 1), mask


@pytest.mark.parametrize("architecture", ["RobertaPreLayerNormModel", "RobertaPreLayerNormForSequenceClassification"])
def test_tokens_stand_where_transformers_itself_counts_them(architecture: str, tmp_path: Path) -> None:
    """There a padding token has the padding position, here its place in the row: no other token sees it."""
    theirs = checkpoint(tmp_path, architecture, torch.float64)
    ids, mask = batch()
    with torch.no_grad():
        expected, found = theirs(ids, attention_mask=mask)[0], porting.load(tmp_path, table=TABLE)(ids, mask)[0]
    if expected.ndim == 3:
        expected, found = expected[mask.bool()], found[mask.bool()]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_in_float32_the_sum_of_positions_and_token_types_is_rounded_once(tmp_path: Path) -> None:
    theirs = checkpoint(tmp_path, "RobertaPreLayerNormModel", torch.float32).embeddings
    found = porting.load(tmp_path, table=TABLE).get_parameter("embeddings.position.weight")
    exact = theirs.position_embeddings.weight[1:].double() + theirs.token_type_embeddings.weight[0].double()
    assert torch.equal(found, exact.float())
    assert not torch.equal(found.double(), exact)
