"""Mistakes of any kind, found by trying each step of the reference: what it reads, whether it is there, in which order.

These entries know nothing of transformers.  They are tried where no entry that does fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from porting.causes.cause import Cause, given_instead, joins, other, reads
from porting.causes.functions import ACTIVATIONS, CASTING
from porting.causes.model_parts import Activation, Anatomy
from porting.causes.norming import Norm
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.tape import Call, Ref, Tape

NEAR = 160
"""A tensor is taken for another one that was made at most so many calls before."""

MOVING = (
    *CASTING,
    "transpose",
    "permute",
    "flatten",
    "unflatten",
    "split",
    "chunk",
    "expand",
    "__getitem__",
    "dropout",
)
"""What moves numbers and computes none."""


@cache
def spelled(path: str) -> str:
    """A module's path without the numbers of its layers, so that what is alike in all layers has one name."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "{i}", path) or "the model"


def named(tape: Tape, ref: Ref) -> str:
    """What a tensor is, as a report says it."""
    if ref in tape.weights:
        return spelled(tape.weights[ref])
    call, part = tape.maker(ref), ""
    while call is not None and call.name in MOVING and call.reads:
        part = f"part {call.writes.index(ref)} of " if len(call.writes) > 1 else part
        ref, call = call.reads[0], tape.maker(call.reads[0])
    if ref in tape.weights:
        return spelled(tape.weights[ref])
    if call is None:
        return "an input"
    return f"{part}the output of {plain(call.name)} in {spelled(call.module)}"


def exchanged(tape: Tape, instead: Ref, ref: Ref) -> str:
    """What is read, and what the reference reads there; a part that runs several times gives several of one name."""
    ours, theirs = named(tape, instead), named(tape, ref)
    if ours == theirs:
        when = "an earlier" if instead.number < ref.number else "a later"
        return f"{ours} in {when} call than the reference does"
    return f"{ours}, where the reference has {theirs}"


def plain(name: str) -> str:
    """A function's name without the underscores of an operator."""
    return name.strip("_")


def wires(anatomy: Anatomy, call: Call, only: Ref | None = None) -> Iterator[tuple[Ref, Ref]]:
    """Each activation that a call reads, with each other one that it might read: of its shape, and made before."""
    tape = anatomy.tape
    first = next((ref.number for ref in call.writes), 0)
    for ref in dict.fromkeys(call.reads) if only is None else (only,):
        if ref in tape.weights or not tape[ref].is_floating_point():
            continue
        value, learned = tape[ref], tape.learned(ref)
        for number in range(first - 1, max(first - NEAR, -1), -1):
            one = Ref(number)
            fits = tape.values[number].shape == value.shape and tape.values[number].dtype == value.dtype
            if one != ref and fits and one not in tape.weights and tape.learned(one) == learned:
                yield ref, one


class OtherTensor(Cause):
    """A call that is given another tensor of the same shape."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Each activation that a call reads, by each other one."""
        sums = {one.call.number for one in anatomy.residuals}
        for call in anatomy.tape.calls:
            if call.number in sums or call.name in CASTING:
                continue
            for ref, instead in wires(anatomy, call):
                detail = f"{plain(call.name)} in {spelled(call.module)} reads {exchanged(anatomy.tape, instead, ref)}"
                yield other(call, _reading({ref: instead}), detail)


class OtherResidual(Cause):
    """A residual sum with another tensor in it."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """The stream and the branch of each residual sum."""
        for one in anatomy.residuals:
            for ref, instead in wires(anatomy, one.call):
                detail = f"{named(anatomy.tape, instead)} is added, where the reference has {named(anatomy.tape, ref)}"
                yield other(one.call, _reading({ref: instead}), detail)


def _reading(instead: dict[Ref, Ref]) -> Rewrite:
    """The call with other tensors."""

    def rewrite(values: Values, call: Call) -> object:
        changed = {ref: values[one] for ref, one in instead.items()}
        return replace(values, changed={**values.changed, **changed}).run(call)

    return rewrite


class OtherInput(Cause):
    """A branch that reads another tensor: all calls that read one at a time."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Each activation that several calls read, by each other one of its shape that was made before."""
        tape = anatomy.tape
        for number in range(len(tape.values)):
            ref = Ref(number)
            users = tape.users(ref)
            if len(users) < 2 or ref in tape.weights or not tape[ref].is_floating_point():
                continue
            for module in dict.fromkeys(_parents(users)):
                inside = [one for one in users if one.module == module or one.module.startswith(f"{module}.")]
                if not len(inside) > 1:
                    continue
                for _, instead in wires(anatomy, inside[0], ref):
                    detail = f"{spelled(module)} reads {exchanged(tape, instead, ref)}"
                    rewrites: dict[int, Rewrite] = {one.number: _reading({ref: instead}) for one in inside}
                    yield Alteration(where=module, rewrites=rewrites, detail=detail)


def _parents(users: object) -> Iterator[str]:
    for one in users if isinstance(users, list | tuple) else ():
        path = one.module
        while path:
            yield path
            path = path.rpartition(".")[0]


class WeightsExchanged(Cause):
    """Two weights of one shape in each other's place."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Each pair of weights of one shape in one layer, and each pair of modules with weights of the same shapes."""
        tape = anatomy.tape
        users: dict[Ref, list[Call]] = {ref: list(tape.users(ref)) for ref in tape.weights}
        refs = [ref for ref, calls in users.items() if calls]
        for place, one in enumerate(refs):
            for two in refs[place + 1 :]:
                if tape[one].shape == tape[two].shape and tape[one].numel() > 1 and _beside(tape, one, two):
                    yield self._exchange(tape, {one: two, two: one}, [*users[one], *users[two]], (one, two))
        modules: dict[str, dict[str, Ref]] = {}
        for ref in refs:
            path, _, name = tape.weights[ref].rpartition(".")
            modules.setdefault(path, {})[name] = ref
        known = [(path, many) for path, many in modules.items() if len(many) > 1]
        for place, (_, many) in enumerate(known):
            for _, others in known[place + 1 :]:
                alike = many.keys() == others.keys() and all(
                    tape[many[name]].shape == tape[others[name]].shape for name in many
                )
                if alike and _beside(tape, *(next(iter(one.values())) for one in (many, others))):
                    pairs = [(many[name], others[name]) for name in many]
                    instead = dict(pairs) | {two: one for one, two in pairs}
                    calls = [call for ref in instead for call in users[ref]]
                    yield self._exchange(tape, instead, calls, pairs[0], whole=True)

    @staticmethod
    def _exchange(
        tape: Tape, instead: dict[Ref, Ref], calls: list[Call], pair: tuple[Ref, Ref], *, whole: bool = False
    ) -> Alteration:
        one, two = (tape.weights[ref].rpartition(".")[0] if whole else tape.weights[ref] for ref in pair)
        rewrites: dict[int, Rewrite] = {call.number: _reading(instead) for call in calls}
        detail = f"{spelled(one)} and {spelled(two)} are exchanged"
        return Alteration(where=calls[0].module, rewrites=rewrites, detail=detail)


def _beside(tape: Tape, one: Ref, two: Ref) -> bool:
    """Whether two weights are of the same layer, or of none."""
    layers = [re.findall(r"[^.]+\.\d+(?=\.)", tape.weights[ref]) for ref in (one, two)]
    return layers[0] == layers[1]


class StepLeftOut(Cause):
    """A step that gives what it was given."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Each call whose result has the shape of an activation that it reads."""
        for call, ref in _same_shape(anatomy):
            yield other(call, reads(ref), f"{plain(call.name)} in {spelled(call.module)}")


OPERATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "truediv": torch.div,
}


class OtherOperator(Cause):
    """A sum for a product, and the like."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Each call that joins two activations, by each other operator, and with its sides exchanged."""
        tape = anatomy.tape
        for call in tape.calls:
            known = plain(call.name).removeprefix("r").removeprefix("i")
            known = {"div": "truediv", "true_divide": "truediv", "multiply": "mul"}.get(known, known)
            if known not in OPERATORS or len(call.reads) != 2 or not tape.learned(call.result):
                continue
            one, two = call.reads
            for name, function in OPERATORS.items():
                if name != known:
                    detail = f"{name} in {spelled(call.module)}, where the reference has {known}"
                    yield other(call, joins(one, two, function), detail)


class WeightLeftOut(Cause):
    """A parameter that is not used: added as 0, or multiplied by as 1."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Each parameter that a call reads."""
        tape = anatomy.tape
        for call in tape.calls:
            for ref in dict.fromkeys(call.reads):
                if ref in tape.weights and tape[ref].is_floating_point() and call.name not in ("embedding", "linear"):
                    detail = spelled(tape.weights[ref])
                    yield other(call, self._filled(ref, 0.0), detail)
                    yield other(call, self._filled(ref, 1.0), detail)

    @staticmethod
    def _filled(ref: Ref, number: float) -> Rewrite:
        return lambda values, call: given_instead(values, call, ref, torch.full_like(values[ref], number))


class StepTwice(Cause):
    """A step that is done again on its own result."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Each call whose result has the shape of an activation that it reads."""
        for call, ref in _same_shape(anatomy):
            yield other(call, self._again(ref), f"{plain(call.name)} in {spelled(call.module)}")

    @staticmethod
    def _again(ref: Ref) -> Rewrite:
        def rewrite(values: Values, call: Call) -> object:
            return given_instead(values, call, ref, values.run(call))

        return rewrite


def _same_shape(anatomy: Anatomy) -> Iterator[tuple[Call, Ref]]:
    tape = anatomy.tape
    for call in tape.calls:
        if call.name in CASTING or len(call.writes) != 1 or not tape.learned(call.result):
            continue
        for ref in dict.fromkeys(call.reads):
            same = tape[ref].shape == tape[call.result].shape and tape[ref].dtype == tape[call.result].dtype
            if same and ref not in tape.weights and tape.learned(ref):
                yield call, ref


class StepsExchanged(Cause):
    """Two steps in the other order: g(f(x)) for f(g(x))."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Each two calls of which one reads nothing but what the other gives; a norm and an activation as a whole."""
        tape = anatomy.tape
        inner = {call.result: (call, ref) for call, ref in _same_shape(anatomy)}
        for call, ref in _same_shape(anatomy):
            if ref in inner and len(tape.users(ref)) == 1:
                before, source = inner[ref]
                detail = f"{plain(call.name)} comes before {plain(before.name)} in {spelled(call.module)}"
                yield other(call, self._turned(before, source, ref), detail)
        for norm in anatomy.norms:
            for site in anatomy.activations:
                if norm.input == site.call.result and tape.users(site.input):
                    yield other(norm.call, self._norm_first(norm, site), "the norm comes before the activation")

    @staticmethod
    def _turned(before: Call, source: Ref, ref: Ref) -> Rewrite:
        def rewrite(values: Values, call: Call) -> object:
            first = given_instead(values, call, ref, values[source])
            return given_instead(values, before, source, first)

        return rewrite

    @staticmethod
    def _norm_first(norm: Norm, site: Activation) -> Rewrite:
        def rewrite(values: Values, call: Call) -> Tensor:
            normed = norm.whole(values[site.input], values)
            if site.name:
                return ACTIVATIONS[site.name](normed)
            result: Tensor = given_instead(values, site.call, site.input, normed)
            return result

        return rewrite


CAUSES: tuple[Cause, ...] = (
    OtherResidual(
        name="residual from the wrong tensor",
        what="what goes around a branch is another tensor than the reference's",
        looks="large differences that grow with depth; all shapes fit",
        fix="see what the reference adds: the stream before the branch's norm, and after the branch before it",
        general=True,
    ),
    WeightsExchanged(
        name="weights exchanged",
        what="two weights of the same shape are used in each other's place",
        looks="large differences; all shapes fit",
        fix="check the table's lines of the two, and where the model uses each of them",
        general=True,
    ),
    StepLeftOut(
        name="step left out",
        what="a step of the reference is not done",
        looks="every shape fits",
        fix="do it where the reference does",
        general=True,
    ),
    OtherOperator(
        name="wrong operator",
        what="two tensors are joined by another operator than the reference's",
        looks="every shape fits",
        fix="see the operator: +, -, * or /",
        general=True,
    ),
    WeightLeftOut(
        name="parameter not used",
        what="a parameter is not used where the reference uses it",
        looks="nothing on a fresh model, whose biases are 0 and gains 1",
        fix="use it",
        general=True,
    ),
    StepsExchanged(
        name="steps in the other order",
        what="two steps are done in the other order than the reference's",
        looks="every shape fits",
        fix="exchange them",
        general=True,
    ),
    OtherTensor(
        name="wrong tensor",
        what="a step reads another tensor of the same shape than the reference's step does",
        looks="large differences; all shapes fit",
        fix="see which variable the line reads",
        general=True,
    ),
    OtherInput(
        name="wrong input",
        what="a part of the model reads another tensor of the same shape than the reference's part does",
        looks="large differences; all shapes fit",
        fix="see which variable it is given",
        general=True,
    ),
    StepTwice(
        name="step done twice",
        what="a step of the reference is done a second time",
        looks="every shape fits",
        fix="do it once",
        general=True,
    ),
)
