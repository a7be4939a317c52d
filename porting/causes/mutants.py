"""The mistakes of the catalogue that can be planted into any port.

They are independent of the causes that search for them: a cause alters the reference on a tape, a planted mistake
alters the results of the port's own layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from porting.causes import planted as make
from porting.causes.events import Action, InjectedFault


def fault(name: str, **actions: Action) -> InjectedFault:
    """Return a mistake with its actions by kind of event."""
    return InjectedFault(name=name, actions=actions)


PLANTS: tuple[InjectedFault, ...] = (
    fault("LayerNorm eps", norm=make.other_eps),
    fault("RMSNorm eps", rms=make.other_rms_eps),
    fault("LayerNorm with Bessel's correction", norm=make.with_norm(make.bessel)),
    fault("LayerNorm eps outside of the root", norm=make.with_norm(make.eps_outside)),
    fault("RMSNorm for LayerNorm", norm=make.with_norm(make.rms_norm)),
    fault("LayerNorm for RMSNorm", rms=make.with_norm(make.layer_norm)),
    fault("LayerNorm over the wrong axis", norm=make.with_norm(make.over_previous_axis)),
    fault("RMSNorm eps outside of the root", rms=make.with_norm(make.rms_eps_outside)),
    fault("length for root mean square", rms=make.with_norm(make.by_length)),
    fault("LayerNorm gain missing", norm=make.with_norm(make.layer_norm, gain=False)),
    fault("RMSNorm gain missing", rms=make.with_norm(make.rms_norm, gain=False)),
    fault(
        "norm gain with 1 added",
        norm=make.with_norm(make.layer_norm, more=1.0),
        rms=make.with_norm(make.rms_norm, more=1.0),
    ),
    fault(
        "norm gain without 1 added",
        norm=make.with_norm(make.layer_norm, more=-1.0),
        rms=make.with_norm(make.rms_norm, more=-1.0),
    ),
    fault("LayerNorm bias missing", norm=make.with_norm(make.layer_norm, bias=False)),
    fault("norm missing", norm=lambda event: event.args[0], rms=lambda event: event.args[0]),
    fault("exact GELU for another activation", activation=make.with_activation(F.gelu)),
    fault("tanh GELU for another activation", activation=make.with_activation(lambda x: F.gelu(x, approximate="tanh"))),
    fault("quick GELU for another activation", activation=make.with_activation(make.sigmoid_gelu)),
    fault("ReLU for another activation", activation=make.with_activation(lambda x: x.clamp_min(0))),
    fault("SiLU for another activation", activation=make.with_activation(lambda x: x / (1 + torch.exp(-x)))),
    fault("activation missing", activation=make.with_activation(lambda x: x)),
    fault("pooler tanh missing", activation=make.with_activation(lambda x: x, tanh=True)),
    fault("query bias missing", linear=make.without_bias("query")),
    fault("key bias missing", linear=make.without_bias("key")),
    fault("value bias missing", linear=make.without_bias("value")),
    fault("attention output bias missing", linear=make.without_bias("output")),
    fault("linear layer bias missing", linear=make.without_bias("")),
    fault("bias added twice", linear=make.bias_twice),
    fault("square weight transposed", linear=make.transposed),
    fault("query and key swapped", scores=make.with_scores(make.query_for_key)),
    fault("1/sqrt(d) missing", scores=make.with_scores(make.product_times(lambda scores: 1 / scores.scale))),
    fault(
        "1/sqrt(d) twice", scores=make.with_scores(make.product_times(lambda scores: scores.query.shape[-1] ** -0.5))
    ),
    fault("heads not transposed back", context=make.with_context(make.not_transposed)),
    fault("heads merged in the wrong order", context=make.with_context(make.merged_wrongly)),
    fault("softmax over the queries", scores=make.softmax_over(-2)),
    fault("softmax over the heads", scores=make.softmax_over(1)),
    fault("relative position bias missing", scores=make.with_scores(make.bias_times(0.0, linear=False))),
    fault("ALiBi missing", scores=make.with_scores(make.bias_times(0.0, linear=True))),
    fault("ALiBi of the other sign", scores=make.with_scores(make.bias_times(-1.0, linear=True))),
    fault("ALiBi slopes", scores=make.with_scores(make.bias_times(0.5, linear=True))),
    fault("soft cap of scores missing", scores=make.with_scores(make.without_cap)),
    fault("soft cap of scores that should not be there", scores=make.with_scores(make.with_cap)),
    fault("key and value heads tiled", scores=make.with_scores(make.keys_tiled), context=make.values_tiled),
    fault("padding mask ignored", scores=make.with_scores(make.without_padding_mask)),
    fault(
        "padding mask inverted",
        scores=make.with_scores(make.with_padding(lambda product, shown: product - 1e4 * shown)),
    ),
    fault("padding mask multiplied", scores=make.with_scores(make.with_padding(torch.mul))),
    fault("padding mask added as 0 and 1", scores=make.with_scores(make.with_padding(torch.add))),
    fault("padding mask after the softmax", scores=make.mask_after_softmax),
    fault("padding mask on the queries", scores=make.with_scores(make.mask_on_queries)),
    fault("causal mask missing", scores=make.with_scores(make.without_causal_mask)),
    fault("causal mask that should not be there", scores=make.with_scores(make.with_causal_mask)),
    fault(
        "mask precedence",
        scores=make.with_scores(make.with_padding(lambda product, shown: product + (1.0 - shown * -1e4))),
    ),
    fault(
        "token types ignored",
        embedding=lambda event: (
            make.NOT_APPLICABLE
            if make.ids_of(event, "token_type_ids") is None
            else F.embedding(torch.zeros_like(event.args[0]), event.args[1])
        ),
    ),
    fault(
        "token types missing",
        embedding=lambda event: (
            make.NOT_APPLICABLE if make.ids_of(event, "token_type_ids") is None else event.run() * 0
        ),
    ),
    fault("position offset", embedding=make.shifted_position(1)),
    fault("positions missing", embedding=make.with_position(lambda event, ids: event.run() * 0)),
    fault(
        "positions counted from the end",
        embedding=make.with_position(lambda event, ids: F.embedding(ids.flip(-1), event.args[1])),
    ),
    fault("padding word zeroed", embedding=make.with_token(make.padding_zero)),
    fault(
        "vocabulary shifted",
        embedding=make.with_token(lambda event: F.embedding((event.args[0] - 1) % len(event.args[1]), event.args[1])),
    ),
    fault(
        "embedding scale that should not be there",
        embedding=make.with_token(lambda event: event.run() * event.args[1].shape[1] ** 0.5),
    ),
    fault("residual missing", sum=make.with_sum(lambda stream, branch: branch + 0)),
    fault("residual doubled", sum=make.with_sum(lambda stream, branch: stream + stream + branch)),
    fault("branch missing", sum=make.with_sum(lambda stream, branch: stream + 0)),
    fault("layers in another order", linear=make.next_layer, norm=make.next_layer),
    fault("pooled from the wrong place", pool=make.pooled_by(lambda hidden: hidden[:, -1])),
    fault("decoder untied", linear=make.untied_decoder),
    fault("dropout active", dropout=make.dropout_active),
    fault("half-precision linear layer", linear=make.in_lower_dtype(torch.float16)),
    fault("bfloat16 linear layer", linear=make.in_lower_dtype(torch.bfloat16)),
    fault("bfloat16 norm", norm=make.in_lower_dtype(torch.bfloat16)),
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
