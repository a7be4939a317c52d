"""A plain function as the reference: in numpy or torch, with and without a dtype, and what it cannot give."""

from __future__ import annotations

import functools
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import porting
from porting.notation.table import parse_table
from porting.verification import VerifyError, record, verify
from porting.verification.functions import computes

Arrays = dict[str, np.ndarray]


class Small(nn.Module):
    """x -> tanh(x A + a) B + b."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.tanh(self.first(x)))
        return result


class Named(Small):
    def forward(self, x: Tensor) -> Any:  # what a model with several outputs gives
        hidden = self.first(x)
        return {"loss": hidden.sum(), "logits": self.second(torch.tanh(hidden))}


@pytest.fixture
def module() -> Small:
    return Small()


@pytest.fixture
def inputs() -> Arrays:
    return {"x": np.random.default_rng(0).normal(size=(40, 3))}


def held(module: nn.Module) -> Arrays:
    return {name: one.detach().numpy().copy() for name, one in module.state_dict().items()}


def in_numpy(module: nn.Module) -> Callable[..., dict[str, np.ndarray]]:
    weights = held(module)

    def forward(x: Any, dtype: Any) -> dict[str, np.ndarray]:
        w = {name: one.astype(dtype) for name, one in weights.items()}
        hidden = x @ w["first.weight"].T + w["first.bias"]
        return {"first": hidden, ".": np.tanh(hidden) @ w["second.weight"].T + w["second.bias"]}

    return forward


def test_a_numpy_function_in_two_dtypes(module: Small, inputs: Arrays) -> None:
    report = verify(into=module, reference=in_numpy(module), inputs=inputs)
    assert report.faithful, str(report)
    assert report.complete
    assert [(one.reference, one.port) for one in report.probes] == [("first", "first"), (".", ".")]
    for probe in report.probes:
        assert 0 < probe.rounding["float32"].end_to_end < 4
        assert probe.rounding["float32"].isolated is None
    assert report.reference.endswith("test_functions.in_numpy.forward")
    assert all(torch.equal(one, Small.state_dict(module)[name]) for name, one in module.state_dict().items())


@pytest.mark.parametrize("place", ["first", "second"])
def test_a_mistake_is_placed_by_its_names(module: Small, inputs: Arrays, place: str) -> None:
    function = in_numpy(module)
    with torch.no_grad():
        module.get_parameter(f"{place}.bias")[0] += 1e-6
    report = verify(into=module, reference=function, inputs=inputs)
    assert [one.port for one in report.guilty] == [{"first": "first", "second": "."}[place]]
    assert report.causes == ()


def test_without_a_dtype_rounding_is_not_compared(module: Small, inputs: Arrays) -> None:
    function = functools.partial(in_numpy(module), dtype=np.float64)
    report = verify(into=module, reference=lambda x: function(x.astype(np.float64)), inputs=inputs)
    assert report.faithful
    assert report.warnings == (
        "the reference does not compute in float32: how well the port rounds there is not known",
    )
    assert report.noise == {}


def test_a_torch_function_is_given_tensors(module: Small, inputs: Arrays) -> None:
    copy = deepcopy(module)
    given: list[object] = []

    def forward(x: Tensor, dtype: torch.dtype) -> object:
        given.append(dtype)
        cast = deepcopy(copy).to(dtype)
        return torch.tanh(cast.first(x)), cast(x)

    table = parse_table('[mapping]\nname = "places"\n[probes]\n". -> 1" = "second"\n')
    report = verify(into=module, reference=forward, table=table, inputs=inputs, dtypes=(torch.float32, torch.bfloat16))
    assert report.faithful, str(report)
    assert set(report.probes[0].rounding) == {"float32", "bfloat16"}
    assert {torch.float64, torch.float32, torch.bfloat16} <= set(given)


def test_a_function_that_changes_its_weights_is_refused(module: Small, inputs: Arrays) -> None:
    copy = deepcopy(module)
    with pytest.raises(VerifyError, match="gives other values in float64 since it was run in bfloat16"):
        verify(into=module, reference=lambda x, dtype: copy.to(dtype)(x), inputs=inputs, dtypes=(torch.bfloat16,))


class Pair(NamedTuple):
    hidden: np.ndarray
    logits: np.ndarray


@dataclass
class Fields:
    hidden: np.ndarray
    logits: np.ndarray
    nothing: None = None


@pytest.mark.parametrize(
    "give",
    [
        lambda hidden, logits: {"logits": logits},
        lambda hidden, logits: {"hidden": hidden, "logits": logits},
        Pair,
        Fields,
    ],
    ids=["a dict", "with more", "a named tuple", "a dataclass"],
)
def test_outputs_are_compared_by_name(inputs: Arrays, give: Callable[..., object]) -> None:
    module = Named()
    inner = in_numpy(module)

    def forward(x: Any, dtype: Any) -> object:
        values = inner(x, dtype)
        return give(values["first"], values["."])

    report = verify(into=module, reference=forward, inputs=inputs)
    assert report.faithful, str(report)
    assert ("logits", ". -> logits") in [(one.reference, one.port) for one in report.probes]
    with torch.no_grad():
        module.second.bias[1] += 1e-6
    assert not verify(into=module, reference=forward, inputs=inputs).faithful


def test_a_checkpoint_is_loaded_through_its_table(module: Small, inputs: Arrays, tmp_path: Path) -> None:
    save_file(
        {name.replace("first", "a"): one for name, one in module.state_dict().items()}, tmp_path / "w.safetensors"
    )
    text = (
        '[mapping]\nname = "two"\n[tensors]\n"a.{w:weight,bias}" = "first.{w:weight,bias}"\n'
        '"second.{w:weight,bias}" = "second.{w:weight,bias}"\n[probes]\n"first" = "first"\n"." = "."\n'
    )
    report = verify(tmp_path / "w.safetensors", Small, parse_table(text), reference=in_numpy(module), inputs=inputs)
    assert report.faithful, str(report)
    assert report.complete


@dataclass
class Sizes:
    vocab_size: int = 12
    max_position_embeddings: int = 10


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Sizes()
        self.words, self.out = nn.Embedding(12, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        result: Tensor = self.out(self.words(input_ids) * attention_mask[..., None])
        return result


def test_inputs_are_made_from_the_ports_config() -> None:
    module = Tagger()
    w = held(module)

    def forward(input_ids: Any, attention_mask: Any, dtype: Any) -> np.ndarray:
        hidden = w["words.weight"].astype(dtype)[input_ids] * attention_mask[..., None]
        result: np.ndarray = hidden.astype(dtype) @ w["out.weight"].astype(dtype).T + w["out.bias"].astype(dtype)
        return result

    report = verify(into=module, reference=forward)
    assert report.faithful, str(report)
    assert len(report.cases) >= 1
    assert "padded" in report.cases[0]
    wrong = verify(
        into=module,
        reference=lambda input_ids, attention_mask, dtype: (
            forward(input_ids, attention_mask, dtype) * dtype.type(1.001)
        ),
    )
    assert not wrong.faithful
    lacks = verify(into=module, reference=lambda input_ids, dtype: forward(input_ids, input_ids * 0 + 1, dtype))
    assert lacks.faithful  # what is padding is compared with nothing: the port is given the mask all the same


class Rows(Tagger):
    """Wrong on inputs that no first batch has: which, ``wrong`` says of the ids and the mask."""

    wrong: Callable[[Tensor, Tensor], bool]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(input_ids, attention_mask) * (1.01 if self.wrong(input_ids, attention_mask) else 1)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ids, mask: ids.shape[0] == 17,
        lambda ids, mask: ids.shape == (1, 3),
        lambda ids, mask: bool((mask[:, 0] == 0).any()),
        lambda ids, mask: bool((ids == ids[:, :1]).all()) and ids.shape[1] > 2,
    ],
    ids=["many rows", "a length", "left padding", "a token again and again"],
)
def test_trials_are_run_on_a_function_too(wrong: Callable[[Tensor, Tensor], bool]) -> None:
    module = Rows()
    module.wrong = lambda ids, mask: False
    w = held(module)

    def forward(input_ids: Any, attention_mask: Any, dtype: Any) -> np.ndarray:
        hidden = w["words.weight"].astype(dtype)[input_ids] * attention_mask[..., None]
        result: np.ndarray = hidden.astype(dtype) @ w["out.weight"].astype(dtype).T + w["out.bias"].astype(dtype)
        return result

    right = verify(into=module, reference=forward)
    assert right.faithful, str(right)
    assert len(right.scope.results) > 20
    module.wrong = wrong
    report = verify(into=module, reference=forward)
    assert report.verdict == "different", str(report)


REFUSED: dict[str, tuple[Callable[..., object], str]] = {
    "float32 alone": (lambda x: x.astype(np.float32), "gives '.' in float32 where float64 was asked for"),
    "no array": (lambda x: "a word", "what it returned is of type str, expected an array"),
    "nothing": (lambda x: {}, "gives no array that could be compared"),
    "it fails": (lambda x: x[[1000]], "given numpy arrays, IndexError.*; given torch tensors, IndexError"),
    "no module": (lambda y: 1, "was called to build the reference, and gave a int, not a torch.nn.Module"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_reference_is_refused_in_a_line(module: Small, inputs: Arrays, what: str) -> None:
    function, message = REFUSED[what]
    with pytest.raises(VerifyError, match=message) as caught:
        verify(into=module, reference=function, inputs=inputs)
    assert len(caught.value.faults) == 1
    assert "\n" not in str(caught.value)


def test_gradients_need_a_module(module: Small, inputs: Arrays) -> None:
    with pytest.raises(VerifyError, match="gradients and training need a reference with parameters"):
        verify(into=module, reference=in_numpy(module), inputs=inputs, gradients=True)


def test_it_is_recorded_as_a_module_is(module: Small, inputs: Arrays, tmp_path: Path) -> None:
    path = record(in_numpy(module), tmp_path / "function.safetensors", inputs=inputs)
    held = porting.load_recording(path)
    assert set(held.points) == {"float64", "float32"}
    assert list(held.points["float64"][0]) == ["first", "."]
    report = verify(into=module, reference=path)
    assert report.faithful, str(report)
    assert report.complete


def test_a_lone_input_may_have_another_name(module: Small, inputs: Arrays) -> None:
    inner = in_numpy(module)

    class Model:
        """What is called and is no function, as a model of another framework: it computes, whatever its arguments."""

        def __call__(self, hidden: Any, dtype: Any) -> object:
            return inner(hidden, dtype)

    assert verify(into=module, reference=Model(), inputs=inputs).faithful


def build(config: object) -> nn.Module:
    return nn.Linear(1, 1)


def annotated(input_ids: int) -> nn.Module:
    return nn.Linear(input_ids, 1)


class Echo:
    def __call__(self, x: object) -> object:
        return x


@pytest.mark.parametrize(
    ("given", "names", "expected"),
    [
        (lambda x: x, ["x"], True),
        (lambda x: x, [], False),
        (lambda x: x, ["0"], True),
        (lambda **inputs: 1, ["x"], True),
        (lambda dtype=None, **inputs: 1, ["x"], True),
        (lambda attention_mask: 1, [], True),
        (functools.partial(lambda w, x: x, 1), ["x"], True),
        (Echo(), [], True),
        (Echo().__call__, ["x"], True),
        (build, ["x"], False),
        (annotated, ["input_ids"], False),
        (functools.partial(nn.Linear, 3), ["out_features"], False),
        (Small, ["x"], False),
        (Small(), ["x"], False),
        (lambda: 1, ["x"], False),
    ],
)
def test_what_computes_and_what_builds(given: object, names: list[str], expected: bool) -> None:
    assert computes(given, names) is expected
