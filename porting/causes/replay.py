"""Replaying a tape with some of its calls rewritten, to see what then comes out at a mark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from porting.causes.tape import Call, Ref, Tape, call_again
from porting.tracing.calls import tensors_in

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
        held: values that replace those of the tape from the start.
        around: the context in which calls are repeated.
    """

    tape: Tape
    changed: dict[Ref, Tensor] = field(default_factory=dict)
    held: Mapping[Ref, Tensor] = field(default_factory=dict)
    around: Around = nullcontext

    def __getitem__(self, ref: Ref) -> Tensor:
        found = self.changed.get(ref, self.held.get(ref))
        return self.tape[ref] if found is None else found

    def fill(self, tree: Any) -> Any:  # a tree of arguments
        """Replace the references in a tree of arguments by tensors."""
        if isinstance(tree, Ref):
            return self[tree]
        kind = type(tree)
        if kind is tuple or kind is list:  # nearly all; tree_map takes ten times as long
            return kind([self.fill(leaf) for leaf in tree])
        if kind is dict:
            return {name: self.fill(leaf) for name, leaf in tree.items()}
        return tree_map(lambda leaf: self[leaf] if isinstance(leaf, Ref) else leaf, tree)

    def run(self, call: Call) -> Any:  # what the call gives
        """Repeat a call with the present values of its arguments."""
        with self.around():
            return call_again(call.function, self.fill(call.args), self.fill(dict(call.kwargs)))

    def argument(self, call: Call, place: int, name: str, default: Any = None) -> Any:  # whatever it is
        """Return the present value of an argument, whether it was passed by position or by name."""
        return self.fill(call.argument(place, name, default))


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

    def _pins(self, mark: str) -> dict[Ref, Tensor]:
        """Return the values that are kept fixed while this mark is looked at."""
        marks = self.tape.marks
        return {ref: self.tape[marks[name]] for name, ref in self._pinned.items() if name != mark}

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

    def play(self, mark: str, rewrites: Mapping[int, Rewrite]) -> Tensor | None:
        """Replay the calls before a mark with some calls rewritten.

        Returns:
            The marked value, or None where it is the recorded one whatever the rewritten calls return.
        """
        goal, pins = self.tape.marks[mark], self._pins(mark)
        values = Values(self.tape, held=pins, around=self.around)
        result: Tensor | None = None
        for call in self.cone(mark):
            rewrite = rewrites.get(call.number)
            if rewrite is None and not any(read in values.changed for read in call.reads):
                continue
            output = values.run(call) if rewrite is None else rewrite(values, call)
            for ref, value in zip(call.writes, tensors_in(output), strict=True):
                if ref == goal:
                    result = value
                if ref not in pins:
                    values.changed[ref] = value
        return result

    def whole(self, rewrites: Mapping[int, Rewrite]) -> dict[str, Tensor]:
        """Replay the whole tape with nothing kept fixed; return the marked values that changed."""
        values = Values(self.tape, around=self.around)
        for call in self.tape.calls:
            rewrite = rewrites.get(call.number)
            if rewrite is None and not any(read in values.changed for read in call.reads):
                continue
            output = values.run(call) if rewrite is None else rewrite(values, call)
            tensors = tensors_in(output)
            values.changed.update(zip(call.writes, tensors, strict=True))
        return {mark: values.changed[ref] for mark, ref in self.tape.marks.items() if ref in values.changed}

    @cached_property
    def numbers(self) -> dict[str, frozenset[int]]:
        """The numbers of the calls in the cone of each mark."""
        return {mark: frozenset(call.number for call in self.cone(mark)) for mark in self.tape.marks}


def same(value: Tensor | None, other: Tensor) -> bool:
    """Return whether a replay changed nothing."""
    return value is None or (value.shape == other.shape and torch.equal(value, other))
