"""Experiments on whole passes name what no step shows: another row's values, tensors changed in place, states moved."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from porting.causes.input_changes import input_changes
from porting.verification import Report, verify
from porting.verification.cause_case import LazyCases
from tests.causes.wrong_ports import Wrong, verified
from tests.verification.conftest import one_thread

pytestmark = pytest.mark.few(4)

__all__ = ["one_thread"]  # a fixture that is used by all

TYPES = "self.token_type_embeddings(types)"
MASK = "scores = scores.masked_fill(mask[:, None, None, :] == 0"
POOLED = "torch.tanh(self.dense(x[:, 0]))"
CONTEXT = "return context.transpose"


@pytest.mark.parametrize(
    ("family", "changes", "name", "detail"),
    [
        (
            "bert",
            {TYPES: "self.token_type_embeddings(types[:, :1])"},
            "first token's value for the whole row",
            "token_type_ids",
        ),
        ("bert", {CONTEXT: f"mask.fill_(1)\n        {CONTEXT}"}, "tensor changed in place", "bert.py:"),
        ("bert", {TYPES: "self.token_type_embeddings(types[:1])"}, "first row's values for all rows", "token_type_ids"),
        (
            "bert",
            {MASK: "mask = (torch.arange(s)[None] < mask.sum(1, keepdim=True)).long()\n        " + MASK},
            "padding mask read as a length",
            "in front",
        ),
        ("bert", {POOLED: "torch.tanh(self.dense(x[:, 0]) * len(x))"}, "rows that depend on one another", "by itself"),
    ],
)
def test_what_a_port_does_with_its_inputs_is_named(
    family: str, changes: Mapping[str, str], name: str, detail: str
) -> None:
    (found,) = verified(Wrong(family, changes)).causes
    assert (found.name, found.ties) == (name, ())
    assert detail in found.detail


@pytest.mark.slow
def test_what_later_layers_see_of_a_mask_is_not_called_an_ignored_mask() -> None:
    report = verified(Wrong("bert", {CONTEXT: f"mask.mul_(0)\n        {CONTEXT}"}))
    assert [found.name for found in report.causes] == ["tensor changed in place"]


def test_cases_are_made_once_and_when_they_are_asked_for() -> None:
    made: list[str] = []

    def make(name: str, given: Any) -> Any:
        made.append(name)
        return given

    cases = LazyCases(partial(make, name, given) for name, given in (("a", 1), ("refused", None), ("b", 2)))
    first: Any = next(iter(cases))
    assert (first, made) == (1, ["a"])
    every: list[Any] = [*cases, *cases]
    assert (every, made) == ([1, 2, 1, 2], ["a", "refused", "b"])


class States(nn.Module):
    """Three layers, whose states are returned before the norm and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(19, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)

    def computed(self, input_ids: Tensor) -> list[Tensor]:
        states = [self.words(input_ids)]
        for layer in self.layers:
            states.append(states[-1] + torch.tanh(layer(states[-1])))
        return states

    def forward(self, input_ids: Tensor) -> dict[str, object]:
        *states, last = self.computed(input_ids)
        last = self.norm(last)
        return {"last": last, "hidden_states": (*states, last)}


class NotNormed(States):
    def forward(self, input_ids: Tensor) -> dict[str, object]:
        states = self.computed(input_ids)
        return {"last": self.norm(states[-1]), "hidden_states": (*states,)}


class Shifted(States):
    def forward(self, input_ids: Tensor) -> dict[str, object]:
        states = self.computed(input_ids)[1:]
        last = self.norm(states[-1])
        return {"last": last, "hidden_states": (states[0], states[1], states[1], last)}


class NormedTwice(States):
    def forward(self, input_ids: Tensor) -> dict[str, object]:
        *states, last = self.computed(input_ids)
        last = self.norm(self.norm(last))
        return {"last": last, "hidden_states": (*states, last)}


def of(kind: type[States]) -> Report:
    torch.manual_seed(0)
    reference = States()
    for parameter in reference.parameters():
        nn.init.normal_(parameter)
    port = kind()
    port.load_state_dict(reference.state_dict())
    ids = [{"input_ids": torch.randint(0, 19, shape)} for shape in ((3, 7), (2, 5), (1, 9))]
    return verify(reference=reference, into=port, dtypes=(), loaded=True, inputs=ids)


@pytest.mark.parametrize(
    ("port", "detail"),
    [
        (NotNormed, "hidden_states.3 is the input of norm"),
        (Shifted, "hidden_states.0 is hidden_states.1, hidden_states.1 is hidden_states.2"),
    ],
)
def test_a_state_of_another_place_is_named_by_its_place(port: type[States], detail: str) -> None:
    (found,) = of(port).causes
    assert found.name == "another value returned"
    assert detail in found.detail


def test_a_state_that_the_reference_has_nowhere_is_not_of_another_place() -> None:
    assert "another value returned" not in [found.name for found in of(NormedTwice).causes]


def test_what_is_given_in_place_of_token_ids_may_be_scaled_or_normed() -> None:
    embeds = torch.randn(2, 3, 4)
    given = {"inputs_embeds": embeds}
    changes = [*input_changes([*given], [], [*given], 0, {"norm": nn.LayerNorm(4, elementwise_affine=False)})]
    made = {(one.name, one.detail): one.change(given) for one in changes}
    scaled = made["given embeddings scaled by another factor", "they are multiplied by the root of the width"]
    normed = made["given embeddings normalised", "by norm"]
    assert scaled is not None
    assert normed is not None
    torch.testing.assert_close(scaled["inputs_embeds"], embeds * 2)
    torch.testing.assert_close(normed["inputs_embeds"].mean(-1), torch.zeros(2, 3))


def test_inputs_that_are_as_a_mistake_would_have_them_show_nothing() -> None:
    given = {"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": torch.ones(2, 3, dtype=torch.long)}
    names = [*given]
    for change in input_changes(names, [], [*names, "position_ids"], None, {}):
        other = change.change(given)
        assert other is None or "position_ids" in other, change.name
