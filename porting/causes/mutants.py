"""The mistakes of the catalogue that can be planted into any port.

They are independent of the causes that search for them: a cause alters the reference on a tape, a planted mistake
alters the results of the port's own layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.causes.events import Action, Event, InjectedFault, Scores
from porting.tracing.calls import with_leaves

NOT_APPLICABLE: Any = NotImplemented


def _with_norm(
    formula: Callable[[Tensor, float], Tensor], *, gain: bool = True, bias: bool = True, more: float = 0.0
) -> Action:
    """Replace a norm.

    Args:
        formula: the input and the eps -> the result before gain and bias.
        gain, bias: whether they are applied.
        more: what is added to the gain, where the model does not add it already.
    """

    def action(event: Event) -> Any:
        weight, offset = event.argument(2, "weight"), event.argument(3, "bias")
        if (not gain and weight is None) or (not bias and offset is None):
            return NOT_APPLICABLE
        if more and (weight is None or _one_added(event, weight) != (more < 0)):
            return NOT_APPLICABLE
        result = formula(event.args[0], float(event.argument(4, "eps", 1e-5)))
        result = result * (weight + more if more else weight) if gain and weight is not None else result
        return result + offset if bias and offset is not None else result

    return action


def _one_added(event: Event, gain: Tensor) -> bool:
    """Return whether a gain is a parameter with 1 added."""
    vectors = (parameter for parameter in event.pass_.model.parameters() if parameter.shape == gain.shape)
    return any(torch.equal(gain, 1 + vector.to(gain)) for vector in vectors)


def _layer_norm(x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=eps)


def _other_eps(event: Event) -> Any:
    """Use an eps of 1e-5 in place of another, and of 1e-12 in place of 1e-5."""
    shape, weight, bias = (event.argument(*one) for one in ((1, "normalized_shape"), (2, "weight"), (3, "bias")))
    eps = float(event.argument(4, "eps", 1e-5))
    return F.layer_norm(event.args[0], shape, weight, bias, 1e-12 if eps == 1e-5 else 1e-5)


def _other_rms_eps(event: Event) -> Any:
    """Use an eps of 1e-5 in place of another, and of 1e-8 in place of 1e-5."""
    eps = float(event.args[4])
    return event.function(*event.args[:4], 1e-8 if eps == 1e-5 else 1e-5)


def _bessel(x: Tensor, eps: float) -> Tensor:
    deviation = x - x.mean(-1, True)
    return deviation / (deviation.pow(2).sum(-1, True) / (x.shape[-1] - 1) + eps).sqrt()


def _rms_norm(x: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, True) + eps).sqrt()


def _over_previous_axis(x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x.transpose(-1, -2), x.shape[-2:-1], eps=eps).transpose(-1, -2)


def _with_activation(function: Callable[[Tensor], Tensor], *, tanh: bool = False) -> Action:
    """Replace activations, except that of a pooler, or with ``tanh`` only that of a pooler."""

    def action(event: Event) -> Any:
        value = event.args[0]
        is_pooler = event.function in (torch.tanh, Tensor.tanh) and value.ndim == 2
        result = function(value)
        return (
            NOT_APPLICABLE if is_pooler != tanh or torch.allclose(result, event.run(), rtol=1e-6, atol=1e-9) else result
        )

    return action


def _without_bias(role: str) -> Action:
    def action(event: Event) -> Any:
        bias = event.argument(2, "bias")
        if bias is None or event.role != role:
            return NOT_APPLICABLE
        return F.linear(event.args[0], event.args[1])

    return action


def _bias_twice(event: Event) -> Any:
    bias = event.argument(2, "bias")
    return NOT_APPLICABLE if bias is None else event.run() + bias


def _transposed(event: Event) -> Any:
    weight = event.args[1]
    return (
        NOT_APPLICABLE
        if weight.shape[0] != weight.shape[1]
        else F.linear(event.args[0], weight.T, event.argument(2, "bias"))
    )


def _ids_of(event: Event, *names: str) -> Tensor | None:
    """Return the model's input with one of these names that is looked up; by its use, if no input has such a name."""
    equal_inputs = {name: tensor for name, tensor in event.pass_.inputs.items() if _equal(tensor, event.args[0])}
    named = [tensor for name, tensor in equal_inputs.items() if name.endswith(names)]
    any_named = any(name.endswith(("input_ids", "token_type_ids")) for name in event.pass_.inputs)
    return next(
        iter(named or ([] if any_named else [tensor for tensor in equal_inputs.values() if _used(event, names)])), None
    )


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and not first.is_floating_point() and torch.equal(first, second)


def _used(event: Event, names: tuple[str, ...]) -> bool:
    """Return whether the table has the size of a token table (the model's largest) or of token types (a few rows)."""
    rows = len(event.args[1])
    tables = [part.num_embeddings for part in event.pass_.model.modules() if isinstance(part, nn.Embedding)]
    return rows == max(tables, default=0) if "input_ids" in names else 1 < rows <= 4 < max(tables, default=0)


def _is_position(event: Event) -> bool:
    """Return whether the looked-up numbers count along a row."""
    ids = event.args[0]
    if _ids_of(event, "input_ids", "token_type_ids") is not None or ids.ndim > 2 or ids.shape[-1] < 2:
        return False
    first = ids.reshape(-1, ids.shape[-1])[0]
    return bool((first[1:] - first[:-1] == 1).all()) and event.args[1].shape[0] > 2


def _with_position(change: Callable[[Event, Tensor], Tensor]) -> Action:
    return lambda event: change(event, event.args[0]) if _is_position(event) else NOT_APPLICABLE


def _with_token(change: Callable[[Event], Any]) -> Action:
    return lambda event: NOT_APPLICABLE if _ids_of(event, "input_ids") is None else change(event)


def _padding_zero(event: Event) -> Any:
    padding = event.argument(2, "padding_idx")
    if padding is None or not bool((event.args[0] == padding).any()):
        return NOT_APPLICABLE
    return event.run() * (event.args[0] != padding)[..., None]


def _with_sum(formula: Callable[[Tensor, Tensor], Tensor]) -> Action:
    """Replace residual sums; the older tensor is the stream."""

    def action(event: Event) -> Any:
        first, second = event.args[0], event.args[1]
        if first.shape != second.shape or first.ndim != 3 or not first.is_floating_point():
            return NOT_APPLICABLE
        stream, branch = (first, second) if event.born[0] < event.born[1] else (second, first)
        return formula(stream, branch)

    return action


def _dropout_active(event: Event) -> Any:
    rate = float(event.argument(1, "p", 0.5)) or 0.1
    return NOT_APPLICABLE if event.argument(2, "training", True) else F.dropout(event.args[0], rate, training=True)


def _in_lower_dtype(dtype: torch.dtype) -> Action:
    """Compute in a lower precision, and cast back."""

    def action(event: Event) -> Any:
        def lower(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        result = event.function(*map(lower, event.args), **{key: lower(value) for key, value in event.kwargs.items()})
        return result.to(event.args[0].dtype)

    return action


def _pooled_by(rule: Callable[[Tensor], Tensor]) -> Action:
    def action(event: Event) -> Any:
        value = event.args[0]
        result = event.run()
        pools = isinstance(result, Tensor) and value.ndim == 3 and result.shape == (value.shape[0], value.shape[2])
        return (
            rule(value)
            if pools and value.is_floating_point() and event.function is Tensor.__getitem__
            else NOT_APPLICABLE
        )

    return action


def _untied_decoder(event: Event) -> Any:
    tables = {id(part.weight) for part in event.pass_.model.modules() if isinstance(part, nn.Embedding)}
    if id(event.args[1]) not in tables:
        return NOT_APPLICABLE
    weight = event.args[1]
    other = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(weight)
    return F.linear(event.args[0], other * weight.std(), event.argument(2, "bias"))


_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def _next_layer(event: Event) -> Any:
    """Use the weights of the next layer, or of the first in place of the last."""
    model = event.pass_.model
    if any(isinstance(part, nn.MultiheadAttention) for part in model.modules()):
        return NOT_APPLICABLE  # which slices its weights before it uses them
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    arguments = (*event.args, *event.kwargs.values())
    near = {
        id(value): other for value in arguments if (other := _near(model, names.get(id(value), ""), value)) is not None
    }
    if not near:
        return NOT_APPLICABLE
    args, kwargs = with_leaves(lambda value: near.get(id(value), value), (event.args, dict(event.kwargs)))
    return event.function(*args, **kwargs)


def _near(model: nn.Module, name: str, tensor: Any) -> Tensor | None:
    """Return the tensor of the same name in the next layer, or in the first one; None where there is none."""
    match = _LAYER.search(name)
    if match is None:
        return None
    parameters = dict(model.named_parameters())
    names = [f"{name[: match.start()]}{number}{name[match.end() :]}" for number in (int(match.group()) + 1, 0)]
    found = (parameters[key] for key in names if key in parameters and key != name)
    return next((other for other in found if other.shape == tensor.shape), None)


def _with_scores(change: Callable[[Scores], Tensor | None]) -> Action:
    """Replace the softmax by that of other scores.

    Args:
        change: the parts of the scores -> the masked scores, or None where the mistake does not apply.
    """

    def action(event: Event) -> Any:
        result = None if event.scores is None else change(event.scores)
        if result is None:
            return NOT_APPLICABLE
        return F.softmax(result, dim=-1)

    return action


def _query_for_key(scores: Scores) -> Tensor | None:
    if scores.query.shape != scores.key.shape:
        return None
    return scores.masked((scores.key @ scores.query.mT) * scores.scale + (0 if scores.bias is None else scores.bias))


def _product_times(factor: Callable[[Scores], float]) -> Callable[[Scores], Tensor | None]:
    def change(scores: Scores) -> Tensor | None:
        return scores.masked(replace(scores, scale=scores.scale * factor(scores)).product())

    return change


def _shown_keys(scores: Scores) -> Tensor | None:
    """Return the keys that any query sees, [... 1 k]; None where there is no padding, or no mask of its own."""
    if scores.allowed is None or scores.mixed:
        return None
    shown = scores.allowed.any(-2, keepdim=True)
    return None if bool(shown.all()) else shown


def _lower_triangle(scores: Scores) -> Tensor:
    """Return where a key is not after the query, [q k] of bool."""
    return torch.ones(scores.query.shape[-2], scores.key.shape[-2]).tril().bool()


def _is_causal(scores: Scores) -> bool:
    if scores.allowed is None or scores.query.shape[-2] != scores.key.shape[-2]:
        return False
    return not bool((scores.allowed & ~_lower_triangle(scores)).any())


def _hide_others(product: Tensor, shown: Tensor) -> Tensor:
    return torch.where(shown, product, torch.full_like(product, torch.finfo(product.dtype).min / 2))


def _without_padding_mask(scores: Scores) -> Tensor | None:
    if _shown_keys(scores) is None or scores.allowed is None:
        return None
    if _is_causal(scores):
        return _hide_others(scores.product(), _lower_triangle(scores))
    near = scores.allowed.flatten(0, -3).any(0) if scores.allowed.ndim > 2 else scores.allowed
    return _hide_others(scores.product(), near)


def _with_padding(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Scores], Tensor | None]:
    """Change the scores where there is padding.

    Args:
        change: the scores without a mask [... q k], and 1 for keys that any query sees, else 0 [... 1 k] -> the scores.
    """

    def changed(scores: Scores) -> Tensor | None:
        shown = _shown_keys(scores)
        if shown is None:
            return None
        result = change(scores.product(), shown.to(scores.query.dtype))
        return _hide_others(result, _lower_triangle(scores)) if _is_causal(scores) else result

    return changed


def _mask_on_queries(scores: Scores) -> Tensor | None:
    shown = _shown_keys(scores)
    if shown is None or _is_causal(scores) or scores.query.shape[-2] != scores.key.shape[-2]:
        return None
    return scores.product() + torch.where(shown, 0.0, -1e30).mT


def _without_causal_mask(scores: Scores) -> Tensor | None:
    if not _is_causal(scores) or scores.allowed is None:
        return None
    return _hide_others(scores.product(), scores.allowed.any(-2, keepdim=True))


def _with_causal_mask(scores: Scores) -> Tensor | None:
    if _is_causal(scores) or scores.query.shape[-2] != scores.key.shape[-2]:
        return None
    return _hide_others(scores.masked(), _lower_triangle(scores))


def _mask_after_softmax(event: Event) -> Any:
    scores = event.scores
    unmasked = None if scores is None else _without_padding_mask(scores)
    shown = None if scores is None else _shown_keys(scores)
    return NOT_APPLICABLE if unmasked is None or shown is None else unmasked.softmax(-1) * shown


def _softmax_over(axis: int) -> Action:
    """Take the softmax over another axis; axis 1 is that of the heads, if there is one."""

    def action(event: Event) -> Any:
        scores = event.args[0] if event.scores is None else event.scores.masked()  # finite, so that no row is of NaN
        return NOT_APPLICABLE if scores.ndim < (4 if axis > 0 else -axis) else F.softmax(scores, dim=axis)

    return action


def _has_linear_bias(scores: Scores) -> bool:
    """Return whether the bias is linear: it rises by the same number from each key to the next."""
    bias = scores.bias
    if bias is None or bias.ndim < 3 or bias.shape[-3] < 2 or bias.shape[-1] < 3 or scores.mixed:
        return False
    steps = bias[..., -1, :].diff(dim=-1)
    return bool(steps.any()) and torch.allclose(steps, steps[..., :1].expand_as(steps), rtol=1e-4, atol=1e-6)


def _bias_times(factor: float, *, linear: bool) -> Callable[[Scores], Tensor | None]:
    """Multiply the bias of the scores by a factor: a linear one, or a learned one."""

    def change(scores: Scores) -> Tensor | None:
        if scores.bias is None or not scores.bias.any() or _has_linear_bias(scores) != linear:
            return None
        return scores.masked(scores.query @ scores.key.mT * scores.scale + factor * scores.bias)

    return change


def _tiled(heads: Tensor) -> Tensor | None:
    """Return heads [b h s d] that were repeated one by one as if repeated as a whole; None where none was repeated."""
    count = heads.shape[1] if heads.ndim == 4 else 0
    for repeats in (divisor for divisor in range(2, count) if count % divisor == 0):
        unrepeated = heads[:, ::repeats]
        if torch.equal(heads, unrepeated.repeat_interleave(repeats, 1)):
            return unrepeated.repeat(1, repeats, 1, 1)
    return None


def _keys_tiled(scores: Scores) -> Tensor | None:
    key = _tiled(scores.key)
    return None if key is None else scores.masked(replace(scores, key=key).product())


def _values_tiled(event: Event) -> Any:
    value = _tiled(event.args[1])
    return NOT_APPLICABLE if value is None else event.args[0] @ value


def _with_context(change: Callable[[Tensor], Tensor]) -> Action:
    def action(event: Event) -> Any:
        result = event.run()
        return NOT_APPLICABLE if result.ndim != 4 else change(result)

    return action


def _not_transposed(context: Tensor) -> Tensor:
    """Return the context that, joined rightly, equals a reshape without transposition."""
    batch, count, length, size = context.shape
    return context.reshape(batch, length, count, size).transpose(1, 2)


def _merged_wrongly(context: Tensor) -> Tensor:
    """Return the context that, joined as (h d), has the channels in the order (d h)."""
    batch, count, length, size = context.shape
    mixed = context.permute(0, 2, 3, 1).reshape(batch, length, count, size)
    return mixed.transpose(1, 2)


def fault(name: str, **actions: Action) -> InjectedFault:
    """Return a mistake with its actions by kind of event."""
    return InjectedFault(name=name, actions=actions)


PLANTS: tuple[InjectedFault, ...] = (
    fault("LayerNorm eps", norm=_other_eps),
    fault("RMSNorm eps", rms=_other_rms_eps),
    fault("LayerNorm with Bessel's correction", norm=_with_norm(_bessel)),
    fault(
        "LayerNorm eps outside of the root",
        norm=_with_norm(lambda x, eps: (x - x.mean(-1, True)) / (x.var(-1, unbiased=False, keepdim=True).sqrt() + eps)),
    ),
    fault("RMSNorm for LayerNorm", norm=_with_norm(_rms_norm)),
    fault("LayerNorm for RMSNorm", rms=_with_norm(_layer_norm)),
    fault("LayerNorm over the wrong axis", norm=_with_norm(_over_previous_axis)),
    fault("RMSNorm eps outside of the root", rms=_with_norm(lambda x, eps: x / (x.pow(2).mean(-1, True).sqrt() + eps))),
    fault("length for root mean square", rms=_with_norm(lambda x, eps: x / (x.pow(2).sum(-1, True) + eps).sqrt())),
    fault("LayerNorm gain missing", norm=_with_norm(_layer_norm, gain=False)),
    fault("RMSNorm gain missing", rms=_with_norm(_rms_norm, gain=False)),
    fault(
        "norm gain with 1 added",
        norm=_with_norm(_layer_norm, more=1.0),
        rms=_with_norm(_rms_norm, more=1.0),
    ),
    fault(
        "norm gain without 1 added",
        norm=_with_norm(_layer_norm, more=-1.0),
        rms=_with_norm(_rms_norm, more=-1.0),
    ),
    fault("LayerNorm bias missing", norm=_with_norm(_layer_norm, bias=False)),
    fault("norm missing", norm=lambda event: event.args[0], rms=lambda event: event.args[0]),
    fault("exact GELU for another activation", activation=_with_activation(F.gelu)),
    fault("tanh GELU for another activation", activation=_with_activation(lambda x: F.gelu(x, approximate="tanh"))),
    fault("quick GELU for another activation", activation=_with_activation(lambda x: x / (1 + torch.exp(-1.702 * x)))),
    fault("ReLU for another activation", activation=_with_activation(lambda x: x.clamp_min(0))),
    fault("SiLU for another activation", activation=_with_activation(lambda x: x / (1 + torch.exp(-x)))),
    fault("activation missing", activation=_with_activation(lambda x: x)),
    fault("pooler tanh missing", activation=_with_activation(lambda x: x, tanh=True)),
    fault("query bias missing", linear=_without_bias("query")),
    fault("key bias missing", linear=_without_bias("key")),
    fault("value bias missing", linear=_without_bias("value")),
    fault("attention output bias missing", linear=_without_bias("output")),
    fault("linear layer bias missing", linear=_without_bias("")),
    fault("bias added twice", linear=_bias_twice),
    fault("square weight transposed", linear=_transposed),
    fault("query and key swapped", scores=_with_scores(_query_for_key)),
    fault("1/sqrt(d) missing", scores=_with_scores(_product_times(lambda scores: 1 / scores.scale))),
    fault("1/sqrt(d) twice", scores=_with_scores(_product_times(lambda scores: scores.query.shape[-1] ** -0.5))),
    fault("heads not transposed back", context=_with_context(_not_transposed)),
    fault("heads merged in the wrong order", context=_with_context(_merged_wrongly)),
    fault("softmax over the queries", scores=_softmax_over(-2)),
    fault("softmax over the heads", scores=_softmax_over(1)),
    fault("relative position bias missing", scores=_with_scores(_bias_times(0.0, linear=False))),
    fault("ALiBi missing", scores=_with_scores(_bias_times(0.0, linear=True))),
    fault("ALiBi of the other sign", scores=_with_scores(_bias_times(-1.0, linear=True))),
    fault("ALiBi slopes", scores=_with_scores(_bias_times(0.5, linear=True))),
    fault(
        "soft cap of scores missing",
        scores=_with_scores(lambda scores: scores.masked(replace(scores, cap=0.0).product()) if scores.cap else None),
    ),
    fault(
        "soft cap of scores that should not be there",
        scores=_with_scores(
            lambda scores: None if scores.cap else scores.masked(2.0 * torch.tanh(scores.product() / 2.0))
        ),
    ),
    fault("key and value heads tiled", scores=_with_scores(_keys_tiled), context=_values_tiled),
    fault("padding mask ignored", scores=_with_scores(_without_padding_mask)),
    fault(
        "padding mask inverted",
        scores=_with_scores(_with_padding(lambda product, shown: product - 1e4 * shown)),
    ),
    fault("padding mask multiplied", scores=_with_scores(_with_padding(torch.mul))),
    fault("padding mask added as 0 and 1", scores=_with_scores(_with_padding(torch.add))),
    fault("padding mask after the softmax", scores=_mask_after_softmax),
    fault("padding mask on the queries", scores=_with_scores(_mask_on_queries)),
    fault("causal mask missing", scores=_with_scores(_without_causal_mask)),
    fault("causal mask that should not be there", scores=_with_scores(_with_causal_mask)),
    fault(
        "mask precedence",
        scores=_with_scores(_with_padding(lambda product, shown: product + (1.0 - shown * -1e4))),
    ),
    fault(
        "token types ignored",
        embedding=lambda event: (
            NOT_APPLICABLE
            if _ids_of(event, "token_type_ids") is None
            else F.embedding(torch.zeros_like(event.args[0]), event.args[1])
        ),
    ),
    fault(
        "token types missing",
        embedding=lambda event: NOT_APPLICABLE if _ids_of(event, "token_type_ids") is None else event.run() * 0,
    ),
    fault(
        "position offset",
        embedding=_with_position(
            lambda event, ids: F.embedding((ids + 1).clamp(0, event.args[1].shape[0] - 1), event.args[1])
        ),
    ),
    fault("positions missing", embedding=_with_position(lambda event, ids: event.run() * 0)),
    fault(
        "positions counted from the end",
        embedding=_with_position(lambda event, ids: F.embedding(ids.flip(-1), event.args[1])),
    ),
    fault("padding word zeroed", embedding=_with_token(_padding_zero)),
    fault(
        "vocabulary shifted",
        embedding=_with_token(lambda event: F.embedding((event.args[0] - 1) % len(event.args[1]), event.args[1])),
    ),
    fault(
        "embedding scale that should not be there",
        embedding=_with_token(lambda event: event.run() * event.args[1].shape[1] ** 0.5),
    ),
    fault("residual missing", sum=_with_sum(lambda stream, branch: branch + 0)),
    fault("residual doubled", sum=_with_sum(lambda stream, branch: stream + stream + branch)),
    fault("branch missing", sum=_with_sum(lambda stream, branch: stream + 0)),
    fault("layers in another order", linear=_next_layer, norm=_next_layer),
    fault("pooled from the wrong place", pool=_pooled_by(lambda hidden: hidden[:, -1])),
    fault("decoder untied", linear=_untied_decoder),
    fault("dropout active", dropout=_dropout_active),
    fault("half-precision linear layer", linear=_in_lower_dtype(torch.float16)),
    fault("bfloat16 linear layer", linear=_in_lower_dtype(torch.bfloat16)),
    fault("bfloat16 norm", norm=_in_lower_dtype(torch.bfloat16)),
)

ALIASES: Mapping[str, tuple[str, ...]] = {
    "norm missing": (
        "query and key norm missing",
        "norm missing in a layer",
        "norm missing in the head",
        "embedding norm missing",
        "final norm missing",
    ),
    "half-precision linear layer": ("half-precision linear layer", "float16 autocast"),
    "bfloat16 linear layer": ("bfloat16 linear layer", "bfloat16 autocast"),
    "linear layer bias missing": ("linear layer bias missing", "decoder bias missing"),
}
"""Mistakes whose name depends on where they are."""


def truth(name: str) -> tuple[str, ...]:
    """Return the entries of the catalogue whose names a planted mistake may get."""
    return ALIASES.get(name, (name,))


def planted(name: str) -> Iterator[InjectedFault]:
    """Yield the mistake with a name."""
    return (fault for fault in PLANTS if fault.name == name)
