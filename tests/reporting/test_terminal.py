"""Causes in words: what stays unknown alike is said once, and what would explain nothing is not said."""

from __future__ import annotations

from porting.causes.finding import Finding, Suspicion
from porting.reporting.terminal import cause_lines


def unknown(layer: int, *shares: float) -> Finding:
    names = ("exact GELU", "ReLU", "quick GELU")
    near = tuple(
        Suspicion(name=name, detail="", residual=0.1, share=share) for name, share in zip(names, shares, strict=False)
    )
    return Finding(probes=(f"layers.{layer}.act",), difference=0.1, residual=0.1, nearest=near)


def lines(*causes: Finding) -> list[str]:
    return [line.plain for line in cause_lines(causes)]


def test_layers_that_stay_unknown_alike_are_one_block() -> None:
    assert lines(unknown(0, 0.41, 0.2), unknown(1, 0.47, 0.2), unknown(2, 0.44, 0.2)) == [
        "cause: unknown, at layers.{0-2}.act",
        "  nearest: exact GELU would explain 41 to 47 % of it",
        "  nearest: ReLU would explain 20 % of it",
    ]


def test_others_are_blocks_of_their_own() -> None:
    assert lines(unknown(0, 0.41), unknown(1, 0.3, 0.2)) == [
        "cause: unknown, at layers.0.act",
        "  nearest: exact GELU would explain 41 % of it",
        "cause: unknown, at layers.1.act",
        "  nearest: exact GELU would explain 30 % of it",
        "  nearest: ReLU would explain 20 % of it",
    ]


def test_what_would_explain_nothing_is_not_listed() -> None:
    assert lines(unknown(0, 0.004, 0.0)) == ["cause: unknown, at layers.0.act"]


def test_what_reproduces_the_probe_and_nothing_else_says_so() -> None:
    assert lines(unknown(0, 1.0))[1] == (
        "  nearest: exact GELU would explain 100 % of it, and does not reproduce the other batches or the output"
    )
