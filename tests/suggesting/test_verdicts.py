"""What cannot be loaded is said, with its reason; and nothing of the user's is changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.errors import VerifyError
from porting.suggesting import Suggestion, Verdict, suggest
from tests.zoo.alternating import Alternating
from tests.zoo.parts import Config
from tests.zoo.plain import Layer
from tests.zoo.position_buffer import PositionBuffer


class Plain(PositionBuffer):
    """The usual BERT; each test gives it one flaw."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.change()

    def change(self) -> None:
        """The flaw."""


def each(module: PositionBuffer) -> list[Layer]:
    return [layer for layer in module.layers if isinstance(layer, Layer)]


class NoQueryBias(Plain):
    def change(self) -> None:
        for layer in each(self):
            layer.query.bias = None  # type: ignore[assignment]  # as bias=False leaves it


class NoEmbeddingNorm(Plain):
    def change(self) -> None:
        self.norm = nn.Identity()  # type: ignore[assignment]  # the flaw


class TanhGelu(Plain):
    def change(self) -> None:
        for layer in each(self):
            layer.act = nn.GELU(approximate="tanh")


class OtherEps(Plain):
    def change(self) -> None:
        for layer in each(self):
            layer.norm1.eps = 1e-5


class Relu(Plain):
    def change(self) -> None:
        for layer in each(self):
            layer.act = nn.ReLU()  # type: ignore[assignment]  # the flaw


class NoMask(Plain):
    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:  # type: ignore[override]  # the flaw
        return super().forward(ids, torch.ones_like(ids, dtype=torch.bool), segments)


class NormedAgain(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        return F.layer_norm(super().forward(ids, keep, segments), (self.norm.normalized_shape[0],), eps=1e-12)


class Probabilities(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        return super().forward(ids, keep, segments).softmax(-1)


class UnitLayer(Layer):
    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return super().forward(F.normalize(x, dim=-1), keep)


class SmallerLayer(Layer):
    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return super().forward(0.5 * x, keep)


class UnitInputs(Plain):
    def change(self) -> None:
        for layer in each(self):
            layer.__class__ = UnitLayer


class SmallerInputs(Plain):
    def change(self) -> None:
        for layer in each(self):
            layer.__class__ = SmallerLayer


class NeverCalled(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        layers, self.layers = self.layers, nn.ModuleList()
        try:
            return super().forward(ids, keep, segments)
        finally:
            self.layers = layers


def verdict(source: Path, kind: Callable[..., nn.Module]) -> tuple[Verdict, str, Suggestion]:
    found = suggest(source, kind)
    return found.verdict, " | ".join(reason.said for reason in found.reasons), found


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "expected", "said"),
    [
        (NoQueryBias, Verdict.IMPOSSIBLE, "layers.0.query.weight has no bias, and the checkpoint's "),
        (NoEmbeddingNorm, Verdict.IMPOSSIBLE, "the module has no bert.embeddings.LayerNorm before layers.0.query"),
        (
            TanhGelu,
            Verdict.APPROXIMATE,
            "tanh GELU where the reference has exact GELU), at layers.{i}.act: off by",
        ),
        (
            OtherEps,
            Verdict.APPROXIMATE,
            "LayerNorm eps (eps is 1e-05 where the reference has 1e-12), at layers.{i}.norm1",
        ),
        (Relu, Verdict.IMPOSSIBLE, "(ReLU where the reference has exact GELU), at layers.{i}.act"),
        (Probabilities, Verdict.IMPOSSIBLE, "sums to 1, as probabilities do, whatever the weights are"),
        (NeverCalled, Verdict.IMPOSSIBLE, "the forward never uses 12 of the module's 14 matrices"),
        (UnitInputs, Verdict.IMPOSSIBLE, "a step too many (normalize, which the reference does not do"),
        (SmallerInputs, Verdict.NOT_FOUND, "weights that are moved or scaled might do it"),
        (NormedAgain, Verdict.NOT_FOUND, "is not one of the reference's activations"),
    ],
)
def test_the_reason_is_named(source: Path, kind: type[nn.Module], expected: Verdict, said: str) -> None:
    found, reasons, suggestion = verdict(source, kind)
    assert found is expected, str(suggestion)
    assert said in reasons
    assert not suggestion.proven


@pytest.mark.few(1)
def test_a_module_without_a_mask_is_right_without_padding(source: Path) -> None:
    found, reasons, suggestion = verdict(source, NoMask)
    assert (found, reasons) == (Verdict.TRUNK, "")
    assert "Without padding: the forward takes no attention mask" in str(suggestion)


class MadeInForward(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x = super().forward(ids, keep, segments)
        out: Tensor = nn.Linear(x.shape[-1], x.shape[-1], dtype=x.dtype)(x)
        return out


class Dropped(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        return F.dropout(super().forward(ids, keep, segments), 0.1)


class Broken(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        raise ValueError("nothing works")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            MadeInForward,
            r"test_verdicts\.py:\d+: MadeInForward.forward makes parameters while it runs",
        ),
        (Dropped, r"test_verdicts\.py:\d+: Dropped.forward gives something else each time"),
        (Broken, r"Broken.forward failed on .*: ValueError: nothing works \(at .*test_verdicts\.py:\d+\)"),
    ],
)
def test_a_forward_that_cannot_be_compared_is_refused_with_its_line(
    source: Path, kind: type[nn.Module], said: str
) -> None:
    with pytest.raises(VerifyError, match=said):
        suggest(source, kind)


@pytest.mark.slow
def test_nothing_of_the_user_s_is_changed(source: Path) -> None:
    config = {"width": 24, "depth": 3, "heads": 3, "inner": 40, "vocab": 40, "positions": 24, "segments": 2}
    module = Alternating(config).train()
    calls: list[int] = []
    hook = module.layers[0].register_forward_hook(lambda *_: calls.append(1))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state, python = torch.get_rng_state(), random.getstate()
    found = suggest(source, module)
    assert found.verdict is Verdict.TRUNK, str(found)
    assert module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    assert list(module.layers[0]._forward_hooks) == [hook.id]
    assert all(parameter.grad is None and parameter.requires_grad for parameter in module.parameters())
