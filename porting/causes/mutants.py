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


def one(name: str, **actions: Action) -> InjectedFault:
    """A mistake with its actions by kind of event."""
    return InjectedFault(name=name, actions=actions)


PLANTS: tuple[InjectedFault, ...] = (
    one("LayerNorm eps", norm=other_eps),
    one("RMSNorm eps", rms=other_rms_eps),
    one("LayerNorm with Bessel's correction", norm=norm_of(bessel)),
    one("LayerNorm eps outside of the root", norm=norm_of(outside)),
    one("RMSNorm for LayerNorm", norm=norm_of(rms)),
    one("LayerNorm for RMSNorm", rms=norm_of(plain)),
    one("LayerNorm over the wrong axis", norm=norm_of(across)),
    one("RMSNorm eps outside of the root", rms=norm_of(rms_outside)),
    one("length for root mean square", rms=norm_of(by_length)),
    one("LayerNorm gain missing", norm=norm_of(plain, gain=False)),
    one("RMSNorm gain missing", rms=norm_of(rms, gain=False)),
    one("norm gain with 1 added", norm=norm_of(plain, more=1.0), rms=norm_of(rms, more=1.0)),
    one("norm gain without 1 added", norm=norm_of(plain, more=-1.0), rms=norm_of(rms, more=-1.0)),
    one("LayerNorm bias missing", norm=norm_of(plain, bias=False)),
    one("norm missing", norm=lambda event: event.args[0], rms=lambda event: event.args[0]),
    one("exact GELU for another activation", activation=activation(F.gelu)),
    one("tanh GELU for another activation", activation=activation(lambda x: F.gelu(x, approximate="tanh"))),
    one("quick GELU for another activation", activation=activation(sigmoid_gelu)),
    one("ReLU for another activation", activation=activation(lambda x: x.clamp_min(0))),
    one("SiLU for another activation", activation=activation(lambda x: x / (1 + torch.exp(-x)))),
    one("activation missing", activation=activation(lambda x: x)),
    one("pooler tanh missing", activation=activation(lambda x: x, tanh=True)),
    one("query bias missing", linear=bias_gone("query")),
    one("key bias missing", linear=bias_gone("key")),
    one("value bias missing", linear=bias_gone("value")),
    one("attention output bias missing", linear=bias_gone("output")),
    one("linear layer bias missing", linear=bias_gone("")),
    one("bias added twice", linear=bias_twice),
    one("square weight transposed", linear=transposed),
    one("query and key swapped", scores=with_scores(query_for_key)),
    one("1/sqrt(d) missing", scores=with_scores(times(lambda scores: 1 / scores.scale))),
    one("1/sqrt(d) twice", scores=with_scores(times(lambda scores: scores.query.shape[-1] ** -0.5))),
    one("heads not transposed back", context=heads(untransposed)),
    one("heads merged in the wrong order", context=heads(shuffled)),
    one("softmax over the queries", scores=softmax_over(-2)),
    one("softmax over the heads", scores=softmax_over(1)),
    one("relative position bias missing", scores=with_scores(unbiased)),
    one("ALiBi missing", scores=with_scores(sloped(0.0))),
    one("ALiBi of the other sign", scores=with_scores(sloped(-1.0))),
    one("ALiBi slopes", scores=with_scores(sloped(0.5))),
    one("soft cap of scores missing", scores=with_scores(uncapped)),
    one("soft cap of scores that should not be there", scores=with_scores(capped)),
    one("key and value heads tiled", scores=with_scores(keys_tiled), context=values_tiled),
    one("padding mask ignored", scores=with_scores(unpadded)),
    one("padding mask inverted", scores=with_scores(upside_down)),
    one("padding mask multiplied", scores=with_scores(by_mask(torch.mul))),
    one("padding mask added as 0 and 1", scores=with_scores(by_mask(torch.add))),
    one("padding mask after the softmax", scores=masked_late),
    one("padding mask on the queries", scores=with_scores(rows_masked)),
    one("causal mask missing", scores=with_scores(both_ways)),
    one("causal mask that should not be there", scores=with_scores(one_way)),
    one("mask precedence", scores=with_scores(shifted(10000.0))),
    one(
        "token types ignored",
        embedding=lambda event: (
            SKIP
            if ids_of(event, "token_type_ids") is None
            else F.embedding(torch.zeros_like(event.args[0]), event.args[1])
        ),
    ),
    one(
        "token types missing",
        embedding=lambda event: SKIP if ids_of(event, "token_type_ids") is None else event.run() * 0,
    ),
    one("position offset", embedding=moved(1)),
    one("positions missing", embedding=position(lambda event, ids: event.run() * 0)),
    one(
        "positions counted from the end",
        embedding=position(lambda event, ids: F.embedding(ids.flip(-1), event.args[1])),
    ),
    one("padding word zeroed", embedding=word(padding_zero)),
    one(
        "vocabulary shifted",
        embedding=word(lambda event: F.embedding((event.args[0] - 1) % len(event.args[1]), event.args[1])),
    ),
    one(
        "embedding scale that should not be there",
        embedding=word(lambda event: event.run() * event.args[1].shape[1] ** 0.5),
    ),
    one("residual missing", sum=sum_of(lambda stream, branch: branch + 0)),
    one("residual doubled", sum=sum_of(lambda stream, branch: stream + stream + branch)),
    one("branch missing", sum=sum_of(lambda stream, branch: stream + 0)),
    one("layers in another order", linear=next_layer, norm=next_layer),
    one("pooled from the wrong place", pool=pooled(lambda hidden: hidden[:, -1])),
    one("decoder untied", linear=untied),
    one("dropout active", dropout=drop),
    one("half-precision linear layer", linear=in_dtype(torch.float16)),
    one("bfloat16 linear layer", linear=in_dtype(torch.bfloat16)),
    one("bfloat16 norm", norm=in_dtype(torch.bfloat16)),
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
