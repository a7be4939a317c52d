"""Replaying a tape with some of its calls rewritten, to see what then comes out at a mark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any

from torch import Tensor

from porting.causes.tape import Call, Ref, Tape, call_again
from porting.tracing.calls import tensors_in, with_leaves

Rewrite = Callable[["Values", Call], Any]
"""The present values and a call -> what the call returns instead, a tree like its own output."""

Around = Callable[[], AbstractContextManager[object]]
"""Makes the context in which the pass was recorded, where that context changes what its calls return."""


@dataclass(frozen=True, kw_only=True)
class Alteration:
    """One way in which the reference could have been written differently.

    Attributes:
        where: the path of the module that is altered.
        rewrites: the rewritten calls, by number.
        detail: what distinguishes it from others of the same cause, ``"eps is 1e-05 where the reference has 1e-12"``.
        value: the number that was solved for, if any.
        pinned: it relies on the recorded values of earlier probes, and so cannot be part of a whole model.
    """

    where: str
    rewrites: Mapping[int, Rewrite]
    detail: str = ""
    value: float | None = None
    pinned: bool = False


@dataclass
class Values:
    """The values of a pass that is replayed: those of the tape, unless a rewrite has changed them.

    Attributes:
        held: tensors of the tape, each with the one that is read in its place from the start.
        around: the context in which calls are repeated.
    """

    tape: Tape
    changed: dict[Ref, Tensor] = field(default_factory=dict)
    held: Mapping[Ref, Ref] = field(default_factory=dict)
    around: Around = nullcontext

    def __getitem__(self, ref: Ref) -> Tensor:
        found = self.changed.get(ref)
        return self.tape[self.held.get(ref, ref)] if found is None else found

    def fill(self, tree: Any) -> Any:  # a tree of arguments
        """Replace the references in a tree of arguments by tensors."""
        return with_leaves(lambda leaf: self[leaf] if isinstance(leaf, Ref) else leaf, tree)

    def run(self, call: Call) -> Any:  # what the call gives
        """Repeat a call with the present values of its arguments."""
        with self.around():
            return call_again(call.function, self.fill(call.args), self.fill(dict(call.kwargs)))

    def replay(self, calls: Iterable[Call], rewrites: Mapping[int, Rewrite] | None = None) -> None:
        """Repeat those of some calls, in order, that are rewritten or read a tensor that has changed."""
        for call in calls:
            rewrite = None if rewrites is None else rewrites.get(call.number)
            if rewrite is not None or any(read in self.changed for read in call.reads):
                output = self.run(call) if rewrite is None else rewrite(self, call)
                self.changed.update(zip(call.writes, tensors_in(output), strict=True))


class Stage:
    """A tape whose marked values are kept fixed: as in an isolated run, later calls read the recorded values.

    Args:
        pinned: the marks that are kept fixed, each with the tensor that later calls read: the marked one or a stand-in.
        around: the context in which calls are repeated.
    """

    def __init__(self, tape: Tape, pinned: Mapping[str, Ref], around: Around = nullcontext) -> None:
        self.tape = tape
        self.around = around
        self._pinned = pinned
        self._cones: dict[str, tuple[Call, ...]] = {}
        self._pins_of: dict[str, Mapping[Ref, Ref]] = {}
        self._reached: dict[tuple[str, frozenset[int]], Sequence[Call]] = {}

    def _pins(self, mark: str) -> Mapping[Ref, Ref]:
        """Return what is kept fixed while this mark is looked at, each with the marked tensor that is read there."""
        if mark not in self._pins_of:
            marks = self.tape.marks
            self._pins_of[mark] = {ref: marks[name] for name, ref in self._pinned.items() if name != mark}
        return self._pins_of[mark]

    def _is_fixed_already(self, mark: str) -> bool:
        """Return whether the same tensor is kept fixed under an earlier mark."""
        earlier = takewhile(lambda name: name != mark, self._pinned)
        return any(self._pinned[name] == self.tape.marks[mark] for name in earlier)

    def cone(self, mark: str) -> tuple[Call, ...]:
        """Return the calls that compute a marked value from fixed ones, in order."""
        if mark not in self._cones:
            tape, goal, pins = self.tape, self.tape.marks[mark], self._pins(mark)
            calls, pending, seen = [], [] if self._is_fixed_already(mark) else [goal], {goal}
            while pending:
                call = tape.maker(pending.pop())
                if call is None:
                    continue
                calls.append(call)
                new = {read for read in call.reads if read not in seen and read not in pins}
                seen |= new
                pending += new
            self._cones[mark] = tuple(sorted(set(calls), key=lambda call: call.number))
        return self._cones[mark]

    def _changed(self, mark: str, rewritten: frozenset[int]) -> Sequence[Call]:
        """Return the calls before a mark that are rewritten, and those that read what these give, in order."""
        key = mark, rewritten
        if key not in self._reached:
            pins, changed, reached = self._pins(mark), set[Ref](), list[Call]()
            for call in self.cone(mark):
                if call.number in rewritten or not changed.isdisjoint(call.reads):
                    reached.append(call)
                    changed.update(ref for ref in call.writes if ref not in pins)
            self._reached[key] = reached
        return self._reached[key]

    def play(self, mark: str, rewrites: Mapping[int, Rewrite]) -> Tensor | None:
        """Replay the calls before a mark with some calls rewritten.

        Returns:
            The marked value, or None where it is the recorded one whatever the rewritten calls return.
        """
        goal, pins = self.tape.marks[mark], self._pins(mark)
        values = Values(self.tape, held=pins, around=self.around)
        result: Tensor | None = None
        for call in self._changed(mark, frozenset(rewrites)):
            rewrite = rewrites.get(call.number)
            output = values.run(call) if rewrite is None else rewrite(values, call)
            for ref, value in zip(call.writes, tensors_in(output), strict=True):
                if ref is goal:
                    result = value
                if ref not in pins:
                    values.changed[ref] = value
        return result

    def whole(self, rewrites: Mapping[int, Rewrite]) -> dict[str, Tensor]:
        """Replay the whole tape with nothing kept fixed; return the marked values that changed."""
        values = Values(self.tape, around=self.around)
        values.replay(self.tape.calls, rewrites)
        return {mark: values.changed[ref] for mark, ref in self.tape.marks.items() if ref in values.changed}

    @cached_property
    def numbers(self) -> dict[str, frozenset[int]]:
        """The numbers of the calls in the cone of each mark."""
        return {mark: frozenset(call.number for call in self.cone(mark)) for mark in self.tape.marks}
