"""How the parts of a model are put together: residual sums, the position of norms, the order of the layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from porting.causes.cause import Alterations, Cause, alter_each, combine, replace_with, run_with, solve_each
from porting.causes.fitting import geometric
from porting.causes.functions import CASTING, SUM
from porting.causes.model_parts import ModelParts, Residual
from porting.causes.norming import Norm
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.step_differences import generic_path
from porting.causes.tape import Call, Part, Ref

# ------------------------------------------------------------------------------------------------------ residual sums


def _summed(formula: Callable[[Tensor, Tensor], Tensor]) -> Alterations:
    """Return the alterations of each residual sum by another formula of stream and branch."""
    return alter_each(
        lambda parts: parts.residuals, lambda residual: combine(residual.stream, residual.branch, formula)
    )


def _branch_scaled(residual: Residual, factor: float) -> Rewrite:
    return combine(residual.stream, residual.branch, lambda stream, branch: stream + factor * branch)


# ----------------------------------------------------------------------------------------------- the position of norms


@dataclass(frozen=True, eq=False)
class Block:
    """A residual sum with its norm.

    Attributes:
        norm: the norm of the sum (post-norm), of the branch's input (pre-norm), or of the branch's output.
    """

    sum: Residual
    norm: Norm

    @property
    def call(self) -> Call:
        """The call of the sum."""
        return self.sum.call


UNCHANGING = ("dropout", *CASTING)
"""Functions that give what they are given, but for its dtype; dropout is off."""


def _blocks(parts: ModelParts, fits: Callable[[Residual, Norm], bool]) -> list[Block]:
    return [Block(residual, norm) for residual in parts.residuals for norm in parts.norms if fits(residual, norm)]


def post_norm(model_parts: ModelParts) -> list[Block]:
    """Return the blocks ``norm(x + f(x))``: sums that only a norm reads."""
    tape = model_parts.tape

    def fits(residual: Residual, norm: Norm) -> bool:
        total = residual.call.result
        readers = {call.number for call in tape.users(total) if call.name not in UNCHANGING}
        return readers == {norm.call.number} and total in tape.past(norm.input, UNCHANGING)

    return _blocks(model_parts, fits)


def pre_norm(model_parts: ModelParts) -> list[Block]:
    """Return the blocks ``x + f(norm(x))``: sums whose branch reads the stream through a norm."""

    def fits(residual: Residual, norm: Norm) -> bool:
        within = residual.stream.number < norm.output.number < residual.branch.number
        return within and norm.input in model_parts.tape.past(residual.stream, UNCHANGING)

    return _blocks(model_parts, fits)


def sandwiched(model_parts: ModelParts) -> list[Block]:
    """Return the sums whose branch ends with a norm, whatever it begins with."""
    tape = model_parts.tape
    return _blocks(model_parts, lambda residual, norm: norm.output in tape.past(residual.branch, UNCHANGING))


def normed_branch(model_parts: ModelParts) -> list[Block]:
    """Return the blocks ``x + norm(f(x))``: sums whose branch ends with a norm and reads the stream without one."""
    pre_norm_sums = {block.call.number for block in pre_norm(model_parts)}
    return [block for block in sandwiched(model_parts) if block.call.number not in pre_norm_sums]


Stream = Callable[[Values], Tensor]
"""A tensor that is computed from the values of a replay, such as what flows into a block."""


def _current(ref: Ref) -> Stream:
    return lambda values: values[ref]


def _recorded(ref: Ref) -> Stream:
    """The recorded value, which a probe keeps fixed."""
    return lambda values: values.tape[ref]


def _normed(norm: Norm, stream: Stream) -> Stream:
    return lambda values: norm.whole(stream(values), values)


def _sum(first: Stream, second: Stream) -> Stream:
    return lambda values: first(values) + second(values)


def _gives(stream: Stream) -> Rewrite:
    """A call that returns a stream."""
    return lambda values, call: stream(values)


def _reads(ref: Ref, stream: Stream) -> Rewrite:
    """A call that reads a stream in place of a tensor."""
    return lambda values, call: run_with(values, call, ref, stream(values))


def _branch_readers(model_parts: ModelParts, block: Block) -> list[Call]:
    """Return the calls of the branch that read the stream."""
    inside = {call.number for call in model_parts.tape.before(block.sum.branch)}
    return [call for call in model_parts.tape.users(block.sum.stream) if call.number in inside]


Rewritten = list[tuple[Norm, dict[int, Rewrite]]]
"""Norms, each with the rewritten calls with which it stands elsewhere or reads something else."""


EVERYWHERE = "large differences in every layer; all shapes and names fit"


def _rewritten_norms(
    rewritten: Callable[[ModelParts], Rewritten], *, name: str, what: str, fix: str, looks: str = EVERYWHERE
) -> Cause:
    """Return the cause of norms that are rewritten: each alone, and those of all layers."""

    def alone(model_parts: ModelParts) -> Iterator[Alteration]:
        for norm, rewrites in rewritten(model_parts):
            yield Alteration(where=norm.call.module, rewrites=rewrites)

    def in_all_layers(model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield all changes of norms at once, then the same norm of every layer, such as the attention's."""
        changes = rewritten(model_parts)
        alike: dict[str, list[dict[int, Rewrite]]] = {}
        for norm, rewrites in changes:
            alike.setdefault(generic_path(norm.call.module), []).append(rewrites)
        groups = {name: some for name, some in alike.items() if 1 < len(some) < len(changes)}
        for where, some in {"": [rewrites for _, rewrites in changes], **groups}.items():
            together = {number: rewrite for rewrites in some for number, rewrite in rewrites.items()}
            if together:
                yield Alteration(where=where, rewrites=together, detail="in all layers")

    return Cause(name=name, what=what, looks=looks, fix=fix, alterations=alone, whole=in_all_layers)


def _norm_elsewhere(
    blocks: Callable[[ModelParts], list[Block]], moved: Callable[[ModelParts, Block], dict[int, Rewrite]]
) -> Callable[[ModelParts], Rewritten]:
    """Return what rewrites the calls of each block so that its norm stands in another place."""
    return lambda model_parts: [(block.norm, moved(model_parts, block)) for block in blocks(model_parts)]


def _without_norm(block: Block) -> dict[int, Rewrite]:
    return {block.norm.call.number: replace_with(block.norm.input)}


def _normed_branch(model_parts: ModelParts, block: Block) -> dict[int, Rewrite]:
    """Add the normalised branch to the stream."""
    branch = _normed(block.norm, _current(block.sum.branch))
    return {**_without_norm(block), block.call.number: _gives(_sum(_current(block.sum.stream), branch))}


def _normed_sum(block: Block, branch: Ref) -> dict[int, Rewrite]:
    """Normalise the sum of the stream and a branch."""
    total = _sum(_current(block.sum.stream), _current(branch))
    return {block.call.number: _gives(_normed(block.norm, total))}


def _normed_input(model_parts: ModelParts, block: Block) -> dict[int, Rewrite]:
    """Normalise what the branch reads."""
    source = block.sum.stream
    normed = _reads(source, _normed(block.norm, _current(source)))
    return _without_norm(block) | {reader.number: normed for reader in _branch_readers(model_parts, block)}


def _normed_stream(block: Block) -> Rewrite:
    """Return ``norm(x) + f(norm(x))`` for ``x + f(norm(x))``."""
    return combine(block.norm.output, block.sum.branch, torch.add)


# ------------------------------------------------------------------------------------- branches of one residual stream


@dataclass(frozen=True, eq=False)
class Reading:
    """The input that a branch reads in the wrong port: the norm of another stream.

    Attributes:
        norm: the norm.
        readers: the branch's calls that read it; none where nothing else does.
        stream: what is normalised instead.
    """

    norm: Norm
    readers: list[Call]
    stream: Stream


def _readers(model_parts: ModelParts, norm: Norm, branch: Ref, but: Ref | None = None) -> list[Call]:
    """Return the calls of a branch, and of no other one, that read a norm."""
    inside = {call.number for call in model_parts.tape.before(branch)}
    inside -= {call.number for call in model_parts.tape.before(but)} if but is not None else set()
    return [call for call in model_parts.tape.users(norm.output) if call.number in inside]


def side_by_side(model_parts: ModelParts) -> Iterator[Reading]:
    """Yield the later one of each two branches that read one stream, ``x + f(norm(x)) + g(norm(x))``."""
    tape = model_parts.tape
    for total in model_parts.called(*SUM):
        for part, third in (total.reads[:2], total.reads[1::-1]) if len(total.reads) > 1 else ():
            inner = tape.maker(part)
            if inner is None or inner.name not in SUM or len(inner.reads) < 2:
                continue
            terms = (*inner.reads[:2], third)
            for stream in terms:
                first, later = sorted((one for one in terms if one is not stream), key=lambda one: one.number)
                values = tape.past(stream, UNCHANGING)
                norms = [norm for norm in model_parts.norms if norm.input in values]
                if not any(_readers(model_parts, norm, first) for norm in norms):
                    continue
                for norm in norms:
                    readers = _readers(model_parts, norm, later, first)
                    alone = len(readers) == len(tape.users(norm.output)) and first.number < norm.output.number
                    if readers and first.number < min(reader.result.number for reader in readers):
                        yield Reading(norm, [] if alone else readers, _sum(_current(stream), _current(first)))


def one_after_the_other(model_parts: ModelParts) -> Iterator[Reading]:
    """Yield the second one of each two branches of which it reads the sum with the first: ``y + g(norm(y))``."""
    blocks = pre_norm(model_parts)
    for first in blocks:
        for later in blocks:
            if first.sum.call.result in model_parts.tape.past(later.sum.stream, UNCHANGING):
                readers = _readers(model_parts, later.norm, later.sum.branch)
                alone = len(readers) == len(model_parts.tape.users(later.norm.output))
                if readers:
                    yield Reading(later.norm, [] if alone else readers, _current(first.sum.stream))


def _other_stream(readings: Callable[[ModelParts], Iterator[Reading]]) -> Callable[[ModelParts], Rewritten]:
    """Return what rewrites the calls of each branch so that it reads the norm of another stream."""
    return lambda model_parts: [(reading.norm, _rewrites(reading)) for reading in readings(model_parts)]


def _rewrites(reading: Reading) -> dict[int, Rewrite]:
    normed = _normed(reading.norm, reading.stream)
    if not reading.readers:
        return {reading.norm.call.number: _gives(normed)}
    return {reader.number: _reads(reading.norm.output, normed) for reader in reading.readers}


# --------------------------------------------------------------------------------------------- the order of the layers

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_LAST = re.compile(r"(?<=\.)\d+$")


def _other_layers(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield layers that compute with the weights of another one, or on the input of another one."""
    tape = model_parts.tape
    names = {name: ref for ref, name in tape.weights.items()}
    layers: dict[tuple[str, int], list[Call]] = {}
    for call in tape.calls:
        for name in {tape.weights[ref] for ref in call.reads if ref in tape.weights}:
            match = _LAYER.search(name)
            if match:
                layers.setdefault((name[: match.start()], int(match.group())), []).append(call)
    for (stem, number), calls in layers.items():
        for other_stem, other in layers:
            if stem == other_stem and number != other:
                detail = f"layer {number} has the weights of layer {other}"
                rewrites = dict.fromkeys((call.number for call in calls), _with_weights_of(names, stem, other))
                yield Alteration(where=f"{stem}{number}", rewrites=rewrites, detail=detail)
    yield from _other_inputs(model_parts)


def _with_weights_of(names: Mapping[str, Ref], stem: str, layer: int) -> Rewrite:
    """Return the rewrite that runs a call with the weights of another layer."""

    def rewrite(values: Values, call: Call) -> Any:  # what the call gives
        changed = dict(values.changed)
        for ref in call.reads:
            name = values.tape.weights.get(ref, "")
            if name.startswith(stem) and (match := _LAYER.search(name)):
                replacement = names.get(f"{name[: match.start()]}{layer}{name[match.end() :]}")
                if replacement is not None:
                    changed[ref] = values.tape[replacement]
        return replace(values, changed=changed).run(call)

    return rewrite


def _other_inputs(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield layers with the input of another layer, and stacks that end with another layer."""
    stacks: dict[str, dict[int, Part]] = {}
    for part in model_parts.tape.parts:
        match = _LAST.search(part.path)
        if match and part.input is not None and part.last > part.first:
            stacks.setdefault(part.path[: match.start()], {}).setdefault(int(match.group()), part)
    for stack in stacks.values():
        streams = {number: part.input for number, part in stack.items()} | {
            number + 1: part.output for number, part in stack.items() if number + 1 not in stack
        }
        for number, part in stack.items():
            for other, stream in streams.items():
                source = part.input
                if other == number or stream is None or source is None:
                    continue
                readers = [user for user in model_parts.tape.users(source) if part.first <= user.number < part.last]
                rewrites = {reader.number: _reads(source, _recorded(stream)) for reader in readers}
                detail = f"layer {number} is given what layer {other} should be given"
                yield Alteration(where=part.path, rewrites=rewrites, detail=detail, pinned=True)
        last = stack[max(stack)]
        for number, part in stack.items():
            if part.output is not None and last.output is not None and part is not last:
                read = _reads(last.output, _recorded(part.output))
                rewrites = {user.number: read for user in model_parts.tape.users(last.output)}
                detail = f"layer {number} was the last one"
                yield Alteration(where=last.path, rewrites=rewrites, detail=detail, pinned=True)


CAUSES: tuple[Cause, ...] = (
    Cause(
        name="residual missing",
        what="the residual stream is not added to the branch",
        looks="large differences that grow with depth",
        fix="x + f(x)",
        alterations=_summed(lambda stream, branch: branch),
    ),
    Cause(
        name="residual doubled",
        what="the residual stream is added twice",
        looks="large differences, smaller after a norm",
        fix="add it once: check whether two nested functions both add it",
        alterations=_summed(lambda stream, branch: 2 * stream + branch),
    ),
    Cause(
        name="branch missing",
        what="a branch is computed but not added",
        looks="large differences",
        fix="x + f(x)",
        alterations=_summed(lambda stream, branch: stream),
    ),
    Cause(
        name="branch scaled",
        what="the branch is multiplied by a number before it is added",
        looks="differences that grow with depth",
        fix="x + f(x); see residual_multiplier or layer scale in the config",
        free_parameters=solve_each(
            lambda parts: parts.residuals,
            _branch_scaled,
            lambda residual: "a branch is multiplied by {} before it is added",
            geometric(1e-3, 1e2, 3),
        ),
    ),
    _rewritten_norms(
        _norm_elsewhere(post_norm, _normed_branch),
        name="norm before the sum",
        what="x + norm(f(x)) instead of norm(x + f(x))",
        looks="large differences in every layer",
        fix="norm(x + f(x))",
    ),
    _rewritten_norms(
        _norm_elsewhere(post_norm, _normed_input),
        name="pre-norm for post-norm",
        what="x + f(norm(x)) instead of norm(x + f(x))",
        fix="normalise the sum, norm(x + f(x)): as in the original transformer",
    ),
    _rewritten_norms(
        _norm_elsewhere(pre_norm, lambda parts, block: _without_norm(block) | _normed_sum(block, block.sum.branch)),
        name="post-norm for pre-norm",
        what="norm(x + f(x)) instead of x + f(norm(x))",
        fix="normalise the branch's input only: GPT-2 and most later models are pre-norm",
    ),
    _rewritten_norms(
        _norm_elsewhere(sandwiched, lambda parts, block: _normed_sum(block, block.norm.input)),
        name="norm of the sum for that of the branch",
        what="norm(x + f(x)) instead of x + norm(f(x))",
        looks="the residual stream is normalised in every layer; all shapes and names fit",
        fix="normalise the branch, and add it to x then: as OLMo 2 and Gemma 2 do",
    ),
    _rewritten_norms(
        _other_stream(side_by_side),
        name="branches one after the other",
        what="x + f(x) is what the second branch reads, where the reference gives both branches x",
        fix="x + attention(norm(x)) + mlp(norm(x)): as in GPT-J, GPT-NeoX, Phi and Falcon",
    ),
    _rewritten_norms(
        _other_stream(one_after_the_other),
        name="branches side by side",
        what="both branches read x, where the reference's second one reads x + f(x)",
        fix="x = x + attention(norm(x)), then x + mlp(norm(x)): as in GPT-2 and Llama",
    ),
    Cause(
        name="residual taken after the norm",
        what="norm(x) + f(norm(x)): the residual stream is normalised, too",
        looks="differences that grow with depth",
        fix="add x as it was before the norm",
        alterations=alter_each(pre_norm, _normed_stream),
    ),
    Cause(
        name="layers in another order",
        what="a layer uses the weights of another one: the order is wrong, or one layer runs several times",
        looks="large differences, from the first such layer on",
        fix="check the layer numbers in the table, and the order of the loop over the layers",
        alterations=_other_layers,
        absorbed_by_weights=True,
    ),
    _rewritten_norms(
        _norm_elsewhere(pre_norm, _normed_branch),
        name="norm behind the branch",
        what="x + norm(f(x)) instead of x + f(norm(x))",
        fix="normalise the branch's input, as Llama does; OLMo 2 normalises its output, Gemma 2 both",
    ),
    _rewritten_norms(
        _norm_elsewhere(normed_branch, _normed_input),
        name="norm before the branch",
        what="x + f(norm(x)) instead of x + norm(f(x))",
        fix="normalise the branch's output, as OLMo 2 does; Llama normalises its input, Gemma 2 both",
    ),
)
