"""The mistakes of the catalogue that can be planted into any port.

They are independent of the causes that search for them: a cause alters the reference on a tape, a planted mistake
alters the results of the port's own layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from porting.causes.events import Action, InjectedFault
from porting.causes.planted_attention import (
    NOT_APPLICABLE,
    combined_with_mask,
    inverted_padding_mask,
    keys_tiled,
    linear_bias_times,
    mask_after_softmax,
    mask_on_queries,
    mask_precedence,
    merged_wrongly,
    not_transposed,
    product_times,
    query_for_key,
    softmax_over,
    values_tiled,
    with_cap,
    with_causal_mask,
    with_context,
    with_scores,
    without_cap,
    without_causal_mask,
    without_padding_mask,
    without_score_bias,
)
from porting.causes.planted_layers import (
    bessel,
    bias_twice,
    by_length,
    dropout_active,
    eps_outside,
    ids_of,
    in_lower_dtype,
    layer_norm,
    next_layer,
    other_eps,
    other_rms_eps,
    over_previous_axis,
    padding_zero,
    pooled_by,
    rms_eps_outside,
    rms_norm,
    shifted_position,
    sigmoid_gelu,
    transposed,
    untied_decoder,
    with_activation,
    with_norm,
    with_position,
    with_sum,
    with_token,
    without_bias,
)


def fault(name: str, **actions: Action) -> InjectedFault:
    """Return a mistake with its actions by kind of event."""
    return InjectedFault(name=name, actions=actions)


PLANTS: tuple[InjectedFault, ...] = (
    fault("LayerNorm eps", norm=other_eps),
    fault("RMSNorm eps", rms=other_rms_eps),
    fault("LayerNorm with Bessel's correction", norm=with_norm(bessel)),
    fault("LayerNorm eps outside of the root", norm=with_norm(eps_outside)),
    fault("RMSNorm for LayerNorm", norm=with_norm(rms_norm)),
    fault("LayerNorm for RMSNorm", rms=with_norm(layer_norm)),
    fault("LayerNorm over the wrong axis", norm=with_norm(over_previous_axis)),
    fault("RMSNorm eps outside of the root", rms=with_norm(rms_eps_outside)),
    fault("length for root mean square", rms=with_norm(by_length)),
    fault("LayerNorm gain missing", norm=with_norm(layer_norm, gain=False)),
    fault("RMSNorm gain missing", rms=with_norm(rms_norm, gain=False)),
    fault("norm gain with 1 added", norm=with_norm(layer_norm, more=1.0), rms=with_norm(rms_norm, more=1.0)),
    fault("norm gain without 1 added", norm=with_norm(layer_norm, more=-1.0), rms=with_norm(rms_norm, more=-1.0)),
    fault("LayerNorm bias missing", norm=with_norm(layer_norm, bias=False)),
    fault("norm missing", norm=lambda event: event.args[0], rms=lambda event: event.args[0]),
    fault("exact GELU for another activation", activation=with_activation(F.gelu)),
    fault("tanh GELU for another activation", activation=with_activation(lambda x: F.gelu(x, approximate="tanh"))),
    fault("quick GELU for another activation", activation=with_activation(sigmoid_gelu)),
    fault("ReLU for another activation", activation=with_activation(lambda x: x.clamp_min(0))),
    fault("SiLU for another activation", activation=with_activation(lambda x: x / (1 + torch.exp(-x)))),
    fault("activation missing", activation=with_activation(lambda x: x)),
    fault("pooler tanh missing", activation=with_activation(lambda x: x, tanh=True)),
    fault("query bias missing", linear=without_bias("query")),
    fault("key bias missing", linear=without_bias("key")),
    fault("value bias missing", linear=without_bias("value")),
    fault("attention output bias missing", linear=without_bias("output")),
    fault("linear layer bias missing", linear=without_bias("")),
    fault("bias added twice", linear=bias_twice),
    fault("square weight transposed", linear=transposed),
    fault("query and key swapped", scores=with_scores(query_for_key)),
    fault("1/sqrt(d) missing", scores=with_scores(product_times(lambda scores: 1 / scores.scale))),
    fault("1/sqrt(d) twice", scores=with_scores(product_times(lambda scores: scores.query.shape[-1] ** -0.5))),
    fault("heads not transposed back", context=with_context(not_transposed)),
    fault("heads merged in the wrong order", context=with_context(merged_wrongly)),
    fault("softmax over the queries", scores=softmax_over(-2)),
    fault("softmax over the heads", scores=softmax_over(1)),
    fault("relative position bias missing", scores=with_scores(without_score_bias)),
    fault("ALiBi missing", scores=with_scores(linear_bias_times(0.0))),
    fault("ALiBi of the other sign", scores=with_scores(linear_bias_times(-1.0))),
    fault("ALiBi slopes", scores=with_scores(linear_bias_times(0.5))),
    fault("soft cap of scores missing", scores=with_scores(without_cap)),
    fault("soft cap of scores that should not be there", scores=with_scores(with_cap)),
    fault("key and value heads tiled", scores=with_scores(keys_tiled), context=values_tiled),
    fault("padding mask ignored", scores=with_scores(without_padding_mask)),
    fault("padding mask inverted", scores=with_scores(inverted_padding_mask)),
    fault("padding mask multiplied", scores=with_scores(combined_with_mask(torch.mul))),
    fault("padding mask added as 0 and 1", scores=with_scores(combined_with_mask(torch.add))),
    fault("padding mask after the softmax", scores=mask_after_softmax),
    fault("padding mask on the queries", scores=with_scores(mask_on_queries)),
    fault("causal mask missing", scores=with_scores(without_causal_mask)),
    fault("causal mask that should not be there", scores=with_scores(with_causal_mask)),
    fault("mask precedence", scores=with_scores(mask_precedence(10000.0))),
    fault(
        "token types ignored",
        embedding=lambda event: (
            NOT_APPLICABLE
            if ids_of(event, "token_type_ids") is None
            else F.embedding(torch.zeros_like(event.args[0]), event.args[1])
        ),
    ),
    fault(
        "token types missing",
        embedding=lambda event: NOT_APPLICABLE if ids_of(event, "token_type_ids") is None else event.run() * 0,
    ),
    fault("position offset", embedding=shifted_position(1)),
    fault("positions missing", embedding=with_position(lambda event, ids: event.run() * 0)),
    fault(
        "positions counted from the end",
        embedding=with_position(lambda event, ids: F.embedding(ids.flip(-1), event.args[1])),
    ),
    fault("padding word zeroed", embedding=with_token(padding_zero)),
    fault(
        "vocabulary shifted",
        embedding=with_token(lambda event: F.embedding((event.args[0] - 1) % len(event.args[1]), event.args[1])),
    ),
    fault(
        "embedding scale that should not be there",
        embedding=with_token(lambda event: event.run() * event.args[1].shape[1] ** 0.5),
    ),
    fault("residual missing", sum=with_sum(lambda stream, branch: branch + 0)),
    fault("residual doubled", sum=with_sum(lambda stream, branch: stream + stream + branch)),
    fault("branch missing", sum=with_sum(lambda stream, branch: stream + 0)),
    fault("layers in another order", linear=next_layer, norm=next_layer),
    fault("pooled from the wrong place", pool=pooled_by(lambda hidden: hidden[:, -1])),
    fault("decoder untied", linear=untied_decoder),
    fault("dropout active", dropout=dropout_active),
    fault("half-precision linear layer", linear=in_lower_dtype(torch.float16)),
    fault("bfloat16 linear layer", linear=in_lower_dtype(torch.bfloat16)),
    fault("bfloat16 norm", norm=in_lower_dtype(torch.bfloat16)),
)

ALIASES: Mapping[str, tuple[str, ...]] = {
    "norm missing": (
        "query and key norm missing",
        "norm missing in a layer",
        "norm missing in the head",
        "embedding norm missing",
        "final norm missing",
    ),
    "half-precision linear layer": ("half-precision linear layer", "float16 autocast"),
    "bfloat16 linear layer": ("bfloat16 linear layer", "bfloat16 autocast"),
    "linear layer bias missing": ("linear layer bias missing", "decoder bias missing"),
}
"""Mistakes whose name depends on where they are."""


def truth(name: str) -> tuple[str, ...]:
    """Return the entries of the catalogue whose names a planted mistake may get."""
    return ALIASES.get(name, (name,))


def planted(name: str) -> Iterator[InjectedFault]:
    """Yield the mistake with a name."""
    return (fault for fault in PLANTS if fault.name == name)
