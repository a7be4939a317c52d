"""The encoder of BertGeneration, written by hand: BERT's layers over embeddings without token types, and no pooler.

Paper: Rothe, Narayan and Severyn 2020, "Leveraging Pre-trained Checkpoints for Sequence Generation Tasks" (TACL 8).
Reference: huggingface/transformers, ``modeling_bert_generation.py``. Shape letters are those of ``bert.py``.

>>> import torch
>>> config = BertConfig(
...     vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
... )
>>> BertGeneration(config=config).eval()(torch.tensor([[1, 7, 9, 2], [1, 5, 8, 2]])).last_hidden_state.shape
torch.Size([2, 4, 8])
"""

from __future__ import annotations

from porting.models.bert import Bert
from porting.models.bert_config import BertConfig
from porting.models.distilbert import UntypedEmbeddings

__all__ = ["BertGeneration"]


class BertGeneration(Bert):
    """The encoder: BERT's layers, dropout included, over token and position embeddings."""

    embeddings_class = UntypedEmbeddings

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__(config=config, pooler=False)
