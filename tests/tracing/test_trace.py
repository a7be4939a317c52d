"""Seeing into a module while it runs, and going on with other values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.notation.rule import Term
from porting.tracing.attention import written_out
from porting.tracing.trace import (
    MASKED,
    Trace,
    Visit,
    canonical,
    numbered,
    points,
    select,
    split,
    substitute,
    trace,
)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Data:
    left: Tensor
    right: Tensor


class Plain:
    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right


LEFT, RIGHT, OTHER = torch.zeros(2), torch.ones(2), torch.full((2,), 7.0)
CONTAINERS: dict[str, Any] = {  # Any: whatever a module may return
    "tuple": (LEFT, RIGHT),
    "list": [LEFT, RIGHT],
    "dictionary": {"left": LEFT, "right": RIGHT},
    "named tuple": Pair(LEFT, RIGHT),
    "dataclass": Data(LEFT, RIGHT),
    "returned by torch": torch.sort(LEFT),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_the_second_output_by_number(kind: str) -> None:
    output = CONTAINERS[kind]
    second = select(output, "1")
    assert second is not None
    changed = substitute(output, "1", OTHER)
    assert type(changed) is type(output)
    assert select(changed, "1") is OTHER
    assert select(changed, "") is select(output, "")
    assert select(output, "1") is second
    assert select(output, "2") is None


@pytest.mark.parametrize("output", [CONTAINERS["dictionary"], Pair(LEFT, RIGHT), Data(LEFT, RIGHT), Plain(LEFT, RIGHT)])
def test_an_output_by_name(output: Any) -> None:
    assert select(output, "right") is RIGHT
    changed = substitute(output, "right", OTHER)
    assert type(changed) is type(output)
    assert select(changed, "right") is OTHER
    assert select(changed, "left") is LEFT
    assert select(output, "right") is RIGHT
    assert select(output, "middle") is None


def test_what_is_no_tensor_is_not_selected() -> None:
    assert select(None, "") is None
    assert select((None, LEFT), "") is None
    assert select(LEFT, "") is LEFT
    assert select(LEFT, "1") is None
    assert substitute(LEFT, "", OTHER) is OTHER


def test_points_are_numbered_by_call() -> None:
    assert numbered("a -> 1", 1) == "a -> 1"
    assert numbered("a -> 1", 3) == "a -> 1 #3"
    assert split("a -> 1 #3") == ("a -> 1", 3)
    assert split("a -> 1") == ("a -> 1", 1)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(self.first(x)))
        y += 1.0
        return y


def seen(module: nn.Module, call: Any, *wanted: str, visit: Visit | None = None) -> Trace:
    found: Trace = {}

    def record(point: str, value: Tensor) -> Tensor | None:
        found[point] = value.clone()
        return visit(point, value) if visit else None

    trace(module, call, wanted, record)
    return found


def test_points_are_found_by_pattern_and_prefix() -> None:
    terms = [Term.parse("bert.{p:first,second}"), Term.parse("bert.first -> 0"), Term.parse(".")]
    assert points(terms, Small(), "bert.") == [".", "first", "first -> 0", "second"]
    assert points([Term.parse("third")], Small()) == []


def test_every_call_is_seen_in_order_and_before_it_is_changed() -> None:
    module, x = Small(), torch.randn(2, 3)
    found = seen(module, lambda traced: traced(x), "second", "first", ".")
    assert list(found) == ["first", "first #2", "second", "."]
    once = module.first(x)
    torch.testing.assert_close(found["first"], once, rtol=0, atol=0)
    torch.testing.assert_close(found["first #2"], module.first(once), rtol=0, atol=0)
    torch.testing.assert_close(found["."], found["second"] + 1, rtol=0, atol=0)


def test_the_model_goes_on_with_what_it_is_given() -> None:
    module, x = Small(), torch.randn(2, 3)
    other = torch.randn(2, 3)
    found = seen(
        module,
        lambda traced: traced(x),
        "first",
        "second",
        visit=lambda point, value: other if point == "first #2" else None,
    )
    torch.testing.assert_close(found["second"], module.second(other), rtol=0, atol=0)


def test_hooks_are_gone_after_a_failure() -> None:
    module = Small()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        seen(module, lambda traced: traced(torch.randn(2, 5)), "first", "second")
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert torch.softmax(torch.zeros(2), 0).tolist() == [0.5, 0.5]


Q, K, V = torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
MASK = torch.zeros(2, 1, 1, 5).index_fill(-1, torch.tensor([4]), -10000.0)
SCORES = canonical(Q @ K.mT / 8**0.5 + MASK)


class Attention(nn.Module):
    def __init__(self, how: Any) -> None:
        super().__init__()
        self.how = how

    def forward(self) -> Tensor:
        found: Tensor = self.how(Q @ K.mT / 8**0.5 + MASK)
        return found


WAYS: dict[str, Any] = {
    "F.softmax": lambda scores: F.softmax(scores, dim=-1),
    "torch.softmax": lambda scores: torch.softmax(scores, -1),
    "the method": lambda scores: scores.softmax(-1),
    "the module": nn.Softmax(dim=-1),
    "in another dtype": lambda scores: F.softmax(scores, dim=-1, dtype=torch.float64).float(),
    "by keyword": lambda scores: F.softmax(dim=3, input=scores),
    "the fused kernel": lambda scores: F.scaled_dot_product_attention(Q, K, V, attn_mask=MASK),
    "the fused kernel, boolean mask": lambda scores: F.scaled_dot_product_attention(Q, K, V, attn_mask=MASK == 0),
    "a large constant on top": lambda scores: torch.softmax(scores + 100, -1),
}


@pytest.mark.parametrize("way", WAYS)
def test_scores_and_probabilities_are_seen(way: str) -> None:
    module = nn.ModuleDict({"core": Attention(WAYS[way])})
    found = seen(module, lambda traced: traced["core"](), "core -> scores", "core -> probabilities")
    assert list(found) == ["core -> scores", "core -> probabilities"]
    torch.testing.assert_close(found["core -> scores"].float(), SCORES, rtol=0, atol=2e-5)
    torch.testing.assert_close(found["core -> probabilities"].float(), (Q @ K.mT / 8**0.5 + MASK).softmax(-1))


def test_a_softmax_over_another_axis() -> None:
    module = nn.ModuleDict({"core": Attention(lambda scores: scores.mT.softmax(-2))})
    found = seen(module, lambda traced: traced["core"](), "core -> scores")
    torch.testing.assert_close(found["core -> scores"].mT, SCORES, rtol=0, atol=0)


@pytest.mark.parametrize("need_weights", [True, False])
def test_scores_within_torchs_own_attention(need_weights: bool) -> None:
    module = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(3, 5, 8)
    found = seen(module, lambda traced: traced(x, x, x, need_weights=need_weights), ". -> scores", ". -> 0")
    q, k = F.linear(x, module.in_proj_weight[:16], module.in_proj_bias[:16]).view(3, 5, 2, 2, 4).permute(2, 0, 3, 1, 4)
    torch.testing.assert_close(found[". -> scores"].view(3, 2, 5, 5), canonical(q @ k.mT / 2))
    assert found[". -> 0"].shape == x.shape


@pytest.mark.parametrize(
    "options",
    [{"is_causal": True}, {"scale": 0.3}, {"attn_mask": MASK == 0}, {"attn_mask": MASK}, {}],
    ids=["causal", "scale", "boolean mask", "additive mask", "nothing"],
)
def test_the_scores_are_those_of_the_fused_kernel(options: dict[str, Any]) -> None:
    expected = F.scaled_dot_product_attention(Q, K, V, **options)
    torch.testing.assert_close(written_out(F.scaled_dot_product_attention, (Q, K, V), options), expected)


def test_grouped_queries() -> None:
    expected = F.scaled_dot_product_attention(Q, K[:, :2], V[:, :2], enable_gqa=True)
    found = written_out(F.scaled_dot_product_attention, (Q, K[:, :2], V[:, :2]), {"enable_gqa": True})
    torch.testing.assert_close(found, expected)


def test_what_softmax_cannot_see_is_taken_out() -> None:
    scores = torch.tensor([[3.0, 1.0, -1e4], [3.0, 1.0, -torch.inf]], dtype=torch.float64)
    assert canonical(scores).tolist() == [[0.0, -2.0, MASKED]] * 2
    assert canonical(scores + 50).tolist() == canonical(scores).tolist()
    assert torch.tensor([0.0, MASKED], dtype=torch.float64).exp().sum() == 1.0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("output", ["scores", "probabilities"])
def test_attention_goes_on_with_other_scores_and_probabilities(way: str, output: str) -> None:
    module = nn.ModuleDict({"core": Attention(WAYS[way])})
    scores = canonical(torch.randn(SCORES.shape, generator=torch.Generator().manual_seed(5)))
    given = scores if output == "scores" else scores.softmax(-1)
    results: list[Tensor] = []
    trace(
        module,
        lambda traced: results.append(traced.get_submodule("core")()),
        [f"core -> {output}"],
        lambda point, value: given.to(value.dtype),
    )
    torch.testing.assert_close(results[0], scores.softmax(-1) @ V if "kernel" in way else scores.softmax(-1))


def test_grouped_attention_goes_on_with_other_probabilities() -> None:
    few = K[:, :2], V[:, :2]
    module = nn.ModuleDict({"core": Attention(lambda _: F.scaled_dot_product_attention(Q, *few, enable_gqa=True))})
    given = canonical(torch.randn(SCORES.shape, generator=torch.Generator().manual_seed(5))).softmax(-1)
    results: list[Tensor] = []
    trace(
        module,
        lambda traced: results.append(traced.get_submodule("core")()),
        ["core -> probabilities"],
        lambda point, value: given,
    )
    torch.testing.assert_close(results[0], given @ V[:, :2].repeat_interleave(2, 1))
