"""Linear maps on a tape, however they are called: ``F.linear``, or ``addmm`` with the matrix the other way round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from porting.causes.replay import Values
from porting.causes.tape import Call, Ref, Tape


@dataclass(frozen=True, eq=False)
class Linear:
    """``y = x W^T + b``.

    Attributes:
        call: its call.
        input, weight: its tensors.
        bias: the bias, or None.
        turned: the weight is kept [in out] and not [out in].
    """

    call: Call
    input: Ref
    weight: Ref
    bias: Ref | None
    turned: bool

    def matrix(self, values: Values) -> Tensor:
        """The weight [out in]."""
        weight = values[self.weight]
        return weight.mT if self.turned else weight

    def offset(self, values: Values) -> Tensor | None:
        """The bias [out]."""
        return None if self.bias is None else values[self.bias]

    def apply(self, values: Values, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The map with another weight [out in] and bias [out]."""
        return F.linear(values[self.input], weight, bias)

    def name(self, tape: Tape) -> str:
        """The parameter's name."""
        return tape.weights.get(self.weight, self.call.module)


def linears(tape: Tape) -> Iterator[Linear]:
    """The linear maps of a pass, in order."""
    for call in tape.calls:
        if call.name == "linear":
            yield Linear(call, call.args[0], call.argument(1, "weight"), call.argument(2, "bias"), turned=False)
        elif call.name == "addmm":
            bias, given, weight = (call.args + tuple(call.kwargs.values()))[:3]
            if weight in tape.weights:
                yield Linear(call, given, weight, bias, turned=True)
        elif call.name in ("matmul", "__matmul__") and call.args[1] in tape.weights and tape[call.args[1]].ndim == 2:
            yield Linear(call, call.args[0], call.args[1], None, turned=True)


def projection(tape: Tape, ref: Ref, known: dict[int, Linear]) -> Linear | None:
    """The nearest linear map behind a tensor."""
    for call in tape.before(ref, lambda call: call.number in known):
        if call.number in known:
            return known[call.number]
    return None
