"""How much a verification could see: the weights that reach a probe, and the branches that no input took."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from porting.loading import same_bits
from porting.printable import text_of
from porting.reporting.outcome import Shown, Unseen
from porting.target import named_tensors, signature_parameters
from porting.tracing.code_coverage import Branch, Executed, never_ran_in, not_watched
from porting.tracing.conditions import Conditions
from porting.tracing.measure import MEANING
from porting.tracing.running import Side
from porting.tracing.torch_modes import GradientOfEveryRow
from porting.trials.inputs import REST, Case

MASKS = {"attention_mask": "attention", "decoder_attention_mask": "decoder's attention"}
TYPES, WORDS = "token_type_ids", "input_ids"


NEVER_GIVEN = "never given"

MATRIX = 2
"""Axes of a weight that has rows."""

WORTH = 0.05
"""A further batch is worth comparing where it reaches this share of the elements that no batch has reached."""


class Observer:
    """Gathers, over several passes, which elements of the weights have a gradient to some probe.

    Args:
        module: the port in float64; its floating-point parameters and persistent buffers get ``requires_grad``.
        seed: of the linear function that is differentiated.

    Attributes:
        failed: why an activation could not be differentiated; empty when all could.
    """

    def __init__(self, module: nn.Module, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._reached: dict[str, Tensor] = {}
        self._hoped: dict[str, Tensor] = {}  # what a batch of the search reached that nothing was compared on yet
        self._weights: dict[str, Tensor] = {}
        self.failed = ""
        known: set[int] = set()
        for name, tensor in named_tensors(module):
            if tensor.is_floating_point() and id(tensor) not in known:
                known.add(id(tensor))
                self._weights[name] = tensor.requires_grad_(True)

    def see(self, value: Tensor, scale: float) -> None:
        """Add an activation that was computed with gradients on.

        A random linear function of it is taken, since the plain sum is blind: the sum of a normalised vector, or of a
        softmax, is constant.  The function is a product of one random vector for each axis: that is as good as
        independent numbers, for a gradient that vanishes for every such product vanishes altogether.  An element
        counts when a change of it by 1 moves the activation by more of its scale than the bound of meaning: less is
        rounding, such as what is left of the key bias behind the softmax.
        """
        if not value.requires_grad or not self._weights:
            return
        cotangent = torch.full((), 1 / scale, dtype=value.dtype)
        for axis, extent in enumerate(value.shape):
            shape = [extent if place == axis else 1 for place in range(value.ndim)]
            cotangent = cotangent * torch.randn(extent, dtype=value.dtype, generator=self._generator).view(shape)
        weights = list(self._weights.values())
        given = cotangent.expand_as(value)
        try:
            with GradientOfEveryRow():  # the padding word's has none else, and what is computed there is compared too
                found = torch.autograd.grad(value, weights, given, retain_graph=True, allow_unused=True)
        except RuntimeError as error:  # what was changed in place cannot be differentiated, and may still be right
            self.failed = self.failed or text_of(error).strip().partition("\n")[0].partition(". Hint:")[0]
            return
        for name, gradient in zip(self._weights, found, strict=True):
            if gradient is not None:
                reached = gradient.abs_() > MEANING
                self._reached[name] = self._reached[name] | reached if name in self._reached else reached

    def fails(self, why: str) -> None:
        """Note that the port cannot be run with gradients on."""
        self.failed = self.failed or why

    @property
    def unseen(self) -> tuple[Unseen, ...]:
        """The weights that could not be seen."""
        why = f"the port cannot be differentiated: {self.failed}"
        return (Unseen("which weights reach a probe", why),) if self.failed else ()

    def hopes(self) -> bool:
        """Whether more of some weight may be reached: words beyond what is affordable are no hope."""
        return any(bool(mask.any()) for mask in self._missing().values())

    def gain(self, total: Tensor) -> bool:
        """Whether the gradient of a function reaches so much that neither :meth:`see` nor this had reached before.

        Comparing a batch costs many passes: it has to reach a weight of which nothing was reached, or the share
        :data:`WORTH` of all elements that are missing.  That is a hope, on which a batch is kept: they count as reached
        once the batch was compared.
        """
        missing = self._missing()
        weights = [self._weights[name] for name in missing]
        if not weights or not total.requires_grad:
            return False
        try:
            with GradientOfEveryRow():
                found: tuple[Tensor | None, ...] = torch.autograd.grad(total, weights, allow_unused=True)
        except RuntimeError:  # as in see()
            return False
        gradients = {name: one for name, one in zip(missing, found, strict=True) if one is not None}
        gained = {name: (one.abs_() > MEANING) & missing[name] for name, one in gradients.items()}
        counts = {name: int(one.sum()) for name, one in gained.items()}
        first = any(bool(missing[name].all()) for name, count in counts.items() if count > 0)
        if not first and sum(counts.values()) < max(1, WORTH * sum(int(one.sum()) for one in missing.values())):
            return False
        for name, reached in gained.items():
            self._hoped[name] = self._hoped[name] | reached if name in self._hoped else reached
        return True

    def _missing(self) -> dict[str, Tensor]:
        """The elements of each incompletely reached weight that more rows may reach."""
        found = {}
        for name, weight in self._weights.items():
            mask = torch.ones(weight.shape, dtype=torch.bool)
            for known in (self._reached, self._hoped):
                mask = mask & ~known[name] if name in known else mask
            if weight.ndim != MATRIX or int(mask.all(1).sum()) <= REST:
                found[name] = mask
        return found

    def rest(self) -> None:
        """Differentiate from now on only by weights that are not completely reached."""
        for name in [name for name, reached in self._reached.items() if bool(reached.all())]:
            self._weights.pop(name, torch.empty(0)).requires_grad_(False)

    def rows(self) -> dict[str, tuple[int, ...]]:
        """The rows of which no probe saw anything, of each weight that was reached in part, if they are few."""
        found = {}
        for name, reached in self._reached.items():
            unseen = (~reached.any(1)).nonzero()[:, 0].tolist() if reached.ndim == MATRIX else []
            if 0 < len(unseen) <= min(MOST_ROWS, len(reached) - 1):
                found[name] = tuple(unseen)
        return found

    def shares(self) -> dict[str, float]:
        """The share of the elements of each weight that a probe saw."""
        counts = {name: int(torch.count_nonzero(reached)) for name, reached in self._reached.items()}
        return {name: count / self._reached[name].numel() for name, count in counts.items() if count}


MOST_ROWS = 64
"""The most rows that are listed one by one: mostly those of tokens that did not occur."""


def shown(
    module: nn.Module,
    shares: Mapping[str, float],
    rows: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, Tensor],
) -> Shown:
    """Sort the parameters and persistent buffers by how they were shown.

    Args:
        module: the port as it was given.
        shares: parameter -> share of its elements that a probe saw.
        rows: parameter -> its rows of which no probe saw anything.
        expected: what the checkpoint holds for each, through the table.
    """
    copies, nothing, differing, seen = [], [], [], set()
    for name, tensor in named_tensors(module):
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        same = name in expected and same_bits(tensor.cpu(), expected[name])
        if name in expected and not same:
            differing.append(name)
        elif same and name not in shares:
            copies.append(name)
        elif name not in shares:
            nothing.append(name)
    parts = [name for name, share in shares.items() if share < 1 and name not in expected]
    return Shown(
        activation=dict(shares),
        copy=tuple(copies),
        nothing=tuple(nothing),
        differing=tuple(differing),
        parts=tuple(parts),
        rows=dict(rows),
    )


WINDOW = re.compile(r"window|local_attention")


def _edges(config: Mapping[str, object], longest: int) -> Iterator[Unseen]:
    """The windows of attention, by the config's fields, that no row is longer than."""
    for field, size in config.items():
        switched_off = config.get(f"use_{field}") is False
        whole = isinstance(size, int) and not isinstance(size, bool) and size >= longest
        if WINDOW.search(field) and whole and not switched_off:
            yield Unseen("the window's edge", f"{field} = {size}, and rows of at most {longest} tokens")


def unseen(
    cases: Sequence[Case], config: Mapping[str, object], withheld: Sequence[str] = (), *, whole: bool = False
) -> list[Unseen]:
    """List what these inputs could not show.

    Args:
        cases: the inputs.
        config: its fields under their usual names.
        withheld: arguments that neither side is given, since [inputs] does not name them.
        whole: the reference fails on longer rows, though its config names more positions.
    """
    given: dict[str, set[float]] = {}
    for case in cases:
        for name, value in case.inputs.items():
            extremes = (value.min(), value.max()) if value.numel() else ()
            given.setdefault(name, set()).update(float(one) for one in extremes)
    same = {name: values.pop() for name, values in given.items() if len(values) == 1}
    found = [
        Unseen(f"the argument {name}", "[inputs] does not name it: neither side was given it") for name in withheld
    ]
    for name, what in MASKS.items():
        if name in withheld:
            continue
        if name in same or (name not in given and what == "attention" and WORDS in given):
            found.append(Unseen(f"the {what} mask", "no row is padded" if name in same else "none is given"))
    kinds = config.get("type_vocab_size") not in (None, 0, 1)
    if kinds and TYPES not in withheld and (TYPES in same or TYPES not in given):
        found.append(Unseen("the token types", "one segment only"))
    others = [name for name in same if name not in (TYPES, *MASKS)]
    found += [Unseen(f"what {name} does", f"it is {same[name]:g} everywhere") for name in others]
    lengths = [int(case.inputs[WORDS].shape[-1]) for case in cases if WORDS in case.inputs]
    found += _edges(config, max(lengths, default=0))
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and lengths and max(lengths) < positions and not whole:
        beyond = (
            f"positions {max(lengths)} to {positions - 1}"
            if max(lengths) < positions - 1
            else f"position {max(lengths)}"
        )
        found.append(Unseen(beyond, f"rows of at most {max(lengths)} tokens"))
    return found


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The parts of a port's forward without an effect on the result.

    Attributes:
        branches: code of the port that never ran, and conditions on tensors that had one outcome only.
        unseen: what else was not shown.
    """

    branches: tuple[Branch, ...] = ()
    unseen: tuple[Unseen, ...] = ()


def reached(
    port: Side,
    executed: Executed | None,
    conditions: Conditions | None,
    ran: Collection[str],
    tried: Collection[str] = (),
) -> Reach:
    """The extent to which the float64 passes ran the port's code.

    Args:
        executed: which of its instructions ran; None before any pass.
        conditions: how the conditions on tensors turned out.
        tried: the arguments that trials gave.
    """
    if executed is None:
        return Reach()
    names = not_watched(executed, port.module, ran)
    met = conditions.branches() if conditions is not None else ()
    hidden = [Unseen(f"which branches of {', '.join(names)} run", "compiled, or without its source")]
    return Reach(
        branches=(*never_ran_in(executed, port.module), *met),
        unseen=(*(hidden if names else ()), *never_given(port.module, [*port.arguments, tried])),
    )


def never_given(module: nn.Module, given: Sequence[Collection[str]]) -> Iterator[Unseen]:
    """The arguments of forward that were never given."""
    everything = {name.partition(".")[0] for arguments in given for name in arguments}
    missing = [
        one.name
        for place, one in enumerate(signature_parameters(module.forward).values())
        if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        and one.name not in everything
        and str(place) not in everything
    ]
    if len(missing) == 1:
        yield Unseen(f"the argument {missing[0]}", NEVER_GIVEN)
    elif missing:
        yield Unseen(f"the arguments {', '.join(missing[:-1])} and {missing[-1]}", NEVER_GIVEN)
