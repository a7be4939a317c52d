"""A model that is run again and again, with what it is given in the place of its own activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from porting.suggesting.subjects.tracing import Call, Trace, run


@dataclass
class Forced:
    """The reference's activations that the module is given in the place of its own, where those differ.

    Attributes:
        operands: number of a unit -> its operand.
        outputs: number of an operation -> what it gives.
    """

    operands: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Side:
    """A model that is run again and again.

    Attributes:
        module: it, in float64.
        leaves: its floating-point tensors, by name.
        loadable: the names of those that a table can write.
        call: runs it on the batch.
        inputs: what it is given.
    """

    module: nn.Module
    leaves: Mapping[str, Tensor]
    loadable: frozenset[str]
    call: Call
    inputs: Sequence[Tensor]

    def run(self, until: int | None = None, forced: Forced | None = None, *, keep: bool = False) -> Trace:
        """One run."""
        forced = forced or Forced()
        found = run(
            self.module,
            self.call,
            self.leaves,
            self.inputs,
            until=until,
            instead=forced.operands,
            after=forced.outputs,
            keep=keep,
        )
        for unit in found.units:  # a bias made of several: without what the module itself puts there
            if len(unit.biases) > 1:
                unit.biases = tuple(one for one in unit.biases if one in self.loadable) or unit.biases
        return found

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.leaves.items()}
