"""Text through a model: guess the words that are masked, judge whether one sentence follows another.

The model is the one that the checkpoint's table loads it into, or a module of the user's own; the tokenizer is the
checkpoint's own.  Which of a table's architectures does what is read off its name: transformers ends it in the task, in
every family.  Which output of a user's module is the logits is found by :mod:`porting.trials.logits`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypedDict, Unpack, overload

import torch
from tokenizers import Encoding
from torch import Tensor, nn

from porting.answers import Answer, Guess, Prediction, guesses, words_of
from porting.checkpoint import Checkpoint, open_checkpoint
from porting.embedded import embedded_checkpoint
from porting.errors import Code, Fault, Message, Option, PortingError, Wording
from porting.loading import Into, load
from porting.notation.table import Table
from porting.opening import Folder
from porting.plan.config import arguments
from porting.tables import chosen_for, find_table
from porting.target import with_arguments
from porting.tokenizer import TextTokenizer, read_tokenizer
from porting.tracing.devices import on_cpu, or_on_cpu
from porting.trials.inputs import for_port, positions_of
from porting.trials.logits import LogitsReader, Wanted


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of a language model.

    Attributes:
        endings: how the names of the architectures that do it end, in transformers.
        names: what their references call the logits, the likeliest first.
    """

    endings: tuple[str, ...]
    names: tuple[str, ...] = ("logits",)


MASKED_WORDS = Task(endings=("ForMaskedLM",), names=("prediction_logits", "logits"))
"""Logits [b s v] over the vocabulary, for each place of the text."""

NEXT_SENTENCE = Task(endings=("ForNextSentencePrediction",), names=("seq_relationship_logits", "logits"))
"""Logits [b 2]; class 0 = the second text follows the first."""

NEXT_TOKEN = Task(endings=("ForCausalLM", "LMHeadModel"))
"""Logits [b s v] over the vocabulary, for the token that follows each."""

TARGET_TOKEN = Task(endings=("ForConditionalGeneration", "MTModel"))
"""Logits [b t v] of an encoder-decoder, for the token that follows each of the decoder's."""

CLASSES = Task(endings=("ForSequenceClassification",))
"""Logits [b n] over the classes of a text."""


class TextError(PortingError):
    """A checkpoint cannot do the task with this text."""


@dataclass(frozen=True, kw_only=True)
class Blank:
    """A masked word: its place among the tokens, [CLS] being 0, and the best guesses, the likeliest first."""

    position: int
    guesses: tuple[Guess, ...]


@dataclass(frozen=True, kw_only=True)
class Blanks(Answer, Sequence[Blank]):
    """The masked words of a text: a sequence of :class:`Blank`, and a page with them."""

    title: ClassVar[str] = "Masked words"
    blanks: tuple[Blank, ...]

    @overload
    def __getitem__(self, place: int) -> Blank: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Blank, ...]: ...
    def __getitem__(self, place: int | slice) -> Blank | tuple[Blank, ...]:
        return self.blanks[place]

    def __len__(self) -> int:
        return len(self.blanks)

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """The guesses of each mask."""
        return tuple(
            Prediction(title=self.tokens[blank.position], guesses=blank.guesses, place=blank.position)
            for blank in self.blanks
        )


@dataclass(frozen=True, kw_only=True)
class Verdict(Answer):
    """Whether the second text follows the first: the probability (0 to 1) that it does, and the two logits."""

    title: ClassVar[str] = "Next sentence"
    follows: float
    logits: tuple[float, float]

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """Both classes."""
        classes = (("follows", self.follows), ("does not follow", 1 - self.follows))
        found = tuple(Guess(token=name, probability=probability) for name, probability in classes)
        return (Prediction(title="the second sentence", guesses=found),)


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A checkpoint's model with its tokenizer.

    Attributes:
        module: the model, float32, in eval mode.
        config: the checkpoint's config, and what the table makes of it for the module.
        reader: finds the logits in what the module computes.
        folder: where the checkpoint lies; None when it is not on this machine.
    """

    module: nn.Module
    tokenizer: TextTokenizer
    table: Table
    config: Mapping[str, object]
    where: str
    reader: LogitsReader
    folder: Folder | None = None

    @property
    def title(self) -> str:
        """The model in words."""
        return f"{type(self.module).__name__} from {self.where}"

    @property
    def vocabulary(self) -> int:
        """The size of the vocabulary: the config's, or the tokenizer's."""
        size = self.config.get("vocab_size")
        return size if isinstance(size, int) else self.tokenizer.tokenizer.get_vocab_size()

    @property
    def encodes_first(self) -> bool:
        """Whether it is an encoder-decoder."""
        return self.config.get("is_encoder_decoder") is True

    def encode(self, first: str, second: str | None = None) -> Encoding:
        """Encode a text or a pair of texts."""
        for text in (first,) if second is None else (first, second):
            self._accept(text)
        encoding = self.tokenizer.encode(first, second)
        self._fit(encoding.ids, encoding.type_ids)
        return encoding

    def numbers(self, tokens: Sequence[str]) -> list[int]:
        """The ids of tokens."""
        known: dict[str, int] = {}
        faults = [] if tokens else ["the list of tokens is empty"]
        for token in dict.fromkeys(tokens):
            number = self.tokenizer.tokenizer.token_to_id(token)
            if number is None:
                faults.append(f"the vocabulary has no token {token!r}")
            else:
                known[token] = number
        if faults:
            hint = Message(
                Wording(
                    python="pass the text itself, and the tokenizer takes it apart",
                    command="leave --pieces out, and the tokenizer takes the text apart",
                )
            )
            raise TextError(
                Fault(code=Code.TEXT_REFUSED, where=self.where, message=message, hint=hint) for message in faults
            )
        numbers = [known[token] for token in tokens]
        self._fit(numbers, [0])
        return numbers

    @property
    def positions(self) -> int | None:
        """How many tokens a row may have; None where the config sets no bound."""
        for field, shift in self.table.shifts.items():  # some positions may be nobody's
            if shift and "max_position_embeddings" in field.split("/"):
                return positions_of({"n_positions": self.config.get(self.table.config[field])})
        return positions_of(self.config)

    def _fit(self, ids: Sequence[int], type_ids: Sequence[int]) -> None:
        """Refuse ids that the model has no room for."""
        if not ids:
            message = "the tokenizer makes no tokens of this text"
            raise self._refused(Code.TEXT_REFUSED, message, "give it some words")
        positions = self.positions
        if positions is not None and len(ids) > positions:
            message = f"the text has {len(ids)} tokens, the model has {positions} positions"
            raise self._refused(Code.TEXT_TOO_LONG, message, "shorten the text")
        for field, numbers, noun in (("vocab_size", ids, "tokens"), ("type_vocab_size", type_ids, "segments")):
            known = self.config.get(field)
            if isinstance(known, int) and max(numbers) >= known:
                message = f"the tokenizer numbers {noun} up to {max(numbers)} here, config.json has {field} = {known}"
                raise self._refused(
                    Code.TOKENIZER_MISMATCH, message, "the tokenizer is another model's: take the right one"
                )

    def inputs(self, encoding: Encoding) -> dict[str, Tensor]:
        """The reference's inputs for one text, [1 s] each."""
        rows = {
            "input_ids": encoding.ids,
            "attention_mask": encoding.attention_mask,
            "token_type_ids": encoding.type_ids,
        }
        return {name: torch.tensor([rows[name]]) for name in self.taken}

    @property
    def taken(self) -> tuple[str, ...]:
        """The inputs that the reference takes, as far as a text gives them."""
        segments = self.table.inputs or isinstance(self.config.get("type_vocab_size"), int)
        return ("input_ids", "attention_mask", *(("token_type_ids",) if segments else ()))

    def arguments(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The module's forward arguments for them, by the table's [inputs]."""
        return for_port(self.table.inputs, inputs, torch.float32)

    def logits(self, inputs: Mapping[str, Tensor], wanted: Wanted) -> Tensor:
        """Run the module and find its logits, in the reference's layout."""
        with on_cpu():
            return or_on_cpu(lambda: self.reader.read(self.arguments(inputs), wanted))

    def run(self, encoding: Encoding, *, output_hidden_states: bool = False) -> Any:  # whatever the module returns
        """Run the module on one text, a batch of 1; with its ``hidden_states`` [1 s e] on request."""
        given: dict[str, Any] = {**self.arguments(self.inputs(encoding))}
        if output_hidden_states:
            given["output_hidden_states"] = True
        with torch.inference_mode(), on_cpu():
            return or_on_cpu(lambda: self.module(**given))

    def _accept(self, text: str) -> None:
        if not text.strip():
            raise self._refused(Code.TEXT_REFUSED, "the text is empty", "give it some words")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise self._refused(Code.TEXT_REFUSED, "the text is not UTF-8", "check the terminal's encoding")
        for role in ("cls_token", "sep_token"):
            token = self.tokenizer.special.get(role)
            if token is not None and token in text:
                message = f"the text spells out {token!r}, which the tokenizer adds by itself"
                hint = "leave it out, and pass what follows [SEP] as the second text"
                raise self._refused(Code.TEXT_REFUSED, message, hint)

    def _refused(self, code: Code, message: str, hint: str) -> TextError:
        return TextError(Fault(code=code, where=self.where, message=message, hint=hint))


class ModelArguments(TypedDict, total=False):
    """The arguments of :func:`porting.load` that say what a checkpoint is loaded into; all may be left out."""

    table: Table | str | Path | None
    into: Into
    architecture: str | None
    revision: str | None
    trust: bool


Source = str | os.PathLike[str] | TextModel | None
"""A checkpoint as in :func:`porting.load`, None for the embedded one; or a model that was opened already."""


def open_text_model(
    source: Source = None,
    *tasks: Task,
    table: Table | str | Path | None = None,
    into: Into = None,
    architecture: str | None = None,
    revision: str | None = None,
    trust: bool = False,
) -> TextModel:
    """Load a checkpoint's model and its tokenizer.

    Every function that takes a ``source`` and a text also takes the result, so that several texts load it once.

    Args:
        source: as in :func:`porting.load`; None for the bundled checkpoint; a model that was opened is returned as it
            is.
        *tasks: what it has to do, one of them: chooses among the table's architectures, where neither ``into`` nor
            ``architecture`` says what is built.
    """
    if isinstance(source, TextModel):
        return source
    checkpoint = open_checkpoint(embedded_checkpoint() if source is None else source, revision=revision)
    chosen = find_table(table, checkpoint.config, checkpoint.tensors)
    tokenizer = read_tokenizer(checkpoint.home, where=checkpoint.location)
    if tasks and into is None and architecture is None:
        architecture = _architecture(chosen, checkpoint, tasks)
    with chosen_for(table, into, chosen):
        module = load(checkpoint, into, chosen, architecture=architecture, dtype=torch.float32, trust=trust)
    module = with_arguments(module, chosen.arguments, chosen.input_names, chosen.row_inputs)
    return TextModel(
        module=module,
        tokenizer=tokenizer,
        table=chosen,
        config={**arguments(chosen, checkpoint.config), **chosen.defaults, **checkpoint.config},
        where=checkpoint.location,
        reader=LogitsReader(module, chosen, type(module).__name__),
        folder=checkpoint.home,
    )


def fill_mask(
    text: str,
    source: Source = None,
    *,
    pair: str | None = None,
    top: int = 5,
    **options: Unpack[ModelArguments],
) -> Blanks:
    """Guess the words that are masked in a text.

    Args:
        text: a text with at least one mask, ``[MASK]`` in most vocabularies.
        source: as in :func:`porting.load`; None for the bundled checkpoint.
        pair: a second segment that goes after the first.
        top: how many guesses for each mask, at least 1.
        **options: table, into, architecture, revision and trust: as in :func:`porting.load`.

    Returns:
        A sequence with one :class:`Blank` for each mask, in their order.

    Raises:
        TextError: there is no mask in the text, or the checkpoint has no head that guesses words.
        LogitsError: no output of the module can be the logits.
        TokenizerError: the checkpoint has no tokenizer, or one that cannot be used.
        CheckpointError, TableError, PlanError, TargetError: as :func:`porting.load`.
        VerifyError: the module fails.

    >>> (blank,) = fill_mask("Return the [MASK] of the string.", top=2)
    >>> [guess.token for guess in blank.guesses]
    ['number', 'string']
    """
    require_top(top)
    model = open_text_model(source, MASKED_WORDS, **options)
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
    wanted = Wanted(axes="b s v", shape=(1, len(encoding.ids), model.vocabulary), names=MASKED_WORDS.names)
    logits = model.logits(model.inputs(encoding), wanted)[0, positions]  # [masks v]
    return Blanks(
        words=words_of(encoding),
        model=model.title,
        blanks=tuple(
            Blank(position=position, guesses=guesses(row.double().softmax(-1), model.tokenizer, top))
            for position, row in zip(positions, logits, strict=True)
        ),
    )


def next_sentence(
    first: str,
    second: str,
    source: Source = None,
    **options: Unpack[ModelArguments],
) -> Verdict:
    """Judge whether the second text follows the first.

    Args:
        first, second: the texts.
        source: as in :func:`porting.load`; None for the bundled checkpoint.
        **options: table, into, architecture, revision and trust: as in :func:`porting.load`.

    Raises:
        TextError: the checkpoint has no next-sentence head.
        LogitsError: no output of the module can be the logits.
        TokenizerError: the checkpoint has no tokenizer, or one that cannot be used.
        CheckpointError, TableError, PlanError, TargetError: as :func:`porting.load`.
        VerifyError: the module fails.

    >>> verdict = next_sentence("Open the file.", "If it cannot be opened, an error is raised.")
    >>> 0 <= verdict.follows <= 1
    True
    """
    model = open_text_model(source, NEXT_SENTENCE, **options)
    encoding = model.encode(first, second)
    wanted = Wanted(axes="b 2", shape=(1, 2), names=NEXT_SENTENCE.names)
    logits = model.logits(model.inputs(encoding), wanted)[0].double()  # [2]
    follows, not_ = logits.tolist()
    return Verdict(
        words=words_of(encoding),
        model=model.title,
        follows=torch.softmax(logits, dim=-1)[0].item(),
        logits=(follows, not_),
    )


def require_top(top: int) -> None:
    """Require that at least one guess is shown."""
    if top < 1:
        raise TextError(Fault(code=Code.TEXT_REFUSED, message=f"top is {top}, and at least 1 is expected"))


def _architecture(table: Table, checkpoint: Checkpoint, tasks: Sequence[Task]) -> str:
    """The table's architecture for one of the tasks, if the checkpoint has its head."""
    endings = tuple(ending for task in tasks for ending in task.endings)
    found = next((architecture for architecture in table.architectures if architecture.name.endswith(endings)), None)
    if found is None:
        known = ", ".join(one.name for one in table.architectures) or "none"
        message = (
            f"table '{table.name}' has no model for this: that would be one whose name ends in {' or '.join(endings)}, "
            f"and the table's [architectures] are {known}"
        )
        hint: str = Message(
            "pass your own model with ", Option("into"), " and ", Option("table"), ", or another checkpoint"
        )
        raise TextError(Fault(code=Code.NO_HEAD, where=table.where, message=message, hint=hint))
    names = set(checkpoint.tensors)
    missing = [name for name in found.holds if not {name, name.removeprefix(table.prefix)} & names]
    if missing:
        message = f"the checkpoint has no {found.name} head: it lacks {', '.join(map(repr, missing))}"
        hint = "take a checkpoint that was saved with this head"
        raise TextError(Fault(code=Code.NO_HEAD, where=checkpoint.location, message=message, hint=hint))
    return found.name
