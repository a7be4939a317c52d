"""Which mistakes can make a difference in a port at all, and what a test would have to do to see each.

A mistake that makes none in float64, whatever the weights and inputs, is no test's fault (Jia and Harman 2011, section
II.B: equivalent mutants).
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from porting.causes.events import InjectedFault, Inventory
from porting.causes.fault_injection import cure, plant
from porting.causes.mutants import PLANTS
from porting.mutating.messages import ABSENT, APPLIES, EQUIVALENT, MistakeStatus

SAME = 1e-12
"""Relative to the largest value of an output; as in the proof of meaning."""

DRAWS = 2
"""With so many draws of weights and inputs."""

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments."""


@dataclass
class SampleRun:
    """A port with certain weights, run on certain inputs, in float64.

    Attributes:
        model: the port.
        given: its arguments.
        advice: what a test has to do to run it so; ``{limit}`` and ``{off}`` are of the difference that shows.
    """

    model: nn.Module
    given: Given
    advice: str
    _expected: list[Tensor] | None = field(default=None, repr=False)

    @property
    def expected(self) -> list[Tensor]:
        """What comes out without a mistake."""
        if self._expected is None:
            self._expected = list(_outputs(self.model, *self.given))
        return self._expected

    def off(self, fault: InjectedFault, inventory: Inventory) -> float | None:
        """By how much a mistake changes what comes out, at most; None when it has no place, 0 when by nothing."""
        expected = self.expected
        sites = plant(self.model, fault, inventory)
        try:
            found = list(_outputs(self.model, *self.given))
        except (RuntimeError, ValueError, IndexError):  # the mistake does not fit this port's shapes
            found = []
        finally:
            cure(self.model)
        return _apart(expected, found) if sites else None


def kinds(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], inventory: Inventory
) -> dict[str, MistakeStatus]:
    """For each mistake whether it can be made in a port, changes nothing, or cannot be made; and what shows it.

    Args:
        model: the port, which is left as it is.
        args, kwargs: what it was called with.
        inventory: what it consists of.
    """
    trials = list(_trials(model, (args, dict(kwargs))))
    return {fault.name: _kind(fault, trials, inventory) for fault in PLANTS}


def _kind(fault: InjectedFault, trials: list[SampleRun], inventory: Inventory) -> MistakeStatus:
    found = ABSENT
    for trial in trials:
        off = trial.off(fault, inventory)
        if off:
            limit = 10.0 ** (math.floor(math.log10(off)) - 1) if math.isfinite(off) else 1e-9
            return MistakeStatus(kind=APPLIES, advice=trial.advice.format(off=f"{off:.0e}", limit=f"{limit:.0e}"))
        found = found if off is None else EQUIVALENT
    return MistakeStatus(kind=found)


COMPARE = "torch.testing.assert_close(port(...), expected, rtol=0, atol={limit})  # in float64: off by {off} here"
WEIGHTS = "torch.nn.init.normal_(parameter, std=0.2)  # for each, before comparing: zero biases and unit gains hide it"
INPUTS = "torch.randint_like(input_ids, len(vocabulary))  # more words, in several rows: these hide it"


def _trials(model: nn.Module, given: Given) -> Iterator[SampleRun]:
    """The port as the test has it; then with one input that shows more; then with weights that do; then with both."""
    own = _double(model, None)
    exact: Given = _floats(given)
    yield SampleRun(own, exact, COMPARE)
    drawn = _drawn(own, exact, 0)
    named = list(inspect.signature(type(own).forward).parameters)[1:]
    places: list[tuple[int | str, Any]] = [*enumerate(exact[0]), *exact[1].items()]
    for name, value in places:
        if isinstance(value, Tensor):
            called = named[name] if isinstance(name, int) and name < len(named) else str(name)
            yield SampleRun(own, _with(exact, drawn, name), _advice(called, value))
    for seed in range(DRAWS):
        other = _double(model, seed)
        if seed == 0:
            yield SampleRun(other, exact, WEIGHTS)
        yield SampleRun(other, _drawn(other, exact, seed), f"{WEIGHTS}, and so do these inputs")


def _with(given: Given, drawn: Given, name: int | str) -> Given:
    """One argument as it was drawn."""
    args = tuple(drawn[0][place] if place == name else argument for place, argument in enumerate(given[0]))
    return args, {key: drawn[1][key] if key == name else argument for key, argument in given[1].items()}


def _advice(name: str, value: Tensor) -> str:
    """The line that gives an input what it lacks."""
    if value.is_floating_point() or value.ndim != 2 or not bool(((value == 0) | (value == 1)).all()):
        return INPUTS
    half = (value.shape[1] + 1) // 2
    if bool(value[:, 0].bool().all()):
        return f"{name}[-1, {half}:] = 0  # a row with padding: here is none"
    return f"{name}[:, {half}:] = 1  # here it is the same everywhere"


def _double(model: nn.Module, seed: int | None) -> nn.Module:
    """A copy in float64, in eval mode; with a seed its parameters are drawn: no zero bias, no gain of one."""
    own = copy.deepcopy(model)
    cure(own)
    own = own.double().eval()
    if seed is None:
        return own
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            gain = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(
                (1.0 if gain else 0.0) + 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            )
    return own


def _floats(given: Given) -> Given:
    """In float64, where they are floating numbers."""

    def exact(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tuple(tree_map(exact, given[0])), dict(tree_map(exact, given[1]))


def _drawn(model: nn.Module, given: Given, seed: int) -> Given:
    """Inputs of the same shapes that show more: other words, padding at the end of rows, two kinds of segment."""
    generator = torch.Generator().manual_seed(seed)
    words = max((part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)), default=2)

    def other(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_floating_point():
            return leaf
        binary = bool(((leaf == 0) | (leaf == 1)).all())
        if leaf.ndim != 2:
            return leaf
        if binary:
            return _mixed(leaf)
        return torch.randint(0, words, leaf.shape, generator=generator).to(leaf.dtype)

    return tuple(tree_map(other, given[0])), dict(tree_map(other, given[1]))


def _mixed(tensor: Tensor) -> Tensor:
    """1 and 0 as in a mask: the last rows are shorter, and no row is empty; for one that begins with 0, turned over."""
    rows, length = tensor.shape
    kept = [max(length - 2 * row, (length + 1) // 2) for row in range(rows)]
    mask = torch.stack([torch.arange(length) < count for count in kept])
    return (mask if bool(tensor[:, 0].bool().all()) else ~mask).to(tensor.dtype)


def _outputs(model: nn.Module, args: Any, kwargs: Any) -> Iterator[Tensor]:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = model(*args, **kwargs)
    values = made if isinstance(made, Tensor | tuple | list | dict) else vars(made)
    yield from (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point())


def _apart(expected: list[Tensor], found: list[Tensor]) -> float:
    """The largest difference; 0 where there is nothing but rounding."""
    if len(expected) != len(found) or any(a.shape != b.shape for a, b in zip(expected, found, strict=True)):
        return math.inf
    apart = 0.0
    for first, another in zip(expected, found, strict=True):
        far = float((first - another).abs().nan_to_num(nan=math.inf).max()) if first.numel() else 0.0
        if far > SAME * float(first.abs().max() if first.numel() else 0.0):
            apart = max(apart, far)
    return apart
