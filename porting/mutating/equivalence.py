"""Find the mistakes that change the outputs of a port, and the inputs that a test needs to detect each.

A mistake that changes nothing in float64, whatever the weights and inputs, is an equivalent mutant (Jia and Harman
2011, section II.B), which no test can detect.
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
"""Largest difference of equal outputs, relative to the largest value of the output."""

DRAWS = 2
"""Number of draws of weights and inputs."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments."""


@dataclass
class SampleRun:
    """A port with certain weights and inputs, in float64.

    Attributes:
        advice: what a test has to do to run it so, with ``{off}`` for the difference and ``{limit}`` for a tolerance
            below it.
    """

    model: nn.Module
    given: Arguments
    advice: str
    _expected: list[Tensor] | None = field(default=None, repr=False)

    @property
    def expected(self) -> list[Tensor]:
        """The outputs without a mistake."""
        if self._expected is None:
            self._expected = list(_outputs(self.model, *self.given))
        return self._expected

    def off(self, fault: InjectedFault, inventory: Inventory) -> float | None:
        """Return the largest change of an output by a mistake; None if it cannot be made, 0 if it changes nothing."""
        expected = self.expected
        sites = plant(self.model, fault, inventory)
        try:
            outputs = list(_outputs(self.model, *self.given))
        except (RuntimeError, ValueError, IndexError):  # the mistake does not fit this port's shapes
            outputs = []
        finally:
            cure(self.model)
        return _largest_difference(expected, outputs) if sites else None


def kinds(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], inventory: Inventory
) -> dict[str, MistakeStatus]:
    """Return for each mistake whether it changes a port, changes nothing, or cannot be made, and what shows it."""
    trials = list(_trials(model, (args, dict(kwargs))))
    return {fault.name: _kind(fault, trials, inventory) for fault in PLANTS}


def _kind(fault: InjectedFault, trials: list[SampleRun], inventory: Inventory) -> MistakeStatus:
    kind = ABSENT
    for trial in trials:
        difference = trial.off(fault, inventory)
        if difference:
            limit = 10.0 ** (math.floor(math.log10(difference)) - 1) if math.isfinite(difference) else 1e-9
            advice = trial.advice.format(off=f"{difference:.0e}", limit=f"{limit:.0e}")
            return MistakeStatus(kind=APPLIES, advice=advice)
        kind = kind if difference is None else EQUIVALENT
    return MistakeStatus(kind=kind)


COMPARE = "torch.testing.assert_close(port(...), expected, rtol=0, atol={limit})  # in float64: off by {off} here"
WEIGHTS = "torch.nn.init.normal_(parameter, std=0.2)  # for each, before comparing: zero biases and unit gains hide it"
INPUTS = "torch.randint_like(input_ids, len(vocabulary))  # more words, in several rows: these hide it"


def _trials(model: nn.Module, given: Arguments) -> Iterator[SampleRun]:
    """Yield the port as the test runs it, with one input drawn, with weights drawn, and with both drawn."""
    own = _float64_copy(model, None)
    exact: Arguments = _to_float64(given)
    yield SampleRun(own, exact, COMPARE)
    drawn = _draw(own, exact, 0)
    names = list(inspect.signature(type(own).forward).parameters)[1:]
    arguments: list[tuple[int | str, Any]] = [*enumerate(exact[0]), *exact[1].items()]
    for name, value in arguments:
        if isinstance(value, Tensor):
            argument_name = names[name] if isinstance(name, int) and name < len(names) else str(name)
            yield SampleRun(own, _with(exact, drawn, name), _advice(argument_name, value))
    for seed in range(DRAWS):
        other = _float64_copy(model, seed)
        if seed == 0:
            yield SampleRun(other, exact, WEIGHTS)
        yield SampleRun(other, _draw(other, exact, seed), f"{WEIGHTS}, and so do these inputs")


def _with(given: Arguments, drawn: Arguments, name: int | str) -> Arguments:
    """Return the arguments with one of them drawn."""
    args = tuple(drawn[0][position] if position == name else argument for position, argument in enumerate(given[0]))
    return args, {key: drawn[1][key] if key == name else argument for key, argument in given[1].items()}


def _advice(name: str, value: Tensor) -> str:
    """Return the line of code that gives an input what it lacks."""
    if value.is_floating_point() or value.ndim != 2 or not bool(((value == 0) | (value == 1)).all()):
        return INPUTS
    half = (value.shape[1] + 1) // 2
    if bool(value[:, 0].bool().all()):
        return f"{name}[-1, {half}:] = 0  # a row with padding: here is none"
    return f"{name}[:, {half}:] = 1  # here it is the same everywhere"


def _float64_copy(model: nn.Module, seed: int | None) -> nn.Module:
    """Copy a model in float64 and eval mode; with a seed its parameters are drawn, with no zero bias or unit gain."""
    copied = copy.deepcopy(model)
    cure(copied)
    copied = copied.double().eval()
    if seed is None:
        return copied
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            gain = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(
                (1.0 if gain else 0.0) + 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            )
    return copied


def _to_float64(given: Arguments) -> Arguments:
    """Cast floating-point arguments to float64."""

    def cast(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tuple(tree_map(cast, given[0])), dict(tree_map(cast, given[1]))


def _draw(model: nn.Module, given: Arguments, seed: int) -> Arguments:
    """Draw inputs of the same shapes: other tokens, padding at the end of rows, two segments."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = max((part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)), default=2)

    def drawn(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.is_floating_point() or leaf.ndim != 2:
            return leaf
        if bool(((leaf == 0) | (leaf == 1)).all()):
            return _draw_mask(leaf)
        return torch.randint(0, vocabulary, leaf.shape, generator=generator).to(leaf.dtype)

    return tuple(tree_map(drawn, given[0])), dict(tree_map(drawn, given[1]))


def _draw_mask(tensor: Tensor) -> Tensor:
    """Return a mask whose later rows are shorter; inverted for a tensor that begins with 0."""
    rows, length = tensor.shape
    kept = [max(length - 2 * row, (length + 1) // 2) for row in range(rows)]
    mask = torch.stack([torch.arange(length) < count for count in kept])
    return (mask if bool(tensor[:, 0].bool().all()) else ~mask).to(tensor.dtype)


def _outputs(model: nn.Module, args: Any, kwargs: Any) -> Iterator[Tensor]:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output = model(*args, **kwargs)
    values = output if isinstance(output, Tensor | tuple | list | dict) else vars(output)
    yield from (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point())


def _largest_difference(expected: list[Tensor], found: list[Tensor]) -> float:
    """Return the largest difference of outputs; 0 if there is nothing but rounding."""
    if len(expected) != len(found) or any(a.shape != b.shape for a, b in zip(expected, found, strict=True)):
        return math.inf
    largest = 0.0
    for first, second in zip(expected, found, strict=True):
        difference = float((first - second).abs().nan_to_num(nan=math.inf).max()) if first.numel() else 0.0
        if difference > SAME * float(first.abs().max() if first.numel() else 0.0):
            largest = max(largest, difference)
    return largest
