"""Forwards that take several tensors as one argument: a dictionary, a batch with attributes, a tuple.

What keys a dictionary is read by stands in no signature.  So the forward is run with one that answers what its keys
mean and remembers which were read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from porting.suggesting.subjects.argument_names import role_of
from porting.suggesting.subjects.config_fields import normal
from porting.target import NamedTensors
from porting.tracing.float64 import forced_float64
from porting.trials.modalities import DECODER_IDS, IDS, SEGMENTS
from porting.trials.padding import DECODER_MASK, MASK

_SHAPES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda mask: mask,
    Tensor.bool,
    Tensor.double,
    lambda mask: mask[:, None, None],
    lambda mask: mask[:, None, None].bool(),
    lambda mask: mask[:, None],
    lambda mask: mask[:, None].bool(),
)
"""Masks [b s] as forwards take them: only to come past the lines that read further keys."""

MOST = 3
"""How many tensors a tuple may have."""


class AskedKeys(NamedTensors):
    """A dictionary that gives what its keys mean, and remembers the keys that were asked for.

    Attributes:
        roles: key -> the reference's argument that it stands for.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.roles: dict[str, str] = {}
        self._tensors = tensors

    def _answer(self, key: object) -> Tensor | None:
        if not isinstance(key, str):
            return None
        role = self.roles.get(key) or role_of(normal(key), tuple(self._tensors), tuple(self.roles.values()))
        if role is None or role not in self._tensors or role in {r for k, r in self.roles.items() if k != key}:
            return None
        self.roles[key] = role
        return self._tensors[role]

    def __missing__(self, key: object) -> Tensor:
        """The tensor of a key."""
        found = self._answer(key)
        if found is None:
            raise KeyError(key)
        return found

    def get(self, key: object, default: Any = None) -> Any:
        """The tensor of a key, or the default."""
        found = self._answer(key)
        return default if found is None else found

    def __contains__(self, key: object) -> bool:
        """Whether anything answers to the key."""
        return self._answer(key) is not None

    def keys(self) -> Any:  # a dictionary's view
        """The reference's own names, for ``**batch``."""
        return self._tensors.keys()

    def __iter__(self) -> Iterator[str]:
        """The same: ``**batch`` reads a dictionary's own storage unless it is iterated in a way of its own."""
        return iter(self._tensors)


def grouped_roles(
    module: nn.Module, found: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> Iterator[dict[str, str]]:
    """The meanings of a forward's arguments if one of them holds several tensors.

    Args:
        module: the model, in float64.
        found: argument -> role, if each is one tensor.
        tensors: a batch of the reference's inputs.

    Yields:
        Name -> role, where ``batch.ids`` is an item of a dictionary and ``x.0`` one of a tuple.
    """
    for argument in _required(module, found):
        others = {name: role for name, role in found.items() if name != argument}
        keys = _keys_read(module, argument, others, tensors)
        if keys:
            items = {f"{argument}.{key}": role for key, role in keys.items()}
            yield items | {name: role for name, role in others.items() if role not in keys.values()}
    for argument in _required(module, found):
        others = {name: role for name, role in found.items() if name != argument}
        for some in _tuples(tensors):
            items = {f"{argument}.{number}": role for number, role in enumerate(some)}
            yield items | {name: role for name, role in others.items() if role not in some}


def _required(module: nn.Module, found: Mapping[str, str]) -> list[str]:
    """The arguments that a forward cannot be called without, of those that are given."""
    taken = inspect.signature(module.forward).parameters
    return [name for name in found if name in taken and taken[name].default is inspect.Parameter.empty]


def _keys_read(
    module: nn.Module, argument: str, others: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> dict[str, str]:
    """The keys that a forward reads of one argument, with what they mean; those of the run that read most."""
    best: dict[str, str] = {}
    for shaped in _SHAPES:
        given = {name: shaped(one) if name in {MASK, DECODER_MASK} else one for name, one in tensors.items()}
        asked = AskedKeys(given)
        done = False
        with suppress(Exception), torch.no_grad(), forced_float64(module):  # the user's forward may raise anything
            module(**{argument: asked}, **{name: given[role] for name, role in others.items() if role in given})
            done = True
        if len(asked.roles) > len(best) or done:
            best = asked.roles
        if done:
            break
    return best


def _tuples(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, ...]]:
    """Possible meanings of a tuple of tensors: tokens first, then the others in any order."""
    first = next((one for one in tensors if one == IDS), next(iter(tensors)))
    rest = [one for one in (MASK, SEGMENTS, DECODER_IDS, DECODER_MASK) if one in tensors]
    for length in range(2, MOST + 1):
        yield from ((first, *some) for some in permutations(rest, length - 1))
