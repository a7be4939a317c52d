"""Norms that stand at the other end of a branch than the reference's (Walsh et al. 2024, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from porting.causes.cause import Cause, alter, run_with
from porting.causes.model_parts import ModelParts
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.structure import Block, behind, pre_norm
from porting.causes.tape import Call, Ref

Stream = Callable[[Values], Tensor]
"""What flows into a block, or out of it."""


def normed_branch(model_parts: ModelParts) -> Iterator[Block]:
    """``x + norm(f(x))``: each sum whose branch ends with a norm, and reads the stream without one."""
    before = {block.sum.call.number for block in pre_norm(model_parts)}
    for residual in model_parts.residuals:
        ends = behind(model_parts, residual.branch)
        for norm in model_parts.norms:
            if norm.output in ends and residual.call.number not in before:
                yield Block(residual, norm)


class NormBehind(Cause):
    """``x + norm(f(x))`` for ``x + f(norm(x))``."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each pre-norm block, as its norm, its branch's input or its sum shows it."""
        before: list[Stream] = []
        for block in sorted(pre_norm(model_parts), key=lambda block: block.sum.call.number):
            norm, branch = block.norm, _now(block.sum.branch)
            yield alter(norm.call, _gives(_normed(block, branch)))
            readers = model_parts.tape.users(norm.output)
            streams = [_now(block.sum.stream), *before]
            ends = [_normed(block, branch), _recorded(norm.output)]
            yield from _read_and_summed(block, readers, norm.output, streams, streams, ends)
            before = [_sum(_now(block.sum.stream), end) for end in ends]


class NormBefore(Cause):
    """``x + f(norm(x))`` for ``x + norm(f(x))``."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each block whose branch ends with a norm, as its norm, its branch's input or its sum shows it."""
        before: list[Stream] = []
        for block in sorted(normed_branch(model_parts), key=lambda block: block.sum.call.number):
            norm, branch, stream = block.norm, _now(block.norm.input), block.sum.stream
            streams = [_now(stream), *before]
            inside = {call.number for call in model_parts.tape.before(block.sum.branch)}
            readers = [call for call in model_parts.tape.users(stream) if call.number in inside]
            for candidate in streams:
                yield alter(norm.call, _gives(_normed(block, candidate)))
            given = [_recorded(norm.output), *(_normed(block, candidate) for candidate in streams)]
            yield from _read_and_summed(block, readers, stream, given, streams, [branch])
            before = [_sum(_now(stream), branch)]


def _read_and_summed(
    block: Block, readers: Sequence[Call], ref: Ref, given: list[Stream], streams: list[Stream], ends: list[Stream]
) -> Iterator[Alteration]:
    """A block whose branch reads something else, whose sum is another one, and both at once."""
    where, last = block.norm.call.module, block.sum.call
    reading: list[dict[int, Rewrite]] = [
        {call.number: _reads(ref, replacement) for call in readers} for replacement in given
    ]
    summing: list[dict[int, Rewrite]] = [{last.number: _gives(_sum(stream, end))} for stream in streams for end in ends]
    for rewrites in (*reading, *summing, *({**read_rewrites, **two} for read_rewrites in reading for two in summing)):
        yield Alteration(where=where, rewrites=rewrites)


def _now(ref: Ref) -> Stream:
    return lambda values: values[ref]


def _recorded(ref: Ref) -> Stream:
    """As a probe holds it."""
    return lambda values: values.tape[ref]


def _normed(block: Block, stream: Stream) -> Stream:
    return lambda values: block.norm.whole(stream(values), values)


def _sum(first: Stream, another: Stream) -> Stream:
    return lambda values: first(values) + another(values)


def _gives(stream: Stream) -> Rewrite:
    return lambda values, call: stream(values)


def _reads(ref: Ref, stream: Stream) -> Rewrite:
    return lambda values, call: run_with(values, call, ref, stream(values))


CAUSES: tuple[Cause, ...] = (
    NormBehind(
        name="norm behind the branch",
        what="x + norm(f(x)), where the reference has x + f(norm(x))",
        looks="large differences in every layer; all shapes and names fit",
        fix="norm what goes into the branch: Llama; OLMo 2 norms what comes out of it, and Gemma 2 both",
        wide=True,
        pinned=True,
    ),
    NormBefore(
        name="norm before the branch",
        what="x + f(norm(x)), where the reference has x + norm(f(x))",
        looks="large differences in every layer; all shapes and names fit",
        fix="norm what comes out of the branch: OLMo 2; Llama norms what goes into it, and Gemma 2 both",
        wide=True,
        pinned=True,
    ),
)
