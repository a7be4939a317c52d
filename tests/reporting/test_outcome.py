"""A row for each layer, whatever the layers are called and however many stacks there are."""

from __future__ import annotations

import pytest

from porting.reporting.outcome import rows_of
from porting.verification import Probe, View


def labels(*points: str) -> list[tuple[str, tuple[str, ...]]]:
    probes = [Probe(reference=point, port=point, meaning=View(end_to_end=0.0)) for point in points]
    rows = rows_of(probes)
    assert sorted(probe.port for row in rows for probe in row.probes) == sorted(points)
    return [(row.label, row.columns) for row in rows]


def test_what_lies_in_a_layer_shares_its_row() -> None:
    points = ("emb", "bert.layers.0.attention.query", "bert.layers.0.core -> scores", "bert.layers.0", "bert.layers.1")
    assert labels(*points) == [
        ("emb", ("output",)),
        ("layer 0", ("attention.query", "core -> scores", "output")),
        ("layer 1", ("output",)),
    ]


def test_a_layers_own_attention_is_in_its_row() -> None:
    assert labels("blocks.0 -> probabilities", "blocks.0", "blocks.1 -> 1") == [
        ("layer 0", ("-> probabilities", "output")),
        ("layer 1", ("-> 1",)),
    ]


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        (("encoder.layers.0", "decoder.layers.0", "decoder.layers.1.x"), ["encoder 0", "decoder 0", "decoder 1"]),
        (("m.encoder.layers.0", "m.decoder.layers.0"), ["encoder 0", "decoder 0"]),
        (("layers.0", "head.0", "head.2"), ["layers 0", "head 0", "head 2"]),
        (("layers.0", "layers.old.0"), ["layers 0", "old 0"]),
        (("0", "1.norm", "head.0"), ["layer 0", "layer 1", "head 0"]),
        (("0", "1.norm"), ["layer 0", "layer 1"]),
    ],
)
def test_each_stack_of_layers_has_rows_of_its_own(points: tuple[str, ...], expected: list[str]) -> None:
    assert [label for label, _ in labels(*points)] == expected


def test_a_second_call_is_in_the_row_of_the_first() -> None:
    assert labels("layers.0", "layers.0 #2", "head #2") == [("layer 0", ("output", "#2")), ("head #2", ("output",))]
