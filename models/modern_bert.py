"""ModernBERT, written by hand: the encoder. Its heads are in ``modern_bert_heads.py``.

Paper: Warner et al. 2024, "Smarter, Better, Faster, Longer: A Modern Bidirectional Encoder for Fast, Memory Efficient,
and Long Context Finetuning and Inference"; a bare section number is one of its sections. Against BERT (section 2.1):

- no biases but the decoder's, also not in the norms;
- rotary positions instead of learned ones: queries and keys are turned by an angle that grows with their place, so
  that a score depends on how far apart two tokens are (Su et al. 2021, "RoFormer", section 3.2);
- pre-norm, with a norm behind the embeddings and therefore none at the beginning of the first layer;
- GeGLU: half of the feed-forward network is the other half's gate (Shazeer 2020, "GLU Variants Improve Transformer");
- only every third layer attends to all tokens; the others see a window around each. The two kinds turn at different
  speeds: far apart needs slow angles, which a large theta gives.

Reference: AnswerDotAI/ModernBERT, ``bert_layers``. Shape letters are those of ``bert.py``: b batch, s sequence,
e hidden_size, h heads, d head size, f intermediate_size, v vocab_size. Every model takes

    input_ids       [b s]  integer; token ids
    attention_mask  [b s]  any dtype; 1 or True = attend, 0 or False = padding; None = no padding

>>> config = ModernBertConfig(
...     vocab_size=30, hidden_size=8, num_hidden_layers=4, num_attention_heads=2, intermediate_size=12, pad_token_id=0
... )
>>> input_ids = torch.tensor([[1, 7, 9, 2], [1, 5, 2, 0]])
>>> ModernBert(config=config).eval()(input_ids, input_ids != 0).last_hidden_state.shape
torch.Size([2, 4, 8])
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.models.bert import BertOutput, attention_bias, initialize
from porting.models.bert_config import ACTIVATIONS
from porting.models.modern_bert_config import ModernBertConfig

__all__ = ["ModernBert", "ModernBertConfig", "norm", "rotate", "rotation", "window_bias"]

Rotation = tuple[Tensor, Tensor]
"""The cosine and the sine of every angle, [s d] each."""


def norm(config: ModernBertConfig) -> nn.LayerNorm:
    """A LayerNorm with a gain and no bias."""
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=False)


class ModernBertEmbeddings(nn.Module):
    """The input: token embeddings, normed. Positions enter in the attention only."""

    def __init__(self, *, config: ModernBertConfig) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.norm = norm(config)
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Ids [b s] -> embeddings [b s e]."""
        hidden: Tensor = self.dropout(self.norm(self.word(input_ids)))  # [b s e]
        return hidden


def rotation(length: int, size: int, *, theta: float, like: Tensor) -> Rotation:
    """The angles by which the places 0 .. s-1 turn each pair of a head's numbers (Su et al. 2021, equation 15).

    The k-th of the d/2 pairs turns by theta ** (-2k/d) from one place to the next. These are float32 whatever the
    weights are: the published models were trained so, and far down a row the rounding of a frequency is not small.

    Args:
        length: the number of places, s.
        size: the head size, d.
        theta: the base of the frequencies.
        like: a tensor on the device and of the dtype that is to be turned.

    Returns:
        Cosines and sines [s d], each angle at k and at k + d/2; of float32 at least, so that bfloat16 turns as well.
    """
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=like.device) / size  # [d/2]
    frequencies = 1.0 / theta**exponents  # [d/2]
    angles = torch.arange(length, dtype=torch.float32, device=like.device)[:, None] * frequencies  # [s d/2]
    angles = torch.cat((angles, angles), dim=-1)  # [s d]
    dtype = torch.promote_types(like.dtype, torch.float32)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(states: Tensor, turn: Rotation) -> Tensor:
    """Rotate [b h s d]: the pair of the numbers k and k + d/2 at place s by its angle."""
    cosine, sine = turn  # [s d] each
    first, second = states.chunk(2, dim=-1)  # [b h s d/2] each
    quarter = torch.cat((-second, first), dim=-1)  # [b h s d], turned by a quarter
    return (states * cosine + quarter * sine).to(states.dtype)  # [b h s d]


def window_bias(length: int, window: int, bias: Tensor | None, *, like: Tensor) -> Tensor:
    """What is added to the scores where a token sees ``window`` tokens to each side, and itself.

    Args:
        length: the number of tokens in a row, s.
        window: how far a token sees.
        bias: [b 1 1 s], what :func:`porting.models.bert.attention_bias` makes of padding; None: no padding.
        like: a tensor on the device and of the dtype of the scores.

    Returns:
        [b 1 s s], or [1 1 s s] without padding: half of the lowest number where a key is too far or padding, else 0.
    """
    places = torch.arange(length, device=like.device)  # [s]
    far = (places[:, None] - places[None, :]).abs() > window  # [s s]
    lowest = torch.tensor(torch.finfo(like.dtype).min / 2, dtype=like.dtype, device=like.device)
    near = like.new_zeros(1, 1, 1, length) if bias is None else bias  # [b 1 1 s]
    return torch.where(far, lowest, near)  # [b 1 s s]


class ModernBertAttention(nn.Module):
    """Multi-head self-attention with one projection for everything, [(p h d) e], and rotary positions."""

    def __init__(self, *, config: ModernBertConfig) -> None:
        super().__init__()
        self.heads = (config.num_attention_heads, config.head_size)
        self.dropout_prob = config.attention_dropout
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.dropout = nn.Dropout(config.attention_dropout)

    def forward(
        self, hidden: Tensor, turn: Rotation, bias: Tensor | None = None, *, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from every token to every token.

        Args:
            hidden: [b s e].
            turn: of the places, [s d] each.
            bias: [b 1 1 s] or [b 1 s s], added to the scores; None adds nothing.
            output_attentions: write it out step by step, to see the probabilities; the fused kernel has none.

        Returns:
            The attended states [b s e], and the probabilities [b h s s] before dropout, or None.
        """
        fused = self.qkv(hidden)  # [b s (p h d)]
        query, key, value = fused.view(*fused.shape[:-1], 3, *self.heads).permute(2, 0, 3, 1, 4)  # [b h s d] each
        query, key = rotate(query, turn), rotate(key, turn)  # [b h s d] each
        probabilities: Tensor | None = None
        if output_attentions:
            scores = query @ key.transpose(-1, -2) * key.shape[-1] ** -0.5  # [b h s s]
            if bias is not None:
                scores = scores + bias  # [b h s s]
            probabilities = torch.softmax(scores, dim=-1)  # [b h s s], each row sums to 1
            context = F.dropout(probabilities, self.dropout_prob, training=self.training) @ value  # [b h s d]
        else:
            dropout = self.dropout_prob if self.training else 0.0
            context = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
        attended = self.dropout(self.output(context.transpose(1, 2).flatten(2)))  # [b s e]
        return attended, probabilities


class GatedFeedForward(nn.Module):
    """GeGLU: output(activation(x W) * x V), with W and V one above the other in one matrix [(2 f) e]."""

    def __init__(self, *, config: ModernBertConfig) -> None:
        super().__init__()
        self.intermediate = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.activation = ACTIVATIONS[config.hidden_activation]()
        self.dropout = nn.Dropout(config.mlp_dropout)
        self.output = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [b s e] -> [b s e]."""
        expanded, gate = self.intermediate(hidden).chunk(2, dim=-1)  # [b s f] each
        projected: Tensor = self.output(self.dropout(self.activation(expanded) * gate))  # [b s e]
        return projected


class ModernBertLayer(nn.Module):
    """One encoder layer: attention, then a feed-forward network, each x -> x + part(norm(x)).

    Args:
        config: the hyperparameters.
        first: what comes in is normed already: the attention takes it as it is.
    """

    def __init__(self, *, config: ModernBertConfig, first: bool) -> None:
        super().__init__()
        self.attention_norm = nn.Identity() if first else norm(config)
        self.attention = ModernBertAttention(config=config)
        self.feed_forward_norm = norm(config)
        self.feed_forward = GatedFeedForward(config=config)

    def forward(
        self, hidden: Tensor, turn: Rotation, bias: Tensor | None = None, *, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [b s e], see :class:`ModernBertAttention` -> hidden states [b s e], probabilities or None."""
        attended, probabilities = self.attention(
            self.attention_norm(hidden), turn, bias, output_attentions=output_attentions
        )
        hidden = hidden + attended  # [b s e]
        hidden = hidden + self.feed_forward(self.feed_forward_norm(hidden))  # [b s e]
        return hidden, probabilities


class ModernBert(nn.Module):
    """The encoder: embeddings, the layers, a last norm."""

    def __init__(self, *, config: ModernBertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = ModernBertEmbeddings(config=config)
        layers = [ModernBertLayer(config=config, first=number == 0) for number in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = norm(config)
        initialize(self, std=config.initializer_range)
        for layer in layers:  # what is added 2 N times is drawn smaller (section 2.2.2; Shoeybi et al. 2019)
            for part in (layer.attention.output, layer.feed_forward.output):
                initialize(part, std=config.initializer_range * (2 * config.num_hidden_layers) ** -0.5)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> BertOutput:
        """Encode a batch; the module's docstring describes the inputs. ``hidden_states`` are before the last norm.

        Raises:
            ValueError: if a row is longer than the model was made for, or the mask not shaped like the ids.
        """
        config, length = self.config, input_ids.shape[-1]
        if length > config.max_position_embeddings:
            raise ValueError(
                f"input_ids has {length} tokens a row; max_position_embeddings allows {config.max_position_embeddings}"
            )
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask has shape {list(attention_mask.shape)}; "
                f"expected that of input_ids, {list(input_ids.shape)}"
            )
        hidden = self.embeddings(input_ids)  # [b s e]
        padding = None if attention_mask is None else attention_bias(attention_mask, dtype=hidden.dtype)  # [b 1 1 s]
        local = window_bias(length, config.window, padding, like=hidden)  # [b 1 s s]
        thetas = config.global_rope_theta, config.local_rope_theta
        slow, fast = (rotation(length, config.head_size, theta=theta, like=hidden) for theta in thetas)
        hidden_states: tuple[Tensor, ...] | None = (hidden,) if output_hidden_states else None
        attentions: tuple[Tensor, ...] | None = () if output_attentions else None
        for layer, window in zip(self.layers, config.windows, strict=True):
            turn, bias = (slow, padding) if window is None else (fast, local)
            hidden, probabilities = layer(hidden, turn, bias, output_attentions=output_attentions)
            if hidden_states is not None:
                hidden_states += (hidden,)
            if attentions is not None:
                attentions += (probabilities,)
        return BertOutput(self.norm(hidden), None, hidden_states, attentions)
