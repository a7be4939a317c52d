"""How often a classifier is right: accuracy, macro F1 and the table of confusions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What became of a set of examples.

    Attributes:
        labels: the classes.
        confusion: a row for each true class, a column for each predicted one: counts.
    """

    labels: tuple[str, ...]
    confusion: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        """How many examples there are."""
        return sum(map(sum, self.confusion))

    @property
    def accuracy(self) -> float:
        """The share that is right."""
        return sum(row[number] for number, row in enumerate(self.confusion)) / self.count

    @property
    def commonest(self) -> float:
        """The accuracy of always naming the commonest class of these examples."""
        return max(map(sum, self.confusion)) / self.count

    @property
    def f1(self) -> tuple[float, ...]:
        """Of each class 2 TP / (2 TP + FP + FN); 0 for one that neither occurs nor is predicted."""
        columns = [sum(row[number] for row in self.confusion) for number in range(len(self.labels))]
        return tuple(2 * row[number] / max(sum(row) + columns[number], 1) for number, row in enumerate(self.confusion))

    @property
    def macro_f1(self) -> float:
        """The mean of :attr:`f1` over all classes, each counting the same."""
        return sum(self.f1) / len(self.labels)


def score(truth: Sequence[int], predicted: Sequence[int], labels: Sequence[str]) -> Scores:
    """The scores of predictions.

    Args:
        truth, predicted: class numbers, one for each example; at least one.
        labels: the names of the classes.

    >>> scores = score([0, 0, 1, 1], [0, 1, 1, 1], ["ham", "spam"])
    >>> scores.confusion, scores.accuracy, round(scores.macro_f1, 3)
    (((1, 1), (0, 2)), 0.75, 0.733)
    """
    counts = [[0] * len(labels) for _ in labels]
    for right, found in zip(truth, predicted, strict=True):
        counts[right][found] += 1
    return Scores(labels=tuple(labels), confusion=tuple(map(tuple, counts)))


def in_rows(scores: Scores) -> list[list[str]]:
    """The table of confusions as cells: a head, then for each class its row and its F1."""
    return [
        ["true \\ predicted", *scores.labels, "F1"],
        *(
            [label, *(f"{count:,}" for count in row), f"{f1:.3f}"]
            for label, row, f1 in zip(scores.labels, scores.confusion, scores.f1, strict=True)
        ),
    ]
