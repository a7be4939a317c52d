"""A small task of classification, made from the documentation that every Python carries: whose sentence is this?

    python -m scripts.docstring_task train.tsv test.tsv

The sentences come from :mod:`scripts.docstring_corpus`; the label is the package.  None of these packages was among the
text that the bundled checkpoint was trained on (its card lists what was held out).
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from scripts.docstring_corpus import Document, read_standard_library

PACKAGES = ("collections", "ctypes", "imaplib", "io", "smtplib", "subprocess")


def draw_task(
    documents: Iterable[Document], *, per_label: int, seed: int, packages: Iterable[str] = PACKAGES
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Sentences with their package: so many of each to learn from, all others to test with.

    Args:
        documents: the corpus.
        per_label: how many of each package there are to learn from.
        seed: of the order in which they are drawn.
        packages: the labels.
    """
    documents = list(documents)
    rng = random.Random(seed)  # noqa: S311 - repeatable on purpose
    learnt, rest = [], []
    for package in sorted(packages):
        sentences = [
            sentence for document in documents if document.package == package for sentence in document.sentences
        ]
        drawn = [(sentence, package) for sentence in rng.sample(sentences, len(sentences))]
        learnt += drawn[:per_label]
        rest += drawn[per_label:]
    return learnt, rest


def main(
    learn: Annotated[Path, typer.Argument(help="The file to write the examples to that are learnt from.")],
    test: Annotated[Path, typer.Argument(help="The file to write the others to.")],
    per_label: Annotated[int, typer.Option(min=2, help="Sentences of each package to learn from.")] = 16,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
) -> None:
    """Write the task as two tab-separated files."""
    parts = draw_task(read_standard_library(), per_label=per_label, seed=seed)
    for path, part in zip((learn, test), parts, strict=True):
        lines = ["text\tlabel", *(f"{sentence}\t{package}" for sentence, package in part)]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
