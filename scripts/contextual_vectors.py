"""How a word's vector depends on its sentence: cosine similarities between its static vector and its layers.

    python -m scripts.contextual_vectors
    python -m scripts.contextual_vectors --source google-bert/bert-base-uncased
    python -m scripts.contextual_vectors --word table "He wrote a table." "The table has four legs."
    python -m scripts.contextual_vectors --png vectors.png

The static vector is the word's row of the embedding table, the same in every sentence; the others are the outputs of
the first and of the last layer at the word's place.  A word of several pieces is the mean of theirs.  The picture has
every layer.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import torch
from tokenizers import Encoding
from torch import Tensor, nn

from porting.atomic import write_file
from porting.errors import Code, Fault, PortingError
from porting.text import TextError, TextModel, open_text_model

WORD = "bank"
SENTENCES = (
    "I accessed the bank account.",
    "He transferred the deposit money into the bank account.",
    "We play soccer at the bank of the river.",
)


@dataclass(frozen=True, kw_only=True)
class Similarity:
    """A row of the table.

    Attributes:
        one, other: what is compared: 0 for the static vector, else the sentence by its number from 1 on.
        layers: the cosine of the vectors in the embeddings and after each layer (the static vector has no layers).
    """

    one: int
    other: int
    layers: tuple[float, ...]

    @property
    def first(self) -> float:
        """The cosine after the first layer."""
        return self.layers[1]

    @property
    def last(self) -> float:
        """The cosine after the last layer."""
        return self.layers[-1]


def similarities(model: TextModel, word: str, sentences: Sequence[str]) -> list[Similarity]:
    """The static vector against the word in the first sentence, and that against the word in each other sentence.

    Raises:
        TextError: a sentence does not contain the word, or cannot be read.
    """
    encodings = [model.encode(sentence) for sentence in sentences]
    places = [_places(word, sentence, one) for sentence, one in zip(sentences, encodings, strict=True)]
    contextual = [_layers(model, one, at) for one, at in zip(encodings, places, strict=True)]
    ids = [encodings[0].ids[place] for place in places[0]]
    static = _embedding_table(model)[ids].mean(dim=0)  # [e]
    first = contextual[0]
    rows = [Similarity(one=0, other=1, layers=tuple(_cosine(static, vector) for vector in first))]
    rows += [
        Similarity(one=1, other=number, layers=tuple(map(_cosine, first, other)))
        for number, other in enumerate(contextual[1:], 2)
    ]
    return rows


def _places(word: str, sentence: str, encoding: Encoding) -> list[int]:
    """The word pieces of the word's first occurrence, upper and lower case alike."""
    found = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", sentence, re.IGNORECASE)
    if found is None:
        message = f"the word {word!r} is not in the sentence {sentence!r}"
        raise TextError(Fault(code=Code.TEXT_REFUSED, message=message, hint="each sentence has to contain it"))
    spans = enumerate(encoding.offsets)
    return [place for place, (start, stop) in spans if found.start() < stop and start < found.end()]


def _layers(model: TextModel, encoding: Encoding, places: list[int]) -> list[Tensor]:
    """The word's vector [e] in the embeddings and after each layer."""
    states = model.run(encoding, output_hidden_states=True).hidden_states  # [1 s e] each
    return [state[0, places].mean(dim=0) for state in states]


def _embedding_table(model: TextModel) -> Tensor:
    """The word embeddings [v e]: the embedding that has a row for each word piece."""
    tables = [part.weight for part in model.module.modules() if isinstance(part, nn.Embedding)]
    words = model.config.get("vocab_size")
    return next(table for table in tables if table.shape[0] == words).detach()


def _cosine(one: Tensor, other: Tensor) -> float:
    return torch.cosine_similarity(one.double(), other.double(), dim=0).item()


def table(rows: Sequence[Similarity], word: str, sentences: Sequence[str]) -> str:
    """The rows for a reader, with the sentences by their numbers."""
    lines = [f"{number}  {sentence}" for number, sentence in enumerate(sentences, 1)]
    lines += ["", f"{f'cosine of {word!r}':<28}{'layer 1':>9}{f'layer {len(rows[0].layers) - 1}':>10}"]
    lines += [f"{_compared(row):<28}{row.first:>9.3f}{row.last:>10.3f}" for row in rows]
    return "\n".join(lines)


def _compared(row: Similarity) -> str:
    return " - ".join(f"sentence {number}" if number else "static" for number in (row.one, row.other))


def picture(rows: Sequence[Similarity], word: str, sentences: Sequence[str]) -> bytes:
    """The cosines over the layers as a PNG, a line for each row; the sentences stand below."""
    from porting.plotting import Figure  # noqa: PLC0415  # it takes a second to import, and only --png needs it

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        axes.plot(range(len(row.layers)), row.layers, marker="o", label=_compared(row))
    axes.set_xticks(range(len(rows[0].layers)), ["embeddings", *(str(n) for n in range(1, len(rows[0].layers)))])
    axes.set_ylabel(f"cosine of {word!r}")
    axes.set_xlabel("layer\n" + "\n".join(f"{number}  {sentence}" for number, sentence in enumerate(sentences, 1)))
    axes.grid(alpha=0.3)
    axes.legend()
    written = BytesIO()
    figure.savefig(written, format="png", dpi=110, metadata={"Software": None})
    return written.getvalue()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--source", help="a checkpoint with a tokenizer (default: the embedded one)")
    parser.add_argument("--png", type=Path, help="also draw the cosines of every layer into this file")
    parser.add_argument("--word", default=WORD, help="the word to follow (default: %(default)s)")
    parser.add_argument("sentences", nargs="*", default=SENTENCES, help="sentences with the word (default: three)")
    chosen = parser.parse_args(arguments)
    try:
        model = open_text_model(chosen.source)
        rows = similarities(model, chosen.word, chosen.sentences)
        if chosen.png is not None:
            write_file(chosen.png, picture(rows, chosen.word, chosen.sentences))
    except PortingError as error:
        sys.exit("\n".join(f"error: {fault}" for fault in error.faults))
    print(table(rows, chosen.word, chosen.sentences))


if __name__ == "__main__":
    main()
