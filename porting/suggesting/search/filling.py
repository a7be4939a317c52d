"""What a search works on and has filled so far, and how something more is filled or noted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from porting.suggesting.search.arrangements import Heads
from porting.suggesting.search.blind import is_blind
from porting.suggesting.search.finding import SAME, Divergence, Found, Tell
from porting.suggesting.search.layouts import Move, Piece, carry, distance
from porting.suggesting.search.places import alike, apart, normed, shared, together, whole
from porting.suggesting.search.remaining import remaining
from porting.suggesting.subjects.side import Forced, Side
from porting.suggesting.subjects.tracing import Kind, Trace, Unit


class Filling:
    """The two models, and what is known of them.

    Args:
        port, reference: the two models.
        sizes: index -> size, as [sizes] will say.
        heads: how attention is cut up; None where nobody knows.
        config: the twin's config.
        scales: constants that embeddings may have to be multiplied by.
        most: the bound on trials.
        seconds: the bound on time.
        tell: told about progress.
        asleep: the module's tensors that change nothing and have no source.
        copies: tensors of the checkpoint that are written out again -> the reference's tensor that each equals.
    """

    def __init__(
        self,
        port: Side,
        reference: Side,
        *,
        sizes: Mapping[str, int],
        heads: Heads | None,
        config: Mapping[str, object],
        scales: Sequence[str],
        most: int,
        seconds: float,
        tell: Tell,
        asleep: frozenset[str] = frozenset(),
        copies: Mapping[str, str] | None = None,
    ) -> None:
        self.port, self.reference = port, reference
        self._sizes, self._config, self._scales = dict(sizes), config, scales
        self._heads = heads
        self._grouped = heads is not None and heads.groups != heads.count
        self._rotary = any("rope" in name or "rotary" in name for name in config)
        self._most, self._until = most, time.monotonic() + seconds
        self._tell = tell
        self.found = Found()
        self._filled: set[str] = set(asleep)
        self._asleep = asleep
        self._copies = dict(copies or {})
        self._used: set[str] = set()
        self._forced = Forced()
        self._habits: list[tuple[str, ...]] = []

    def _is_open(self, unit: Unit) -> bool:
        return bool(set(unit.names) & self.port.loadable - self._filled)

    def _free(self, unit: Unit) -> bool:
        """Whether a unit of the reference is nobody's yet, or only its weight is somebody's: a decoder that is tied."""
        if not set(unit.weights or unit.biases) & self._used or set(unit.biases) - self._used:
            return True
        return any(self._copy(name) for name in unit.weights)

    def _copy(self, name: str) -> str:
        """A tensor of the checkpoint that equals one of the reference's and that no move reads; empty for none."""
        return next((one for one, other in self._copies.items() if other == name and one not in self._used), "")

    def _reread(self, move: Move) -> Move:
        """The move with what the checkpoint has a second time in the place of what is read already."""
        return replace(move, sources=tuple(self._other(piece) for piece in move.sources))

    def _other(self, piece: Piece) -> Piece:
        if len(piece.names) > 1 or piece.names[0] not in self._used:
            return piece
        copy = self._copy(piece.names[0])
        return replace(piece, names=(copy,), pattern=copy) if copy and piece.pattern == piece.names[0] else piece

    def _values(self, moves: Sequence[Move]) -> dict[str, Tensor] | None:
        found: dict[str, Tensor] = {}
        for move in moves:
            some = carry(move, self.reference.leaves, self.port.leaves, self._sizes, self._config)
            if some is None:
                return None
            found.update(some)
        return found

    def _put(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self.port.leaves[name].data.copy_(value)

    def _accept(
        self, moves: Sequence[Move], values: Mapping[str, Tensor], group: Sequence[Unit], mates: Sequence[Unit]
    ) -> None:
        filled = {id(self.port.leaves[name]) for name in self._filled if name in self.port.leaves}
        tied = {name for move in moves for name in move.writes if id(self.port.leaves[name]) in filled}
        moves = [move if tied & set(move.writes) else self._reread(move) for move in moves]
        twice = [move for move in moves if set(move.reads) & self._used]  # a tensor is read once
        again = {name for move in twice for name in move.writes}
        for move in twice:
            first = next((one for one in self.found.moves if set(one.reads) & set(move.reads)), None)
            if first is not None and not tied & set(move.writes):
                self.found.seconds.update(dict.fromkeys(move.writes, first.writes[0]))
        self._put({name: value for name, value in values.items() if name not in again})
        self.found.moves += [move for move in moves if not set(move.writes) & again]
        self._filled |= set(values)
        self._used |= {name for move in moves for name in move.reads}
        for one in group if mates else ():
            self.found.mates[one.number] = mates[0]

    def _apart(self, unit: Unit, mate: Unit) -> float:
        """How far two units' operands are from each other, whatever their layouts."""
        if unit.operand is None or mate.operand is None:
            return float("inf")
        if unit.kind is Kind.NORM:
            return apart(normed(unit), normed(mate))
        return apart(unit.operand, mate.operand)

    def _give_up(self, unit: Unit, mate: Unit | None) -> None:
        self._note("extra" if mate is None else "shape", unit, mate)
        self._filled |= set(unit.names)
        self._used |= set(() if mate is None else mate.names)

    def _force(self, unit: Unit, mate: Unit) -> None:
        """From now on the unit is given the reference's operand."""
        if unit.operand is None or mate.operand is None or not any(shared(unit.operand, mate.operand)):
            return
        if unit.kind is Kind.NORM and unit.centred != mate.centred:
            return  # one is seen before the mean is taken off, the other behind
        self._forced.operands[unit.number] = alike(mate.operand, unit.operand, self.found.basis)
        for other in self.found.trace.units:
            if other is not unit and together(other, unit) and other.kind is unit.kind:
                self._forced.operands[other.number] = self._forced.operands[unit.number]

    def _uneven(self, unit: Unit, mate: Unit) -> None:
        """Note a bias that one side has and the other has not."""
        if mate.biases and not unit.biases:
            if is_blind(self.reference, mate.biases, mate.weights):
                self.found.blind += mate.biases
                self._used |= set(mate.biases)
                return
            self._note("bias", unit, mate)
            self._used |= set(mate.biases)
            self._silence([mate])
        elif unit.biases and not mate.biases and set(unit.biases) - self._filled:
            if is_blind(self.port, unit.biases, unit.weights):
                self.found.idle += unit.biases
                self._filled |= set(unit.biases)
                return
            self._note("surplus", unit, mate)
            self._filled |= set(unit.biases)
            self._put({name: torch.zeros_like(self.port.leaves[name]) for name in unit.biases})

    def _silence(self, mates: Sequence[Unit]) -> None:
        """Go on as if the reference had no biases there, since the module has none."""
        weights = {name for one in self.found.reference.units for name in one.weights}
        biases = [self.reference.leaves[name] for one in mates for name in one.biases if name not in weights]
        if not any(bool(one.any()) for one in biases):
            return
        for one in biases:
            one.data.zero_()
        again = self.reference.run()
        for old, new in zip(self.found.reference.units, again.units, strict=True):
            old.operand, old.output = new.operand, new.output
        self.found.reference.outputs, self.found.reference.modules = again.outputs, again.modules

    def _is_second(self, unit: Unit, theirs: Sequence[Unit]) -> bool:
        """Whether all that is due is a weight that is somebody's already: a head that the reference ties."""
        if unit.kind is not Kind.LINEAR or len(unit.weights) != 1 or unit.weights[0] in self._filled:
            return False
        shapes, others = self.port.shapes, self.reference.shapes
        for mate in theirs:
            used = mate.kind is unit.kind and mate.weights and set(mate.weights) <= self._used
            if used and whole(mate, unit) and self._apart(unit, mate) <= SAME:
                first = next((one for one in self.found.moves if set(one.reads) & set(mate.weights)), None)
                if first is not None and sorted(shapes[unit.weights[0]]) == sorted(others[mate.weights[0]]):
                    self.found.seconds[unit.weights[0]] = first.writes[0]
                    self._filled |= set(unit.names)
                    self._note("extra", unit, None)
                    return True
        return False

    def _is_own(self, unit: Unit) -> bool:
        """Whether torch's norm is given what the reference computes as well, or is given itself."""
        if unit.eps is None:  # by hand: a scale, or a norm that is only seen at its end
            return False
        values = [*self.found.reference.values, *(one.operand for one in self.found.reference.units)]
        return any(
            one is not None and unit.operand is not None and distance(unit.operand, one) <= SAME for one in values
        )

    def _remaining(self) -> None:
        """Fill what no place has shown, where both sides plainly have the same."""
        known = {*self.port.leaves} - self.port.loadable | self._filled
        ours = {name: one for name, one in self.port.leaves.items() if name not in known}
        theirs = {name: one for name, one in self.reference.leaves.items() if name not in self._used}
        units = [*self.found.trace.units, *self.found.reference.units]
        for move, value in remaining(ours, theirs, frozenset(name for one in units for name in one.names)):
            self._accept([move], {move.writes[0]: value.detach().clone()}, [], [])

    def _untold(self, trace: Trace) -> None:
        """Note biases of the reference's behind matrices that were filled in another place: a tied decoder's."""
        for mate in self.found.reference.units:
            if set(mate.weights) & self._used and set(mate.biases) - self._used and mate.kind is Kind.LINEAR:
                unit = next((one for one in trace.units if one.kind is mate.kind and together(one, mate)), None)
                if unit is not None and not unit.biases:
                    self._note("bias", unit, mate)
                    self._used |= set(mate.biases)

    def _note(
        self,
        what: str,
        unit: Unit,
        mate: Unit | None,
        size: float = float("nan"),
        cause: str = "",
        near: tuple[tuple[str, float], ...] = (),
    ) -> None:
        before = tuple(name for move in self.found.moves[-4:] for name in move.writes)
        theirs = "" if mate is None else (mate.biases if what == "bias" else mate.names)[0]
        ours = (unit.biases if what == "surplus" else unit.names)[0]
        self.found.divergences.append(
            Divergence(what=what, port=ours, reference=theirs, size=size, before=before, cause=cause, near=near)
        )
