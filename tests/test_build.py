from __future__ import annotations

import functools
import inspect
import resource
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from porting.build import OWN_CODE, bounds, build, build_with_values
from porting.builder_config import Named, call, make_config
from porting.limits import LimitError
from porting.models import Bert, BertConfig
from porting.target import TargetError, assign, named_tensors, slots
from tests.models.twins import TINY

pytestmark = pytest.mark.few(3)


class Computing(nn.Module):
    """Keeps tensors that no checkpoint fills, in every place where a module can keep one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.table: Tensor
        self.register_buffer("table", torch.arange(6.0).view(2, 3) ** 2, persistent=False)
        self.register_buffer("count", torch.full((2,), 7.0))
        self.plain = torch.linspace(0.0, 1.0, 5)
        self.listed = [torch.ones(2), [torch.full((1,), 3.0)]]
        offset = torch.tensor([5.0])
        self.closure: Callable[[], Tensor] = lambda: offset


def in_itself() -> nn.Module:
    module = nn.Linear(3, 4)
    module._modules["itself"] = module
    return module


def nested(depth: int) -> nn.Module:
    outer = inner = nn.Module()
    for _ in range(depth):
        inner.inner = nn.Module()
        inner = inner.inner
    return outer


@pytest.mark.parametrize("make", [in_itself, functools.partial(nested, 5000)])
def test_modules_that_cannot_be_listed_are_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(TargetError, match=r"lie in each other too deeply to be listed, or one in itself"):
        build(make, OWN_CODE)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("inside", [False, True])
def test_parameters_that_torchscript_keeps_are_not_replaced(inside: bool) -> None:
    def scripted() -> nn.Module:
        module: nn.Module = torch.jit.script(nn.Linear(3, 4))
        return nn.Sequential(module) if inside else module

    module = build(scripted, OWN_CODE)
    values = {name: torch.zeros(tensor.shape) for name, tensor in named_tensors(module)}
    with pytest.raises(TargetError, match=r"is TorchScript, whose parameters without values cannot be replaced"):
        assign(module, values)


def test_a_module_is_built_without_memory_or_values() -> None:
    module = build(lambda: Bert(config=BertConfig(**TINY)), OWN_CODE)
    assert all(tensor.is_meta for _, tensor in named_tensors(module))
    assert {name: slot.shape for name, slot in slots(module).items()} == {
        name: tuple(tensor.shape) for name, tensor in Bert(config=BertConfig(**TINY)).state_dict().items()
    }


def test_what_a_constructor_computes_has_its_values() -> None:
    module = build(Computing, OWN_CODE)
    assert isinstance(module, Computing)
    assert module.linear.weight.is_meta
    assert isinstance(module.linear.weight, nn.Parameter)
    assert module.count.is_meta  # a checkpoint has it
    assert torch.equal(module.table, torch.tensor([[0.0, 1.0, 4.0], [9.0, 16.0, 25.0]]))
    assert torch.equal(module.plain, torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]))
    assert str(module.listed) == "[tensor([1., 1.]), [tensor([3.])]]"
    assert torch.equal(module.closure(), torch.tensor([5.0]))


@pytest.mark.parametrize("reads", [False, True])
def test_a_buffer_that_is_kept_under_another_name_stays_one_tensor(*, reads: bool) -> None:
    class Twice(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.table = torch.zeros(2, 2)
            self.table[1, 0] = 5.0
            self.register_buffer("kept", self.table)
            self.most = self.table.max().item() if reads else 5.0

    module = build(Twice, OWN_CODE)
    assert module.get_buffer("kept") is module.table
    assert module.table.is_meta
    value = torch.full((2, 2), 7.0)
    assign(module, {"kept": value})
    assert module.get_buffer("kept") is module.table is value


def test_a_constructor_that_looks_at_values_is_run_where_there_are_some() -> None:
    class Rates(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.rates = [rate.item() for rate in torch.linspace(0.0, 0.5, 3)]

    module = build(Rates, OWN_CODE)
    assert module.rates == [0.0, 0.25, 0.5]
    assert module.get_parameter("weight").is_meta


def test_ties_stay_ties() -> None:
    class Tied(Computing):
        def __init__(self) -> None:
            super().__init__()
            self.again = nn.Linear(3, 4)
            self.again.weight = self.linear.weight

    module = build(Tied, OWN_CODE)
    assert module.again.weight is module.linear.weight  # type: ignore[union-attr]  # a Linear has a weight


class Fills(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Notes each operation that really fills a tensor in place."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor here
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # Any: whatever torch hands on
        name = func.overloadpacket.__name__
        if name.endswith("_"):
            self.seen.add(name)
        return func(*args, **(kwargs or {}))


def test_parameters_are_not_initialised_on_the_cpu_either() -> None:
    def make() -> nn.Module:
        computing, embedding = Computing(), nn.Embedding(3, 4, padding_idx=0)
        nn.init.trunc_normal_(computing.linear.weight)
        nn.init.xavier_uniform_(embedding.weight)
        return nn.ModuleList([computing, embedding, nn.LayerNorm(3), nn.LSTM(2, 2)])

    with Fills() as fills:
        build(make, OWN_CODE)
    assert fills.seen == set()
    with Fills() as fills:
        make()
    assert {"uniform_", "normal_", "fill_"} <= fills.seen


def test_what_goes_wrong_while_building_is_said() -> None:
    def fails() -> nn.Module:
        raise ValueError("hidden_size=7\n  is odd")

    with pytest.raises(TargetError) as caught:
        build(fails, OWN_CODE)
    expected = f"building the module failed: ValueError: hidden_size=7; is odd (at {__file__}:"
    assert str(caught.value).startswith(expected)
    with pytest.raises(TargetError, match=r"building the module gave a dict, expected a torch\.nn\.Module"):
        build(dict, OWN_CODE)  # type: ignore[arg-type]  # that is the point


def test_a_tensor_that_a_cache_keeps_without_values_is_named() -> None:
    @functools.cache
    def angles() -> Tensor:
        return torch.arange(3.0)

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.angles = angles()

    with pytest.raises(TargetError, match="Rotary keeps 'angles', a tensor without values"):
        build(Rotary, OWN_CODE)


@dataclass(frozen=True)
class Config:
    hidden_size: int
    num_heads: int = 2


FIELDS = {"hidden_size": 6, "num_heads": 3}


class Sized(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int = 2, dropout: float = 0.5) -> None:
        super().__init__()
        self.given = (hidden_size, num_heads, dropout)


class Configured(nn.Module):
    def __init__(self, *, config: Config) -> None:
        super().__init__()
        self.given = config


def positional(config: Config, /) -> Configured:
    return Configured(config=config)


def other_name(settings: Config) -> Configured:
    return Configured(config=settings)


def nothing() -> Sized:
    return Sized(1)


@pytest.mark.parametrize(
    ("into", "given"),
    [
        (Configured, Config(6, 3)),
        (positional, Config(6, 3)),
        (other_name, Config(6, 3)),
        (lambda config: Configured(config=config), Config(6, 3)),
        (lambda config=None: Configured(config=config), Config(6, 3)),
        (Sized, (6, 3, 0.5)),
        (lambda *, hidden_size: Sized(hidden_size), (6, 2, 0.5)),
        (nothing, (1, 2, 0.5)),
    ],
    ids=["keyword", "positional", "another name", "lambda", "default", "fields", "one field", "nothing"],
)
def test_a_class_or_function_gets_what_its_parameters_ask_for(into: Callable[..., nn.Module], given: object) -> None:
    assert call(into, lambda: Config(**FIELDS), FIELDS, OWN_CODE).given == given


def test_a_function_that_needs_no_config_makes_none() -> None:
    def refuse() -> object:
        raise AssertionError

    assert isinstance(call(nothing, refuse, FIELDS, OWN_CODE), Sized)


def test_a_parameter_that_nothing_is_known_of_is_named() -> None:
    def builder(hiden_size: int, depth: int) -> nn.Module:
        raise AssertionError

    with pytest.raises(TargetError) as caught:
        call(builder, dict, FIELDS, OWN_CODE)
    assert str(caught.value) == (
        "builder must be given 'hiden_size', 'depth', which the table's [config] does not have "
        "(did you mean 'hidden_size'?) [bad-target]"
    )


def reads_a_dictionary(config: dict[str, int]) -> nn.Module:
    return Sized({"hidden_size": config["hidden_size"]}["hidden_size"], config["depth"])


def reads_attributes(config: Any) -> nn.Module:  # any kind of config
    return Sized(config.hidden_size, config.depth)


ADD = r'add "depth" = "depth" to \[config\]'


def unpacks(config: dict[str, int]) -> nn.Module:
    return reads_a_dictionary({**config})


@pytest.mark.parametrize(
    ("builder", "stored", "hint"),
    [
        (reads_a_dictionary, {"depth": 2}, ADD),
        (reads_attributes, {"depth": 2}, ADD),
        (unpacks, {"depth": 2}, ADD),
        (reads_attributes, {"depths": 2}, r"did you mean 'depths'\?"),
        (reads_a_dictionary, {}, 'add "the checkpoint\'s name of it" = "depth" to \\[config\\]'),
    ],
)
def test_a_field_that_the_table_does_not_give_is_named(
    builder: Callable[..., nn.Module], stored: Mapping[str, int], hint: str
) -> None:
    said = rf"reads the field 'depth' of the config, which .* \[config\] does not give \({hint}; at .*test_build.py"
    with pytest.raises(TargetError, match=said):
        call(builder, lambda: Named(FIELDS), FIELDS, OWN_CODE, {**FIELDS, **stored})


def test_a_key_that_is_no_field_is_left_to_the_builder() -> None:
    def builder(config: Mapping[str, int]) -> nn.Module:
        return Sized({"small": config["hidden_size"]}["large"])

    with pytest.raises(KeyError, match="large"):
        call(builder, lambda: Named(FIELDS), FIELDS, OWN_CODE, FIELDS)


def test_a_config_is_made_or_all_its_unknown_fields_are_named() -> None:
    assert make_config(Config, FIELDS, where="config.json") == Config(6, 3)
    with pytest.raises(TargetError) as caught:
        make_config(Config, {**FIELDS, "hidden": 1, "num_head": 2}, where="config.json")
    assert str(caught.value).splitlines() == [
        "the table's [config] gives 'hidden', and Config has no such field (did you mean 'hidden_size'?) [bad-target]",
        "the table's [config] gives 'num_head', and Config has no such field (did you mean 'num_heads'?) [bad-target]",
    ]


def test_a_config_that_refuses_its_values_says_where_they_come_from() -> None:
    with pytest.raises(TargetError) as caught:
        make_config(BertConfig, {"hidden_size": 10, "num_attention_heads": 3}, where="some/config.json")
    assert str(caught.value).startswith("some/config.json: BertConfig has 1 fault: hidden_size=10: expected a multiple")
    with pytest.raises(TargetError, match=r"config.json: .*missing 1 required positional argument: 'hidden_size'"):
        make_config(Config, {}, where="config.json")


def test_a_config_that_takes_anything_gets_everything() -> None:
    def anything(**fields: int) -> Mapping[str, int]:
        return fields

    assert inspect.signature(anything).parameters
    assert make_config(anything, FIELDS, where="") == FIELDS


class Grown(nn.Module):
    """As many layers as the config says, each with a parameter, or with none."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(config["make"]() for _ in range(config["layers"]))


@pytest.mark.parametrize(
    "layer",
    [lambda: nn.Linear(2, 2), nn.Identity, lambda: nn.ModuleList([nn.LayerNorm(2)])],
    ids=["linear", "none", "deep"],
)
@pytest.mark.parametrize("how", ["build", "filled", "call"])
def test_whatever_a_config_has_a_say_in_is_built_within_bounds(layer: Callable[[], nn.Module], how: str) -> None:
    """By its own parameters, and by its modules where they have none."""
    within = bounds({"a": torch.zeros(2)})
    assert within.parameters == 10_064
    config: dict[str, Any] = {"make": layer, "layers": 10**6}
    fields = {"config": config}
    made = {
        "build": lambda: build(lambda: Grown(config), within),
        "filled": lambda: build_with_values(lambda: Grown(config), within),
        "call": lambda: call(Grown, lambda: config, fields, within),
    }
    with pytest.raises(TargetError, match=r"asks for more than 10064 (parameters|modules), as many as could be meant"):
        made[how]()
    config["layers"] = 1000
    assert isinstance(made[how](), Grown)


@pytest.mark.parametrize("how", [build_with_values, build])
def test_parameters_are_bounded_by_the_elements_of_the_checkpoint(how: Callable[..., nn.Module]) -> None:
    """Of a few parameters as well, if they are large; those without memory of their own are not."""
    within = bounds({"a": torch.zeros(1 << 16)})

    def make(count: int) -> nn.Module:
        return nn.ParameterList(torch.empty(1 << 20) for _ in range(count))

    assert how(lambda: make(4), within).state_dict().keys() == {"0", "1", "2", "3"}
    if how is build:
        assert len(list(how(lambda: make(50), within).parameters())) == 50
        return
    with pytest.raises(TargetError, match=r"asks for parameters of more than 4718592 elements .*PORTING_LIMITS=param"):
        how(lambda: make(5), within)


class Masked(nn.Module):
    """Keeps tensors that no checkpoint stores, of a size that a config says."""

    def __init__(self, make: Callable[[], Tensor], count: int = 1) -> None:
        super().__init__()
        for number in range(count):
            self.register_buffer(f"mask{number}", make(), persistent=False)


@pytest.mark.parametrize("how", [build_with_values, build])
@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: torch.ones(20_000, 20_000).tril(), 1),
        (lambda: torch.arange(20_000)[:, None] - torch.arange(20_000)[None], 1),
        (lambda: torch.outer(torch.rand(20_000), torch.rand(20_000)), 1),
        (lambda: torch.arange(20_000)[:, None] < torch.arange(20_000), 1),
        (lambda: torch.zeros(1 << 24), 5),
        (lambda: torch.full((1 << 27,), 1.0).double(), 1),
        (lambda: torch.zeros(int(torch.zeros(1)) + (1 << 27)), 1),
        (lambda: torch.eye(10_000), 1),
        (lambda: torch.tril_indices(20_000, 20_000), 1),
        (lambda: torch.rand(9_000, 1) * torch.rand(9_000), 1),
    ],
    ids=["ones", "distances", "outer", "compared", "several", "widened", "a value", "eye", "indices", "product"],
)
def test_what_a_module_makes_for_itself_is_bounded(
    how: Callable[..., nn.Module], make: Callable[[], Tensor], count: int
) -> None:
    """It is refused before it is made: a config can ask for masks of the square of its positions."""
    within = bounds({"a": torch.zeros(2)})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TargetError, match=r"asks for (a tensor|tensors) of .* PORTING_LIMITS=made="):
        how(lambda: Masked(make, count), within)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (500 << 10)


def test_the_time_of_many_small_parts_counts_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A config can ask for many; what a builder computes or imports is its own affair."""
    monkeypatch.setenv("PORTING_LIMITS", "seconds=0")

    def computing() -> nn.Module:
        begun = time.thread_time()
        while time.thread_time() < begun + 0.1:
            sum(range(1000))
        return nn.Module()

    small = replace(bounds({"a": torch.zeros(2)}), stored=0)
    with pytest.raises(LimitError, match=r"^building the module: this takes more than 0 seconds"):
        build_with_values(lambda: nn.ModuleList(nn.Identity() for _ in range(9000)), small)
    slow = build_with_values(lambda: nn.ModuleList(computing() for _ in range(20)), replace(small, stored=5 * 10**8))
    assert len(list(slow.children())) == 20
    large = replace(small, stored=600 * 10**9)
    assert (
        len(list(build_with_values(lambda: nn.ModuleList(nn.Identity() for _ in range(9000)), large).modules())) == 9001
    )


@pytest.mark.parametrize(
    ("layers", "shapes", "allowed"),
    [
        (36, [(4, 4)], True),
        (37, [(4, 4)], False),
        (37, [(4, 4)] * 37, True),
        (126, [(126, 4)] * 4, True),
        (126, [(126, 4)] * 3, False),
        (257, [(257, 4)] * 4, False),
    ],
)
def test_layers_are_bounded_by_the_tensors(layers: int, shapes: list[tuple[int, ...]], allowed: bool) -> None:
    """Each has some of its own, or shares them with a few dozen others, or they are stacked."""
    tensors = {str(number): torch.zeros(shape, device="meta") for number, shape in enumerate(shapes)}
    for name in ("num_hidden_layers", "encoder_layers", "n_layer", "depth"):
        with nullcontext() if allowed else pytest.raises(TargetError, match=f"{name}={layers}, where at most"):
            bounds(tensors, {name: layers})


def test_the_number_of_a_layer_counts_none() -> None:
    """Qwen's and dots.llm1's default is beyond the last layer of a small model."""
    bounds({"a": torch.zeros(4)}, {"num_hidden_layers": 2, "max_window_layers": 62})


def test_masks_of_a_usual_size_are_built() -> None:
    within = bounds({"a": torch.zeros(2)})
    module = build(lambda: Masked(lambda: torch.ones(1024, 1024).tril(), 24), within)
    assert sum(buffer.nbytes for buffer in module.buffers()) == 24 << 22


def test_a_limit_on_what_a_module_makes_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTING_LIMITS", "parameters=9000000")
    made = build_with_values(
        lambda: nn.ParameterList(torch.empty(1 << 20) for _ in range(8)), bounds({"a": torch.zeros(2)})
    )
    assert len(list(made.parameters())) == 8


def test_a_builder_that_fails_is_shown_at_its_line() -> None:
    def broken() -> nn.Module:
        return nn.Linear(FIELDS["hidden_size"], int({"a": "1"}["missing"]))  # the line that the message names

    with pytest.raises(TargetError, match="building the module failed: KeyError: 'missing'") as caught:
        build(broken, OWN_CODE)
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(n for n, text in enumerate(source, 1) if "the line that the message names" in text)
    assert caught.value.faults[0].hint == f"at {__file__}:{line}"


def test_a_builder_that_runs_its_module_is_given_values() -> None:
    """As people do to print its cost, or to give lazy layers their shape."""

    def make() -> nn.Module:
        module = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
        module(torch.zeros(1, 4))
        return module

    module = build(make, OWN_CODE)
    assert {name: (tensor.device.type, tuple(tensor.shape)) for name, tensor in module.named_parameters()} == {
        "0.weight": ("meta", (3, 4)),
        "0.bias": ("meta", (3,)),
        "1.weight": ("meta", (2, 3)),
        "1.bias": ("meta", (2,)),
    }
