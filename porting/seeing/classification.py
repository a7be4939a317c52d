"""Classifying a text: the labels' probabilities, and what the model attended to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Unpack

import torch

from porting.answers import Answer, Guess, Prediction, words_of
from porting.checkpoint import num_labels
from porting.seeing.attention_data import AttentionError
from porting.seeing.probabilities import Attention, attention_of_inputs
from porting.text import CLASSES, ModelArguments, Source, open_text_model
from porting.trials.logits import Wanted


@dataclass(frozen=True, kw_only=True)
class Classification(Answer):
    """The labels of a text.

    Attributes:
        guesses: every label with its probability, the likeliest first.  They sum to 1, but for a model of several
            labels at once (``problem_type`` is ``multi_label_classification``), whose labels have one each.
        logits: of the labels in the model's order.
        attention: what the model attended to; None where that cannot be seen.

    >>> guess = Guess(token="good", probability=1.0)
    >>> Classification(words=(), model="a model", guesses=(guess,), logits=(0.3,)).label
    'good'
    """

    guesses: tuple[Guess, ...]
    logits: tuple[float, ...]
    attention: Attention | None = None

    @property
    def label(self) -> str:
        """The likeliest label."""
        return self.guesses[0].token

    @property
    def title(self) -> str:
        """The title of the page."""
        return f"Class: {self.label}"

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """The one prediction."""
        return (Prediction(title="the text", guesses=self.guesses),)

    def to_html(self) -> str:
        """A page for a browser: the labels, and below them the attention, first the last layer's most telling head."""
        if self.attention is None:
            return super().to_html()
        from porting.seeing.webpage import attention_page  # noqa: PLC0415  # jinja2 is for those who look

        return attention_page(self.attention, layer=-1, answer=self)


def classify(
    text: str,
    source: Source = None,
    *,
    pair: str | None = None,
    **options: Unpack[ModelArguments],
) -> Classification:
    """Classify a text, or a pair of texts.

    Args:
        text: the text.
        source: as in :func:`porting.load`; None for the bundled checkpoint.
        pair: a second segment that goes after the text.
        **options: table, into, architecture, revision and trust: as in :func:`porting.load`.

    Returns:
        Every label of the config's ``id2label`` with its probability.

    Raises:
        TextError: the text cannot be used, or the checkpoint has no classifier.
        LogitsError: no output of the module can be the logits.
        TokenizerError: the checkpoint has no tokenizer, or one that cannot be used.
        CheckpointError, TableError, PlanError, TargetError: as :func:`porting.load`.
        VerifyError: the module fails.

    >>> import porting
    >>> try:
    ...     porting.classify("Return the name.")  # the bundled checkpoint has no classifier
    ... except porting.PortingError as error:
    ...     print(error.faults[0].code)
    no-head
    """
    model = open_text_model(source, CLASSES, **options)
    encoding = model.encode(text, pair)
    inputs = model.inputs(encoding)
    logits = model.logits(inputs, Wanted(axes="b n", shape=(1, num_labels(model.config))))[0].double()  # [n]
    several = model.config.get("problem_type") == "multi_label_classification"
    shares = (torch.sigmoid(logits) if several else logits.softmax(-1)).tolist()
    names = labels_of(model.config, len(shares))
    found = [Guess(token=name, probability=share) for name, share in zip(names, shares, strict=True)]
    try:
        seen = attention_of_inputs(model, inputs, encoding)
    except AttentionError:  # it shows none: the labels stand all the same
        seen = None
    return Classification(
        words=words_of(encoding),
        model=model.title,
        guesses=tuple(sorted(found, key=lambda one: -one.probability)),
        logits=tuple(logits.tolist()),
        attention=seen,
    )


def labels_of(config: Mapping[str, object], count: int) -> list[str]:
    """The labels of so many classes, in the model's order; numbered where the config does not name them.

    >>> labels_of({"id2label": {"1": "no", "0": "yes"}}, 2), labels_of({}, 3)
    (['yes', 'no'], ['LABEL_0', 'LABEL_1', 'LABEL_2'])
    """
    named = config.get("id2label")
    named = named if isinstance(named, Mapping) else {}
    return [str(named.get(str(number), f"LABEL_{number}")) for number in range(count)]
