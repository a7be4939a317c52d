"""Mistakes in norms, activations, linear layers, embeddings and sums, as they are planted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.causes.events import Action, Event

SKIP: Any = NotImplemented


def norm_of(
    formula: Callable[[Tensor, float], Tensor], *, gain: bool = True, bias: bool = True, more: float = 0.0
) -> Action:
    """A norm whose statistics are others, or whose gain has more added to it than the model adds."""

    def action(event: Event) -> Any:
        weight, offset = event.argument(2, "weight"), event.argument(3, "bias")
        if (not gain and weight is None) or (not bias and offset is None):
            return SKIP
        if more and (weight is None or _one_added(event, weight) != (more < 0)):
            return SKIP
        made = formula(event.args[0], float(event.argument(4, "eps", 1e-5)))
        made = made * (weight + more if more else weight) if gain and weight is not None else made
        return made + offset if bias and offset is not None else made

    return action


def _one_added(event: Event, gain: Tensor) -> bool:
    """Whether a gain is a parameter with 1 added."""
    vectors = (parameter for parameter in event.pass_.model.parameters() if parameter.shape == gain.shape)
    return any(torch.equal(gain, 1 + vector.to(gain)) for vector in vectors)


def plain(x: Tensor, eps: float) -> Tensor:
    """The norm as it should be."""
    return F.layer_norm(x, x.shape[-1:], eps=eps)


def other_eps(event: Event) -> Any:
    """1e-5 in place of a smaller one, and 1e-12 in place of 1e-5."""
    eps = float(event.argument(4, "eps", 1e-5))
    shape = event.argument(1, "normalized_shape")
    return F.layer_norm(
        event.args[0], shape, event.argument(2, "weight"), event.argument(3, "bias"), 1e-12 if eps == 1e-5 else 1e-5
    )


def other_rms_eps(event: Event) -> Any:
    """1e-5 in place of another, and 1e-8 in place of 1e-5."""
    eps = float(event.args[4])
    return event.function(*event.args[:4], 1e-8 if eps == 1e-5 else 1e-5)


def bessel(x: Tensor, eps: float) -> Tensor:
    """The sample's variance."""
    deviation = x - x.mean(-1, True)
    return deviation / (deviation.pow(2).sum(-1, True) / (x.shape[-1] - 1) + eps).sqrt()


def outside(x: Tensor, eps: float) -> Tensor:
    """The eps added to the deviation."""
    return (x - x.mean(-1, True)) / (x.var(-1, unbiased=False, keepdim=True).sqrt() + eps)


def rms_outside(x: Tensor, eps: float) -> Tensor:
    """The eps added to the root."""
    return x / (x.pow(2).mean(-1, True).sqrt() + eps)


def by_length(x: Tensor, eps: float) -> Tensor:
    """The sum of squares for their mean."""
    return x / (x.pow(2).sum(-1, True) + eps).sqrt()


def rms(x: Tensor, eps: float) -> Tensor:
    """No mean."""
    return x / (x.pow(2).mean(-1, True) + eps).sqrt()


def across(x: Tensor, eps: float) -> Tensor:
    """Over the axis before."""
    return F.layer_norm(x.transpose(-1, -2), x.shape[-2:-1], eps=eps).transpose(-1, -2)


def activation(function: Callable[[Tensor], Tensor], *, tanh: bool = False) -> Action:
    """Another function, of what is not pooled (or, with ``tanh``, of what is)."""

    def action(event: Event) -> Any:
        value = event.args[0]
        pools = event.function in (torch.tanh, Tensor.tanh) and value.ndim == 2
        made = function(value)
        return SKIP if pools != tanh or torch.allclose(made, event.run(), rtol=1e-6, atol=1e-9) else made

    return action


def sigmoid_gelu(x: Tensor) -> Tensor:
    """CLIP's."""
    return x / (1 + torch.exp(-1.702 * x))


def bias_gone(*roles: str) -> Action:
    """No bias."""

    def action(event: Event) -> Any:
        bias = event.argument(2, "bias")
        if bias is None or event.role not in roles:
            return SKIP
        return F.linear(event.args[0], event.args[1])

    return action


def bias_twice(event: Event) -> Any:
    """Added once more."""
    bias = event.argument(2, "bias")
    return SKIP if bias is None else event.run() + bias


def transposed(event: Event) -> Any:
    """The square weight the other way round."""
    weight = event.args[1]
    return SKIP if weight.shape[0] != weight.shape[1] else F.linear(event.args[0], weight.T, event.argument(2, "bias"))


def ids_of(event: Event, *names: str) -> Tensor | None:
    """An input of the model, if these are its numbers and it is called so; or is used so, where none is called so."""
    same = {name: tensor for name, tensor in event.pass_.inputs.items() if _equal(tensor, event.args[0])}
    called = [tensor for name, tensor in same.items() if name.endswith(names)]
    known = any(name.endswith(("input_ids", "token_type_ids")) for name in event.pass_.inputs)
    return next(iter(called or ([] if known else [tensor for tensor in same.values() if _used(event, names)])), None)


def _equal(first: Tensor, another: Tensor) -> bool:
    return first.shape == another.shape and not first.is_floating_point() and torch.equal(first, another)


def _used(event: Event, names: tuple[str, ...]) -> bool:
    """Whether the table has the size that words' or types' have: the model's largest, or a few rows."""
    rows = len(event.args[1])
    tables = [part.num_embeddings for part in event.pass_.model.modules() if isinstance(part, nn.Embedding)]
    return rows == max(tables, default=0) if "input_ids" in names else 1 < rows <= 4 < max(tables, default=0)


def is_position(event: Event) -> bool:
    """Whether the numbers count along a row."""
    ids = event.args[0]
    if ids_of(event, "input_ids", "token_type_ids") is not None or ids.ndim > 2 or ids.shape[-1] < 2:
        return False
    first = ids.reshape(-1, ids.shape[-1])[0]
    return bool((first[1:] - first[:-1] == 1).all()) and event.args[1].shape[0] > 2


def position(change: Callable[[Event, Tensor], Tensor]) -> Action:
    """Another position, or another vector for it."""
    return lambda event: change(event, event.args[0]) if is_position(event) else SKIP


def moved(offset: int) -> Action:
    """Counted from somewhere else."""

    def change(event: Event, ids: Tensor) -> Tensor:
        return F.embedding((ids + offset).clamp(0, event.args[1].shape[0] - 1), event.args[1])

    return position(change)


def word(change: Callable[[Event], Any]) -> Action:
    """Something else for a word."""
    return lambda event: SKIP if ids_of(event, "input_ids") is None else change(event)


def padding_zero(event: Event) -> Any:
    """The padding word's vector is zero."""
    pad = event.argument(2, "padding_idx")
    if pad is None or not bool((event.args[0] == pad).any()):
        return SKIP
    return event.run() * (event.args[0] != pad)[..., None]


def sum_of(formula: Callable[[Tensor, Tensor], Tensor]) -> Action:
    """A residual sum: the older side is the stream."""

    def action(event: Event) -> Any:
        first, two = event.args[0], event.args[1]
        if first.shape != two.shape or first.ndim != 3 or not first.is_floating_point():
            return SKIP
        stream, branch = (first, two) if event.born[0] < event.born[1] else (two, first)
        return formula(stream, branch)

    return action


def drop(event: Event) -> Any:
    """Dropout though it is off."""
    rate = float(event.argument(1, "p", 0.5)) or 0.1
    return SKIP if event.argument(2, "training", True) else F.dropout(event.args[0], rate, training=True)


def in_dtype(dtype: torch.dtype) -> Action:
    """In a lower precision, and back."""

    def action(event: Event) -> Any:
        def low(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        made = event.function(*map(low, event.args), **{key: low(value) for key, value in event.kwargs.items()})
        return made.to(event.args[0].dtype)

    return action


def pooled(rule: Callable[[Tensor], Tensor]) -> Action:
    """Another token for the first."""

    def action(event: Event) -> Any:
        value = event.args[0]
        made = event.run()
        taken = isinstance(made, Tensor) and value.ndim == 3 and made.shape == (value.shape[0], value.shape[2])
        return rule(value) if taken and value.is_floating_point() and event.function is Tensor.__getitem__ else SKIP

    return action


def untied(event: Event) -> Any:
    """A decoder with weights of its own."""
    words = {id(part.weight) for part in event.pass_.model.modules() if isinstance(part, nn.Embedding)}
    if id(event.args[1]) not in words:
        return SKIP
    weight = event.args[1]
    own = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(weight)
    return F.linear(event.args[0], own * weight.std(), event.argument(2, "bias"))


_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def next_layer(event: Event) -> Any:
    """The weights of the next layer, or of the first in place of the last."""
    model = event.pass_.model
    if any(isinstance(part, nn.MultiheadAttention) for part in model.modules()):
        return SKIP  # which cuts its weights apart before they are used
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    given = dict(enumerate(event.args)) | dict(event.kwargs)
    instead = {place: _near(model, names.get(id(parameter), ""), parameter) for place, parameter in given.items()}
    if all(replacement is None for replacement in instead.values()):
        return SKIP
    changed = {place: given[place] if replacement is None else replacement for place, replacement in instead.items()}
    return event.function(
        *(changed[place] for place in range(len(event.args))), **{key: changed[key] for key in event.kwargs}
    )


def _near(model: nn.Module, name: str, tensor: Any) -> Tensor | None:
    """The tensor of the same name in the next layer, or in the first."""
    found = _LAYER.search(name)
    if found is None:
        return None
    others = dict(model.named_parameters())
    names = [f"{name[: found.start()]}{number}{name[found.end() :]}" for number in (int(found.group()) + 1, 0)]
    return next(
        (others[key] for key in names if key in others and key != name and others[key].shape == tensor.shape), None
    )
