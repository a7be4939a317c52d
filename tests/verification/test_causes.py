"""A planted bug is named, with its parameter; two bugs are two findings; what nobody knows is unknown."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import porting
from porting.causes.finding import Finding
from porting.errors import Code, Fault, PortingError
from porting.loading import load
from porting.models.bert import BertPooler
from porting.models.bert_heads import BertForPreTraining
from porting.reporting.terminal import LEAST
from porting.tracing.trace import like
from porting.verification import Report, cause_search, proof, verify
from tests.verification.planted import BUGS, FAR_FROM_ZERO, ROUNDS_WORSE, Bug, becomes, epsilon, tanh_gelu

pytestmark = pytest.mark.few(2)

NAMES = {
    "query bias dropped": ("query bias missing", ""),
    "key bias dropped": ("key bias missing", ""),
    "value bias dropped": ("value bias missing", ""),
    "LayerNorm eps 1e-5": ("LayerNorm eps", "eps is 1e-05 where the reference has 1e-12"),
    "LayerNorm eps 1e-5 everywhere": ("LayerNorm eps", "eps is 1e-05 where the reference has 1e-12"),
    "tanh GELU": ("tanh GELU for another activation", "tanh GELU where the reference has exact GELU"),
    "q and k swapped": ("query and key swapped", ""),
    "token types ignored": ("token types ignored", ""),
    "positions off by one": ("position offset", "off by +1"),
    "mask inverted": ("padding mask inverted", ""),
    "no tanh in the pooler": ("pooler tanh missing", ""),
    "decoder untied": ("decoder untied", ""),
    "square weight transposed": ("square weight transposed", ""),
    "output weight transposed": ("square weight transposed", ""),
    "no 1/sqrt(d)": ("1/sqrt(d) missing", ""),
}


def verified(path: Path, *bugs: Bug) -> Report:
    model = load(path)
    assert isinstance(model, BertForPreTraining)
    for bug in bugs:
        bug.plant(model)
    return verify(path, model, loaded=True)


@pytest.mark.few(1)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_named(checkpoint: Path, bug: Bug) -> None:
    (found,) = verified(checkpoint, bug).causes
    assert (found.name, found.detail) == NAMES[bug.name]
    assert found.probes == bug.guilty
    assert found.residual < 1e-12 < found.difference
    assert found.ties == ()
    assert found.fix


@pytest.mark.slow
def test_two_bugs_are_two_findings(checkpoint: Path) -> None:
    one, two = Bug("eps", epsilon, ()), Bug("gelu", tanh_gelu, ())
    names = [found.name for found in verified(checkpoint, one, two).causes]
    assert names == ["LayerNorm eps", "tanh GELU for another activation"]


@pytest.mark.slow
def test_two_bugs_behind_one_probe_are_one_finding_with_both(checkpoint: Path) -> None:
    """The sum of the embeddings and the norm over it lie between the same two probes."""
    ignored = next(bug for bug in BUGS if bug.name == "token types ignored")

    def eps(model: BertForPreTraining) -> None:
        norm = model.get_submodule("bert.embeddings.norm")
        assert isinstance(norm, nn.LayerNorm)
        norm.eps = 1e-5

    (found,) = verified(checkpoint, ignored, Bug("eps", eps, ())).causes
    assert set(found.name.split(" + ")) == {"LayerNorm eps", "token types ignored"}
    assert found.residual < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "constant"), [(ROUNDS_WORSE, "of 10000"), (FAR_FROM_ZERO, "of 1e+07")])
def test_a_cause_of_rounding_is_named_in_the_working_dtype(checkpoint: Path, bug: Bug, constant: str) -> None:
    report = verified(checkpoint, bug)
    assert report.verdict == "imprecise"
    (found,) = report.causes
    assert (found.name, found.detail) == ("mask precedence", constant)
    assert "fix: (1.0 - mask) * -10000.0" in report.details()


@pytest.mark.slow
def test_dropout_is_named_by_taking_it_out(checkpoint: Path) -> None:
    class Noisy(BertPooler):
        def forward(self, hidden: Tensor) -> Tensor:
            return F.dropout(super().forward(hidden), 0.1)

    (found,) = verified(checkpoint, Bug("dropout", becomes("bert.pooler", Noisy), ())).causes
    assert (found.name, found.probes, found.residual) == ("dropout active", ("bert.pooler",), 0.0)


@pytest.mark.slow
def test_what_is_in_no_catalogue_is_unknown(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for repairing the port, which tells it."""
    monkeypatch.setattr(cause_search, "REPAIRING", 0.0)

    class Odd(BertPooler):
        def forward(self, hidden: Tensor) -> Tensor:
            return torch.sin(self.dense(hidden[:, 0]) * 1.3)

    report = verified(checkpoint, Bug("sine", becomes("bert.pooler", Odd), ()))
    (found,) = report.causes
    assert isinstance(found, Finding)
    assert (found.name, found.names, found.probes) == ("", (), ("bert.pooler",))
    assert 0 < len(found.nearest) <= 3
    assert all(0 < near.share < 1 for near in found.nearest)
    text = report.details()
    assert "cause: unknown, at bert.pooler" in text
    told = [near.name for near in found.nearest if near.share >= LEAST]  # others would explain next to nothing
    assert all(name in " ".join(text.split()) for name in told)


@pytest.mark.slow
def test_a_faithful_port_has_no_cause_and_naming_can_be_left_out(checkpoint: Path) -> None:
    assert verify(checkpoint).causes == ()
    model = load(checkpoint)
    assert isinstance(model, BertForPreTraining)
    tanh_gelu(model)
    report = verify(checkpoint, model, loaded=True, causes=False)
    assert report.guilty
    assert report.causes == ()


@pytest.mark.slow
def test_a_cause_is_plain_data_and_said_in_the_report(checkpoint: Path) -> None:
    report = verified(checkpoint, Bug("eps", epsilon, ()))
    (found,) = report.to_dict()["causes"]
    assert found["name"] == "LayerNorm eps"
    assert found["probes"] == ["bert.layers.1.attention_norm"]
    said = "cause: LayerNorm eps (eps is 1e-05 where the reference has 1e-12), explains all but"
    assert said in report.details()


class Returning(nn.Module):
    """What it returns first makes what it returns second."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.LayerNorm(8, eps), nn.Linear(8, 8)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(self.first(x))
        return {"hidden": hidden, "pooled": self.second(hidden[:, 0]).tanh()}


def test_what_makes_an_output_differ_makes_those_differ_that_come_of_it() -> None:
    inputs = [{"x": torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(1))}]
    table = porting.parse_table("[tensors]\n" + "".join(f'"{name}" = "{name}"\n' for name in Returning().state_dict()))
    report = verify(reference=Returning(), into=Returning(1e-2), table=table, inputs=inputs, dtypes=(), loaded=True)
    (cause,) = report.causes
    assert (cause.name, len(cause.probes)) == ("LayerNorm eps", 2), str(report)


def test_what_is_put_in_the_place_of_a_value_has_its_layout() -> None:
    value, exact = torch.zeros(3, 4, dtype=torch.float32), torch.rand(4, 3, dtype=torch.float64).T
    assert like(exact, value).is_contiguous()
    assert torch.equal(like(exact, value), exact.float())
    assert like(exact, value.T.contiguous().T).stride() == (1, 3)
    assert like(exact[:2], value).shape == (2, 4)


@pytest.mark.parametrize("kind", [RuntimeError, PortingError])
def test_a_fault_of_the_search_for_causes_takes_nothing_from_the_verdict(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known to go wrong, as a forward that fails from its fifth call on, is no fault of this library."""

    def fails(*_: object, **__: object) -> None:
        said = "the size of tensor a must match the size of tensor b"
        raise PortingError(Fault(code=Code.FORWARD_FAILED, message=said)) if kind is PortingError else kind(said)

    monkeypatch.setattr(proof, "name_causes", fails)
    reference, port = Returning(), Returning(1e-2)
    report = verify(into=port, reference=reference, inputs=[{"x": torch.randn(4, 5, 6)}], dtypes=())
    assert report.verdict == "different"
    (warning,) = (one for one in report.warnings if "the search for the cause failed" in one)
    assert "the size of tensor a must match" in warning
    assert ("fault of this library" in warning) == (kind is RuntimeError)
