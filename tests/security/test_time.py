"""The time that a command takes: what counts, what does not, and what stops it."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import porting
from porting import limits as limits_of_commands
from porting.checkpoint import open_checkpoint
from porting.comparing.jobs import map_jobs
from porting.comparing.jobs import work as share
from porting.limits import SMALL, LimitError, charge, moving, reading, spending, untimed, watched
from porting.notation.table import parse_table
from porting.registries.weight_converters import as_weight_converters
from porting.registries.weights_mapper import as_weights_mapper
from porting.tables import find_table
from tests.small_checkpoint import write_checkpoint


def test_processor_time_is_charged_while_descriptions_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTING_LIMITS", "seconds=0")

    @reading()
    def read() -> None:
        while True:
            charge("objects", 0, where="a")

    with pytest.raises(LimitError, match=r"^a: this takes more than 0 seconds of reading descriptions"):
        read()


def test_the_time_of_making_the_rules_of_a_table_counts() -> None:
    line = ", ".join(f'"t{number}"' for number in range(3000))
    with spending() as budget:
        left, begun = budget.left, time.thread_time()
        parse_table(f'[tensors]\n"x" = [{line}]\n')
        assert left - budget.left > 0.8 * (time.thread_time() - begun)


def test_what_charges_nothing_is_stopped_by_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command looks at its time wherever it reads a description; outside of that nothing is stopped."""
    monkeypatch.setenv("PORTING_LIMITS", "seconds=0")
    before = signal.getsignal(signal.SIGPROF)

    @reading("a file")
    def forever() -> None:
        while True:
            sorted(range(10_000))

    with spending() as budget, watched():
        with pytest.raises(LimitError, match=r"^a file: this takes more than 0 seconds of reading"):
            forever()
        begun = time.process_time()
        while time.process_time() < begun + 0.3:  # seconds that do not count
            sorted(range(10_000))
        assert budget.left < 0
    assert signal.getsignal(signal.SIGPROF) is before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_a_signal_that_meets_a_finalizer_prints_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: shown.append(args.exc_type.__name__))

    class Closing:
        def __init__(self, error: Exception) -> None:
            self.error = error

        def __del__(self) -> None:
            raise self.error

    with spending() as budget, watched():
        Closing(budget.exceeded("seconds", "a file"))
        assert shown == []
        Closing(ValueError("a bug"))
    assert shown == ["ValueError"]
    Closing(budget.exceeded("seconds", "a file"))
    assert shown == ["ValueError", "LimitError"]


@pytest.mark.parametrize(
    "how", ["open", "inspect", "check", "hash", "diff", "load", "convert", "verify_files", "mapper", "converters"]
)
def test_the_time_of_each_function_counts(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of it grows with the number of tensors."""
    write_checkpoint(tmp_path / "m")
    checkpoint = open_checkpoint(tmp_path / "m")
    module, table = porting.load(checkpoint), find_table(None, checkpoint.config)
    porting.convert(checkpoint, tmp_path / "port", table)
    renames = parse_table('[tensors]\n"h.{i}.ln.weight" = "layers.{i}.norm.weight"')
    work: dict[str, Callable[[], object]] = {
        "open": lambda: open_checkpoint(tmp_path / "m"),
        "inspect": lambda: porting.inspect_checkpoint(tmp_path / "m"),
        "check": lambda: porting.check(table, checkpoint, module),
        "hash": lambda: porting.digest(checkpoint),
        "diff": lambda: porting.diff(checkpoint, checkpoint),
        "load": lambda: porting.load(checkpoint),
        "convert": lambda: porting.convert(checkpoint, tmp_path / "again", table),
        "verify_files": lambda: porting.verify_files(tmp_path / "port"),
        "mapper": lambda: as_weights_mapper(renames),
        "converters": lambda: as_weight_converters(renames),
    }
    work[how]()
    monkeypatch.setenv("PORTING_LIMITS", "seconds=0")
    monkeypatch.setattr(limits_of_commands, "GRANTED", 10**18)
    monkeypatch.setattr(limits_of_commands, "EACH", 0.0)
    if (tmp_path / "again").exists():
        shutil.rmtree(tmp_path / "again")
    with pytest.raises(LimitError, match="this takes more than 0 seconds"):
        work[how]()
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(("nbytes", "counted"), [(0, True), (SMALL - 1, True), (SMALL, False), (1 << 30, False)])
def test_the_time_of_small_tensors_counts(monkeypatch: pytest.MonkeyPatch, nbytes: int, counted: bool) -> None:
    """It is not their bytes that take it; in this thread and in others."""
    monkeypatch.setenv("PORTING_LIMITS", "seconds=0")

    def work(job: int) -> None:
        sum(range(10_000 + job))

    def in_threads() -> None:
        list(map_jobs(range(2000), work, lambda job: nbytes))

    def of_costs() -> None:
        share([(nbytes, work)] * 2000, [lambda: 1] * 2, lambda: None)

    def here() -> None:
        for number in range(2000):
            with moving(nbytes):
                work(number)

    for how in (in_threads, of_costs, here):
        with spending():
            if counted:
                with pytest.raises(LimitError, match="going through small tensors"):
                    how()
            else:
                how()


def test_the_results_of_small_and_large_jobs_keep_their_order() -> None:
    jobs = [number * 37 % 101 for number in range(3000)]
    assert list(map_jobs(jobs, lambda job: job, lambda job: SMALL * (job % 7 == 0))) == jobs
    assert list(map_jobs([], lambda job: job, lambda job: 0)) == []


def test_a_large_checkpoint_may_take_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second more for each 500 MB, however often it is asked for; a mixture of experts has 300 000 tensors."""
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    with spending() as budget:
        before = budget.left
        checkpoint = open_checkpoint(tmp_path)
        first = budget.left
        checkpoint.allow_time()
        assert budget.left == first
        budget.grant(600 * 10**9, "a large one")
        assert budget.left == pytest.approx(before + 1200, abs=60)


@pytest.mark.parametrize("to", [None, "bin", "npz"])
@pytest.mark.parametrize("how", ["open", "check", "hash", "diff", "load", "convert", "verify_files"])
def test_each_tensor_extends_the_time(
    how: str, to: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times what each takes in the most expensive command, so that none of a hundred thousand is refused."""
    write_checkpoint(tmp_path / "m")
    table = find_table(None, open_checkpoint(tmp_path / "m").config)
    porting.convert(tmp_path / "m", tmp_path / "port", table, to=to)
    porting.convert(tmp_path / "port", tmp_path / "source", table, to=to, reverse=True)
    checkpoint, module = open_checkpoint(tmp_path / "source"), porting.load(tmp_path / "m")
    work: dict[str, Callable[[], object]] = {
        "open": lambda: open_checkpoint(tmp_path / "source"),
        "check": lambda: porting.check(table, checkpoint, module),
        "hash": lambda: porting.digest(checkpoint),
        "diff": lambda: porting.diff(checkpoint, checkpoint),
        "load": lambda: porting.load(checkpoint),
        "convert": lambda: porting.convert(checkpoint, tmp_path / "again", table, to=to),
        "verify_files": lambda: porting.verify_files(tmp_path / "port"),
    }
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    monkeypatch.setattr(limits_of_commands, "GRANTED", 10**18)
    count = len(open_checkpoint(tmp_path / "port" if how == "verify_files" else tmp_path / "source").tensors)
    with spending() as budget:
        before = budget.left
        work[how]()
        extended = budget.left - before
        work[how]() if how == "open" else None
    assert limits_of_commands.EACH >= 3 * 0.0003
    assert extended >= 0.999 * count * limits_of_commands.EACH
    assert extended <= 4 * count * limits_of_commands.EACH
    assert how != "open" or budget.left - before == extended, "each file once"


@pytest.mark.parametrize("to", [None, "bin"])
def test_the_time_is_extended_before_the_tensors_are_read(tmp_path: Path, to: str | None) -> None:
    """A header that is refused in the end, for what its last tensor says, was allowed the time for the others."""
    tensors = {f"layers.{number}.weight": torch.zeros(2) for number in range(100)}
    if to is None:
        tensors |= {"wrong\x01": torch.zeros(2)}
        save_file(tensors, tmp_path / "model.safetensors")
    else:
        torch.save({**tensors, "wrong": print}, tmp_path / "pytorch_model.bin")
    with spending() as budget:
        with pytest.raises(porting.PortingError):
            open_checkpoint(tmp_path)
        assert budget._allowed >= 8 + 100 * limits_of_commands.EACH


def test_a_search_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes thousands of plans; ``suggest`` ends by ``--limit``."""
    monkeypatch.setenv("PORTING_LIMITS", "seconds=0,objects=5")
    with spending() as command, watched():
        with untimed(), reading():
            sum(range(1_000_000))
            charge("objects", 5, where="a")
            with pytest.raises(LimitError, match="more than 5 values"):
                charge("objects", 1, where="a")
        assert command.left >= 0
        with pytest.raises(LimitError, match="more than 0 seconds"), reading():
            sum(range(1_000_000))
