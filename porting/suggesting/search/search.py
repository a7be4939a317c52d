"""The search: place after place along the module's run, open weights are filled and compared with the reference.

All weights that come before a place are right already, so the activation there is the reference's own, and says which
of the reference's weights are due: those that meet the same activation.  What remains open, such as which of three is
the key, is tried out, and only as far as the next place, where a wrong choice shows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, islice, takewhile
from types import MappingProxyType

from torch import nn

from porting.suggesting.search import embedding_candidates, expert_candidates, matrix_candidates
from porting.suggesting.search.activation_matching import (
    apart,
    element_count,
    explained,
    extents,
    first_part,
    habit,
    is_other_norm,
    same_activation,
    same_places,
    vector,
    whole,
)
from porting.suggesting.search.attention_layouts import arrangements
from porting.suggesting.search.expert_candidates import Experts, expert_tensors, of_sizes
from porting.suggesting.search.feature_permutation import FeatureOrder, positions, replaced
from porting.suggesting.search.layer_repeats import crossed, in_every_layer, layers_of, repeated
from porting.suggesting.search.layouts import CandidateRule, Ways, matrix, single_rule
from porting.suggesting.search.name_similarity import namesakes, similarity
from porting.suggesting.search.norm_search import OFFSET
from porting.suggesting.search.search_result import CLOSE, GUESS, SAME, Choice, DifferingPlace, SearchResult
from porting.suggesting.search.way_search import WaySearch
from porting.suggesting.subjects.config_fields import Role, config_number
from porting.suggesting.subjects.operation_trace import TABLES, OperationTrace, Unit, WeightUse
from porting.tracing.angle_tables import angle_columns, replacements, with_columns

BY_NAME, ROUNDED = "its name", 1e-5
"""The reason for a tensor that goes by its name; and the tolerance for the outputs then, where a part is in float32."""


EXCHANGES = 24
"""How many ways of telling tensors of one shape apart are tried where names decide."""


class WeightSearch(WaySearch):
    """One search; see :class:`porting.suggesting.search.search_state.SearchState` for what it is given."""

    def search(self) -> SearchResult:
        """Fill what can be filled."""
        found = self.found
        found.reference = self.reference.run(keep=True)
        theirs = found.reference.units
        total = len(self.port.loadable)
        self._positions(self.port.run())
        while True:
            trace = found.trace = self.port.run(forced=self._forced)
            self._later = trace.idle
            unit = next((one for one in trace.units if self._is_open(one)), None)
            if unit is None and self._later:
                self._later = frozenset()
                unit = next((one for one in trace.units if self._is_open(one)), None)
            self._tell("matching", len(self._filled), total)
            if unit is None:
                break
            if found.trials >= self._most or self._until.past:
                found.exhausted = True
                break
            if self._expect(unit):
                continue
            known = len(self._filled), len(found.divergences)
            self._settle(unit, trace, theirs)
            if known == (len(self._filled), len(found.divergences)):
                self._give_up(unit, None)  # nothing came of it, and nothing else would the next time
        self._put({name: value for name, value in self._expected.items() if name not in self._filled})
        self._untold(found.trace)
        self._remaining()
        self._guess_as_in_other_layers()
        sure = [one for one in found.moves if one.why != GUESS]
        found.moves = [one for one in found.moves if one.why != GUESS or not crossed(sure, one)]
        self._copies_of_others(self._sure_seconds(found.trace))
        self._give_back_factor()
        found.outputs = [one for one in self.port.run(forced=self._angled).outputs if one.is_floating_point()]
        found.open = [name for name in self.port.loadable if name not in self._filled]
        found.lacking = [one for one in theirs if not set(one.names) & self._used]
        if found.lacking:
            for unit in found.trace.units:
                kept = [one for one in unit.names if one not in self.port.loadable]
                learned = any(isinstance(self.port.leaves[one], nn.Parameter) for one in kept)
                if kept and (learned or unit.kind is WeightUse.LINEAR):
                    self._note("unloadable", unit, None)
                    break
        return found

    def _expect(self, unit: Unit) -> bool:
        """Give a layer that begins, and those behind it, what the layer before was filled with; whether there was any.

        Nothing is settled by it: each place is looked at as ever, and where the values are right it needs no run.
        """
        name = next(one for one in unit.names if one in self.port.loadable - self._filled)
        begun = [one for one in layers_of(name) if one.number and one not in self._begun]
        self._begun |= {*begun}
        loadable = self.port.loadable - self._asleep
        changed = False
        for layer in begun:
            before = layer.shifted(-1)
            inside = [*filter(before.holds, loadable)]
            if not inside or not self._filled.issuperset(inside):
                continue
            free = {*self.reference.leaves} - self._used
            for rule in repeated(self.found.moves, before, free, loadable - self._filled):
                values = self._values([rule]) or {}
                changed |= bool(values)
                for one in values.keys() - self._expected.keys():
                    self._expected[one] = self.port.leaves[one].detach().clone()
                self._put(values)
        return changed

    def _guess_as_in_other_layers(self) -> None:
        """Make each guess as another layer, which is not a guess, pairs the tensors of these names.

        Behind a place that fits nothing, which of two ways comes nearer is chance.
        """
        moves = self.found.moves
        guesses = [one for one in moves if one.why == GUESS]
        names = {name for one in guesses for name in one.writes}
        free = {*self.reference.leaves} - {name for one in moves if one.why != GUESS for name in one.reads}
        implied = [*in_every_layer([one for one in moves if one.why != GUESS], free, names)]
        written = {name for one in implied for name in one.writes}
        kept = {name for one in guesses if written.isdisjoint(one.writes) for name in one.reads}
        partly = any(0 < len(written & {*one.writes}) < len(one.writes) for one in guesses)
        if not implied or partly or any(not kept.isdisjoint(one.reads) for one in implied):
            return
        values = self._values(implied)
        if values is not None:
            self._replace([explained(one, GUESS, proven=False) for one in implied], values)

    def guessed(
        self,
        known: Sequence[CandidateRule] = (),
        *,
        in_order: bool = False,
        seconds: Mapping[str, str] = MappingProxyType({}),
    ) -> SearchResult | None:
        """Fill each tensor with the one of its name, or of its place; None where the module returns something else.

        What a search cannot follow, such as a weight that is used twice in a layer, or the experts of a layer that the
        reference keeps in one tensor, may be called alike; and of many layers it takes long.

        Args:
            known: what a search is sure of: it is done as it says, and in every layer as in the one that it speaks of.
            in_order: what is of one shape and behind the same is due in the order in which the models run; names
                decide about the rest.
        """
        found = self.found
        found.reference = self.reference.run(keep=True)
        theirs = {**self._stored, **self.reference.leaves}
        open_ = {name: shape for name, shape in self.port.shapes.items() if name in self.port.loadable - self._asleep}
        moves = list(known)
        moves += in_every_layer(moves, frozenset(theirs), frozenset(open_))
        done = {name for one in moves for name in one.writes}
        read = {name for one in moves for name in one.reads}
        ours = {name: shape for name, shape in open_.items() if name not in done | seconds.keys()}
        free = {name: tuple(one.shape) for name, one in theirs.items() if name not in read}
        pairs = same_places(self.port.run(), found.reference, ours, free) if in_order else {}
        ours = {name: shape for name, shape in ours.items() if name not in pairs}
        moves += [single_rule(b, a, why="its place") for a, b in pairs.items()]
        free = {name: shape for name, shape in free.items() if name not in pairs.values()}
        returned = [one for one in found.reference.outputs if one.is_floating_point()]
        for named in islice(namesakes(ours, free), EXCHANGES):
            guess = [*moves, *(single_rule(b, a, why=BY_NAME) for a, b in named.items())]
            values = self._values(guess, theirs)
            if not values:
                return None
            self._put(values)
            found.trials, found.trace = found.trials + 1, self.port.run()
            found.outputs = [one for one in found.trace.outputs if one.is_floating_point()]
            far = min((apart(one, other) for one in found.outputs[:1] for other in returned), default=math.inf)
            if far <= ROUNDED or self._until.past:
                break
        if not (values and far <= ROUNDED):
            return None
        moves = guess
        if far > SAME:
            last, mate = found.trace.units[-1].names[0], found.reference.units[-1].names[0]
            found.divergences.append(DifferingPlace(what="activation", port=last, reference=mate, size=far))
        self._accept(moves, values, [], [])
        self._copies_of_others(dict(seconds))
        found.open = [name for name in self.port.loadable if name not in self._filled]
        found.lacking = [one for one in found.reference.units if not set(one.names) & self._used]
        return found

    def _sure_seconds(self, trace: OperationTrace) -> dict[str, str]:
        """The tensors that need another's values, without those that are behind a place that fits nothing.

        There what each tensor is, is a guess, and that two of them are one would be another; but for tables, which
        were seen to give the same.
        """
        order = {name: number for number, unit in reversed([*enumerate(trace.units)]) for name in unit.names}
        seconds = self.found.seconds
        doubtful = [one.port for one in self.found.divergences if one.ends and one.port not in seconds]
        first = min((order.get(name, 0) for name in doubtful), default=len(trace.units))  # several may use one tensor
        return {
            name: other
            for name, other in seconds.items()
            if name in self._seen_seconds or max(order.get(name, 0), order.get(other, 0)) < first
        }

    def _positions(self, trace: OperationTrace) -> None:
        """Leave tables of positions alone that both sides compute, and note the order of their columns.

        Where they are rounded otherwise, the module is given the reference's for the time of the search: what still
        differs then does not come from the rounding.
        """
        learned = frozenset(name for name, one in self.port.leaves.items() if isinstance(one, nn.Parameter))
        self._angles(trace, learned)
        known = positions(trace, self.found.reference, learned)
        if known is None:
            return
        self.found.basis = known.basis
        self._filled |= set(known.values)
        if known.basis.apart > SAME and known.values:
            done = [replaced(self.port.leaves[name], *both) for name, both in known.values.items()]
            self.found.rounded = max(self.found.rounded, known.basis.apart) if all(done) else 0.0

    def _angles(self, trace: OperationTrace, learned: frozenset[str]) -> None:
        """The same for cosines and sines that both sides compute, in forward or before."""
        columns = angle_columns(value for _, value in self.found.reference.angles)
        if columns is None:
            return
        self._angled.angles, self.found.rounded = replacements(trace.angles, columns)
        self._forced.angles |= self._angled.angles
        for name in self.port.leaves.keys() - learned:
            made = with_columns(self.port.leaves[name], columns)
            if made is not None and made[1] > SAME:
                self._put({name: made[0]})
                self.found.rounded = max(self.found.rounded, made[1])

    def _settle(self, unit: Unit, trace: OperationTrace, theirs: Sequence[Unit]) -> None:
        free = [one for one in theirs if self._free(one)]
        experts = self._experts(unit)
        if unit.kind in TABLES:
            if not (self._settle_operation(unit, trace, free) or self._settle_other_norm(unit, trace, free)):
                self._settle_tables(unit, trace, free)
            return
        if experts.writes.isdisjoint(unit.names) or not self._settle_experts(experts, trace, theirs):
            self._settle_weight(unit, trace, theirs, experts)

    def _settle_weight(self, unit: Unit, trace: OperationTrace, theirs: Sequence[Unit], experts: Experts) -> None:
        """Fill a matrix or a norm, with all that is given the same activation."""
        free = [one for one in theirs if self._free(one)]
        like = [one for one in free if one.kind is unit.kind and experts.reads.isdisjoint(one.names)]
        matches = [one for one in like if self._apart(unit, one, SAME) <= SAME]
        matches = [one for one in matches if whole(one, unit)] or matches
        matches = matches or [one for one in like if is_other_norm(unit, one)]
        if not matches and (self._is_second(unit, theirs) or self._is_tied(unit, theirs)):
            return
        again = None if matches else self._turned_heads(unit, trace) or self._scaled_behind(unit, trace, like)
        if again is not None:
            trace = self.found.trace = again
            unit = next(one for one in trace.units if one.number == unit.number)
            matches = [one for one in like if self._apart(unit, one, SAME) <= SAME]
        if not matches and (self._settle_number(unit, like) or self._settle_other_norm(unit, trace, free)):
            return
        if not matches:
            matches = self._diverged(unit, trace, like, theirs)
            if not matches:
                return
        if unit.kind is WeightUse.NORM:
            self._norm(unit, matches[0], trace)
            return
        alike = (one for one in trace.units if self._is_open(one) and experts.writes.isdisjoint(one.names))
        group = [one for one in alike if one.kind is unit.kind and same_activation(one, unit)]
        group = [
            one
            for number, one in enumerate(group)
            if not any(set(one.weights) & set(b.weights) for b in group[:number])
        ]
        if not group:  # it belongs to the experts of the layer
            return
        ours, others = first_part(group, trace.units), first_part(matches, theirs)
        if element_count(ours, self.port.shapes) == element_count(others, self.reference.shapes):
            group, matches = ours, others
        if set(unit.weights) <= self._filled:
            self._tied(unit, matches)
            return
        if len(group) == 1:
            matches = self._with_slices(unit, matches, trace, theirs)
        self._matrices(group, matches, trace)

    def _experts(self, unit: Unit) -> Experts:
        """The tensors of the experts in the layer of a unit and in the reference's layer that fills it; none in most.

        Those that were tried already are left out.
        """
        count = config_number(self._config, Role.EXPERTS)
        layer = next(reversed(layers_of(unit.names[0])), None) if count > 1 else None
        if layer is None or layer in self._tried_experts:
            return Experts()
        known = [rule for rule in self.found.moves if all(map(layer.holds, rule.writes))]
        mates = Counter(mate for rule in known for one in rule.reads for mate in layers_of(one)[-1:])
        if not mates:
            return Experts()
        mate = mates.most_common(1)[0][0]
        held = {**self._stored, **self.reference.leaves}
        theirs = {name: tuple(one.shape) for name, one in held.items() if mate.holds(name) and name not in self._used}
        open_ = self.port.loadable - self._filled
        ours = {name: shape for name, shape in self.port.shapes.items() if layer.holds(name) and name in open_}
        return Experts(layer, count, *of_sizes(expert_tensors(ours, count), expert_tensors(theirs, count), count))

    def _settle_experts(self, experts: Experts, trace: OperationTrace, theirs: Sequence[Unit]) -> bool:
        """Fill all experts of a layer at once, by what comes behind them; whether some way was found.

        What else runs in front of that, as a router or experts of every token, is filled first.
        """
        group = [one for one in trace.units if self._is_open(one) and not experts.writes.isdisjoint(one.names)]
        following = _first_behind(group, trace, self.port.loadable - self._asleep)
        last = len(trace.units) if following is None else trace.units.index(following)
        between = trace.units[trace.units.index(group[0]) : last]
        waiting = [one for one in between if self._is_open(one) and experts.writes.isdisjoint(one.names)]
        if waiting:
            self._settle(waiting[0], trace, theirs)
            return True
        self._tried_experts.add(experts.layer)
        ways = expert_candidates.candidates(experts.ours, experts.theirs, experts.count)
        return self._choose(group, (), ways, following, trace)

    def _with_slices(
        self, unit: Unit, matches: list[Unit], trace: OperationTrace, theirs: Sequence[Unit]
    ) -> list[Unit]:
        """The matches of a matrix, and those of its other slices where these are given something else.

        A decoder's fused projection makes queries of its own tokens, and keys and values of the encoder's.
        """
        slices = [one for one in trace.units if one.weights == unit.weights and not same_activation(one, unit)]
        found = list(matches)
        for one in slices:
            like = [mate for mate in theirs if self._free(mate) and mate.kind is one.kind and mate not in found]
            given = [mate for mate in like if self._apart(one, mate, SAME) <= SAME]
            found += first_part(given, theirs) if given else []
        sizes = (element_count([unit], self.port.shapes), element_count(found, self.reference.shapes))
        return found if sizes[0] == sizes[1] else matches

    def _settle_number(self, unit: Unit, like: Sequence[Unit]) -> bool:
        """Fill a single number that stands elsewhere in the reference: a factor of features is one of products too."""

        def single(shapes: Mapping[str, tuple[int, ...]], one: Unit) -> bool:
            return len(one.names) == 1 and math.prod(shapes.get(one.names[0], (0,))) == 1

        mates = [one for one in like if single(self.reference.shapes, one)]
        if unit.kind is not WeightUse.NORM or not mates or not single(self.port.shapes, unit):
            return False
        mate = max(mates, key=lambda one: similarity(one.names[0], unit.names[0]))
        plain = single_rule(mate.names[0], unit.names[0], why="its place")
        for move in (plain, vector(plain, self.port.shapes, self.reference.shapes)):
            values = self._values([move])
            if values is not None:
                self._accept([move], values, [unit], [mate])
                return True
        return False

    def _settle_operation(self, unit: Unit, trace: OperationTrace, free: Sequence[Unit]) -> bool:
        """Fill the tensors of one operation, as a batch norm, by an operation given the same; whether there is one.

        They come in the order of its arguments.  Branches that run side by side may run in any order.
        """
        ours = [one for one in trace.units if one.number == unit.number]
        if unit.kind is not WeightUse.OTHER or unit.operand is None or not all(map(self._is_open, ours)):
            return False
        theirs: dict[int, list[Unit]] = {}
        for one in free:
            if one.kind is WeightUse.OTHER and one.operand is not None and self._apart(unit, one, SAME) <= SAME:
                theirs.setdefault(one.number, []).append(one)
        for mates in theirs.values():
            pairs = [*zip(ours, mates, strict=False)] if len(ours) == len(mates) else []
            moves = [single_rule(mate.names[0], one.names[0], why="its place") for one, mate in pairs]
            values = self._values(moves) if moves else None
            if values is not None:
                self._accept(moves, values, ours, mates)
                return True
        return False

    def _settle_tables(self, unit: Unit, trace: OperationTrace, free: Sequence[Unit]) -> None:
        """All tables up to the first weight of another kind, at once: only their sum shows."""
        group = [one for one in _leading_tables(trace.units[trace.units.index(unit) :]) if self._is_open(one)]
        theirs = _leading_tables(free)
        following = self._next(group, trace)
        seconds = self._seconds(group, theirs)
        rest = [one for one in group if one.names[0] not in seconds]
        heads = {name for one in trace.units if one.kind is WeightUse.LINEAR for name in one.weights}
        ways = embedding_candidates.candidates(
            rest, theirs, self.port.shapes, self.reference.shapes, self._scales, heads
        )
        chosen = not rest or (theirs and self._choose(rest, theirs, ways, following, trace))
        if chosen and rest:
            self._take_in_factor(rest, following)
        if not (chosen or self._settle_neutral(rest[0], trace)):
            self._give_up(rest[0], theirs[0] if theirs else None)
        if seconds and self._verdict(group, (), (), following, self.found.reference.units) <= CLOSE:
            for one in group:
                if one.names[0] in seconds:
                    mate, other = seconds[one.names[0]]
                    self._filled.add(one.names[0])
                    self.found.seconds[one.names[0]] = other
                    if not self._share(one.names[0], other):
                        self._note("second", one, mate, near=((other, 0.0),))

    def _matrices(self, group: list[Unit], matches: Sequence[Unit], trace: OperationTrace) -> None:
        heads = {
            name: element_count
            for name, element_count in self._sizes.items()
            if name == "h" or (name == "g" and self._grouped)
        }
        ways = matrix_candidates.candidates(group, matches, self.port.shapes, self.reference.shapes, heads)
        arranged = [way for order in (FeatureOrder(), *self._orders) for way in self._arranged(group, matches, order)]
        ways = chain(ways, arranged)
        if len(group) == len(matches) == 1:
            ways = chain(
                matrix_candidates.composed(group[0], matches[0], self.port.shapes, self.reference.shapes), ways
            )
        if made := self._made_with(group, matches, trace):
            ways = ((*moves, *made) for moves in ways)
        if not any(one.biases for one in group):
            self._silence(matches)
        following = self._next(group, trace)
        self._fill_between(group, matches, following, trace)
        if self._choose(group, matches, ways, following, trace):
            self._projected = (group, matches)
            self._attended = (group, matches) if arranged else self._attended
        else:
            single = group[:1]
            ranked = sorted(matches, key=lambda one: -similarity(one.names[0], single[0].names[0]))
            nearest = ranked[0]
            for mate in ranked:
                ways = matrix_candidates.candidates(single, [mate], self.port.shapes, self.reference.shapes, heads)
                if self._choose(single, [mate], ways, self._next(single, trace), trace):
                    return
            returned = [one for one in self.found.reference.outputs if one.is_floating_point()]
            ranked = [one for one in ranked if any(apart(one.output, other, SAME) <= SAME for other in returned)]
            if ranked and self._next(single, trace) is None:
                ways = matrix_candidates.padded(single[0], ranked[0], self.port.shapes, self.reference.shapes)
                if self._choose(single, ranked[:1], ways, None, trace):
                    return
            if not self._settle_neutral(group[0], trace):
                self._give_up(group[0], nearest)

    def _made_with(self, group: Sequence[Unit], mates: Sequence[Unit], trace: OperationTrace) -> list[CandidateRule]:
        """Rules for open tensors of which matrices are made that have a matrix of the group among their makers.

        DeBERTa's queries meet a table of distances that was normed and multiplied by the layer's own keys.  No place
        behind the group is the reference's until these are filled as well.
        """
        sides = []
        for units, some in ((trace.units, group), (self.found.reference.units, mates)):
            own = {name for one in some for name in one.names}
            made = [one for one in units if len(one.weights) > 1 and own & {*one.weights} and one not in some]
            sides.append([[name for name in one.weights if name not in own] for one in made])
        rules: dict[str, CandidateRule] = {}
        for ours, theirs in zip(*sides, strict=False):
            pairs = [*zip(ours, theirs, strict=False)] if len(ours) == len(theirs) else []
            if all(self.port.shapes[one] == self.reference.shapes[other] for one, other in pairs):
                rules |= {one: single_rule(other, one, why="its place") for one, other in pairs}
        return [rule for name, rule in rules.items() if name in self.port.loadable - self._filled]

    def _tied(self, unit: Unit, matches: Sequence[Unit]) -> None:
        """A bias behind a matrix that has its values already, as a decoder's that is the word table."""
        sources = {name for move in self.found.moves if set(unit.weights) & set(move.writes) for name in move.reads}
        mate = next((one for one in matches if set(one.weights) & sources), None)
        if mate is None:
            self._give_up(unit, matches[0])
            return
        if mate.biases:
            move = single_rule(mate.biases[0], unit.biases[0], why="its place")
            values = self._values([move])
            if values is None:
                move = vector(move, self.port.shapes, self.reference.shapes)
                values = self._values([move])
            if values is None:
                self._give_up(unit, mate)
                return
            self._accept([move], values, [unit], [mate])
        self._uneven(unit, mate)

    def _turned_heads(self, unit: Unit, trace: OperationTrace) -> OperationTrace | None:
        """Give the heads of the last attention another order of their features if a place behind needs it.

        A norm between a projection and the rotation is given the same numbers in any order: one that is wrong shows
        behind the rotation only.  The gain has the order of what it meets.

        Returns:
            The module's run with the other order; None where none is better.
        """
        if self._attended is None:
            return None
        group, mates = self._attended
        self._attended = None if unit.kind is WeightUse.LINEAR else self._attended
        numbers, later = self._beside(group, unit), self.found.reference.units
        norms = {name for one in trace.units if one.number in numbers for name in one.names}
        gains = [move for move in self.found.moves if norms & {*move.writes}]
        written = {name for one in group for name in one.names}
        known = [move for move in self.found.moves if written & {*move.writes}]
        if not gains:
            return None
        before = self._verdict(group, mates, (), unit, later)
        orders = (FeatureOrder(), *self._orders)  # the first for heads in another order, whose features are not
        ways = ((order, way) for order in orders for way in self._arranged(group, mates, order))
        for order, moves in ways:
            kept = gains if not order.theirs else []
            turned = kept or [made for move in gains if (made := self._ordered(move, order)) is not None]
            values = self._values([*moves, *turned]) if len(turned) == len(gains) else None
            if values is None:
                continue
            self.found.trials += 1
            self._put(values)
            far = self._verdict(group, mates, moves, unit, later)
            if far <= SAME or (far <= CLOSE and far < OFFSET * before):
                chosen = [explained(one, "what it computes", proven=True) for one in (*moves, *turned)]
                self._replace(chosen, values)
                self._habits = {tuple(habit(move) for move in moves): math.inf, **self._habits}
                tried = Choice(moves=chosen, far=far, behind=unit.names[0], tried=2, rivals=[(known, before)])
                self.found.choices.append(tried)
                return self.port.run(forced=self._forced)
        self._put(self._values([*known, *gains]) or {})
        return None

    def _arranged(self, group: Sequence[Unit], matches: Sequence[Unit], order: FeatureOrder) -> Ways:
        """The arrangements of an attention's projections, with the features of its heads in an order."""
        if self._heads is None:
            return
        ours = [matrix([one], self.port.shapes) for one in group if one.weights]
        theirs = [matrix([one], self.reference.shapes) for one in matches if one.weights]
        yield from arrangements(ours, theirs, self._heads, order)

    def _diverged(self, unit: Unit, trace: OperationTrace, like: Sequence[Unit], theirs: Sequence[Unit]) -> list[Unit]:
        """The units of the reference that are due where the activation is none of the reference's own.

        The module computes something else on the way here: it is noted, and the search goes on with the reference's
        activation in the place of the module's.
        """
        _, mate = self._least(unit, like)
        gone = (
            mate is None or self._is_extra(unit, mate, like, trace) or self._is_gate(unit, mate) or _pools(unit, like)
        )
        if (gone or unit.kind is WeightUse.LINEAR) and self._settle_neutral(unit, trace):
            return []
        if mate is None or gone:
            own = unit.kind is WeightUse.NORM and self._is_own(unit)
            self._note("surplus norm" if own else "extra", unit, None)
            self._filled |= set(unit.names)
            if own and unit.operand is not None:
                self._forced.outputs[unit.last] = unit.operand  # what comes behind is seen as if it were not there
            return []
        far = self._apart(unit, mate)
        skipped = self._skipped(unit, theirs, far)
        if skipped is not None:
            mate = next((one for one in like if theirs.index(one) > theirs.index(skipped)), mate)
        else:
            if far > CLOSE:
                mate = self._in_order(unit, like)
            self._note("activation", unit, mate, far, near=self._nearest(unit, like))
        self._force(unit, mate)
        return [one for one in like if same_activation(one, mate)]

    def _is_extra(self, unit: Unit, mate: Unit, like: Sequence[Unit], trace: OperationTrace) -> bool:
        """Whether nothing of the reference is due: a norm like none of its, where the module has more of them."""
        if unit.kind is not WeightUse.NORM or (self._apart(unit, mate) <= CLOSE and not self._is_own(unit)):
            return False
        ours = [one for one in trace.units if self._is_open(one) and one.kind is WeightUse.NORM]
        return len(like) < len(ours)

    def _is_gate(self, unit: Unit, mate: Unit) -> bool:
        """Whether it is no norm of the reference's at all: far from the nearest, and made of other parts."""
        alike = (bool(unit.weights), bool(unit.biases)) == (bool(mate.weights), bool(mate.biases))
        return unit.kind is WeightUse.NORM and not alike and self._apart(unit, mate) > CLOSE

    def _in_order(self, unit: Unit, like: Sequence[Unit]) -> Unit:
        """The first of these whose tensors have the sizes of the unit's."""
        shapes, others = self.port.shapes, self.reference.shapes
        fits = [one for one in like if extents(one.names[:1], others) == extents(unit.names[:1], shapes)]
        return (fits or list(like))[0]

    def _nearest(self, unit: Unit, like: Sequence[Unit]) -> tuple[tuple[str, float], ...]:
        """The reference's activations that are nearest to the unit's input."""
        far = sorted((self._apart(unit, one), one.names[0]) for one in like)
        return tuple((name, element_count) for element_count, name in far[:3] if element_count < float("inf"))


def _first_behind(group: Sequence[Unit], trace: OperationTrace, loadable: frozenset[str]) -> Unit | None:
    """The first place that comes from what a group makes, has something to fill, and whose operand can be known."""
    reached = {one.number for one in group}
    inside = {name for one in group for name in one.names}
    for unit in trace.units:
        if not reached & unit.behind:
            continue
        reached.add(unit.number)
        known = unit.operand is not None and unit.kind in {WeightUse.LINEAR, WeightUse.NORM}
        if known and inside.isdisjoint(unit.names) and set(unit.names) & loadable:
            return unit
    return None


def _pools(unit: Unit, like: Sequence[Unit]) -> bool:
    """Whether a matrix is given one row for many tokens, and none of the reference's is: a head of another kind."""
    if unit.kind is not WeightUse.LINEAR or unit.operand is None:
        return False
    rows = unit.operand.numel() // unit.operand.shape[-1]
    others = [one.operand.numel() // one.operand.shape[-1] for one in like if one.operand is not None]
    return MANY * rows <= min(others, default=0)


MANY = 4
"""The least number of tokens for each row of a batch, in what is given to both models."""


def _leading_tables(units: Sequence[Unit]) -> list[Unit]:
    """The tables before the first weight of another kind, each once."""
    found: dict[tuple[str, ...], Unit] = {}
    for one in takewhile(lambda one: one.kind in TABLES, units):
        found.setdefault(one.names, one)
    return [*found.values()]
