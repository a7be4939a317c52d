"""Attention on a tape: from a softmax back to the product of query and key, and on to the context.

However the model spells it: what is recorded has one spelling (:mod:`porting.tracing.attention`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from porting.causes.functions import CASTING, LOWEST, MASKING, SCALING, SUM
from porting.causes.linear import Linear, projection
from porting.causes.tape import Call, Ref, Tape
from porting.tracing.calls import Kind


@dataclass(frozen=True, eq=False)
class Attention:
    """``softmax(q k^T scale + bias + mask) v``.

    Attributes:
        tape: where it is.
        product: the call that multiplies query and key.
        steps: the calls between it and the softmax, in order.
        softmax: its call.
        context: the call that multiplies the probabilities and the value.
        linears: the maps that make query, key and value; one alone where they are fused.
    """

    tape: Tape
    product: Call
    steps: tuple[Call, ...]
    softmax: Call
    context: Call
    linears: tuple[Linear, ...]

    @property
    def where(self) -> str:
        """The module that it runs in."""
        return self.softmax.module

    @property
    def query(self) -> Ref:
        """[b h q d]."""
        return self.product.reads[0]

    @property
    def key(self) -> Ref:
        """[b h d k], as it is multiplied."""
        return self.product.reads[1]

    @property
    def value(self) -> Ref:
        """[b h k d]."""
        return self.context.reads[1]

    @property
    def masked(self) -> Ref:
        """What the softmax is given, [b h q k]."""
        return self.softmax.reads[0]

    @cached_property
    def raw(self) -> Ref:
        """The scores before any mask, [b h q k]."""
        last = self.product.result
        for step in self.steps:
            if self._masks(step):
                break
            last = step.result
        return last

    @cached_property
    def scale(self) -> float:
        """What the product is multiplied by; 1 where it is not, or not after the product."""
        found = 1.0
        for step in self.steps:
            factor = next((argument for argument in step.args[1:] if isinstance(argument, int | float)), None)
            if step.name in SCALING and factor and not self._masks(step):
                found = found / factor if "div" in step.name else found * factor
        return found

    @property
    def size(self) -> int:
        """The width d of a head."""
        return self.tape[self.query].shape[-1]

    @cached_property
    def allowed(self) -> Tensor:
        """Where a query attends, [b h q k] of bool: its probability is not zero, and not for want of any other key."""
        return (self.tape[self.softmax.result] > 0) & (self.tape[self.masked] > LOWEST / 2)

    @cached_property
    def kept(self) -> Tensor:
        """The keys that any query attends to, [b 1 1 k] of bool: what the padding mask leaves."""
        return self.allowed.any(-2, keepdim=True).any(1, keepdim=True)

    @cached_property
    def causal(self) -> bool:
        """Whether no query attends to what comes after it."""
        queries, keys = self.allowed.shape[-2:]
        later = torch.ones(queries, keys, dtype=torch.bool).triu(1)
        return queries == keys > 1 and not bool((self.allowed & later).any())

    @cached_property
    def own(self) -> bool:
        """Whether queries and keys are of the same positions."""
        return self.tape[self.query].shape[-2] == self.tape[self.key].shape[-1]

    @cached_property
    def merge(self) -> Call | None:
        """The call that puts the heads side by side, [b h s d] -> [b s (h d)]."""
        shape = self.tape[self.context.result].shape
        waiting, seen = [self.context.result], 0
        while waiting and seen < 12:
            ref = waiting.pop(0)
            seen += 1
            if len(shape) == 4 and self.tape[ref].shape == (shape[0], shape[2], shape[1] * shape[3]):
                return self.tape.maker(ref)
            waiting += [call.result for call in self.tape.users(ref)]
        return None

    def _masks(self, step: Call) -> bool:
        """Whether a step takes a mask in: a tensor that no parameter is in, and no bias."""
        others = [read for read in step.reads if not self.tape.learned(read) and self.tape[read].ndim > 0]
        return bool(others) and step.name in MASKING and not self._biases(step, others[0])

    def _biases(self, step: Call, other: Ref) -> bool:
        """Whether a step adds numbers that differ from head to head, none of which masks: attention's linear biases."""
        value = self.tape[other]
        heads = value.ndim >= 3 and value.shape[-3] > 1 and value.is_floating_point()
        return step.name in SUM and heads and bool((value > LOWEST).all())


def attentions(tape: Tape, linears: Sequence[Linear]) -> Iterator[Attention]:
    """The attentions of a pass, in order."""
    known = {linear.call.number: linear for linear in linears}
    for softmax in tape.calls:
        if softmax.kind is not Kind.SOFTMAX or not softmax.reads:
            continue
        steps, product = _chain(tape, softmax.reads[0])
        context = _context(tape, softmax.result)
        if product is None or context is None:
            continue
        sources = (product.reads[0], product.reads[1], context.reads[1])
        behind = [linear for linear in (projection(tape, ref, known) for ref in sources) if linear is not None]
        yield Attention(tape, product, tuple(reversed(steps)), softmax, context, tuple(dict.fromkeys(behind)))


def _chain(tape: Tape, ref: Ref) -> tuple[list[Call], Call | None]:
    """Backwards from the softmax: what is done to the scores, and the product that they come from."""
    steps: list[Call] = []
    call = tape.maker(ref)
    while call is not None and call.kind is not Kind.PRODUCT:
        if call.name not in (*MASKING, *CASTING, "tanh"):
            return steps, None
        steps.append(call)
        behind = [read for read in call.reads if tape.learned(read)]
        ref = next((read for read in behind if _product(tape, read)), behind[0] if behind else call.reads[0])
        call = tape.maker(ref)
    return steps, call


def _product(tape: Tape, ref: Ref) -> bool:
    """Whether a product of two activations lies directly behind, and not an embedding of distances."""
    behind = tape.before(ref, lambda call: call.name not in (*MASKING, *CASTING, "tanh"))
    return any(call.kind is Kind.PRODUCT for call in behind)


def _context(tape: Tape, ref: Ref) -> Call | None:
    """Forwards from the probabilities to the product with the value."""
    for _ in range(6):
        users = tape.users(ref)
        product = next((call for call in users if call.kind is Kind.PRODUCT and call.reads[0] == ref), None)
        if product is not None:
            return product
        onward = [call for call in users if call.name in ("dropout", "masked_fill", *CASTING)]
        if not onward:
            return None
        ref = onward[0].result
    return None
