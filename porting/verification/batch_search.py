"""The search for batches that show more: each is tried on the port alone, in float64, and kept for what it shows.

What a batch shows is measured: which of the port's own instructions run, and which elements of its weights a gradient
of its probes reaches.  The search begins with what the first batches left over, tries what may help with that, and ends
when nothing more is gained or so many batches were tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from porting.errors import VerifyError
from porting.notation.rule import Rule
from porting.notation.table import Table
from porting.target import signature_parameters
from porting.tracing.code_coverage import Executed, untaken
from porting.tracing.running import Side, failure_reason
from porting.tracing.trace import ARROW, Point
from porting.trials.derived_inputs import source_of
from porting.trials.inputs import Case
from porting.trials.pairing import Pair
from porting.trials.run import MakeSide
from porting.verification.batches import Batches
from porting.verification.compare import Comparison
from porting.verification.coverage import Observer
from porting.verification.references import LiveReference, port_side

BUDGET = 16
"""How many batches are tried at most, each in a forward pass of the port."""

VAIN = 2
"""After so many batches of random rows that reach hardly more of the weights, no further ones are tried."""

MOST_ROWS = 32
"""The most rows of a batch, whatever a condition compares with."""

LENGTH, SHORTER = 7, 4
"""Tokens in the rows of a small batch."""

ROWS = tuple(range(17, 1, -1))
"""Tokens in the rows of a batch that is there for the weights: many first tokens, for heads that read no others."""

More = Callable[[str, Sequence[int]], Case]


@dataclass
class Found:
    """The result of the search.

    Attributes:
        cases: the batches that show more, in the order in which they were found.
        failed: what the port fails at and the reference does not, in words.
    """

    cases: list[Case] = field(default_factory=list)
    tried: int = 0
    failed: list[str] = field(default_factory=list)

    @property
    def said(self) -> str:
        """The search in a sentence; empty when nothing had to be looked for."""
        if not self.tried:
            return ""
        count = f"{self.tried} more batch{'es were' if self.tried > 1 else ' was'} tried on the port"
        kept = "; ".join(case.name for case in self.cases)
        return f"{count}, and {'kept for what they show: ' + kept if kept else 'none showed more'}"


def search(
    batch: Batches, table: Table, reference: LiveReference, port: Side, comparison: Comparison, observer: Observer
) -> Found:
    """Look for batches that show more.

    Args:
        table: its [inputs].
        reference, port: the two sides; the port in float64, as it has run.
        comparison: what ran of the port's code.
    """
    if batch.more is None or comparison.executed is None:
        return Found()
    return _Search(
        more=batch.more,
        longest=batch.longest,
        rules=table.inputs,
        reference=lambda case: reference.as_it_is([case], clock=port.clock),
        port=lambda case: port_side(port.module, torch.float64, table, [reference.taken(case)], port.clock),
        executed=comparison.executed,
        observer=observer,
        compared={point: one for pairing in comparison.pairings for point, one in pairing.pairs.items()},
    ).run()


@dataclass(kw_only=True)
class _Search:
    """One search.

    Attributes:
        more: makes a batch with rows of these lengths.
        longest: no row is longer than this.
        rules: the table's [inputs].
        reference, port: make a side that runs one case in float64; the port's is always of the same module.
        executed: what ran of the port's code so far; what more runs is added.
        observer: what was reached of its weights so far; what more may be reached is added to what it hopes for.
        compared: the port's points that are compared with something: what only others depend on is not shown.
    """

    more: More
    longest: int
    rules: Sequence[Rule]
    reference: MakeSide
    port: MakeSide
    executed: Executed
    observer: Observer
    compared: Mapping[Point, Pair]
    found: Found = field(default_factory=Found)

    def run(self) -> Found:
        """Try batches until nothing more is gained."""
        probe = self.more("", [1])
        module = self.port(probe).module
        for name in omittable(self.rules, probe.inputs, self.reference(probe).module, module):
            rows = [LENGTH] * 2 if "mask" in name else [LENGTH, SHORTER]
            case = self.more(f"2 rows of {max(self._fit(rows))} tokens without {name}", self._fit(rows))
            self._try(Case(case.name, {key: one for key, one in case.inputs.items() if key != name}), without=name)
        for length, count in self._turns(module):
            if not untaken(self.executed, module):
                break
            self._try(self.more(f"{count} row{'s' if count > 1 else ''} of {length} tokens", [length] * count))
        vain = 0
        while vain < VAIN and self.observer.hopes() and self.found.tried < BUDGET:
            rows = self._fit(ROWS)
            kept = self._try(self.more(f"{len(rows)} rows of {min(rows)} to {max(rows)} tokens, padded", rows))
            vain = 0 if kept else vain + 1
        return self.found

    def _fit(self, rows: Sequence[int]) -> list[int]:
        return [min(one, self.longest) for one in rows]

    def _turns(self, module: nn.Module) -> Iterator[tuple[int, int]]:
        """Lengths and numbers of rows at which a condition of a branch that was not taken may turn."""
        constants = [number for one in untaken(self.executed, module) for number in one.constants]
        lengths = [one for number in constants for one in (number - 1, number, number + 1)]
        if constants:
            lengths += [1, 2, self.longest]
        for length in dict.fromkeys(one for one in lengths if 1 <= one <= self.longest):
            yield length, 1
        for rows in dict.fromkeys(number + 1 for number in constants if number < MOST_ROWS):
            yield min(SHORTER, self.longest), rows

    def _try(self, case: Case, without: str = "") -> bool:
        """Whether a batch shows more; it is kept then."""
        if self.found.tried >= BUDGET:
            return False
        self.found.tried += 1
        try:
            self.reference(case).run(0, lambda point, value: None, wanted=[])
        except VerifyError:
            return False  # what the reference refuses is no question to the port
        trial = Executed(self.port(case).module)
        try:
            total = self._measured(case, trial)
        except VerifyError as error:
            if without:
                said = failure_reason(error)
                words = (
                    f"without {without}, for which its forward has a default, the port fails where the reference does"
                )
                self.found.failed.append(f"{words} not: {said}")
            return False
        gained = self.executed.lacks(trial)
        reached = total is not None and self.observer.gain(total)
        if not gained and not reached:
            return False
        self.executed.add(trial)
        self.found.cases.append(case)
        return True

    def _measured(self, case: Case, trial: Executed) -> Tensor | None:
        """Run the port; a random linear function of all that its probes see and that is compared."""
        generator = torch.Generator().manual_seed(self.found.tried)
        terms: list[Tensor] = []

        def visit(point: str, value: Tensor) -> None:
            if value.requires_grad and point in self.compared:
                one = self.compared[point]
                value = one.compared(value) if value.shape == one.shape else value
                weight = torch.randn(value.shape, dtype=value.dtype, generator=generator)
                terms.append((value * weight).sum() / (value.detach().abs().amax().clamp_min(1e-300)))

        with trial.watched():
            self.port(case).run(0, visit, gradients=True)
        return torch.stack(terms).sum() if terms else None


def omittable(
    rules: Sequence[Rule], inputs: Mapping[str, Tensor], reference: nn.Module, port: nn.Module
) -> Iterator[str]:
    """The arguments that both sides have a default for.

    Args:
        rules: the table's [inputs].
    """
    pairs = [(source_of(str(rule.sources[0].key)), str(rule.targets[0].key)) for rule in rules]
    named = {theirs: ours.partition(ARROW)[0] for theirs, ours in pairs} or {name: name for name in inputs}
    theirs, ours = _optional(reference), _optional(port)
    yield from (name for name in inputs if name in theirs and named.get(name, "") in ours)


def _optional(module: nn.Module) -> set[str]:
    """The arguments of forward with a default, by name and by place."""
    every = enumerate(signature_parameters(module.forward).values())
    return {text for place, one in every if one.default is not one.empty for text in (str(place), one.name)}
