"""Sinusoidal position embeddings (Vaswani et al. 2017, section 3.5) that differ from the reference's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from porting.causes.cause import Cause, alter, free_parameter, map_result
from porting.causes.fitting import FreeParameter, geometric
from porting.causes.model_parts import Embedding, ModelParts
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.tape import Call


def _other_layout(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each table of positions that was computed and not learned, with its other layout."""
    for embedding in model_parts.embeddings_of("positions"):
        table = model_parts.tape[embedding.weight]
        if table.shape[-1] % 2 == 0 and sinusoidal(table):
            yield alter(embedding.call, map_result(halves_to_pairs), "in pairs, not in halves")
            yield alter(embedding.call, map_result(pairs_to_halves), "in halves, not in pairs")


SAME_BASE = 1e-3
"""Largest relative difference of bases that are the same number but for rounding."""


@dataclass(frozen=True)
class Sinusoids:
    """A table of sines and cosines.

    Attributes:
        embedding: the lookup in the table.
        pairs: sines and cosines are interleaved, and not in two halves.
        base: the frequencies fall from 1 to 1 / base in equal ratios.
    """

    embedding: Embedding
    pairs: bool
    base: float

    def with_base(self, variant: Variant, base: float) -> Rewrite:
        """Return the rewrite of the lookup with another base."""

        def rewrite(values: Values, call: Call) -> Tensor:
            if not variant.one_step_less and math.isclose(base, self.base, rel_tol=SAME_BASE):
                return values.tape[call.result]  # another rounding of the same table has no other base
            ids, width = values.tape[self.embedding.ids], values[self.embedding.weight].shape[-1]
            frequencies = base ** (torch.arange(width // 2, dtype=variant.computed) / variant.steps(width // 2))
            angles = ids[..., None].to(variant.computed) / frequencies
            halves = torch.stack((angles.sin(), angles.cos()), -1 if self.pairs else -2).flatten(-2)
            return halves.to(variant.kept).to(values.tape[call.result].dtype)

        return rewrite


@dataclass(frozen=True)
class Variant:
    """One of the usual computations of such a table.

    Attributes:
        computed, kept: the dtypes in which it is computed and stored.
        one_step_less: the frequencies fall in one step less, so that the last one is 1 / base, as in tensor2tensor.
    """

    computed: torch.dtype
    kept: torch.dtype
    one_step_less: bool

    def steps(self, count: int) -> int:
        """Return the number of steps in which the frequencies fall by the base."""
        return count - 1 if self.one_step_less else count


VARIANTS = tuple(
    Variant(computed, kept, one_step_less)
    for one_step_less in (False, True)
    for computed, kept in (
        (torch.float64, torch.float32),
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
    )
)


def sinusoids(model_parts: ModelParts) -> Iterator[Sinusoids]:
    """Yield the tables of sines and cosines, with their base."""
    for embedding in model_parts.embeddings_of("positions"):
        table = model_parts.tape[embedding.weight].detach().double()
        if table.shape[-1] % 2 or len(table) < 2 or not sinusoidal(table):
            continue
        for pairs in (False, True):
            sines, cosines = (table[1, ::2], table[1, 1::2]) if pairs else table[1].chunk(2)
            frequencies = torch.atan2(sines, cosines)
            unit_length = torch.allclose(sines.square() + cosines.square(), torch.ones_like(sines), atol=1e-5)
            if unit_length and len(frequencies) > 1 and bool((frequencies > 0).all()):
                base = float(frequencies[1] / frequencies[0]) ** -len(frequencies)
                yield Sinusoids(embedding, pairs, float(f"{base:.3g}"))
                break


def _usual_bases(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each table with the usual bases, and with the exponent doubled and halved."""
    for table in sinusoids(model_parts):
        for variant in VARIANTS:
            for base in dict.fromkeys((table.base**2, table.base**0.5, 100.0, 1000.0, 10_000.0, 100_000.0)):
                if base != table.base or variant.one_step_less:
                    detail = _base_detail(table, variant, f"{base:.6g}")
                    yield alter(table.embedding.call, table.with_base(variant, base), detail)


def _solved_base(model_parts: ModelParts) -> Iterator[FreeParameter]:
    """Yield the base of each table."""
    for table in sinusoids(model_parts):
        for variant in VARIANTS:
            rewrite, detail = partial(table.with_base, variant), partial(_base_detail, table, variant)
            yield free_parameter(table.embedding.call, rewrite, detail, geometric(2.0, 1e10, 4))


def _base_detail(table: Sinusoids, variant: Variant, base: str) -> str:
    text = f"the base is {base} where the reference has {table.base:g}"
    if math.isclose(float(base), table.base**2):
        text += ": the exponent is doubled"
    return f"{text}, and the last speed is 1 / base" if variant.one_step_less else text


def sinusoidal(table: Tensor) -> bool:
    """Return whether the rows of a table are sines and cosines: of equal length, and the first of 0s and 1s alone."""
    lengths = table.square().sum(-1)
    first = table[0]
    return bool(torch.allclose(lengths, lengths[:1].expand_as(lengths), rtol=1e-4)) and bool(
        ((first - first.round()).abs() < 1e-6).all()
    )


def halves_to_pairs(value: Tensor) -> Tensor:
    """Interleave two halves, [... (k d)] -> [... (d k)] for k = sine, cosine."""
    return value.reshape(*value.shape[:-1], 2, -1).mT.flatten(-2)


def pairs_to_halves(value: Tensor) -> Tensor:
    """Separate interleaved channels, [... (d k)] -> [... (k d)] for k = sine, cosine."""
    return value.reshape(*value.shape[:-1], -1, 2).mT.flatten(-2)


CAUSES: tuple[Cause, ...] = (
    Cause(
        name="sinusoid layout",
        what="sines and cosines are in two halves and the reference interleaves them, or vice versa",
        looks="the channels of the position table are in a different order",
        fix="the paper interleaves them; tensor2tensor and its descendants have all sines first",
        alterations=_other_layout,
        absorbed_by_weights=True,
    ),
    Cause(
        name="sinusoid frequencies",
        what="the sines and cosines of positions have different frequencies",
        looks="the difference grows with the position",
        fix="10000 ** (-2 i / width) for i = 0, 1, ... width / 2 - 1; arange(0, width, 2) is 2 i already",
        alterations=_usual_bases,
        free_parameters=_solved_base,
        absorbed_by_weights=True,
    ),
)
