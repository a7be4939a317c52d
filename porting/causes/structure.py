"""How the parts of a model are put together: residual sums, the position of norms, the order of the layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from porting.causes.cause import Cause, alter, combine, free_parameter, replace_with, run_with
from porting.causes.fitting import FreeParameter, geometric
from porting.causes.functions import CASTING, SUM
from porting.causes.model_parts import ModelParts, Residual
from porting.causes.norming import Norm
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.step_differences import generic_path
from porting.causes.tape import Call, Part, Ref

# ------------------------------------------------------------------------------------------------------ residual sums


@dataclass(frozen=True, kw_only=True)
class OtherSum(Cause):
    """A residual sum by another formula.

    Attributes:
        formula: the stream and the branch -> what the port has for their sum.
    """

    formula: Callable[[Tensor, Tensor], Tensor]

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each residual sum."""
        for residual in model_parts.residuals:
            yield alter(residual.call, combine(residual.stream, residual.branch, self.formula))


class BranchScaled(Cause):
    """A branch is multiplied by a number."""

    def free_parameters(self, model_parts: ModelParts) -> Iterator[FreeParameter]:
        """Yield the factor of each residual sum's branch."""
        for residual in model_parts.residuals:
            detail = "a branch is multiplied by {} before it is added".format
            yield free_parameter(residual.call, partial(self._scaled, residual), detail, geometric(1e-3, 1e2, 3))

    @staticmethod
    def _scaled(residual: Residual, factor: float) -> Rewrite:
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


def same_values(model_parts: ModelParts, ref: Ref) -> set[Ref]:
    """Return a tensor and those before it that differ only by a cast or by dropout that is off."""
    refs = {ref}
    while (call := model_parts.tape.maker(ref)) is not None and call.name in ("dropout", *CASTING):
        ref = call.reads[0]
        refs.add(ref)
    return refs


def post_norm(model_parts: ModelParts) -> list[Block]:
    """Return the blocks ``norm(x + f(x))``: sums that only a norm reads."""
    blocks = []
    for norm in model_parts.norms:
        inputs = same_values(model_parts, norm.input)
        for residual in model_parts.residuals:
            users = model_parts.tape.users(residual.call.result)
            readers = {call.number for call in users if call.name not in ("dropout", *CASTING)}
            if residual.call.result in inputs and readers == {norm.call.number}:
                blocks.append(Block(residual, norm))
    return sorted(blocks, key=lambda block: block.sum.call.number)


def pre_norm(model_parts: ModelParts) -> list[Block]:
    """Return the blocks ``x + f(norm(x))``: sums whose branch reads the stream through a norm."""
    blocks = []
    for residual in model_parts.residuals:
        streams = same_values(model_parts, residual.stream)
        inside = range(residual.stream.number + 1, residual.branch.number)
        blocks += [
            Block(residual, norm)
            for norm in model_parts.norms
            if norm.call.result.number in inside and norm.input in streams
        ]
    return sorted(blocks, key=lambda block: block.sum.call.number)


def normed_branch(model_parts: ModelParts) -> list[Block]:
    """Return the blocks ``x + norm(f(x))``: sums whose branch ends with a norm and reads the stream without one."""
    pre_norm_sums = {block.sum.call.number for block in pre_norm(model_parts)}
    blocks = [
        Block(residual, norm)
        for residual in model_parts.residuals
        if residual.call.number not in pre_norm_sums
        for norm in model_parts.norms
        if norm.output in same_values(model_parts, residual.branch)
    ]
    return sorted(blocks, key=lambda block: block.sum.call.number)


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


Moved = Callable[[ModelParts, Block], dict[int, Rewrite]]
"""A block -> the rewritten calls with which its norm stands elsewhere."""


def _in_all_layers(changes: Sequence[tuple[Norm, dict[int, Rewrite]]]) -> Iterator[Alteration]:
    """Yield all changes of norms at once, then the same norm of every layer, such as the attention's."""
    alike: dict[str, list[dict[int, Rewrite]]] = {}
    for norm, rewrites in changes:
        alike.setdefault(generic_path(norm.call.module), []).append(rewrites)
    groups = {name: some for name, some in alike.items() if 1 < len(some) < len(changes)}
    for where, some in {"": [rewrites for _, rewrites in changes], **groups}.items():
        together = {number: rewrite for rewrites in some for number, rewrite in rewrites.items()}
        if together:
            yield Alteration(where=where, rewrites=together, detail="in all layers")


@dataclass(frozen=True, kw_only=True)
class NormElsewhere(Cause):
    """The norm of a block stands in another place.

    Attributes:
        moved: the rewritten calls of a block.
    """

    blocks: Callable[[ModelParts], list[Block]]
    moved: Moved

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each block alone."""
        for block in self.blocks(model_parts):
            yield Alteration(where=block.norm.call.module, rewrites=self.moved(model_parts, block))

    def whole(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield all blocks at once, then the same block of every layer, such as the attention's."""
        return _in_all_layers([(block.norm, self.moved(model_parts, block)) for block in self.blocks(model_parts)])


def _total(block: Block, branch: Stream) -> dict[int, Rewrite]:
    """Add another branch to the stream."""
    return {block.sum.call.number: _gives(_sum(_current(block.sum.stream), branch))}


def _normed_total(block: Block, branch: Stream) -> dict[int, Rewrite]:
    """Normalise the sum of the stream and a branch."""
    return {block.sum.call.number: _gives(_normed(block.norm, _sum(_current(block.sum.stream), branch)))}


def _no_norm(block: Block) -> dict[int, Rewrite]:
    return {block.norm.call.number: replace_with(block.norm.input)}


def _normed_input(model_parts: ModelParts, block: Block) -> dict[int, Rewrite]:
    """Normalise what the branch reads."""
    source = block.sum.stream
    normed = _reads(source, _normed(block.norm, _current(source)))
    return {reader.number: normed for reader in _branch_readers(model_parts, block)}


def sandwiched(model_parts: ModelParts) -> list[Block]:
    """Return the sums whose branch ends with a norm, whatever it begins with."""
    return [
        Block(residual, norm)
        for residual in model_parts.residuals
        for norm in model_parts.norms
        if norm.output in same_values(model_parts, residual.branch)
    ]


class ResidualAfterNorm(Cause):
    """``norm(x) + f(norm(x))`` for ``x + f(norm(x))``."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each pre-norm block."""
        for block in pre_norm(model_parts):
            yield alter(block.sum.call, combine(block.norm.output, block.sum.branch, torch.add))


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
                values = same_values(model_parts, stream)
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
            if first.sum.call.result in same_values(model_parts, later.sum.stream):
                readers = _readers(model_parts, later.norm, later.sum.branch)
                alone = len(readers) == len(model_parts.tape.users(later.norm.output))
                if readers:
                    yield Reading(later.norm, [] if alone else readers, _current(first.sum.stream))


@dataclass(frozen=True, kw_only=True)
class OtherStream(Cause):
    """A branch reads the norm of another stream.

    Attributes:
        readings: what the port may read otherwise.
    """

    readings: Callable[[ModelParts], Iterator[Reading]]

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each branch alone."""
        for one in self.readings(model_parts):
            yield Alteration(where=one.norm.call.module, rewrites=self._rewrites(one))

    def whole(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield all branches at once, then those of the same place in every layer."""
        return _in_all_layers([(one.norm, self._rewrites(one)) for one in self.readings(model_parts)])

    @staticmethod
    def _rewrites(reading: Reading) -> dict[int, Rewrite]:
        normed = _normed(reading.norm, reading.stream)
        if not reading.readers:
            return {reading.norm.call.number: _gives(normed)}
        return {reader.number: _reads(reading.norm.output, normed) for reader in reading.readers}


# --------------------------------------------------------------------------------------------- the order of the layers

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_LAST = re.compile(r"(?<=\.)\d+$")


class OtherLayer(Cause):
    """A layer that computes with the weights of another one, or on the input of another one."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each pair of layers in one stack."""
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
                    exchange = _LayerWeights(names, stem, other)
                    rewrites: dict[int, Rewrite] = {call.number: exchange for call in calls}
                    yield Alteration(where=f"{stem}{number}", rewrites=rewrites, detail=detail)
        yield from _other_inputs(model_parts)


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


@dataclass(frozen=True)
class _LayerWeights:
    """A rewrite that runs a call with the weights of another layer."""

    names: dict[str, Ref]
    stem: str
    layer: int

    def __call__(self, values: Values, call: Call) -> object:
        changed = dict(values.changed)
        for ref in call.reads:
            name = values.tape.weights.get(ref, "")
            if name.startswith(self.stem) and (match := _LAYER.search(name)):
                replacement = self.names.get(f"{name[: match.start()]}{self.layer}{name[match.end() :]}")
                if replacement is not None:
                    changed[ref] = values.tape[replacement]
        return replace(values, changed=changed).run(call)


CAUSES: tuple[Cause, ...] = (
    OtherSum(
        name="residual missing",
        what="the residual stream is not added to the branch",
        looks="large differences that grow with depth",
        fix="x + f(x)",
        formula=lambda stream, branch: branch,
    ),
    OtherSum(
        name="residual doubled",
        what="the residual stream is added twice",
        looks="large differences, smaller after a norm",
        fix="add it once: check whether two nested functions both add it",
        formula=lambda stream, branch: 2 * stream + branch,
    ),
    OtherSum(
        name="branch missing",
        what="a branch is computed but not added",
        looks="large differences",
        fix="x + f(x)",
        formula=lambda stream, branch: stream,
    ),
    BranchScaled(
        name="branch scaled",
        what="the branch is multiplied by a number before it is added",
        looks="differences that grow with depth",
        fix="x + f(x); see residual_multiplier or layer scale in the config",
    ),
    NormElsewhere(
        name="norm before the sum",
        what="x + norm(f(x)) instead of norm(x + f(x))",
        looks="large differences in every layer",
        fix="norm(x + f(x))",
        blocks=post_norm,
        moved=lambda parts, block: {
            **_no_norm(block),
            **_total(block, _normed(block.norm, _current(block.sum.branch))),
        },
    ),
    NormElsewhere(
        name="pre-norm for post-norm",
        what="x + f(norm(x)) instead of norm(x + f(x))",
        looks="large differences in every layer; all shapes and names fit",
        fix="normalise the sum, norm(x + f(x)): as in the original transformer",
        blocks=post_norm,
        moved=lambda parts, block: {**_no_norm(block), **_normed_input(parts, block)},
    ),
    NormElsewhere(
        name="post-norm for pre-norm",
        what="norm(x + f(x)) instead of x + f(norm(x))",
        looks="large differences in every layer; all shapes and names fit",
        fix="normalise the branch's input only: GPT-2 and most later models are pre-norm",
        blocks=pre_norm,
        moved=lambda parts, block: {**_no_norm(block), **_normed_total(block, _current(block.sum.branch))},
    ),
    NormElsewhere(
        name="norm of the sum for that of the branch",
        what="norm(x + f(x)) instead of x + norm(f(x))",
        looks="the residual stream is normalised in every layer; all shapes and names fit",
        fix="normalise the branch, and add it to x then: as OLMo 2 and Gemma 2 do",
        blocks=sandwiched,
        moved=lambda parts, block: _normed_total(block, _current(block.norm.input)),
    ),
    OtherStream(
        name="branches one after the other",
        what="x + f(x) is what the second branch reads, where the reference gives both branches x",
        looks="large differences in every layer; all shapes and names fit",
        fix="x + attention(norm(x)) + mlp(norm(x)): as in GPT-J, GPT-NeoX, Phi and Falcon",
        readings=side_by_side,
    ),
    OtherStream(
        name="branches side by side",
        what="both branches read x, where the reference's second one reads x + f(x)",
        looks="large differences in every layer; all shapes and names fit",
        fix="x = x + attention(norm(x)), then x + mlp(norm(x)): as in GPT-2 and Llama",
        readings=one_after_the_other,
    ),
    ResidualAfterNorm(
        name="residual taken after the norm",
        what="norm(x) + f(norm(x)): the residual stream is normalised, too",
        looks="differences that grow with depth",
        fix="add x as it was before the norm",
    ),
    OtherLayer(
        name="layers in another order",
        what="a layer uses the weights of another one: the order is wrong, or one layer runs several times",
        looks="large differences, from the first such layer on",
        fix="check the layer numbers in the table, and the order of the loop over the layers",
        absorbed_by_weights=True,
    ),
    NormElsewhere(
        name="norm behind the branch",
        what="x + norm(f(x)) instead of x + f(norm(x))",
        looks="large differences in every layer; all shapes and names fit",
        fix="normalise the branch's input, as Llama does; OLMo 2 normalises its output, Gemma 2 both",
        blocks=pre_norm,
        moved=lambda parts, block: {
            **_no_norm(block),
            **_total(block, _normed(block.norm, _current(block.sum.branch))),
        },
    ),
    NormElsewhere(
        name="norm before the branch",
        what="x + f(norm(x)) instead of x + norm(f(x))",
        looks="large differences in every layer; all shapes and names fit",
        fix="normalise the branch's output, as OLMo 2 does; Llama normalises its input, Gemma 2 both",
        blocks=normed_branch,
        moved=lambda parts, block: {**_no_norm(block), **_normed_input(parts, block)},
    ),
)
