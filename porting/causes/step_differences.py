"""Naming the difference between a step of the port and the reference's step: function, number, tensor, order, mask."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import accumulate, islice, permutations
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from porting.causes.diverging import (
    MASKED,
    MOVING,
    Region,
    TensorIndex,
    is_close,
    is_moved_weight,
    line_of,
    moments,
    same_numbers,
)
from porting.causes.functions import ACTIVATION
from porting.causes.replay import Values
from porting.causes.tape import Call, Part, Ref, Tape
from porting.frames import from_here
from porting.tracing.calls import Kind as TraceKind
from porting.tracing.calls import argument_names, kind_of

ARITHMETIC = ("add", "sub", "mul", "div", "pow")
"""Functions whose numbers are mentioned in a report."""

MAX_LAYOUTS = 8
"""Number of layouts in which a tensor is compared with another."""


class Kind(StrEnum):
    """How a step differs from the reference's."""

    FUNCTION = "another function"
    NUMBER = "another number"
    TENSOR = "wrong tensor"
    ORDER = "another order"
    CONSTANT = "other constants"
    VALUES = "other numbers"
    MASK = "other mask"
    ROWS = "other rows looked up"
    UNUSED = "parameter not used"
    EXTRA = "a step too many"
    LEFT_OUT = "step left out"
    MOVED = "step in another place"
    EXCHANGED = "steps in the other order"
    GATED = "activation of a product"
    SEQUENCE = "parts in another order"


HIDDEN = -30.0
"""What is added to a score that is hidden: e to the power of it is below rounding. Swin adds -100."""


WORDS: Mapping[Kind, tuple[str, str]] = {
    Kind.FUNCTION: ("a step calls a different function than the reference", "call the function of the reference"),
    Kind.NUMBER: ("a step gets a different number than in the reference", "take the number from the config"),
    Kind.TENSOR: (
        "a step reads another tensor than the step of the reference",
        "check which variable the line reads, and how its value is computed",
    ),
    Kind.ORDER: (
        "a step reads the reference's numbers in a different order",
        "check how axes are split, transposed and joined before this line",
    ),
    Kind.CONSTANT: (
        "a step adds or multiplies by a tensor without weights that differs from the reference's",
        "check how it is computed: a mask, positions, slopes",
    ),
    Kind.VALUES: (
        "a step gives other numbers than the reference's on some inputs, and the reference's on others",
        "compare what the line does with such inputs: their length, positions, mask or token ids",
    ),
    Kind.MASK: (
        "a mask hides other positions than the reference's",
        "compare how the mask is built: an index off by one, another axis, another argument",
    ),
    Kind.ROWS: (
        "a table is read at other indices than in the reference",
        "compare how the indices are computed: positions, buckets of distances, token types",
    ),
    Kind.UNUSED: ("a parameter is not used where the reference uses it", "use it"),
    Kind.EXTRA: ("the port has a step that the reference does not have", "remove it"),
    Kind.LEFT_OUT: ("a step of the reference is missing", "add it where the reference has it"),
    Kind.MOVED: ("a step is in a different place than in the reference", "move it to where the reference has it"),
    Kind.EXCHANGED: ("two steps are in the opposite order than in the reference", "exchange them"),
    Kind.GATED: (
        "the activation is applied to a product, where the reference multiplies what the activation gives",
        "apply it to the gate alone: act(gate(x)) * up(x)",
    ),
    Kind.SEQUENCE: ("parts of a layer run in a different order than in the reference", "use the reference's order"),
}
"""The port's mistake and its fix, by kind."""


@cache
def generic_path(path: str) -> str:
    """Return a module's path with ``{i}`` for layer numbers, so that the same place in all layers has one name."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "{i}", path) or "the model"


def describe(tape: Tape, ref: Ref, path_text: Callable[[str], str] = generic_path) -> str:
    """Describe a tensor for a report.

    Args:
        path_text: how the paths of modules and parameters are written.
    """
    if ref in tape.weights:
        return path_text(tape.weights[ref])
    call, part = tape.maker(ref), ""
    while call is not None and call.name in MOVING and call.reads:
        part = f"part {call.writes.index(ref)} of " if len(call.writes) > 1 else part
        ref = max(call.reads, key=lambda one: tape[one].numel()) if call.name in ("cat", "stack") else call.reads[0]
        call = tape.maker(ref)
    if ref in tape.weights:
        return path_text(tape.weights[ref])
    if call is None:
        return "an input"
    return f"{part}the output of {call.name.strip('_')} in {path_text(call.module)}"


@dataclass(frozen=True)
class Repair:
    """A step of the port that differs from the reference's.

    Attributes:
        kind: how the two differ.
        line: ``file:line`` of the user's code.
        operation: the torch function that the port calls there.
        detail: the difference, in words.
        where: the module of the reference with the corresponding step; empty where there is none.
        missing: the torch function of the reference that is missing before the step, if any.
    """

    kind: Kind
    line: str
    operation: str
    detail: str
    where: str
    missing: str = ""

    @property
    def step(self) -> tuple[str, str]:
        """The line and the function."""
        return self.line, self.operation

    @property
    def key(self) -> tuple[Kind, str, str]:
        """The identity of a mistake that occurs in several layers."""
        return self.kind, self.line, self.operation


MASKINGS = frozenset({"masked_fill", "where", "add"})
"""The functions by which scores are masked."""

MOST_BEFORE = 4
"""How many steps of one kind are followed back from a step that reads another tensor than the reference's."""


class StepComparison:
    """Compares steps of the port with steps of the reference.

    Args:
        port, reference: the two tapes.
        index, weights: the reference's computed tensors, and its weights.
        values: the port's values, with earlier steps repaired.
        region: the steps that differ with these values.
    """

    def __init__(
        self, port: Tape, reference: Tape, index: TensorIndex, weights: TensorIndex, values: Values, region: Region
    ) -> None:
        self._port, self._reference = port, reference
        self._index, self._weights = index, weights
        self._values, self._region = values, region

    def repair(self, step: Call, value: Tensor, theirs: Ref | None) -> Repair:
        """Describe the mistake in a step whose result has to be replaced.

        Args:
            theirs: the tensor of the reference that the value is; None where it is an operand of the step itself.
        """
        call = self.maker(theirs) if theirs is not None else None
        operation = operation_of(step)
        if call is None:
            arguments = _number_arguments(step).values() if operation in ARITHMETIC else ()
            numbers = " and ".join(f"{number:g}" for number in arguments)
            weight = next((describe(self._port, ref) for ref in step.reads if is_moved_weight(self._port, ref)), "")
            by = f" by {numbers}" if numbers else f" with {weight}" if weight else ""
            detail = f"{operation}{by}, which the reference does not do"
            return Repair(Kind.EXTRA, line_of(step), operation, detail, "")
        looked_up = self._other_rows(step, call)
        if looked_up is not None:
            return looked_up
        kind, detail, missing = self._difference(step, value, call)
        behind = self._before(step, call) if kind is Kind.TENSOR else None
        for _ in range(MOST_BEFORE):
            if kind is not Kind.TENSOR or behind is None:
                break
            kind, detail, missing = self._difference(*behind)
            behind = self._before(behind[0], behind[2])
        whole = self._other_input(step, call) if kind is Kind.TENSOR else None
        return whole or Repair(kind, line_of(step), operation, detail, call.module, missing)

    def _before(self, step: Call, call: Call) -> tuple[Call, Tensor, Call] | None:
        """Return the steps that gave the first operand in which two steps differ, if both are of one kind.

        That one softmax is not the other says nothing: what differs is what they are given.  But an operand that is
        another tensor of the reference is the mistake itself.
        """
        operands, rest = self._operands(step, list(dict.fromkeys(call.reads)))
        ref, like = next(((ref, like) for ref, like, match in operands if match is None), (None, []))
        if ref is None or like or not rest:
            return None
        theirs = unmoved(self._reference, rest[0])
        own, maker = self._port.maker(unmoved(self._port, ref)), self._reference.maker(theirs)
        if own is None or maker is None:
            return None
        names = {operation_of(own), operation_of(maker)}
        alike = len(names) == 1 or names <= MASKINGS or self._reads_the_same(own, maker)
        return (own, self._reference[theirs], maker) if alike else None

    def _reads_the_same(self, step: Call, call: Call) -> bool:
        """Whether all activations that two steps read are the same: what differs is the function."""
        operands, rest = self._operands(step, list(dict.fromkeys(call.reads)))
        computed = [ref for ref in rest if self._reference.learned(ref) and ref not in self._reference.weights]
        return bool(operands) and not computed and all(match is not None for _, _, match in operands)

    def _operands(self, step: Call, theirs: Sequence[Ref]) -> tuple[list[tuple[Ref, list[Ref], Ref | None]], list[Ref]]:
        """Return a step's operands, with what of the reference is like each, and which of ``theirs`` it is.

        Returns:
            The operands, and those of ``theirs`` that are none of them.
        """
        rest, found = list(theirs), []
        for ref in dict.fromkeys(step.reads):
            like = [*self._index.like(self._values[ref]), *self._weights.like(self._values[ref])]
            match = next((one for one in rest if one in like), None)
            if match is not None:
                rest.remove(match)
            found.append((ref, like, match))
        return found, rest

    def is_counterpart(self, step: Call, call: Call) -> bool:
        """Return whether a step of the port calls the same function as one of the reference, with the same weights."""
        ours, theirs = {*self.weights_of(step)}, {ref for ref in call.reads if ref in self._reference.weights}
        return operation_of(step) == operation_of(call) and bool(ours) and ours == theirs

    def maker(self, ref: Ref) -> Call | None:
        """Return the reference's call that computed a tensor, before it was rearranged."""
        return self._reference.maker(unmoved(self._reference, ref))

    def _other_rows(self, step: Call, call: Call) -> Repair | None:
        """Return the repair of a step that looks up other rows of a table than the reference, or reads such rows."""
        for lookup in self._lookups(self._port, step):
            for theirs in self._lookups(self._reference, call):
                tables = (self._values[lookup.weight], self._reference[theirs.weight])
                same_table = tables[0].shape == tables[1].shape and _close(*tables)
                if same_table and (found := other_rows(lookup, theirs, self._values, self._reference)):
                    return found
        return None

    @staticmethod
    def _lookups(tape: Tape, step: Call) -> Iterator[Lookup]:
        """Yield the lookups that a step is, or whose result it reads."""
        makers = (tape.maker(unmoved(tape, ref)) for ref in step.reads)
        for call in (step, *(maker for maker in makers if maker is not None)):
            lookup = lookup_of(tape, call)
            if lookup is not None:
                yield lookup

    def _other_input(self, step: Call, call: Call) -> Repair | None:
        """Return the repair of a module that is given another tensor than the reference's, by the calling line.

        A module of the port that computes by itself what the reference's is given is a larger part than that one.
        """
        ours, theirs = _outermost(self._port, step), _outermost(self._reference, call)
        if ours is None or theirs is None or not ours.path or ours.input is None or theirs.input is None:
            return None
        like = self._index.like(self._values[ours.input])
        if theirs.input in like or not like or not ours.lines:
            return None
        within = (call for call in self._port.calls if ours.first <= call.number < step.number)
        if any(theirs.input in self._index.like(self._values[ref]) for call in within for ref in call.writes):
            return None
        actual, expected = self._described_apart(like[0], theirs.input)
        place = generic_path(call.module)
        subject = f"{operation_of(step)} in {place}" if ours.input in step.reads else place
        detail = f"{subject} reads {actual}, where the reference's reads {expected}"
        return Repair(Kind.TENSOR, from_here(ours.lines[0]), operation_of(step), detail, theirs.path)

    def _described_apart(self, first: Ref, second: Ref) -> tuple[str, str]:
        """Return what two tensors of the reference are, told apart by layers, by the call's number or by shape."""
        refs = first, second
        plain = [describe(self._reference, ref, str) for ref in refs]
        ways = (
            [describe(self._reference, ref) for ref in refs],
            plain,
            [f"{text}{_ordinal(self._reference, ref)}" for text, ref in zip(plain, refs, strict=True)],
            [f"{text}, {list(self._reference[ref].shape)}" for text, ref in zip(plain, refs, strict=True)],
        )
        texts = next((one for one in ways if one[0] != one[1]), ways[-1])
        return texts[0], texts[1]

    def _difference(self, step: Call, value: Tensor, call: Call) -> tuple[Kind, str, str]:
        """Return how two steps differ, in words, and what the reference does before its step that the port does not."""
        name, place = operation_of(step), generic_path(call.module)
        mask_text = self._mask_difference(step, value)
        if mask_text:
            return Kind.MASK, f"{name} in {place} {mask_text}", ""
        if name != operation_of(call) and not any(ref in call.reads for ref in self.weights_of(step)):
            if operation_of(call) in self._made_by(self._port, step) and name in self._made_by(self._reference, call):
                kind = Kind.GATED if self._is_gated(step, call) else Kind.EXCHANGED
                return kind, f"{name} comes after {operation_of(call)} in {place}", ""
            where = _places_text(self._own_result(step), value)
            return Kind.FUNCTION, f"{name}, where {place} of the reference has {operation_of(call)}{where}", ""
        if told := _other_arguments(step, call):
            return told[0], f"{name} in {place}{told[1]}", ""
        kind, text, expected = self._operand(step, call, value)
        if kind is Kind.LEFT_OUT:
            return kind, f"{text}{expected} of the reference is left out", text
        whole = f"{name} in {place} {text}" + (f", where the reference's {expected}" if expected else "")
        return kind, text if kind is Kind.GATED else whole, ""

    def has_own_weights(self, step: Call) -> bool:
        """Return whether a step reads stored tensors that the reference lacks; no other step can replace it."""
        stored = [ref for ref in step.reads if self._port.maker(ref) is None or is_moved_weight(self._port, ref)]
        for ref in stored:
            matrix, whole = self._values[ref], self._values[unmoved(self._port, ref)]
            if not matrix.is_floating_point() or moments(matrix) is None:
                continue
            if not any(index.like(value) for index in (self._weights, self._index) for value in (matrix, whole)):
                return True
        return False

    def weights_of(self, step: Call) -> Iterator[Ref]:
        """Yield the reference's weights with the numbers of a step's weights."""
        for ref in step.reads:
            if is_moved_weight(self._port, ref) and self._port.learned(ref):
                yield from self._weights.like(self._values[ref])

    @staticmethod
    def _made_by(tape: Tape, call: Call) -> set[str]:
        """Return the functions that computed what a call reads."""
        makers = (tape.maker(unmoved(tape, ref)) for ref in call.reads)
        return {operation_of(maker) for maker in makers if maker is not None}

    def _own_result(self, step: Call) -> Tensor:
        """Return the port's own result of a step, with earlier steps repaired."""
        result: Tensor = tree_leaves(self._values.run(step))[0]
        return result

    def _is_gated(self, step: Call, call: Call) -> bool:
        """Whether a step is the activation of a product, and the reference's multiplies what the activation gives."""
        name, made = operation_of(step), {self.maker(ref) for ref in call.reads}
        alike = len({self._reference[ref].shape for ref in call.reads}) == 1  # and neither is a gain, for each feature
        products = operation_of(call) == "mul" and len(made) == 2 and None not in made and alike
        applied = name in self._made_by(self._reference, call) and "mul" in self._made_by(self._port, step)
        return name in ACTIVATION and products and applied

    def _mask_difference(self, step: Call, value: Tensor) -> str:
        """Return how a mask differs from the reference's; empty where anything but the mask differs."""
        own = self._own_result(step)
        return mask_text(own, value) if own.shape == value.shape and own.is_floating_point() else ""

    def constant(self, step: Call, call: Call, own: Tensor, needed: Tensor) -> Repair:
        """Describe a constant of the port, which a step reads, that has other numbers than the reference's."""
        place, name = generic_path(call.module), operation_of(step)
        own, needed = _common(own.double(), needed.double())
        hidden = mask_text(own, needed)
        if hidden:
            return Repair(Kind.MASK, line_of(step), name, f"{name} in {place} {hidden}", call.module)
        ours, theirs = (part.masked_fill(~(part > MASKED), 0.0) for part in (own, needed))
        text = f": {float(own):g} where the reference has {float(needed):g}" if own.numel() == 1 else ""
        # Adding a number to all scores of a query does not change its probabilities.
        relative = [(part - part[..., :1]) * (own > MASKED) for part in (ours, theirs)] if name == "add" else []
        text = text or _order_text(ours, theirs) or (relative and _order_text(*relative)) or _places_text(ours, theirs)
        detail = f"{name} in {place} takes other numbers than the reference's{text}"
        return Repair(Kind.CONSTANT, line_of(step), name, detail, call.module)

    def _operand(self, step: Call, call: Call, value: Tensor) -> tuple[Kind, str, str]:
        """Return which operand differs: what the port reads, and what the reference reads."""
        rest = list(dict.fromkeys(call.reads))
        if operation_of(step) == "matmul" and len(rest) > 2:  # a port may add the bias in a call of its own
            rest = [ref for ref in rest if self._reference[ref].ndim > 1 or ref not in self._reference.weights]
        unlike: list[tuple[Ref, list[Ref]]] = []
        reordered: list[tuple[Ref, Ref]] = []
        operands, rest = self._operands(step, rest)
        for ref, like, match in operands:
            if match is None:
                unlike.append((ref, like))
            same = match is not None and self._reference[match].shape == self._values[ref].shape
            twins = like if match is None else [match]
            close = self._index.close
            if twins and not any(_equal(self._values[ref], self._reference[one], close, same=same) for one in twins):
                reordered.append((ref, twins[0]))
        if reordered:
            ref, match = reordered[0]
            reordering = self._region.reordering_step(ref)
            line_text = f", since {line_of(reordering)}" if reordering is not None else ""
            order_text = _order_text(self._values[ref], self._reference[match])
            return Kind.ORDER, f"reads {describe(self._reference, match)} in another order{order_text}{line_text}", ""
        if not unlike and rest:
            kind = Kind.UNUSED if rest[0] in self._reference.weights else Kind.TENSOR
            return kind, f"does not read {describe(self._reference, rest[0])}", ""
        if not rest:
            own, close = self._own_result(step), self._index.close
            same = own.shape == value.shape
            reordered_only = own.numel() == value.numel() and same_numbers(own, value, close)
            if reordered_only and not _equal(own, value, close, same=same):
                return Kind.ORDER, f"gives its numbers in another order{_order_text(own, value)}", ""
            return Kind.FUNCTION, "gives other numbers for what the reference's is given too", ""
        return self._other_operand(*unlike[0], rest)

    def _other_operand(self, ref: Ref, like: Sequence[Ref], rest: list[Ref]) -> tuple[Kind, str, str]:
        """Return what a step reads in place of the reference's operand."""
        learned = self._port.learned(ref)
        rest.sort(key=lambda ref: (self._reference.learned(ref) != learned, ref in self._reference.weights))
        theirs = rest[0]
        source = unmoved(self._port, ref)
        whole = self._values[source]
        if source != ref and unmoved(self._reference, theirs) in [*self._index.like(whole), *self._weights.like(whole)]:
            return Kind.ORDER, f"reads another part of {describe(self._reference, theirs)}", ""
        expected = f"reads {describe(self._reference, theirs)}"
        maker = self._reference.maker(unmoved(self._reference, theirs))
        if (
            like
            and maker is not None
            and any(known in maker.reads for ref in like for known in (ref, unmoved(self._reference, ref)))
        ):
            if self._adds_a_mask(maker):
                return (
                    Kind.MASK,
                    "reads scores that nothing hides",
                    f"reads those with the mask that is added in {generic_path(maker.module)}",
                )
            weight = next((ref for ref in maker.reads if is_moved_weight(self._reference, ref)), None)
            of = "" if weight is None else f" of {describe(self._reference, weight)}"
            return Kind.LEFT_OUT, operation_of(maker), f"{of} in {generic_path(maker.module)}"
        own = self._port.maker(source)
        if own is not None and maker is not None and self._is_gated(own, maker):
            return Kind.GATED, f"{operation_of(own)} comes after mul in {generic_path(maker.module)}", ""
        known = like or (self._index.like(whole) if source != ref else [])
        if known:
            actual, expected = self._described_apart(known[0], theirs)
            return Kind.TENSOR, f"reads {actual}", f"reads {expected}"
        return Kind.TENSOR, f"reads {describe(self._port, ref)} of the port", expected

    def _adds_a_mask(self, call: Call) -> bool:
        """Whether a call of the reference adds zeros and large negative numbers, which a softmax makes zero."""
        added = [self._reference[ref] for ref in call.reads if not self._reference.learned(ref)]
        floats = [one for one in added if one.is_floating_point()]
        return operation_of(call) == "add" and any(
            bool(((one == 0) | (one <= HIDDEN)).all() and (one == 0).any() and (one <= HIDDEN).any()) for one in floats
        )


@dataclass(frozen=True)
class Lookup:
    """A call that reads rows of a table of weights.

    Attributes:
        call: the call.
        weight: the table, [rows, channels].
        indices: the rows that are read, of integers.
    """

    call: Call
    weight: Ref
    indices: Ref


def lookup_of(tape: Tape, call: Call) -> Lookup | None:
    """Return a call as a lookup; None where it is none."""
    weights = [ref for ref in call.reads if is_moved_weight(tape, ref) and tape[ref].ndim > 1]
    indices = [ref for ref in call.reads if not tape[ref].is_floating_point() and tape[ref].dtype != torch.bool]
    named = operation_of(call) in ("embedding", "getitem", "index_select", "gather")
    return Lookup(call, weights[0], indices[0]) if named and weights and len(indices) == 1 else None


def other_rows(ours: Lookup, theirs: Lookup, values: Values, reference: Tape) -> Repair | None:
    """Return the repair of a lookup at other rows than the reference's; None for the same, or for unlike shapes."""
    try:
        text = _index_text(values[ours.indices], reference[theirs.indices])
    except RuntimeError:  # of shapes that cannot be compared
        return None
    place, operation = theirs.call.module, operation_of(ours.call)
    return Repair(Kind.ROWS, line_of(ours.call), operation, f"{generic_path(place)} {text}", place) if text else None


def _index_text(ours: Tensor, theirs: Tensor) -> str:
    """Return how the indices of two lookups differ; empty where they are equal."""
    shape: torch.Size = torch.broadcast_shapes(ours.shape, theirs.shape)  # type: ignore[no-untyped-call]  # as torch has it
    ours, theirs = ours.long().expand(shape), theirs.long().expand(shape)
    return "" if torch.equal(ours, theirs) else next(_index_texts(ours, theirs))


def _index_texts(ours: Tensor, theirs: Tensor) -> Iterator[str]:
    """Yield how two tensors of indices differ, the most telling first."""
    offset = int((ours - theirs).flatten()[0])
    if bool((ours - theirs == offset).all()):
        yield f"is read at index i {offset:+d} where the reference reads it at i"
    square = ours.ndim > 1 and ours.shape[-1] == ours.shape[-2]
    if square and torch.equal(ours, theirs.mT):
        yield "is read at the indices of the distances with the other sign"
    if square:
        later = torch.ones(ours.shape[-2:], dtype=torch.bool).triu(1)
        alike = [len({*rows[..., later].flatten().tolist()}) == 1 for rows in (ours, theirs)]
        texts = (
            "one index for each later key (both directions, as in an encoder)",
            "the same index for all later keys (earlier keys only, as in a decoder)",
        )
        if alike[0] != alike[1]:
            yield f"is read at {texts[alike[0]]}, where the reference has {texts[alike[1]]}"
    if ours.ndim > 1 and bool((ours - ours[..., :1] == torch.arange(ours.shape[-1])).all()):
        yield "is read at one position after the other, where the reference skips places, such as padding"
    if bool((ours == ours.flatten()[0]).all()):
        yield f"is read at index {int(ours.flatten()[0])} everywhere, unlike in the reference"
    place = tuple((ours != theirs).nonzero()[0].tolist())
    far = f", for a distance of {place[-1] - place[-2]} between key and query" if square else ""
    share = f"at {int((ours != theirs).sum()):,} of {ours.numel():,} places"
    yield f"is read at other indices {share}: {int(ours[place])} where the reference has {int(theirs[place])}{far}"


def _outermost(tape: Tape, step: Call) -> Part | None:
    """Return the innermost call of a module around a step, or the outermost one that begins with it."""
    around = sorted((part for part in tape.parts if part.first <= step.number < part.last), key=_length)
    given = [part for part in around if (part.input, part.first) == (around[0].input, around[0].first)]
    return given[-1] if given else None


def _length(part: Part) -> int:
    return part.last - part.first


def _ordinal(tape: Tape, ref: Ref) -> str:
    """Return the how many-th of several like results of one module a tensor is."""
    maker = tape.maker(unmoved(tape, ref))
    alike = [call for call in tape.calls if maker and (call.name, call.module) == (maker.name, maker.module)]
    return f" (call {alike.index(maker) + 1} of {len(alike)})" if maker and len(alike) > 1 else ""


def unmoved(tape: Tape, ref: Ref) -> Ref:
    """Return the tensor that a rearranged tensor comes from."""
    return tape.past(ref, MOVING)[-1]


def mask_text(own: Tensor, value: Tensor) -> str:
    """Return how two tensors of one shape differ in what is masked; empty where other numbers differ, or none."""
    ours, theirs = (~(part > MASKED) for part in (own, value))
    shown = ~(ours | theirs)
    if not ours.any() or not theirs.any() or torch.equal(ours, theirs) or not _close(own[shown], value[shown]):
        return ""
    shown_more, hidden_more = int((theirs & ~ours).sum()), int((ours & ~theirs).sum())
    parts = [f"shows {shown_more:,} that the reference hides"] if shown_more else []
    parts += [f"hides {hidden_more:,} that the reference shows"] if hidden_more else []
    return f"{' and '.join(parts)}, of {own.numel():,}"


def departure_text(own: Tensor, value: Tensor) -> str:
    """Return where two tensors of one shape differ, and the first numbers that do; empty where they cannot be told."""
    differs = ~torch.isclose(own.double(), value.double(), rtol=1e-9, atol=1e-9, equal_nan=True)
    if not bool(differs.any()):
        return ""
    place = tuple(differs.nonzero()[0].tolist())
    numbers = [f"{bool(one)}" if own.dtype == torch.bool else f"{float(one):g}" for one in (own[place], value[place])]
    places = _places_text(own, value) or f", at {int(differs.sum()):,} of {own.numel():,} places"
    return f"{places}: {numbers[0]} where the reference has {numbers[1]}"


def _equal(value: Tensor, theirs: Tensor, close: float, *, same: bool) -> bool:
    """Return whether two tensors are equal but for roundings, in the same shape or in some layout."""
    every = islice(layouts(theirs, tuple(value.shape)), 1 if same else MAX_LAYOUTS)
    return any(is_close(value, layout, close) for layout in every)


def same_but_rounded(value: Tensor, theirs: Tensor) -> bool:
    """Return whether two constants differ as float32 and float64 do: sines of positions, say, may be either."""
    value, theirs = _common(value.double(), theirs.double())
    return torch.allclose(value, theirs, rtol=1e-5, atol=1e-5)


def _common(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Broadcast two constants; of tables of other lengths, as of positions, what both have."""
    axes = max(first.ndim, second.ndim)
    first, second = (one[(None,) * (axes - one.ndim)] for one in (first, second))
    for axis, sizes in enumerate(zip(first.shape, second.shape, strict=True)):
        if 1 not in sizes:
            first, second = (one.narrow(axis, 0, min(sizes)) for one in (first, second))
    first, second = torch.broadcast_tensors(first, second)  # type: ignore[no-untyped-call]  # torch does not type it
    return first, second


def _close(value: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(value.double(), theirs.double(), rtol=1e-9, atol=1e-9)


def _order_text(value: Tensor, theirs: Tensor) -> str:
    """Return the order of an axis, or of two neighbouring ones, if that is all that differs; else empty."""
    for layout in islice(layouts(theirs, tuple(value.shape)), MAX_LAYOUTS):
        axes_pairs = [(axis, axis) for axis in range(value.ndim)] + [(axis, axis + 1) for axis in range(value.ndim - 1)]
        for first, last in axes_pairs:
            ours, theirs_rows = (_rows(part.double().flatten(first, last), first) for part in (value, layout))
            if not 1 < len(ours) <= MAX_PERMUTED:
                continue
            matches = torch.cdist(ours, theirs_rows) <= 1e-7 * float(theirs_rows.norm() + 1e-300)
            order = matches.double().argmax(1).tolist()
            if bool((matches.sum(1) == 1).all()) and order != [*range(len(ours))]:
                return f" (in the order {_listed(order)} along an axis of {len(ours)})"
    return ""


def _rows(value: Tensor, axis: int) -> Tensor:
    """Return a row for each index of an axis, [n, elements]."""
    return value.movedim(axis, 0).reshape(value.shape[axis], -1)


def _places_text(value: Tensor, theirs: Tensor) -> str:
    """Return the indices of an axis at which two tensors differ, if these are few; else empty."""
    if value.shape != theirs.shape:
        return ""
    differs = ~torch.isclose(value.double(), theirs.double(), rtol=1e-9, atol=1e-9)
    for axis, extent in enumerate(value.shape):
        places = _rows(differs, axis).any(1).nonzero().flatten().tolist()
        if 0 < len(places) <= min(MAX_LISTED, extent // 2):
            return f", at {_listed(places)} of an axis of {extent} only"
    return ""


def _listed(places: Sequence[int]) -> str:
    return " ".join(map(str, places[:MAX_LISTED])) + (" ..." if len(places) > MAX_LISTED else "")


MAX_PERMUTED = 512
"""Longest axis whose order is compared."""

MAX_LISTED = 16
"""Number of indices that are listed."""


def operation_of(call: Call) -> str:
    """Return the name of a call's function, the same for an operator and a function."""
    name = re.sub(r"^_+[ir]?(?=(add|sub|mul|truediv|matmul|div)_)", "", call.name).strip("_")
    if kind_of(call.function) in (TraceKind.PRODUCT, TraceKind.EINSUM, TraceKind.BIASED_PRODUCT):
        return "matmul"
    return {"truediv": "div", "true_divide": "div", "multiply": "mul", "subtract": "sub"}.get(name, name)


def step_key(step: Call) -> tuple[str, str]:
    """Return the line and the function of a step, which are the same in all layers."""
    return line_of(step), operation_of(step)


def _number_arguments(call: Call) -> dict[str, float]:
    """Return the numbers that a call was given, by the names of the arguments where these are known."""
    names = argument_names(call.function)
    arguments: dict[str, Any] = {}
    for place, value in enumerate(call.args):
        arguments[names[place] if place < len(names) else f"argument {place + 1}"] = value
    arguments |= call.kwargs
    return {name: float(value) for name, value in arguments.items() if isinstance(value, bool | int | float)}


def _other_arguments(step: Call, call: Call) -> tuple[Kind, str] | None:
    """How the numbers and words that a step is given differ from those of the reference's step of the same function."""
    ours, theirs = _number_arguments(step), _number_arguments(call)
    differing = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    if differing:
        texts = (f"{name} is {ours[name]:g} where the reference has {theirs[name]:g}" for name in differing)
        return Kind.NUMBER, f": {', '.join(texts)}"
    words, others = _word_arguments(step), _word_arguments(call)
    if operation_of(step) == operation_of(call) and words != others:
        told, known = (", ".join(f"{key}={word!r}" for key, word in some.items()) for some in (words, others))
        return Kind.FUNCTION, f" with {told or 'its defaults'}, where the reference has {known or 'its defaults'}"
    return None


def _word_arguments(call: Call) -> dict[str, str]:
    """Return the words that a call was given by name, such as ``approximate="tanh"``."""
    return {name: value for name, value in call.kwargs.items() if isinstance(value, str)}


def layouts(value: Tensor, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield a tensor in each layout that has the shape; nothing if it has another number of elements."""
    if value.numel() != math.prod(shape):
        return
    if tuple(value.shape) == shape:
        yield value
    done = {tuple(range(value.ndim))} if tuple(value.shape) == shape else set()
    if value.ndim > 5:
        return
    extents = [number for number in shape if number != 1]
    exact: list[tuple[int, ...]] = []
    joined: list[tuple[int, ...]] = []
    for order in permutations(range(value.ndim)):
        if order in done:
            continue
        permuted = [value.shape[axis] for axis in order]
        (exact if [number for number in permuted if number != 1] == extents else joined).append(order)
    for order in (*exact, *(axes for axes in joined if _splits([value.shape[axis] for axis in axes], shape))):
        yield value.permute(order).reshape(shape)


def _splits(sizes: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether one shape results from the other by joining or splitting axes."""
    ends = [set(accumulate((number for number in shape if number != 1), mul)) for shape in (sizes, other)]
    fewer, more = sorted(ends, key=len)
    return fewer <= more
