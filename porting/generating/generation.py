"""``generate``, ``translate`` and the table of next tokens, with any model and the checkpoint's own tokenizer."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar, Unpack

import torch
from tokenizers import Encoding
from torch import Tensor

from porting.answers import Answer, Guess, Prediction, Word, guesses, words_of
from porting.errors import Code, Fault, Message, Option, PortingWarning
from porting.generating.search import Continuation, Draw, beams, likeliest, one_by_one, sampler
from porting.generating.settings import GenerationError, Settings, read_settings
from porting.text import NEXT_TOKEN, TARGET_TOKEN, ModelArguments, Source, TextModel, open_text_model, require_top
from porting.trials.inputs import decoder_words
from porting.trials.logits import Wanted

NEW_TOKENS = 40
"""How many tokens are added by default."""


@dataclass(frozen=True, kw_only=True)
class Generated(Answer):
    """A text that a model generated.

    Attributes:
        text: the new text, without special tokens; of an encoder-decoder what its decoder wrote.
        ids: the new tokens, special ones included.
        steps: for each of them its probability and the likeliest tokens there.
        score: the log-probability of all of them; of a beam divided by its length to the power of the length penalty.
        ended: whether a token that ends a text came; otherwise it was cut at ``max_length``.
        given: the text that was given; what was generated follows it, but for an encoder-decoder.
        encoder: whether the model is an encoder-decoder.

    >>> import porting
    >>> found = porting.generate("Return the", architecture="BertForMaskedLM", max_length=6)  # any logits [b s v] do
    >>> isinstance(found, Generated), found.tokens[:3]
    (True, ('[CLS]', 'return', 'the'))
    """

    title: ClassVar[str] = "Generated text"
    text: str
    ids: tuple[int, ...]
    steps: tuple[Prediction, ...]
    score: float
    ended: bool
    given: str
    encoder: bool

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """The likeliest tokens at each place."""
        return self.steps

    @property
    def result(self) -> str:
        """The text as a whole."""
        return self.text if self.encoder else self.given + self.text


@dataclass(frozen=True, kw_only=True)
class NextTokens(Answer):
    """The likeliest tokens after a text, the likeliest first."""

    title: ClassVar[str] = "Next token"
    guesses: tuple[Guess, ...]

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """The one prediction."""
        return (Prediction(title="the next token", guesses=self.guesses),)


def generate(
    text: str,
    source: Source = None,
    *,
    max_length: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    num_beams: int = 1,
    top: int = 5,
    **options: Unpack[ModelArguments],
) -> Generated:
    """Continue a text with a causal model, or answer it with an encoder-decoder.

    The likeliest token is taken each time, unless ``temperature``, ``top_k`` or ``top_p`` asks for sampling, or
    ``num_beams`` for a beam search.  Rules of the checkpoint's ``generation_config.json`` apply: forced and suppressed
    tokens, minimum length, repetition.  The whole row is run for each token, so the module needs no cache.

    Args:
        text: the text.
        source: as in :func:`porting.load`; None for the bundled checkpoint.
        max_length: tokens of the row at most, the text's included; of an encoder-decoder the decoder's tokens, its
            start token included.  By default 40 new ones, or as many as the model has positions for.
        temperature: logits are divided by it; above 0.
        top_k: only so many of the likeliest tokens are drawn.
        top_p: only the likeliest tokens are drawn whose probabilities first sum to this much, above 0 and up to 1.
        seed: of what is drawn.
        num_beams: beginnings that a beam search keeps; 1 for none.
        top: how many of the likeliest tokens are kept for each place.
        **options: table, into, architecture, revision and trust: as in :func:`porting.load`.

    Raises:
        GenerationError: the options do not fit each other or the model.
        TextError: the text cannot be used, or the checkpoint has no head that generates.
        LogitsError: no output of the module can be the logits.
        TokenizerError: the checkpoint has no tokenizer, or one that cannot be used.
        CheckpointError, TableError, PlanError, TargetError: as :func:`porting.load`.
        VerifyError: the module fails.

    >>> import porting
    >>> found = porting.generate("Return the", architecture="BertForMaskedLM", max_length=6)  # any logits [b s v] do
    >>> len(found.ids), found.ended
    (2, False)
    """
    _require_options(temperature, top_k, top_p, num_beams, top)
    model = open_text_model(source, NEXT_TOKEN, TARGET_TOKEN, **options)
    draw: Draw = likeliest
    if any(one is not None for one in (temperature, top_k, top_p)):
        generator = torch.Generator().manual_seed(seed)
        warmth = 1.0 if temperature is None else temperature
        draw = sampler(temperature=warmth, top_k=top_k, top_p=top_p, generator=generator)
    return _Run.of(model, text).written(max_length, draw=draw, num_beams=num_beams, top=top)


def translate(
    text: str,
    source: Source = None,
    *,
    max_length: int | None = None,
    num_beams: int = 1,
    top: int = 5,
    **options: Unpack[ModelArguments],
) -> Generated:
    """Translate a text with an encoder-decoder: greedily, or with a beam search.

    Args:
        text: the text.
        source: as in :func:`porting.load`; None for the bundled checkpoint.
        max_length, num_beams, top: as in :func:`generate`.
        **options: table, into, architecture, revision and trust: as in :func:`porting.load`.

    Raises:
        GenerationError: the model is not an encoder-decoder, or the options do not fit it.
        TextError, LogitsError, TokenizerError, VerifyError: as :func:`generate`.
        CheckpointError, TableError, PlanError, TargetError: as :func:`porting.load`.

    >>> import porting
    >>> try:
    ...     porting.translate("Return the name.")
    ... except porting.PortingError as error:
    ...     print(error.faults[0].code)
    no-head
    """
    _require_options(None, None, None, num_beams, top)
    model = open_text_model(source, TARGET_TOKEN, **options)
    if not model.encodes_first:
        message = "the model is not an encoder-decoder: its config does not say is_encoder_decoder"
        hint = "a causal model continues a text: use generate"
        raise GenerationError(Fault(code=Code.NO_HEAD, where=model.where, message=message, hint=hint))
    return _Run.of(model, text).written(max_length, draw=likeliest, num_beams=num_beams, top=top)


def next_tokens(
    text: str,
    source: Source = None,
    *,
    top: int = 5,
    **options: Unpack[ModelArguments],
) -> NextTokens:
    """The likeliest tokens after a text, by the model alone: no rule of the checkpoint's is applied.

    Args:
        text: the text; of an encoder-decoder the source, and the tokens are the first that it writes.
        source: as in :func:`porting.load`; None for the bundled checkpoint.
        top: how many tokens, at least 1.
        **options: table, into, architecture, revision and trust: as in :func:`porting.load`.

    Raises:
        TextError, LogitsError, TokenizerError, VerifyError: as :func:`generate`.
        CheckpointError, TableError, PlanError, TargetError: as :func:`porting.load`.

    >>> import porting
    >>> found = porting.next_tokens("Return the", architecture="BertForMaskedLM", top=3)  # any logits [b s v] do
    >>> len(found.guesses)
    3
    """
    require_top(top)
    model = open_text_model(source, NEXT_TOKEN, TARGET_TOKEN, **options)
    run = _Run.of(model, text)
    probabilities = run.next_logits(torch.tensor([run.row]))[0].double().softmax(-1)  # [v]
    return NextTokens(
        words=words_of(run.encoding), model=model.title, guesses=guesses(probabilities, model.tokenizer, top)
    )


@dataclass(frozen=True)
class _Run:
    """A model that generates, with the text that it was given.

    Attributes:
        row: the tokens that the new ones are added to: the text's, or the decoder's start token.
        vocabulary: how many tokens there are to choose from.
    """

    model: TextModel
    text: str
    encoding: Encoding
    settings: Settings
    row: tuple[int, ...]
    vocabulary: int

    @classmethod
    def of(cls, model: TextModel, text: str) -> _Run:
        """Take the text apart, and read what the checkpoint says about generation."""
        encoding = model.encode(text)
        words = decoder_words(model.config) if model.encodes_first else 0
        vocabulary = words or model.vocabulary
        settings = read_settings(model.folder, model.config, decoder=model.encodes_first, vocabulary=vocabulary)
        if settings.ignored:
            message = f"{', '.join(settings.ignored)} of the checkpoint's generation config: not applied here"
            warnings.warn(message, PortingWarning, stacklevel=3)
        row = tuple(encoding.ids) if settings.start is None else (settings.start,)
        return cls(model, text, encoding, settings, row, vocabulary)

    def next_logits(self, rows: Tensor) -> Tensor:
        """The logits of the token that follows each row of tokens [n t], [n v]."""
        inputs = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
        if self.model.encodes_first:
            decoder = {f"decoder_{name}": value for name, value in inputs.items()}
            text = self.model.inputs(self.encoding)
            inputs = {**{name: value.expand(len(rows), -1).contiguous() for name, value in text.items()}, **decoder}
        letters = "b t v" if self.model.encodes_first else "b s v"
        wanted = Wanted(axes=letters, shape=(*rows.shape, self.vocabulary), last=True)
        return self.model.logits(inputs, wanted)[:, -1]

    def written(self, max_length: int | None, *, draw: Draw, num_beams: int, top: int) -> Generated:
        """Search for the tokens that follow."""
        longest = self._longest(max_length)
        if num_beams == 1:
            best = one_by_one(self.next_logits, self.row, self.settings, longest=longest, draw=draw, top=top)
            return self._answer(best)
        if 2 * num_beams > self.vocabulary:
            raise _refused(f"num_beams is {num_beams}, the vocabulary has {self.vocabulary} tokens", "ask for fewer")
        found = beams(self.next_logits, self.row, self.settings, longest=longest, count=num_beams, top=top)
        return self._answer(found[0] if found else Continuation())

    def _longest(self, asked: int | None) -> int:
        """How many tokens the row may have in the end."""
        positions, given = self.model.positions, len(self.row)
        longest = given + NEW_TOKENS if asked is None else asked
        longest = longest if positions is None else min(longest, positions)
        if positions is not None and (asked or 0) > positions:
            message, hint = f"max_length is {asked}, the model has {positions} positions", f"ask for {positions}"
        elif longest <= given:
            message, hint = f"the text has {given} tokens already, and max_length is {longest}", "shorten the text"
        else:
            return longest
        raise GenerationError(Fault(code=Code.TEXT_TOO_LONG, where=self.model.where, message=message, hint=hint))

    def _answer(self, found: Continuation) -> Generated:
        """The result, in words."""
        if not found.steps:
            raise _refused("the checkpoint's generation config rules out every token", "see its generation_config.json")
        given, spell = words_of(self.encoding), self.model.tokenizer.spell
        special = {
            number for number, one in self.model.tokenizer.tokenizer.get_added_tokens_decoder().items() if one.special
        }
        new = tuple(
            Word(text=spell(one.token), special=one.token in special, probability=one.probability)
            for one in found.steps
        )
        predictions = tuple(
            Prediction(
                title=spell(step.token),
                guesses=tuple(Guess(token=spell(token), probability=one) for token, one in step.best if one > 0),
                place=place,
            )
            for place, step in enumerate(found.steps, len(given))
        )
        return Generated(
            words=(*given, *new),
            model=self.model.title,
            text=self._spelled(found.tokens),
            ids=tuple(found.tokens),
            steps=predictions,
            score=found.score,
            ended=bool(found.tokens) and found.tokens[-1] in self.settings.ends,
            given=self.text,
            encoder=self.model.encodes_first,
        )

    def _spelled(self, new: list[int]) -> str:
        """The new text; behind a text that was given it begins where that one ends, with its space if there is one."""
        decode = self.model.tokenizer.decode
        if self.model.encodes_first:
            return decode(new)
        before, whole = decode(list(self.row)), decode([*self.row, *new])
        return whole.removeprefix(before) if whole.startswith(before) else decode(new)


def _require_options(
    temperature: float | None, top_k: int | None, top_p: float | None, num_beams: int, top: int
) -> None:
    """Refuse options that no search can follow."""
    require_top(top)
    if num_beams < 1:
        raise _refused(f"num_beams is {num_beams}", "1 means no beam search; a beam search keeps 2 or more")
    if num_beams > 1 and not temperature is top_k is top_p is None:
        raise _refused(
            "a beam search and sampling exclude each other",
            Message("leave ", Option("num_beams"), " out, or the others"),
        )
    if temperature is not None and not 0 < temperature < float("inf"):
        raise _refused(
            f"temperature is {temperature}, and a number above 0 is expected", "leave it out for the likeliest"
        )
    if top_k is not None and top_k < 1:
        raise _refused(f"top_k is {top_k}, and at least 1 is expected", "1 always takes the likeliest token")
    if top_p is not None and not 0 < top_p <= 1:
        raise _refused(f"top_p is {top_p}, and a share above 0 and up to 1 is expected", "0.9 is usual")


def _refused(message: str, hint: str) -> GenerationError:
    return GenerationError(Fault(code=Code.TEXT_REFUSED, message=message, hint=hint))
