"""Threads that share jobs: none is at work any more when the call has ended, whatever ended it."""

from threading import Event, Thread

import pytest

from porting.cli.output import shortage
from porting.comparing.jobs import work


def failing_starts(monkeypatch: pytest.MonkeyPatch, error: BaseException, *, first: int) -> None:
    """Let :meth:`Thread.start` fail from the thread of that number on."""
    start, started = Thread.start, list[Thread]()

    def failing(thread: Thread) -> None:
        started.append(thread)
        if len(started) > first:
            raise error
        start(thread)

    monkeypatch.setattr(Thread, "start", failing)


@pytest.mark.parametrize("first", [0, 1])
def test_a_signal_while_a_thread_is_started_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    failing_starts(monkeypatch, KeyboardInterrupt(), first=first)
    with pytest.raises(KeyboardInterrupt):
        work([(1, lambda owned: None)] * 9, [lambda: None] * 2)


def test_a_thread_that_the_system_does_not_start_is_a_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_starts(monkeypatch, RuntimeError("can't start new thread"), first=1)
    with pytest.raises(RuntimeError, match="can't start new thread") as caught:
        work([(1, lambda owned: None)] * 9, [lambda: None] * 2)
    assert shortage(caught.value)


def test_a_second_signal_does_not_leave_a_thread_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, done, stop, join, calls = Event(), list[int](), Event(), Thread.join, list[int]()

    def job(owned: None) -> None:
        begun.set()
        assert stop.wait(60)  # what a long job looks at
        done.append(1)

    def joined(thread: Thread, timeout: float | None = None) -> None:
        begun.wait(60)
        calls.append(1)
        if len(calls) < 4:
            raise KeyboardInterrupt(len(calls))
        join(thread, timeout)

    monkeypatch.setattr(Thread, "join", joined)
    with pytest.raises(KeyboardInterrupt):
        work([(1, job)], [lambda: None], stop=stop)
    assert done == [1]
