"""The limit is that of all of it, and what was found by then is said and written."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from porting.suggesting import Verdict, suggest
from porting.suggesting.subjects import guarded_run
from porting.suggesting.subjects.guarded_run import OutOfTime
from porting.suggesting.verdict.proof import Proof, prove
from tests.suggesting.test_verdicts import Plain
from tests.zoo.position_buffer import PositionBuffer


class Slow(PositionBuffer):
    """Each forward pass takes a third of a second, in which nothing is computed."""

    runs = 0

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        Slow.runs += 1
        time.sleep(0.3)
        return super().forward(ids, keep, segments)


def test_a_forward_that_takes_long_does_not_go_beyond_it(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_run, "PATIENCE", 1.0)
    told: list[str] = []
    found = suggest(source, Slow, limit=2.0, progress=lambda what, done, total: told.append(what))
    assert found.verdict is Verdict.NOT_FOUND
    assert [reason.kind for reason in found.reasons] == ["bound"]
    assert found.reasons[0].said.startswith(f"the limit of 2 s was met while {told[-1]}, and nothing was found by then")
    assert found.table.rules == ()
    assert Slow.runs < 10, "not the hundreds that its search takes"


class Mixed(PositionBuffer):
    """The rows of a batch depend on each other, which shows before any weight is looked for."""

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        out = super().forward(ids, keep, segments)
        return out + out.sum(0, keepdim=True)


def test_what_is_known_before_the_search_is_said_where_there_is_no_time_for_it(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def searched(*args: Any) -> None:
        raise OutOfTime

    monkeypatch.setattr("porting.suggesting.pipeline._searched", searched)
    found = suggest(source, Mixed)
    assert found.verdict is Verdict.IMPOSSIBLE
    assert [reason.kind for reason in found.reasons] == ["rows", "bound"]


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", ["twin", "checkpoint"])
def test_a_proof_that_takes_too_long_is_not_waited_for(
    source: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def proven(*args: Any, small: bool, **named: Any) -> Proof:  # as the function that it stands for
        if small == (stage == "twin"):
            raise OutOfTime
        return prove(*args, small=small, **named)

    monkeypatch.setattr("porting.suggesting.pipeline.prove", proven)
    found = suggest(source, Plain)
    assert len(found.table.rules) > 8
    if stage == "twin":
        assert found.verdict is Verdict.NOT_FOUND
        assert (
            "# - the limit was met before the proof had ended: a larger limit gives it more" in found.text.splitlines()
        )
    else:
        assert found.verdict is Verdict.TRUNK
        assert found.proof.startswith("Proven in float64 on a small random model of the checkpoint's architecture:")
        assert found.proven_on == "a small twin"
