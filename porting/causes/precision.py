"""Larger rounding errors than the reference's: lower precision inside, and large constants that swallow digits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from porting.causes.attention import Attention
from porting.causes.cause import Cause, alter, map_result, replace_with
from porting.causes.linear import Linear
from porting.causes.masks import FAR, causal_of, masked_attentions, masked_by
from porting.causes.model_parts import ModelParts
from porting.causes.projections import added_biases
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.tape import Call, Ref, call_again
from porting.printable import dtype_name
from porting.tracing.calls import with_leaves


def _low_precision(name: str, functions: tuple[str, ...], dtype: torch.dtype, what: str) -> Cause:
    """Return the cause of functions that are computed in a lower precision."""
    detail = f"in {dtype_name(dtype)}"

    def alterations(model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each call of one of these functions on activations."""
        for call in model_parts.called(*functions):
            value = model_parts.tape[call.result]
            if model_parts.tape.learned(call.result) and value.is_floating_point() and value.dtype != dtype:
                yield alter(call, partial(_lowered, dtype), detail)
                yield alter(call, partial(_rounded, dtype), detail)
        for call, linear, bias in added_biases(model_parts):  # the port may compute layer and bias in one call
            if linear.call.name in functions:
                yield alter(call, _with_bias(linear, bias, dtype), detail)

    return Cause(name=name, what=what, looks=_LOOKS, fix=_CAST, alterations=alterations, rough=True)


def _with_bias(linear: Linear, bias: Ref, dtype: torch.dtype) -> Rewrite:
    def rewrite(values: Values, call: Call) -> Tensor:
        parts = (values[linear.input], linear.matrix(values), values[bias].flatten())
        source, weight, offset = (part.to(dtype) for part in parts)
        return torch.nn.functional.linear(source, weight, offset).to(values.tape[call.result].dtype)

    return rewrite


def _rounded(dtype: torch.dtype, values: Values, call: Call) -> Tensor:
    """Compute from rounded operands, sum exactly, and round the result, as a good kernel does."""
    return _round(_with_floats(lambda value: _round(value, dtype), values, call), dtype)


def _lowered(dtype: torch.dtype, values: Values, call: Call) -> Tensor:
    """Compute in the lower precision throughout."""
    return _with_floats(lambda value: value.to(dtype), values, call).to(values.tape[call.result].dtype)


def _with_floats(change: Callable[[Tensor], Tensor], values: Values, call: Call) -> Tensor:
    """Repeat a call with its floating-point operands changed."""

    def changed(value: object) -> object:
        return change(value) if isinstance(value, Tensor) and value.is_floating_point() else value

    args, kwargs = with_leaves(changed, (values.fill(call.args), values.fill(dict(call.kwargs))))
    result: Tensor = call_again(call.function, args, kwargs)
    return result


def _round(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype).to(value.dtype)


def _low_softmax(name: str, dtype: torch.dtype, what: str) -> Cause:
    """Return the cause of a softmax that is computed from rounded scores to rounded probabilities."""
    rounded = map_result(partial(_round, dtype=dtype))

    def context(values: Values, call: Call) -> Tensor:
        return _round(values[call.reads[0]], dtype) @ values[call.reads[1]]

    def alterations(model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each attention with its scores, its probabilities and what reads them rounded."""
        for attention in model_parts.attentions:
            scores = model_parts.tape.maker(attention.masked)
            low = replace_with(attention.masked, lambda scores: scores.to(dtype).softmax(-1).to(scores.dtype))
            rewrites = {attention.softmax.number: low, attention.context.number: context}
            visible = [call for call in model_parts.tape.users(attention.masked) if call.name in ("sub", "__sub__")]
            rewrites |= dict.fromkeys((call.number for call in (scores, *visible) if call is not None), rounded)
            yield Alteration(where=attention.where, rewrites=rewrites, detail=f"in {dtype_name(dtype)}")

    fix = f"{_CAST}; softmax(scores.float(), dim=-1)"
    return Cause(name=name, what=what, looks=_LOOKS, fix=fix, alterations=alterations, rough=True)


LARGE = (1e4, 1e5, 1e6, 1e7, 1e8, 1e9)
"""Numbers that are added to scores by mistake."""


def _scores_shifted(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each attention with each large number added to every score that is not hidden."""
    for attention, call in masked_attentions(model_parts):
        kept = attention.kept.to(model_parts.tape[attention.masked].dtype)
        for constant in LARGE:
            added = 1.0 - kept * -constant
            if attention.causal:
                added = added.expand_as(attention.allowed).masked_fill(~causal_of(attention), FAR)
            rewrite = masked_by(partial(_plus, added), attention)
            yield alter(call, rewrite, f"of {constant:g}", where=attention.where)


def _plus(added: Tensor, scores: Tensor, attention: Attention) -> Tensor:
    return scores + added


_LOOKS = (
    "larger rounding errors than the reference's, or a difference in float64 that is too large for float64 rounding"
)

_LINEAR = ("linear", "addmm")
_PRODUCTS = ("matmul", "__matmul__", "bmm")
_CAST = "remove .half(), .bfloat16() and torch.autocast, or disable autocast for this part"

CAUSES: tuple[Cause, ...] = (
    _low_precision("half-precision linear layer", _LINEAR, torch.float16, "a linear layer computes in float16"),
    _low_precision("bfloat16 linear layer", _LINEAR, torch.bfloat16, "a linear layer computes in bfloat16"),
    _low_precision(
        "half-precision attention", _PRODUCTS, torch.float16, "attention's products are computed in float16"
    ),
    _low_precision("bfloat16 attention", _PRODUCTS, torch.bfloat16, "attention's products are computed in bfloat16"),
    _low_precision("float16 autocast", _LINEAR + _PRODUCTS, torch.float16, "every product is computed in float16"),
    _low_precision("bfloat16 autocast", _LINEAR + _PRODUCTS, torch.bfloat16, "every product is computed in bfloat16"),
    _low_precision("half-precision norm", ("layer_norm",), torch.float16, "a norm is computed in float16"),
    _low_precision("bfloat16 norm", ("layer_norm",), torch.bfloat16, "a norm is computed in bfloat16"),
    _low_softmax("half-precision softmax", torch.float16, "the softmax is computed in float16"),
    _low_softmax("bfloat16 softmax", torch.bfloat16, "the softmax is computed in bfloat16"),
    Cause(
        name="mask precedence",
        what="1.0 - mask * -10000.0 adds a large number to all scores but those of padding",
        looks="the probabilities are almost right; the scores lose digits to the large number",
        fix="(1.0 - mask) * -10000.0",
        alterations=_scores_shifted,
        rough=True,
    ),
)
