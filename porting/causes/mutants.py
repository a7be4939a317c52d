"""Every mistake of the catalogue that can be planted into any port: what its layers then do.

Written apart from the entries that look for them: those alter the reference on a tape, these alter what the port's own
layers are given and give.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from porting.causes.events import Action, InjectedFault
from porting.causes.planted_attention import (
    SKIP,
    both_ways,
    by_mask,
    capped,
    heads,
    keys_tiled,
    masked_late,
    one_way,
    query_for_key,
    rows_masked,
    shifted,
    shuffled,
    sloped,
    softmax_over,
    times,
    unbiased,
    uncapped,
    unpadded,
    untransposed,
    upside_down,
    values_tiled,
    with_scores,
)
from porting.causes.planted_layers import (
    across,
    activation,
    bessel,
    bias_gone,
    bias_twice,
    by_length,
    drop,
    ids_of,
    in_dtype,
    moved,
    next_layer,
    norm_of,
    other_eps,
    other_rms_eps,
    outside,
    padding_zero,
    plain,
    pooled,
    position,
    rms,
    rms_outside,
    sigmoid_gelu,
    sum_of,
    transposed,
    untied,
    word,
)


def fault(name: str, **actions: Action) -> InjectedFault:
    """A mistake with its actions by kind of event."""
    return InjectedFault(name=name, actions=actions)


PLANTS: tuple[InjectedFault, ...] = (
    fault("LayerNorm eps", norm=other_eps),
    fault("RMSNorm eps", rms=other_rms_eps),
    fault("LayerNorm with Bessel's correction", norm=norm_of(bessel)),
    fault("LayerNorm eps outside of the root", norm=norm_of(outside)),
    fault("RMSNorm for LayerNorm", norm=norm_of(rms)),
    fault("LayerNorm for RMSNorm", rms=norm_of(plain)),
    fault("LayerNorm over the wrong axis", norm=norm_of(across)),
    fault("RMSNorm eps outside of the root", rms=norm_of(rms_outside)),
    fault("length for root mean square", rms=norm_of(by_length)),
    fault("LayerNorm gain missing", norm=norm_of(plain, gain=False)),
    fault("RMSNorm gain missing", rms=norm_of(rms, gain=False)),
    fault("norm gain with 1 added", norm=norm_of(plain, more=1.0), rms=norm_of(rms, more=1.0)),
    fault("norm gain without 1 added", norm=norm_of(plain, more=-1.0), rms=norm_of(rms, more=-1.0)),
    fault("LayerNorm bias missing", norm=norm_of(plain, bias=False)),
    fault("norm missing", norm=lambda event: event.args[0], rms=lambda event: event.args[0]),
    fault("exact GELU for another activation", activation=activation(F.gelu)),
    fault("tanh GELU for another activation", activation=activation(lambda x: F.gelu(x, approximate="tanh"))),
    fault("quick GELU for another activation", activation=activation(sigmoid_gelu)),
    fault("ReLU for another activation", activation=activation(lambda x: x.clamp_min(0))),
    fault("SiLU for another activation", activation=activation(lambda x: x / (1 + torch.exp(-x)))),
    fault("activation missing", activation=activation(lambda x: x)),
    fault("pooler tanh missing", activation=activation(lambda x: x, tanh=True)),
    fault("query bias missing", linear=bias_gone("query")),
    fault("key bias missing", linear=bias_gone("key")),
    fault("value bias missing", linear=bias_gone("value")),
    fault("attention output bias missing", linear=bias_gone("output")),
    fault("linear layer bias missing", linear=bias_gone("")),
    fault("bias added twice", linear=bias_twice),
    fault("square weight transposed", linear=transposed),
    fault("query and key swapped", scores=with_scores(query_for_key)),
    fault("1/sqrt(d) missing", scores=with_scores(times(lambda scores: 1 / scores.scale))),
    fault("1/sqrt(d) twice", scores=with_scores(times(lambda scores: scores.query.shape[-1] ** -0.5))),
    fault("heads not transposed back", context=heads(untransposed)),
    fault("heads merged in the wrong order", context=heads(shuffled)),
    fault("softmax over the queries", scores=softmax_over(-2)),
    fault("softmax over the heads", scores=softmax_over(1)),
    fault("relative position bias missing", scores=with_scores(unbiased)),
    fault("ALiBi missing", scores=with_scores(sloped(0.0))),
    fault("ALiBi of the other sign", scores=with_scores(sloped(-1.0))),
    fault("ALiBi slopes", scores=with_scores(sloped(0.5))),
    fault("soft cap of scores missing", scores=with_scores(uncapped)),
    fault("soft cap of scores that should not be there", scores=with_scores(capped)),
    fault("key and value heads tiled", scores=with_scores(keys_tiled), context=values_tiled),
    fault("padding mask ignored", scores=with_scores(unpadded)),
    fault("padding mask inverted", scores=with_scores(upside_down)),
    fault("padding mask multiplied", scores=with_scores(by_mask(torch.mul))),
    fault("padding mask added as 0 and 1", scores=with_scores(by_mask(torch.add))),
    fault("padding mask after the softmax", scores=masked_late),
    fault("padding mask on the queries", scores=with_scores(rows_masked)),
    fault("causal mask missing", scores=with_scores(both_ways)),
    fault("causal mask that should not be there", scores=with_scores(one_way)),
    fault("mask precedence", scores=with_scores(shifted(10000.0))),
    fault(
        "token types ignored",
        embedding=lambda event: (
            SKIP
            if ids_of(event, "token_type_ids") is None
            else F.embedding(torch.zeros_like(event.args[0]), event.args[1])
        ),
    ),
    fault(
        "token types missing",
        embedding=lambda event: SKIP if ids_of(event, "token_type_ids") is None else event.run() * 0,
    ),
    fault("position offset", embedding=moved(1)),
    fault("positions missing", embedding=position(lambda event, ids: event.run() * 0)),
    fault(
        "positions counted from the end",
        embedding=position(lambda event, ids: F.embedding(ids.flip(-1), event.args[1])),
    ),
    fault("padding word zeroed", embedding=word(padding_zero)),
    fault(
        "vocabulary shifted",
        embedding=word(lambda event: F.embedding((event.args[0] - 1) % len(event.args[1]), event.args[1])),
    ),
    fault(
        "embedding scale that should not be there",
        embedding=word(lambda event: event.run() * event.args[1].shape[1] ** 0.5),
    ),
    fault("residual missing", sum=sum_of(lambda stream, branch: branch + 0)),
    fault("residual doubled", sum=sum_of(lambda stream, branch: stream + stream + branch)),
    fault("branch missing", sum=sum_of(lambda stream, branch: stream + 0)),
    fault("layers in another order", linear=next_layer, norm=next_layer),
    fault("pooled from the wrong place", pool=pooled(lambda hidden: hidden[:, -1])),
    fault("decoder untied", linear=untied),
    fault("dropout active", dropout=drop),
    fault("half-precision linear layer", linear=in_dtype(torch.float16)),
    fault("bfloat16 linear layer", linear=in_dtype(torch.bfloat16)),
    fault("bfloat16 norm", norm=in_dtype(torch.bfloat16)),
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
"""Mistakes that have several names, by where they are."""


def truth(name: str) -> tuple[str, ...]:
    """The entries of the catalogue that a planted mistake may be named."""
    return ALIASES.get(name, (name,))


def planted(name: str) -> Iterator[InjectedFault]:
    """The mistake of that name."""
    return (fault for fault in PLANTS if fault.name == name)
