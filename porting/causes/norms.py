"""Norms that differ from the reference's: LayerNorm, and RMSNorm (Zhang and Sennrich 2019)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from porting.causes.cause import Cause, alter, free_parameter, replace_with
from porting.causes.fitting import FreeParameter, geometric
from porting.causes.functions import LAYER, NORMS, RMS
from porting.causes.model_parts import ModelParts
from porting.causes.norming import Norm
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.tape import Call, Ref

EPSILONS = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-3)
"""The usual numbers of code, of torch.nn.LayerNorm (1e-5) and of configs; any other is solved for."""

Statistics = Callable[[Tensor, Norm], Tensor]


@dataclass(frozen=True, kw_only=True)
class OfNorms(Cause):
    """A mistake in the norms of one kind.

    Attributes:
        kind: ``layer`` or ``rms``.
    """

    kind: str = LAYER

    def norms(self, model_parts: ModelParts) -> Iterator[Norm]:
        """Return the norms of this kind."""
        return (norm for norm in model_parts.norms if norm.kind == self.kind)


@dataclass(frozen=True, kw_only=True)
class NormOf(OfNorms):
    """Norms with another formula.

    Attributes:
        formula: a tensor and its norm -> the tensor before gain and bias.
    """

    formula: Statistics

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each norm of this kind."""
        for norm in self.norms(model_parts):
            yield alter(norm.call, affine(norm, self.formula))


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


class NotNormed(Cause):
    """The gain and the bias of a norm are applied to what is not divided by its spread."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each norm that has a gain: with its input as it is, without the bias, and with its mean taken off."""
        for norm in model_parts.norms:
            if norm.weight is None:
                continue
            yield alter(norm.call, affine(norm, unchanged, bias=False), "the gain alone")
            if norm.bias is not None:
                yield alter(norm.call, affine(norm, unchanged), "gain and bias alone")
            if norm.kind == LAYER:
                yield alter(norm.call, affine(norm, centred), "the mean is taken off and nothing divided")


def unchanged(value: Tensor, norm: Norm) -> Tensor:
    """Return the tensor as it is."""
    return value


def centred(value: Tensor, norm: Norm) -> Tensor:
    """Return the tensor without its mean."""
    return value - value.mean(-1, keepdim=True)


class Bessel(OfNorms):
    """The norm uses the sample variance."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each norm with its own eps under the root, and with 1e-6 added to the standard deviation."""
        for norm in self.norms(model_parts):
            yield alter(norm.call, affine(norm, bessel))
            yield alter(norm.call, _over_deviation(norm, DEVIATION_EPS), self._detail(f"{DEVIATION_EPS:g}"))

    def free_parameters(self, model_parts: ModelParts) -> Iterator[FreeParameter]:
        """Yield the eps that is added to the standard deviation of each norm."""
        for norm in self.norms(model_parts):
            yield free_parameter(norm.call, partial(_over_deviation, norm), self._detail, geometric(1e-14, 10.0, 1))

    @staticmethod
    def _detail(eps: str) -> str:
        return f"eps is added to the standard deviation, and is {eps}"


DEVIATION_EPS = 1e-6
"""The eps of "The Annotated Transformer" (Rush 2018), which divides by ``x.std(-1) + eps``."""


def _over_deviation(norm: Norm, eps: float) -> Rewrite:
    return affine(norm, lambda value, norm: _centred(value) / (value.std(-1, keepdim=True) + eps))


def _centred(value: Tensor) -> Tensor:
    return value - value.mean(-1, keepdim=True)


class NormEps(OfNorms):
    """Another eps."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each norm with each usual eps."""
        for norm in self.norms(model_parts):
            for eps in EPSILONS:
                if eps != norm.eps:
                    yield alter(norm.call, affine(norm, partial(standard, eps=eps)), self._detail(norm, f"{eps:.12g}"))

    def free_parameters(self, model_parts: ModelParts) -> Iterator[FreeParameter]:
        """Yield the eps of each norm."""
        for norm in self.norms(model_parts):
            yield free_parameter(
                norm.call, partial(_with_eps, norm), partial(self._detail, norm), geometric(1e-14, 10.0, 1)
            )

    @staticmethod
    def _detail(norm: Norm, eps: str) -> str:
        return f"eps is {eps} where the reference has {norm.eps:.12g}"


def _with_eps(norm: Norm, eps: float) -> Rewrite:
    return affine(norm, partial(standard, eps=eps))


EPS_OF = {"group_norm": (4, 1e-5), "batch_norm": (7, 1e-5), "instance_norm": (7, 1e-5), "normalize": (3, 1e-12)}
"""Functions of torch that add an eps, besides norms over the last axis: the place of the argument, and its default."""


class CallEps(Cause):
    """Another eps of a norm over groups, over the batch or over one map, of activations or of weights."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each call with each usual eps."""
        for call, own in self._calls(model_parts):
            for eps in EPSILONS:
                if eps != own:
                    yield alter(call, _called_with(eps), self._detail(call, own, f"{eps:.12g}"))

    def free_parameters(self, model_parts: ModelParts) -> Iterator[FreeParameter]:
        """Yield the eps of each call."""
        for call, own in self._calls(model_parts):
            yield free_parameter(call, _called_with, partial(self._detail, call, own), geometric(1e-14, 10.0, 1))

    @staticmethod
    def _calls(model_parts: ModelParts) -> Iterator[tuple[Call, float]]:
        for call in model_parts.tape.calls:
            if call.name in EPS_OF:
                place, default = EPS_OF[call.name]
                yield call, float(call.argument(place, "eps", default))

    @staticmethod
    def _detail(call: Call, own: float, eps: str) -> str:
        return f"eps of {call.name} is {eps} where the reference has {own:.12g}"


def _called_with(eps: float) -> Rewrite:
    def rewrite(values: Values, call: Call) -> Tensor:
        place, _ = EPS_OF[call.name]
        args, named = call.args[:place], {**call.kwargs, "eps": eps}
        result: Tensor = values.run(replace(call, args=args, kwargs=named))
        return result

    return rewrite


class NormAxis(OfNorms):
    """The norm is taken over another axis."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each norm over each other axis."""
        for norm in self.norms(model_parts):
            for dim in range(-model_parts.tape[norm.input].ndim, -1):
                yield alter(norm.call, affine(norm, partial(across, dim=dim)), f"axis {dim}")


class NormGain(OfNorms):
    """The gain is missing."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each norm that has a gain."""
        for norm in self.norms(model_parts):
            if norm.weight is not None:
                yield alter(norm.call, affine(norm, standard, gain=False))


class NormBias(OfNorms):
    """The bias is missing."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each norm that has a bias."""
        for norm in self.norms(model_parts):
            if norm.bias is not None:
                yield alter(norm.call, affine(norm, standard, bias=False))


class GainFirst(Cause):
    """The gain is multiplied before the norm is taken."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each norm that has a gain."""
        for norm in model_parts.norms:
            if norm.weight is not None:
                yield alter(norm.call, self._gain_first(norm))

    @staticmethod
    def _gain_first(norm: Norm) -> Rewrite:
        def rewrite(values: Values, call: Call) -> Tensor:
            gain = norm.gain(values)
            normed = norm.of(values[norm.input] if gain is None else values[norm.input] * gain)
            return normed if norm.bias is None else normed + values[norm.bias]

        return rewrite


class GainForBias(OfNorms):
    """Gain and bias are exchanged."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each norm that has a gain and a bias."""
        for norm in self.norms(model_parts):
            if norm.weight is not None and norm.bias is not None:
                yield alter(norm.call, self._exchanged(norm, norm.weight, norm.bias))

    @staticmethod
    def _exchanged(norm: Norm, gain: Ref, bias: Ref) -> Rewrite:
        return lambda values, call: norm.of(values[norm.input]) * values[bias] + values[gain]


@dataclass(frozen=True, kw_only=True)
class GainOffset(Cause):
    """The gain has 1 added where the reference's has not, or the other way round.

    Attributes:
        known: what the reference adds to its weight.
        more: what the port adds to the reference's gain.
    """

    known: float
    more: float

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each norm whose weight the reference treats so."""
        for norm in model_parts.norms:
            if norm.weight is not None and norm.added == self.known:
                yield alter(norm.call, affine(norm, standard, more=self.more))


@dataclass(frozen=True, kw_only=True)
class NormMissing(Cause):
    """A norm that is missing.

    Attributes:
        place: as of :func:`place`.
    """

    place: str

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each norm at this place."""
        for norm in model_parts.norms:
            if place(norm, model_parts) == self.place:
                yield alter(norm.call, replace_with(norm.input))


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


CAUSES: tuple[Cause, ...] = (
    NormEps(
        name="LayerNorm eps",
        what="the norm adds a different eps to the variance",
        looks="a difference of 1e-7 to 1e-4, larger where activations are small; atol=1e-3 hides it",
        fix="take eps from the config (layer_norm_eps, norm_epsilon); the default of torch.nn.LayerNorm is 1e-5",
    ),
    Bessel(
        name="LayerNorm with Bessel's correction",
        what="the variance divides by n - 1 instead of n",
        looks="all values are smaller by a factor of about 1 - 1/(2 n): 0.07 % for 768",
        fix="use var(correction=0), or std(correction=0): torch's default is the sample variance",
    ),
    NormOf(
        name="LayerNorm eps outside of the root",
        what="eps is added to the standard deviation instead of the variance",
        looks="like a wrong eps; no difference for an eps as small as 1e-12",
        fix="x / sqrt(variance + eps), not x / (std + eps)",
        formula=outside,
    ),
    NormOf(
        name="RMSNorm for LayerNorm",
        what="the norm does not subtract the mean",
        looks="a difference as large as the mean of the activations",
        fix="subtract the mean over the last axis first",
        formula=of_kind(RMS),
    ),
    NormAxis(
        name="LayerNorm over the wrong axis",
        what="mean and variance are taken over positions or rows instead of channels",
        looks="everything differs, and the values at one position depend on all others",
        fix="normalise over the last axis of [b s e]",
    ),
    NormGain(
        name="LayerNorm gain missing",
        what="the norm does not multiply by its weight",
        looks="no difference on a new model, whose gains are 1; a large one on a trained model",
        fix="elementwise_affine=True, and load the weight",
        absorbed_by_weights=True,
    ),
    NormBias(
        name="LayerNorm bias missing",
        what="the norm does not add its bias",
        looks="no difference on a new model, whose biases are 0; a constant per channel on a trained model",
        fix="bias=True, and load the bias",
        absorbed_by_weights=True,
    ),
    GainFirst(
        name="norm gain before the norm",
        what="the gain is multiplied before mean and variance are computed, instead of after",
        looks="differences where the gains differ between channels",
        fix="normalise first, then multiply by the weight",
    ),
    GainForBias(
        name="norm gain and bias exchanged",
        what="the norm multiplies by its bias and adds its weight",
        looks="large differences; both have the same shape",
        fix="the weight is gamma, which is multiplied; the bias is beta, which is added",
    ),
    NormMissing(
        name="embedding norm missing",
        what="the sum of the embeddings is not normalised",
        looks="everything differs, from the embeddings on",
        fix="put the norm after the sum of word, position and token type embeddings",
        place="embedding",
    ),
    NormMissing(
        name="final norm missing",
        what="the output of the last layer is not normalised",
        looks="all layers agree, and the output does not",
        fix="put the norm after the last layer: a pre-norm model needs one",
        place="final",
    ),
    NormMissing(
        name="norm missing in a layer",
        what="a residual sum, or the input of a branch, is not normalised",
        looks="the layers' outputs grow with depth",
        fix="put the norm where the reference has it",
        place="layer",
    ),
    NotNormed(
        name="norm that does not divide",
        what="a norm multiplies by its gain and adds its bias, and does not divide by the spread of its input",
        looks="the difference is large at the norm itself, and as large as the input is far from a spread of 1",
        fix="divide by the standard deviation (LayerNorm), or by the root of the mean of squares (RMSNorm)",
    ),
    NormMissing(
        name="norm missing in the head",
        what="the head's transform lacks its norm",
        looks="all layers agree, and the logits do not",
        fix="dense, activation, norm, decoder",
        place="head",
    ),
    CallEps(
        name="group norm or batch norm eps",
        what="a norm over groups, over the batch or over one map has a different eps; or one that standardises weights",
        looks="a difference of 1e-7 to 1e-3, larger where variances are small",
        fix="take eps from the reference's module; torch.nn.GroupNorm and BatchNorm2d use 1e-5",
    ),
    NormEps(
        name="RMSNorm eps",
        what="the norm adds a different eps to the mean of squares",
        looks="a difference of 1e-7 to 1e-4, larger where activations are small; atol=1e-3 hides it",
        fix="take eps from the config (rms_norm_eps, layer_norm_epsilon); torch.nn.RMSNorm uses the dtype's",
        kind=RMS,
    ),
    NormOf(
        name="RMSNorm eps outside of the root",
        what="eps is added to the root of the mean of squares instead of under the root",
        looks="like a wrong eps: a difference of eps / 2 for activations of size 1",
        fix="x * rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)",
        kind=RMS,
        formula=outside,
    ),
    NormOf(
        name="LayerNorm for RMSNorm",
        what="the norm subtracts the mean, unlike the reference",
        looks="a difference as large as the mean of the activations",
        fix="divide by the root of the mean of squares only: use torch.nn.RMSNorm, not torch.nn.LayerNorm(bias=False)",
        kind=RMS,
        formula=of_kind(LAYER),
    ),
    NormOf(
        name="length for root mean square",
        what="the norm divides by the root of the sum of squares instead of the mean of squares",
        looks="all values are smaller by the root of the width",
        fix="x.pow(2).mean(-1, keepdim=True); F.normalize and x.norm() are sqrt(n) times as large",
        kind=RMS,
        formula=by_length,
        absorbed_by_weights=True,
    ),
    NormGain(
        name="RMSNorm gain missing",
        what="the norm does not multiply by its weight",
        looks="no difference on a new model, whose gains are 1; a large one on a trained model",
        fix="elementwise_affine=True, and load the weight",
        kind=RMS,
        absorbed_by_weights=True,
    ),
    GainOffset(
        name="norm gain without 1 added",
        what="the norm multiplies by its weight; the reference multiplies by 1 + weight",
        looks="all values are nearly 0, because such weights are stored as differences from 1",
        fix="x * (1 + weight), as in Gemma, or add 1 to the weights when they are loaded",
        known=1.0,
        more=-1.0,
        absorbed_by_weights=True,
    ),
    GainOffset(
        name="norm gain with 1 added",
        what="the norm multiplies by 1 + weight; the reference multiplies by its weight",
        looks="all values are twice as large, because such weights are near 1",
        fix="x * weight: Llama and most others store the gain itself; Gemma stores its difference from 1",
        known=0.0,
        more=1.0,
        absorbed_by_weights=True,
    ),
)
