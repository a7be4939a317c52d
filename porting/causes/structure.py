"""How the parts are put together: residual sums, the place of the norms, the order of the layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from porting.causes.cause import Cause, alter, combine, free_parameter, replace_with, run_with
from porting.causes.fitting import FreeParameter, geometric
from porting.causes.functions import CASTING
from porting.causes.model_parts import ModelParts, Residual
from porting.causes.norming import Norm
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.tape import Call, Part, Ref


@dataclass(frozen=True, kw_only=True)
class Sum(Cause):
    """The residual sum by another formula of stream and branch."""

    formula: Callable[[Tensor, Tensor], Tensor]

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each residual sum."""
        for residual in model_parts.residuals:
            yield alter(residual.call, combine(residual.stream, residual.branch, self.formula))


class BranchScaled(Cause):
    """A branch by a factor."""

    def free_parameters(self, model_parts: ModelParts) -> Iterator[FreeParameter]:
        """Each residual sum."""
        for residual in model_parts.residuals:
            detail = "a branch is multiplied by {} before it is added".format
            yield free_parameter(residual.call, partial(self._scaled, residual), detail, geometric(1e-3, 1e2, 3))

    @staticmethod
    def _scaled(residual: Residual, factor: float) -> Rewrite:
        return combine(residual.stream, residual.branch, lambda stream, branch: stream + factor * branch)


def behind(model_parts: ModelParts, ref: Ref) -> set[Ref]:
    """A tensor, and what it is but for a cast or a dropout that is off."""
    found = {ref}
    while (call := model_parts.tape.maker(ref)) is not None and call.name in ("dropout", *CASTING):
        ref = call.reads[0]
        found.add(ref)
    return found


@dataclass(frozen=True, eq=False)
class Block:
    """A branch with its way around it, and its norm.

    Attributes:
        sum: the residual sum.
        norm: the norm: of the sum (post-norm), or of the stream that the branch reads (pre-norm).
    """

    sum: Residual
    norm: Norm


def post_norm(model_parts: ModelParts) -> Iterator[Block]:
    """``norm(x + f(x))``: each sum that is normed and used for nothing else."""
    for norm in model_parts.norms:
        before = behind(model_parts, norm.input)
        for residual in model_parts.residuals:
            readers = {
                call.number
                for call in model_parts.tape.users(residual.call.result)
                if call.name not in ("dropout", *CASTING)
            }
            if residual.call.result in before and readers == {norm.call.number}:
                yield Block(residual, norm)


def pre_norm(model_parts: ModelParts) -> Iterator[Block]:
    """``x + f(norm(x))``: each sum whose branch reads the stream through a norm."""
    for residual in model_parts.residuals:
        stream = behind(model_parts, residual.stream)
        for norm in model_parts.norms:
            if residual.stream.number < norm.call.result.number < residual.branch.number and norm.input in stream | {
                residual.stream
            }:
                yield Block(residual, norm)


Stream = Callable[[Values], Tensor]
"""What flows into a block."""


class NormBeforeSum(Cause):
    """``x + norm(f(x))`` for ``norm(x + f(x))``."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each post-norm block by itself, as its norm, what reads it, or the block's end shows it."""
        before: Block | None = None
        for block in sorted(post_norm(model_parts), key=lambda block: block.sum.call.number):
            norm, where = block.norm, block.norm.call.module
            streams: list[Stream] = [_value(block.sum.stream)]
            if before is not None:  # the stream is the sum of the block before, whose norm its probe has shown
                streams.append(_unnormed(before))
            yield alter(norm.call, _branched(block))
            for stream in streams:
                yield alter(norm.call, _joined(stream, block))
            for reader in model_parts.tape.users(norm.output):
                yield alter(reader, _reads_sum(norm.output, block), where=where)
            before = block


def _branch(block: Block, values: Values) -> Tensor:
    return block.norm.whole(values[block.sum.branch], values)


def _branched(block: Block) -> Rewrite:
    return lambda values, call: _branch(block, values)


def _unnormed(before: Block) -> Stream:
    return lambda values: values[before.sum.stream] + values.tape[before.norm.output]


def _joined(stream: Stream, block: Block) -> Rewrite:
    return lambda values, call: stream(values) + _branch(block, values)


def _reads_sum(ref: Ref, block: Block) -> Rewrite:
    """A call that is given the stream and the norm's recorded value in place of that value."""
    return lambda values, call: run_with(values, call, ref, _unnormed(block)(values))


class PreForPost(Cause):
    """``x + f(norm(x))`` for ``norm(x + f(x))``: the norm moves from the sum to the branch's input."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each block by itself, as its norm, its branch's input or its sum shows it."""
        blocks = sorted(post_norm(model_parts), key=lambda block: block.sum.call.number)
        for number, block in enumerate(blocks):
            before = blocks[number - 1] if number else None
            where = block.norm.call.module
            # What the norm gives: it norms the stream, and the stream is the sum of the block before.
            for stream in _streams(block, before):
                yield Alteration(where=where, rewrites={block.norm.call.number: _of(stream, block.norm)})
            # What reads the norm's input, given the reference's value for what the norm gives: the branch.
            for reader in _readers(model_parts, block):
                yield alter(reader, _reads(block.sum.stream, block.norm, pinned=True), where=where)
                for stream in _streams(block, before):
                    yield alter(reader, _reads_normed(block.sum.stream, stream, block.norm), where=where)
            # What the layer gives: the sum itself, without a norm after it.
            for stream in _streams(block, before):
                yield Alteration(where=where, rewrites={block.norm.call.number: _summed(stream, block)})
                rewrites = {block.norm.call.number: _summed(stream, block)}
                for reader in _readers(model_parts, block):
                    rewrites[reader.number] = _reads_normed(block.sum.stream, stream, block.norm)
                yield Alteration(where=where, rewrites=rewrites)


def _streams(block: Block, before: Block | None) -> Iterator[Stream]:
    """What flows into a block: as the reference has it, or the sum of the block before without its norm."""
    yield lambda values: values[block.sum.stream]
    if before is not None:
        yield lambda values: values[before.sum.call.result]
        yield lambda values: values[before.sum.stream] + values[before.sum.branch]


def _value(ref: Ref) -> Stream:
    return lambda values: values[ref]


def _of(stream: Stream, norm: Norm) -> Rewrite:
    return lambda values, call: norm.whole(stream(values), values)


def _summed(stream: Stream, block: Block) -> Rewrite:
    return lambda values, call: stream(values) + values[block.sum.branch]


def _readers(model_parts: ModelParts, block: Block) -> list[Call]:
    """The calls of the branch that read the stream."""
    inside = {call.number for call in model_parts.tape.before(block.sum.branch)}
    return [call for call in model_parts.tape.users(block.sum.stream) if call.number in inside]


def _reads(stream: Ref, norm: Norm, *, pinned: bool) -> Rewrite:
    """A call that is given the norm's recorded value in place of the stream."""

    def rewrite(values: Values, call: Call) -> Tensor:
        instead = values.tape[norm.output] if pinned else values[norm.output]
        result: Tensor = run_with(values, call, stream, instead)
        return result

    return rewrite


def _reads_normed(stream: Ref, source: Stream, norm: Norm) -> Rewrite:
    """A call that is given the normed stream in place of the stream."""
    return lambda values, call: run_with(values, call, stream, norm.whole(source(values), values))


class PostForPre(Cause):
    """``norm(x + f(x))`` for ``x + f(norm(x))``: the norm moves from the branch's input to the sum."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each block by itself, as its norm, its branch's input or its sum shows it."""
        before: Block | None = None
        for block in sorted(pre_norm(model_parts), key=lambda block: block.sum.call.number):
            where, norm = block.norm.call.module, block.norm
            streams = [block.sum.stream, *([before.norm.output] if before else [])]
            for stream in streams:
                normed = _normed_sum(stream, block)
                yield alter(norm.call, normed)
                yield alter(block.sum.call, normed, where=where)
                for reader in model_parts.tape.users(norm.output):
                    yield alter(reader, _reads_recorded(norm.output, stream), where=where)
                yield Alteration(
                    where=where, rewrites={norm.call.number: replace_with(stream), block.sum.call.number: normed}
                )
            # Where the norm is probed, the layer gives what the probe was given in its place.
            yield alter(block.sum.call, _recorded(norm.output), where=where)
            before = block


def _normed_sum(stream: Ref, block: Block) -> Rewrite:
    return lambda values, call: block.norm.whole(values[stream] + values[block.sum.branch], values)


def _recorded(ref: Ref) -> Rewrite:
    return lambda values, call: values.tape[ref]


def _reads_recorded(ref: Ref, stream: Ref) -> Rewrite:
    """A call that is given the recorded stream in place of a normed one."""
    return lambda values, call: run_with(values, call, ref, values.tape[stream])


class ResidualAfterNorm(Cause):
    """``norm(x) + f(norm(x))`` for ``x + f(norm(x))``."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each pre-norm block."""
        for block in pre_norm(model_parts):
            yield alter(block.sum.call, combine(block.norm.output, block.sum.branch, torch.add))


_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


class OtherLayer(Cause):
    """A layer that computes with the weights of another one."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each pair of layers with the same parameters."""
        tape = model_parts.tape
        names = {name: ref for ref, name in tape.weights.items()}
        layers: dict[tuple[str, int], list[Call]] = {}
        for call in tape.calls:
            for name in {tape.weights[ref] for ref in call.reads if ref in tape.weights}:
                found = _LAYER.search(name)
                if found:
                    layers.setdefault((name[: found.start()], int(found.group())), []).append(call)
        for (stem, number), calls in layers.items():
            for other_stem, another in layers:
                if stem == other_stem and number != another:
                    detail = f"layer {number} has the weights of layer {another}"
                    exchange = _Exchange(names, stem, another)
                    rewrites: dict[int, Rewrite] = {call.number: exchange for call in calls}
                    yield Alteration(where=f"{stem}{number}", rewrites=rewrites, detail=detail)
        yield from _other_input(model_parts)


_LAST = re.compile(r"(?<=\.)\d+$")


def _other_input(model_parts: ModelParts) -> Iterator[Alteration]:
    """Layers that are given what another layer is given: the loop over them goes another way."""
    stacks: dict[str, dict[int, Part]] = {}
    for part in model_parts.tape.parts:
        found = _LAST.search(part.path)
        if found and part.input is not None and part.last > part.first:
            stacks.setdefault(part.path[: found.start()], {}).setdefault(int(found.group()), part)
    for stack in stacks.values():
        streams = {number: part.input for number, part in stack.items()} | {
            number + 1: part.output for number, part in stack.items() if number + 1 not in stack
        }
        for number, part in stack.items():
            for another, stream in streams.items():
                given = part.input
                if another == number or stream is None or given is None:
                    continue
                readers = [user for user in model_parts.tape.users(given) if part.first <= user.number < part.last]
                rewrites = {reader.number: _reads_recorded(given, stream) for reader in readers}
                detail = f"layer {number} is given what layer {another} should be given"
                yield Alteration(where=part.path, rewrites=rewrites, detail=detail, pinned=True)
        last = stack[max(stack)]
        for number, part in stack.items():
            if part.output is not None and last.output is not None and part is not last:
                rewrites = {
                    user.number: _reads_recorded(last.output, part.output)
                    for user in model_parts.tape.users(last.output)
                }
                detail = f"layer {number} was the last one"
                yield Alteration(where=last.path, rewrites=rewrites, detail=detail, pinned=True)


@dataclass(frozen=True)
class _Exchange:
    """A call with the weights of another layer."""

    names: dict[str, Ref]
    stem: str
    layer: int

    def __call__(self, values: Values, call: Call) -> object:
        changed = dict(values.changed)
        for ref in call.reads:
            name = values.tape.weights.get(ref, "")
            if name.startswith(self.stem) and (found := _LAYER.search(name)):
                instead = self.names.get(f"{name[: found.start()]}{self.layer}{name[found.end() :]}")
                if instead is not None:
                    changed[ref] = values.tape[instead]
        return replace(values, changed=changed).run(call)


CAUSES: tuple[Cause, ...] = (
    Sum(
        name="residual missing",
        what="what goes around a branch is not added",
        looks="large differences that grow with depth",
        fix="x + f(x)",
        formula=lambda stream, branch: branch,
    ),
    Sum(
        name="residual doubled",
        what="what goes around a branch is added twice",
        looks="large differences; behind a norm they are moderate",
        fix="add it once: a helper that adds it is called by one that adds it, too",
        formula=lambda stream, branch: 2 * stream + branch,
    ),
    Sum(
        name="branch missing",
        what="a branch is computed and not added",
        looks="large differences",
        fix="x + f(x)",
        formula=lambda stream, branch: stream,
    ),
    BranchScaled(
        name="branch scaled",
        what="what a branch gives is multiplied by a number before it is added",
        looks="differences that grow with depth",
        fix="x + f(x); see residual_multiplier, layer scale and the like in the config",
    ),
    NormBeforeSum(
        name="norm before the sum",
        what="the branch is normed and then added, x + norm(f(x))",
        looks="large differences in every layer",
        fix="norm(x + f(x))",
        wide=True,
        pinned=True,
    ),
    PreForPost(
        name="pre-norm for post-norm",
        what="x + f(norm(x)), where the reference has norm(x + f(x))",
        looks="large differences in every layer; all shapes and names fit",
        fix="norm the sum, norm(x + f(x)): the first transformer and its first encoders are post-norm",
        wide=True,
        pinned=True,
    ),
    PostForPre(
        name="post-norm for pre-norm",
        what="norm(x + f(x)), where the reference has x + f(norm(x))",
        looks="large differences in every layer; all shapes and names fit",
        fix="norm what goes into the branch, and leave the stream as it is: GPT-2 and what came after it are pre-norm",
        wide=True,
        pinned=True,
    ),
    ResidualAfterNorm(
        name="residual taken after the norm",
        what="norm(x) + f(norm(x)): what goes around the branch is normed as well",
        looks="differences that grow with depth",
        fix="keep x before it is normed, and add that",
    ),
    OtherLayer(
        name="layers in another order",
        what="a layer computes with the weights of another: the order is wrong, or one layer is run several times",
        looks="large differences from the first such layer on",
        fix="check the layers' numbers in the table, and the order of the loop over them",
        absorbed_by_weights=True,
    ),
)
