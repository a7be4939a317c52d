"""What remains in float32 in a float64 run: its size is measured, its bound follows, mistakes above are caught."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import transformers
from torch import Tensor, nn

from porting.tracing.measure import LEAKED, Error
from porting.verification import Case, Report, verify
from porting.verification.compare import SHARE
from porting.verification.rounding_propagation import _largest
from tests.causes.wrong_ports import table
from tests.families.ported import draw

LENGTH = 400


class Placed(nn.Module):
    """Sinusoids that are made in float32 out of integers, or in float64."""

    dtype = torch.float32
    factor = gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).to(self.dtype)
        angles = torch.outer(places, torch.exp(torch.arange(0, 16, 2).to(self.dtype) * (-9.21 / 16)))
        table = torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype)
        hidden = self.second(torch.tanh(self.first(self.gain * x + table)))
        result: Tensor = self.out(torch.tanh(hidden) * self.factor)
        return result


class Exact(Placed):
    dtype = torch.float64


class Later(Placed):
    """The table is read behind a layer, and its angles are quarters, which float32 holds exactly."""

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1]).to(self.dtype)[:, None] * torch.full((1, 8), 0.25, dtype=self.dtype)
        table = torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype)
        hidden = self.second(torch.tanh(self.first(x)) + table)
        result: Tensor = self.out(torch.tanh(hidden) * self.factor)
        return result


class LaterExact(Later):
    dtype = torch.float64


class LaterMistaken(LaterExact):
    factor = 1 + 1e-11


class Beside(Placed):
    """Beside the reference's own table something is wrong that a rounding of the table would hide."""

    gain = 1 + 1e-8


class BesideExact(Exact):
    """The same beside a table without roundings."""

    gain = 1 + 1e-8


class Mistaken(Exact):
    """Behind the table something is wrong that is a tenth of what float32 would have hidden end to end."""

    factor = 1 + 1e-3


class Slightly(Exact):
    """Where nothing rounds by itself a mistake far below float32's rounding is caught by the isolated run."""

    factor = 1 + 1e-9


def compared(reference: type[Placed], port: type[Placed]) -> Report:
    torch.manual_seed(0)
    return verify(reference=reference(), into=port, inputs=[Case("x", {"x": torch.randn(2, LENGTH, 16)})], causes=False)


def test_the_bound_follows_from_what_arrives_of_the_leak() -> None:
    report = compared(Placed, Exact)
    assert report.faithful, str(report)
    probes = {probe.port: probe for probe in report.probes}
    here = probes["first"]
    assert here.leak is not None
    assert here.leak.isolated is not None
    assert here.bound.isolated == pytest.approx(LEAKED * here.leak.isolated)
    assert 1e-7 < here.meaning.end_to_end < here.leak.isolated < 1e-4
    assert probes["second"].leak is None  # nothing rounds there by itself
    assert probes["second"].bound.isolated is not None
    assert probes["second"].bound.isolated < 1e-11
    assert probes["second"].bound.end_to_end > 1e-7
    text = " ".join(report.details().split())
    assert "first computes in less than float64 (in the reference):" in text
    assert (
        f"tolerance raised to {here.bound.isolated:.0e} here, since its rounding moves it by "
        f"{here.leak.isolated:.0e} of its scale" in text
    )


def test_a_table_that_rounds_far_less_than_it_could_is_no_mistake() -> None:
    """A unit in the last place of an angle is a thousand times what its sine is rounded by."""
    report = compared(Later, LaterExact)
    assert report.faithful, str(report)
    (second,) = [probe for probe in report.probes if probe.port == "second"]
    assert second.meaning.isolated is not None
    assert second.leak is not None
    assert second.leak.isolated is not None
    assert 0 < second.meaning.isolated < second.leak.isolated / SHARE
    wrong = compared(Later, LaterMistaken)
    assert [probe.port for probe in wrong.guilty] == ["out"]


def test_the_port_s_own_leak_is_measured_in_the_port() -> None:
    report = compared(Exact, Placed)
    assert not report.computes_otherwise
    (here,) = [probe for probe in report.probes if probe.lowered]
    assert here.port == "first"
    assert here.leak is not None
    assert "the model itself (" in here.lowered[0]
    assert report.verdict == "imprecise"  # in float32 its table rounds, and the reference's does not


@pytest.mark.parametrize("port", [Mistaken, Slightly])
def test_a_mistake_behind_a_leak_is_caught(port: type[Placed]) -> None:
    report = compared(Placed, port)
    assert report.verdict == "different"
    assert [probe.port for probe in report.guilty] == ["out"]


def test_both_sides_of_one_table_have_nothing_to_excuse() -> None:
    report = compared(Placed, Placed)
    assert report.faithful
    assert max(probe.meaning.worst for probe in report.probes) == 0.0


def test_roundings_that_both_sides_make_alike_excuse_nothing() -> None:
    report = compared(Placed, Beside)
    assert report.verdict == "different"
    assert [probe.port for probe in report.guilty] == ["first"]
    assert compared(Placed, BesideExact).faithful  # where they are not alike they are larger than this


class Slow(Placed):
    """Its slowest angles are so small that one of their roundings comes to much less than the others'."""

    units = 0

    def forward(self, x: Tensor) -> Tensor:
        frequencies = torch.exp(torch.arange(0, 16, 2).float() * (-14.0 / 16))
        for _ in range(self.units):
            frequencies[-1] = torch.nextafter(frequencies[-1], torch.tensor(1.0))
        angles = torch.outer(torch.arange(x.shape[1]).float(), frequencies)
        table = torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype)
        hidden = self.second(self.gain * torch.tanh(self.first(x)) + table)
        result: Tensor = self.out(torch.tanh(hidden))
        return result


class SlowByAUnit(Slow):
    """The same but for the last place of one frequency."""

    units = 1


class SlowByAUnitBeside(SlowByAUnit):
    """And something else that is as small."""

    gain = 1 + 1e-9


def test_tables_that_are_rounded_almost_alike_are_told_from_a_mistake_as_small() -> None:
    report = compared(Slow, SlowByAUnit)
    assert report.faithful, str(report)
    (second,) = [probe for probe in report.probes if probe.port == "second"]
    assert second.meaning.isolated is not None
    assert second.leak is not None
    assert second.leak.isolated is not None
    assert 1e-12 < second.meaning.isolated < second.leak.isolated / SHARE
    assert [probe.port for probe in compared(Slow, SlowByAUnitBeside).guilty] == ["second"]


class BehindAngles(Placed):
    """Behind a table that is rounded a norm, whose eps moves the output by about as much as the table's roundings."""

    eps = 1e-5

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).to(self.dtype)
        angles = torch.outer(places, torch.exp(torch.arange(0, 16, 2).to(self.dtype) * (-9.21 / 16)))
        table = torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype)
        result: Tensor = self.out(self.norm(self.second(torch.tanh(self.first(x) + table))))
        return result


class BehindOtherAngles(BehindAngles):
    dtype = torch.float64
    eps = 1.1e-5


def test_a_cause_is_found_beside_angles_that_are_rounded_otherwise() -> None:
    torch.manual_seed(0)
    cases = [Case(f"{rows}", {"x": torch.randn(rows, LENGTH, 16)}) for rows in (2, 3)]
    report = verify(reference=BehindAngles(), into=BehindOtherAngles, inputs=cases, causes=True)
    assert [probe.port for probe in report.guilty] == ["norm"]
    assert [finding.name for finding in report.causes] == ["LayerNorm eps"], str(report)
    assert report.causes[0].detail == "eps is 1.1e-05 where the reference has 1e-05"
    assert report.causes[0].residual < 1e-12


class Twice(Placed):
    """Its first matrix is used a second time, which the reference does otherwise and nothing compares."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x) + 0 * self.first(x).sum()
        return result


def test_a_call_that_is_not_compared_has_no_leak() -> None:
    report = compared(Exact, Twice)
    assert not report.computes_otherwise
    assert [probe.port for probe in report.probes if probe.lowered] == ["first"]


class Deep(nn.Module):
    """Untrained and deep: each layer multiplies a rounding by about 8, and the roundings of float32 get everywhere."""

    layers = 12
    tiny = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(self.layers))
        for block in self.blocks:
            nn.init.normal_(block.weight, std=12 / 32**0.5)  # type: ignore[arg-type]  # a linear layer's

    def sine(self, x: Tensor) -> Tensor:
        return torch.sin(x)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.sine(block(x)) + self.tiny
        return x


class Reordered(Deep):
    """The same sine, rounded differently."""

    def sine(self, x: Tensor) -> Tensor:
        return torch.cos(x - math.pi / 2)


class Offset(Deep):
    """A mistake that is larger than any rounding."""

    tiny = 1e-2


@pytest.mark.parametrize(("port", "faithful"), [(Reordered, True), (Offset, False)])
def test_roundings_that_a_network_amplifies_are_measured(port: type[Deep], faithful: bool) -> None:
    torch.manual_seed(0)
    report = verify(reference=Deep(), into=port, inputs=[Case("x", {"x": torch.randn(8, 32)})], causes=False)
    assert report.noise["float32"] > 0.05, "float32 says nothing at the end"
    assert max(probe.meaning.end_to_end for probe in report.probes) > 1e-12
    assert report.faithful is faithful, str(report)


class Normed(nn.Module):
    """Groups of two channels that are nearly equal: their variance is all cancellation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.norm(x)
        return value


class NormedByHand(Normed):
    wrong = 0.0

    def forward(self, x: Tensor) -> Tensor:
        groups = x.view(len(x), 16, 2)
        mean = groups.mean(2, keepdim=True)
        variance = (groups.square().mean(2, keepdim=True) - mean.square()).clamp_min(0)
        value = ((groups - mean) / (variance + self.norm.eps + self.wrong).sqrt()).flatten(1, 2)
        result: Tensor = value * self.norm.weight + self.norm.bias
        return result


class WrongEps(NormedByHand):
    wrong = 1e-8


@pytest.mark.parametrize(("port", "faithful"), [(NormedByHand, True), (WrongEps, False)])
def test_a_module_that_amplifies_roundings_by_itself_is_held_to_what_was_measured(
    port: type[Normed], faithful: bool
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(4, 16, 1) * 30 + torch.randn(4, 16, 2) * 1e-3).flatten(1)
    report = verify(reference=Normed(), into=port, inputs=[Case("x", {"x": x})], dtypes=(), causes=False)
    assert max(probe.meaning.worst for probe in report.probes) > 1e-12
    assert report.faithful is faithful, str(report)


class Rotated(nn.Module):
    """Causal attention whose queries are normalised and rotated by tables that are made in float32."""

    eps = 1e-6
    exact = False

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        places = torch.arange(length).to(torch.float64 if self.exact else torch.float32)
        angles = torch.outer(places, torch.exp(torch.arange(8).to(places.dtype) * -0.5))
        cosine, sine = (one.to(x.dtype) for one in (angles.cos(), angles.sin()))
        rotated = []
        for made in (self.query(x), self.key(x)):
            first, second = (made / (made.square().mean(-1, keepdim=True) + self.eps).sqrt()).chunk(2, -1)
            rotated.append(torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1))
        scores = rotated[0] @ rotated[1].transpose(1, 2)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        result: Tensor = self.out(scores.masked_fill(later, -torch.inf).softmax(-1) @ x)
        return result


class ExactTables(Rotated):
    exact = True


class LargerEps(ExactTables):
    """A mistake that is smaller than what the roundings of the tables come to far back in a row."""

    eps = 4e-6


@pytest.mark.parametrize(("port", "faithful"), [(ExactTables, True), (LargerEps, False)])
def test_roundings_have_to_explain_the_first_positions_as_well_as_the_last(port: type[Rotated], faithful: bool) -> None:
    torch.manual_seed(0)
    reference = Rotated()
    report = verify(reference=reference, into=port, inputs=[Case("x", {"x": torch.randn(2, LENGTH, 16)})], causes=False)
    assert report.faithful is faithful, str(report)
    largest = max(probe.meaning.worst for probe in report.probes)
    leaked = max(probe.leak.end_to_end for probe in report.probes if probe.leak is not None)
    assert 1e-12 < largest < LEAKED * leaked


def test_a_case_in_which_the_reference_has_no_numbers_hides_no_other() -> None:
    """Scores of a row of padding alone are NaN in some models; the roundings of the other cases count."""

    def far(largest: float) -> Error:
        return Error(largest=largest, squares=0.0, floor=0.0, count=1)

    errors = {"scores": [far(math.nan), far(1e-7), far(3e-8)], "hidden": [far(math.nan)]}
    assert _largest(errors) == {"scores": 1e-7}


class FromFirstToken(transformers.LlamaModel):  # type: ignore[no-untyped-call]  # transformers does not type that
    """Positions from each row's first token: rotations are relative, so only the roundings of the angles differ."""

    factor = behind_padding = 1.0

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        first = mask.int().argmax(-1, keepdim=True)
        places = (torch.arange(input_ids.shape[1])[None] - first).clamp(min=0)
        found = super().forward(input_ids=input_ids, attention_mask=attention_mask, position_ids=places)
        hidden: Tensor = found.last_hidden_state
        return hidden * self.factor * torch.where(first[..., None] > 0, self.behind_padding, 1.0)


class SlightlyWrong(FromFirstToken):  # type: ignore[no-untyped-call]  # as above
    """Everywhere, by less than the angles' roundings come to where there is padding in front."""

    factor = 1 + 1e-9


class WrongBehindPadding(FromFirstToken):  # type: ignore[no-untyped-call]  # as above
    behind_padding = 1 + 1e-5


class SlightlyWrongInShortRows(FromFirstToken):  # type: ignore[no-untyped-call]  # as above
    """By less than the angles' roundings come to elsewhere, in rows in which they are rounded alike."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        whole = attention_mask is None or bool(attention_mask.all())
        return super().forward(input_ids, attention_mask) * (1 + 1e-9 * (whole and input_ids.shape[1] == 5))


class RefusesOneRow(FromFirstToken):  # type: ignore[no-untyped-call]  # as above
    """No row can be looked at by itself, so nothing is known of its angles and nothing is excused."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if len(input_ids) == 1 and attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("one padded row")
        return super().forward(input_ids, attention_mask)


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        (FromFirstToken, "faithful"),
        (RefusesOneRow, "different"),
        (SlightlyWrong, "different"),
        (WrongBehindPadding, "different"),
        (SlightlyWrongInShortRows, "different"),
    ],
)
def test_angles_of_other_positions_are_rounded_otherwise_in_some_rows_only(
    made: type[FromFirstToken], verdict: str
) -> None:
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=24, num_attention_heads=3, num_key_value_heads=3, intermediate_size=32,
        num_hidden_layers=1, max_position_embeddings=14, pad_token_id=0,
    )  # fmt: skip
    reference = transformers.LlamaModel._from_config(copy.deepcopy(config), attn_implementation="eager")  # type: ignore[no-untyped-call]  # as above
    draw(reference)
    port = made._from_config(copy.deepcopy(config), attn_implementation="eager")  # type: ignore[no-untyped-call]  # as above
    port.load_state_dict(reference.state_dict())
    probes = table(reference.eval(), port.eval(), r"\.|embed_tokens|norm")
    report = verify(into=port, reference=reference, loaded=True, table=probes, causes=False)
    assert report.verdict == verdict, str(report)
