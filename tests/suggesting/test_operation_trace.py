"""What a search sees of a module: which weights an operation uses, and in which order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.suggesting.search.activation_matching import normed
from porting.suggesting.search.embedding_candidates import candidates
from porting.suggesting.search.layouts import distance
from porting.suggesting.search.matrix_candidates import composed
from porting.suggesting.search.search_state import remaining
from porting.suggesting.subjects.operation_trace import OperationTrace, Unit, WeightUse, trace_operations
from porting.suggesting.subjects.traced_model import TracedModel
from porting.target import named_tensors


def traced(module: nn.Module, *inputs: Tensor) -> OperationTrace:
    module.double()
    return trace_operations(module, lambda one: one(*inputs), dict(named_tensors(module)), inputs)


class JoinedBiases(nn.Module):
    """Queries, keys and values have matrices of their own, and their biases are joined and cut again."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        biases = torch.cat([part.get_parameter("bias") for part in self.parts]).chunk(3)
        return [F.linear(x, part.get_parameter("weight"), bias) for part, bias in zip(self.parts, biases, strict=True)]


def test_a_slice_of_joined_biases_is_the_one_that_it_holds() -> None:
    units = traced(JoinedBiases(), torch.randn(2, 6, dtype=torch.float64)).units
    assert [one.names for one in units] == [(f"parts.{i}.weight", f"parts.{i}.bias") for i in range(3)]


class BiasedScores(nn.Module):
    """A table is added to the scores that queries and keys make."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = (nn.Linear(6, 6) for _ in range(3))
        self.register_buffer("table", torch.randn(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2) + self.table
        out: Tensor = self.out(scores.softmax(-1) @ x)
        return out


def test_what_a_table_is_added_to_comes_from_all_that_was_in_front() -> None:
    found = traced(BiasedScores(), torch.randn(2, 5, 6, dtype=torch.float64))
    numbers = {one.names[0]: one.number for one in found.units}
    last = next(one for one in found.units if one.names[0] == "out.weight")
    assert {numbers["query.weight"], numbers["key.weight"]} <= last.behind
    assert not found.idle


class Scaled(BiasedScores):
    """The scores are scaled before the table is added to them, and not those of another product."""

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.query(x) @ self.key(x).transpose(-1, -2)).transpose(-1, -2) / 4.0 * 3.0 + self.table
        out: Tensor = self.out(scores.softmax(-1) @ x) * torch.ones(6)
        return out


def test_a_product_of_activations_is_kept_as_constants_scale_it() -> None:
    module, x = Scaled(), torch.randn(2, 5, 6, dtype=torch.float64)
    found = traced(module, x)
    product = module.key(x) @ module.query(x).transpose(-1, -2)
    given = next(one for _, one in found.scores)
    assert len(found.products) == 2
    torch.testing.assert_close(found.products[0][1], product * 0.75)
    torch.testing.assert_close(found.products[1][1], given.softmax(-1) @ x)


class Tables(nn.Module):
    """Words, places and, in the reference, segments are looked up and added."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.Embedding(9 + len(name), 6) for name in names})

    def forward(self, ids: Tensor) -> Tensor:
        indices = {"words": ids, "places": ids.cumsum(1) % 7, "segments": ids * 0}
        return torch.stack([one(indices[name]) for name, one in self.tables.items()]).sum(0)


@pytest.mark.parametrize(
    ("heads", "takes"), [((), "tables.words.weight"), (("tables.words.weight",), "tables.places.weight")]
)
def test_a_row_is_added_to_a_table_that_is_no_head(heads: tuple[str, ...], takes: str) -> None:
    ids = torch.randint(0, 9, (2, 5), generator=torch.Generator().manual_seed(0))
    models = Tables("words", "places"), Tables("words", "places", "segments")
    port, reference = (traced(model, ids).units for model in models)
    shapes = [{name: tuple(one.shape) for name, one in named_tensors(model)} for model in models]
    ways = candidates(port, reference, shapes[0], shapes[1], (), heads)
    folded = (move for moves in ways for move in moves if move.fold)
    assert next(folded).writes == (takes,)


class KeptInGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mask = nn.Parameter(torch.randn(1, 6)), nn.Parameter(torch.randn(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first + 0 * self.mask, x])


def test_what_is_multiplied_by_zero_is_not_used() -> None:
    found = traced(KeptInGraph(), torch.randn(2, 6, dtype=torch.float64))
    assert {name for one in found.units for name in one.names} <= {"first"}


class GainFirst(nn.Module):
    """An RMSNorm whose gain is multiplied before the division."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x.tanh()
        return self.gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


def test_a_norm_ends_at_its_division() -> None:
    norm, x = GainFirst(), torch.randn(2, 6, dtype=torch.float64)
    (unit,) = traced(norm, x).units
    assert unit.divided
    assert torch.equal(unit.output, norm(x))
    assert unit.last > unit.number


class PartlyReturned(nn.Module):
    """A pooler that is computed and not returned; a gate, a part and a count, which what is returned depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pooler, self.gate, self.part, self.count, self.last = (nn.Linear(6, 6) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.pooler(x[:1]).tanh()
        x = x * self.gate(x).mean(-1, keepdim=True)
        x[0] = self.part(x[0])
        many = int(self.count(x).sum().abs().clamp(1, 2).item())
        last: Tensor = self.last(x[:many])
        return last


def test_what_is_not_returned_is_idle() -> None:
    assert traced(PartlyReturned(), torch.randn(2, 6, dtype=torch.float64)).idle == {"pooler.weight"}


def test_nothing_is_idle_where_it_is_unknown_what_is_returned() -> None:
    class Detour(PartlyReturned):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tensor(super().forward(x).tolist())

    assert not traced(Detour(), torch.randn(2, 6, dtype=torch.float64)).idle


class TwoTexts(nn.Module):
    """Both texts are embedded before the first is encoded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(20, 6), nn.Embedding(9, 6)
        self.norms, self.out = nn.ModuleList(nn.LayerNorm(6) for _ in range(3)), nn.Linear(6, 6)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        y = self.norms[1](self.words(target) + self.places(torch.arange(target.shape[1])))
        x = self.norms[2](self.norms[0](self.words(source)))
        out: Tensor = self.out(y + x.mean(1, keepdim=True))
        return out


@pytest.mark.parametrize(("first", "expected"), [(0, ["norms.0", "norms.2", "norms.1"]), (1, ["norms.1", "norms.0"])])
def test_the_first_text_is_gone_through_first(first: int, expected: list[str]) -> None:
    module = TwoTexts().double()
    given = [torch.arange(3, 8).view(1, 5), torch.arange(4, 8).view(1, 4)]
    sides = []
    for which in (first, 1 - first):
        other = [one + 1 if number == which else one for number, one in enumerate(given)]
        sides.append((lambda one, other=other: one(*other), other))
    model = TracedModel(
        module, dict(named_tensors(module)), frozenset(), lambda one: one(*given), given, (sides[0], sides[1])
    )
    names = [one.names[0].removesuffix(".weight") for one in model.run().units]
    assert [one for one in names if one.startswith("norms")][: len(expected)] == expected
    if not first:
        assert names.index("places") == names.index("norms.1") - 1  # it belongs to what it is added to


class NormedInEachLayer(TwoTexts):
    """Each layer of the decoder norms what the encoder returns, with the gain that norms its own tokens."""

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        y: Tensor = self.words(target) + self.places(torch.arange(target.shape[1]))
        x: Tensor = self.words(source)
        for norm in self.norms:
            y = y + self.out(norm(y) + norm(x).mean(1, keepdim=True))
        return y


def test_what_both_texts_go_into_keeps_its_order() -> None:
    module, given = NormedInEachLayer().double(), [torch.arange(3, 8).view(1, 5), torch.arange(4, 8).view(1, 4)]
    others = [[one + (number == which) for number, one in enumerate(given)] for which in range(2)]
    first, second = ((lambda one, other=other: one(*other), other) for other in others)
    model = TracedModel(
        module, dict(named_tensors(module)), frozenset(), lambda one: one(*given), given, (first, second)
    )
    units = model.run().units
    seen: set[int] = set()
    for unit in units:
        assert unit.behind <= seen, unit.names
        seen.add(unit.number)
    names = [one.names[0].removesuffix(".weight") for one in units]
    assert [one for one in names if one not in {"words", "places"}] == [
        *("norms.0", "norms.0", "out", "norms.1", "norms.1", "out", "norms.2", "norms.2", "out")
    ]


def test_what_never_runs_is_paired_by_a_word_where_it_is_alone() -> None:
    ours = {"mask_emb": nn.Parameter(torch.zeros(6)), "mask.token": nn.Parameter(torch.zeros(1, 5))}
    theirs = {
        "masked_spec_embed": torch.randn(6),
        "embeddings.mask.token": torch.randn(1, 1, 5),
        "other": torch.randn(7),
    }
    none = frozenset[str]()
    found = {move.writes[0]: (move.reads[0], tuple(value.shape)) for move, value in remaining(ours, theirs, none, none)}
    assert found == {"mask_emb": ("masked_spec_embed", (6,)), "mask.token": ("embeddings.mask.token", (1, 5))}
    several = {**theirs, "unmasked": torch.randn(6)}
    assert [move.writes for move, _ in remaining(ours, several, none, none)] == [("mask.token",)]


def test_a_scale_that_is_returned_by_itself_is_that_of_the_reference_s_logits() -> None:
    ours, theirs = {"logit_scale": nn.Parameter(torch.zeros(()))}, {"logit_scale": torch.tensor(4.6)}
    [(move, value)] = remaining(ours, theirs, frozenset(), frozenset({"logit_scale"}))
    assert (*move.reads, *move.writes) == ("logit_scale", "logit_scale")
    assert float(value) == pytest.approx(4.6)
    assert not [*remaining(ours, theirs, frozenset({"logit_scale"}), frozenset({"logit_scale"}))]


def test_a_weight_of_two_tensors_is_paired_tensor_by_tensor() -> None:
    sizes = (
        {"v": (8, 4, 3), "g": (1, 1, 3), "b": (8,)},
        {"original1": (8, 4, 3), "original0": (1, 1, 3), "bias": (8,)},
    )
    out = torch.zeros(1, 8, 5)
    ours = Unit(WeightUse.LINEAR, ("v", "g"), 0, out, "", biases=("b",))
    theirs = Unit(WeightUse.LINEAR, ("original0", "original1"), 0, out, "", biases=("bias",))
    [way] = composed(ours, theirs, *sizes)
    assert [(one.reads[0], one.writes[0]) for one in way] == [("original1", "v"), ("original0", "g"), ("bias", "b")]


def test_a_distance_is_that_of_the_numbers_of_now() -> None:
    """What is kept of an activation is not kept when the activation changes in place."""
    one, other = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0])
    assert distance(one, other) == 0.0
    one.mul_(2)
    assert distance(one, other) == 0.5
    other[0] = torch.nan
    assert distance(one, other) == torch.inf
    assert distance(torch.zeros(0), torch.zeros(0)) == 0.0
    unit = Unit(WeightUse.NORM, ("w",), 0, one, "", operand=one)
    assert torch.equal(normed(unit), normed(unit))
    before = normed(unit)
    one[0] = 0.0
    assert not torch.equal(normed(unit), before)


class Decayed(nn.Module):
    """A state that decays from token to token, in a loop, or the decays of all tokens at once."""

    def __init__(self, *, loop: bool) -> None:
        super().__init__()
        self.loop, self.decay = loop, nn.Parameter(torch.rand(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        rate = -self.decay.exp()
        if not self.loop:
            return torch.exp(rate * x[:, :, None])
        state = x.new_zeros(len(x), *rate.shape)
        for at in range(x.shape[1]):
            state = torch.exp(rate * x[:, at, None]) * (state + 1)
        return state


def test_a_weight_that_a_loop_uses_at_each_step_is_used_once() -> None:
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    units = []
    for loop in (True, False):
        module = Decayed(loop=loop).double()
        leaves = dict(named_tensors(module))
        model = TracedModel(module, leaves, frozenset(leaves), lambda one: one(x), [x])
        units.append([one for one in model.run().units if one.operand is not None and one.operand.numel() > 2 * 6])
    (looped,), (whole,) = units
    assert looped.operand is not None
    assert whole.operand is not None
    assert distance(looped.operand, whole.operand) == 0


class Shared(nn.Module):
    """Six layers that share a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.matrix = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = x + (self.gain * x) @ self.matrix
        return x


def test_a_norm_that_layers_share_is_used_in_each() -> None:
    x, module = torch.randn(2, 7, 6, dtype=torch.float64), Shared().double()
    leaves = dict(named_tensors(module))
    units = TracedModel(module, leaves, frozenset(leaves), lambda one: one(x), [x]).run().units
    assert [one.weights for one in units].count(("gain",)) == 6


@pytest.mark.parametrize("padding", [0, 2])
def test_a_convolution_of_padded_rows_is_given_the_rows(padding: int) -> None:
    x = torch.randn(2, 3, 9, dtype=torch.float64)
    module = nn.Sequential(nn.ConstantPad1d((2 - padding, 2 - padding), 0.0), nn.Conv1d(3, 4, 3, padding=padding))
    (unit,) = traced(module, x).units
    assert unit.operand is not None
    assert torch.equal(unit.operand, x)
