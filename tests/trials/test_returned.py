"""What both models return is compared, whatever it is packed in and whatever [probes] say."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DistilBertConfig, DistilBertModel

from porting import verify
from porting.notation.table import parse_table
from porting.reporting.report import Report
from porting.tracing.trace import leaves, select, substitute
from porting.trials.returned import layouts
from tests.trials.small_model import Encoder


def returning(make: Callable[[dict[str, Tensor]], Any]) -> Report:
    class Port(Encoder):
        def forward(self, *given: Any, **named: Any) -> Any:
            return make(super().forward(*given, **named))

    return verify(reference=Encoder(), into=Port(), dtypes=(), loaded=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda out: out["logits"],
        lambda out: (out["logits"], out["pooled"]),
        lambda out: [out["pooled"], out["logits"]],
        lambda out: {"scores": out["logits"], "first": out["pooled"]},
        lambda out: SimpleNamespace(top=out["logits"], extra=3),
        lambda out: SimpleNamespace(extra=3, scores=out["logits"]),
        lambda out: out["logits"].transpose(0, 1),
        lambda out: out["logits"].flatten(0, 1),
        lambda out: {"deep": {"logits": (out["logits"],)}},
        lambda out: out["logits"][:, -1],
        lambda out: out["logits"][:, 0],
        lambda out: out["logits"][:, -1:],
        lambda out: out["logits"][:, 1:],
        lambda out: out["logits"][..., :-2],
    ],
    ids=[
        *["tensor", "tuple", "list", "dict", "object", "object with scores", "sequence first", "flat", "nested"],
        *["the last position", "the first", "the last as an axis", "all but the first", "all but two classes"],
    ],
)
def test_outputs_are_paired_whatever_they_are_packed_in(make: Callable[[dict[str, Tensor]], Any]) -> None:
    report = returning(make)
    assert report.faithful, str(report)
    assert report.scope.returned is not None
    assert ". -> logits" in report.scope.returned.pairs.values()


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda out: 2 * out["logits"],
        lambda out: out["logits"].softmax(-1),
        lambda out: (out["logits"], -3 * out["pooled"]),
        lambda out: {"logits": out["logits"] + 1e-6},
        lambda out: {**out, "pooled": out["pooled"].flip(0)},
        lambda out: 1.001 * out["logits"][:, -1],
    ],
    ids=[
        *["doubled", "softmax", "a factor", "a millionth", "rows exchanged"],
        "a factor at the last position",
    ],
)
def test_an_output_that_is_altered_is_different(make: Callable[[dict[str, Tensor]], Any]) -> None:
    report = returning(make)
    assert report.verdict == "different"
    assert all(probe.port.startswith(".") for probe in report.guilty)


class States(DistilBertModel):  # type: ignore[no-untyped-call]  # its base's
    """A model that returns its hidden states by that name, which the reference returns only where it is asked."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Any]:
        out = super().forward(input_ids, attention_mask=attention_mask, output_hidden_states=True)
        return {"last_hidden_state": out.last_hidden_state, "hidden_states": self.states(out.hidden_states)}

    def states(self, states: tuple[Tensor, ...]) -> list[Tensor]:
        return list(states)


class Reversed(States):  # type: ignore[no-untyped-call]  # its base's
    def states(self, states: tuple[Tensor, ...]) -> list[Tensor]:
        return list(states)[::-1]


class Narrow(States):  # type: ignore[no-untyped-call]  # its base's
    def states(self, states: tuple[Tensor, ...]) -> list[Tensor]:
        return [*states[:-1], states[-1][..., 1:-1]]


class WithoutEmbeddings(States):  # type: ignore[no-untyped-call]  # its base's
    def states(self, states: tuple[Tensor, ...]) -> list[Tensor]:
        return list(states)[1:]


def of_both(port: type[nn.Module], attention: str = "eager") -> tuple[Any, Any]:
    """The reference and a port of it with the same weights, which are no fresh ones."""
    kind: Any = DistilBertConfig
    fields = {"vocab_size": 60, "dim": 24, "hidden_dim": 40, "n_heads": 4, "n_layers": 2, "max_position_embeddings": 20}
    pair: list[Any] = [DistilBertModel, port]
    reference, ported = (
        one(kind(**fields, attn_implementation=used)).eval()
        for one, used in zip(pair, (attention, "eager"), strict=True)
    )
    torch.manual_seed(0)
    for parameter in reference.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    ported.load_state_dict(reference.state_dict())
    return reference, ported


@pytest.mark.parametrize(
    ("port", "verdict"),
    [(States, "faithful"), (Reversed, "different"), (Narrow, "different"), (WithoutEmbeddings, "faithful")],
)
def test_hidden_states_are_those_of_the_same_number(port: type[States], verdict: str) -> None:
    reference, ported = of_both(port)
    report = verify(reference=reference, into=ported, dtypes=(), loaded=True, causes=False)
    assert report.verdict == verdict, str(report)
    assert not reference.config.output_hidden_states
    pairs = report.scope.returned.pairs if report.scope.returned else {}
    if port is States:
        assert all(pairs[f"hidden_states.{number}"] == f". -> hidden_states.{number}" for number in range(3))
    if port is WithoutEmbeddings:  # the report says what they are
        assert pairs["hidden_states.0"].startswith("transformer.layer.0")


class Scores(DistilBertModel):  # type: ignore[no-untyped-call]  # its base's
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Any]:
        out = super().forward(input_ids, attention_mask=attention_mask, output_attentions=True)
        return {"last_hidden_state": out.last_hidden_state, "attentions": list(out.attentions)[:: self.step]}

    step = 1


class ScoresReversed(Scores):  # type: ignore[no-untyped-call]  # its base's
    step = -1


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("port", "verdict"), [(Scores, "faithful"), (ScoresReversed, "different")])
def test_attentions_are_those_of_the_same_layer(port: type[Scores], verdict: str, attention: str) -> None:
    reference, ported = of_both(port, attention)
    report = verify(reference=reference, into=ported, dtypes=(), loaded=True, causes=False)
    if attention == "eager":  # fused attention shows none
        assert report.verdict == verdict, str(report)
    assert not reference.config.output_attentions
    assert report.scope.returned is not None
    assert "last_hidden_state" in report.scope.returned.pairs


def test_names_come_before_values() -> None:
    """Outputs of one shape that are exchanged are not paired by their values."""

    class Spans(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = {"vocab_size": 20, "max_position_embeddings": 12}
            torch.manual_seed(0)
            self.tokens = nn.Embedding(20, 6)
            self.ends = nn.Linear(6, 2)

        def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
            start, end = self.ends(self.tokens(input_ids)).unbind(-1)
            return {"start_logits": start, "end_logits": end}

    class Exchanged(Spans):
        def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
            right = super().forward(input_ids)
            return {"start": right["end_logits"], "end": right["start_logits"]}

    report = verify(reference=Spans(), into=Exchanged(), dtypes=(), loaded=True)
    assert report.verdict == "different"


@pytest.mark.parametrize(
    "make",
    [
        lambda out: out["logits"].mean(1).sum(-1),
        lambda out: out["logits"][:, -2 if out["logits"].shape[1] > 1 else -1],
        lambda out: out["logits"][:, :-1].flip(-1),
    ],
    ids=["a sum of means", "the last position but one", "classes exchanged"],
)
def test_what_is_returned_and_equals_nothing_is_unproven(make: Callable[[dict[str, Tensor]], Any]) -> None:
    report = returning(make)
    assert report.verdict == "unproven"
    assert not report.as_claimed
    assert "nothing; your model does not return logits, pooled; your model also returns output" in " ".join(
        report.details().split()
    )


def test_parts_of_nested_outputs_are_found_and_replaced() -> None:
    one, two = torch.zeros(1), torch.ones(1)
    output: dict[str, Any] = {"hidden": (one, [two]), "n": None}
    assert list(leaves(output)) == ["hidden.0", "hidden.1.0"]
    assert select(output, "hidden.1.0") is two
    assert select(output, "hidden.2") is None
    changed = substitute(output, "hidden.1.0", one + 5)
    assert float(changed["hidden"][1][0]) == 5
    assert float(output["hidden"][1][0]) == 1


def test_layouts_are_every_order_and_every_merging_of_axes() -> None:
    value = torch.randn(2, 3, 4)
    found = {axes: lay(value) for axes, lay in layouts((2, 3, 4), (12, 2))}
    assert torch.equal(found["a b c", "(b c) a"], value.permute(1, 2, 0).reshape(12, 2))
    assert ("a b c", "(c b) a") in found
    assert list(layouts((2, 3), (4, 2))) == []


class Capped(nn.Module):
    """Ends with a norm, a head without a bias, and a cap without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"vocab_size": 30}
        self.words, self.inner = nn.Embedding(30, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 30, bias=False)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"logits": 4 * torch.tanh(self.head(self.norm(self.inner(self.words(input_ids)))) / 4)}


class WithoutCap(Capped):
    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"logits_": self.head(self.norm(self.inner(self.words(input_ids))))}


class WithoutNorm(Capped):
    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"hidden": self.inner(self.words(input_ids))}


class Body(Capped):
    """A part, which does not have what comes behind it."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"hidden": self.norm(self.inner(self.words(input_ids)))}


@pytest.mark.parametrize(
    ("port", "verdict"), [(Capped, "faithful"), (WithoutCap, "unproven"), (WithoutNorm, "unproven"), (Body, "faithful")]
)
def test_a_port_that_ends_before_the_reference_is_no_port_of_all_of_it(port: type[Capped], verdict: str) -> None:
    torch.manual_seed(0)
    table = None if port is not Body else parse_table(BODY)
    report = verify(reference=Capped(), into=port, table=table, dtypes=())
    assert report.verdict == verdict, str(report)
    text = " ".join(report.details().split())
    assert ("goes on: it returns what" in text) is (verdict == "unproven")
    assert ("it ends before head" in text) is (port is Body)


BODY = """
[mapping]
name = "body"
[tensors]
"words.weight" = "words.weight"
"inner.weight" = "inner.weight"
"inner.bias" = "inner.bias"
"norm.weight" = "norm.weight"
"norm.bias" = "norm.bias"
[drop]
"head.weight" = "the body alone"
[probes]
"norm" = "norm"
"""


class Attending(Capped):
    """Returns attention probabilities, rows of queries by keys: their two axes have one size."""

    turned = False

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        hidden = self.inner(self.words(input_ids))
        probabilities = (hidden @ hidden.transpose(1, 2)).softmax(-1)
        logits = self.head(self.norm(probabilities @ hidden))
        return {"logits": logits, "attentions": probabilities.mT if self.turned else probabilities}


class Turned(Attending):
    turned = True


def test_axes_of_one_size_are_not_exchanged() -> None:
    torch.manual_seed(0)
    assert verify(reference=Attending(), into=Turned, dtypes=()).verdict == "different"
    assert [axes for axes, _ in layouts((2, 3, 3), (2, 3, 3))] == [("", "")]


@pytest.mark.slow
def test_outputs_that_are_one_tensor_of_the_reference_are_both_compared() -> None:
    report = returning(lambda out: (out["logits"], [out["logits"] * 1, out["pooled"]]))
    assert report.faithful, str(report)
    assert report.scope.returned is not None
    assert [*report.scope.returned.pairs] == ["0", "1.0", "1.1"]
    assert not returning(lambda out: (out["logits"], [out["logits"] * 1.001, out["pooled"]])).faithful


ANOTHER_CLASS = """
[mapping]
name = "another"
[tensors]
{tensors}
[probes]
". -> scores_of_another_class" = ". -> 0"
"a_head_of_it" = ". -> 1"
"""


@pytest.mark.parametrize(("factor", "verdict"), [(1, "faithful"), (2, "different")])
def test_a_line_for_what_the_reference_lacks_compares_no_output(factor: int, verdict: str) -> None:
    class Port(Encoder):
        def forward(self, *given: Any, **named: Any) -> Any:
            out = super().forward(*given, **named)
            return factor * out["logits"], out["pooled"].square().sum(1)

    tensors = "\n".join(f'"{name}" = "{name}"' for name in Encoder().state_dict())
    table = parse_table(ANOTHER_CLASS.format(tensors=tensors))
    report = verify(reference=Encoder(), into=Port(), table=table, dtypes=(), loaded=True, causes=False)
    returned = report.scope.returned
    assert report.verdict == verdict, report.details()
    assert returned is not None
    assert (returned.pairs, returned.given) == ({"0": ". -> logits"}, ())
    assert [one.partition(" ")[0] for one in returned.alone] == ["1"]
    assert (". -> 0" in report.skipped, "." in report.skipped) == (False, False)
