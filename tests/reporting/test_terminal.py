"""What a report says on a terminal: causes, the bound of a table, outputs that have numbers for names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor, nn

import porting
from porting.causes.finding import Finding, Suspicion
from porting.reporting.outcome import Outcome
from porting.reporting.terminal import cause_lines, summary_lines
from porting.verification import Case


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


def test_the_first_lines_say_how_many_more_causes_there_are() -> None:
    causes = [Finding(probes=("up",), name=name, fix=name, difference=0.1, residual=0.0) for name in ("eps", "heads")]
    nothing = SimpleNamespace(impurities=())

    def said(some: list[Finding]) -> list[str]:
        report = SimpleNamespace(guilty=(), broken=(), causes=some, scope=nothing)
        return [line.plain for line in summary_lines(cast(Outcome, report))]

    assert said(causes) == ["  cause: eps; and 1 more, below", "  fix: eps"]
    assert said(causes[:1]) == ["  cause: eps", "  fix: eps"]


class Pair(nn.Module):
    """Returns a tuple, whose members have no names."""

    def __init__(self, extra: float) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.extra = extra

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.up(x) * self.extra, x


def pair_report(within: str, extra: float) -> porting.Report:
    rules = '[tensors]\n"up.{w:weight,bias}" = "up.{w:weight,bias}"\n'
    table = f'{rules}{within}[inputs]\n"x" = "x"\n[probes]\n"up" = "up"\n". -> 0" = ". -> 0"\n'
    inputs = [Case("mine", {"x": torch.randn(3, 4, generator=torch.Generator().manual_seed(0))})]
    return porting.verify(
        reference=Pair(1.0),
        into=Pair(extra),
        table=porting.parse_table(table),
        inputs=inputs,
        causes=False,
        trials=False,
    )


def test_an_output_that_has_a_number_for_a_name_is_called_output() -> None:
    assert "\noutput compared: output 1; output 0 (paired in [probes])\n" in str(pair_report("", 1.0))


def test_a_difference_beyond_the_bound_of_the_table_says_so() -> None:
    bound = '[approximate]\nreason = "a factor"\nwithin = 1e-3\n'
    assert "and is off by more than the 1e-03 of the scale that the table allows" in str(pair_report(bound, 1.1))
    assert ", within the 1e-03 of the scale that the table allows" in str(pair_report(bound, 1.0001))
    assert "that the table allows" not in str(pair_report("", 1.1))
