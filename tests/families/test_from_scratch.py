"""A module that was never loaded becomes a checkpoint of the family whose table is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import porting
from porting.models.encoder import Encoder, EncoderConfig, EncoderForSequenceClassification
from porting.models.torch_encoder import TorchEncoder
from porting.tables import find_table
from porting.verification import verify
from tests.families.ported import draw

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 29,
}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("table", "kind", "model_type", "architecture"),
    [
        ("bert_into_encoder", Encoder, "bert", "BertModel"),
        ("bert_into_encoder", EncoderForSequenceClassification, "bert", "BertForSequenceClassification"),
        ("bert_into_fused", Encoder, "bert", "BertModel"),
        ("bert_into_interleaved", EncoderForSequenceClassification, "bert", "BertForSequenceClassification"),
        ("bert_into_torch_encoder", TorchEncoder, "bert", "BertModel"),
        ("roberta_prelayernorm_into_encoder", Encoder, "roberta-prelayernorm", "RobertaPreLayerNormModel"),
    ],
)
def test_an_encoder_from_scratch(
    table: str, kind: type[nn.Module], model_type: str, architecture: str, tmp_path: Path
) -> None:
    chosen = find_table(table, {})
    constants: dict[str, Any] = dict(chosen.constants)
    module = kind(config=EncoderConfig(**SIZES, **constants, pad_token_id=1)).eval()
    draw(module)
    porting.export(module, table, tmp_path / "new")
    config = json.loads((tmp_path / "new" / "config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["architectures"]) == (model_type, [architecture])
    report = verify(tmp_path / "new", module, table, loaded=True)
    assert report.faithful, str(report)
    again = porting.load(tmp_path / "new", table=table)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in module.state_dict().items())
