"""Layers that repeat: what one layer was filled with, written for the layers behind it.

Most models are a few layers many times.  What fills one is likely to fill the next, so it is put there before it is
asked for: a search that then finds it right everywhere needs one run of the module for all layers together.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

from porting.suggesting.search.layouts import CandidateRule, RuleTerm

_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
"""A number that is a part of a name by itself."""


@dataclass(frozen=True)
class Layer:
    """One of several layers in a row.

    Attributes:
        container: what its tensors' names begin with, up to its number: ``"encoder.layer."``; empty for a bare number.
        number: its own.
    """

    container: str
    number: int

    @property
    def name(self) -> str:
        """The beginning of the names of its tensors.

        >>> Layer("encoder.layer.", 3).name
        'encoder.layer.3'
        """
        return f"{self.container}{self.number}"

    def holds(self, tensor: str) -> bool:
        """Whether a tensor is in it, or is all of it.

        >>> [Layer("up.", 1).holds(name) for name in ("up.1", "up.1.bias", "up.11")]
        [True, True, False]
        """
        return tensor == self.name or tensor.startswith(f"{self.name}.")

    @property
    def depth(self) -> int:
        """How many layers it is in: a block of a stage is in one."""
        return len(_NUMBER.findall(self.container))

    def shifted(self, by: int) -> Layer:
        """The layer so many places behind it."""
        return replace(self, number=self.number + by)


def layers_of(name: str) -> list[Layer]:
    """The layers that a tensor is in by its name, the innermost first.

    >>> layers_of("stages.1.blocks.3.norm.weight")
    [Layer(container='stages.1.blocks.', number=3), Layer(container='stages.', number=1)]
    """
    found = [Layer(name[: one.start()], int(one.group())) for one in _NUMBER.finditer(name)]
    return [one for one in reversed(found) if one.holds(name)]


def repeated(
    known: Sequence[CandidateRule], layer: Layer, theirs: Collection[str], ours: Collection[str]
) -> Iterator[CandidateRule]:
    """The rules that fill a layer, for each layer behind it, as far as both models have one there.

    Args:
        known: rules; those that write into other layers as well are left out.
        theirs, ours: the names of the tensors that may be read, and of those that may be written.
    """
    rules = [one for one in known if all(map(layer.holds, one.writes))]
    within = Counter(mate for one in rules for mate in _common(one.reads))
    for by in count(1):
        if not any(map(layer.shifted(by).holds, ours)):
            return
        for rule in rules:
            mates = sorted(_common(rule.reads), key=lambda one: (-within[one], abs(one.depth - layer.depth)))
            moved = (_moved(rule, mate.depth, layer.depth, by) for mate in mates)
            yield from [one for one in moved if {*one.reads} <= {*theirs} and {*one.writes} <= {*ours}][:1]


def crossed(known: Sequence[CandidateRule], guess: CandidateRule) -> bool:
    """Whether a rule pairs a layer with another one than the rules that are known do.

    >>> from porting.suggesting.search.layouts import single_rule
    >>> known = [single_rule("h.0.a", "layers.0.a"), single_rule("h.1.a", "layers.1.a")]
    >>> [crossed(known, single_rule(f"h.{number}.b", "layers.0.b")) for number in (0, 1)]
    [False, True]
    """
    for name in guess.writes:
        layer = _outermost(name)
        if layer is None:
            continue
        mates = {_outermost(one) for rule in known if any(map(layer.holds, rule.writes)) for one in rule.reads}
        containers = {one.container for one in mates if one is not None}
        read = [one for one in map(_outermost, guess.reads) if one is not None and one.container in containers]
        if any(one not in mates for one in read):
            return True
    return False


def in_every_layer(
    known: Sequence[CandidateRule], theirs: Collection[str], ours: Collection[str]
) -> Iterator[CandidateRule]:
    """The rules of one layer, for the other layers that both models have; of one number on both sides.

    Args:
        theirs, ours: the names of both models' tensors.
    """
    written = {name for rule in known for name in rule.writes}
    numbers = sorted({one.number for name in ours for one in layers_of(name)[-1:]})
    for rule in known:
        own = {layer.number if (layer := _outermost(name)) else -1 for name in (*rule.reads, *rule.writes)}
        for number in numbers if len(own) == 1 and own != {-1} else ():
            other = _moved(rule, 0, 0, number - min(own))
            if written.isdisjoint(other.writes) and {*other.reads} <= {*theirs} and {*other.writes} <= {*ours}:
                written |= {*other.writes}
                yield other


def _outermost(name: str) -> Layer | None:
    return next(reversed(layers_of(name)), None)


def _common(names: Sequence[str]) -> list[Layer]:
    """The layers that all of these are in."""
    return [one for one in layers_of(names[0]) if all(map(one.holds, names))]


def _moved(rule: CandidateRule, read: int, written: int, by: int) -> CandidateRule:
    """A rule for the layers so many places behind its own.

    Args:
        read, written: which number of the names that are read, and of those that are written, counts the layers.
    """
    sources, targets = (
        [_renamed(one, place, by) for one in terms] for terms, place in ((rule.sources, read), (rule.targets, written))
    )
    return replace(rule, sources=tuple(sources), targets=tuple(targets))


def _renamed(term: RuleTerm, place: int, by: int) -> RuleTerm:
    def moved(name: str) -> str:
        found = next(islice(_NUMBER.finditer(name), place, None), None)
        return name if found is None else f"{name[: found.start()]}{int(found.group()) + by}{name[found.end() :]}"

    return replace(term, pattern=moved(term.pattern), names=tuple(map(moved, term.names)))
