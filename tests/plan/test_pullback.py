"""The gradient of a source from those of its targets: autograd, run through the moves themselves, is the oracle."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from porting.plan.move import pullback
from tests.plan.carrying import port
from tests.plan.shapes import Shape

GALLERY: dict[str, tuple[str, Mapping[str, Shape], Mapping[str, Shape]]] = {
    "transposed": ('"a.weight [o i]" = "b.weight [i o]"', {"a.weight": (3, 4)}, {"b.weight": (4, 3)}),
    "fused": (
        '"{p:q,k,v}.weight [o e]" = "qkv.weight [(p o) e]"',
        {f"{name}.weight": (6, 4) for name in "qkv"},
        {"qkv.weight": (18, 4)},
    ),
    "a part": ('"a.weight [(_2|t) e]" = "b.weight [t e]"', {"a.weight": (9, 4)}, {"b.weight": (7, 4)}),
    "summed": (
        '[[rule]]\nsource = ["a [t e]", "c [0 e]"]\ntarget = "b [t e]"\nfold = true',
        {"a": (7, 4), "c": (2, 4)},
        {"b": (7, 4)},
    ),
    "offset": ('[[rule]]\nsource = "a [o i]"\ntarget = "b [i o]"\noffset = 0.3', {"a": (3, 4)}, {"b": (4, 3)}),
    "summed, scaled and offset": (
        '[[rule]]\nsource = ["a [t e]", "c [0 e]"]\ntarget = "b [t e]"\nfold = true\noffset = 2\nscale = 3',
        {"a": (7, 4), "c": (2, 4)},
        {"b": (7, 4)},
    ),
    "scaled": ('[[rule]]\nsource = "a [o i]"\ntarget = "b [i o]"\nscale = "8 ** -0.5"', {"a": (3, 4)}, {"b": (4, 3)}),
}


@pytest.mark.parametrize("name", GALLERY)
def test_it_is_what_autograd_gives(name: str) -> None:
    table, sources, targets = GALLERY[name]
    held = port(table, sources, targets)
    torch.manual_seed(0)
    tensors = {one: torch.randn(shape, dtype=torch.float64, requires_grad=True) for one, shape in sources.items()}
    given = {one: torch.randn(shape, dtype=torch.float64) for one, shape in targets.items()}
    carried = held.forward(tensors)
    expected = torch.autograd.grad(
        [carried[one] for one in given], list(tensors.values()), list(given.values()), allow_unused=True
    )
    for (one, shape), gradient in zip(sources.items(), expected, strict=True):
        (step,) = [step for step in held.steps if one in step.sources]
        found = pullback(step, one, shape, given.__getitem__, held.arithmetic(step))
        torch.testing.assert_close(found, gradient, rtol=1e-15, atol=0.0)


@pytest.mark.parametrize(
    ("rule", "sources"),
    [
        ('source = "a [o i]"\ntarget = "b [i o]"\nscale = 3', {"a": (3, 4)}),
        (
            'source = { a = "a [o i]", c = "c [o]" }\ntarget = "b [i o]"\nformula = "a * c + exp(a)"',
            {"a": (3, 4), "c": (3,)},
        ),
    ],
    ids=["scale", "formula"],
)
def test_gradients_of_complex_tensors_are_complex(rule: str, sources: Mapping[str, Shape]) -> None:
    held = port(f"[[rule]]\n{rule}", sources, {"b": (4, 3)})
    torch.manual_seed(0)
    tensors = {one: torch.randn(shape, dtype=torch.complex128, requires_grad=True) for one, shape in sources.items()}
    given = torch.randn(4, 3, dtype=torch.complex128)
    a = tensors["a"]
    made = (3 * a if "scale" in rule else a * tensors["c"][:, None] + a.exp()).T
    (step,) = held.steps
    for (one, shape), gradient in zip(
        sources.items(), torch.autograd.grad(made, list(tensors.values()), given), strict=True
    ):
        found = pullback(step, one, shape, {"b": given}.__getitem__, held.arithmetic(step), tensors.__getitem__)
        torch.testing.assert_close(found, gradient, rtol=1e-14, atol=1e-14)
