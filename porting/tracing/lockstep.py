"""Several forward passes in lockstep: one step of one of them at a time.

They are threads, because a pass cannot be left in the middle otherwise; only one runs at any moment, so nothing needs a
lock and the order of steps is always the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

Ready = Callable[[], bool]


class LockstepCancelled(BaseException):
    """A member is told to leave, since another one failed."""


class _Member:
    def __init__(self, work: Callable[[], None], *, leads: bool) -> None:
        self.work, self.leads = work, leads
        self.ready: Ready = lambda: True
        self.turn = threading.Semaphore(0)
        self.steps = 0
        self.done = False
        self.leaving = False
        self.error: BaseException | None = None


class Lockstep:
    """Members of which some lead and others follow: a leader goes on only when no follower can."""

    def __init__(self) -> None:
        self._members: list[_Member] = []
        self._here = threading.local()
        self._back = threading.Semaphore(0)

    def add(self, work: Callable[[], None], *, leads: bool = False) -> None:
        """A member; it begins when :meth:`run` gives it its first turn."""
        self._members.append(_Member(work, leads=leads))

    def wait(self, ready: Ready = lambda: True) -> None:
        """Called by a member: let the others go on until ``ready``.

        Raises:
            Left: another member failed.
        """
        member: _Member = self._here.member
        member.ready = ready
        self._back.release()
        member.turn.acquire()
        if member.leaving:
            raise LockstepCancelled

    def run(self) -> None:
        """Run all members to their end.

        Raises:
            RuntimeError: they wait for each other.
            BaseException: what a member raised; the others have left.
        """
        threads = [threading.Thread(target=self._live, args=(member,), daemon=True) for member in self._members]
        for thread in threads:
            thread.start()
        try:
            while not all(member.done for member in self._members):
                member = self._next()
                self._give(member)
                if member.error is not None:
                    raise member.error
        finally:
            for member in self._members:
                member.leaving = True
                while not member.done:
                    self._give(member)
            for thread in threads:
                thread.join()

    def _next(self) -> _Member:
        waiting = [member for member in self._members if not member.done and member.ready()]
        if not waiting:
            raise RuntimeError("passes wait for activations that no pass computes")
        return min(waiting, key=lambda member: (member.leads, member.steps))

    def _give(self, member: _Member) -> None:
        member.steps += 1
        member.turn.release()
        self._back.acquire()

    def _live(self, member: _Member) -> None:
        self._here.member = member
        member.turn.acquire()
        try:
            if not member.leaving:
                member.work()
        except BaseException as error:  # noqa: BLE001  # it is raised again where the lockstep was started
            member.error = error
        member.done = True
        self._back.release()
