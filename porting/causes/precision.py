"""Larger rounding errors than the reference's: lower precision inside, and large constants that swallow digits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from porting.causes.cause import Cause, alter, map_result, replace_with
from porting.causes.linear import Linear
from porting.causes.masks import FAR, causal_of
from porting.causes.model_parts import ModelParts
from porting.causes.projections import added_biases
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.tape import Call, Ref, call_again
from porting.printable import dtype_name
from porting.tracing.calls import with_leaves


@dataclass(frozen=True, kw_only=True)
class LowPrecision(Cause):
    """Some functions are computed in a lower precision."""

    functions: tuple[str, ...]
    dtype: torch.dtype
    rough: bool = True

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each call of one of these functions on activations."""
        detail = f"in {dtype_name(self.dtype)}"
        for call in model_parts.called(*self.functions):
            value = model_parts.tape[call.result]
            if model_parts.tape.learned(call.result) and value.is_floating_point() and value.dtype != self.dtype:
                yield alter(call, self._computed, detail)
                yield alter(call, self._rounded, detail)
        for call, linear, bias in added_biases(model_parts):  # the port may compute layer and bias in one call
            if linear.call.name in self.functions:
                yield alter(call, self._with_bias(linear, bias), detail)

    def _with_bias(self, linear: Linear, bias: Ref) -> Rewrite:
        def rewrite(values: Values, call: Call) -> Tensor:
            parts = (values[linear.input], linear.matrix(values), values[bias].flatten())
            source, weight, offset = (part.to(self.dtype) for part in parts)
            return torch.nn.functional.linear(source, weight, offset).to(values.tape[call.result].dtype)

        return rewrite

    def _rounded(self, values: Values, call: Call) -> Tensor:
        """Compute from rounded operands, sum exactly, and round the result, as a good kernel does."""

        def rounded(value: object) -> object:
            floats = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(self.dtype).to(value.dtype) if floats and isinstance(value, Tensor) else value

        args, kwargs = values.fill(call.args), values.fill(dict(call.kwargs))
        result: Tensor = call_again(call.function, with_leaves(rounded, args), with_leaves(rounded, kwargs))
        return result.to(self.dtype).to(result.dtype)

    def _computed(self, values: Values, call: Call) -> Tensor:
        """Compute in the lower precision throughout."""

        def lower(value: object) -> object:
            return value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        args, kwargs = values.fill(call.args), values.fill(dict(call.kwargs))
        result: Tensor = call_again(call.function, with_leaves(lower, args), with_leaves(lower, kwargs))
        return result.to(values.tape[call.result].dtype)


@dataclass(frozen=True, kw_only=True)
class LowPrecisionSoftmax(Cause):
    """The softmax is computed in a lower precision, from rounded scores to rounded probabilities."""

    dtype: torch.dtype
    rough: bool = True

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each attention with its scores, its probabilities and what reads them rounded."""
        detail = f"in {dtype_name(self.dtype)}"
        for attention in model_parts.attentions:
            scores = model_parts.tape.maker(attention.masked)
            rewrites: dict[int, Rewrite] = {
                attention.softmax.number: replace_with(attention.masked, self._softmax_low),
                attention.context.number: self._context_low,
            }
            visible = [call for call in model_parts.tape.users(attention.masked) if call.name in ("sub", "__sub__")]
            for call in (*([scores] if scores else []), *visible):
                rewrites[call.number] = map_result(self._round)
            yield Alteration(where=attention.where, rewrites=rewrites, detail=detail)

    def _softmax_low(self, scores: Tensor) -> Tensor:
        return scores.to(self.dtype).softmax(-1).to(scores.dtype)

    def _round(self, value: Tensor) -> Tensor:
        return value.to(self.dtype).to(value.dtype)

    def _context_low(self, values: Values, call: Call) -> Tensor:
        probabilities, rest = call.reads[0], call.reads[1]
        return self._round(values[probabilities]) @ values[rest]


@dataclass(frozen=True, kw_only=True)
class ScoresShifted(Cause):
    """A large number is added to every score that is not hidden."""

    constants: tuple[float, ...]
    rough: bool = True

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each attention with each number."""
        for attention in model_parts.attentions:
            call = model_parts.tape.maker(attention.masked)
            if call is None or model_parts.tape[attention.masked].ndim != 4:
                continue
            for constant in self.constants:
                added = 1.0 - attention.kept.to(model_parts.tape[attention.masked].dtype) * -constant
                if attention.causal:
                    added = added.expand_as(attention.allowed).masked_fill(~causal_of(attention), FAR)
                yield alter(
                    call,
                    _add_to_scores(attention.raw == call.result, attention.raw, added),
                    f"of {constant:g}",
                    where=attention.where,
                )


def _add_to_scores(last: bool, raw: Ref, added: Tensor) -> Rewrite:
    return lambda values, call: (values.run(call) if last else values[raw]) + added


def _low_precision(name: str, functions: tuple[str, ...], dtype: torch.dtype, what: str, fix: str) -> LowPrecision:
    return LowPrecision(name=name, what=what, looks=_LOOKS, fix=fix, functions=functions, dtype=dtype)


def _low_softmax(name: str, dtype: torch.dtype, what: str) -> LowPrecisionSoftmax:
    fix = f"{_CAST}; softmax(scores.float(), dim=-1)"
    return LowPrecisionSoftmax(name=name, what=what, looks=_LOOKS, fix=fix, dtype=dtype)


_LOOKS = (
    "larger rounding errors than the reference's, or a difference in float64 that is too large for float64 rounding"
)

_LINEAR = ("linear", "addmm")
_PRODUCTS = ("matmul", "__matmul__", "bmm")
_CAST = "remove .half(), .bfloat16() and torch.autocast, or disable autocast for this part"

CAUSES: tuple[Cause, ...] = (
    _low_precision("half-precision linear layer", _LINEAR, torch.float16, "a linear layer computes in float16", _CAST),
    _low_precision("bfloat16 linear layer", _LINEAR, torch.bfloat16, "a linear layer computes in bfloat16", _CAST),
    _low_precision(
        "half-precision attention", _PRODUCTS, torch.float16, "attention's products are computed in float16", _CAST
    ),
    _low_precision(
        "bfloat16 attention", _PRODUCTS, torch.bfloat16, "attention's products are computed in bfloat16", _CAST
    ),
    _low_precision(
        "float16 autocast", _LINEAR + _PRODUCTS, torch.float16, "every product is computed in float16", _CAST
    ),
    _low_precision(
        "bfloat16 autocast", _LINEAR + _PRODUCTS, torch.bfloat16, "every product is computed in bfloat16", _CAST
    ),
    _low_precision("half-precision norm", ("layer_norm",), torch.float16, "a norm is computed in float16", _CAST),
    _low_precision("bfloat16 norm", ("layer_norm",), torch.bfloat16, "a norm is computed in bfloat16", _CAST),
    _low_softmax("half-precision softmax", torch.float16, "the softmax is computed in float16"),
    _low_softmax("bfloat16 softmax", torch.bfloat16, "the softmax is computed in bfloat16"),
    ScoresShifted(
        name="mask precedence",
        what="1.0 - mask * -10000.0 adds a large number to all scores but those of padding",
        looks="the probabilities are almost right; the scores lose digits to the large number",
        fix="(1.0 - mask) * -10000.0",
        constants=(1e4, 1e5, 1e6, 1e7, 1e8, 1e9),
    ),
)
