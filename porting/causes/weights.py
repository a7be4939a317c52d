"""Solving for the weights with which a linear layer of the reference gives the port's value."""

from __future__ import annotations

import torch
from torch import Tensor

from porting.causes.functions import SUM
from porting.causes.linear import Linear
from porting.causes.model_parts import ModelParts
from porting.causes.projections import role_of
from porting.causes.replay import Rewrite, Stage, Values
from porting.causes.tape import Call

LOOKS = "the output is another linear function of the same input"
UNTIED = "decoder untied"
UNTIED_WHAT = "the decoder has its own weights instead of the word embeddings"
UNTIED_FIX = "decoder.weight = embeddings.word.weight, after loading as well"
OTHER = "other weights"
OTHER_WHAT = "a linear layer's weights are not those of the checkpoint"
OTHER_FIX = "load the checkpoint; porting.verify(loaded=True) lists the weights that differ from it"

UNUSED_WHAT = "a linear layer does not compute with the weights that it stores"
UNUSED_FIX = (
    "its parameters equal the checkpoint's: check which tensor its forward uses, and whether it transposes, slices, "
    "scales or permutes it"
)
OTHER_TENSOR_FIX = (
    "let its forward use its own weights, and tie them to no others: see tie_word_embeddings in the config"
)
UNTIED_UNUSED_FIX = "the parameters equal the checkpoint's: check which tensor the decoder's forward uses"


def solve_weights(model_parts: ModelParts, stage: Stage, mark: str, target: Tensor) -> tuple[Linear, Tensor] | None:
    """Solve for the weights with which a linear layer gives the port's value.

    Weights that fit n rows of m channels are no coincidence if n > m + 1; with fewer rows nothing is solved.

    Args:
        mark: the mark that the layer's result has.
        target: the port's value there, [... out].

    Returns:
        The layer, and its weights with the bias as the last row, [in + 1, out]; None where the mark is not a layer's
        result.
    """
    goal = stage.tape.marks[mark]
    if stage.tape[goal].shape != target.shape:
        return None
    by_result = {linear.call.result: linear for linear in model_parts.linears}
    linear, call = by_result.get(goal), stage.tape.maker(goal)
    if linear is None and call is not None and call.name in SUM:  # a bias that is added in a call of its own
        linear = next((by_result[ref] for ref in call.reads if ref in by_result), None)
        target = target - (stage.tape[goal] - stage.tape[linear.call.result] if linear else 0)
    if linear is None:
        return None
    inputs = stage.tape[linear.input].flatten(0, -2)
    rows, width = inputs.shape
    if rows <= width + 1:
        return None
    system = torch.cat([inputs, inputs.new_ones(rows, 1)], 1)
    matrix = torch.linalg.lstsq(system, target.flatten(0, -2).to(inputs.dtype)).solution
    return linear, matrix


def replaced(linear: Linear, matrix: Tensor) -> Rewrite:
    """Return the rewrite of a linear layer with other weights and bias, [in + 1, out]."""

    def rewrite(values: Values, call: Call) -> Tensor:
        value = values[linear.input]
        if value.shape[-1] + 1 != len(matrix):
            raise ValueError("the layer has another input width")
        return torch.matmul(torch.cat([value, value.new_ones(*value.shape[:-1], 1)], -1), matrix)

    return rewrite


def words(linear: Linear, model_parts: ModelParts, matrix: Tensor, *, compared: bool) -> tuple[str, str, str, str]:
    """Return the name, the detail, ``what`` and ``fix`` for a layer with other weights.

    Args:
        matrix: the weights that the port computes with and the bias, [in + 1, out].
        compared: the stored weights are known to be the checkpoint's, so that loading them is not a fix.
    """
    tape = model_parts.tape
    others = {name: tape[ref] for ref, name in tape.weights.items() if ref != linear.weight and tape[ref].ndim == 2}
    other = next(
        (name for name, one in others.items() if _is_close(one, matrix[:-1]) or _is_close(one.T, matrix[:-1])), ""
    )
    if other:
        return OTHER, f"it computes with {other}", UNUSED_WHAT, OTHER_TENSOR_FIX
    if role_of(linear, model_parts) == "decoder":
        return UNTIED, "", UNTIED_WHAT, UNTIED_UNUSED_FIX if compared else UNTIED_FIX
    return (OTHER, "", UNUSED_WHAT, UNUSED_FIX) if compared else (OTHER, "", OTHER_WHAT, OTHER_FIX)


def _is_close(weight: Tensor, matrix: Tensor) -> bool:
    """Return whether solved weights are a tensor's, up to what solving them leaves."""
    if weight.shape != matrix.shape:
        return False
    return bool((weight.to(matrix.dtype) - matrix).abs().max() <= 1e-5 * matrix.abs().max())
