"""Norms that differ from the reference's: LayerNorm, RMSNorm (Zhang and Sennrich 2019), norms of queries and keys.

Those of queries and keys: Dehghani et al. 2023, section 2.2; Henry et al. 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from porting.causes.attention import Attention, unflat
from porting.causes.cause import Alterations, Cause, FreeParameters, alter, alter_each, replace_with, solve_each
from porting.causes.fitting import geometric
from porting.causes.functions import LAYER, NORMS, RMS
from porting.causes.model_parts import ModelParts
from porting.causes.norming import Norm
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.rotations import Rotation, rotations
from porting.causes.tape import Call, Ref

EPSILONS = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-3)
"""The usual numbers of code, of torch.nn.LayerNorm (1e-5) and of configs; any other is solved for."""

Statistics = Callable[[Tensor, Norm], Tensor]


def affine(
    norm: Norm, formula: Statistics, *, gain: bool = True, bias: bool = True, more: float = 0.0
) -> Callable[[Values, Call], Tensor]:
    """Return the rewrite of a norm with another formula.

    Args:
        formula: the result before gain and bias.
        gain, bias: whether they are applied.
        more: a number that is added to the gain.
    """

    def rewrite(values: Values, call: Call) -> Tensor:
        result = formula(values[norm.input], norm)
        factor = norm.gain(values)
        if gain and factor is not None:
            result = result * (factor + more if more else factor)
        return result + values[norm.bias] if bias and norm.bias is not None else result

    return rewrite


def standard(value: Tensor, norm: Norm, *, eps: float | None = None) -> Tensor:
    """Return the norm's own formula, with another eps if given."""
    return norm.of(value, eps)


def across(value: Tensor, norm: Norm, *, dim: int) -> Tensor:
    """Return the LayerNorm over another axis."""
    centred = value - value.mean(dim, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(dim, keepdim=True) + norm.eps)


def bessel(value: Tensor, norm: Norm) -> Tensor:
    """Return the LayerNorm with the sample variance, the sum of squares over n - 1."""
    return (value - value.mean(-1, keepdim=True)) * torch.rsqrt(value.var(-1, keepdim=True) + norm.eps)


def outside(value: Tensor, norm: Norm) -> Tensor:
    """Return the norm with eps added to the root, and not under it."""
    centred = value - value.mean(-1, keepdim=True) if norm.kind == LAYER else value
    return centred / (centred.square().mean(-1, keepdim=True).sqrt() + norm.eps)


def of_kind(kind: str) -> Statistics:
    """Return the formula of another kind of norm."""
    return lambda value, norm: NORMS[kind](value, norm.eps)


def by_length(value: Tensor, norm: Norm) -> Tensor:
    """Return the tensor divided by its length: the root of the sum of squares, and not of their mean."""
    return value * torch.rsqrt(value.square().sum(-1, keepdim=True) + norm.eps)


def unchanged(value: Tensor, norm: Norm) -> Tensor:
    """Return the tensor as it is."""
    return value


def centred(value: Tensor, norm: Norm) -> Tensor:
    """Return the tensor without its mean."""
    return value - value.mean(-1, keepdim=True)


def _norms(kind: str = "", *, gain: bool = False, bias: bool = False) -> Callable[[ModelParts], list[Norm]]:
    """Return what finds the norms of a kind, or of both, that have a gain or a bias where these are asked for."""
    return lambda model_parts: [
        norm
        for norm in model_parts.norms
        if kind in ("", norm.kind) and not (gain and norm.weight is None) and not (bias and norm.bias is None)
    ]


def _computed(formula: Statistics, kind: str = LAYER) -> Alterations:
    """Return the alterations that compute each norm of a kind by another formula."""
    return alter_each(_norms(kind), lambda norm: affine(norm, formula))


def _without_gain(kind: str) -> Alterations:
    return alter_each(_norms(kind, gain=True), lambda norm: affine(norm, standard, gain=False))


def _without_spread(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each norm that has a gain: with its input as it is, without the bias, and with its mean taken off."""
    for norm in _norms(gain=True)(model_parts):
        yield alter(norm.call, affine(norm, unchanged, bias=False), "the gain alone")
        if norm.bias is not None:
            yield alter(norm.call, affine(norm, unchanged), "gain and bias alone")
        if norm.kind == LAYER:
            yield alter(norm.call, affine(norm, centred), "the mean is taken off and nothing divided")


DEVIATION_EPS = 1e-6
"""The eps of "The Annotated Transformer" (Rush 2018), which divides by ``x.std(-1) + eps``."""

DEVIATION_DETAIL = "eps is added to the standard deviation, and is {}"

EPS_STARTS = geometric(1e-14, 10.0, 1)


def _bessel(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each norm with its own eps under the root, and with 1e-6 added to the standard deviation."""
    for norm in _norms(LAYER)(model_parts):
        yield alter(norm.call, affine(norm, bessel))
        yield alter(norm.call, _over_deviation(norm, DEVIATION_EPS), DEVIATION_DETAIL.format(f"{DEVIATION_EPS:g}"))


def _over_deviation(norm: Norm, eps: float) -> Rewrite:
    return affine(norm, lambda value, norm: centred(value, norm) / (value.std(-1, keepdim=True) + eps))


def _usual_eps(kind: str) -> Alterations:
    """Return the alterations that give each norm of a kind each usual eps."""

    def alterations(model_parts: ModelParts) -> Iterator[Alteration]:
        for norm in _norms(kind)(model_parts):
            for eps in (eps for eps in EPSILONS if eps != norm.eps):
                yield alter(norm.call, _with_eps(norm, eps), _eps_detail(norm).format(f"{eps:.12g}"))

    return alterations


def _solved_eps(kind: str) -> FreeParameters:
    return solve_each(_norms(kind), _with_eps, _eps_detail, EPS_STARTS)


def _with_eps(norm: Norm, eps: float) -> Rewrite:
    return affine(norm, partial(standard, eps=eps))


def _eps_detail(norm: Norm) -> str:
    return f"eps is {{}} where the reference has {norm.eps:.12g}"


EPS_OF = {"group_norm": (4, 1e-5), "batch_norm": (7, 1e-5), "instance_norm": (7, 1e-5), "normalize": (3, 1e-12)}
"""Functions of torch that add an eps, besides norms over the last axis: the place of the argument, and its default."""


@dataclass(frozen=True)
class _EpsCall:
    """A norm over groups, over the batch or over one map, of activations or of weights."""

    call: Call

    @property
    def eps(self) -> float:
        place, default = EPS_OF[self.call.name]
        return float(self.call.argument(place, "eps", default))

    @property
    def detail(self) -> str:
        return f"eps of {self.call.name} is {{}} where the reference has {self.eps:.12g}"

    def with_eps(self, eps: float) -> Rewrite:
        def rewrite(values: Values, call: Call) -> Tensor:
            place, _ = EPS_OF[call.name]
            args, named = call.args[:place], {**call.kwargs, "eps": eps}
            result: Tensor = values.run(replace(call, args=args, kwargs=named))
            return result

        return rewrite


def _eps_calls(model_parts: ModelParts) -> list[_EpsCall]:
    return [_EpsCall(call) for call in model_parts.called(*EPS_OF)]


def _usual_call_eps(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each call with each usual eps."""
    for site in _eps_calls(model_parts):
        for eps in (eps for eps in EPSILONS if eps != site.eps):
            yield alter(site.call, site.with_eps(eps), site.detail.format(f"{eps:.12g}"))


def _over_other_axes(model_parts: ModelParts) -> Iterator[Alteration]:
    for norm in _norms(LAYER)(model_parts):
        for dim in range(-model_parts.tape[norm.input].ndim, -1):
            yield alter(norm.call, affine(norm, partial(across, dim=dim)), f"axis {dim}")


def _gain_first(norm: Norm) -> Rewrite:
    def rewrite(values: Values, call: Call) -> Tensor:
        gain = norm.gain(values)
        normed = norm.of(values[norm.input] if gain is None else values[norm.input] * gain)
        return normed if norm.bias is None else normed + values[norm.bias]

    return rewrite


def _gain_for_bias(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each norm with its gain and its bias exchanged."""
    for norm in _norms(LAYER)(model_parts):
        if norm.weight is not None and norm.bias is not None:
            other = replace(norm, weight=norm.bias, bias=norm.weight, added=0.0)
            yield alter(norm.call, affine(other, standard))


def _gain_offset(*, known: float, more: float) -> Alterations:
    """Return the alterations of each norm whose gain is the weight with ``known`` added: ``more`` is added to it."""
    return alter_each(
        lambda parts: [norm for norm in _norms(gain=True)(parts) if norm.added == known],
        lambda norm: affine(norm, standard, more=more),
    )


def _missing(where: str) -> Alterations:
    """Return the alterations that leave out each norm at a place, as of :func:`place`."""
    return alter_each(
        lambda parts: [norm for norm in parts.norms if place(norm, parts) == where],
        lambda norm: replace_with(norm.input),
    )


def place(norm: Norm, model_parts: ModelParts) -> str:
    """Return where a norm is.

    Returns:
        ``heads`` for a norm of queries or keys, ``embedding`` before the first attention, ``final`` after the last
        residual sum of a pre-norm model, ``head`` in the model's head, ``layer`` elsewhere.
    """
    if norm in model_parts.own_norms:
        return "heads"
    sums = [residual.call.number for residual in model_parts.residuals]
    if not sums:
        return "head"
    first = min(attention.product.number for attention in model_parts.attentions) if model_parts.attentions else sums[0]
    if norm.call.number < first and not any(linear.input == norm.output for linear in model_parts.linears):
        return "embedding"
    if norm.first > max(sums) and norm.first - max(sums) < 4:  # a dropout or a cast between them
        return "final" if is_pre_norm(model_parts) else "layer"
    if norm.first > max(sums):
        return "head"
    return "layer"


def is_pre_norm(model_parts: ModelParts) -> bool:
    """Return whether residual sums follow each other without a norm between them, as in a pre-norm model."""
    results = {residual.call.result for residual in model_parts.residuals}
    return any(residual.stream in results for residual in model_parts.residuals)


# ------------------------------------------------------------------------------------------- norms of queries and keys


def _own_missing(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each attention without both norms, and without either."""
    for attention in model_parts.attentions:
        sides = {
            f"of the {side} alone": {
                norm.call.number: replace_with(norm.input) for norm in _norms_of(attention, ref, model_parts)
            }
            for side, ref in (("queries", attention.query), ("keys", attention.key))
        }
        both = {number: rewrite for rewrites in sides.values() for number, rewrite in rewrites.items()}
        if both:
            yield Alteration(where=attention.where, rewrites=both)
        for detail, rewrites in sides.items():
            if 0 < len(rewrites) < len(both):
                yield Alteration(where=attention.where, rewrites=rewrites, detail=detail)


def _over_width(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each norm of single heads, [b s h d] or [b h s d], taken over all heads."""
    tape = model_parts.tape
    lengths = {
        tape[ref].shape[axis]
        for attention in model_parts.attentions
        for ref, axis in ((attention.query, -2), (attention.key, -1))
    }
    for norm in model_parts.own_norms:
        shape = tape[norm.input].shape
        if len(shape) == 4:
            yield alter(norm.call, _over_all_heads(norm, -2 if shape[-3] in lengths else -3))


def _over_all_heads(norm: Norm, axis: int) -> Rewrite:
    def formula(value: Tensor, norm: Norm) -> Tensor:
        moved = value.movedim(axis, -2)
        return norm.of(moved.flatten(-2)).view(moved.shape).movedim(-2, axis)

    return affine(norm, formula, bias=False)


def _over_heads(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each norm of all heads, taken over each head."""
    for attention in model_parts.attentions:
        both = [norm for ref in (attention.query, attention.key) for norm in _norms_of(attention, ref, model_parts)]
        for norm in dict.fromkeys(both):
            width = model_parts.tape[norm.input].shape[-1]
            if model_parts.tape[norm.input].ndim == 3 and width % attention.size == 0 and width > attention.size:
                yield alter(norm.call, _over_each_head(norm, attention.size))


def _over_each_head(norm: Norm, size: int) -> Rewrite:
    return affine(norm, lambda value, norm: norm.of(unflat(value, -1, size)).flatten(-2), bias=False)


def _norms_of(attention: Attention, ref: Ref, model_parts: ModelParts) -> list[Norm]:
    """Return the norms between a projection and an attention's query or key."""
    projections = {linear.call.number for linear in model_parts.linears}
    calls = {call.number for call in attention.tape.before(ref, lambda call: call.number in projections)}
    return [norm for norm in model_parts.own_norms if norm.call.number in calls]


def _after_rotation(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each rotation of normalised heads, with the norm after it."""
    for rotation, norm in _rotated_heads(model_parts):
        if norm.call.number < rotation.call.number:
            rewrites = {norm.call.number: replace_with(norm.input), rotation.whole.number: _normed(norm)}
            yield Alteration(where=norm.call.module, rewrites=rewrites)


def _normed(norm: Norm) -> Rewrite:
    return lambda values, call: norm.whole(values.run(call), values)


def _before_rotation(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each norm of rotated heads, with the rotation after it."""
    for rotation, norm in _rotated_heads(model_parts):
        if norm.call.number > rotation.call.number:
            rewrites = {
                rotation.call.number: _rotated_norm(rotation, norm),
                norm.call.number: replace_with(norm.input),
            }
            yield Alteration(where=norm.call.module, rewrites=rewrites)


def _rotated_norm(rotation: Rotation, norm: Norm) -> Rewrite:
    return lambda values, call: rotation.rotate(values, norm.whole(values[rotation.input], values))


def _rotated_heads(model_parts: ModelParts) -> Iterator[tuple[Rotation, Norm]]:
    """Yield each rotation with the norm of the same heads, before or after it."""
    tape = model_parts.tape
    norms = [
        norm
        for norm in model_parts.own_norms
        if norm.weight is None or tape[norm.weight].shape == tape[norm.input].shape[-1:]
    ]
    for rotation in dict.fromkeys(rotations(model_parts)):
        for norm in norms:
            first, second = sorted((norm.call, rotation.call), key=lambda call: call.number)
            calls = tape.before(second.result, lambda call: call.name == "linear")
            if tape[norm.input].ndim == 4 and any(call is first for call in calls):
                yield rotation, norm


CAUSES: tuple[Cause, ...] = (
    Cause(
        name="LayerNorm eps",
        what="the norm adds a different eps to the variance",
        looks="a difference of 1e-7 to 1e-4, larger where activations are small; atol=1e-3 hides it",
        fix="take eps from the config (layer_norm_eps, norm_epsilon); the default of torch.nn.LayerNorm is 1e-5",
        alterations=_usual_eps(LAYER),
        free_parameters=_solved_eps(LAYER),
    ),
    Cause(
        name="LayerNorm with Bessel's correction",
        what="the variance divides by n - 1 instead of n",
        looks="all values are smaller by a factor of about 1 - 1/(2 n): 0.07 % for 768",
        fix="use var(correction=0), or std(correction=0): torch's default is the sample variance",
        alterations=_bessel,
        free_parameters=solve_each(_norms(LAYER), _over_deviation, lambda norm: DEVIATION_DETAIL, EPS_STARTS),
    ),
    Cause(
        name="LayerNorm eps outside of the root",
        what="eps is added to the standard deviation instead of the variance",
        looks="like a wrong eps; no difference for an eps as small as 1e-12",
        fix="x / sqrt(variance + eps), not x / (std + eps)",
        alterations=_computed(outside),
    ),
    Cause(
        name="RMSNorm for LayerNorm",
        what="the norm does not subtract the mean",
        looks="a difference as large as the mean of the activations",
        fix="subtract the mean over the last axis first",
        alterations=_computed(of_kind(RMS)),
    ),
    Cause(
        name="LayerNorm over the wrong axis",
        what="mean and variance are taken over positions or rows instead of channels",
        looks="everything differs, and the values at one position depend on all others",
        fix="normalise over the last axis of [b s e]",
        alterations=_over_other_axes,
    ),
    Cause(
        name="LayerNorm gain missing",
        what="the norm does not multiply by its weight",
        looks="no difference on a new model, whose gains are 1; a large one on a trained model",
        fix="elementwise_affine=True, and load the weight",
        alterations=_without_gain(LAYER),
        absorbed_by_weights=True,
    ),
    Cause(
        name="LayerNorm bias missing",
        what="the norm does not add its bias",
        looks="no difference on a new model, whose biases are 0; a constant per channel on a trained model",
        fix="bias=True, and load the bias",
        alterations=alter_each(_norms(LAYER, bias=True), lambda norm: affine(norm, standard, bias=False)),
        absorbed_by_weights=True,
    ),
    Cause(
        name="norm gain before the norm",
        what="the gain is multiplied before mean and variance are computed, instead of after",
        looks="differences where the gains differ between channels",
        fix="normalise first, then multiply by the weight",
        alterations=alter_each(_norms(gain=True), _gain_first),
    ),
    Cause(
        name="norm gain and bias exchanged",
        what="the norm multiplies by its bias and adds its weight",
        looks="large differences; both have the same shape",
        fix="the weight is gamma, which is multiplied; the bias is beta, which is added",
        alterations=_gain_for_bias,
    ),
    Cause(
        name="embedding norm missing",
        what="the sum of the embeddings is not normalised",
        looks="everything differs, from the embeddings on",
        fix="put the norm after the sum of word, position and token type embeddings",
        alterations=_missing("embedding"),
    ),
    Cause(
        name="final norm missing",
        what="the output of the last layer is not normalised",
        looks="all layers agree, and the output does not",
        fix="put the norm after the last layer: a pre-norm model needs one",
        alterations=_missing("final"),
    ),
    Cause(
        name="norm missing in a layer",
        what="a residual sum, or the input of a branch, is not normalised",
        looks="the layers' outputs grow with depth",
        fix="put the norm where the reference has it",
        alterations=_missing("layer"),
    ),
    Cause(
        name="norm that does not divide",
        what="a norm multiplies by its gain and adds its bias, and does not divide by the spread of its input",
        looks="the difference is large at the norm itself, and as large as the input is far from a spread of 1",
        fix="divide by the standard deviation (LayerNorm), or by the root of the mean of squares (RMSNorm)",
        alterations=_without_spread,
    ),
    Cause(
        name="norm missing in the head",
        what="the head's transform lacks its norm",
        looks="all layers agree, and the logits do not",
        fix="dense, activation, norm, decoder",
        alterations=_missing("head"),
    ),
    Cause(
        name="group norm or batch norm eps",
        what="a norm over groups, over the batch or over one map has a different eps; or one that standardises weights",
        looks="a difference of 1e-7 to 1e-3, larger where variances are small",
        fix="take eps from the reference's module; torch.nn.GroupNorm and BatchNorm2d use 1e-5",
        alterations=_usual_call_eps,
        free_parameters=solve_each(_eps_calls, _EpsCall.with_eps, lambda site: site.detail, EPS_STARTS),
    ),
    Cause(
        name="RMSNorm eps",
        what="the norm adds a different eps to the mean of squares",
        looks="a difference of 1e-7 to 1e-4, larger where activations are small; atol=1e-3 hides it",
        fix="take eps from the config (rms_norm_eps, layer_norm_epsilon); torch.nn.RMSNorm uses the dtype's",
        alterations=_usual_eps(RMS),
        free_parameters=_solved_eps(RMS),
    ),
    Cause(
        name="RMSNorm eps outside of the root",
        what="eps is added to the root of the mean of squares instead of under the root",
        looks="like a wrong eps: a difference of eps / 2 for activations of size 1",
        fix="x * rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)",
        alterations=_computed(outside, RMS),
    ),
    Cause(
        name="LayerNorm for RMSNorm",
        what="the norm subtracts the mean, unlike the reference",
        looks="a difference as large as the mean of the activations",
        fix="divide by the root of the mean of squares only: use torch.nn.RMSNorm, not torch.nn.LayerNorm(bias=False)",
        alterations=_computed(of_kind(LAYER), RMS),
    ),
    Cause(
        name="length for root mean square",
        what="the norm divides by the root of the sum of squares instead of the mean of squares",
        looks="all values are smaller by the root of the width",
        fix="x.pow(2).mean(-1, keepdim=True); F.normalize and x.norm() are sqrt(n) times as large",
        alterations=_computed(by_length, RMS),
        absorbed_by_weights=True,
    ),
    Cause(
        name="RMSNorm gain missing",
        what="the norm does not multiply by its weight",
        looks="no difference on a new model, whose gains are 1; a large one on a trained model",
        fix="elementwise_affine=True, and load the weight",
        alterations=_without_gain(RMS),
        absorbed_by_weights=True,
    ),
    Cause(
        name="norm gain without 1 added",
        what="the norm multiplies by its weight; the reference multiplies by 1 + weight",
        looks="all values are nearly 0, because such weights are stored as differences from 1",
        fix="x * (1 + weight), as in Gemma, or add 1 to the weights when they are loaded",
        alterations=_gain_offset(known=1.0, more=-1.0),
        absorbed_by_weights=True,
    ),
    Cause(
        name="norm gain with 1 added",
        what="the norm multiplies by 1 + weight; the reference multiplies by its weight",
        looks="all values are twice as large, because such weights are near 1",
        fix="x * weight: Llama and most others store the gain itself; Gemma stores its difference from 1",
        alterations=_gain_offset(known=0.0, more=1.0),
        absorbed_by_weights=True,
    ),
    Cause(
        name="query and key norm missing",
        what="queries and keys are not normalised",
        looks="the scores are too large or too small",
        fix="normalise queries and keys before the rotation, as Qwen 3, Gemma 3 and OLMo 2 do",
        alterations=_own_missing,
    ),
    Cause(
        name="query and key norm over the whole width",
        what="one norm is taken over all heads; the reference normalises each head",
        looks="the scores of each head are off by a factor that depends on the position",
        fix="split into heads, then normalise over d: Qwen 3 and Gemma 3; OLMo 2 normalises the whole width",
        alterations=_over_width,
    ),
    Cause(
        name="query and key norm over each head",
        what="each head is normalised on its own; the reference normalises all heads at once",
        looks="the scores of each head are off by a factor that depends on the position",
        fix="normalise [b s (h d)] before splitting into heads, as OLMo 2; Qwen 3 and Gemma 3 normalise each head",
        alterations=_over_heads,
    ),
    Cause(
        name="query and key norm behind the rotation",
        what="queries and keys are rotated before they are normalised",
        looks="position 0 agrees; no difference at all if all gains are equal",
        fix="normalise, then rotate",
        alterations=_after_rotation,
    ),
    Cause(
        name="query and key norm before the rotation",
        what="queries and keys are normalised before they are rotated",
        looks="position 0 agrees; no difference at all if all gains are equal",
        fix="rotate, then normalise, as Hunyuan does",
        alterations=_before_rotation,
    ),
)
