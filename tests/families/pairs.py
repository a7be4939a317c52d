"""Every family and every module that a table brings together: a pair is one line, and test_pairs.py proves each."""

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
OPENAI_GPT: Fields = {"vocab_size": 37, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 29}
SEQ2SEQ: Fields = {
    "vocab_size": 37,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 28,
    "max_position_embeddings": 29,
}
MARIAN: Fields = {
    **SEQ2SEQ,
    "activation_function": "swish",
    "scale_embedding": True,
    "pad_token_id": 36,
    "decoder_start_token_id": 36,
    "eos_token_id": 0,
}
PEGASUS: Fields = {**SEQ2SEQ, "activation_function": "relu", "scale_embedding": True}
ROBERTA_PRE_NORM: Fields = {**BERT, "max_position_embeddings": 31, "type_vocab_size": 1}
LONG_ROBERTA: Fields = {**BERT, "max_position_embeddings": 31}  # two positions are nobody's
DISTILBERT: Fields = {
    "vocab_size": 37,
    "dim": 24,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 40,
    "max_position_embeddings": 29,
    "num_labels": 5,
}
ELECTRA: Fields = {**BERT, "embedding_size": 8}
ALBERT: Fields = {**ELECTRA, "num_hidden_layers": 4, "num_hidden_groups": 2}
MODERN_BERT: Fields = {
    "vocab_size": 37,
    "hidden_size": 24,
    "num_hidden_layers": 4,  # everywhere, in a window, in a window, everywhere
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 80,
    "local_attention": 48,  # the longest row is longer, and no padding has padding only in its window
    "num_labels": 5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
BERT_GENERATION: Fields = {**BERT, "bos_token_id": 1, "eos_token_id": 2}
MPNET: Fields = {**BERT, "max_position_embeddings": 152}  # all 32 buckets of distances are met


@dataclass(frozen=True)
class Pair:
    """A family in a module.

    Attributes:
        table: the shipped table.
        architecture: the class of transformers that the checkpoint is made with.
        fields: its config: small sizes, and what differs from its defaults.
        single: the reference casts to float32 whatever its weights are; verify leaves that out of its float64 run.
    """

    table: str
    architecture: str
    fields: Fields
    single: bool = False

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
    Pair("openai_gpt", "OpenAIGPTLMHeadModel", OPENAI_GPT),
    Pair("marian", "MarianMTModel", MARIAN),
    Pair("bart", "BartForConditionalGeneration", SEQ2SEQ),
    Pair("pegasus_into_classifier", "PegasusModel", PEGASUS),
    Pair("roberta_prelayernorm_into_encoder", "RobertaPreLayerNormModel", ROBERTA_PRE_NORM),
    Pair(
        "roberta_prelayernorm_into_encoder",
        "RobertaPreLayerNormForSequenceClassification",
        ROBERTA_PRE_NORM,
    ),
    Pair("roberta", "RobertaForMaskedLM", LONG_ROBERTA),
    Pair("roberta", "RobertaForSequenceClassification", LONG_ROBERTA),
    Pair("xlm_roberta", "XLMRobertaForMaskedLM", LONG_ROBERTA),
    Pair("data2vec_text", "Data2VecTextForMaskedLM", LONG_ROBERTA),
    Pair("camembert", "CamembertForSequenceClassification", LONG_ROBERTA),
    Pair("roberta_prelayernorm", "RobertaPreLayerNormForMaskedLM", LONG_ROBERTA),
    Pair("megatron_bert", "MegatronBertForPreTraining", BERT),
    Pair("distilbert", "DistilBertForSequenceClassification", DISTILBERT),
    Pair("distilbert", "DistilBertForMaskedLM", DISTILBERT),
    Pair("electra", "ElectraForPreTraining", ELECTRA),
    Pair("electra", "ElectraForMaskedLM", ELECTRA),
    Pair("albert", "AlbertForPreTraining", ALBERT),
    Pair("bert_generation", "BertGenerationEncoder", BERT_GENERATION),
    Pair("mpnet", "MPNetForMaskedLM", MPNET),
    Pair("modern_bert", "ModernBertForMaskedLM", MODERN_BERT, single=True),
    Pair("modern_bert", "ModernBertForSequenceClassification", MODERN_BERT, single=True),
)

# The modules that can host all-MiniLM-L6-v2, a BertModel; None is the table that its model_type chooses.
MINILM_TABLES = (
    None,
    "bert_into_encoder",
    "bert_into_fused",
    "bert_into_interleaved",
    "bert_into_torch_encoder",
)
