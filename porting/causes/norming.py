"""Recognising norms on a tape: calls of torch's norms, and norms that are written out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from porting.causes.functions import LARGEST_EPS, LAYER, NORMS, RMS, SCALING, SUM, norm_of
from porting.causes.replay import Values
from porting.causes.tape import Call, Ref, Tape

CASTS = ("to", "float", "double", "type_as", "type")
ROOTS = ("rsqrt", "sqrt", "pow", "__pow__", "reciprocal")


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm over the last axis.

    Attributes:
        call: the call that returns its result.
        input, weight, bias: what it reads; weight and bias may be None.
        eps: the number that is added to the variance or to the mean of squares.
        kind: ``layer`` or ``rms``.
        added: a number that is added to the weight: 1 where the gain is stored as its difference from 1.
        first: the number of its first call.
    """

    call: Call
    input: Ref
    weight: Ref | None
    bias: Ref | None
    eps: float
    kind: str = LAYER
    added: float = 0.0
    first: int = 0

    @property
    def output(self) -> Ref:
        """The normed tensor."""
        return self.call.result

    def gain(self, values: Values) -> Tensor | None:
        """Return the factor after normalisation, [n], or None."""
        return None if self.weight is None else values[self.weight] + self.added if self.added else values[self.weight]

    def of(self, value: Tensor, eps: float | None = None) -> Tensor:
        """Normalise another tensor, without gain and bias."""
        return NORMS[self.kind](value, self.eps if eps is None else eps)

    def whole(self, value: Tensor, values: Values) -> Tensor:
        """Normalise another tensor, with gain and bias."""
        gain = self.gain(values)
        normed = self.of(value) if gain is None else self.of(value) * gain
        return normed if self.bias is None else normed + values[self.bias]


def norms(tape: Tape) -> list[Norm]:
    """Return the norms of a pass, in order."""
    return sorted((*_norm_calls(tape), *_written_out_norms(tape)), key=lambda norm: norm.call.number)


def _norm_calls(tape: Tape) -> Iterator[Norm]:
    for call in tape.calls:
        weight = call.argument(2, "weight")
        if call.name == "layer_norm":
            eps = float(call.argument(4, "eps", 1e-5))
            yield Norm(call, call.args[0], weight, call.argument(3, "bias"), eps, first=call.number)
        elif call.name == "rms_norm" and call.argument(3, "eps") is not None:
            yield Norm(call, call.args[0], weight, None, float(call.argument(3, "eps")), RMS, first=call.number)


def _written_out_norms(tape: Tape) -> Iterator[Norm]:
    """Yield norms that are written out, ``x * rsqrt(mean of squares + eps)``, with their gain and bias."""
    products: set[int] = set()
    for root in tape.calls:
        if root.name not in ROOTS or not tape.learned(root.result) or tape[root.result].shape[-1:] != (1,):
            continue
        for call in tape.users(root.result):
            others = [read for read in call.reads if read != root.result and tape.learned(read)]
            if call.name not in SCALING or len(others) != 1 or call.number in products:
                continue
            norm = _norm_of_product(tape, root, call, others[0])
            if norm is not None:
                products.add(call.number)
                yield _with_gain_and_bias(tape, norm)


def _norm_of_product(tape: Tape, root: Call, call: Call, value: Ref) -> Norm | None:
    """Return the norm that a product of a value and a reciprocal root is, before its gain."""
    maker = tape.maker(value)
    sources = [value]
    if maker is not None and maker.name in ("sub", "__sub__"):  # the mean was subtracted
        sources = [maker.reads[0], value]
    steps = [call for _, call in zip(range(4), tape.before(root.result), strict=False)]
    numbers = [number for call in steps for number in _numbers(tape, call) if 0 <= number <= LARGEST_EPS]
    norm = norm_of(tape[call.result], [tape[source] for source in sources], numbers)
    if norm is None:
        return None
    given = tape.past(sources[norm.source], CASTS)[-1]
    return Norm(call, given, None, None, norm.eps, norm.kind, first=min(call.number for call in steps))


def _numbers(tape: Tape, call: Call) -> Iterator[float]:
    """Yield the numbers that a call was given, as Python floats or as tensors without parameters."""
    for argument in (*call.args, *call.kwargs.values()):
        if isinstance(argument, float):
            yield argument
        elif isinstance(argument, Ref) and tape[argument].ndim == 0 and not tape.learned(argument):
            yield float(tape[argument])


def _with_gain_and_bias(tape: Tape, norm: Norm) -> Norm:
    """Extend a norm by its gain, its bias, and the casts that follow."""
    call, weight, bias, added = norm.call, norm.weight, norm.bias, norm.added
    while len(users := tape.users(call.result)) == 1:
        (user,) = users
        others = [read for read in user.reads if read != call.result]
        if user.name in CASTS:
            call = user
            continue
        if len(others) != 1 or tape[others[0]].ndim != 1 or not tape.learned(others[0]):
            break
        origin = _stored_weight(tape, others[0])
        if user.name in SCALING and "div" not in user.name and origin and weight is None and bias is None:
            weight, added = origin
        elif user.name in SUM and origin and bias is None and not origin[1]:
            bias = origin[0]
        else:
            break
        call = user
    return Norm(call, norm.input, weight, bias, norm.eps, norm.kind, added, norm.first)


def _stored_weight(tape: Tape, ref: Ref) -> tuple[Ref, float] | None:
    """Return the parameter that a vector is, and the number that was added to it."""
    ref = tape.past(ref, CASTS)[-1]
    if ref in tape.weights:
        return ref, 0.0
    call = tape.maker(ref)
    if call is None or call.name not in SUM:
        return None
    summands = [tape.past(read, CASTS)[-1] for read in call.reads]
    number = next((float(argument) for argument in call.args if isinstance(argument, int | float)), None)
    return (summands[0], number) if len(summands) == 1 and summands[0] in tape.weights and number is not None else None
