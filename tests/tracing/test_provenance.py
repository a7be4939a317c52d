"""Who made an activation: followed through views, changes in place, and values that are put in from outside."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from porting.tracing.float64 import ITSELF, forced_float64
from porting.tracing.provenance import ProvenanceRecorder
from porting.tracing.running import Side


class Two(nn.Module):
    """A branch that is made first and used last, beside one that is not used by it."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.early, self.other, self.late = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.way = way

    def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
        branch = self.way(self.early(given))
        beside = self.other(given)
        last: Tensor = self.late(branch)
        return beside, last


def makers(model: nn.Module, *, put: bool = False) -> tuple[tuple[str, ...], ...]:
    """Of what the model gives; with ``put`` the branch goes on with another value than was computed."""
    watch = ProvenanceRecorder()
    model.double()
    if put:
        early = model.get_submodule("early")
        early.register_forward_hook(lambda module, args, output: watch.put(output.detach().clone()))
    given = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with watch, forced_float64(model):
        found = model(given)
    return tuple(watch.cut(value).modules for value in found)


def in_place(value: Tensor) -> Tensor:
    changed = torch.zeros_like(value)
    changed[:, :2] = value[:, 2:]
    return changed


def test_what_is_made_beside_a_value_is_none_of_its_makers() -> None:
    """Though it ran between: only what the value was computed from counts."""
    beside, last = makers(Two(torch.tanh))
    assert beside == (ITSELF, "other")  # which gave it on
    assert last == ("early", ITSELF, "late")


def test_a_module_that_does_nothing_is_on_the_way_all_the_same() -> None:
    model = Two(torch.tanh)
    model.way = nn.Sequential(nn.Identity())
    assert makers(model)[1] == ("early", "way.0", "way", "late", ITSELF)


def test_a_value_that_is_put_in_was_made_by_nobody() -> None:
    assert makers(Two(torch.tanh), put=True)[1] == (ITSELF, "late")


def test_views_and_what_is_changed_in_place_are_followed() -> None:
    for way in (lambda value: value.T[:, :].T, lambda value: value.reshape(2, 6).view(3, 4), in_place):
        assert makers(Two(way))[1] == ("early", ITSELF, "late")


def test_a_place_in_memory_that_is_used_again_forgets() -> None:
    """Many values come and go at the same addresses."""

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4) for _ in range(20)])

        def forward(self, given: Tensor) -> tuple[Tensor, ...]:
            for part in self.parts[:-1]:
                part(given)
            return (self.parts[-1](given),)

    assert makers(Again()) == (("parts.19", ITSELF),)


def test_a_seeded_pass_that_draws_nothing_is_not_taken_for_a_random_one() -> None:
    """The generator is set before the first operation of a pass, copies of the inputs among them."""
    torch.manual_seed(3)
    arguments = [{"0": torch.randn(2, 4, dtype=torch.float64)}]
    for module, random in ((nn.Linear(4, 4).double(), False), (nn.Dropout(0.5).train(), True)):
        side = Side(title="the port", module=module, arguments=arguments, wanted=["."], seed=7)
        with ProvenanceRecorder() as watch:
            drew: list[bool] = []

            def see(point: str, value: Tensor, watch: ProvenanceRecorder = watch, drew: list[bool] = drew) -> None:
                drew.append(watch.cut(value).random)

            side.record(0, after=see)
        assert drew == [random]
