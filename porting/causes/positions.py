"""Computed positions that are not the reference's: sinusoids."""

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


class SinusoidLayout(Cause):
    """Sines and cosines in halves, or one by one."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each table of positions that was computed and not learned."""
        for embedding in model_parts.embeddings:
            values = model_parts.tape[embedding.call.result]
            if (
                embedding.role == "positions"
                and values.shape[-1] % 2 == 0
                and sinusoidal(model_parts.tape[embedding.weight])
            ):
                yield alter(embedding.call, map_result(halves_to_pairs), "in pairs, not in halves")
                yield alter(embedding.call, map_result(pairs_to_halves), "in halves, not in pairs")


SAME_BASE = 1e-3
"""Bases that are this close are the same number, rounded."""


@dataclass(frozen=True)
class Sinusoids:
    """A table of sines and cosines.

    Attributes:
        embedding: where its rows are read.
        pairs: a sine and its cosine stand beside each other, and not in two halves.
        base: the first speed is 1, and each other one is smaller by the same factor, to 1 / base in the end.
    """

    embedding: Embedding
    pairs: bool
    base: float

    def turned(self, base: float, way: Way) -> Rewrite:
        """The rows by another base."""

        def rewrite(values: Values, call: Call) -> Tensor:
            if not way.less and math.isclose(base, self.base, rel_tol=SAME_BASE):
                return values.tape[call.result]  # another rounding of the same table has no other base
            ids, width = values.tape[self.embedding.ids], values[self.embedding.weight].shape[-1]
            speeds = base ** (torch.arange(width // 2, dtype=way.computed) / way.steps(width // 2))
            angles = ids[..., None].to(way.computed) / speeds
            halves = torch.stack((angles.sin(), angles.cos()), -1 if self.pairs else -2).flatten(-2)
            return halves.to(way.kept).to(values.tape[call.result].dtype)

        return rewrite


@dataclass(frozen=True)
class Way:
    """How people compute a table.

    Attributes:
        computed, kept: the dtypes in which it is computed and kept.
        less: speeds fall over one step less, so that the last one is 1 / base (tensor2tensor).
    """

    computed: torch.dtype
    kept: torch.dtype
    less: bool

    def steps(self, count: int) -> int:
        """In how many steps the speeds fall by the base."""
        return count - 1 if self.less else count


WAYS = tuple(
    Way(computed, kept, less)
    for less in (False, True)
    for computed, kept in (
        (torch.float64, torch.float32),
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
    )
)


def sinusoids(model_parts: ModelParts) -> Iterator[Sinusoids]:
    """The tables of sines and cosines whose base is known."""
    for embedding in model_parts.embeddings:
        table = model_parts.tape[embedding.weight].detach().double()
        if embedding.role != "positions" or table.shape[-1] % 2 or len(table) < 2 or not sinusoidal(table):
            continue
        for pairs in (False, True):
            sines, cosines = (table[1, ::2], table[1, 1::2]) if pairs else table[1].chunk(2)
            speeds = torch.atan2(sines, cosines)
            together = torch.allclose(sines.square() + cosines.square(), torch.ones_like(sines), atol=1e-5)
            if together and len(speeds) > 1 and bool((speeds > 0).all()):
                base = float(speeds[1] / speeds[0]) ** -len(speeds)
                yield Sinusoids(embedding, pairs, float(f"{base:.3g}"))
                break


class SinusoidBase(Cause):
    """Speeds that fall to another number."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each table, by the numbers that people take, and with the exponent doubled and halved."""
        for table in sinusoids(model_parts):
            for way in WAYS:
                for base in dict.fromkeys((table.base**2, table.base**0.5, 100.0, 1000.0, 10_000.0, 100_000.0)):
                    if base != table.base or way.less:
                        yield alter(
                            table.embedding.call, table.turned(base, way), self._detail(table, way, f"{base:.6g}")
                        )

    def free_parameters(self, model_parts: ModelParts) -> Iterator[FreeParameter]:
        """Each table by any base."""
        for table in sinusoids(model_parts):
            for way in WAYS:
                turned, detail = partial(_based, table, way), partial(self._detail, table, way)
                yield free_parameter(table.embedding.call, turned, detail, geometric(2.0, 1e10, 4))

    @staticmethod
    def _detail(table: Sinusoids, way: Way, base: str) -> str:
        said = f"the base is {base} where the reference has {table.base:g}"
        if math.isclose(float(base), table.base**2):
            said += ": the exponent is doubled"
        return f"{said}, and the last speed is 1 / base" if way.less else said


def _based(table: Sinusoids, way: Way, base: float) -> Rewrite:
    return table.turned(base, way)


def sinusoidal(table: Tensor) -> bool:
    """Whether the rows of a table are sines and cosines: each of the same length, and 0s and 1s alone in the first."""
    lengths = table.square().sum(-1)
    first = table[0]
    return bool(torch.allclose(lengths, lengths[:1].expand_as(lengths), rtol=1e-4)) and bool(
        ((first - first.round()).abs() < 1e-6).all()
    )


def halves_to_pairs(value: Tensor) -> Tensor:
    """[... (k d)] -> [... (d k)], k = sine, cosine."""
    return value.reshape(*value.shape[:-1], 2, -1).mT.flatten(-2)


def pairs_to_halves(value: Tensor) -> Tensor:
    """[... (d k)] -> [... (k d)], k = sine, cosine."""
    return value.reshape(*value.shape[:-1], -1, 2).mT.flatten(-2)


CAUSES: tuple[Cause, ...] = (
    SinusoidLayout(
        name="sinusoid layout",
        what="sines and cosines stand in halves where the reference has them one by one, or the other way round",
        looks="the position table differs by an order of its channels",
        fix="the paper interleaves them; tensor2tensor and what is descended from it have all sines first",
        absorbed_by_weights=True,
    ),
    SinusoidBase(
        name="sinusoid frequencies",
        what="the sines and cosines of positions have other speeds than the reference's",
        looks="the first positions agree best, the last ones least",
        fix="10000 ** (-2 i / width) for i = 0, 1, ... width / 2 - 1; arange(0, width, 2) is 2 i already",
        absorbed_by_weights=True,
    ),
)
