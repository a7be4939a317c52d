"""Decoders as they are written: caches, inference mode, sizes that they reckon, constants in buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import porting
from porting.build import Bounds
from porting.suggesting import Suggestion, Verdict, suggest
from porting.suggesting.subjects.building import shapes_for
from porting.suggesting.subjects.operation_trace import trace_operations
from porting.suggesting.subjects.solved_sizes import own_sizes
from porting.suggesting.subjects.twin import draw_parameters
from tests.suggesting.llama import FIELDS, Attention, Block, Feed, Llama, builder
from tests.suggesting.oracle import BOUND, Drafted, apart, drafted, source

GPT = {"vocab_size": 113, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 30}


class Remembering(Attention):
    """Keys and values go through a cache in an attribute, which nobody moves to another dtype."""

    def __init__(self, dim: int, heads: int, groups: int) -> None:
        super().__init__(dim, heads, groups, lie="apart", rotate="neighbours", bias=False)
        self.kept = torch.zeros(2, 8, 64, groups, self.size)

    def projected(self, x: Tensor, start: int = 0) -> tuple[Tensor, ...]:
        query, key, value = super().projected(x)
        rows, stop = len(x), start + x.shape[1]
        self.kept[0, :rows, start:stop], self.kept[1, :rows, start:stop] = key, value
        return query, self.kept[0, :rows, :stop], self.kept[1, :rows, :stop]


class Inferring(Llama):
    """It never needs gradients, and says so; its rounding is asked for by a cast."""

    @torch.inference_mode()
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).float()


def rounded(*, kind: type[Llama], remember: bool) -> Callable[..., nn.Module]:
    """A builder whose inner size is a multiple of its own."""

    def build(
        vocab_size: int, dim: int, n_layers: int, n_heads: int, n_kv_heads: int, max_seq_len: int, norm_eps: float
    ) -> nn.Module:
        inner = -(-dim * 8 // 3 // 144) * 144
        made = []
        for _ in range(n_layers):
            plain = Attention(dim, n_heads, n_kv_heads, lie="apart", rotate="halves", bias=False)
            attention = Remembering(dim, n_heads, n_kv_heads) if remember else plain
            made.append(Block(dim, attention, Feed(dim, inner, "apart"), norm_eps))
        return kind(made, vocab_size, dim, dim // n_heads, max_seq_len, norm_eps, 10000.0)

    return build


def test_a_cache_and_an_inner_size_of_its_own_are_no_obstacle(tmp_path: Path) -> None:
    reference = source("LlamaForCausalLM", {**FIELDS, "intermediate_size": 144}, tmp_path)
    build = rounded(kind=Llama, remember=True)
    assert_remembers(reference, tmp_path, build, drafted(tmp_path, build))


def assert_remembers(
    reference: Any, folder: Path, build: Callable[..., nn.Module], found: Suggestion | Drafted
) -> None:
    tokens = torch.randint(3, 100, (4, 20), generator=torch.Generator().manual_seed(1))
    module = build(113, 48, 3, 6, 2, 64, 1e-5).double()
    for layer in module.layers:  # type: ignore[union-attr]  # a list
        layer.attention.kept = layer.attention.kept.double()
    assert apart(reference, folder, module, found, {"input_ids": tokens}, {"tokens": tokens}) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "remember"), [(Llama, True), (Inferring, False)])
def test_a_cache_inference_mode_and_an_inner_size_of_its_own(
    tmp_path: Path, kind: type[Llama], *, remember: bool
) -> None:
    reference = source("LlamaForCausalLM", {**FIELDS, "intermediate_size": 144}, tmp_path)
    build = rounded(kind=kind, remember=remember)
    found = suggest(tmp_path, build)
    assert found.verdict is Verdict.EXACT, str(found)
    if kind is Llama:  # what inference mode computes is never differentiated
        assert found.shown == (30, 30)
        assert_remembers(reference, tmp_path, build, found)


class Offset(Llama):
    """As the first Llama was published: a place to start from has to be given, and here a cache and a flag as well."""

    def forward(  # type: ignore[override]  # it takes more
        self, tokens: Tensor, start_pos: int, caches: list[Tensor] | None, use_cache: bool
    ) -> Tensor:
        assert start_pos == 0
        assert caches is None
        assert use_cache is False
        return super().forward(tokens)


def test_what_no_input_stands_for_is_given_in_each_call(tmp_path: Path) -> None:
    reference = source("LlamaForCausalLM", {**FIELDS, "intermediate_size": 144}, tmp_path)
    build = rounded(kind=Offset, remember=False)
    found = drafted(tmp_path, build)
    assert found.table.arguments == {"start_pos": 0, "caches": None, "use_cache": False}
    tokens = torch.randint(3, 100, (4, 20), generator=torch.Generator().manual_seed(1))
    given: dict[str, Any] = {"tokens": tokens, **found.table.arguments}
    module = build(113, 48, 3, 6, 2, 64, 1e-5).double()
    assert apart(reference, tmp_path, module, found, {"input_ids": tokens}, given) < BOUND


@pytest.mark.slow
def test_suggest_and_verify_give_it_too_and_leave_the_module_as_it_is(tmp_path: Path) -> None:
    source("LlamaForCausalLM", {**FIELDS, "intermediate_size": 144}, tmp_path)
    build = rounded(kind=Offset, remember=False)
    found = suggest(tmp_path, build)
    assert found.verdict is Verdict.EXACT, str(found)
    module = build(113, 48, 3, 6, 2, 64, 1e-5)
    assert porting.verify(tmp_path, into=module, table=found.table).faithful
    with pytest.raises(TypeError, match="start_pos"):
        module(torch.zeros(1, 2, dtype=torch.long))


def test_what_is_written_into_is_no_weight() -> None:
    attention = Remembering(24, 4, 2).double()
    attention.kept = attention.kept.double()
    x, angles = torch.randn(2, 5, 24, dtype=torch.float64), torch.rand(5, 1, 3, dtype=torch.float64)
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    leaves = {**dict(attention.named_parameters()), "kept": attention.kept}
    found = trace_operations(attention, lambda one: one(x, angles.cos(), angles.sin(), seen), leaves, [x])
    assert [unit.names for unit in found.units] == [(f"{name}.weight",) for name in ("wq", "wk", "wv", "wo")]


def test_a_size_that_a_module_computes_is_taken_from_the_module_and_no_other_is() -> None:
    config = {"hidden_size": 48, "num_hidden_layers": 7, "intermediate_size": 128, "vocab_size": 500}
    twin = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 124, "vocab_size": 97}
    within = Bounds(parameters=100, nbytes=2**30)

    def found(inner: Callable[[int, int], int], words: Callable[[int], int], fused: int = 1) -> dict[str, int]:
        def make(vocab_size: int, hidden_size: int, intermediate_size: int, num_hidden_layers: int) -> nn.Module:
            size = inner(hidden_size, intermediate_size)
            layers = [nn.Linear(hidden_size, fused * size) for _ in range(num_hidden_layers)]
            assert num_hidden_layers == 2
            return nn.Sequential(
                nn.Embedding(words(vocab_size), hidden_size), nn.Linear(hidden_size, 3 * hidden_size), *layers
            )

        return own_sizes(make, config, make(97, 32, 124, 2), twin, within)

    def rounded(width: int, _: int) -> int:
        return 16 * ((8 * width // 3 + 15) // 16)

    def asked(_: int, inner: int) -> int:
        return inner

    assert found(rounded, lambda words: words) == {"intermediate_size": 96}  # as much as three times the width
    assert found(rounded, lambda words: words, fused=2) == {"intermediate_size": 96}
    assert found(asked, lambda words: words) == {}
    assert found(asked, lambda _: 500) == {"vocab_size": 500}
    assert found(lambda *_: 7, lambda words: words) == {}  # the checkpoint's does not fit either


def test_a_size_that_one_part_has_whatever_it_is_given_and_another_follows() -> None:
    """As a table of words that is built with its default width."""
    config = {"hidden_size": 48, "embedding_size": 128, "num_attention_heads": 4, "vocab_size": 500}
    twin = {"hidden_size": 40, "embedding_size": 24, "num_attention_heads": 5, "vocab_size": 97}

    def make(vocab_size: int, hidden_size: int, embedding_size: int, table: int = 0, out: int = 0) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(vocab_size, table or embedding_size), nn.Linear(embedding_size, out or hidden_size)
        )

    def found(**fixed: int) -> dict[str, int]:
        def fixedly(vocab_size: int, hidden_size: int, embedding_size: int) -> nn.Module:
            return make(vocab_size, hidden_size, embedding_size, **fixed)

        return own_sizes(fixedly, config, fixedly(97, 40, 24), twin, Bounds(parameters=100, nbytes=2**30))

    assert found() == {}
    assert found(table=128) == {"embedding_size": 128}
    assert found(table=64) == {}  # which the checkpoint's is not
    assert found(out=48) == {}  # the width: all of the checkpoint's sizes are tried then


def test_shapes_of_a_builder_that_computes_with_values() -> None:
    def make(hidden_size: int) -> nn.Module:
        made = nn.Linear(hidden_size, 2)
        float(made.weight.sum())  # which a tensor on the meta device cannot say
        return made

    found = shapes_for(make, {"hidden_size": 5}, Bounds(parameters=100, nbytes=2**30))
    assert found == {"weight": (2, 5), "bias": (2,)}


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.w + self.b


class Layer(nn.Module):
    """A parameter for each projection, with the heads as an axis; ``first``: the norms stand in front."""

    def __init__(self, width: int, heads: int, *, first: bool, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        size = width // heads
        self.first, self.act, self.size = first, activation, size
        self.w_q, self.w_k, self.w_v = (nn.Parameter(torch.zeros(heads, width, size)) for _ in range(3))
        self.b_q, self.b_k, self.b_v = (nn.Parameter(torch.zeros(heads, size)) for _ in range(3))
        self.w_o, self.b_o = nn.Parameter(torch.zeros(heads, size, width)), nn.Parameter(torch.zeros(width))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.register_buffer("never", torch.tensor(-1e5))

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            torch.einsum("bse,hed->bshd", x, weight) + bias
            for weight, bias in ((self.w_q, self.b_q), (self.w_k, self.b_k), (self.w_v, self.b_v))
        )
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / self.size**0.5
        seen = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        weights = torch.where(seen, scores, self.get_buffer("never")).softmax(-1)
        return torch.einsum("bhqk,bkhd,hde->bqe", weights, value, self.w_o) + self.b_o

    def feed(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.up(x)))
        return out

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = x + self.attend(self.norm1(x))
            return x + self.feed(self.norm2(x))
        x = self.norm1(x + self.attend(x))
        out: Tensor = self.norm2(x + self.feed(x))
        return out


class Small(nn.Module):
    """GPT-2, or without norms in front the GPT before it."""

    def __init__(
        self, words: int, width: int, depth: int, heads: int, length: int, *, first: bool, exact: bool = False
    ) -> None:
        super().__init__()
        gelu = nn.GELU(approximate="none" if exact else "tanh")
        self.embed, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Layer(width, heads, first=first, activation=gelu) for _ in range(depth))
        self.last = Norm(width) if first else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.last(x), self.embed.weight)


@pytest.mark.slow
def test_a_number_in_a_buffer_is_the_modules_own(tmp_path: Path) -> None:
    source("GPT2LMHeadModel", GPT, tmp_path)

    def build(vocab_size: int, n_embd: int, n_layer: int, n_head: int, n_positions: int) -> nn.Module:
        return Small(vocab_size, n_embd, n_layer, n_head, n_positions, first=True)

    found = suggest(tmp_path, build)
    assert found.verdict is Verdict.EXACT, str(found)
    assert '"blocks.{i}.never" = "a buffer, which the module computes"' in found.text
    assert found.trials < 50


class Headed(Small):
    """The head has a bias of its own, which the reference's has not; with or without the norm in front of it."""

    def __init__(self, *sizes: int, normed: bool) -> None:
        super().__init__(*sizes, first=True)
        self.head = nn.Linear(sizes[1], sizes[0])
        self.head.weight = self.embed.weight
        self.last = Norm(sizes[1]) if normed else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.last(x))
        return found


def headed(*, normed: bool) -> Callable[..., nn.Module]:
    def build(vocab_size: int, n_embd: int, n_layer: int, n_head: int, n_positions: int) -> nn.Module:
        return Headed(vocab_size, n_embd, n_layer, n_head, n_positions, normed=normed)

    return build


class OwnHead(Small):
    """Its head has its own copy of the words' table: a matrix [e v], or a convolution of one token [v e 1]."""

    def __init__(self, *sizes: int, convolved: bool) -> None:
        super().__init__(*sizes, first=True)
        self.head = nn.Conv1d(sizes[1], sizes[0], 1, bias=False) if convolved else nn.Parameter(self.embed.weight.T * 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        x = self.last(x)
        found: Tensor = x @ self.head if isinstance(self.head, nn.Parameter) else self.head(x.mT).mT
        return found


@pytest.mark.parametrize(("convolved", "copy"), [(False, "head [e t]"), (True, "head.weight [t e 1]")])
def test_a_tied_head_in_other_axes_is_a_second_target_in_the_draft(
    tmp_path: Path, *, convolved: bool, copy: str
) -> None:
    source("GPT2LMHeadModel", GPT, tmp_path)
    draft = drafted(tmp_path, lambda config: OwnHead(*_sizes(config), convolved=convolved))
    assert f'"transformer.wte.weight [t e]" = ["embed.weight [t e]", "{copy}"]' in draft.text


def _sizes(config: Mapping[str, int]) -> list[int]:
    return [config[name] for name in ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions")]


@pytest.mark.slow
@pytest.mark.parametrize("convolved", [False, True])
def test_a_tied_head_in_other_axes_is_filled_and_given_back(tmp_path: Path, *, convolved: bool) -> None:
    reference = source("GPT2LMHeadModel", GPT, tmp_path)
    found = suggest(tmp_path, lambda config: OwnHead(*_sizes(config), convolved=convolved))
    assert found.verdict is Verdict.EXACT, str(found)
    module: nn.Module = porting.load(tmp_path, OwnHead(*_sizes(GPT), convolved=convolved).double(), found.table)
    words = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert float((module(words) - reference(words)[0]).abs().max()) < BOUND
        module.get_parameter("head.weight" if convolved else "head").add_(1.0)
    with pytest.raises(porting.PortingError, match="head"):
        porting.export(module, found.table, tmp_path / "back")


def test_a_bias_of_a_tied_head_that_the_checkpoint_lacks_is_in_the_draft(tmp_path: Path) -> None:
    source("GPT2LMHeadModel", GPT, tmp_path)
    assert '"head.bias" = "zeros"' in drafted(tmp_path, headed(normed=True)).text


@pytest.mark.slow
@pytest.mark.parametrize("normed", [True, False])
def test_a_bias_of_a_tied_head_that_the_checkpoint_lacks_is_made(tmp_path: Path, *, normed: bool) -> None:
    source("GPT2LMHeadModel", GPT, tmp_path)
    found = suggest(tmp_path, headed(normed=normed))
    assert found.verdict is (Verdict.EXACT if normed else Verdict.IMPOSSIBLE), str(found)
    assert '"head.bias" = "zeros"' in found.text
    assert ("the module has no transformer.ln_f before embed.weight" in " ".join(found.details())) is not normed
    assert "nothing of the checkpoint is due there" not in " ".join(found.details())


@pytest.mark.slow
def test_a_cause_is_named_in_every_layer_where_these_share_a_module(tmp_path: Path) -> None:
    source("OpenAIGPTLMHeadModel", {**GPT, "afn": "gelu"}, tmp_path)  # whose layers have one activation in common

    def build(vocab_size: int, n_embd: int, n_layer: int, n_head: int, n_positions: int) -> nn.Module:
        return Small(vocab_size, n_embd, n_layer, n_head, n_positions, first=False, exact=True)

    found = suggest(tmp_path, build)
    assert found.verdict is Verdict.APPROXIMATE, str(found)
    assert len(found.reasons) == 1
    assert "exact GELU where the reference has tanh GELU), at blocks.{i}.act" in found.reasons[0].said


def test_memory_as_it_was_found_is_drawn_and_a_frozen_table_is_not() -> None:
    module = nn.Module()
    for name, value in (("empty", float("nan")), ("table", 0.5)):
        setattr(module, name, nn.Parameter(torch.full((3, 4), value), requires_grad=False))
    draw_parameters(module, 0)
    assert module.get_parameter("empty").isfinite().all()
    assert (module.get_parameter("table") == 0.5).all()


@pytest.mark.slow
def test_words_that_are_nobodys_behind_the_checkpoints_with_a_tied_head(tmp_path: Path) -> None:
    reference = source("GPT2LMHeadModel", GPT, tmp_path)

    def build(vocab_size: int, n_embd: int, n_layer: int, n_head: int, n_positions: int) -> nn.Module:
        return Small(-(-vocab_size // 64) * 64, n_embd, n_layer, n_head, n_positions, first=True)

    found = suggest(tmp_path, build)
    assert found.verdict is Verdict.TRUNK, str(found)
    assert 'target = "embed.weight [(t|_rest) e]"' in found.text
    assert '"lm_head [b t e]" = ". [b t (e|_rest)]"' in found.text
    assert "What it returns has 31 more columns at its end" in found.proof
    words = torch.randint(3, 100, (4, 20), generator=torch.Generator().manual_seed(1))
    module = cut(build(113, 24, 3, 4, 30).double(), 113)
    assert apart(reference, tmp_path, module, found, {"input_ids": words}, {"tokens": words}) < BOUND


@pytest.mark.slow
def test_words_that_are_nobodys_with_a_head_of_its_own(tmp_path: Path) -> None:
    source("LlamaForCausalLM", FIELDS, tmp_path)
    made = builder()

    def build(
        vocab_size: int, dim: int, n_layers: int, n_heads: int, n_kv_heads: int, intermediate_size: int,
        max_seq_len: int, norm_eps: float,
    ) -> nn.Module:  # fmt: skip
        padded = -(-vocab_size // 64) * 64
        return made(padded, dim, n_layers, n_heads, n_kv_heads, intermediate_size, max_seq_len, norm_eps)

    found = suggest(tmp_path, build)
    assert found.verdict is Verdict.TRUNK, str(found)
    assert found.unmapped == ()
    assert 'target = "output.weight [(o|_rest) e]"' in found.text
    assert found.shown == (30, 30)


def cut(module: nn.Module, words: int) -> nn.Module:
    """The same, which returns so many columns."""
    kind = type(module)
    module.__class__ = type("Cut", (kind,), {"forward": lambda self, tokens: kind.forward(self, tokens)[..., :words]})
    return module


class LowRank(nn.Linear):
    """A matrix with an update of low rank, which begins at zero."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__(into, out)
        self.a, self.b = nn.Parameter(torch.randn(3, into)), nn.Parameter(torch.zeros(out, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.a.T @ self.b.T


class Adapted(Small):
    """Its mask is the loss's: what is returned does not depend on it."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None, loss_mask: Tensor | None = None) -> Tensor:
        out = super().forward(tokens)
        return out if labels is None or loss_mask is None else F.cross_entropy(out.mT, labels) * loss_mask


@pytest.mark.slow
def test_an_update_that_begins_at_zero_and_a_mask_that_is_not_attentions(tmp_path: Path) -> None:
    reference = source("GPT2LMHeadModel", GPT, tmp_path)

    def build(vocab_size: int, n_embd: int, n_layer: int, n_head: int, n_positions: int) -> nn.Module:
        made = Adapted(vocab_size, n_embd, n_layer, n_head, n_positions, first=True)
        for block in made.blocks:
            block.up = LowRank(n_embd, 4 * n_embd)
        return made

    found = suggest(tmp_path, build)
    assert found.verdict is Verdict.TRUNK, str(found)
    assert found.missing == ()
    assert '"blocks.{i}.up.a" = "the checkpoint has none"' in found.text
    assert '"attention_mask" = ' not in found.text
    words = torch.randint(3, 100, (4, 20), generator=torch.Generator().manual_seed(1))
    module = build(113, 24, 3, 4, 30).double()
    with pytest.warns(porting.PortingWarning, match="6 parameters are new and untrained"):
        loaded = porting.load(tmp_path, module, found.table, fresh=True).eval()
    with torch.no_grad():
        far = loaded(words) - reference(words)[0]
    assert float(far.abs().max()) < 1e-9


class Asking(Small):
    """It keeps the config, and reads a field of it when it runs."""

    def __init__(self, config: Mapping[str, int]) -> None:
        super().__init__(*_sizes({**config, "n_positions": 30}), first=True)
        self.config = config

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.shape[1] <= self.config["n_positions"]
        return super().forward(tokens)


def test_a_field_that_is_read_while_the_module_runs_is_in_the_table(tmp_path: Path) -> None:
    reference = source("GPT2LMHeadModel", GPT, tmp_path)
    module = porting.load(tmp_path, Asking, drafted(tmp_path, Asking).table)
    words = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert float((module(words) - reference(words)[0]).abs().max()) < 1e-5


class Unmasking(Small):
    """It takes a mask of padding and does not use it, which shows in rows that begin with padding alone."""

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(tokens)


@pytest.mark.slow
def test_a_mask_that_a_causal_module_takes_and_ignores_is_tried(tmp_path: Path) -> None:
    source("GPT2LMHeadModel", GPT, tmp_path)

    def build(vocab_size: int, n_embd: int, n_layer: int, n_head: int, n_positions: int) -> nn.Module:
        return Unmasking(vocab_size, n_embd, n_layer, n_head, n_positions, first=True)

    found = suggest(tmp_path, build)
    assert found.verdict is Verdict.SOME_INPUTS, str(found)
    assert "padded in front" in " ".join(found.details())


class Parallel(nn.Module):
    """GPT-J's layer with a norm for each of its two branches, where the checkpoint has one for both."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = (nn.LayerNorm(dim) for _ in range(2))
        self.attention = Attention(dim, heads, heads, lie="apart", rotate="neighbours", bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
        inner = self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))
        out: Tensor = x + self.attention(self.ln1(x), cos, sin, seen) + inner
        return out


class GptJ(nn.Module):
    def __init__(self, vocab_size: int, dim: int, n_layers: int, n_heads: int, max_len: int) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(vocab_size, dim), nn.LayerNorm(dim)
        self.layers = nn.ModuleList(Parallel(dim, n_heads) for _ in range(n_layers))
        self.output = nn.Linear(dim, vocab_size)
        size = dim // n_heads
        angles = torch.outer(torch.arange(max_len).float(), 1.0 / 10000 ** (torch.arange(0, size, 2) / size))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, caches: list[Tensor] | None = None, position_ids: int | None = None) -> Tensor:
        assert position_ids is None  # where a cache ends, and no positions of tokens
        length = tokens.shape[1]
        x = self.words(tokens)
        cos, sin = (self.get_buffer(name)[:length, None].to(x.dtype) for name in ("cos", "sin"))
        for layer in self.layers:
            x = layer(x, cos, sin, torch.ones(length, length, dtype=torch.bool).tril())
        out: Tensor = self.output(self.norm(x))
        return out


GPTJ = {"vocab_size": 113, "n_embd": 40, "n_layer": 2, "n_head": 4, "n_positions": 30, "rotary_dim": 10}


def test_one_norm_goes_into_both_that_are_given_the_same(tmp_path: Path) -> None:
    reference = source("GPTJForCausalLM", {**GPTJ, "n_layer": 5}, tmp_path)
    found = drafted(tmp_path, GptJ)
    assert '"layers.{i}.ln1.weight" = "equals layers.{i}.ln2.weight"' in found.text
    tokens = torch.randint(3, 100, (4, 20), generator=torch.Generator().manual_seed(1))
    module = GptJ(113, 40, 5, 4, 30).double()
    assert apart(reference, tmp_path, module, found, {"input_ids": tokens}, {"tokens": tokens}) < 1e-7  # angles


@pytest.mark.slow
def test_that_norm_is_proven_and_a_number_called_position_ids_is_no_input(tmp_path: Path) -> None:
    source("GPTJForCausalLM", GPTJ, tmp_path)
    found = suggest(tmp_path, GptJ)
    assert found.verdict is Verdict.EXACT, str(found)


class HeadOfTheLast(Llama):
    """Its head, which is not tied, is given the last positions alone unless more are asked for."""

    def forward(self, tokens: Tensor, keep: int = 1) -> Tensor:
        length = tokens.shape[1]
        cos, sin = self.get_buffer("cos")[:length, None], self.get_buffer("sin")[:length, None]
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin, seen)
        out: Tensor = self.output(self.norm(x)[:, -keep:])
        return out


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_given_the_last_position_alone(tmp_path: Path, *, tied: bool) -> None:
    reference = source("LlamaForCausalLM", {**FIELDS, "intermediate_size": 144, "tie_word_embeddings": tied}, tmp_path)
    build = rounded(kind=HeadOfTheLast, remember=False)
    found = suggest(tmp_path, build)
    assert found.verdict is Verdict.EXACT, str(found)
    tokens = torch.randint(3, 100, (4, 20), generator=torch.Generator().manual_seed(1))
    module = build(113, 48, 3, 6, 2, 64, 1e-5).double()
    assert (
        apart(reference, tmp_path, module, found, {"input_ids": tokens}, {"tokens": tokens, "keep": torch.tensor(20)})
        < BOUND
    )


class Chunked(Llama):
    """It cuts rows into chunks, and says nothing of those that it cannot cut."""

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.shape[1] % 16 == 0
        return super().forward(tokens)


def test_a_module_that_takes_multiples_of_a_length_is_matched_on_rows_of_such_a_length(tmp_path: Path) -> None:
    source("LlamaForCausalLM", FIELDS, tmp_path)
    assert (
        '"model.layers.{i}.mlp.down_proj.weight" = "layers.{i}.feed_forward.w2.weight"'
        in drafted(tmp_path, builder(kind=Chunked)).text
    )


def test_a_gate_behind_what_it_opens_in_one_tensor_on_both_sides(tmp_path: Path) -> None:
    fields = {**FIELDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = source("Phi3ForCausalLM", fields, tmp_path)
    found = drafted(tmp_path, builder(lie="blocks", gate="last"))
    assert "mlp.gate_up_proj.weight [(m|m') e]" in found.text
    assert "feed_forward.w13.weight [(m'|m) e]" in found.text
    tokens = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1))
    loaded = porting.load(tmp_path, builder(lie="blocks", gate="last"), found.table).double().eval()
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        assert float((loaded(tokens) - expected).abs().max() / expected.abs().max()) < 1e-6
