"""The hyperparameters of a BERT, checked when the config is created."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from torch import nn

from porting.models import checks

#: ``hidden_act`` -> its module; the names are transformers'. GELU: Hendrycks and Gimpel 2016,
#: section 2. The original code computes ``gelu`` by tanh; transformers runs its weights with the exact one.
ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        "gelu": nn.GELU,  # x Phi(x)
        "gelu_new": partial(nn.GELU, approximate="tanh"),
        "gelu_pytorch_tanh": partial(nn.GELU, approximate="tanh"),  # one function under a second name
        "relu": nn.ReLU,
        "silu": nn.SiLU,
        "swish": nn.SiLU,
        "tanh": nn.Tanh,
    }
)


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """The hyperparameters of a BERT. The defaults are BERT-base's (Devlin et al. 2019, sections 3 and A.2).

    Attributes:
        vocab_size: number of tokens in the vocabulary.
        hidden_size: width of the residual stream; a multiple of ``num_attention_heads``.
        num_hidden_layers: number of encoder layers.
        num_attention_heads: attention heads in each layer.
        intermediate_size: width of the feed-forward network inside a layer.
        hidden_act: activation of the feed-forward network and of the MLM head, a key of :data:`ACTIVATIONS`.
        max_position_embeddings: the longest sequence, in tokens.
        type_vocab_size: number of segments (sentence A, sentence B).
        layer_norm_eps: added to the variance inside every LayerNorm.
        hidden_dropout_prob: dropout after the embeddings and before each residual addition.
        attention_probs_dropout_prob: dropout on the attention probabilities.
        classifier_dropout: dropout before a classifier; None means ``hidden_dropout_prob``.
        initializer_range: standard deviation of freshly drawn weights.
        pad_token_id: the token whose embedding gets no gradient from the input; None: no such token.
        num_labels: classes of the sequence and of the token classifier.
        padding_position: padding has a position of its own, 0, and the tokens that are not padding are counted from 1,
            as in fairseq's models (RoBERTa, MPNet); so padding in front of a row changes no token's position.

    Raises:
        ValueError: if a field is out of its range; one line for each such field.

    >>> BertConfig(hidden_size=128, num_attention_heads=2).head_size
    64
    >>> BertConfig(hidden_size=100, num_attention_heads=3, hidden_act="gleu")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: BertConfig has 2 faults:
      hidden_size=100: expected a multiple of num_attention_heads=3
      hidden_act='gleu': did you mean 'gelu'? expected gelu, gelu_new, ...
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    classifier_dropout: float | None = None
    initializer_range: float = 0.02
    pad_token_id: int | None = 0
    num_labels: int = 2
    padding_position: bool = False

    def __post_init__(self) -> None:
        checks.refuse(self, list(self.faults()))

    def faults(self) -> Iterator[str]:
        """The faults of the fields, one line each; a subclass adds those of its own fields."""
        yield from checks.sizes(self, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        yield from checks.sizes(self, "intermediate_size", "max_position_embeddings", "type_vocab_size", "num_labels")
        yield from checks.divides(self, "hidden_size", "num_attention_heads")
        yield from checks.one_of(self, "hidden_act", ACTIVATIONS)
        yield from checks.probabilities(self, "hidden_dropout_prob", "attention_probs_dropout_prob")
        if self.classifier_dropout is not None:
            yield from checks.probabilities(self, "classifier_dropout")
        yield from checks.positive(self, "layer_norm_eps", "initializer_range")
        yield from checks.padding_token(self)
        if self.padding_position and self.pad_token_id is None:
            yield "padding_position=True: expected a pad_token_id, whose position it is"

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def classifier_dropout_prob(self) -> float:
        """Dropout before a classifier, with the default resolved."""
        return self.hidden_dropout_prob if self.classifier_dropout is None else self.classifier_dropout
