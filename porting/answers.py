"""A model's output for a text: tokens, predictions with their probabilities, and a page that shows both."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Encoding
from torch import Tensor

from porting.atomic import write_file
from porting.errors import Code, Fault, PortingError
from porting.tokenizer import TextTokenizer


class AnswerError(PortingError):
    """An answer cannot be written to the given file."""


@dataclass(frozen=True, kw_only=True)
class Guess:
    """A token or a label with its probability, 0 to 1."""

    token: str
    probability: float


@dataclass(frozen=True, kw_only=True)
class Word:
    """A token of a text as a page shows it.

    Attributes:
        special: whether the tokenizer added it.
        probability: what the model gave it, 0 to 1; None for a token that was given to the model.
    """

    text: str
    special: bool = False
    probability: float | None = None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One prediction of a model.

    Attributes:
        guesses: the likeliest first.
        place: the number of the word that it is about; None where it is about all of them.
    """

    title: str
    guesses: tuple[Guess, ...]
    place: int | None = None


@dataclass(frozen=True, kw_only=True)
class Answer(ABC):
    """A model's output for a text.  A notebook shows it as a page.

    Attributes:
        words: the tokens, special ones included.
    """

    words: tuple[Word, ...]
    model: str

    @property
    @abstractmethod
    def title(self) -> str:
        """The title of the page."""

    @property
    @abstractmethod
    def predictions(self) -> tuple[Prediction, ...]:
        """The predictions, in the order of the text."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """The spellings of the tokens."""
        return tuple(word.text for word in self.words)

    @property
    def result(self) -> str:
        """The text that the page shows in full, such as what was generated; empty for none."""
        return ""

    def to_html(self) -> str:
        """A self-contained page with the tokens and each prediction."""
        from porting.pages import render_page  # noqa: PLC0415  # jinja2 is for those who look

        shown = " ".join(self.tokens[:12]) + (" …" if len(self.words) > 12 else "")
        values = {
            "answer": self,
            "text": shown,
            "asked": {prediction.place for prediction in self.predictions if prediction.place is not None},
            "generated": any(word.probability is not None for word in self.words),
        }
        return render_page("answer.html", values, styles=["answer.css"])

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to a file, replacing what is there.

        Args:
            path: the file, which ends in ``.html``.

        Returns:
            The file.

        Raises:
            AnswerError: it has another ending.
            CheckpointError: it cannot be written, or is a link or no file.
        """
        file = Path(path)
        if file.suffix.lower() != ".html":
            message = f"{file.name!r} does not end in .html"
            raise AnswerError(Fault(code=Code.TEXT_REFUSED, message=message, hint="the page is HTML: name it so"))
        write_file(file, self.to_html().encode())
        return file

    def _repr_html_(self) -> str:
        """The page in a frame, for a notebook."""
        from porting.pages import in_frame  # noqa: PLC0415  # as above

        return in_frame(self.to_html(), title=self.title, height=560)


def words_of(encoding: Encoding) -> tuple[Word, ...]:
    """The tokens of a text."""
    marks = zip(encoding.tokens, encoding.special_tokens_mask, strict=True)
    return tuple(Word(text=text, special=bool(special)) for text, special in marks)


def guesses(probabilities: Tensor, tokenizer: TextTokenizer, top: int) -> tuple[Guess, ...]:
    """The likeliest tokens of probabilities [v].

    Args:
        top: how many; those of no probability are left out.
    """
    best = probabilities.topk(min(top, len(probabilities)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(
        Guess(token=tokenizer.spell(number), probability=probability)
        for number, probability in pairs
        if probability > 0
    )
