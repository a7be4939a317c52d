"""The places of a module, filling them, and who may be imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from porting.errors import Code
from porting.target import OURS, TargetError, assign, import_path, named_tensors, slots, unwrapped


class Tied(nn.Module):
    """An embedding, a decoder tied to it, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.decoder = nn.Linear(3, 5)
        self.decoder.weight = self.emb.weight
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("nothing", None)


def test_the_places_are_what_a_state_dict_lists() -> None:
    module = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
    module.add_module("last", nn.BatchNorm1d(3))
    assert list(slots(module)) == list(module.state_dict())
    assert {name: slot.shape for name, slot in slots(module).items()} == {
        name: tuple(tensor.shape) for name, tensor in module.state_dict().items()
    }


def test_a_place_knows_what_it_is() -> None:
    places = slots(Tied())
    assert list(places) == ["steps", "emb.weight", "decoder.weight", "decoder.bias"]
    assert (places["emb.weight"].same_as, places["decoder.weight"].same_as) == ("emb.weight", "emb.weight")
    assert [place.parameter for place in places.values()] == [False, True, True, True]
    assert places["steps"].dtype == torch.int64
    assert all(place.built for place in places.values())
    with torch.device("meta"):
        assert not any(place.built for place in slots(nn.Linear(2, 2)).values())


class Unmade(nn.Module):
    """Its constructor does not call that of its base."""

    def __init__(self) -> None:
        pass


def holding(name: object, value: object) -> nn.Module:
    """A module with something among its parameters that torch would not have put there."""
    module = nn.Linear(1, 1)
    module._parameters[name] = value  # type: ignore[index, assignment]  # that is the point
    return module


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Unmade, r"the constructor of Unmade does not call super\(\).__init__\(\)"),
        (lambda: nn.Sequential(nn.Linear(1, 1), Unmade()), "the constructor of Unmade does not call"),
        (lambda: holding(7, torch.zeros(1)), "7 among the parameters and buffers of Linear has a name that is a int"),
        (lambda: holding("b", "text"), "'b' among the parameters and buffers of Linear is a str"),
        (lambda: holding("b", nested()), "'b' among the parameters and buffers of Linear is a nested tensor"),
    ],
)
def test_what_torch_would_not_register_is_named(make: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(TargetError, match=said):
        slots(make())


def test_a_module_that_stands_in_two_places_is_listed_in_both() -> None:
    module = nn.Module()
    module.a = module.b = nn.Linear(2, 2)
    assert [slot.same_as for slot in slots(module).values()] == ["a.weight", "a.bias", "a.weight", "a.bias"]


def test_assigning_keeps_ties_and_identity() -> None:
    module = Tied()
    before = module.emb.weight
    new = torch.randn(5, 3)
    assign(module, {"emb.weight": new, "steps": torch.tensor([3, 4])})
    assert module.emb.weight is before
    assert module.decoder.weight is before
    assert before.data_ptr() == new.data_ptr()
    assert torch.equal(module.get_buffer("steps"), torch.tensor([3, 4]))


def test_assigning_to_meta_makes_parameters_and_keeps_ties() -> None:
    with torch.device("meta"):
        module = Tied()
    module.decoder.bias.requires_grad = False
    values = {"decoder.weight": torch.randn(5, 3), "decoder.bias": torch.randn(5), "steps": torch.tensor([1, 2])}
    assign(module, values)
    assert module.emb.weight is module.decoder.weight
    assert isinstance(module.emb.weight, nn.Parameter)
    assert module.emb.weight.requires_grad
    assert not module.decoder.bias.requires_grad
    assert module.emb.weight.data_ptr() == values["decoder.weight"].data_ptr()
    assert torch.equal(module.get_buffer("steps"), torch.tensor([1, 2]))
    assert {name for name, _ in named_tensors(module)} == {*values, "emb.weight"}


def test_assigning_is_all_or_nothing() -> None:
    module = Tied()
    before = {name: tensor.clone() for name, tensor in named_tensors(module)}
    with pytest.raises(KeyError):
        assign(module, {"emb.weight": torch.randn(5, 3), "nowhere": torch.randn(2)})
    assert all(torch.equal(tensor, before[name]) for name, tensor in named_tensors(module))


class Compiled(nn.Module):
    """What ``torch.compile`` makes of a module, as far as names go; the real one takes seconds to import."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def test_a_compiled_module_is_seen_through() -> None:
    module = Tied()
    assert unwrapped(Compiled(module)) is module
    assert unwrapped(nn.DataParallel(Compiled(module))) is module
    assert unwrapped(module) is module
    assert list(slots(Compiled(module))) == list(slots(module))


def test_ours_is_imported() -> None:
    assert import_path("porting.models.bert_heads:BertForMaskedLM").__name__ == "BertForMaskedLM"


@pytest.mark.parametrize(
    "path", ["os:system", "subprocess:Popen", "porting.load:load", "porting.models_evil:X", "builtins:eval"]
)
def test_what_is_not_ours_is_not_imported(path: str) -> None:
    with pytest.raises(TargetError) as caught:
        import_path(path)
    (fault,) = caught.value.faults
    assert str(fault) == (
        f"the table names {path!r}, which is not part of this library "
        "(pass trust=True if you know the table, or pass the module with into=) [untrusted-target]"
    )


def test_refusing_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "foreign_module.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TargetError, match="not part of this library"):
        import_path("foreign_module:X")
    assert "foreign_module" not in sys.modules


def test_what_is_trusted_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trusted_module.py").write_text("class Model:\n    class Inner: pass\nNUMBER = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert import_path("trusted_module:Model.Inner", trust=True).__name__ == "Inner"
    for path, message in (
        ("trusted_module:Modell", "'trusted_module' has no 'Modell' (did you mean 'Model'?) [bad-target]"),
        ("trusted_module:NUMBER", "'trusted_module:NUMBER' is not a class or function [bad-target]"),
    ):
        with pytest.raises(TargetError) as caught:
            import_path(path, trust=True)
        assert str(caught.value) == message


def test_an_import_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TargetError) as caught:
        import_path("failing_module:X", trust=True)
    (fault,) = caught.value.faults
    assert fault.code is Code.BAD_TARGET
    assert fault.message == "importing 'failing_module' failed: ZeroDivisionError: division by zero"
    with pytest.raises(TargetError, match=r"importing 'porting\.models\.nothing' failed: ModuleNotFoundError"):
        import_path("porting.models.nothing:X")


@pytest.mark.parametrize("path", ["", "porting.models", ":X", "a:", "a b:X", "a:X()", "../a:X", "a:b:c", f"{OURS}:X"])
def test_what_is_no_import_path_is_refused(path: str) -> None:
    with pytest.raises(TargetError, match=r"is not an import path, expected package\.file:name \[bad-target\]"):
        import_path(path, trust=True)
