"""Pair the parameters of the reference with those of the port: the table, applied to the two modules themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from porting.notation.table import Table
from porting.plan.align import Step, align
from porting.plan.move import pullback
from porting.target import named_tensors


@dataclass(frozen=True)
class Counterpart:
    """One parameter of the reference and all of the port that is made from it.

    Attributes:
        names: its names in the reference, the first one first.
        steps: what carries it over; more than one where the port has it several times.
        trains: whether the reference's and the port's take gradients, as their owners left them.
        padded: whether the reference's and the port's is an embedding whose padding word takes no gradient; not so in
            the reference if the port does not have that row at all.
        buffer: whether all that the port has of it are buffers, which no optimiser moves.
    """

    names: tuple[str, ...]
    steps: tuple[Step, ...]
    shape: tuple[int, ...]
    trains: tuple[bool, bool]
    padded: tuple[bool, bool] = (False, False)
    buffer: bool = False

    @property
    def name(self) -> str:
        """The reference's name, as the rule has it."""
        return next(source for source in self.steps[0].sources if source in self.names)

    @property
    def targets(self) -> tuple[str, ...]:
        """The port's names."""
        found = (copy.target for step in self.steps for copy in step.copies if copy.source in self.names)
        return tuple(dict.fromkeys(found))

    @property
    def movable(self) -> bool:
        """Whether one optimiser step on both sides moves both alike: not where a rule computes or repeats."""
        return (
            len(self.steps) == 1
            and not self.buffer
            and not any(
                not step.rule.exact or any(0 in copy.source_strides for copy in step.copies) for step in self.steps
            )
        )

    def covered(self) -> Tensor:
        """The mask of the parameter's elements that the port has."""
        mask = torch.zeros(self.shape, dtype=torch.bool)
        for step in self.steps:
            for copy in step.copies:
                if copy.source in self.names:
                    mask.as_strided(copy.sizes, copy.source_strides, copy.source_offset).fill_(True)
        return mask


@dataclass(frozen=True)
class Counterparts:
    """All parameters of the reference that the port has.

    Attributes:
        config: what a rule's constants are computed from.
        found: one for each parameter of the reference that is trained on either side.
        alone: parameters of the port that nothing of the reference is carried into.
        values: the reference's tensors, on which the gradient through a formula depends.
    """

    table: Table
    config: Mapping[str, object]
    found: tuple[Counterpart, ...]
    alone: tuple[str, ...]
    values: Mapping[str, Tensor] = field(default_factory=dict)

    def pulled(self, one: Counterpart, gradients: Mapping[str, Tensor]) -> Tensor:
        """The gradient of a parameter of the reference, from those of the port's by name."""
        result = torch.zeros(one.shape, dtype=torch.float64)
        for part in self.parts(one, gradients):
            result += part
        return result

    def parts(self, one: Counterpart, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """The same, step by step: what each place of the port adds to it."""
        return [
            pullback(
                step,
                name,
                one.shape,
                gradients.__getitem__,
                step.rule.arithmetic(self.config),
                values=self.values.__getitem__,
            )
            for step in one.steps
            for name in step.sources
            if name in one.names
        ]


def counterparts(
    table: Table, config: Mapping[str, object], sizes: Mapping[str, int], reference: nn.Module, port: nn.Module
) -> Counterparts:
    """Hold the table's rules against the parameters of the two modules.

    Args:
        config: the checkpoint's config, the table's defaults filled in.
        sizes: of indices, from [sizes].
        reference, port: the modules, with ``requires_grad`` as their owners left it.
    """
    theirs, ours = dict(named_tensors(reference)), dict(named_tensors(port))
    alignment = align(
        table.rules,
        {name: tuple(tensor.shape) for name, tensor in theirs.items()},
        {name: tuple(tensor.shape) for name, tensor in ours.items()},
        sizes=sizes,
        prefix=table.prefix,
        target_prefix=table.target_prefix,
    )
    names: dict[int, list[str]] = {}
    for name, tensor in theirs.items():
        names.setdefault(id(tensor), []).append(name)
    steps: dict[int, list[Step]] = {}
    for step in alignment.steps:
        for key in dict.fromkeys(id(theirs[name]) for name in step.sources):
            steps.setdefault(key, []).append(step)
    found: list[Counterpart] = []
    reached: set[int] = set()
    for key, same in names.items():
        tensor = theirs[same[0]]
        if key in steps and isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            targets = [copy.target for step in steps[key] for copy in step.copies if copy.source in same]
            trained = all(_trains(ours[name]) for name in targets)
            reached |= {id(ours[name]) for name in targets}
            if trained or _trains(tensor):  # a table that is computed and frozen on both sides is not a parameter
                shape = tuple(tensor.shape)
                trains = _trains(tensor), trained
                buffer = not any(isinstance(ours[name], nn.Parameter) for name in targets)
                one = Counterpart(tuple(same), tuple(steps[key]), shape, trains, buffer=buffer)
                padding = _padded(reference).get(key)
                theirs_padded = padding is not None and bool(one.covered()[padding].any())
                ours_padded = any(id(ours[name]) in _padded(port) for name in targets)
                found.append(replace(one, padded=(theirs_padded, ours_padded)))
    alone = {id(one): name for name, one in reversed(ours.items()) if isinstance(one, nn.Parameter)}
    lone = tuple(sorted(name for key, name in alone.items() if key not in reached))
    return Counterparts(table, config, tuple(found), lone, theirs)


def _trains(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _padded(module: nn.Module) -> dict[int, int]:
    """The embeddings that leave the row of the padding word out of their gradient, and that row."""
    parts = (part for part in module.modules() if isinstance(part, nn.Embedding))
    return {id(part.weight): part.padding_idx for part in parts if part.padding_idx is not None}
