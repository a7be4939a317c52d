"""Weights that are not the checkpoint's: solved for, since no formula has them."""

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
UNTIED_WHAT = "the decoder has weights of its own, not those of the word embeddings"
UNTIED_FIX = "decoder.weight = embeddings.word.weight, after loading as well"
OTHER = "other weights"
OTHER_WHAT = "a linear layer has other weights than the checkpoint's"
OTHER_FIX = "load them; porting.verify(loaded=True) lists the weights that are not the checkpoint's"


HELD_WHAT = "a linear layer computes with other weights than those that it holds"
HELD_FIX = (
    "its parameters are the checkpoint's, bit by bit: see what its forward makes of them (transposed, cut, scaled, "
    "permuted), and which tensor it uses"
)
UNTIED_HELD_FIX = "the parameters are the checkpoint's, bit by bit: see which tensor the decoder's forward uses"


def solved(model_parts: ModelParts, stage: Stage, mark: str, target: Tensor) -> tuple[Linear, Tensor] | None:
    """The linear map that gives a mark its value, with weights [in + 1, out] that give ``target``, if there are such.

    A value of n rows that lies in the span of the map's inputs, m channels and a constant, is no accident where n is
    larger than m + 1.
    """
    goal = stage.tape.marks[mark]
    if stage.tape[goal].shape != target.shape:
        return None
    by_result = {linear.call.result: linear for linear in model_parts.linears}
    linear, call = by_result.get(goal), stage.tape.maker(goal)
    if linear is None and call is not None and call.name in SUM:  # a bias that is added by itself
        linear = next((by_result[ref] for ref in call.reads if ref in by_result), None)
        target = target - (stage.tape[goal] - stage.tape[linear.call.result] if linear else 0)
    if linear is None:
        return None
    given = stage.tape[linear.input].flatten(0, -2)
    rows, width = given.shape
    if rows <= width + 1:
        return None
    system = torch.cat([given, given.new_ones(rows, 1)], 1)
    found = torch.linalg.lstsq(system, target.flatten(0, -2).to(given.dtype)).solution

    return linear, found


def replaced(linear: Linear, matrix: Tensor) -> Rewrite:
    """The map with other weights and another bias, [in + 1, out]."""

    def rewrite(values: Values, call: Call) -> Tensor:
        value = values[linear.input]
        if value.shape[-1] + 1 != len(matrix):
            raise ValueError("a map of another width")
        return torch.matmul(torch.cat([value, value.new_ones(*value.shape[:-1], 1)], -1), matrix)

    return rewrite


def words(linear: Linear, model_parts: ModelParts, *, compared: bool) -> tuple[str, str, str]:
    """Name, what and fix; no word of loading weights that were compared and are the checkpoint's."""
    tied = role_of(linear, model_parts) == "decoder"
    if compared:
        return (UNTIED, UNTIED_WHAT, UNTIED_HELD_FIX) if tied else (OTHER, HELD_WHAT, HELD_FIX)
    return (UNTIED, UNTIED_WHAT, UNTIED_FIX) if tied else (OTHER, OTHER_WHAT, OTHER_FIX)
