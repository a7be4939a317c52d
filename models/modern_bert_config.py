"""The hyperparameters of a ModernBERT, checked when they are written down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from porting.models import checks
from porting.models.bert_config import ACTIVATIONS

__all__ = ["ModernBertConfig"]

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class ModernBertConfig:
    """The hyperparameters of a ModernBERT. The defaults are ModernBERT-base's (Warner et al. 2024, table 4).

    Attributes:
        vocab_size: number of tokens in the vocabulary.
        hidden_size: width of the residual stream; a multiple of ``num_attention_heads``, and each head is even.
        num_hidden_layers: number of encoder layers.
        num_attention_heads: attention heads in each layer.
        intermediate_size: width of the feed-forward network behind its gate; before it there is twice as much.
        hidden_activation: what the gate multiplies, a key of :data:`porting.models.bert_config.ACTIVATIONS`.
        max_position_embeddings: the longest sequence, in tokens.
        layer_types: of each layer, whether it attends to all tokens, ``"full_attention"``, or to those around it,
            ``"sliding_attention"``; None goes by ``global_attn_every_n_layers``.
        global_attn_every_n_layers: of so many layers the first attends to all tokens and the others do not.
        local_attention: how wide the window around a token is: half of it to the left, half to the right.
        global_rope_theta: the base of the rotary frequencies where a layer attends to all tokens.
        local_rope_theta: the base where it does not.
        norm_eps: added to the variance inside every LayerNorm.
        embedding_dropout: after the embeddings.
        attention_dropout: on the attention probabilities, and before the residual addition.
        mlp_dropout: inside the feed-forward network, behind the gate.
        classifier_dropout: before a classifier.
        classifier_activation: activation of the heads, a key of the same.
        classifier_pooling: what a label for the whole input is read from: ``"cls"``, the first token, or ``"mean"``.
        initializer_range: standard deviation of freshly drawn weights.
        pad_token_id: the token whose embedding gets no gradient from the input; None: no such token.
        num_labels: classes of the sequence and of the token classifier.

    Raises:
        ValueError: if a field is out of its range; one line for each such field.

    >>> ModernBertConfig(num_hidden_layers=4).windows
    (None, 64, 64, None)
    >>> ModernBertConfig(num_hidden_layers=2, layer_types=["full_attention"], classifier_pooling="max")
    Traceback (most recent call last):
    ...
    ValueError: ModernBertConfig has 2 faults:
      classifier_pooling='max': expected cls, mean
      layer_types has a length of 1: expected num_hidden_layers=2
    """

    vocab_size: int = 50368
    hidden_size: int = 768
    num_hidden_layers: int = 22
    num_attention_heads: int = 12
    intermediate_size: int = 1152
    hidden_activation: str = "gelu"
    max_position_embeddings: int = 8192
    layer_types: Sequence[str] | None = None
    global_attn_every_n_layers: int = 3
    local_attention: int = 128
    global_rope_theta: float = 160_000.0
    local_rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    mlp_dropout: float = 0.0
    classifier_dropout: float = 0.0
    classifier_activation: str = "gelu"
    classifier_pooling: str = "cls"
    initializer_range: float = 0.02
    pad_token_id: int | None = 50283
    num_labels: int = 2

    def __post_init__(self) -> None:
        checks.refuse(self, list(self.faults()))

    def faults(self) -> Iterator[str]:
        """The faults of the fields, one line each."""
        yield from checks.sizes(self, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        yield from checks.sizes(self, "intermediate_size", "max_position_embeddings", "num_labels")
        yield from checks.sizes(self, "global_attn_every_n_layers", "local_attention")
        yield from checks.divides(self, "hidden_size", "num_attention_heads")
        yield from checks.one_of(self, "hidden_activation", ACTIVATIONS)
        yield from checks.one_of(self, "classifier_activation", ACTIVATIONS)
        yield from checks.one_of(self, "classifier_pooling", ("cls", "mean"))
        yield from checks.probabilities(self, "embedding_dropout", "attention_dropout", "mlp_dropout")
        yield from checks.probabilities(self, "classifier_dropout")
        yield from checks.positive(self, "global_rope_theta", "local_rope_theta", "norm_eps", "initializer_range")
        yield from checks.padding_token(self)
        yield from self._head_faults()
        yield from self._layer_faults()

    def _head_faults(self) -> Iterator[str]:
        sizes: tuple[object, ...] = (self.hidden_size, self.num_attention_heads)
        if all(isinstance(one, int) and one > 0 for one in sizes) and self.head_size % 2:
            yield f"hidden_size={self.hidden_size}: expected heads of an even size, to be turned in pairs"

    def _layer_faults(self) -> Iterator[str]:
        kinds = self.layer_types
        if kinds is None:
            return
        if not isinstance(kinds, list | tuple):
            yield f"layer_types={kinds!r}: expected a list of {FULL} and {SLIDING}"
            return
        if len(kinds) != self.num_hidden_layers:
            yield f"layer_types has a length of {len(kinds)}: expected num_hidden_layers={self.num_hidden_layers}"
        for number, kind in enumerate(kinds):
            if kind not in {FULL, SLIDING}:
                yield f"layer_types[{number}]={kind!r}: expected {FULL} or {SLIDING}"

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def window(self) -> int:
        """How far to each side a token sees where a layer does not attend to all."""
        return self.local_attention // 2

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer, how far to each side a token sees, in tokens; None: everywhere."""
        kinds = self.layer_types or [
            SLIDING if number % self.global_attn_every_n_layers else FULL for number in range(self.num_hidden_layers)
        ]
        return tuple(None if kind == FULL else self.window for kind in kinds)
