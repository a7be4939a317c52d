"""BERT, written by hand: the encoder. Its heads are in ``bert_heads.py``, its sizes in ``bert_config.py``.

Paper: Devlin, Chang, Lee and Toutanova 2019, "BERT: Pre-training of Deep Bidirectional Transformers for
Language Understanding" (NAACL-HLT); a bare section number is one of its sections. The layers are the encoder
of Vaswani et al. 2017, "Attention Is All You Need". Reference: google-research/bert, ``modeling.py``.

Classes stand in the order of the forward pass. Shapes stand beside the tensors, in these letters:

    b batch   s sequence   e hidden_size   h heads   d head size, e = h d   f intermediate_size   v vocab_size

Every model takes the same inputs:

    input_ids       [b s]           integer; token ids
    attention_mask  [b s]           any dtype; 1 or True = attend, 0 or False = padding; None = no padding
    token_type_ids  [b s]           integer; 0 = sentence A (also when None), 1 = sentence B
    position_ids    [b s] or [1 s]  integer; 0 .. s-1 when None; with ``padding_position`` see there

>>> config = BertConfig(
...     vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
... )
>>> bert = Bert(config=config).eval()
>>> input_ids = torch.tensor([[1, 7, 9, 2], [1, 5, 2, 0]])
>>> output = bert(input_ids, attention_mask=input_ids != 0, output_attentions=True)
>>> output.last_hidden_state.shape, output.pooled.shape, output.attentions[0].shape
(torch.Size([2, 4, 8]), torch.Size([2, 8]), torch.Size([2, 2, 4, 4]))

Rows of different lengths run without their padding when ``bert.unpadded`` is set, see ``unpadded.py``.

BERT's relatives have files of their own, which replace some of these parts: ``roberta.py``, ``distilbert.py``,
``albert.py``, ``electra.py``, ``mpnet.py``, ``prenorm_bert.py`` and ``bert_generation.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.models.bert_config import ACTIVATIONS, BertConfig
from porting.models.positions import counted_positions
from porting.models.unpadded import Rows

__all__ = ["ACTIVATIONS", "Bert", "BertConfig", "BertOutput", "attention_bias", "initialize"]


def initialize(module: nn.Module, *, std: float) -> None:
    """Draw the weights of ``module`` and of all its parts anew (``create_initializer`` in the reference).

    Weights and embeddings come from a normal distribution of standard deviation ``std``, cut off at two of
    them; biases are 0, LayerNorm gains 1 and the padding token's embedding 0. Nothing is drawn on the meta device.
    """
    for part in module.modules():
        weight, bias = getattr(part, "weight", None), getattr(part, "bias", None)
        if isinstance(weight, Tensor) and not weight.is_meta:
            if isinstance(part, nn.LayerNorm):
                nn.init.ones_(weight)
            else:
                nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
            if isinstance(part, nn.Embedding) and part.padding_idx is not None:
                nn.init.zeros_(weight[part.padding_idx])
        if isinstance(bias, Tensor) and not bias.is_meta:
            nn.init.zeros_(bias)


class BertEmbeddings(nn.Module):
    """The input: token, position and segment embeddings, summed, then normed (section 3, figure 2)."""

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.padding = config.pad_token_id if config.padding_position else None
        self.position = nn.Embedding(
            config.max_position_embeddings + config.padding_position,
            config.hidden_size,
            padding_idx=0 if config.padding_position else None,
        )
        self.token_type = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm: nn.Module = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def positions(self, input_ids: Tensor) -> Tensor:
        """The position of each token, [1 s], or [b s] where padding is not counted."""
        if self.padding is None:
            return torch.arange(input_ids.shape[-1], device=input_ids.device)[None]
        return counted_positions(input_ids, self.padding)

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Ids [b s], each -> embeddings [b s e]."""
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)  # [b s]
        if position_ids is None:
            position_ids = self.positions(input_ids)  # [1 s] or [b s]
        summed = self.word(input_ids) + self.token_type(token_type_ids) + self.position(position_ids)
        hidden: Tensor = self.dropout(self.norm(summed))  # [b s e]
        return hidden


def attention_bias(attention_mask: Tensor, *, dtype: torch.dtype) -> Tensor:
    """What is added to the attention scores: 0 for a key to attend to, a huge negative number for padding.

    The kept scores stay as they are, near 0, where floating point is finest; the softmax turns the others
    into exact zeros. It is half of the lowest number, so that adding a score cannot overflow to -inf:
    a row that is all padding gives probabilities that sum to 1, and no NaN.

    Args:
        attention_mask: [b s], any dtype, 1 or True = attend.
        dtype: the floating dtype of the scores.

    Returns:
        [b 1 1 s] of ``dtype``, to be added to scores [b h s s]: the same for every head and every query.
    """
    padded = attention_mask.to(torch.bool).logical_not()[:, None, None, :]  # [b 1 1 s]
    zeros = torch.zeros(padded.shape, dtype=dtype, device=padded.device)  # [b 1 1 s]
    return zeros.masked_fill(padded, torch.finfo(dtype).min / 2)


class ScaledDotProductAttention(nn.Module):
    """softmax(Q K^T / sqrt(d)) V, in every head; it has no weights (Vaswani et al. 2017, section 3.2.1)."""

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.dropout_prob = config.attention_probs_dropout_prob

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None = None,
        *,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from every query to every key.

        Args:
            query: [b s e], all heads side by side; ``key`` and ``value`` alike.
            key: [b s e].
            value: [b s e].
            bias: [b 1 1 s], added to the scores, see :func:`attention_bias`; None adds nothing.
            output_attentions: write it out step by step, to see the probabilities; the fused kernel has none.

        Returns:
            The context [b s e], heads side by side, and the probabilities [b h s s] before dropout, or None.
        """
        q, k, v = self.split_heads(query), self.split_heads(key), self.split_heads(value)  # [b h s d] each
        probabilities: Tensor | None = None
        if output_attentions:
            scores = q @ k.transpose(-1, -2) * self.head_size**-0.5  # [b h s s]
            if bias is not None:
                scores = scores + bias  # [b h s s]
            probabilities = torch.softmax(scores, dim=-1)  # [b h s s], each row sums to 1
            context = F.dropout(probabilities, self.dropout_prob, training=self.training) @ v  # [b h s d]
        else:
            dropout = self.dropout_prob if self.training else 0.0
            context = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)  # [b h s d]
        return context.transpose(1, 2).flatten(2), probabilities  # [b s e], [b h s s]

    def split_heads(self, states: Tensor) -> Tensor:
        """[b s e] -> [b h s d]."""
        return states.view(*states.shape[:-1], -1, self.head_size).transpose(1, 2)


class BertAttention(nn.Module):
    """Multi-head self-attention in both directions (section 3; Vaswani et al. 2017, section 3.2.2)."""

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__()
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.core = ScaledDotProductAttention(config=config)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, hidden: Tensor, bias: Tensor | Rows | None = None, *, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [b s e], bias [b 1 1 s] -> attended [b s e], probabilities [b h s s] or None.

        Without padding the hidden states are [1 n e], and ``bias`` says which tokens are a row: they attend to each
        other.
        """
        query, key, value = self.query(hidden), self.key(hidden), self.value(hidden)  # [b s e] each
        if isinstance(bias, Rows):
            return self.output(bias.attend(self.core, query, key, value)), None  # [1 n e]
        context, probabilities = self.core(query, key, value, bias, output_attentions=output_attentions)
        return self.output(context), probabilities  # [b s e], [b h s s]


class BertLayer(nn.Module):
    """One encoder layer: attention, then a feed-forward network, each x -> norm(x + dropout(part(x))).

    The norm comes after the addition ("post-norm"); Vaswani et al. 2017, sections 3.1, 3.3 and 5.4.
    """

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config=config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACTIVATIONS[config.hidden_act]()
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)
        self.output_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, hidden: Tensor, bias: Tensor | Rows | None = None, *, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [b s e], bias [b 1 1 s] -> hidden states [b s e], probabilities [b h s s] or None."""
        attended, probabilities = self.attention(hidden, bias, output_attentions=output_attentions)  # [b s e]
        hidden = self.attention_norm(hidden + self.dropout(attended))  # [b s e]
        expanded = self.activation(self.intermediate(hidden))  # [b s f]
        hidden = self.output_norm(hidden + self.dropout(self.output(expanded)))  # [b s e]
        return hidden, probabilities


class BertPooler(nn.Module):
    """The vector C of the whole input, made of its first token, [CLS] (section 3)."""

    def __init__(self, *, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [b s e] -> pooled [b e]."""
        return torch.tanh(self.dense(hidden[:, 0]))  # [b e]


class BertOutput(NamedTuple):
    """What :class:`Bert` returns."""

    last_hidden_state: Tensor  # [b s e]
    pooled: Tensor | None  # [b e]; None if built without a pooler
    hidden_states: tuple[Tensor, ...] | None = None  # the embeddings, then every layer's output: [b s e] each
    attentions: tuple[Tensor, ...] | None = None  # every layer's probabilities before dropout: [b h s s] each
    rows: Rows | None = None  # where the tokens stand, if padding was left out of the computation

    def at_tokens(self, head: Callable[..., Tensor], *more: Tensor) -> Tensor:
        """What ``head`` gives for each token, [b s e] and what else it takes -> [b s ...].

        Where padding was left out, the head sees the real tokens alone, [1 n e] -> [1 n ...]; the places of padding
        are 0 then.
        """
        if self.rows is None:
            return head(self.last_hidden_state, *more)
        return self.rows.unpack(head(self.rows.pack(self.last_hidden_state), *more))


class Bert(nn.Module):
    """The encoder: embeddings, the layers, the pooler (section 3).

    Args:
        config: the hyperparameters.
        pooler: whether to have one; the heads that label tokens do without.

    Attributes:
        unpadded: leave padding out of the computation, see ``unpadded.py``; False until it is set.  All tokens get what
            they get with padding, and the places of padding are 0, also in the MLM logits: that head is given
            real tokens alone.  Set it on the encoder, ``model.bert`` in a model with a head.  A head that reads
            the first place of a row wants padding on the right, as always in BERT.
    """

    embeddings_class: ClassVar[type[BertEmbeddings]] = BertEmbeddings
    layer_class: ClassVar[type[nn.Module]] = BertLayer
    pooler_class: ClassVar[type[BertPooler]] = BertPooler

    def __init__(self, *, config: BertConfig, pooler: bool = True) -> None:
        super().__init__()
        self.config = config
        self.unpadded = False
        self.embeddings = self.embeddings_class(config=config)
        self.layers = nn.ModuleList([self.layer_class(config=config) for _ in range(config.num_hidden_layers)])
        self.pooler = self.pooler_class(config=config) if pooler else None
        initialize(self, std=config.initializer_range)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> BertOutput:
        """Encode a batch; the module's docstring describes the inputs.

        Raises:
            ValueError: if a row is longer than the position table, the mask not shaped like the ids, or attentions
                are asked for without padding.
        """
        if position_ids is None and input_ids.shape[-1] > self.config.max_position_embeddings:
            raise ValueError(
                f"input_ids has {input_ids.shape[-1]} tokens a row; "
                f"max_position_embeddings allows {self.config.max_position_embeddings}"
            )
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask has shape {list(attention_mask.shape)}; "
                f"expected that of input_ids, {list(input_ids.shape)}"
            )
        if self.unpadded and attention_mask is not None:
            if output_attentions:
                raise ValueError("output_attentions shows rows with their padding; expected unpadded = False")
            if not attention_mask.all():
                return self.without_padding(
                    input_ids, attention_mask, token_type_ids, position_ids, output_hidden_states=output_hidden_states
                )
            attention_mask = None  # there is no padding to leave out
        hidden = self.embeddings(input_ids, token_type_ids, position_ids)  # [b s e]
        bias = None  # [b 1 1 s]
        if attention_mask is not None:
            bias = attention_bias(attention_mask, dtype=hidden.dtype)
        hidden, hidden_states, attentions = self.encode(
            hidden, bias, output_hidden_states=output_hidden_states, output_attentions=output_attentions
        )
        pooled = None if self.pooler is None else self.pooler(hidden)  # [b e]
        return BertOutput(hidden, pooled, hidden_states, attentions)

    def without_padding(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        *,
        output_hidden_states: bool,
    ) -> BertOutput:
        """As ``forward``, with the n tokens that are not padding in one long row.

        The pooler reads the first place of a row.  Where that is padding it is zeros here, and with padding it is the
        state of a padding token.
        """
        rows = Rows(attention_mask)
        if position_ids is None:
            position_ids = self.embeddings.positions(input_ids)  # [1 s] or [b s]
        hidden = self.embeddings(
            rows.pack(input_ids),
            None if token_type_ids is None else rows.pack(token_type_ids),
            rows.pack(position_ids.expand_as(input_ids)),
        )  # [1 n e]
        hidden, packed_states, _ = self.encode(
            hidden, rows, output_hidden_states=output_hidden_states, output_attentions=False
        )
        hidden = rows.unpack(hidden)  # [b s e]
        hidden_states = None if packed_states is None else tuple(rows.unpack(state) for state in packed_states)
        pooled = None if self.pooler is None else self.pooler(hidden)  # [b e]
        return BertOutput(hidden, pooled, hidden_states, rows=rows)

    def encode(
        self, hidden: Tensor, bias: Tensor | Rows | None, *, output_hidden_states: bool, output_attentions: bool
    ) -> tuple[Tensor, tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
        """Embeddings [b s e], bias [b 1 1 s] -> hidden states [b s e], and what every layer gave and attended to.

        Without padding all are [1 n e], and in the place of the bias are the rows.
        """
        hidden_states: tuple[Tensor, ...] | None = (hidden,) if output_hidden_states else None
        attentions: tuple[Tensor, ...] | None = () if output_attentions else None
        for layer in self.depths():
            hidden, probabilities = layer(hidden, bias, output_attentions=output_attentions)
            if hidden_states is not None:
                hidden_states += (hidden,)
            if attentions is not None:
                attentions += (probabilities,)
        return hidden, hidden_states, attentions

    def depths(self) -> Iterable[nn.Module]:
        """The layer at each depth, in order."""
        return self.layers
