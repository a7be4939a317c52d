"""Layers that repeat: what fills one is expected of the next, and is settled without another run where it is right."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.suggesting.draft.layer_patterns import lines
from porting.suggesting.search.layer_repeats import Layer, repeated
from porting.suggesting.search.layouts import CandidateRule, distance, single_rule
from porting.suggesting.search.search import WeightSearch
from porting.suggesting.search.search_result import SAME, SearchResult
from porting.suggesting.subjects.guarded_run import Deadline
from porting.suggesting.subjects.sampler import BATCH
from porting.suggesting.subjects.traced_model import ForcedActivations, TracedModel

WIDTH, INNER = 8, 24


class Layers(nn.Module):
    """A feed-forward block many times; ``turned`` says in which layers its first matrix is stored the other way."""

    def __init__(self, depth: int, *, turned: tuple[int, ...] = (), act: str = "gelu") -> None:
        super().__init__()
        self.act = act
        self.turned = turned
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))
        self.up = nn.ParameterList(
            torch.randn((WIDTH, INNER) if layer in turned else (INNER, WIDTH)) for layer in range(depth)
        )
        self.down = nn.ModuleList(nn.Linear(INNER, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer, (norm, up, down) in enumerate(zip(self.norms, self.up, self.down, strict=True)):
            inner = norm(x) @ (up if layer in self.turned else up.T)
            x = x + down(getattr(F, self.act)(inner))
        return x


def traced(model: nn.Module, seed: int) -> TracedModel:
    """A model with values of its own, as it is searched with."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double()
    for one in model.parameters():
        one.data = torch.randn(one.shape, dtype=torch.float64, generator=generator)
    x = torch.randn(BATCH, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    leaves = dict(model.named_parameters())
    return TracedModel(model, leaves, frozenset(leaves), lambda model: model(x), [x])


def searched(port: nn.Module, depth: int, monkeypatch: pytest.MonkeyPatch) -> tuple[SearchResult, int]:
    """What a search finds for a module, and how often it ran the module as a whole."""
    runs = 0
    run = TracedModel._run

    def counted(self: TracedModel, until: int | None, forced: ForcedActivations, *, keep: bool) -> object:
        nonlocal runs
        runs += self.module is port and until is None
        return run(self, until, forced, keep=keep)

    monkeypatch.setattr(TracedModel, "_run", counted)
    search = WeightSearch(
        traced(port, 1),
        traced(Layers(depth), 2),
        sizes={},
        heads=None,
        config={},
        scales=(),
        most=10_000,
        until=Deadline(600.0),
        tell=lambda *_: None,
    )
    return search.search(), runs


def test_more_layers_need_no_more_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    found, few = searched(Layers(3), 3, monkeypatch)
    deep, many = searched(Layers(12), 12, monkeypatch)
    assert not [*found.open, *deep.open, *deep.divergences]
    assert many == few


def test_layers_that_lie_in_another_way_are_found_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    port = Layers(6, turned=(1, 4, 5))
    found, _ = searched(port, 6, monkeypatch)
    assert not [*found.open, *found.divergences]
    turned = [move.writes[0] for move in found.moves if move.sources[0].axes]
    assert turned == ["up.1", "up.4", "up.5"]


def test_what_is_given_to_a_layer_ahead_of_time_is_taken_back() -> None:
    """A search that ends in the first layers says of the others nothing, and leaves them as they are."""
    port = traced(Layers(5), 1)
    before = {name: one.detach().clone() for name, one in port.leaves.items()}
    search = WeightSearch(
        port, traced(Layers(5), 2), sizes={}, heads=None, config={}, scales=(), most=3, until=Deadline(600.0),
        tell=lambda *_: None,
    )  # fmt: skip
    found = search.search()
    assert found.exhausted
    assert found.open
    assert all(torch.equal(port.leaves[name], before[name]) for name in found.open)


def test_a_run_is_kept_until_a_value_changes() -> None:
    port = traced(Layers(2), 1)
    first = port.run()
    assert port.run() is first
    assert [one.number for one in port.run(until=first.units[1].number).units] == [
        one.number for one in first.units[:2]
    ]
    with torch.no_grad():
        port.leaves["up.0"].detach().mul_(2.0)
    again = port.run()
    assert again is not first
    forced = ForcedActivations(operands={again.units[-1].number: torch.zeros(BATCH * 5 * INNER, dtype=torch.float64)})
    changed = port.run(forced=forced)
    assert not torch.equal(changed.outputs[0], again.outputs[0])
    forced.operands[again.units[-1].number].add_(1.0)
    assert not torch.equal(port.run(forced=forced).outputs[0], changed.outputs[0])


@pytest.mark.parametrize(
    ("reads", "writes", "layer", "expected"),
    [
        ("h.0.up", "blocks.0.up", Layer("blocks.", 0), ["h.1.up -> blocks.1.up", "h.2.up -> blocks.2.up"]),
        ("h.0.up", "blocks.1.up", Layer("blocks.", 1), ["h.1.up -> blocks.2.up"]),
        ("s.1.h.0.up", "0.blocks.0.up", Layer("0.blocks.", 0), ["s.1.h.1.up -> 0.blocks.1.up"]),
        ("s.1.h.0.up", "0.blocks.0.up", Layer("", 0), ["s.2.h.0.up -> 1.blocks.0.up"]),
        ("word", "blocks.0.up", Layer("blocks.", 0), []),
    ],
    ids=["as many", "numbered from 1", "within a stage", "the next stage", "no layer's"],
)
def test_a_rule_goes_on_in_the_layers_behind(reads: str, writes: str, layer: Layer, expected: list[str]) -> None:
    theirs = {"word", *(f"h.{n}.up" for n in range(3)), *(f"s.{s}.h.{n}.up" for s, n in product(range(3), range(2)))}
    ours = {*(f"blocks.{n}.up" for n in range(3)), *(f"{s}.blocks.{n}.up" for s, n in product(range(2), range(2)))}
    found = repeated([single_rule(reads, writes)], layer, theirs, ours)
    assert [f"{one.reads[0]} -> {one.writes[0]}" for one in found] == expected


def projections(layer: int) -> Iterator[CandidateRule]:
    for theirs, ours in (("query", "wq"), ("key", "wk"), ("value", "wv")):
        axes = "a b" if layer == 10 and ours != "wv" else ""
        yield single_rule(f"h.{layer}.{theirs}.weight", f"blocks.{layer}.{ours}.weight", axes, axes)


def test_projections_are_one_line_only_where_they_are_of_the_same_layers() -> None:
    found = lines([one for layer in range(12) for one in projections(layer)])
    written = [name for line in found for name in line.writes]
    assert len(written) == len({*written}) == 36
    spelled = {line.sources[0][0] for line in found if len(line.single) > 1}
    counted = ",".join(str(layer) for layer in range(12) if layer != 10)
    several = f"h.{{i:{counted}}}.{{p:query,key}}.weight"
    assert spelled == {several, "h.10.{p:query,key}.weight", "h.{i}.value.weight"}


@pytest.mark.parametrize("size", [1e-12, 1e-3, 1.0])
@pytest.mark.parametrize("bound", [SAME, 0.02, 0.5])
def test_a_distance_is_exact_up_to_its_bound(size: float, bound: float) -> None:
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    for noise in (torch.randn(one.shape, dtype=one.dtype, generator=generator), torch.ones_like(one), one):
        other = (one + size * noise).T.contiguous()
        exact, known = distance(one, other), distance(one, other, bound)
        assert known == exact if exact <= bound else bound < known <= exact * (1 + 1e-9)
