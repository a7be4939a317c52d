"""The computations on the last hidden states: pooling, the head's transform, the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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


POOLING_RULES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "the last token": lambda hidden: hidden[:, -1],
    "the second token": lambda hidden: hidden[:, 1],
    "the first token": lambda hidden: hidden[:, 0],
    "the mean of all tokens": lambda hidden: hidden.mean(1),
    "the mean of all tokens but the first": lambda hidden: hidden[:, 1:].mean(1),
    "the maximum of all tokens": lambda hidden: hidden.amax(1),
}
"""How a text's vector may be computed, [b s e] -> [b e]."""


def _pooled_otherwise(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each pooling with each rule, and with the mean of what is not padding."""
    mask = model_parts.inputs.get("attention_mask")
    for call, source in pooling_calls(model_parts):
        for detail, rule in POOLING_RULES.items():
            yield alter(call, replace_with(source, rule), detail)
        if mask is not None and mask.shape == model_parts.tape[source].shape[:2]:
            kept = mask.to(model_parts.tape[source].dtype)[..., None]
            yield alter(call, replace_with(source, partial(mean_of, kept=kept)), "the mean of what is not padding")


def _without_transform(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each decoder that follows a dense layer of the same width."""
    tape = model_parts.tape
    roles = [(linear, role_of(linear, model_parts)) for linear in model_parts.linears]
    for decoder in (linear for linear, role in roles if role == "decoder"):
        dense = [linear for linear, role in roles if role == "other" and linear.call.number < decoder.call.number]
        maker = tape.maker(decoder.input)
        if not dense or maker is None or tape[dense[-1].input].shape[-1] != tape[decoder.input].shape[-1]:
            continue
        if any(call is dense[-1].call for call in tape.before(decoder.input)):
            yield alter(maker, replace_with(dense[-1].input))


def _solved_scale(model_parts: ModelParts) -> Iterator[FreeParameter]:
    """Yield the factor of each decoder's result, with its bias."""
    biased = {linear: call for call, linear, _ in added_biases(model_parts)}
    for decoder in model_parts.linears:
        if role_of(decoder, model_parts) == "decoder":
            call, detail = biased.get(decoder, decoder.call), "logits are multiplied by {}".format
            yield free_parameter(
                call, lambda factor: map_result(lambda value: factor * value), detail, geometric(1e-4, 1e3, 3)
            )


CAUSES: tuple[Cause, ...] = (
    Cause(
        name="pooled from the wrong place",
        what="the text's vector is taken from another token, or is a mean",
        looks="the layers agree, the pooled vector does not",
        fix="use the token that the reference uses: usually hidden[:, 0] in an encoder, and in a decoder the last that "
        "is not padding, hidden[rows, mask.sum(1) - 1] where rows are padded at their ends",
        alterations=_pooled_otherwise,
    ),
    Cause(
        name="transform skipped",
        what="the decoder is applied to the hidden states without the dense layer, activation and norm before it",
        looks="the layers agree, the logits do not",
        fix="dense, activation, norm, decoder",
        alterations=_without_transform,
    ),
    Cause(
        name="logits scaled",
        what="the logits are multiplied by a number, unlike in the reference",
        looks="the most likely token is the same, its probability is not",
        fix="see logit_scale, logits_scaling and tie_word_embeddings in the config; T5 scales tied logits",
        free_parameters=_solved_scale,
    ),
)
