"""The parts of a model, found on the tape of a pass: linear layers, norms, activations, embeddings, residual sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from porting.causes.attention import Attention, attentions
from porting.causes.capping import Cap, Clamp, caps, clamps
from porting.causes.functions import ACTIVATION, ACTIVATIONS, EMBEDDING, SUM
from porting.causes.linear import Linear, linears
from porting.causes.norming import Norm, norms
from porting.causes.routing import Router, routers
from porting.causes.tape import Call, Part, Ref, Tape


@dataclass(frozen=True, eq=False)
class Activation:
    """An elementwise activation, whether it is one call or written out.

    Attributes:
        call: the call that returns its result.
        input: the tensor that it is applied to.
        name: its name in :data:`porting.causes.functions.ACTIVATIONS`, ``""`` for any other function.
    """

    call: Call
    input: Ref
    name: str


@dataclass(frozen=True, eq=False)
class Embedding:
    """An embedding lookup.

    Attributes:
        call: the call of ``F.embedding``.
        ids, weight: the indices and the table.
        role: what the indices are: ``tokens``, ``types``, ``positions``, or ``distances`` between positions.
    """

    call: Call
    ids: Ref
    weight: Ref
    role: str


@dataclass(frozen=True, eq=False)
class Residual:
    """A residual sum, ``x + f(x)``.

    Attributes:
        stream, branch: ``x`` and ``f(x)``.
    """

    call: Call
    stream: Ref
    branch: Ref


class ModelParts:
    """The parts of a model that ran in one pass, each list in the order of the calls.

    Args:
        inputs: the model's inputs by name, such as ``input_ids``.
        broken: the port has values that are not finite, so that attention rows without a key may be NaN.
    """

    def __init__(self, tape: Tape, inputs: Mapping[str, Tensor], *, broken: bool = False) -> None:
        self.tape = tape
        self.inputs = inputs
        self.broken = broken

    def called(self, *names: str) -> Iterator[Call]:
        """Yield the calls of functions with one of these names."""
        return (call for call in self.tape.calls if call.name in names)

    @cached_property
    def norms(self) -> list[Norm]:
        """The norms."""
        return norms(self.tape)

    @cached_property
    def linears(self) -> list[Linear]:
        """The linear layers."""
        return list(linears(self.tape))

    @cached_property
    def attentions(self) -> list[Attention]:
        """The attentions."""
        return list(attentions(self.tape, self.linears))

    @cached_property
    def routers(self) -> list[Router]:
        """The routers of mixtures of experts."""
        return list(routers(self.tape, self.linears))

    @cached_property
    def caps(self) -> list[Cap]:
        """The soft caps."""
        return list(caps(self.tape))

    @cached_property
    def clamps(self) -> list[Clamp]:
        """The clamps."""
        return list(clamps(self.tape))

    @cached_property
    def own_norms(self) -> list[Norm]:
        """The norms of queries and keys, between a projection and the product of query and key."""
        projections = {linear.call.number for linear in self.linears}
        numbers = {
            call.number
            for attention in self.attentions
            for ref in (attention.query, attention.key)
            for call in self.tape.before(ref, lambda call: call.number in projections)
        }
        return [norm for norm in self.norms if norm.call.number in numbers]

    @cached_property
    def embeddings(self) -> list[Embedding]:
        """The embeddings."""
        embeddings = []
        for call in self.called(*EMBEDDING):
            ids, weight = call.argument(0, "input"), call.argument(1, "weight")
            embeddings.append(Embedding(call, ids, weight, self._role(self.tape[ids])))
        return embeddings

    def embeddings_of(self, role: str) -> Iterator[Embedding]:
        """Yield the embeddings with a role."""
        return (embedding for embedding in self.embeddings if embedding.role == role)

    def _role(self, ids: Tensor) -> str:
        for name, role in (("input_ids", "tokens"), ("token_type_ids", "types"), ("position_ids", "positions")):
            inputs = [tensor for key, tensor in self.inputs.items() if key.endswith(name)]
            if any(tensor.shape == ids.shape and torch.equal(tensor, ids) for tensor in inputs):
                return role
        if ids.ndim == 2 and ids.shape[0] == ids.shape[1] and bool((ids.diagonal() == ids[0, 0]).all()):
            return "distances"
        return "positions" if int(ids.max()) > int(ids.min()) else "types"

    @cached_property
    def activations(self) -> list[Activation]:
        """The activations: modules that compute one, and calls outside of such modules."""
        activations, inner_calls = [], {cap.bend.number for cap in self.caps}
        for part in self.tape.parts:
            made = self._elementwise(part)
            if made is not None:
                activations.append(made)
                inner_calls |= set(range(part.first, part.last))
        single_calls = (
            call
            for call in self.called(*ACTIVATION)
            if call.number not in inner_calls and self.tape.learned(call.result)
        )
        activations += [Activation(call, call.args[0], self._which(call.args[0], call.result)) for call in single_calls]
        return sorted(activations, key=lambda site: site.call.number)

    def _elementwise(self, part: Part) -> Activation | None:
        """Return the activation that a module without parameters computes; None where it computes something else."""
        if part.input is None or part.output is None or any(True for _ in part.module.parameters()):
            return None
        before, after, call = self.tape[part.input], self.tape[part.output], self.tape.maker(part.output)
        if call is None or before.shape != after.shape or torch.equal(before, after) or part.last == part.first:
            return None
        try:
            flipped = part.module(before.flatten().flip(0))
        except Exception:  # noqa: BLE001  # it wants a certain shape, so it is not a function of each number
            return None
        alike = isinstance(flipped, Tensor) and torch.allclose(flipped.flip(0), after.flatten(), rtol=1e-6, atol=1e-9)
        return Activation(call, part.input, self._which(part.input, part.output)) if alike else None

    def _which(self, source: Ref, result: Ref) -> str:
        value, expected = self.tape[source].double(), self.tape[result].double()
        names = (
            name
            for name, function in ACTIVATIONS.items()
            if torch.allclose(function(value), expected, rtol=1e-6, atol=1e-9)
        )
        return next(names, "")

    @cached_property
    def residuals(self) -> list[Residual]:
        """The sums of two activations of one shape where one was computed from the other."""
        residuals = []
        for call in self.called(*SUM):
            summands = [read for read in call.reads if self.tape.learned(read) and read not in self.tape.weights]
            if (
                len(summands) != 2
                or len({self.tape[read].shape for read in summands}) != 1
                or self.tape[summands[0]].ndim > 3
            ):
                continue
            for stream, branch in (tuple(summands), tuple(reversed(summands))):
                if self._reaches(branch, stream):
                    residuals.append(Residual(call, stream, branch))
                    break
        return residuals

    def _reaches(self, ref: Ref, goal: Ref) -> bool:
        """Return whether a tensor was computed from another one with the help of weights."""
        calls = list(self.tape.before(ref, lambda call: call.result.number < goal.number))
        later_calls = [call for call in calls if call.result.number > goal.number]
        uses_weights = any(read in self.tape.weights for call in later_calls for read in call.reads)
        return uses_weights and any(goal in call.reads for call in calls)

    @cached_property
    def token_table(self) -> Ref | None:
        """The table of the word embeddings."""
        return next((embedding.weight for embedding in self.embeddings_of("tokens")), None)
