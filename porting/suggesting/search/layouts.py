"""How the elements of some tensors may lie in others: candidates in the notation, the plainest first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from porting.notation.expression import Expression
from porting.notation.faults import NotationError
from porting.notation.name import spelled
from porting.notation.rule import Rule, Term, make_rule
from porting.plan.align import align
from porting.plan.move import forward
from porting.suggesting.subjects.operation_trace import Unit

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


@dataclass(frozen=True)
class RuleTerm:
    """One term of a rule, and the tensors that it stands for.

    Attributes:
        pattern: the name, with ``{p:...}`` and ``{h}`` where it stands for several; numbers of layers as they are.
        axes: ``"(h d) e"``; empty to take the tensor as it is.
    """

    pattern: str
    names: tuple[str, ...]
    axes: str = ""

    @property
    def term(self) -> str:
        """The term as a table writes it."""
        return f"{self.pattern} [{self.axes}]" if self.axes else self.pattern


@dataclass(frozen=True)
class CandidateRule:
    """A rule for the tensors of one place.

    Attributes:
        copies: each target is given the whole source.
        fold, fill, scale, offset: as in a table.
        proven: it was chosen among several by what it computes.
    """

    sources: tuple[RuleTerm, ...]
    targets: tuple[RuleTerm, ...]
    copies: bool = False
    fold: bool = False
    fill: float | None = None
    scale: str = ""
    offset: str = ""
    why: str = ""
    proven: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        """The checkpoint's tensors."""
        return tuple(name for one in self.sources for name in one.names)

    @property
    def writes(self) -> tuple[str, ...]:
        """The module's tensors."""
        return tuple(name for one in self.targets for name in one.names)

    @property
    def constants(self) -> dict[str, str]:
        """The factor and the addend of its elements, as a table writes them."""
        return {key: text for key, text in (("scale", self.scale), ("offset", self.offset)) if text}

    def __str__(self) -> str:
        return " = ".join(" + ".join(one.term for one in side) for side in (self.sources, self.targets))

    def along(self, left: str, right: str) -> CandidateRule:
        """The same of one tensor into one, with these axes."""
        source, target = replace(self.sources[0], axes=left), replace(self.targets[0], axes=right)
        return replace(self, sources=(source,), targets=(target,))

    @property
    def rules(self) -> list[Rule]:
        """The rule in the table's notation: one for each target that is given the whole source."""
        return [
            make_rule(
                [Term.parse(one.term, rows=self.fold) for one in self.sources],
                [Term.parse(one.term) for one in targets],
                fold=self.fold,
                fill=self.fill,
                constants={key: Expression.parse(text) for key, text in self.constants.items()},
            )
            for targets in (((one,) for one in self.targets) if self.copies else (self.targets,))
        ]


Ways = Iterator[tuple[CandidateRule, ...]]
"""Candidates for one place: the rules of its tensors."""


def single_rule(source: str, target: str, left: str = "", right: str = "", **more: Any) -> CandidateRule:
    """A rule of one tensor into one, each with its axes; ``more`` are the rule's other attributes."""
    return CandidateRule((single_term(source, left),), (single_term(target, right),), **more)


def single_term(name: str, axes: str = "") -> RuleTerm:
    """The term of one tensor."""
    return RuleTerm(spelled(name), (name,), axes)


def with_copy(rule: CandidateRule, name: str, source: Shape, shape: Shape) -> CandidateRule | None:
    """The rule of one tensor with a second target, which is given the same in the layout of its own shape.

    Args:
        source, shape: the shapes of what is read, and of the second target.

    Returns:
        The rule; None where the sizes do not say which axis is which, or the rule does more than to rearrange axes.

    >>> first = single_rule("wte.weight", "embed.weight")
    >>> print(with_copy(first, "head.weight", (9, 4), (4, 9, 1)))
    wte.weight [t e] = embed.weight [t e] + head.weight [e t 1]
    """
    sizes = [size for size in source if size != 1]
    alone = len(rule.reads) == 1 and (rule.copies or len(rule.writes) == 1)
    plain = alone and not (rule.fold or rule.fill is not None or rule.constants)
    if not plain or len(set(sizes)) < len(sizes) or sorted(sizes) != sorted(size for size in shape if size != 1):
        return None
    axes = rule.sources[0].axes.split()
    if not axes:
        letters = iter("teabcd")
        axes = ["1" if size == 1 else next(letters) for size in source]
        rule = replace(rule, targets=tuple(replace(one, axes=" ".join(axes)) for one in rule.targets))
    if len(axes) != len(source) or not all(one.isalpha() or one == "1" for one in axes):
        return None
    letter = dict(zip(source, axes, strict=True))
    copy = single_term(name, " ".join("1" if size == 1 else letter[size] for size in shape))
    sources = (replace(rule.sources[0], axes=" ".join(axes)),)
    return replace(rule, sources=sources, targets=(*rule.targets, copy), copies=True)


def element_axes(shape: Shape) -> str:
    """The axes of a tensor of one axis, with those of one element that it has besides."""
    return " ".join("1" if size == 1 else "e" for size in shape)


@dataclass(frozen=True)
class Matrix:
    """A matrix with its bias, on either side, or several that are one for each head.

    Attributes:
        weights, biases: names of its tensors, one for each head where there are several.
        out: how many features come out, of all heads together.
        summed: how many go in.
        into_first: whether the axis that is summed over is the first of two; None when that did not show.
        parts: the tensors of a bias that is made of several.
    """

    weights: tuple[str, ...]
    biases: tuple[str, ...]
    shape: Shape
    bias_shape: Shape | None
    out: int
    summed: int
    into_first: bool | None
    parts: tuple[str, ...] = ()

    def term(self, out: str, *, into_first: bool) -> RuleTerm:
        """The term in a rule, with these axes for the output; unchanged where there are none."""
        return single_term(self.weights[0], out and (f"e {out}" if into_first else f"{out} e"))


def matrix(units: Sequence[Unit], shapes: Shapes) -> Matrix:
    """A unit, or those of the heads of one projection."""
    first = units[0]
    shape = shapes[first.weights[0]]
    total = math.prod(shape)
    summed = first.summed if first.summed and total % first.summed == 0 else total // shape[0]
    return Matrix(
        weights=tuple(one.weights[0] for one in units),
        biases=tuple(one.biases[0] for one in units if one.biases),
        shape=shape,
        bias_shape=shapes[first.biases[0]] if first.biases else None,
        out=len(units) * total // (summed or 1),
        summed=summed,
        into_first=first.into_first,
        parts=first.biases if len(units) == 1 and len(first.biases) > 1 else (),
    )


def transformed(
    move: CandidateRule,
    sources: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    config: Mapping[str, object],
) -> dict[str, Tensor] | None:
    """The module's tensors after the move; None when it does not fit them."""
    theirs = {name: tuple(sources[name].shape) for name in move.reads}
    found: dict[str, Tensor] = {}
    try:
        rules = move.rules
        writes = [(name,) for name in move.writes] if move.copies else [move.writes]
        for rule, names in zip(rules, writes, strict=True):
            ours = {name: tuple(targets[name].shape) for name in names}
            alignment = align([rule], theirs, ours, sizes=sizes)
            if alignment.faults or alignment.unplaced or alignment.unsourced or alignment.unread:
                return None
            arithmetic = rule.arithmetic(config)
            for step in alignment.steps:
                found |= dict(forward(step, targets, sources.__getitem__, arithmetic))
    except NotationError:  # it cannot be written down, or a factor has no value: n / (n - 1) for a norm of one number
        return None
    return found if set(found) == set(move.writes) else None


def factorings(atoms: Mapping[str, int], shape: Shape) -> Iterator[tuple[tuple[str, ...], ...]]:
    """The ways of writing a shape's axes as products of these indices, each used once, in the order given first.

    >>> list(factorings({"o": 6, "e": 4}, (4, 6)))
    [(('e',), ('o',))]
    """
    if not shape:
        if not atoms:
            yield ()
        return
    first, *rest = shape
    if first == 1:
        for later in factorings(atoms, tuple(rest)):
            yield ((), *later)
    for count in range(1, len(atoms) + 1):
        for chosen in permutations(atoms, count):
            if math.prod(atoms[one] for one in chosen) != first:
                continue
            left = {name: size for name, size in atoms.items() if name not in chosen}
            for later in factorings(left, tuple(rest)):
                yield (chosen, *later)


def written(axes: Sequence[Sequence[str]]) -> str:
    """Axes as the notation writes them."""
    return " ".join("1" if not one else one[0] if len(one) == 1 else f"({' '.join(one)})" for one in axes)


def order(axes: Sequence[Sequence[str]], kept: set[str]) -> tuple[str, ...]:
    """The order in which some indices stand among the axes."""
    return tuple(name for axis in axes for name in axis if name in kept)


def first_columns(value: Tensor, like: Tensor) -> Tensor:
    """A value without the columns that it has behind those of another: words that are nobody's, mostly."""
    more = value.ndim > 1 and like.ndim > 1 and value.shape[-1] > like.shape[-1]
    return value[..., : like.shape[-1]] if more else value


def distance(one: Tensor, other: Tensor, bound: float = math.inf) -> float:
    """The distance of two activations whatever their layouts, relative to the larger's scale.

    Both are sorted: equal numbers in another order are no distance.

    Args:
        bound: more than this need not be known exactly.  Large activations take long to sort, and most are told apart
            by their means, their least and their largest numbers.
    """
    if one.numel() != other.numel():
        return float("inf")
    if not one.numel():
        return 0.0
    left, right = _numbers(one), _numbers(other)
    scale = max(left.scale, right.scale) or 1.0
    least = max(abs(a - b) for a, b in zip(left.summary, right.summary, strict=True)) / scale
    if least > bound:
        return least
    far = float((left.in_order() - right.in_order()).abs_().max()) / scale
    return far if far == far else float("inf")  # noqa: PLR0124  # a NaN is not equal to itself


class _Numbers:
    """A tensor's numbers, whatever their order.

    Attributes:
        summary: their mean, the least and the largest: none of them differs by more than some number does.
        scale: the largest size of one.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._values = tensor.detach().double().flatten()
        self._ordered: Tensor | None = None
        self.summary = tuple(float(one) for one in (self._values.mean(), *torch.aminmax(self._values)))
        self.scale = max(abs(one) for one in self.summary)

    def in_order(self) -> Tensor:
        """The numbers, ascending."""
        if self._ordered is None:
            self._ordered = self._values.sort().values
            self._values = self._ordered
        return self._ordered


def _numbers(tensor: Tensor) -> _Numbers:
    """A tensor's numbers, kept as long as the tensor is.

    One activation is compared with those of all layers, for each way in which weights may lie.
    """
    known = _NUMBERS.get(tensor)
    version = 0 if tensor.is_inference() else tensor._version
    if known is None or known[0] != version:
        known = _NUMBERS[tensor] = version, _Numbers(tensor)
    return known[1]


_NUMBERS: MutableMapping[Tensor, tuple[int, _Numbers]] = WeakTensorKeyDictionary()
