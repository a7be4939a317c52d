"""Every family and every room that a table brings together: a pair is one line, and test_pairs.py proves each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Fields = Mapping[str, object]

BERT: Fields = {
    "vocab_size": 37,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 29,
    "num_labels": 5,
}
ROBERTA_PRE_NORM: Fields = {**BERT, "max_position_embeddings": 31, "type_vocab_size": 1}


@dataclass(frozen=True)
class Pair:
    """A family in a room.

    Attributes:
        table: the shipped table.
        architecture: the class of transformers that the checkpoint is made with.
        fields: its config: small sizes, and what differs from its defaults.
        first_position: the reference counts positions from here on, skipping padding, and the room from 0; it is then
            told to count padding too, so that padded places compare.
    """

    table: str
    architecture: str
    fields: Fields
    first_position: int = 0

    def __str__(self) -> str:
        return f"{self.table}-{self.architecture}"


PAIRS = (
    Pair("bert", "BertModel", BERT),
    Pair("bert", "BertForSequenceClassification", BERT),
    Pair("bert_into_encoder", "BertModel", BERT),
    Pair("bert_into_encoder", "BertForSequenceClassification", BERT),
    Pair("bert_into_fused", "BertModel", BERT),
    Pair("bert_into_fused", "BertForSequenceClassification", BERT),
    Pair("bert_into_interleaved", "BertModel", BERT),
    Pair("bert_into_interleaved", "BertForSequenceClassification", BERT),
    Pair("bert_into_torch_encoder", "BertModel", BERT),
    Pair("bert_into_torch_encoder", "BertForSequenceClassification", BERT),
    Pair("roberta_prelayernorm_into_encoder", "RobertaPreLayerNormModel", ROBERTA_PRE_NORM, first_position=2),
    Pair(
        "roberta_prelayernorm_into_encoder",
        "RobertaPreLayerNormForSequenceClassification",
        ROBERTA_PRE_NORM,
        first_position=2,
    ),
)

# The rooms that can host all-MiniLM-L6-v2, a BertModel; None is the table that its model_type chooses.
MINILM_TABLES = (
    None,
    "bert_into_encoder",
    "bert_into_fused",
    "bert_into_interleaved",
    "bert_into_torch_encoder",
)
