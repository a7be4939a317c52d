"""Recognising linear layers on a tape: ``F.linear``, ``addmm``, or a product with a parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from porting.causes.replay import Values
from porting.causes.tape import Call, Ref, Tape


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear layer, ``y = x W^T + b``.

    Attributes:
        bias: the bias, or None.
        transposed: the weight is stored [in, out] and not [out, in].
    """

    call: Call
    input: Ref
    weight: Ref
    bias: Ref | None
    transposed: bool

    def matrix(self, values: Values) -> Tensor:
        """Return the weight, [out, in]."""
        weight = values[self.weight]
        return weight.mT if self.transposed else weight

    def offset(self, values: Values) -> Tensor | None:
        """Return the bias, [out], or None."""
        return None if self.bias is None else values[self.bias]

    def apply(self, values: Values, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the layer with another weight [out, in] and bias [out]."""
        return F.linear(values[self.input], weight, bias)

    def name(self, tape: Tape) -> str:
        """Return the name of the weight."""
        return tape.weights.get(self.weight, self.call.module)


def linears(tape: Tape) -> Iterator[Linear]:
    """Yield the linear layers of a pass, in order."""
    for call in tape.calls:
        if call.name == "linear":
            yield Linear(call, call.args[0], call.argument(1, "weight"), call.argument(2, "bias"), transposed=False)
        elif call.name == "addmm":
            bias, source, weight = (call.args + tuple(call.kwargs.values()))[:3]
            if weight in tape.weights:
                yield Linear(call, source, weight, bias, transposed=True)
        elif call.name in ("matmul", "__matmul__") and (matrix := _matrix(tape, call.args[1])) is not None:
            yield Linear(call, call.args[0], matrix, None, transposed=matrix == call.args[1])


def _matrix(tape: Tape, ref: Ref) -> Ref | None:
    """Return the weight that a matrix is, or is the transpose of; None where it is computed."""
    turned = tape.maker(ref)
    if turned is not None and turned.name in _TRANSPOSING and tape[ref].ndim == 2:
        source = turned.reads[0]
        return source if source in tape.weights and torch.equal(tape[source].T, tape[ref]) else None
    return ref if ref in tape.weights and tape[ref].ndim == 2 else None


_TRANSPOSING = frozenset({"t", "transpose", "permute", "swapaxes", "__get__"})
"""Functions that give the transpose of a matrix; the last one is ``.T``."""


def projection(tape: Tape, ref: Ref, known: dict[int, Linear]) -> Linear | None:
    """Return the nearest linear layer before a tensor."""
    for call in tape.before(ref, lambda call: call.number in known):
        if call.number in known:
            return known[call.number]
    return None
