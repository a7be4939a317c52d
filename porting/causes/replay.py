"""Playing a tape again with some of its calls rewritten, and seeing what then comes out at a mark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from porting.causes.tape import Call, Ref, Tape, call_again

Rewrite = Callable[["Values", Call], Any]
"""What a call gives instead: a tree like the call's own output."""


Around = Callable[[], AbstractContextManager[object]]
"""Makes what the pass was recorded in, where that changed what its calls gave."""


@dataclass(frozen=True, kw_only=True)
class Alteration:
    """One way in which the model might have been written otherwise.

    Attributes:
        where: the module that it is about.
        rewrites: the number of each call that gives something else, and what.
        detail: what distinguishes it from others of its kind, ``"eps 1e-05 in place of 1e-12"``.
        value: the number that was solved for; None where none was.
        pinned: it holds while the probes before hold still, and is no part of a whole model.
    """

    where: str
    rewrites: Mapping[int, Rewrite]
    detail: str = ""
    value: float | None = None
    pinned: bool = False


@dataclass
class Values:
    """The values of a pass that is played again: those of the tape, where nothing has changed them.

    Attributes:
        tape: the recorded pass.
        changed: what a rewrite has changed.
        held: what is put in the place of a value, though nothing has changed it.
        around: what a call that is made again is made in.
    """

    tape: Tape
    changed: dict[Ref, Tensor] = field(default_factory=dict)
    held: Mapping[Ref, Tensor] = field(default_factory=dict)
    around: Around = nullcontext

    def __getitem__(self, ref: Ref) -> Tensor:
        found = self.changed.get(ref, self.held.get(ref))
        return self.tape[ref] if found is None else found

    def fill(self, tree: Any) -> Any:  # a tree of arguments
        """The tree with tensors in the places of their references."""
        return tree_map(lambda leaf: self[leaf] if isinstance(leaf, Ref) else leaf, tree)

    def run(self, call: Call) -> Any:  # what the call gives
        """The call as it was recorded, with the present values of its arguments."""
        with self.around():
            return call_again(call.function, self.fill(call.args), self.fill(dict(call.kwargs)))

    def argument(self, call: Call, place: int, name: str, default: Any = None) -> Any:  # whatever it is
        """The present value of an argument, wherever it stands."""
        return self.fill(call.argument(place, name, default))


class Stage:
    """A tape whose marked values hold still: as in an isolated run, whoever reads one gets the recorded value.

    Args:
        tape: the recorded pass.
        pinned: the marks whose values are put in the place of computed ones, each with the tensor that stands for it:
            the marked one itself, or what others read in its place.
        around: what recorded calls are made again in.
    """

    def __init__(self, tape: Tape, pinned: Mapping[str, Ref], around: Around = nullcontext) -> None:
        self.tape = tape
        self.around = around
        self._pinned = pinned
        self._cones: dict[str, tuple[Call, ...]] = {}

    def _pins(self, mark: str) -> dict[Ref, Tensor]:
        """What holds still when this mark is looked at, and at which value."""
        marks = self.tape.marks
        return {ref: self.tape[marks[name]] for name, ref in self._pinned.items() if name != mark}

    def _stands(self, mark: str) -> bool:
        """Whether the value was marked, and so held still, under another name before."""
        before = takewhile(lambda name: name != mark, self._pinned)
        return any(self._pinned[name] == self.tape.marks[mark] for name in before)

    def cone(self, mark: str) -> tuple[Call, ...]:
        """The calls that make a marked value from pinned ones, in order."""
        if mark not in self._cones:
            tape, goal, pins = self.tape, self.tape.marks[mark], self._pins(mark)
            found, waiting, seen = [], [] if self._stands(mark) else [goal], {goal}
            while waiting:
                call = tape.maker(waiting.pop())
                if call is None:
                    continue
                found.append(call)
                fresh = {read for read in call.reads if read not in seen and read not in pins}
                seen |= fresh
                waiting += fresh
            self._cones[mark] = tuple(sorted(set(found), key=lambda call: call.number))
        return self._cones[mark]

    def play(self, mark: str, rewrites: Mapping[int, Rewrite]) -> Tensor | None:
        """The marked value when some calls are rewritten; None when it is the recorded one, whatever they give."""
        goal, pins = self.tape.marks[mark], self._pins(mark)
        values = Values(self.tape, held=pins, around=self.around)
        result: Tensor | None = None
        for call in self.cone(mark):
            rewrite = rewrites.get(call.number)
            if rewrite is None and not any(read in values.changed for read in call.reads):
                continue
            found = values.run(call) if rewrite is None else rewrite(values, call)
            for ref, value in zip(
                call.writes, (leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)), strict=True
            ):
                if ref == goal:
                    result = value
                if ref not in pins:
                    values.changed[ref] = value
        return result

    def whole(self, rewrites: Mapping[int, Rewrite]) -> dict[str, Tensor]:
        """The marked values that are others when some calls are rewritten and nothing holds still."""
        values = Values(self.tape, around=self.around)
        for call in self.tape.calls:
            rewrite = rewrites.get(call.number)
            if rewrite is None and not any(read in values.changed for read in call.reads):
                continue
            found = values.run(call) if rewrite is None else rewrite(values, call)
            made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
            values.changed.update(zip(call.writes, made, strict=True))
        return {mark: values.changed[ref] for mark, ref in self.tape.marks.items() if ref in values.changed}

    @cached_property
    def numbers(self) -> dict[str, frozenset[int]]:
        """The numbers of the calls that make each marked value."""
        return {mark: frozenset(call.number for call in self.cone(mark)) for mark in self.tape.marks}

    def touched(self, rewrites: Mapping[int, Rewrite]) -> list[str]:
        """The marks that a set of rewrites may change."""
        return [mark for mark, numbers in self.numbers.items() if not numbers.isdisjoint(rewrites)]


def same(value: Tensor | None, other: Tensor) -> bool:
    """Whether a replay changed nothing."""
    return value is None or (value.shape == other.shape and torch.equal(value, other))
