"""Random rules, sizes and tensors: nothing is lost, nothing is written twice, and the way back is the inverse.

A drawn rule is held against two oracles that share nothing with it: torch's permute, reshape and cat on one canonical
tensor, and ``einops.rearrange``, which can express every rule here but the concatenations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from einops import rearrange
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from porting.plan.copies import Copy
from tests.plan.carrying import Port, port, same
from tests.plan.shapes import Shape

LETTERS = "abcdefgh"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Side:
    """Where the indices of one side stand: some in the name, the others among the axes, in groups."""

    named: tuple[str, ...]
    enumerated: frozenset[str]
    groups: tuple[tuple[str, ...], ...]
    stem: str

    def term(self, sizes: Sizes, inner: Mapping[str, str] | None = None) -> str:
        """The term; ``inner`` spells an index of the axes in another way."""
        spelled = inner or {}
        axes = [
            f"({' '.join(spelled.get(one, one) for one in group)})"
            if len(group) > 1
            else spelled.get(group[0], group[0])
            for group in self.groups
        ]
        return f"{'.'.join([self.stem, *(self.placeholder(one, sizes) for one in self.named)])} [{' '.join(axes)}]"

    def placeholder(self, index: str, sizes: Sizes) -> str:
        if index not in self.enumerated:
            return f"{{{index}}}"
        return f"{{{index}:{','.join(f'{self.stem}{index}{value}' for value in range(sizes[index]))}}}"

    def name(self, values: Mapping[str, int]) -> str:
        parts = (f"{self.stem}{one}{values[one]}" if one in self.enumerated else str(values[one]) for one in self.named)
        return ".".join([self.stem, *parts])

    def shape(self, sizes: Sizes) -> Shape:
        return tuple(math.prod(sizes[one] for one in group) for group in self.groups)

    def cut(self, canonical: Tensor, order: Sequence[str], sizes: Sizes) -> Iterator[tuple[str, Tensor]]:
        """The tensors of this side, cut from the canonical one, whose axes are ``order``."""
        axes = [one for group in self.groups for one in group]
        for values in product(*(range(sizes[one]) for one in self.named)):
            at = dict(zip(self.named, values, strict=True))
            part = canonical[tuple(at.get(one, slice(None)) for one in order)]
            left = [one for one in order if one not in at]
            part = part.permute([left.index(axis) for axis in axes])
            yield self.name(at), part.reshape(self.shape(sizes)).contiguous()


@st.composite
def sides(draw: st.DrawFn, indices: Sequence[str], stem: str) -> Side:
    order = draw(st.permutations(list(indices)))
    count = draw(st.integers(0, min(2, len(order))))
    named, axes = order[:count], order[count:]
    groups: list[tuple[str, ...]] = []
    while axes:
        size = draw(st.integers(1, len(axes)))
        groups.append(tuple(axes[:size]))
        axes = axes[size:]
    enumerated = frozenset(one for one in named if draw(st.booleans()))
    return Side(tuple(named), enumerated, tuple(groups), stem)


@st.composite
def bijections(draw: st.DrawFn) -> tuple[Side, Side, dict[str, int]]:
    indices = LETTERS[: draw(st.integers(1, 5))]
    sizes = {index: draw(st.integers(1, 4)) for index in indices}
    return draw(sides(indices, "x")), draw(sides(indices, "y")), sizes


def given_sizes(sizes: Sizes) -> str:
    return "[sizes]\n" + "".join(f"{index} = {size}\n" for index, size in sizes.items())


def filled(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Random bits of a dtype: NaN, infinities and signed zeros among them."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    width = torch.empty((), dtype=dtype).itemsize
    noise = torch.randint(0, 256, (math.prod(shape) * width,), dtype=torch.uint8)
    return noise.view(dtype).reshape(shape)


def bits(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
        for name, tensor in tensors.items()
    }


def counted(made: Port, tensors: Mapping[str, Tensor]) -> list[int]:
    """How often each element of the source was written, by carrying element numbers."""
    numbers: dict[str, Tensor] = {}
    start = 0
    for name, tensor in tensors.items():
        numbers[name] = torch.arange(start, start + tensor.numel()).reshape(tensor.shape)
        start += tensor.numel()
    landed = torch.cat([tensor.reshape(-1) for tensor in made.forward(numbers).values()])
    return torch.bincount(landed, minlength=start).tolist()


@settings(max_examples=150)
@given(bijections(), st.sampled_from(DTYPES))
def test_a_rule_is_the_bijection_that_it_spells(drawn: tuple[Side, Side, dict[str, int]], dtype: torch.dtype) -> None:
    source, target, sizes = drawn
    order = list(sizes)
    canonical = filled(tuple(sizes.values()), dtype)
    sources, targets = (dict(side.cut(canonical, order, sizes)) for side in (source, target))
    made = port(
        f'[tensors]\n"{source.term(sizes)}" = "{target.term(sizes)}"\n{given_sizes(sizes)}',
        {name: tuple(tensor.shape) for name, tensor in sources.items()},
        {name: tuple(tensor.shape) for name, tensor in targets.items()},
    )
    found = made.forward(sources)
    same(bits(found), bits(targets))
    same(bits(made.backward(found)), bits(sources))
    assert set(counted(made, sources)) == {1}
    for step in made.steps:
        for copy in step.copies:
            assert copy.inverse.inverse == copy
            assert copy.inverse.numel == copy.numel


@settings(max_examples=100)
@given(bijections())
def test_einops_agrees(drawn: tuple[Side, Side, dict[str, int]]) -> None:
    source, target, sizes = drawn
    canonical = torch.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    sources = dict(source.cut(canonical, list(sizes), sizes))
    shapes = {name: target.shape(sizes) for name, _ in target.cut(canonical, list(sizes), sizes)}
    made = port(
        f'[tensors]\n"{source.term(sizes)}" = "{target.term(sizes)}"\n{given_sizes(sizes)}',
        {name: tuple(tensor.shape) for name, tensor in sources.items()},
        shapes,
    )
    found = made.forward(sources)
    left, right = (
        " ".join(f"({' '.join(group)})" for group in (side.named, *side.groups)) for side in (source, target)
    )
    stacked = rearrange(torch.stack(list(sources.values())), f"{left} -> {right}", **sizes)
    expected = dict(zip(shapes, stacked, strict=True))
    same(found, expected)


@dataclass(frozen=True)
class Joined:
    """Several tensors on one side, one concatenation of them inside an axis on the other."""

    parts: tuple[Side, ...]
    whole: Side
    segments: tuple[tuple[str, ...], ...]
    gap: int | None
    sizes: dict[str, int]

    def segment(self, number: int) -> str:
        return " ".join(self.segments[number]) or "1"

    def concatenation(self) -> str:
        texts = [self.segment(number) for number in range(len(self.segments))]
        if self.gap is not None:
            texts.insert(self.gap, "_3")
        return f"({'|'.join(texts)})"


@st.composite
def joined(draw: st.DrawFn) -> Joined:
    """Common indices, and for each part some of its own: the concatenation is called Z on the whole's side."""
    common = LETTERS[: draw(st.integers(1, 3))]
    sizes = {one: draw(st.integers(1, 3)) for one in common}
    named = [one for one in common if draw(st.booleans())][:1]
    segments: list[tuple[str, ...]] = []
    parts: list[Side] = []
    for number in range(draw(st.integers(2, 3))):
        own = tuple(f"{letter}{number}" for letter in "mn"[: draw(st.integers(0, 2))])
        sizes |= {one: draw(st.integers(1, 3)) for one in own}
        segments.append(own)
        axes = draw(st.permutations([*(one for one in common if one not in named), *own]))
        parts.append(Side(tuple(named), frozenset(), draw(grouped(axes)), f"x{number}x"))
    order = draw(st.permutations([*(one for one in common if one not in named), "Z"]))
    gap = draw(st.one_of(st.none(), st.integers(0, len(segments))))
    return Joined(tuple(parts), Side(tuple(named), frozenset(), draw(grouped(order)), "y"), tuple(segments), gap, sizes)


@st.composite
def grouped(draw: st.DrawFn, axes: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    groups: list[tuple[str, ...]] = []
    left = list(axes)
    while left:
        size = draw(st.integers(1, len(left)))
        groups.append(tuple(left[:size]))
        left = left[size:]
    return tuple(groups)


@settings(max_examples=150)
@given(joined(), st.booleans(), st.sampled_from((torch.float32, torch.int64, torch.float16)))
def test_concatenations_join_and_split(rule: Joined, split: bool, dtype: torch.dtype) -> None:
    common = [size for size in rule.sizes if len(size) == 1]
    extents = [math.prod(rule.sizes[one] for one in segment) for segment in rule.segments]
    pieces: list[Tensor] = []
    parts: dict[str, Tensor] = {}
    for side, segment, extent in zip(rule.parts, rule.segments, extents, strict=True):
        order = [*common, *segment]
        canonical = filled(tuple(rule.sizes[one] for one in order), dtype)
        parts |= dict(side.cut(canonical, order, rule.sizes))
        pieces.append(canonical.reshape(*(rule.sizes[one] for one in common), extent))
    sizes = dict(rule.sizes)
    if rule.gap is not None:
        pieces.insert(rule.gap, torch.full((*(sizes[one] for one in common), 3), 9).to(dtype))
    joined_up = torch.cat(pieces, dim=-1)
    sizes["Z"] = joined_up.shape[-1]
    whole = dict(rule.whole.cut(joined_up, [*common, "Z"], sizes))

    terms = ", ".join(f'"{side.term(sizes)}"' for side in rule.parts)
    one = f'"{rule.whole.term(sizes, {"Z": rule.concatenation()})}"'
    left, right = (one, f"[{terms}]") if split else (f"[{terms}]", one)
    table = f"[[rule]]\nsource = {left}\ntarget = {right}\nfill = 9\n{given_sizes(rule.sizes)}"
    sources, targets = (whole, parts) if split else (parts, whole)
    made = port(
        table,
        {name: tuple(tensor.shape) for name, tensor in sources.items()},
        {name: tuple(tensor.shape) for name, tensor in targets.items()},
    )
    found = made.forward(sources)
    same(bits(found), bits(targets))
    same(bits(made.backward(found)), bits(sources))
    if split:
        same(bits(made.backward(found, base=sources)), bits(sources))
    elif rule.gap is None:
        assert set(counted(made, sources)) == {1}


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_a_fold_is_its_sum_and_its_declared_inverse(t: int, e: int, rows: int, transposed: bool) -> None:
    axes, shape = ("[e 0]", (e, rows)) if transposed else ("[0 e]", (rows, e))
    table = f'[[rule]]\nsource = ["p [t e]", "q {axes}"]\ntarget = "r [t e]"\nfold = true\n'
    made = port(table, {"p": (t, e), "q": shape}, {"r": (t, e)})
    tensors = {"p": torch.randn(t, e), "q": torch.randn(shape)}
    row = tensors["q"][:, 0] if transposed else tensors["q"][0]
    found = made.forward(tensors)
    same(found, {"r": (tensors["p"].double() + row.double()).float()})
    back = made.backward(found)
    same(back, {"p": found["r"], "q": torch.zeros(shape)})
    same(made.forward(back), found)


@settings(max_examples=60)
@given(st.integers(-6, 6), st.integers(1, 5), st.sampled_from((torch.float32, torch.float64, torch.bfloat16)))
def test_scaling_by_a_power_of_two_is_undone_bit_by_bit(power: int, size: int, dtype: torch.dtype) -> None:
    table = f'[[rule]]\nsource = "p [a b]"\ntarget = "r [b a]"\nscale = "2 ** {power}"\n'
    made = port(table.replace("** -", "** -"), {"p": (size, 3)}, {"r": (3, size)})
    tensors = {"p": torch.randn(size, 3).to(dtype)}
    found = made.forward(tensors)
    same(found, {"r": (tensors["p"].double() * 2.0**power).to(dtype).T})
    same(made.backward(found), tensors)


@settings(max_examples=60)
@given(st.floats(1e-3, 1e3), st.integers(1, 50))
def test_the_inverse_of_a_scale_divides(scale: float, size: int) -> None:
    made = port(f'[[rule]]\nsource = "p"\ntarget = "r"\nscale = {scale!r}\n', {"p": (size,)}, {"r": (size,)})
    tensor = torch.randn(size)
    same(made.forward({"p": tensor}), {"r": (tensor.double() * scale).float()})
    same(made.backward({"r": tensor}), {"p": (tensor.double() / scale).float()})
    same(made.backward({"r": tensor.double()}), {"p": tensor.double() / scale})


def test_the_inverse_of_a_copy_swaps_its_two_sides() -> None:
    copy = Copy("a", "b", (2, 3), 5, (1, 4), 7, (3, 1))
    assert copy.inverse == Copy("b", "a", (3, 2), 7, (1, 3), 5, (4, 1))
    assert copy.inverse.inverse == copy
