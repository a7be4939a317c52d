"""RMSNorms that are not the reference's (Zhang and Sennrich 2019), and gains that are kept in another way."""

from __future__ import annotations

from porting.causes.cause import Cause
from porting.causes.norms import GainMoved, NormEps, NormGain, NormOf, by_length, of_kind, outside
from porting.causes.recognising import LAYER, RMS

CAUSES: tuple[Cause, ...] = (
    NormEps(
        name="RMSNorm eps",
        what="the norm adds another small number to the mean of squares",
        looks="a difference of 1e-7 to 1e-4, larger where activations are small; atol=1e-3 does not see it",
        fix="take eps from the config (rms_norm_eps, layer_norm_epsilon); torch.nn.RMSNorm has the dtype's unless told",
        kind=RMS,
    ),
    NormOf(
        name="RMSNorm eps outside of the root",
        what="eps is added to the root of the mean of squares, and not under the root",
        looks="as a wrong eps: a difference of half of eps where activations are of size 1",
        fix="x * rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)",
        kind=RMS,
        formula=outside,
    ),
    NormOf(
        name="LayerNorm for RMSNorm",
        what="the norm takes off the mean where it should not",
        looks="a difference of the size of the activations' mean",
        fix="divide by the root of the mean of squares alone: torch.nn.RMSNorm, and not torch.nn.LayerNorm(bias=False)",
        kind=RMS,
        formula=of_kind(LAYER),
    ),
    NormOf(
        name="length for root mean square",
        what="the norm divides by the root of the sum of squares, and not of their mean",
        looks="everything is smaller by the root of the width",
        fix="x.pow(2).mean(-1, keepdim=True); F.normalize and x.norm() are sqrt(n) times as large",
        kind=RMS,
        formula=by_length,
        absorbed_by_weights=True,
    ),
    NormGain(
        name="RMSNorm gain missing",
        what="the norm does not multiply by its weight",
        looks="nothing on a fresh model, whose gains are 1; much on a trained one",
        fix="elementwise_affine=True, and load the weight",
        kind=RMS,
        absorbed_by_weights=True,
    ),
    GainMoved(
        name="norm gain without 1 added",
        what="the norm multiplies by its weight, where the reference multiplies by 1 + weight",
        looks="everything is nearly 0: such weights are kept as their distance from 1",
        fix="x * (1 + weight), as Gemma has it; or add 1 to the weights when they are loaded",
        known=1.0,
        more=-1.0,
        absorbed_by_weights=True,
    ),
    GainMoved(
        name="norm gain with 1 added",
        what="the norm multiplies by 1 + weight, where the reference multiplies by its weight",
        looks="everything is twice as large: such weights are near 1",
        fix="x * weight: Llama and most others keep the gain itself, Gemma what is added to 1",
        known=0.0,
        more=1.0,
        absorbed_by_weights=True,
    ),
)
