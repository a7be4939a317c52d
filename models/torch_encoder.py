"""An encoder on ``torch.nn.TransformerEncoder``: PyTorch's own layers, between embeddings and a classifier of ours.

It computes what ``encoder.py`` computes, with the same config, inputs and embeddings. PyTorch keeps query, key and
value in one fused parameter, ``in_proj_weight [(p h d) e]``, and in inference it runs a whole layer as one operation
(its "fast path", when the number of heads is even), so there are no attention probabilities to return.

>>> config = EncoderConfig(
...     vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
... )
>>> encoder = TorchEncoder(config=config).eval()
>>> input_ids = torch.tensor([[1, 7, 9, 2], [1, 5, 2, 0]])
>>> encoder(input_ids, attention_mask=input_ids != 0).shape
torch.Size([2, 4, 8])
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from porting.models.encoder import EncoderConfig, EncoderEmbeddings, check_mask, initialize

__all__ = ["TorchEncoder", "TorchEncoderForSequenceClassification"]


class TorchEncoder(nn.Module):
    """Embeddings, PyTorch's layers, and a final norm if the config asks for one.

    Of the config, ``attention`` is not read: there is one layout. PyTorch knows one dropout for all places in a layer,
    ``hidden_dropout_prob``, so ``attention_probs_dropout_prob`` is not read either.
    """

    def __init__(self, *, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = EncoderEmbeddings(config=config)
        layer = nn.TransformerEncoderLayer(
            d_model=config.hidden_size,
            nhead=config.num_attention_heads,
            dim_feedforward=config.intermediate_size,
            dropout=config.hidden_dropout_prob,
            activation=nn.GELU(),  # a module, so that hooks see its output
            layer_norm_eps=config.layer_norm_eps,
            batch_first=True,
            norm_first=config.norm_first,
        )
        norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.final_norm else None
        # As nested tensors, states at padding would come back as zeros and not as what the layers make of them.
        self.encoder = nn.TransformerEncoder(layer, config.num_hidden_layers, norm=norm, enable_nested_tensor=False)
        initialize(self, std=config.initializer_range)
        for part in self.modules():  # its layers are copies of one: each is initialised separately
            if isinstance(part, nn.MultiheadAttention) and not part.in_proj_weight.is_meta:
                nn.init.normal_(part.in_proj_weight, std=config.initializer_range)
                nn.init.zeros_(part.in_proj_bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Encode a batch.

        Args:
            input_ids: [b s], integer.
            attention_mask: [b s], any dtype, 1 or True = attend; None = no padding. No row may be all padding.

        Returns:
            Hidden states [b s e].

        Raises:
            ValueError: if a row is longer than the position table, or the mask not shaped like the ids.
        """
        check_mask(input_ids, attention_mask)
        padding = None if attention_mask is None else attention_mask.logical_not()  # [b s], True = padding, as it wants
        hidden: Tensor = self.encoder(self.embeddings(input_ids), src_key_padding_mask=padding)  # [b s e]
        return hidden


class TorchEncoderForSequenceClassification(nn.Module):
    """One label for the whole text, read off its first token."""

    def __init__(self, *, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = TorchEncoder(config=config)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size) if config.pooler else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        for part in (self.pooler, self.classifier):
            if part is not None:
                initialize(part, std=config.initializer_range)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Ids [b s], mask [b s] as in :class:`TorchEncoder` -> logits [b num_labels].

        Raises:
            ValueError: as :class:`TorchEncoder`.
        """
        first = self.encoder(input_ids, attention_mask)[:, 0]  # [b e]
        if self.pooler is not None:
            first = torch.tanh(self.pooler(first))  # [b e]
        logits: Tensor = self.classifier(self.dropout(first))  # [b num_labels]
        return logits
