"""Text through a handwritten model: guess the words that are masked, judge whether one sentence follows another.

The model is the one that the checkpoint's table loads it into, the tokenizer the checkpoint's own.  Which of a table's
architectures does what is read off its name: transformers ends it in the task, in every family.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Encoding
from torch import Tensor, nn

from porting.checkpoint import Checkpoint, open_checkpoint
from porting.embedded import embedded_checkpoint
from porting.errors import Code, Fault, PortingError, told
from porting.loading import Into, load
from porting.notation.table import Table
from porting.tables import find_table
from porting.tokenizer import TextTokenizer, read_tokenizer
from porting.trials.inputs import for_port

MASKED_WORDS = "ForMaskedLM"
"""Ends the name of an architecture whose output has ``logits`` [b s v] over the vocabulary."""

NEXT_SENTENCE = "ForNextSentencePrediction"
"""Ends the name of an architecture whose output has ``logits`` [b 2]; class 0 = the second text follows the first."""

Source = str | os.PathLike[str] | None


class TextError(PortingError):
    """A checkpoint cannot do with a text what was asked for."""


@dataclass(frozen=True, kw_only=True)
class Guess:
    """A word piece in the place of a mask, with its probability (0 to 1, over the whole vocabulary)."""

    token: str
    probability: float


@dataclass(frozen=True, kw_only=True)
class Blank:
    """A masked word: its place among the word pieces, [CLS] being 0, and the best guesses, the likeliest first."""

    position: int
    guesses: tuple[Guess, ...]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether the second text follows the first: the probability (0 to 1) that it does, and the two logits."""

    follows: float
    logits: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A checkpoint's model beside its tokenizer.

    Attributes:
        module: the handwritten model, float32, in eval mode.
        tokenizer: the checkpoint's tokenizer.
        table: the table that it was loaded through.
        config: the checkpoint's config.
        where: the checkpoint, for messages.
    """

    module: nn.Module
    tokenizer: TextTokenizer
    table: Table
    config: Mapping[str, object]
    where: str

    def encode(self, first: str, second: str | None = None) -> Encoding:
        """The word pieces of one text or of a pair.

        Raises:
            TextError: the text is empty, spells out a token that the tokenizer adds, is longer than the model's
                positions, or has word pieces that the model does not know.
        """
        for text in (first,) if second is None else (first, second):
            self._accept(text)
        encoding = self.tokenizer.encode(first, second)
        self._fit(encoding.ids, encoding.type_ids)
        return encoding

    def numbers(self, tokens: Sequence[str]) -> list[int]:
        """The numbers of word pieces.

        Raises:
            TextError: there is none, the vocabulary lacks some, or there are more than the model's positions.
        """
        known: dict[str, int] = {}
        faults = [] if tokens else ["the list of word pieces is empty"]
        for token in dict.fromkeys(tokens):
            number = self.tokenizer.tokenizer.token_to_id(token)
            if number is None:
                faults.append(f"the vocabulary has no word piece {token!r}")
            else:
                known[token] = number
        if faults:
            hint = told(
                called="pass the text itself, and the tokenizer takes it apart",
                typed="leave --pieces out, and the tokenizer takes the text apart",
            )
            raise TextError(
                Fault(code=Code.TEXT_REFUSED, where=self.where, message=message, hint=hint) for message in faults
            )
        numbers = [known[token] for token in tokens]
        self._fit(numbers, [0])
        return numbers

    def _fit(self, ids: Sequence[int], type_ids: Sequence[int]) -> None:
        """Refuse what the model has no room for."""
        if not ids:
            message = "the tokenizer makes no word pieces of this text"
            raise self._refused(Code.TEXT_REFUSED, message, "give it some words")
        positions = self.config.get("max_position_embeddings")
        if isinstance(positions, int) and len(ids) > positions:
            message = f"the text has {len(ids)} word pieces, the model has {positions} positions"
            raise self._refused(Code.TEXT_TOO_LONG, message, "shorten the text")
        for field, numbers, what in (("vocab_size", ids, "word pieces"), ("type_vocab_size", type_ids, "segments")):
            known = self.config.get(field)
            if isinstance(known, int) and max(numbers) >= known:
                message = f"the tokenizer numbers {what} up to {max(numbers)} here, config.json has {field} = {known}"
                raise self._refused(
                    Code.TOKENIZER_MISMATCH, message, "the tokenizer is another model's: take the right one"
                )

    def run(self, encoding: Encoding, *, output_hidden_states: bool = False) -> Any:  # whatever the module returns
        """The module's output for one text, a batch of 1, on request with its ``hidden_states`` [1 s e]."""
        inputs = {
            "input_ids": torch.tensor([encoding.ids]),
            "attention_mask": torch.tensor([encoding.attention_mask]),
            "token_type_ids": torch.tensor([encoding.type_ids]),
        }  # [1 s] each
        given: dict[str, Any] = {**for_port(self.table.inputs, inputs, torch.float32)}
        if output_hidden_states:
            given["output_hidden_states"] = True
        with torch.inference_mode():
            return self.module(**given)

    def _accept(self, text: str) -> None:
        if not text.strip():
            raise self._refused(Code.TEXT_REFUSED, "the text is empty", "give it some words")
        if any("\ud800" <= one <= "\udfff" for one in text):
            raise self._refused(Code.TEXT_REFUSED, "the text is not UTF-8", "check the terminal's encoding")
        for role in ("cls_token", "sep_token"):
            token = self.tokenizer.special.get(role)
            if token is not None and token in text:
                message = f"the text spells out {token!r}, which the tokenizer adds by itself"
                hint = "leave it out, and pass what follows [SEP] as the second text"
                raise self._refused(Code.TEXT_REFUSED, message, hint)

    def _refused(self, code: Code, message: str, hint: str) -> TextError:
        return TextError(Fault(code=code, where=self.where, message=message, hint=hint))


def open_text_model(
    source: Source = None,
    task: str | None = None,
    *,
    table: Table | str | Path | None = None,
    into: Into = None,
    architecture: str | None = None,
    revision: str | None = None,
    trust: bool = False,
) -> TextModel:
    """Load a checkpoint's model and its tokenizer.

    Args:
        source: as in :func:`porting.load`; None for the embedded checkpoint.
        task: how the name of the architecture ends, :data:`MASKED_WORDS` or :data:`NEXT_SENTENCE`; None to go by what
            the checkpoint holds, or by ``architecture``.
        table, into, architecture, revision, trust: as in :func:`porting.load`.

    Raises:
        TextError: the checkpoint does not have the head that the task needs.
        TokenizerError: it has no tokenizer, or one that cannot be used.
        CheckpointError, TableError, PlanError, TargetError: as :func:`porting.load`.
    """
    checkpoint = open_checkpoint(embedded_checkpoint() if source is None else source, revision=revision)
    chosen = find_table(table, checkpoint.config)
    tokenizer = read_tokenizer(checkpoint.path, where=checkpoint.location)
    architecture = architecture if task is None else _architecture(chosen, checkpoint, task)
    module = load(checkpoint, into, chosen, architecture=architecture, dtype=torch.float32, trust=trust)
    return TextModel(
        module=module,
        tokenizer=tokenizer,
        table=chosen,
        config=checkpoint.config,
        where=checkpoint.location,
    )


def fill_mask(
    text: str,
    source: Source = None,
    *,
    pair: str | None = None,
    top: int = 5,
    table: Table | str | Path | None = None,
    revision: str | None = None,
    trust: bool = False,
) -> tuple[Blank, ...]:
    """Guess the words that are masked in a text.

    Args:
        text: a text with at least one mask, ``[MASK]`` in most vocabularies.
        source: as in :func:`porting.load`; None for the embedded checkpoint.
        pair: a second segment that goes after the first.
        top: how many guesses for each mask, at least 1.
        table, revision, trust: as in :func:`porting.load`.

    Returns:
        One :class:`Blank` for each mask, in their order.

    Raises:
        TextError: there is no mask in the text, or the checkpoint has no head that guesses words.
        TokenizerError: it has no tokenizer, or one that cannot be used.
        CheckpointError, TableError, PlanError, TargetError: as :func:`porting.load`.

    >>> (blank,) = fill_mask("Return the [MASK] of the string.", top=2)
    >>> [guess.token for guess in blank.guesses]
    ['number', 'string']
    """
    if top < 1:
        raise TextError(Fault(code=Code.TEXT_REFUSED, message=f"top is {top}, and at least 1 is expected"))
    model = open_text_model(source, MASKED_WORDS, table=table, revision=revision, trust=trust)
    mask = model.tokenizer.mask
    if mask is None:
        message = f"{model.tokenizer.where} has no token for a masked word"
        hint = "name it as mask_token in tokenizer_config.json"
        raise TextError(Fault(code=Code.NO_MASK, where=model.where, message=message, hint=hint))
    encoding = model.encode(text, pair)
    positions = [place for place, token in enumerate(encoding.tokens) if token == mask]
    if not positions:
        message = f"the text has no {mask}, so there is nothing to guess"
        hint = f"write {mask} in the place of a word"
        raise TextError(Fault(code=Code.NO_MASK, message=message, hint=hint))
    logits: Tensor = model.run(encoding).logits[0, positions]  # [masks v]
    best = torch.softmax(logits.double(), dim=-1).topk(min(top, logits.shape[-1]))
    return tuple(
        Blank(
            position=position,
            guesses=tuple(
                Guess(token=model.tokenizer.spell(token), probability=probability)
                for token, probability in zip(tokens, probabilities, strict=True)
            ),
        )
        for position, tokens, probabilities in zip(positions, best.indices.tolist(), best.values.tolist(), strict=True)
    )


def next_sentence(
    first: str,
    second: str,
    source: Source = None,
    *,
    table: Table | str | Path | None = None,
    revision: str | None = None,
    trust: bool = False,
) -> Verdict:
    """Judge whether the second text follows the first.

    Args:
        first, second: the texts.
        source: as in :func:`porting.load`; None for the embedded checkpoint.
        table, revision, trust: as in :func:`porting.load`.

    Raises:
        TextError: the checkpoint has no next-sentence head.
        TokenizerError: it has no tokenizer, or one that cannot be used.
        CheckpointError, TableError, PlanError, TargetError: as :func:`porting.load`.

    >>> verdict = next_sentence("Open the file.", "If it cannot be opened, an error is raised.")
    >>> 0 <= verdict.follows <= 1
    True
    """
    model = open_text_model(source, NEXT_SENTENCE, table=table, revision=revision, trust=trust)
    logits: Tensor = model.run(model.encode(first, second)).logits[0].double()  # [2]
    follows, not_ = logits.tolist()
    return Verdict(follows=torch.softmax(logits, dim=-1)[0].item(), logits=(follows, not_))


def _architecture(table: Table, checkpoint: Checkpoint, task: str) -> str:
    """The table's architecture for a task, if the checkpoint holds what it needs."""
    found = next((one for one in table.architectures if one.name.endswith(task)), None)
    if found is None:
        message = f"table '{table.name}' has no architecture for this: none of its names ends in {task}"
        raise TextError(Fault(code=Code.NO_HEAD, where=table.where, message=message, hint="pass another table"))
    names = set(checkpoint.tensors)
    missing = [one for one in found.holds if not {one, one.removeprefix(table.prefix)} & names]
    if missing:
        message = f"the checkpoint has no {found.name} head: it lacks {', '.join(map(repr, missing))}"
        hint = "take a checkpoint that was saved with its pre-training heads"
        raise TextError(Fault(code=Code.NO_HEAD, where=checkpoint.location, message=message, hint=hint))
    return found.name
