"""The result of a planted mistake in place of that of a norm, an activation, a linear layer, a sum, or attention."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.causes.events import Action, Event, Scores
from porting.tracing.calls import with_leaves

NOT_APPLICABLE: Any = NotImplemented


def with_norm(
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


def layer_norm(x: Tensor, eps: float) -> Tensor:
    """Compute a LayerNorm without gain and bias."""
    return F.layer_norm(x, x.shape[-1:], eps=eps)


def other_eps(event: Event) -> Any:
    """Use an eps of 1e-5 in place of another, and of 1e-12 in place of 1e-5."""
    shape, weight, bias = (event.argument(*one) for one in ((1, "normalized_shape"), (2, "weight"), (3, "bias")))
    eps = float(event.argument(4, "eps", 1e-5))
    return F.layer_norm(event.args[0], shape, weight, bias, 1e-12 if eps == 1e-5 else 1e-5)


def other_rms_eps(event: Event) -> Any:
    """Use an eps of 1e-5 in place of another, and of 1e-8 in place of 1e-5."""
    eps = float(event.args[4])
    return event.function(*event.args[:4], 1e-8 if eps == 1e-5 else 1e-5)


def bessel(x: Tensor, eps: float) -> Tensor:
    """Compute a LayerNorm with the sample variance."""
    deviation = x - x.mean(-1, True)
    return deviation / (deviation.pow(2).sum(-1, True) / (x.shape[-1] - 1) + eps).sqrt()


def eps_outside(x: Tensor, eps: float) -> Tensor:
    """Compute a LayerNorm with eps added to the standard deviation."""
    return (x - x.mean(-1, True)) / (x.var(-1, unbiased=False, keepdim=True).sqrt() + eps)


def rms_eps_outside(x: Tensor, eps: float) -> Tensor:
    """Compute an RMSNorm with eps added to the root."""
    return x / (x.pow(2).mean(-1, True).sqrt() + eps)


def by_length(x: Tensor, eps: float) -> Tensor:
    """Compute an RMSNorm with the sum of squares for their mean."""
    return x / (x.pow(2).sum(-1, True) + eps).sqrt()


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """Compute an RMSNorm without gain."""
    return x / (x.pow(2).mean(-1, True) + eps).sqrt()


def over_previous_axis(x: Tensor, eps: float) -> Tensor:
    """Compute a LayerNorm over the second last axis."""
    return F.layer_norm(x.transpose(-1, -2), x.shape[-2:-1], eps=eps).transpose(-1, -2)


def with_activation(function: Callable[[Tensor], Tensor], *, tanh: bool = False) -> Action:
    """Replace activations, except that of a pooler, or with ``tanh`` only that of a pooler."""

    def action(event: Event) -> Any:
        value = event.args[0]
        is_pooler = event.function in (torch.tanh, Tensor.tanh) and value.ndim == 2
        result = function(value)
        return (
            NOT_APPLICABLE if is_pooler != tanh or torch.allclose(result, event.run(), rtol=1e-6, atol=1e-9) else result
        )

    return action


def sigmoid_gelu(x: Tensor) -> Tensor:
    """Compute CLIP's quick GELU."""
    return x / (1 + torch.exp(-1.702 * x))


def without_bias(*roles: str) -> Action:
    """Leave the bias out of linear layers with these roles."""

    def action(event: Event) -> Any:
        bias = event.argument(2, "bias")
        if bias is None or event.role not in roles:
            return NOT_APPLICABLE
        return F.linear(event.args[0], event.args[1])

    return action


def bias_twice(event: Event) -> Any:
    """Add the bias twice."""
    bias = event.argument(2, "bias")
    return NOT_APPLICABLE if bias is None else event.run() + bias


def transposed(event: Event) -> Any:
    """Transpose a square weight."""
    weight = event.args[1]
    return (
        NOT_APPLICABLE
        if weight.shape[0] != weight.shape[1]
        else F.linear(event.args[0], weight.T, event.argument(2, "bias"))
    )


def ids_of(event: Event, *names: str) -> Tensor | None:
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


def is_position(event: Event) -> bool:
    """Return whether the looked-up numbers count along a row."""
    ids = event.args[0]
    if ids_of(event, "input_ids", "token_type_ids") is not None or ids.ndim > 2 or ids.shape[-1] < 2:
        return False
    first = ids.reshape(-1, ids.shape[-1])[0]
    return bool((first[1:] - first[:-1] == 1).all()) and event.args[1].shape[0] > 2


def with_position(change: Callable[[Event, Tensor], Tensor]) -> Action:
    """Replace position embeddings."""
    return lambda event: change(event, event.args[0]) if is_position(event) else NOT_APPLICABLE


def shifted_position(offset: int) -> Action:
    """Count positions from another number."""

    def change(event: Event, ids: Tensor) -> Tensor:
        return F.embedding((ids + offset).clamp(0, event.args[1].shape[0] - 1), event.args[1])

    return with_position(change)


def with_token(change: Callable[[Event], Any]) -> Action:
    """Replace token embeddings."""
    return lambda event: NOT_APPLICABLE if ids_of(event, "input_ids") is None else change(event)


def padding_zero(event: Event) -> Any:
    """Set the embedding of the padding token to zero."""
    padding = event.argument(2, "padding_idx")
    if padding is None or not bool((event.args[0] == padding).any()):
        return NOT_APPLICABLE
    return event.run() * (event.args[0] != padding)[..., None]


def with_sum(formula: Callable[[Tensor, Tensor], Tensor]) -> Action:
    """Replace residual sums; the older tensor is the stream."""

    def action(event: Event) -> Any:
        first, second = event.args[0], event.args[1]
        if first.shape != second.shape or first.ndim != 3 or not first.is_floating_point():
            return NOT_APPLICABLE
        stream, branch = (first, second) if event.born[0] < event.born[1] else (second, first)
        return formula(stream, branch)

    return action


def dropout_active(event: Event) -> Any:
    """Apply dropout although it is off."""
    rate = float(event.argument(1, "p", 0.5)) or 0.1
    return NOT_APPLICABLE if event.argument(2, "training", True) else F.dropout(event.args[0], rate, training=True)


def in_lower_dtype(dtype: torch.dtype) -> Action:
    """Compute in a lower precision, and cast back."""

    def action(event: Event) -> Any:
        def lower(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        result = event.function(*map(lower, event.args), **{key: lower(value) for key, value in event.kwargs.items()})
        return result.to(event.args[0].dtype)

    return action


def pooled_by(rule: Callable[[Tensor], Tensor]) -> Action:
    """Pool another token than the first."""

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


def untied_decoder(event: Event) -> Any:
    """Give a tied decoder weights of its own."""
    tables = {id(part.weight) for part in event.pass_.model.modules() if isinstance(part, nn.Embedding)}
    if id(event.args[1]) not in tables:
        return NOT_APPLICABLE
    weight = event.args[1]
    other = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(weight)
    return F.linear(event.args[0], other * weight.std(), event.argument(2, "bias"))


_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def next_layer(event: Event) -> Any:
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


def with_scores(change: Callable[[Scores], Tensor | None]) -> Action:
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


def query_for_key(scores: Scores) -> Tensor | None:
    """Exchange query and key."""
    if scores.query.shape != scores.key.shape:
        return None
    return scores.masked((scores.key @ scores.query.mT) * scores.scale + (0 if scores.bias is None else scores.bias))


def product_times(factor: Callable[[Scores], float]) -> Callable[[Scores], Tensor | None]:
    """Multiply the product of query and key by a factor."""

    def change(scores: Scores) -> Tensor | None:
        return scores.masked(replace(scores, scale=scores.scale * factor(scores)).product())

    return change


def shown_keys(scores: Scores) -> Tensor | None:
    """Return the keys that any query sees, [... 1 k]; None where there is no padding, or no mask of its own."""
    if scores.allowed is None or scores.mixed:
        return None
    shown = scores.allowed.any(-2, keepdim=True)
    return None if bool(shown.all()) else shown


def lower_triangle(scores: Scores) -> Tensor:
    """Return where a key is not after the query, [q k] of bool."""
    return torch.ones(scores.query.shape[-2], scores.key.shape[-2]).tril().bool()


def is_causal(scores: Scores) -> bool:
    """Return whether no query sees later keys."""
    if scores.allowed is None or scores.query.shape[-2] != scores.key.shape[-2]:
        return False
    return not bool((scores.allowed & ~lower_triangle(scores)).any())


def hide_others(product: Tensor, shown: Tensor) -> Tensor:
    """Hide all keys that are not shown."""
    return torch.where(shown, product, torch.full_like(product, torch.finfo(product.dtype).min / 2))


def without_padding_mask(scores: Scores) -> Tensor | None:
    """Show padding."""
    if shown_keys(scores) is None or scores.allowed is None:
        return None
    if is_causal(scores):
        return hide_others(scores.product(), lower_triangle(scores))
    near = scores.allowed.flatten(0, -3).any(0) if scores.allowed.ndim > 2 else scores.allowed
    return hide_others(scores.product(), near)


def with_padding(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Scores], Tensor | None]:
    """Change the scores where there is padding.

    Args:
        change: the scores without a mask [... q k], and 1 for keys that any query sees, else 0 [... 1 k] -> the scores.
    """

    def changed(scores: Scores) -> Tensor | None:
        shown = shown_keys(scores)
        if shown is None:
            return None
        result = change(scores.product(), shown.to(scores.query.dtype))
        return hide_others(result, lower_triangle(scores)) if is_causal(scores) else result

    return changed


def mask_on_queries(scores: Scores) -> Tensor | None:
    """Mask the rows of padding instead of the columns."""
    shown = shown_keys(scores)
    if shown is None or is_causal(scores) or scores.query.shape[-2] != scores.key.shape[-2]:
        return None
    return scores.product() + torch.where(shown, 0.0, -1e30).mT


def without_causal_mask(scores: Scores) -> Tensor | None:
    """Show later keys."""
    if not is_causal(scores) or scores.allowed is None:
        return None
    return hide_others(scores.product(), scores.allowed.any(-2, keepdim=True))


def with_causal_mask(scores: Scores) -> Tensor | None:
    """Hide later keys."""
    if is_causal(scores) or scores.query.shape[-2] != scores.key.shape[-2]:
        return None
    return hide_others(scores.masked(), lower_triangle(scores))


def mask_after_softmax(event: Event) -> Any:
    """Apply the mask to the probabilities."""
    scores = event.scores
    unmasked = None if scores is None else without_padding_mask(scores)
    shown = None if scores is None else shown_keys(scores)
    return NOT_APPLICABLE if unmasked is None or shown is None else unmasked.softmax(-1) * shown


def softmax_over(axis: int) -> Action:
    """Take the softmax over another axis; axis 1 is that of the heads, if there is one."""

    def action(event: Event) -> Any:
        scores = event.args[0] if event.scores is None else event.scores.masked()  # finite, so that no row is of NaN
        return NOT_APPLICABLE if scores.ndim < (4 if axis > 0 else -axis) else F.softmax(scores, dim=axis)

    return action


def has_linear_bias(scores: Scores) -> bool:
    """Return whether the bias is linear: it rises by the same number from each key to the next."""
    bias = scores.bias
    if bias is None or bias.ndim < 3 or bias.shape[-3] < 2 or bias.shape[-1] < 3 or scores.mixed:
        return False
    steps = bias[..., -1, :].diff(dim=-1)
    return bool(steps.any()) and torch.allclose(steps, steps[..., :1].expand_as(steps), rtol=1e-4, atol=1e-6)


def bias_times(factor: float, *, linear: bool) -> Callable[[Scores], Tensor | None]:
    """Multiply the bias of the scores by a factor: a linear one, or a learned one."""

    def change(scores: Scores) -> Tensor | None:
        if scores.bias is None or not scores.bias.any() or has_linear_bias(scores) != linear:
            return None
        return scores.masked(scores.query @ scores.key.mT * scores.scale + factor * scores.bias)

    return change


def with_cap(scores: Scores) -> Tensor | None:
    """Cap the scores softly at 2."""
    return None if scores.cap else scores.masked(2.0 * torch.tanh(scores.product() / 2.0))


def without_cap(scores: Scores) -> Tensor | None:
    """Leave the soft cap out."""
    return scores.masked(replace(scores, cap=0.0).product()) if scores.cap else None


def tiled(heads: Tensor) -> Tensor | None:
    """Return heads [b h s d] that were repeated one by one as if repeated as a whole; None where none was repeated."""
    count = heads.shape[1] if heads.ndim == 4 else 0
    for repeats in (divisor for divisor in range(2, count) if count % divisor == 0):
        unrepeated = heads[:, ::repeats]
        if torch.equal(heads, unrepeated.repeat_interleave(repeats, 1)):
            return unrepeated.repeat(1, repeats, 1, 1)
    return None


def keys_tiled(scores: Scores) -> Tensor | None:
    """Use the keys of other groups."""
    key = tiled(scores.key)
    return None if key is None else scores.masked(replace(scores, key=key).product())


def values_tiled(event: Event) -> Any:
    """Use the values of other groups."""
    value = tiled(event.args[1])
    return NOT_APPLICABLE if value is None else event.args[0] @ value


def with_context(change: Callable[[Tensor], Tensor]) -> Action:
    """Replace the context, [b h s d]."""

    def action(event: Event) -> Any:
        result = event.run()
        return NOT_APPLICABLE if result.ndim != 4 else change(result)

    return action


def not_transposed(context: Tensor) -> Tensor:
    """Return the context that, joined rightly, equals a reshape without transposition."""
    batch, count, length, size = context.shape
    return context.reshape(batch, length, count, size).transpose(1, 2)


def merged_wrongly(context: Tensor) -> Tensor:
    """Return the context that, joined as (h d), has the channels in the order (d h)."""
    batch, count, length, size = context.shape
    mixed = context.permute(0, 2, 3, 1).reshape(batch, length, count, size)
    return mixed.transpose(1, 2)
