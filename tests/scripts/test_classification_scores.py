"""Scores against their definitions, written out."""

from __future__ import annotations

import random

import pytest

from scripts.classification_scores import in_rows, score


def test_scores_are_those_of_the_definitions() -> None:
    rng = random.Random(0)  # noqa: S311 - repeatable on purpose
    labels = ("a", "b", "c", "never")
    truth = [rng.choice((0, 0, 0, 1, 2)) for _ in range(200)]
    found = [one if rng.random() < 0.6 else rng.choice((0, 1, 2)) for one in truth]
    scores = score(truth, found, labels)
    assert scores.count == 200
    assert scores.accuracy == sum(one == other for one, other in zip(truth, found, strict=True)) / 200
    assert scores.commonest == truth.count(0) / 200
    for number in range(3):
        hits = sum(one == other == number for one, other in zip(truth, found, strict=True))
        precision, recall = hits / found.count(number), hits / truth.count(number)
        assert scores.f1[number] == pytest.approx(2 * precision * recall / (precision + recall))
        assert scores.confusion[number][(number + 1) % 3] == sum(
            one == number and other == (number + 1) % 3 for one, other in zip(truth, found, strict=True)
        )
    assert scores.f1[3] == 0
    assert scores.macro_f1 == pytest.approx(sum(scores.f1) / 4)


def test_the_table_has_a_row_for_each_true_class() -> None:
    assert in_rows(score([0, 1, 1], [1, 1, 1], ("no", "yes"))) == [
        ["true \\ predicted", "no", "yes", "F1"],
        ["no", "0", "1", "0.000"],
        ["yes", "0", "2", "0.800"],
    ]
