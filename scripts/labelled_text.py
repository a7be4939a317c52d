"""Texts with a label each, in a tab-separated file: one example a line, ``text<TAB>label``.

A first line that names its columns (``text<TAB>label``) is a header.  Blank lines say nothing.  Quotes have no meaning:
a text is what stands before the tab.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SHOWN = 10
"""Bad lines that are named; of the others there is only the number."""

HEADERS = ({"text", "sentence", "sentences", "texts"}, {"label", "labels", "class", "category"})


class TaskError(Exception):
    """What was asked for cannot be learnt: a file cannot be used, or a setting.

    Attributes:
        lines: what is wrong, one line each.
    """

    def __init__(self, *lines: str) -> None:
        self.lines = lines
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Example:
    """A text, its label, and the line of the file that it stands in, from 1."""

    text: str
    label: str
    line: int


def read_examples(path: Path, *, labels: Sequence[str] | None = None) -> list[Example]:
    """The examples of a file, in its order.

    Args:
        path: the file, in UTF-8.
        labels: the labels that there are; None to take what comes.

    Raises:
        TaskError: it cannot be read, has no examples, or lines that are none; all of them, up to ``SHOWN``.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise TaskError(f"{path}: {error.strerror or error}") from error
    examples: list[Example] = []
    faults: list[str] = []
    for number, content in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            line = content.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            faults.append(f"{path}:{number}: byte {error.start + 1} of the line is not UTF-8")
            continue
        if not line.strip():
            continue
        fields = [field.strip() for field in line.split("\t")]
        if number == 1 and len(fields) == len(HEADERS) and _names_columns(fields):
            continue
        fault = _fault(fields, labels)
        if fault:
            faults.append(f"{path}:{number}: {fault}")
        else:
            examples.append(Example(fields[0], fields[1], number))
    if faults:
        more = [f"{path}: and {len(faults) - SHOWN:,} more bad lines"] if len(faults) > SHOWN else []
        raise TaskError(*faults[:SHOWN], *more)
    if not examples:
        raise TaskError(f"{path}: it holds no example; expected lines of text<TAB>label")
    return examples


def _names_columns(fields: Sequence[str]) -> bool:
    return all(field.lower() in names for field, names in zip(fields, HEADERS, strict=True))


def _fault(fields: Sequence[str], labels: Sequence[str] | None) -> str:
    """What is wrong with a line of these fields; empty when nothing is."""
    if len(fields) != 2:
        tabs = "no tab" if len(fields) == 1 else f"{len(fields) - 1} tabs"
        return f"it has {tabs}; expected one, text<TAB>label"
    text, label = fields
    if not text or not label:
        return f"the {'label' if text else 'text'} is empty"
    if any(unicodedata.category(one) == "Cc" for one in label):
        return f"the label {label!r} has a control character"
    if labels is not None and label not in labels:
        known = ", ".join(map(repr, labels[:SHOWN])) + (", ..." if len(labels) > SHOWN else "")
        return f"the label {label!r} is not in the training file, which has {known}"
    return ""


def labels_of(examples: Sequence[Example], path: Path) -> tuple[str, ...]:
    """The labels, numbers in the order of numbers and words in that of words: their places are the class numbers.

    Raises:
        TaskError: there is nothing to tell apart, or every text has a label of its own.
    """
    found = {example.label for example in examples}
    if len(found) < 2:
        raise TaskError(f"{path}: every line has the label {found.pop()!r}; expected at least two labels")
    if len(found) == len(examples):
        raise TaskError(
            f"{path}: no label occurs twice in {len(examples):,} lines; expected text<TAB>label, are they swapped?"
        )
    if all(label.isascii() and label.isdigit() for label in found):
        return tuple(sorted(found, key=lambda label: (int(label), label)))
    return tuple(sorted(found))
