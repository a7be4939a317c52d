"""The computations on the last hidden states: pooling, the head's transform, the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from porting.causes.cause import Cause, alter, free_parameter, map_result, replace_with
from porting.causes.fitting import FreeParameter, geometric
from porting.causes.model_parts import ModelParts
from porting.causes.projections import added_biases, role_of
from porting.causes.replay import Alteration
from porting.causes.tape import Call, Ref


def pooling_calls(model_parts: ModelParts) -> Iterator[tuple[Call, Ref]]:
    """Yield the calls that take one vector [b e] from each row of [b s e]."""
    tape = model_parts.tape
    for call in model_parts.called("__getitem__", "select", "index_select", "mean", "squeeze"):
        source = call.reads[0]
        hidden, vector = tape[source], tape[call.result]
        if tape.learned(source) and hidden.ndim == 3 and vector.shape == (hidden.shape[0], hidden.shape[2]):
            yield call, source


def mean_of(hidden: Tensor, kept: Tensor) -> Tensor:
    """Return the mean [b e] of the positions of [b s e] at which ``kept`` [b s 1] is 1."""
    return (hidden * kept).sum(1) / kept.sum(1)


@dataclass(frozen=True, kw_only=True)
class PooledOtherwise(Cause):
    """A text's vector is computed by another rule.

    Attributes:
        rules: the details and functions of the rules, [b s e] -> [b e].
    """

    rules: tuple[tuple[str, Callable[[Tensor], Tensor]], ...]

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each pooling with each rule, and with the mean of what is not padding."""
        mask = model_parts.inputs.get("attention_mask")
        for call, source in pooling_calls(model_parts):
            for detail, rule in self.rules:
                yield alter(call, replace_with(source, rule), detail)
            if mask is not None and mask.shape == model_parts.tape[source].shape[:2]:
                kept = mask.to(model_parts.tape[source].dtype)[..., None]
                yield alter(call, replace_with(source, partial(mean_of, kept=kept)), "the mean of what is not padding")


class TransformSkipped(Cause):
    """The decoder reads the hidden states, without the head's dense layer."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each decoder that follows a dense layer of the same width."""
        for decoder in model_parts.linears:
            if role_of(decoder, model_parts) != "decoder":
                continue
            width = model_parts.tape[decoder.input].shape[-1]
            number = decoder.call.number
            dense = [
                linear
                for linear in model_parts.linears
                if linear.call.number < number and role_of(linear, model_parts) == "other"
            ]
            last = dense[-1] if dense else None
            calls = {call.number for call in model_parts.tape.before(decoder.input)}
            if last is not None and last.call.number in calls and model_parts.tape[last.input].shape[-1] == width:
                maker = model_parts.tape.maker(decoder.input)
                if maker is not None:
                    yield alter(maker, replace_with(last.input))


class LogitScale(Cause):
    """The logits are multiplied by a number."""

    def free_parameters(self, model_parts: ModelParts) -> Iterator[FreeParameter]:
        """Yield the factor of each decoder's result, with its bias."""
        biased = {linear: call for call, linear, _ in added_biases(model_parts)}
        for decoder in model_parts.linears:
            if role_of(decoder, model_parts) == "decoder":
                call = biased.get(decoder, decoder.call)
                detail = "logits are multiplied by {}".format
                yield free_parameter(
                    call, lambda factor: map_result(lambda value: factor * value), detail, geometric(1e-4, 1e3, 3)
                )


CAUSES: tuple[Cause, ...] = (
    PooledOtherwise(
        name="pooled from the wrong place",
        what="the text's vector is taken from another token, or is a mean",
        looks="the layers agree, the pooled vector does not",
        fix="use the token that the reference uses: usually hidden[:, 0] in an encoder, and in a decoder the last that "
        "is not padding, hidden[rows, mask.sum(1) - 1] where rows are padded at their ends",
        rules=(
            ("the last token", lambda hidden: hidden[:, -1]),
            ("the second token", lambda hidden: hidden[:, 1]),
            ("the first token", lambda hidden: hidden[:, 0]),
            ("the mean of all tokens", lambda hidden: hidden.mean(1)),
            ("the maximum of all tokens", lambda hidden: hidden.amax(1)),
        ),
    ),
    TransformSkipped(
        name="transform skipped",
        what="the decoder is applied to the hidden states without the dense layer, activation and norm before it",
        looks="the layers agree, the logits do not",
        fix="dense, activation, norm, decoder",
    ),
    LogitScale(
        name="logits scaled",
        what="the logits are multiplied by a number, unlike in the reference",
        looks="the most likely token is the same, its probability is not",
        fix="see logit_scale, logits_scaling and tie_word_embeddings in the config; T5 scales tied logits",
    ),
)
