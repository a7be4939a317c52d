"""Carrying tensors through a table there and back, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from porting.notation.table import parse_table
from porting.ops import Arithmetic
from porting.plan.align import Step, align
from porting.plan.config import sizes
from porting.plan.move import backward, forward
from tests.plan.shapes import Shape, infos


@dataclass(frozen=True, kw_only=True)
class Port:
    """A table held against two sides that it fits."""

    steps: tuple[Step, ...]
    sources: Mapping[str, Shape]
    targets: Mapping[str, Shape]
    config: Mapping[str, object]

    def arithmetic(self, step: Step) -> Arithmetic:
        return step.rule.arithmetic(self.config)

    def forward(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: value
            for step in self.steps
            for name, value in forward(step, infos(self.targets), tensors.__getitem__, self.arithmetic(step))
        }

    def backward(self, tensors: Mapping[str, Tensor], base: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        read = tensors.__getitem__
        was = None if base is None else base.__getitem__
        return {
            name: value
            for step in self.steps
            for name, value in backward(step, infos(self.sources), read, self.arithmetic(step), was)
        }


def port(
    table: str,
    sources: Mapping[str, Shape],
    targets: Mapping[str, Shape],
    config: Mapping[str, object] | None = None,
) -> Port:
    """The table held against two sides, seen to leave nothing over."""
    parsed = parse_table(table if "[[rule]]" in table or "[tensors]" in table else f"[tensors]\n{table}")
    known, faults = sizes(parsed, config or {})
    aligned = align(parsed.rules, sources, targets, sizes=known)
    assert [str(fault) for fault in (*faults, *aligned.faults, *aligned.gaps)] == []
    assert (aligned.unread, aligned.unwritten, aligned.unplaced, aligned.unsourced, aligned.idle) == ((),) * 5
    return Port(steps=aligned.steps, sources=sources, targets=targets, config=config or {})


def drawn(shapes: Mapping[str, Shape], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random tensors of these shapes."""
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, shapes, dtypes and bits."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
