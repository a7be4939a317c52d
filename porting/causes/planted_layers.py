"""Planting mistakes in norms, activations, linear layers, embeddings and sums."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.causes.events import Action, Event

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
    eps = float(event.argument(4, "eps", 1e-5))
    shape = event.argument(1, "normalized_shape")
    return F.layer_norm(
        event.args[0], shape, event.argument(2, "weight"), event.argument(3, "bias"), 1e-12 if eps == 1e-5 else 1e-5
    )


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
    arguments = dict(enumerate(event.args)) | dict(event.kwargs)
    replacements = {
        place: _near(model, names.get(id(parameter), ""), parameter) for place, parameter in arguments.items()
    }
    if all(replacement is None for replacement in replacements.values()):
        return NOT_APPLICABLE
    changed = {
        place: arguments[place] if replacement is None else replacement for place, replacement in replacements.items()
    }
    return event.function(
        *(changed[place] for place in range(len(event.args))), **{key: changed[key] for key in event.kwargs}
    )


def _near(model: nn.Module, name: str, tensor: Any) -> Tensor | None:
    """Return the tensor of the same name in the next layer, or in the first one; None where there is none."""
    match = _LAYER.search(name)
    if match is None:
        return None
    parameters = dict(model.named_parameters())
    names = [f"{name[: match.start()]}{number}{name[match.end() :]}" for number in (int(match.group()) + 1, 0)]
    return next(
        (
            parameters[key]
            for key in names
            if key in parameters and key != name and parameters[key].shape == tensor.shape
        ),
        None,
    )
