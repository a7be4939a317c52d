"""Each form in which attention is written, and each part of the library that looks at attention: all see all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as imported

from porting.causes.dropout import NoDropout
from porting.causes.events import Inventory
from porting.causes.fault_injection import cure, plant, watch
from porting.causes.heads import CAUSES
from porting.causes.model_parts import ModelParts
from porting.causes.mutants import planted
from porting.causes.non_finite import FirstBroken
from porting.causes.replay import Stage
from porting.causes.tape import Recorder
from porting.suggesting.draft.probes import attention
from porting.suggesting.subjects.traced_model import TracedModel
from porting.tracing.attention import WrittenOut
from porting.tracing.running import Side
from porting.tracing.torch_modes import eagerly
from porting.tracing.trace import canonical

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Query, key and value [b h s d] -> the context [b h s d]."""

B, H, S, D = 3, 2, 5, 4
SCALE = D**-0.5
KEPT = torch.ones(B, 1, 1, S, dtype=torch.bool).index_fill(-1, torch.tensor([4]), value=False)
PADDED = torch.zeros(B, 1, 1, S, dtype=torch.float64).masked_fill(~KEPT, -torch.inf)
CAUSAL = torch.zeros(S, S, dtype=torch.float64).masked_fill(torch.ones(S, S).tril() == 0, -torch.inf)
SLOPES = torch.tensor([0.5, 0.25], dtype=torch.float64)
ALIBI = SLOPES.view(H, 1, 1) * (torch.arange(S) - torch.arange(S).view(S, 1))


def cut(x: Tensor) -> Tensor:
    """[b s (h d)] -> [b h s d]."""
    return x.view(B, -1, H, D).transpose(1, 2)


def by(softmax: Callable[[Tensor], Tensor]) -> Attend:
    """Attention that is written out, with one way to write its softmax."""
    return lambda q, k, v: softmax(q @ k.mT * SCALE) @ v


def exp_over_sum(x: Tensor) -> Tensor:
    shifted = torch.exp(x - x.max(-1, keepdim=True).values)
    return shifted / shifted.sum(-1, keepdim=True)


def baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.baddbmm(
        torch.empty(1, 1, 1, dtype=q.dtype), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=SCALE
    )
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view(B, H, S, D)


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As Bloom has it."""
    bias = ALIBI.expand(B, H, S, S).flatten(0, 1)
    scores = bias.baddbmm(batch1=q.flatten(0, 1), batch2=k.flatten(0, 1).mT, beta=1.0, alpha=SCALE)
    return scores.view(B, H, S, S).softmax(-1) @ v


def layer_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Einsum with heads behind positions."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    shares = F.softmax(torch.einsum("bqhd,bkhd->bhqk", q * SCALE, k), dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", shares, v).transpose(1, 2)


def value_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shares = torch.einsum("bhkd, bhqd -> bhqk", [k, q]).mul(SCALE).softmax(-1)
    return torch.einsum("bhkd,bhqk->bhqd", v, shares)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    block = create_block_mask(lambda b, h, i, j: i >= j, B, H, S, S, device="cpu")
    found: Tensor = flex_attention(q, k, v, block_mask=block)
    return found


def flex_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found: Tensor = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + SLOPES[h] * (j - i))
    return found


PLAIN: dict[str, Attend] = {
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),  # noqa: PLW0108  # a name that is looked up now
    "sdpa by keyword": lambda q, k, v: F.scaled_dot_product_attention(value=v, key=k, query=q),
    "sdpa imported by name": imported,
    "sdpa with its scale": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=SCALE),
    "flex_attention": flex_attention,
    "F.softmax": by(lambda x: F.softmax(x, dim=-1)),
    "F.softmax by keyword": by(lambda x: F.softmax(dim=-1, input=x)),
    "torch.softmax": by(lambda x: torch.softmax(x, -1)),
    "torch.softmax by keyword": by(lambda x: torch.softmax(input=x, dim=-1)),
    "torch.special.softmax": by(lambda x: torch.special.softmax(x, -1)),
    "the method": by(lambda x: x.softmax(-1)),
    "the module": by(nn.Softmax(dim=-1)),
    "exp over its sum": by(exp_over_sum),
    "exp over its sum, each made anew": by(lambda x: x.exp().div(x.exp().sum(dim=-1, keepdim=True))),
    "exp less logsumexp": by(lambda x: (x - torch.logsumexp(x, -1, keepdim=True)).exp()),
    "exp of log_softmax": by(lambda x: F.log_softmax(x, dim=-1).exp()),
    "matmul by keyword": lambda q, k, v: torch.matmul(
        input=torch.matmul(other=k.mT, input=q).mul(SCALE).softmax(-1), other=v
    ),
    "bmm": lambda q, k, v: torch.bmm(
        torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).mul(SCALE).softmax(-1), v.flatten(0, 1)
    ).view(B, H, S, D),
    "baddbmm": baddbmm,
    "einsum": lambda q, k, v: torch.einsum(
        "bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).div(2).softmax(-1), v
    ),
    "einsum, heads behind positions": layer_first,
    "einsum, key and value first": value_first,
}
"""Without a mask."""

MASKED: dict[str, tuple[Attend, Tensor]] = {
    "sdpa, boolean mask": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, KEPT), PADDED),
    "sdpa, boolean mask by keyword": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=KEPT), PADDED),
    "sdpa, additive mask": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, PADDED), PADDED),
    "sdpa, causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.0, True), CAUSAL),
    "sdpa, causal by keyword": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), CAUSAL),
    "flex_attention, block mask": (flex, CAUSAL),
    "flex_attention, score_mod": (flex_bias, ALIBI),
    "baddbmm of a bias": (alibi, ALIBI),
    "masked_fill": (
        lambda q, k, v: (q @ k.mT * SCALE).masked_fill(mask=~KEPT, value=-torch.inf).softmax(-1) @ v,
        PADDED,
    ),
}
"""With a mask or a bias, and what that adds to the scores."""

SHARED: dict[str, Attend] = {
    "sdpa, grouped": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True),
    "flex_attention, grouped": lambda q, k, v: flex_attention(q, k[:, :1], v[:, :1], enable_gqa=True),
}
"""With one head of keys and values for all queries."""


class Port(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend = attend
        self.query, self.key, self.value, self.output = (nn.Linear(H * D, H * D) for _ in range(4))

    def heads(self, x: Tensor) -> list[Tensor]:
        return [cut(projection(x)) for projection in (self.query, self.key, self.value)]

    def forward(self, x: Tensor) -> Tensor:
        context = self.attend(*self.heads(x))
        found: Tensor = self.output(context.transpose(1, 2).flatten(2))
        return found


class Torchs(nn.Module):
    """``torch.nn.MultiheadAttention``."""

    def __init__(self, *, weights: bool, padded: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.MultiheadAttention(H * D, H, batch_first=True)
        nn.init.normal_(self.inner.in_proj_bias)
        self.weights = weights
        self.padding = ~KEPT[:, 0, 0] if padded else None

    def heads(self, x: Tensor) -> list[Tensor]:
        made = F.linear(x, self.inner.in_proj_weight, self.inner.in_proj_bias)
        return [cut(chunk) for chunk in made.chunk(3, -1)]

    def output(self, context: Tensor) -> Tensor:
        found: Tensor = self.inner.out_proj(context)
        return found

    def forward(self, x: Tensor) -> Tensor:
        found, weights = self.inner(x, x, x, key_padding_mask=self.padding, need_weights=self.weights)
        assert (weights is not None) == self.weights
        result: Tensor = found
        return result


@dataclass
class Form:
    """A model that attends, and what its scores are.

    Attributes:
        model: it.
        added: what is added to the scores.
        shared: there is one head of keys and values.
    """

    model: Port | Torchs
    added: Tensor
    shared: bool = False

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.model.heads(x)
        return (q, k[:, :1].expand_as(k), v[:, :1].expand_as(v)) if self.shared else (q, k, v)

    def scores(self, x: Tensor, scale: float = SCALE) -> Tensor:
        q, k, _ = self.parts(x)
        return q @ k.mT * scale + self.added

    def result(self, x: Tensor, shares: Tensor) -> Tensor:
        return self.model.output((shares @ self.parts(x)[2]).transpose(1, 2).flatten(2))


NOTHING = torch.zeros(1, dtype=torch.float64)


def ported(attend: Attend, added: Tensor = NOTHING, *, shared: bool = False) -> Form:
    return Form(Port(attend), added, shared=shared)


def torchs(*, weights: bool, padded: bool) -> Form:
    return Form(Torchs(weights=weights, padded=padded), PADDED if padded else NOTHING)


FORMS: dict[str, Callable[[], Form]] = {
    **{name: partial(ported, attention) for name, attention in PLAIN.items()},
    **{name: partial(ported, *variant) for name, variant in MASKED.items()},
    **{name: partial(ported, attention, shared=True) for name, attention in SHARED.items()},
    **{
        f"MultiheadAttention{', weights' * weights}{', padding' * padded}": partial(
            torchs, weights=weights, padded=padded
        )
        for weights in (True, False)
        for padded in (True, False)
    },
}
X = torch.randn(B, S, H * D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    found = FORMS[request.param]()
    found.model.double().eval()
    return found


def inner(form: Form) -> str:
    return "inner" if isinstance(form.model, Torchs) else "."


def side(form: Form) -> Side:
    wanted = [f"{inner(form)} -> {kind}" for kind in ("scores", "probabilities")]
    return Side(title="it", module=form.model, arguments=[{"x": X}], wanted=[*wanted, "."])


@torch.no_grad()
def test_verify_is_shown_scores_and_probabilities(form: Form) -> None:
    found = side(form).record(0)
    scores = form.scores(X)
    assert list(found) == [f"{inner(form)} -> scores", f"{inner(form)} -> probabilities", "."]
    seen, shares, output = found.values()
    torch.testing.assert_close(seen.view(B, H, S, S), canonical(scores))
    torch.testing.assert_close(shares.view(B, H, S, S), scores.softmax(-1))
    torch.testing.assert_close(output, form.result(X, scores.softmax(-1)))


def at(kind: str, value: Tensor, point: str, seen: Tensor) -> Tensor | None:
    return value.view_as(seen) if point.endswith(kind) else None


@torch.no_grad()
def test_verify_goes_on_with_scores_and_probabilities_of_its_own(form: Form) -> None:
    even = torch.full((B, H, S, S), 1 / S, dtype=torch.float64)
    for kind, value in (("scores", torch.zeros_like(even)), ("probabilities", even)):
        found = side(form).record(0, after=partial(at, kind, value))
        torch.testing.assert_close(found["."], form.result(X, even))


@torch.no_grad()
def test_the_search_for_a_cause_finds_it_and_plays_it_with_another_scale(form: Form) -> None:
    model_side = side(form)
    model_side.spelled_out = True
    with Recorder(form.model) as recorder:
        model_side.run(0, recorder.mark)
    (known,) = ModelParts(recorder.tape, {"x": X}).attentions
    torch.testing.assert_close(recorder.tape[known.softmax.result].view(B, H, S, S), form.scores(X).softmax(-1))
    twice = next(cause for cause in CAUSES if cause.name == "1/sqrt(d) twice")
    (altered,) = twice.alterations(ModelParts(recorder.tape, {"x": X}))
    played = Stage(recorder.tape, {}).play(".", altered.rewrites)
    assert played is not None
    torch.testing.assert_close(played, form.result(X, form.scores(X, SCALE**2).softmax(-1)))


@torch.no_grad()
def test_a_mistake_is_planted_into_it(form: Form) -> None:
    expected = form.model(X)
    inventory = watch(form.model)
    torch.testing.assert_close(form.model(X), expected)
    assert inventory.roles == ["query", "key", "value", "output"]
    cure(form.model)
    sites = plant(form.model, next(planted("1/sqrt(d) twice")), Inventory())
    found = form.model(X)
    assert sites == [inner(form).strip(".")]
    cure(form.model)
    torch.testing.assert_close(found, form.result(X, form.scores(X, SCALE**2).softmax(-1)))


def test_suggest_sees_its_weights_and_its_scores(form: Form) -> None:
    leaves = dict(form.model.named_parameters())
    traced = TracedModel(form.model, leaves, frozenset(leaves), lambda model: model(X), [X])
    used = {name for unit in traced.run().units for name in unit.names}
    seen = attention(traced)
    assert used == set(leaves)
    path = inner(form).strip(".") or "."
    torch.testing.assert_close(seen["scores"][path].view(B, H, S, S), canonical(form.scores(X)).detach())


@torch.no_grad()
def test_it_is_the_same_when_it_is_written_out(form: Form) -> None:
    expected = form.model(X)
    for by_heads in (False, True):
        with eagerly(), WrittenOut(by_heads=by_heads):
            torch.testing.assert_close(form.model(X), expected)


@torch.no_grad()
def test_a_row_without_a_key_is_as_the_kernel_has_it() -> None:
    """0, though a softmax of such a row is NaN: that is what is named when somebody asks for the first NaN."""
    hidden = torch.ones(S, S, dtype=torch.bool).index_fill(0, torch.tensor([2]), value=False)
    model = Port(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, hidden)).double().eval()
    expected = model(X)
    assert bool(expected.isfinite().all())
    with FirstBroken() as first, WrittenOut():
        torch.testing.assert_close(model(X), expected, rtol=0, atol=1e-14)
    assert first.first is not None
    assert (first.first.operation, first.first.hidden) == ("softmax", True)
    assert watch(model).roles == []
    torch.testing.assert_close(model(X), expected, rtol=0, atol=1e-14)


class Dropping(nn.Module):
    """What asks for dropout in each way that there is."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.inner = nn.MultiheadAttention(H * D, H, dropout=0.25, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        q = cut(x)
        ways: dict[str, Callable[[], Tensor]] = {
            "sdpa": lambda: F.scaled_dot_product_attention(q, q, q, None, 0.25),
            "sdpa by keyword": lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.25),
            "F.dropout": lambda: F.dropout(x, 0.25),
            "F.dropout by keyword": lambda: F.dropout(training=True, p=0.25, input=x),
            "torch.dropout": lambda: torch.dropout(x, 0.25, True),
            "F.dropout1d by keyword": lambda: F.dropout1d(input=x, p=0.25, training=True),
            "MultiheadAttention": lambda: self.inner(x, x, x)[0],
        }
        return ways[self.way]()


@pytest.mark.parametrize(
    "way",
    [
        "sdpa", "sdpa by keyword", "F.dropout", "F.dropout by keyword", "torch.dropout", "F.dropout1d by keyword",
        "MultiheadAttention",
    ],
)  # fmt: skip
@torch.no_grad()
def test_dropout_is_switched_off_however_it_is_asked_for(way: str) -> None:
    model = Dropping(way).double()
    silence = NoDropout()
    with silence:
        once, again = model(X), model(X)
    assert torch.equal(once, again)
    assert silence.rates == {0.25}
    assert not torch.equal(model(X), model(X))


UNSEEN: dict[str, Attend] = {
    "a sum with a number added": by(lambda x: x.exp() / (x.exp().sum(-1, keepdim=True) + 1e-9)),
    "steps that work in place": by(lambda x: (e := x.clone().exp_()).div_(e.sum(-1, keepdim=True))),
}


@torch.no_grad()
def test_kernels_within_a_vmap_are_left_as_they_are() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = torch.vmap(F.scaled_dot_product_attention)(q, k, v)
        return found

    model = Port(attend).double().eval()
    expected = model(X)
    with WrittenOut():
        torch.testing.assert_close(model(X), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", UNSEEN)
def test_what_is_not_seen_is_left_as_it_is(name: str) -> None:
    """The module's list of these is as long as this one, but for kernels that are no part of torch."""
    form = Form(Port(UNSEEN[name]).double().eval(), torch.zeros(1))
    with torch.no_grad():
        assert list(side(form).record(0)) == ["."]
        with WrittenOut():
            torch.testing.assert_close(form.model(X), form.result(X, form.scores(X).softmax(-1)))


@pytest.mark.slow
def test_flex_attention_is_not_compiled_when_it_is_the_first_to_import_the_compiler() -> None:
    """In a fresh process, as for a user's first forward."""
    code = (
        "import sys, torch\n"
        "from torch import nn\n"
        "from torch.nn.attention import flex_attention as flex\n"
        "from porting.tracing.running import Side\n"
        "class Port(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return flex.flex_attention(x, x, x)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "x = torch.randn(1, 2, 3, 16, dtype=torch.float64)\n"
        "side = Side(title='it', module=Port(), arguments=[{'x': x}], wanted=['.'], spelled_out=True)\n"
        "torch.testing.assert_close(side.record(0)['.'], torch.softmax(x @ x.mT / 4, -1) @ x)\n"
        "assert not flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
