"""Several forward passes in lockstep: at any moment one of them runs, up to its next step.

They are threads because a forward pass cannot be suspended otherwise. Only one thread runs at a time, so nothing needs
a lock and the order of the steps is deterministic.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

Ready = Callable[[], bool]


class LockstepCancelled(BaseException):
    """Raised in a member that must end because another one failed."""


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
    """Runs members in turn; a leader continues only when no follower can."""

    def __init__(self) -> None:
        self._members: list[_Member] = []
        self._local = threading.local()
        self._returned = threading.Semaphore(0)

    def add(self, work: Callable[[], None], *, leads: bool = False) -> None:
        """Add a member, which begins when :meth:`run` gives it its first turn."""
        self._members.append(_Member(work, leads=leads))

    def wait(self, ready: Ready = lambda: True) -> None:
        """Let other members continue until ``ready`` holds; called by a member.

        Raises:
            LockstepCancelled: another member failed.
        """
        member: _Member = self._local.member
        member.ready = ready
        self._returned.release()
        member.turn.acquire()
        if member.leaving:
            raise LockstepCancelled

    def run(self) -> None:
        """Run all members to their end.

        Raises:
            RuntimeError: the members wait for each other.
            BaseException: what a member raised, after the others have ended.
        """
        threads = [threading.Thread(target=self._run_member, args=(member,), daemon=True) for member in self._members]
        for thread in threads:
            thread.start()
        try:
            while not all(member.done for member in self._members):
                member = self._next()
                self._resume(member)
                if member.error is not None:
                    raise member.error
        finally:
            for member in self._members:
                member.leaving = True
                while not member.done:
                    self._resume(member)
            for thread in threads:
                thread.join()

    def _next(self) -> _Member:
        waiting = [member for member in self._members if not member.done and member.ready()]
        if not waiting:
            raise RuntimeError("passes wait for activations that no pass computes")
        return min(waiting, key=lambda member: (member.leads, member.steps))

    def _resume(self, member: _Member) -> None:
        member.steps += 1
        member.turn.release()
        self._returned.acquire()

    def _run_member(self, member: _Member) -> None:
        self._local.member = member
        member.turn.acquire()
        try:
            if not member.leaving:
                member.work()
        except BaseException as error:  # noqa: BLE001  # it is raised again where the lockstep was started
            member.error = error
        member.done = True
        self._returned.release()
