"""Wrong ports of five families are named, and no cause is named that is none."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from porting.causes.non_finite import HIDDEN, OTHER
from porting.verification import Case, cause_search, verify
from tests.causes.listed import LISTED
from tests.causes.thirty import THIRTY
from tests.causes.twelve import TWELVE
from tests.causes.wrong_ports import FAMILIES, Wrong, edited, verified
from tests.verification.conftest import one_thread

pytestmark = pytest.mark.few(3)

__all__ = ["one_thread"]  # a fixture that is used by all

MORE = {
    "positions left out": Wrong(
        "vit",
        {"return x + self.position_embeddings": "return x"},
        ("step left out",),
        "add in vit.embeddings of the reference",
    ),
    "a step of a layer multiplied by a number": Wrong(
        "marian",
        {"shares = scores.softmax(-1)": "shares = scores.softmax(-1) * 0.999"},
        ("a step too many",),
        "mul by 0.999",
    ),
    "tanh twice": Wrong(
        "bert",
        {"torch.tanh(self.dense(x[:, 0]))": "torch.tanh(torch.tanh(self.dense(x[:, 0])))"},
        ("a step too many",),
        "tanh",
    ),
    "branches side by side": Wrong(
        "gpt2",
        {
            "x = x + self.attn(self.ln_1(x), mask)\n        return x + self.mlp(self.ln_2(x))": "return x"
            " + self.attn(self.ln_1(x), mask) + self.mlp(self.ln_2(x))"
        },
        ("branches side by side",),
    ),
    "feed-forward network of the first norm": Wrong(
        "llama",
        {
            "x = x + self.self_attn(self.input_layernorm(x), mask)": "y = self.input_layernorm(x)\n"
            "        x = x + self.self_attn(y, mask)",
            "return x + self.mlp(self.post_attention_layernorm(x))": "return x + self.mlp(y)",
        },
        ("wrong tensor",),
        "gate_proj reads the output of mul in model.layers.{i}.input_layernorm",
    ),
}
ALL = {**LISTED, **THIRTY, **TWELVE, **MORE}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_without_a_mistake_nothing_is_named(name: str) -> None:
    report = verified(Wrong(name, {}))
    assert (report.verdict, report.causes) == ("faithful", ())


@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [name for name, wrong in ALL.items() if wrong.names])
def test_a_mistake_is_named(name: str) -> None:
    wrong = ALL[name]
    report = verified(wrong)
    assert report.causes
    for found in report.causes:
        assert found.name in wrong.names, [
            (cause.names, cause.detail, cause.probes, cause.nearest) for cause in report.causes
        ]
        assert not found.ties or all(tie.startswith(wrong.names) for tie in found.ties)
    assert any(wrong.detail in found.detail for found in report.causes)


MASKED = "scores = scores.masked_fill(mask[:, None, None, :] == 0"
FIRST_LAYER = "x = layer(x, mask if layer is self.encoder.layer[0] else torch.ones_like(mask))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("bert", {MASKED: "scores = scores.masked_fill(mask[:, None, None, :] > 1"}),
        ("bert", {"x = layer(x, mask)": "x, mask = layer(x, mask), torch.ones_like(mask)"}),
        (
            "bert",
            {"x = layer(x, mask)": FIRST_LAYER},
        ),
        ("gpt2", {"allowed = causal & mask[:, None, None, :].bool()": "allowed = causal.expand(b, 1, s, s)"}),
    ],
)
def test_a_mask_ignored_in_one_layer_or_in_all_is_tied_with_nothing(family: str, changes: dict[str, str]) -> None:
    """No batch but one has padding at the same place in every row, and in the last layer hidden places alone tell."""
    causes = verified(Wrong(family, changes)).causes
    assert {found.name for found in causes} == {"padding mask ignored"}
    assert not [found.ties for found in causes if found.ties]


@pytest.mark.slow
def test_the_first_rows_mask_for_all_rows_is_no_mask_ignored() -> None:
    """The first row of the batches that are compared has no padding."""
    report = verified(Wrong("bert", {"mask[:, None, None, :] == 0": "mask[:1, None, None, :] == 0"}))
    assert report.causes
    assert not [cause.names for cause in report.causes if "padding mask ignored" in cause.names]


@pytest.mark.slow
def test_a_mask_ignored_in_short_rows_is_not_ignored_in_all() -> None:
    """A causal mask hides what padding at the end would show, and in rows padded in front the port is right."""
    mask = "(mask[:, None, None, :] > 0)"
    report = verified(Wrong("llama", {mask: f"({mask} | (s <= 4))"}, inner=False))
    assert report.verdict == "different"
    assert not [cause.name for cause in report.causes if cause.name.startswith("padding mask")]
    assert any("that the reference hides" in cause.detail for cause in report.causes)


@pytest.mark.slow
def test_what_is_not_known_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that fits by itself is no cause where what stands beside it is not explained."""
    monkeypatch.setattr(cause_search, "REPAIRING", 0.0)  # which would explain it
    report = verified(ALL["segments behind the norm"])
    assert report.causes
    assert [cause.name for cause in report.causes if cause.name] == []


@pytest.mark.slow
def test_a_mask_that_hides_everything_is_named_with_its_line() -> None:
    hidden = 'scores.masked_fill(mask[:, None, None, :] == 0, float("-inf"))'
    own = hidden.replace("== 0", "< 7")
    report = verified(Wrong("bert", {hidden: own}))
    (cause,) = report.causes  # and not one for each layer
    assert len(cause.probes) > 1
    assert cause.name == HIDDEN
    assert "softmax at" in cause.detail
    assert "ports/bert.py:" in cause.detail
    assert "float16" not in cause.fix


@pytest.mark.slow
def test_the_first_value_that_is_no_number_is_named_with_its_line() -> None:
    report = verified(Wrong("gpt2", {"x = self.c_fc(x)": "x = torch.log(self.c_fc(x))"}))
    assert report.causes
    for cause in report.causes:
        assert cause.name == OTHER
        assert "log at" in cause.detail
        assert "gives NaN" in cause.detail


@pytest.mark.slow
def test_an_inverted_mask_says_where_it_broke() -> None:
    (found,) = verified(LISTED["-inf mask inverted"]).causes
    assert found.name == "padding mask inverted"
    assert "softmax at" in found.detail
    assert math.isfinite(found.residual)


POLARITY = """
[inputs]
"input_ids" = "input_ids"
"token_type_ids" = "token_type_ids"
"attention_mask" = "attention_mask -> bool"
"""


@pytest.mark.slow
def test_the_masks_polarity_in_inputs() -> None:
    wrong = Wrong(
        "bert",
        {"scores.masked_fill(mask[:, None, None, :] == 0,": "scores.masked_fill(mask[:, None, None, :],"},
        sections=POLARITY,
    )
    (found,) = verified(wrong).causes
    assert found.name == "mask polarity in [inputs]"
    assert "-> padding" in found.fix
    right = POLARITY.replace("-> bool", "-> padding")
    assert verified(Wrong("bert", wrong.changes, sections=right)).verdict == "faithful"


class Scaled(nn.Linear):
    """It computes with weights that it does not hold."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's own signature
        return nn.functional.linear(input, self.weight + 0.01 * self.weight.sin(), self.bias)


@pytest.mark.slow
@pytest.mark.parametrize(("repairing", "name"), [(0.0, "other weights"), (60.0, "wrong tensor")])
def test_no_fix_says_what_the_run_has_refuted(repairing: float, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that were compared bit by bit need not be loaded."""
    monkeypatch.setattr(cause_search, "REPAIRING", repairing)
    reference = FAMILIES["vit"].reference()
    port = edited("vit", {})
    port.load_state_dict({name: reference.state_dict()[name] for name in port.state_dict()})
    mlp = port.get_submodule("vit.layers.0.mlp")
    other = Scaled(24, 40)
    other.load_state_dict(mlp.get_submodule("fc1").state_dict())
    mlp.fc1 = other
    generator = torch.Generator().manual_seed(1)
    pixels = [Case("one", {"pixel_values": torch.randn(3, 3, 32, 32, generator=generator)})]
    report = verify(into=port.eval(), reference=reference, inputs=pixels, dtypes=())
    (found,) = report.causes
    assert found.name == name
    assert "load the checkpoint" not in found.fix
    assert ("equal the checkpoint's" in found.fix) is (repairing == 0)
    assert repairing == 0 or "linear in vit.layers.{i}.mlp.fc1 reads the output of add" in found.detail


def test_a_coincidence_in_one_case_is_no_cause() -> None:
    """A mistake that looks like another in the case that is given does not in the one that is drawn."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(3, 3, 32, 32, generator=generator)
    wrong = Wrong("vit", {"x = self.embeddings(pixels)": "x = self.embeddings(pixels / pixels.abs().max())"})
    report = verified(wrong, inputs=[Case("one", {"pixel_values": pixels * 255 / pixels.abs().max()})])
    (found,) = report.causes  # which is the truth, and no number that fits one case
    assert "reads the output of div in vit of the port, where the reference's reads an input" in found.detail


OF_CONVOLUTIONS = "group norm or batch norm eps"


class Standardised(nn.Conv2d):
    """A convolution with standardised weights (Qiao et al. 2019)."""

    def __init__(self, eps: float) -> None:
        super().__init__(3, 8, 3)
        self.eps = eps

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's own signature
        rows = self.weight.reshape(1, 8, -1)
        weight = nn.functional.batch_norm(rows, None, None, training=True, eps=self.eps)
        return nn.functional.conv2d(input, weight.reshape_as(self.weight), self.bias)


@pytest.mark.parametrize(
    ("make", "eps", "function"),
    [
        (lambda eps: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, eps)), (1e-5, 1e-3), "batch_norm"),
        (lambda eps: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8, eps)), (1e-6, 1e-5), "group_norm"),
        (lambda eps: nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, eps)), (1e-5, 3e-5), "instance_norm"),
        (lambda eps: nn.Sequential(Standardised(eps), nn.ReLU()), (1e-8, 1e-10), "batch_norm"),
    ],
)
def test_the_eps_of_a_norm_of_a_convolution(
    make: Callable[[float], nn.Module], eps: tuple[float, float], function: str
) -> None:
    reference, port = (make(one) for one in eps)
    for name, parameter in reference.named_parameters():
        nn.init.normal_(parameter, std=0.05 if name == "0.weight" else 0.5)
    port.load_state_dict(reference.state_dict())
    pixels = [Case("one", {"input": 0.2 * torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))})]
    report = verify(into=port.eval(), reference=reference.eval(), inputs=pixels, dtypes=())
    (found,) = report.causes
    assert found.name == OF_CONVOLUTIONS
    assert found.detail == f"eps of {function} is {eps[1]:g} where the reference has {eps[0]:g}"


def _stem(conv: nn.Module, *more: nn.Module) -> nn.Module:
    return nn.Sequential(conv, nn.BatchNorm2d(8), nn.ReLU(), *more, nn.Conv2d(8, 6, 1))


class TensorFlowPadded(nn.Conv2d):
    """Padded before the convolution, with one place more behind."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's own signature
        return super().forward(nn.functional.pad(input, (0, 1, 0, 1)))


class Tokens(nn.Conv2d):
    """A token for each patch of an image."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # as above
        return super().forward(input).flatten(2).transpose(1, 2)


class Reshaped(nn.Conv2d):
    """The same with the channels left where they are."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # as above
        found = super().forward(input)
        return found.reshape(len(found), -1, found.shape[1])


GEOMETRY = "convolution stride, padding or dilation"
POOLING = "pooling window, stride or padding"
LEFT_OUT = "pooling missing"
UNTRANSPOSED = "image reshaped to tokens without transposing"
OF_WINDOWS = {GEOMETRY, POOLING, LEFT_OUT, UNTRANSPOSED}
WINDOW = "window 3, stride 2, padding 1"


@pytest.mark.parametrize(
    ("reference", "port", "name", "detail"),
    [
        (
            lambda: _stem(nn.Conv2d(3, 8, 7, 2, 3)),
            lambda: _stem(nn.Conv2d(3, 8, 7, 1, 0)),
            GEOMETRY,
            "stride 1, padding 0 where the reference has stride 2, padding 3",
        ),
        (
            lambda: _stem(TensorFlowPadded(3, 8, 3, 2)),
            lambda: _stem(nn.Conv2d(3, 8, 3, 2, 1)),
            GEOMETRY,
            "stride 2, padding 1 where the reference has stride 2, padding (0, 1)",
        ),
        (
            lambda: _stem(nn.Conv2d(3, 8, 3, 2, 1)),
            lambda: _stem(TensorFlowPadded(3, 8, 3, 2)),
            GEOMETRY,
            "stride 2, padding (0, 1) where the reference has stride 2, padding 1",
        ),
        (
            lambda: _stem(nn.Conv2d(3, 8, 3, padding=2, dilation=2)),
            lambda: _stem(nn.Conv2d(3, 8, 3, padding=1)),
            GEOMETRY,
            "stride 1, padding 1 where the reference has stride 1, padding 2, dilation 2",
        ),
        (
            lambda: _stem(nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect")),
            lambda: _stem(nn.Conv2d(3, 8, 3, padding=1)),
            GEOMETRY,
            "stride 1, padding 1 where the reference has stride 1, padding 1 (reflect)",
        ),
        (
            lambda: _stem(nn.Conv2d(3, 8, 3), nn.MaxPool2d(3, 2, 1)),
            lambda: _stem(nn.Conv2d(3, 8, 3), nn.AvgPool2d(3, 2, 1)),
            POOLING,
            f"avg_pool2d with {WINDOW} where the reference has max_pool2d with {WINDOW}",
        ),
        (
            lambda: _stem(nn.Conv2d(3, 8, 3), nn.MaxPool2d(3, 2, 1)),
            lambda: _stem(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2, 2)),
            POOLING,
            f"max_pool2d with window 2, stride 2, padding 0 where the reference has max_pool2d with {WINDOW}",
        ),
        (
            lambda: _stem(nn.Conv2d(3, 8, 3), nn.MaxPool2d(3, 1, 1)),
            lambda: _stem(nn.Conv2d(3, 8, 3), nn.Identity()),
            LEFT_OUT,
            "max_pool2d is left out",
        ),
        (
            lambda: nn.Sequential(Tokens(3, 8, 4, 4), nn.LayerNorm(8)),
            lambda: nn.Sequential(Reshaped(3, 8, 4, 4), nn.LayerNorm(8)),
            UNTRANSPOSED,
            "",
        ),
    ],
)
def test_where_a_kernel_is_laid(
    reference: Callable[[], nn.Module], port: Callable[[], nn.Module], name: str, detail: str
) -> None:
    theirs, ours = reference(), port()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours.load_state_dict(theirs.state_dict())
    pixels = [Case("one", {"input": torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(1))})]
    report = verify(into=ours.eval(), reference=theirs.eval(), inputs=pixels, dtypes=())
    (found,) = report.causes
    assert (found.name, found.detail) == (name, detail)
