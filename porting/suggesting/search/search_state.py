"""The state of a search: what it has filled so far, and how more is filled or noted."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from porting.notation.reading import EQUALS
from porting.ops import Content
from porting.suggesting.search.activation_matching import (
    alike,
    apart,
    normed,
    same_activation,
    shared,
    skips,
    whole,
    with_heads_in_turn,
)
from porting.suggesting.search.attention_layouts import Heads, gain_axes, orders
from porting.suggesting.search.feature_permutation import FeatureOrder, based
from porting.suggesting.search.layer_repeats import Layer, layers_of, repeated
from porting.suggesting.search.layouts import (
    CandidateRule,
    RuleTerm,
    distance,
    element_axes,
    single_rule,
    single_term,
    transformed,
    with_copy,
)
from porting.suggesting.search.matrix_candidates import is_ignored_by_softmax
from porting.suggesting.search.name_similarity import similarity
from porting.suggesting.search.search_result import SAME, DifferingPlace, SearchResult, Tell
from porting.suggesting.subjects.guarded_run import Deadline
from porting.suggesting.subjects.operation_trace import TABLES, OperationTrace, Unit, WeightUse
from porting.suggesting.subjects.traced_model import ForcedActivations, TracedModel
from porting.suggesting.subjects.twin import is_frequencies

ALIKE = 0.5
"""Names of weights that never run have at least so much in common."""

COMPUTED, UNRUN = "it is computed, and has these values", "it never runs: by its name"


def remaining(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], running: frozenset[str], behind: frozenset[str]
) -> Iterator[tuple[CandidateRule, Tensor]]:
    """Moves for what no place has shown, each with what is written.

    Args:
        ours, theirs: the tensors of either side that nothing fills, and that nothing reads.
        running, behind: the names of all that meet an activation, of ours and of theirs.
    """
    constants = [name for name, one in theirs.items() if is_frequencies(one)]
    for name, one in ours.items():
        alike = ((other, theirs[other].double()) for other in constants if theirs[other].shape == one.shape)
        same = next((other for other, value in alike if torch.allclose(value, one.double(), rtol=1e-6, atol=0.0)), "")
        if same and not isinstance(one, nn.Parameter):
            constants.remove(same)
            yield single_rule(same, name, why=COMPUTED), theirs[same]
    idle = [name for name, one in ours.items() if name not in running and isinstance(one, nn.Parameter)]
    # A scale of logits runs in a reference that returns them, and stands beside what a module returns without them.
    still = [name for name in theirs if name not in behind or name in idle]

    def squeezed(one: Tensor) -> list[int]:
        return [size for size in one.shape if size != 1]

    for name in idle:
        one = ours[name]
        fitting = [other for other in still if squeezed(theirs[other]) == squeezed(one)]
        alone = sum(squeezed(ours[other]) == squeezed(one) for other in idle) == 1
        near = _nearest(name, fitting, alone=alone and len(fitting) == 1)
        if not near:
            continue
        still.remove(near)
        rule = single_rule(near, name, why=UNRUN)
        if theirs[near].shape != one.shape:
            rule = single_rule(near, name, element_axes(theirs[near].shape), element_axes(one.shape), why=UNRUN)
        if theirs[near].shape == one.shape or len(squeezed(one)) == 1:
            yield rule, theirs[near].reshape(one.shape)


def _nearest(name: str, others: Sequence[str], *, alone: bool) -> str:
    """The name, of those with the same end, that has most in common with a given one; empty where that is little.

    Args:
        alone: there is one of its size on either side, so that a word in common is enough: mask_emb, masked_spec_embed.
    """
    ends = [one for one in others if one.rpartition(".")[2] == name.rpartition(".")[2]]
    best = max(ends, key=lambda one: similarity(one, name), default="")
    if best and similarity(best, name) >= ALIKE:
        return best
    words = [set(re.split(r"[._]", one)) for one in (name, *others[:1])]
    common = [a for a in words[0] for b in words[-1] if len(a) > LETTERS and len(b) > LETTERS and (a in b or b in a)]
    return others[0] if alone and common else ""


LETTERS = 3
"""Words of more letters say something."""


class SearchState:
    """The two models, and what is known of them.

    Args:
        sizes: index -> size, as [sizes] will say.
        heads: how attention is cut up; None where nobody knows.
        config: the twin's config.
        scales: constants that embeddings may have to be multiplied by.
        most: the bound on trials.
        until: the bound on time.
        tell: told about progress.
        asleep: the module's tensors that change nothing and have no source.
        stored: what the checkpoint's file holds, also what the reference keeps otherwise, as experts in one tensor.
        copies: tensors of the checkpoint that are written out again -> the reference's tensor that each equals.
    """

    def __init__(
        self,
        port: TracedModel,
        reference: TracedModel,
        *,
        sizes: Mapping[str, int],
        heads: Heads | None,
        config: Mapping[str, object],
        scales: Sequence[str],
        most: int,
        until: Deadline,
        tell: Tell,
        asleep: frozenset[str] = frozenset(),
        copies: Mapping[str, str] | None = None,
        stored: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.port, self.reference = port, reference
        self._sizes, self._config, self._scales = dict(sizes), config, scales
        self._heads = heads
        self._grouped = heads is not None and heads.groups != heads.count
        rotary = any("rope" in name or "rotary" in name for name in config)
        self._orders = orders(heads) if heads is not None and rotary else ()
        self._fits_alone = False  # whether the way that was tried last makes its own output the reference's
        self._attended: tuple[Sequence[Unit], Sequence[Unit]] | None = None
        self._projected: tuple[Sequence[Unit], Sequence[Unit]] | None = None
        self._most, self._until = most, until
        self._tell = tell
        self.found = SearchResult()
        self._filled: set[str] = set(asleep)
        self._asleep = asleep
        self._later = frozenset[str]()  # matrices that wait for all others, since they reach nothing that is returned
        self._copies = dict(copies or {})
        self._stored = dict(stored or {})
        self._used: set[str] = set()
        self._seen_seconds: set[str] = set()  # tables that were seen to give what another's values give
        self._forced = ForcedActivations()
        self._angled = ForcedActivations()  # of these, what is not a difference of the module's but its rounding
        self._habits: dict[tuple[str, ...], float] = {}  # ways that were chosen, and how far they left the activation
        self._repeats = Counter[tuple[str, ...]]()  # in how many layers each was chosen
        self._without_offset = math.inf  # how far a norm was from its mate that no offset of its gain mended
        self._never_neutral = Counter[tuple[str, ...]]()  # in how many layers no content made these tensors do nothing
        self._begun: set[Layer] = set()
        self._tried_experts: set[Layer | None] = set()  # layers whose experts were filled, or fit in no way
        self._expected: dict[str, Tensor] = {}  # what stood in the tensors of layers that were filled ahead

    def _is_open(self, unit: Unit) -> bool:
        waits = bool(unit.weights) and self._later.issuperset(unit.weights)
        return not waits and bool(set(unit.names) & self.port.loadable - self._filled)

    def _free(self, unit: Unit) -> bool:
        """Whether a unit of the reference is nobody's yet, or only its weight is somebody's: a decoder that is tied."""
        if not set(unit.weights or unit.biases) & self._used or set(unit.biases) - self._used:
            return True
        return any(self._copy(name) for name in unit.weights)

    def _copy(self, name: str) -> str:
        """A tensor of the checkpoint that equals one of the reference's and that no move reads; empty for none."""
        return next((one for one, other in self._copies.items() if other == name and one not in self._used), "")

    def _reread(self, move: CandidateRule) -> CandidateRule:
        """The move with what the checkpoint has a second time in the place of what is read already."""
        return replace(move, sources=tuple(self._other(piece) for piece in move.sources))

    def _other(self, piece: RuleTerm) -> RuleTerm:
        if len(piece.names) > 1 or piece.names[0] not in self._used:
            return piece
        copy = self._copy(piece.names[0])
        return single_term(copy, piece.axes) if copy and piece == single_term(piece.names[0], piece.axes) else piece

    def _values(
        self, moves: Sequence[CandidateRule], theirs: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor] | None:
        found: dict[str, Tensor] = {}
        for move in moves:
            held = theirs or {**self._stored, **self.reference.leaves}
            some = transformed(move, held, self.port.leaves, self._sizes, self._config)
            if some is None:
                return None
            found.update(some)
        return found

    def _put(self, values: Mapping[str, Tensor]) -> None:
        """Give tensors their values; where they have these already, the latest run stands."""
        with torch.no_grad():
            for name, value in values.items():
                leaf = self.port.leaves[name].detach()
                if not torch.equal(leaf, value.reshape(leaf.shape) if value.numel() == leaf.numel() else value):
                    leaf.copy_(value)

    def _replace(self, moves: Sequence[CandidateRule], values: Mapping[str, Tensor]) -> None:
        """Take other moves into tensors that have some already."""
        written = {name for move in moves for name in move.writes}
        places = [number for number, one in enumerate(self.found.moves) if not written.isdisjoint(one.writes)]
        kept = [one for one in self.found.moves if written.isdisjoint(one.writes)]
        self.found.moves = [*kept[: places[0]], *moves, *kept[places[0] :]]
        self._put(values)

    def _ordered(self, gain: CandidateRule, order: FeatureOrder) -> CandidateRule | None:
        """The move of a norm's gain, or its shift, with the features in an order; None where it has no such axis."""
        sides = self.reference.shapes[gain.reads[0]], self.port.shapes[gain.writes[0]]
        cut = self._heads if order.width else None
        axes = ["e" if cut is None else gain_axes(shape, cut) for shape in sides]
        return based(gain.along(*axes), order, "e", ("", ""))

    def _accept(
        self, moves: Sequence[CandidateRule], values: Mapping[str, Tensor], group: Sequence[Unit], mates: Sequence[Unit]
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
        new = [move for move in moves if not set(move.writes) & again]
        written = {name for move in new for name in move.writes}  # what stood there before is overwritten
        self.found.moves = [one for one in self.found.moves if written.isdisjoint(one.writes)] + new
        self._filled |= set(values)
        self._used |= {name for move in moves for name in move.reads}
        for one in group if mates else ():
            self.found.mates[one.number] = mates[0]

    def _apart(self, unit: Unit, mate: Unit, bound: float = math.inf) -> float:
        """The distance of two units' operands, whatever their layouts; exact up to the bound."""
        if unit.operand is None or mate.operand is None:
            return float("inf")
        if unit.kind is WeightUse.NORM:
            return apart(normed(unit), normed(mate), bound)
        return apart(unit.operand, mate.operand, bound)

    def _least(self, unit: Unit, mates: Iterable[Unit]) -> tuple[float, Unit | None]:
        """The distance of the nearest of some units, and the unit; infinity and None without units."""
        far, nearest = math.inf, None
        for mate in mates:
            now = self._apart(unit, mate, far)
            if nearest is None or now < far:
                far, nearest = now, mate
        return far, nearest

    def _give_up(self, unit: Unit, mate: Unit | None) -> None:
        self._note("extra" if mate is None else "shape", unit, mate)
        self._filled |= set(unit.names)
        self._used |= set(() if mate is None else mate.names)

    def _force(self, unit: Unit, mate: Unit) -> None:
        """Give the unit the reference's operand from now on."""
        if unit.operand is None or mate.operand is None or not any(shared(unit.operand, mate.operand)):
            return
        if unit.given is not None and mate.given is not None and unit.given.numel() == mate.given.numel():
            # All that comes behind is given it as well, such as the sum that a branch is added to.
            self._forced.outputs[unit.given_at] = alike(mate.given, unit.given, self.found.basis, *self._orders)
        if unit.kind is WeightUse.NORM and unit.centred != mate.centred:
            return  # one is seen before the mean is taken off, the other behind
        given = alike(mate.operand, unit.operand, self.found.basis, *self._orders)
        counts = () if self._heads is None else (self._heads.count, self._heads.width)
        self._forced.operands[unit.number] = with_heads_in_turn(given, unit.operand, counts)
        for other in self.found.trace.units:
            if other is not unit and same_activation(other, unit) and other.kind is unit.kind:
                self._forced.operands[other.number] = self._forced.operands[unit.number]

    def _uneven(self, unit: Unit, mate: Unit) -> None:
        """Note a bias that the module lacks; one that the reference lacks adds nothing when it is zero."""
        if mate.biases and not unit.biases:
            if is_ignored_by_softmax(self.reference, mate.biases, mate.weights):
                self.found.ignored_biases += mate.biases
                self._used |= set(mate.biases)
                return
            self._note("bias", unit, mate)
            self._used |= set(mate.biases)
            self._silence([mate])
        elif unit.biases and not mate.biases and set(unit.biases) - self._filled:
            self._make(dict.fromkeys(unit.biases, "zeros"))

    def _make(self, words: Mapping[str, str]) -> None:
        """Fill tensors of the module that the reference has nothing for with what makes them do nothing."""
        known = {name: word for name, word in words.items() if name not in self._filled}
        self._put(self._made_values(known))
        self.found.made.update({name: word for name, word in known.items() if name in self.port.loadable})
        self._filled |= set(known)

    def _neutral(self, unit: Unit, names: Sequence[str]) -> tuple[str, ...]:
        """The contents with which a unit may do nothing; empty where it always does something."""
        shapes = [self.port.shapes[name] for name in names]
        if unit.kind is WeightUse.LINEAR:
            square = [one for one in shapes if len(one) > 1]
            return ("eye",) if len(square) == 1 and len(set(square[0])) == 1 and len(square[0]) == 2 else ()
        if unit.kind in TABLES:
            return ("zeros",)
        return ("ones", "zeros") if all(math.prod(one) == max(one, default=1) for one in shapes) else ()

    def _made_values(self, words: Mapping[str, str]) -> dict[str, Tensor]:
        known = {name: (Content.parse(word) or Content(), self.port.leaves[name]) for name, word in words.items()}
        return {name: content.whole(leaf.shape, leaf.dtype) for name, (content, leaf) in known.items()}

    def _silence(self, mates: Sequence[Unit]) -> None:
        """Go on as if the reference had no biases there, since the module has none."""
        weights = {name for one in self.found.reference.units for name in one.weights}
        biases = [self.reference.leaves[name] for one in mates for name in one.biases if name not in weights]
        if not any(bool(one.any()) for one in biases):
            return
        for one in biases:
            one.detach().zero_()
        again = self.reference.run()
        now = dict(_by_use(again.units))
        for use, old in _by_use(self.found.reference.units):
            if use in now:  # another expert may be chosen without the bias of a router
                old.operand, old.output = now[use].operand, now[use].output
        self.found.reference.outputs, self.found.reference.modules = again.outputs, again.modules

    def _is_second(self, unit: Unit, theirs: Sequence[Unit]) -> bool:
        """Whether all that is due is somebody's already: a head that is tied, a norm that two branches share."""
        if unit.kind is WeightUse.NORM:
            return self._is_second_norm(unit, theirs)
        if unit.kind is not WeightUse.LINEAR or len(unit.weights) != 1 or unit.weights[0] in self._filled:
            return False
        name = unit.weights[0]
        for mate in sorted(theirs, key=lambda one: not whole(one, unit)):  # a head may be given the last position alone
            used = mate.kind is unit.kind and mate.weights and set(mate.weights) <= self._used
            if used and self._apart(unit, mate, SAME) <= SAME:
                first = next((one for one in self.found.moves if set(one.reads) & set(mate.weights)), None)
                if first is None:
                    continue
                copied = self._share(name, first.writes[0])
                if copied:
                    self.found.seconds[name] = first.writes[0]
                elif not (copied := self._copied_in_other_axes(name, first)) and self._same_sizes(name, mate):
                    self._note("extra", unit, None)
                    self.found.seconds[name] = first.writes[0]
                    copied = True
                if copied:
                    self._filled |= set(unit.names)
                    return True
        return False

    def _same_sizes(self, name: str, mate: Unit) -> bool:
        return sorted(self.port.shapes[name]) == sorted(self.reference.shapes[mate.weights[0]])

    def _is_second_norm(self, unit: Unit, theirs: Sequence[Unit]) -> bool:
        """Whether the reference norms an activation once, for two branches, and the module for each by itself.

        So it has fewer norms; else this one is another of the reference's and given something else than that.
        """
        ours = [one for one in self.found.trace.units if self._is_open(one) and one.kind is unit.kind]
        free = [one for one in theirs if self._free(one) and one.kind is unit.kind]
        if set(unit.names) & self._filled or not set(unit.names) <= self.port.loadable or len(ours) <= len(free):
            return False
        written = {
            move.reads[0]: move.writes[0] for move in self.found.moves if len(move.reads) == len(move.writes) == 1
        }
        for mate in theirs:
            kinds = (len(unit.weights), len(unit.biases)) == (len(mate.weights), len(mate.biases))
            eps = {one.eps for one in (unit, mate)} - {None}
            if mate.kind is not unit.kind or not kinds or len(eps) > 1 or self._apart(unit, mate, SAME) > SAME:
                continue
            firsts = [written.get(name) for name in mate.names]
            if all(self._share(name, one) for name, one in zip(unit.names, firsts, strict=True) if one) and all(firsts):
                self.found.seconds |= dict(zip(unit.names, filter(None, firsts), strict=True))
                self._filled |= set(unit.names)
                return True
        return False

    def _share(self, name: str, other: str) -> bool:
        """Give a tensor the values of another one, where both are of one shape: a line of [make] can say so."""
        if self.port.shapes[name] != self.port.shapes[other] or name not in self.port.loadable:
            return False
        self._put({name: self.port.leaves[other].detach().clone()})
        return True

    def _copied_in_other_axes(self, name: str, first: CandidateRule) -> bool:
        """Give a tensor what a rule reads, in the axes of its own shape: the rule has a second target then."""
        if len(first.reads) != 1 or name not in self.port.loadable:
            return False
        rule = with_copy(first, name, self.reference.shapes[first.reads[0]], self.port.shapes[name])
        values = None if rule is None else self._values([rule])
        if rule is None or values is None:
            return False
        self._replace([rule], values)
        return True

    def _copies_of_others(self, seconds: dict[str, str]) -> None:
        """Fill the tensors that need the values of another one, and note those for which [make] can say it."""
        self.found.seconds = seconds
        same = {name: other for name, other in seconds.items() if self._share(name, other)}
        self.found.made |= {name: f"{EQUALS}{other}" for name, other in same.items()}
        self._filled |= set(same)

    def _is_tied(self, unit: Unit, theirs: Sequence[Unit]) -> bool:
        """Whether it is a head that is tied in the reference, and given something else: what differs is noted.

        In the module the head is a matrix that is filled elsewhere, of which a bias is left, or one of its own.
        """
        return self._is_tied_with_bias(unit, theirs) or self._is_own_copy(unit, theirs)

    def _is_own_copy(self, unit: Unit, theirs: Sequence[Unit]) -> bool:
        """Whether it is the last matrix, and so is the reference's, which is somebody's already and of this shape."""
        linear = [one for one in self.found.trace.units if one.kind is WeightUse.LINEAR]
        last = [one for one in theirs if one.kind is WeightUse.LINEAR]
        if unit.kind is not WeightUse.LINEAR or unit is not linear[-1] or not last or self._free(mate := last[-1]):
            return False
        first = next((one for one in self.found.moves if set(one.reads) & set(mate.weights)), None)
        if first is None or len(unit.weights) != 1 or unit.weights[0] in self._filled or len(first.writes) != 1:
            return False
        if self._share(unit.weights[0], first.writes[0]):
            self.found.seconds[unit.weights[0]] = first.writes[0]
        elif not self._copied_in_other_axes(unit.weights[0], first):
            return False
        self._filled |= set(unit.names)
        self._differs(unit, mate, theirs)
        return True

    def _differs(self, unit: Unit, mate: Unit, theirs: Sequence[Unit]) -> None:
        """Note what differs in front of two that are mates, and that one has a bias; the unit is given the mate's."""
        far = self._apart(unit, mate)
        if self._skipped(unit, theirs, far) is None and far > SAME:
            self._note("activation", unit, mate, far)
        self._force(unit, mate)
        self._uneven(unit, mate)

    def _is_tied_with_bias(self, unit: Unit, theirs: Sequence[Unit]) -> bool:
        """Whether only a bias is left of it: a head on a matrix that is filled elsewhere, as in the reference."""
        reads = {name for move in self.found.moves if set(move.writes) & set(unit.weights) for name in move.reads}
        tied = unit.kind is WeightUse.LINEAR and set(unit.weights) <= self._filled
        mate = next((one for one in theirs if tied and one.kind is unit.kind and set(one.weights) & reads), None)
        if mate is None or mate.biases:
            return False
        self._differs(unit, mate, theirs)
        return True

    def _skipped(self, unit: Unit, theirs: Sequence[Unit], far: float) -> Unit | None:
        """The norm that the module leaves out in front of a unit, if it does; it is noted."""
        norm = next((one for one in theirs if self._free(one) and skips(unit, one)), None)
        if norm is not None:
            self._note("missing", unit, norm, far)
            self._used |= set(norm.names)
        return norm

    def _is_own(self, unit: Unit) -> bool:
        """Whether torch's norm is given what the reference computes as well, or is given itself."""
        return unit.eps is not None and self._is_computed(unit)  # by hand: a scale, or a norm only seen at its end

    def _is_computed(self, unit: Unit) -> bool:
        """Whether the reference computes what a unit is given."""
        values = [*self.found.reference.values, *(one.operand for one in self.found.reference.units)]
        return any(
            one is not None and unit.operand is not None and distance(unit.operand, one, SAME) <= SAME for one in values
        )

    def _layers_that_never_run(self) -> None:
        """Fill layers that neither model runs like the layer before: Llava does not run the last one of CLIP."""
        running = {name for one in self.found.trace.units for name in one.names}
        behind = {name for one in self.found.reference.units for name in one.names}
        idle = self.port.loadable - self._filled - running
        over = {layer for name in self.found.reference.idle for layer in layers_of(name)[:1]}
        unread = {*self.reference.leaves} - self._used
        free = {name for name in unread if name not in behind or any(one.holds(name) for one in over)}
        for layer in dict.fromkeys(one for name in sorted(idle) for one in layers_of(name) if one.number):
            for rule in repeated(self.found.moves, layer.shifted(-1), free - self._used, idle - self._filled):
                if (values := self._values([rule])) is not None:
                    self._accept([replace(rule, why=UNRUN)], values, [], [])

    def _remaining(self) -> None:
        """Fill what no place has shown, where both sides plainly have the same."""
        self._layers_that_never_run()
        known = {*self.port.leaves} - self.port.loadable | self._filled
        ours = {name: one for name, one in self.port.leaves.items() if name not in known}
        theirs = {name: one for name, one in self.reference.leaves.items() if name not in self._used}
        traces = (self.found.trace, self.found.reference)
        running, behind = (
            frozenset(name for one in trace.units if trace.idle.isdisjoint(one.weights) for name in one.names)
            for trace in traces
        )
        for move, value in remaining(ours, theirs, running, behind):
            self._accept([move], {move.writes[0]: value.detach().clone()}, [], [])

    def _untold(self, trace: OperationTrace) -> None:
        """Note biases of the reference's behind matrices that were filled in another place: a tied decoder's."""
        for mate in self.found.reference.units:
            if set(mate.weights) & self._used and set(mate.biases) - self._used and mate.kind is WeightUse.LINEAR:
                unit = next((one for one in trace.units if one.kind is mate.kind and same_activation(one, mate)), None)
                if unit is not None and not unit.biases:
                    self._note("bias", unit, mate)
                    self._used |= set(mate.biases)
        self._used_again(trace)

    def _used_again(self, trace: OperationTrace) -> None:
        """Note weights that are used at a second place, where the reference has others: layers that are one."""
        seen: set[str] = set()
        for unit in trace.units:
            again = unit.weights and {*unit.weights} <= seen and unit.kind in {WeightUse.LINEAR, WeightUse.NORM}
            seen |= {*unit.weights}
            reads = {name for move in self.found.moves if {*move.writes} & {*unit.weights} for name in move.reads}
            alike = (
                [one for one in self.found.reference.units if one.kind is unit.kind and one.weights] if again else []
            )
            due = [one for one in alike if whole(one, unit) and self._apart(unit, one, SAME) <= SAME]
            if reads and due and not any(reads & {*one.names} for one in due):
                self._note("shared", unit, due[0])

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
        ours = unit.names[0]
        self.found.divergences.append(
            DifferingPlace(
                what=what,
                port=ours,
                reference=theirs,
                size=size,
                before=before,
                cause=cause,
                near=near,
                at=unit.number,
            )
        )


def _by_use(units: Sequence[Unit]) -> Iterator[tuple[tuple[tuple[str, ...], int], Unit]]:
    """The units of a run by their weights, and by how many times these were used before."""
    used: Counter[tuple[str, ...]] = Counter()
    for one in units:
        yield (one.names, used[one.names]), one
        used[one.names] += 1
