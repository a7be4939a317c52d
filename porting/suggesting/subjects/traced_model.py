"""A model that is run again and again while its weights are searched for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter

import torch
from torch import Tensor, nn

from porting.errors import Code, Fault, VerifyError
from porting.frames import place_of
from porting.suggesting.subjects.forward_effects import comparable, same_numbers
from porting.suggesting.subjects.operation_trace import (
    TABLES,
    Call,
    OperationTrace,
    Unit,
    WeightUse,
    outputs_of,
    trace_operations,
)


@dataclass
class ForcedActivations:
    """The reference's activations that the module is given in the place of its own, where those differ.

    Attributes:
        operands: number of a unit -> its operand.
        outputs: number of an operation -> what it gives.
        angles: number of a cosine or sine, among these -> what it gives: how many operations stand before it may depend
            on the weights, as where experts run that tokens choose.
    """

    operands: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    angles: dict[int, Tensor] = field(default_factory=dict)

    @property
    def state(self) -> tuple[object, ...]:
        """Equal as long as nothing has changed."""
        every = (sorted(some.items(), key=itemgetter(0)) for some in (self.operands, self.outputs, self.angles))
        return tuple((number, id(value), value._version) for some in every for number, value in some)


@dataclass
class TracedModel:
    """A model that is run again and again.

    Attributes:
        module: it, in float64.
        leaves: its floating-point tensors, by name.
        loadable: the names of those that a table can write.
        call, inputs: how it is run, and the tensors that it is given.
        sides: the same with other values in one of two kinds of inputs, say the encoder's tokens and the decoder's.
        stacked: the name of a layer's slice of a parameter that holds the weights of all layers -> the parameter's name
            and the layer.
    """

    module: nn.Module
    leaves: Mapping[str, Tensor]
    loadable: frozenset[str]
    call: Call
    inputs: Sequence[Tensor]
    sides: tuple[tuple[Call, Sequence[Tensor]], ...] = ()
    stacked: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    _latest: tuple[tuple[object, ...], ForcedActivations, OperationTrace] | None = field(default=None, init=False)

    def run(
        self, until: int | None = None, forced: ForcedActivations | None = None, *, keep: bool = False
    ) -> OperationTrace:
        """One run; the latest whole one, where neither a tensor nor what is forced has changed since."""
        forced = forced or ForcedActivations()
        state = (*(one._version for one in self.leaves.values()), forced.state)
        if self._latest is not None and self._latest[0] == state and not keep:
            return self._latest[2] if until is None else self._latest[2].up_to(until)
        found = self._run(until, forced, keep=keep)
        if until is None and state == (*(one._version for one in self.leaves.values()), forced.state):
            kept = ForcedActivations(dict(forced.operands), dict(forced.outputs), dict(forced.angles))
            self._latest = (
                state,
                kept,
                found,
            )  # what is forced is kept: a later tensor could have the number of one that is gone
        return found

    def _run(self, until: int | None, forced: ForcedActivations, *, keep: bool) -> OperationTrace:
        found = trace_operations(
            self.module,
            self.call,
            self.leaves,
            self.inputs,
            until=until,
            instead=forced.operands,
            after=forced.outputs,
            angles=forced.angles,
            keep=keep,
        )
        for unit in found.units:  # a bias made of several: without what the module itself puts there
            if len(unit.biases) > 1:
                unit.biases = tuple(one for one in unit.biases if one in self.loadable) or unit.biases
        found.units = _where_used(self._in_turn(_over_steps(found.units)))
        return found

    def first_side(self) -> int:
        """The number of the kind of inputs that is computed with first."""
        units = trace_operations(self.module, self.call, self.leaves, self.inputs).units
        return next((side.index(True) for one in units if sum(side := self._depends.get(one.number, ())) == 1), 0)

    @cached_property
    def _depends(self) -> dict[int, tuple[bool, ...]]:
        """The kinds of inputs that each unit depends on, by the unit's number."""
        units = trace_operations(self.module, self.call, self.leaves, self.inputs).units
        others = [trace_operations(self.module, call, self.leaves, given).units for call, given in self.sides]
        found: dict[int, tuple[bool, ...]] = {}
        for unit in units:
            again = [next((one.output for one in some if one.number == unit.number), None) for some in others]
            found[unit.number] = tuple(one is None or not torch.equal(one, unit.output) for one in again)
        for unit in reversed(units):  # a table of positions depends on nothing: it belongs to what it is added to
            if not any(found[unit.number]):
                beside = [*unit.behind, *(one.number for one in units if unit.number in one.behind)]
                found[unit.number] = next((found[one] for one in beside if any(found.get(one, ()))), ())
        return found

    def _in_turn(self, units: list[Unit]) -> list[Unit]:
        """The units with those of the first kind of inputs in front, where a module computes both before either ends.

        A forward that embeds both texts at its beginning does the same as one that embeds the second when the first
        is encoded; the search goes through both models in one order.  From the first unit that is given both on, as in
        a decoder, the order is that of the run.
        """
        if not self.sides:
            return units
        first, second = (True, False), (False, True)
        sides = [self._depends.get(one.number, ()) for one in units]
        begins = (WeightUse.LOOKUP, WeightUse.NORM)  # no such unit is a part of attention to the other kind
        joined = next((at for at, side in enumerate(sides) if side == (True, True)), len(units))
        last = max((at for at in range(joined) if sides[at] == first and units[at].kind in begins), default=-1)
        end = next((at for at in range(last + 1, len(units)) if sides[at] != first), len(units))
        early = [one for at, one in enumerate(units[:end]) if sides[at] == second]
        if not early or last < 0:
            return units
        return [*(one for at, one in enumerate(units[:end]) if sides[at] != second), *early, *units[end:]]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.leaves.items()}


def _over_steps(units: list[Unit]) -> list[Unit]:
    """The units with one for those of a weight that a loop uses at each step, as the decay of a state space.

    Written without a loop it is used once, for all steps.
    """
    steps: dict[tuple[str, ...], list[Unit]] = {}
    for unit in units:
        if unit.kind is WeightUse.NORM and unit.operand is not None and not unit.biases:
            steps.setdefault((*unit.weights, unit.scope), []).append(unit)
    loops = [some for some in steps.values() if len(some) >= STEPS and len({one.output.shape for one in some}) == 1]
    places = {id(unit): at for at, unit in enumerate(units)}
    # Layers that share a norm use it again, too, and have matrices in between.
    loops = [
        some
        for some in loops
        if all(one.kind is not WeightUse.LINEAR for one in units[places[id(some[0])] : places[id(some[-1])]])
    ]
    inner = {id(one) for some in loops for one in some[1:]}
    for first, *others in loops:
        operands = [one.operand for one in (first, *others) if one.operand is not None]
        if len({one.shape for one in operands}) == 1:
            first.operand = torch.stack(operands)
            first.output = torch.stack([first.output, *(one.output for one in others)])
            first.last, first.given = others[-1].last, None
    return [one for one in units if id(one) not in inner]


STEPS = 5
"""A loop over the tokens of a row has so many steps at least."""


def _where_used(units: Sequence[Unit]) -> list[Unit]:
    """The units with each table right in front of the first that is computed from it.

    A forward that looks up the distances of tokens before its first layer does the same as one that does so within.
    """
    first: dict[int, int] = {}
    for at, unit in enumerate(units):
        for number in unit.behind:
            first.setdefault(number, at)

    def place(at: int) -> float:
        unit, until = units[at], first.get(units[at].number, at)
        moves = unit.kind in TABLES and not unit.behind and any(one.kind not in TABLES for one in units[at:until])
        return until - 0.5 if moves else at

    return [units[at] for at in sorted(range(len(units)), key=place)]


def with_slices(port: TracedModel, depths: Collection[int]) -> TracedModel:
    """The model with a weight for each layer in the place of a parameter [layers ...] that holds those of all.

    That it is one shows in a run: layer after layer, each uses its own slice of such parameters and no other.  Where
    each layer has the parameter for itself, say one of [2 ...] for a gate and a projection, all slices are used in
    every layer.  A few vectors in one parameter, as the gains of both norms of a layer, are weights by themselves too.

    Args:
        depths: how many layers there may be.
    """
    some = {
        name
        for name, one in port.leaves.items()
        if isinstance(one, nn.Parameter) and one.is_contiguous()
        and ((one.ndim > 1 and len(one) in depths) or (one.ndim == 2 and 1 < len(one) <= ROWS))
    }  # fmt: skip
    while some:
        sliced = _sliced(port, some)
        seen: dict[str, list[int]] = {name: [] for name in some}
        order: dict[str, list[int]] = {}
        whole = set[str]()
        uses = Counter[tuple[int, str]]()
        for unit in sliced.run().units:
            used = [sliced.stacked[one] for one in unit.names if one in sliced.stacked]
            counts = Counter(name for name, _ in used)
            whole |= {name for name in counts if counts[name] > 1 or unit.kind in {WeightUse.LOOKUP, WeightUse.TABLE}}
            if unit.operation != "cat":  # rows that are put in front of others may be several weights
                uses.update((unit.number, name) for name in counts)
            for name, number in used:
                seen[name].append(number)
                order.setdefault(_any_layer(name), []).append(number)
        whole |= {name for (_, name), count in uses.items() if count > 1}
        wrong = whole | {name for name, used in seen.items() if {*used} != {*range(len(port.leaves[name]))}}
        wrong = wrong or {
            name
            for name in some
            if port.leaves[name].ndim > 2 and (numbers := order[_any_layer(name)]) != sorted(numbers)
        }
        if not wrong:
            return sliced
        some -= wrong
    return port


ROWS = 8
"""A parameter [n e] may be so many vectors: the gains of a layer's norms, tokens beside those of the input."""


def _any_layer(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _sliced(port: TracedModel, some: Collection[str]) -> TracedModel:
    """The model with the slices along the first axis in the place of some parameters, named as layers in a list are."""
    leaves: dict[str, Tensor] = {}
    stacked: dict[str, tuple[str, int]] = {}
    for name, one in port.leaves.items():
        path, _, last = name.rpartition(".")
        for number, part in enumerate(one.detach() if name in some else ()):
            own = ".".join(filter(None, (path, str(number), last)))
            leaves[own], stacked[own] = nn.Parameter(part, requires_grad=False), (name, number)
        if name not in some:
            leaves[name] = one
    loadable = port.loadable.difference(some) | {own for own, (name, _) in stacked.items() if name in port.loadable}
    return replace(port, leaves=leaves, loadable=loadable, stacked=stacked)


def check_deterministic(port: TracedModel, times: int = 1) -> None:
    """See that the module gives the same again.

    Args:
        times: how often it is run again.

    Raises:
        VerifyError: it does not, changes what it is given, or makes parameters while it runs.
    """
    module = port.module
    kept = [one.clone() for one in port.inputs]
    first = trace_operations(module, port.call, port.leaves, port.inputs)
    name, where = type(module).__name__, place_of(module.forward)
    if not all(torch.equal(one, before) for one, before in zip(port.inputs, kept, strict=True)):
        message = f"{name}.forward changes what it is given, so that whoever runs it twice gets something else"
        hint = "work on a copy: x = x.clone()"
        raise VerifyError(Fault(code=Code.NOT_DETERMINISTIC, where=where, message=message, hint=hint))
    comparable(module, first.outputs)
    if first.made:
        message = f"{name}.forward makes parameters while it runs ({first.made[0]}): nothing can be loaded into those"
        raise VerifyError(
            Fault(code=Code.MADE_IN_FORWARD, where=first.made_at, message=message, hint="make them in __init__")
        )
    if not all(same_numbers(first.outputs, outputs_of(module, port.call)) for _ in range(times)):
        message = f"{name}.forward gives something else each time, in eval mode and on the same inputs"
        hint = "a dropout that is left on: F.dropout(x, p, self.training)" if first.random else "it must be a function"
        where = first.random_at or where
        raise VerifyError(Fault(code=Code.NOT_DETERMINISTIC, where=where, message=message, hint=hint))
