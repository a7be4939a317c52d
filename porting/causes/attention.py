"""Recognising attention on a tape, from the softmax back to the product of query and key and on to the context.

Fused kernels and einsums were written out as products before they were recorded (:mod:`porting.tracing.attention`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from porting.causes.functions import CASTING, LOWEST, MASKING, SUM, factor_of
from porting.causes.linear import Linear, projection
from porting.causes.replay import Rewrite, Values
from porting.causes.tape import Call, Ref, Tape
from porting.tracing.calls import Kind

Heads = tuple[Tensor, Tensor, Tensor]
"""Query, key and value, each [b h s d]."""


@dataclass(frozen=True, eq=False)
class Attention:
    """An attention, ``softmax(q k^T scale + bias + mask) v``.

    Attributes:
        tape: the pass.
        product: the call that multiplies query and key.
        steps: the calls between the product and the softmax, in order.
        softmax: the call of the softmax.
        context: the call that multiplies probabilities and value.
        linears: the projections of query, key and value; a single one where they are fused.
    """

    tape: Tape
    product: Call
    steps: tuple[Call, ...]
    softmax: Call
    context: Call
    linears: tuple[Linear, ...]

    @property
    def where(self) -> str:
        """The path of the module that calls the softmax."""
        return self.softmax.module

    @property
    def query(self) -> Ref:
        """The query, [b h q d]."""
        return self.product.reads[0]

    @property
    def key(self) -> Ref:
        """The key as it is multiplied, [b h d k]."""
        return self.product.reads[1]

    @property
    def value(self) -> Ref:
        """The value, [b h k d]."""
        return self.context.reads[1]

    @property
    def masked(self) -> Ref:
        """The scores that the softmax reads, [b h q k]."""
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
        """The factor of the product of query and key; 1 where the scale is applied before it, or not at all."""
        scale = 1.0
        for step in self.steps:
            factor = factor_of(step)
            if factor is not None and not self._masks(step):
                scale *= factor
        return scale

    @property
    def size(self) -> int:
        """The width d of a head."""
        return self.tape[self.query].shape[-1]

    @cached_property
    def heads(self) -> int:
        """The number of heads, which may be joined with the batch, [(b h) q d]; 0 where that does not show."""
        query = self.tape[self.query]
        if query.ndim == 4:
            return query.shape[1]
        projected = self.tape[self.linears[0].call.result] if self.linears else query
        rows = projected.shape[0] if projected.ndim == 3 else 0
        return query.shape[0] // rows if query.ndim == 3 and rows and query.shape[0] % rows == 0 else 0

    @cached_property
    def allowed(self) -> Tensor:
        """The keys that each query attends to, [b h q k] of bool: with a probability above 0, and not hidden."""
        return (self.tape[self.softmax.result] > 0) & (self.tape[self.masked] > LOWEST / 2)

    @cached_property
    def kept(self) -> Tensor:
        """The keys to which any query attends, [b 1 1 k] of bool; padding is left out."""
        return self.allowed.any(-2, keepdim=True).any(1, keepdim=True)

    @cached_property
    def causal(self) -> bool:
        """Whether no query attends to later positions."""
        queries, keys = self.allowed.shape[-2:]
        later = torch.ones(queries, keys, dtype=torch.bool).triu(1)
        return queries == keys > 1 and not bool((self.allowed & later).any())

    @cached_property
    def own(self) -> bool:
        """Whether it is self-attention: queries and keys have the same positions."""
        return self.tape[self.query].shape[-2] == self.tape[self.key].shape[-1]

    @cached_property
    def merge(self) -> Call | None:
        """The call that joins the heads, [b h s d] -> [b s (h d)]; None where there is none."""
        shape = self.tape[self.context.result].shape
        pending, visited = [self.context.result], 0
        while pending and visited < 12:
            ref = pending.pop(0)
            visited += 1
            if len(shape) == 4 and self.tape[ref].shape == (shape[0], shape[2], shape[1] * shape[3]):
                return self.tape.maker(ref)
            pending += [call.result for call in self.tape.users(ref)]
        return None

    def _masks(self, step: Call) -> bool:
        """Return whether a step applies a mask, a tensor without parameters that is not a bias."""
        others = [read for read in step.reads if not self.tape.learned(read) and self.tape[read].ndim > 0]
        return bool(others) and step.name in MASKING and not self._biases(step, others[0])

    def _biases(self, step: Call, other: Ref) -> bool:
        """Return whether a step adds unmasked numbers that differ between heads, such as linear biases."""
        value = self.tape[other]
        heads = value.ndim >= 3 and value.shape[-3] > 1 and value.is_floating_point()
        return step.name in SUM and heads and bool((value > LOWEST).all())


def flat(heads: Tensor) -> Tensor:
    """Join heads, [b h s d] -> [b s (h d)]."""
    return heads.transpose(1, 2).flatten(2)


def unflat(value: Tensor, *sizes: int) -> Tensor:
    """Split the last axis into several."""
    return value.reshape(*value.shape[:-1], *sizes)


def with_heads(attention: Attention, change: Callable[[Heads], Heads]) -> dict[int, Rewrite]:
    """Return the rewrites of an attention whose query, key and value are changed, each [b h s d]."""

    def heads(values: Values) -> Heads:
        return change((values[attention.query], values[attention.key].mT, values[attention.value]))

    def product(values: Values, call: Call) -> Tensor:
        query, key, _ = heads(values)
        return query @ key.mT

    def context(values: Values, call: Call) -> Tensor:
        return values[call.reads[0]] @ heads(values)[2]

    return {attention.product.number: product, attention.context.number: context}


ORDERS = ("(p h d)", "(h p d)", "(h d p)", "(d h p)", "(d p h)", "(p d h)")
"""How the features of a fused projection may lie: p is query, key and value, h the head, d the feature in it."""

BLOCKS, BY_GROUPS = "all queries, all keys, all values", "by groups of heads"
"""The same where fewer heads of keys and values are shared by groups of queries (Ainslie et al. 2023)."""


@dataclass(frozen=True, eq=False)
class Projections:
    """The projections of a self-attention, before anything is done to their results, such as a rotation.

    Attributes:
        order: how the features lie in the fused result, or would if the three results were joined.
        heads, groups: the number of heads of queries, and of keys and values.
    """

    attention: Attention
    order: str
    heads: int
    groups: int

    @classmethod
    def of(cls, attention: Attention) -> Projections | None:
        """Return the projections of an attention; None where they are not three equal parts, or not told apart."""
        tape, linears = attention.tape, attention.linears
        query, value, heads = tape[attention.query], tape[attention.value], attention.heads
        if not attention.own or len(linears) not in (1, 3) or not heads or query.shape[-1] != value.shape[-1]:
            return None
        width = sum(tape[one.call.result].shape[-1] for one in linears)
        rest = width // attention.size - heads
        if width % attention.size or rest <= 0 or rest % 2 or heads % (groups := rest // 2):
            return None
        orders = (BLOCKS, BY_GROUPS) if groups < heads else ORDERS
        for order in orders if len(linears) == 1 else orders[:1]:
            found = cls(attention, order, heads, groups)
            own = found.split(Values(tape))[2].repeat_interleave(heads // groups, 1)
            own = own.flatten(0, 1) if value.ndim == 3 else own
            if own.shape == value.shape and torch.allclose(own, value, rtol=1e-5, atol=1e-7):
                return found
        return None

    def split(self, values: Values) -> Heads:
        """Return query [b h s d], key and value [b g s d]."""
        results = [one.apply(values, one.matrix(values), one.offset(values)) for one in self.attention.linears]
        length = values.tape[self.attention.value].shape[-2]
        return self.read(torch.cat([one.reshape(-1, length, one.shape[-1]) for one in results], -1), self.order)

    def read(self, fused: Tensor, order: str) -> Heads:
        """Return the heads of a fused result [b s e], as they are read in an order."""
        sizes = {"p": 3, "h": self.heads, "d": self.attention.size}
        if order in ORDERS:
            letters = ["b", "s", *order[1:-1].split()]
            split = unflat(fused, *(sizes[letter] for letter in letters[2:]))
            query, key, value = split.permute(*(letters.index(axis) for axis in "pbhsd"))
            return query, key, value
        if order == BLOCKS:
            ends = [count * self.attention.size for count in (self.heads, self.groups, self.groups)]
            parts = [unflat(part, -1, self.attention.size) for part in torch.split(fused, ends, -1)]
        else:
            by_groups = unflat(fused, self.groups, -1, self.attention.size)
            parts = [part.flatten(2, 3) for part in torch.split(by_groups, [self.heads // self.groups, 1, 1], 3)]
        query, key, value = (part.transpose(1, 2) for part in parts)
        return query, key, value

    def fused(self, heads: Heads) -> Tensor:
        """Return the heads as the fused result [b s e] in which they lie in the reference's order."""
        if self.order in ORDERS:
            letters = self.order[1:-1].split()
            stacked = torch.stack(heads)  # [p b h s d]
            return stacked.permute(1, 3, *("pbhsd".index(letter) for letter in letters)).flatten(2)
        query, key, value = (one.transpose(1, 2) for one in heads)  # [b s h d]
        if self.order == BLOCKS:
            return torch.cat([one.flatten(2) for one in (query, key, value)], -1)
        grouped = query.reshape(*query.shape[:2], self.groups, -1, self.attention.size)
        return torch.cat([grouped, key[:, :, :, None], value[:, :, :, None]], 3).flatten(2)

    def rewrites(self, change: Callable[[Heads], Heads]) -> dict[int, Rewrite]:
        """Return the rewrites of what reads the results of the projections, where their heads are changed."""
        tape, linears = self.attention.tape, self.attention.linears
        results = [one.call.result for one in linears]
        widths = [tape[ref].shape[-1] for ref in results]

        def rewrite(values: Values, call: Call) -> Any:  # what the call gives
            changed = torch.split(self.fused(change(self.split(values))), widths, -1)
            pieces = {ref: piece.reshape(tape[ref].shape) for ref, piece in zip(results, changed, strict=True)}
            return replace(values, changed={**values.changed, **pieces}).run(call)

        return {call.number: rewrite for ref in results for call in tape.users(ref)}


def attentions(tape: Tape, linears: Sequence[Linear]) -> Iterator[Attention]:
    """Yield the attentions of a pass, in order."""
    by_call = {linear.call.number: linear for linear in linears}
    for softmax in tape.calls:
        if softmax.kind is not Kind.SOFTMAX or not softmax.reads:
            continue
        steps, product = _score_steps(tape, softmax.reads[0])
        context = _context(tape, softmax.result)
        if product is None or context is None:
            continue
        sources = (product.reads[0], product.reads[1], context.reads[1])
        projections = [linear for linear in (projection(tape, ref, by_call) for ref in sources) if linear is not None]
        yield Attention(tape, product, tuple(reversed(steps)), softmax, context, tuple(dict.fromkeys(projections)))


def _score_steps(tape: Tape, ref: Ref) -> tuple[list[Call], Call | None]:
    """Return the steps between product and softmax, the last first, and the product, or None for it."""
    steps: list[Call] = []
    call = tape.maker(ref)
    while call is not None and call.kind is not Kind.PRODUCT:
        if call.name not in (*MASKING, *CASTING, "tanh"):
            return steps, None
        steps.append(call)
        learned = [read for read in call.reads if tape.learned(read)]
        ref = next((read for read in learned if _follows_product(tape, read)), learned[0] if learned else call.reads[0])
        call = tape.maker(ref)
    return steps, call


def _follows_product(tape: Tape, ref: Ref) -> bool:
    """Return whether a tensor directly follows a product of two activations, and not an embedding of distances."""
    calls = tape.before(ref, lambda call: call.name not in (*MASKING, *CASTING, "tanh"))
    return any(call.kind is Kind.PRODUCT for call in calls)


def _context(tape: Tape, ref: Ref) -> Call | None:
    """Return the call that multiplies the probabilities with the value; None where there is none."""
    for _ in range(6):
        users = tape.users(ref)
        product = next((call for call in users if call.kind is Kind.PRODUCT and call.reads[0] == ref), None)
        if product is not None:
            return product
        following = [call for call in users if call.name in ("dropout", "masked_fill", *CASTING)]
        if not following:
            return None
        ref = following[0].result
    return None
