"""What people save is more than a state dict: training checkpoints and whole modules, of which nothing is imported."""

from __future__ import annotations

import argparse
import collections
import io
import os
import pickle
import random
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import porting
from porting.checkpoint import CheckpointError, inspect_checkpoint, open_checkpoint
from porting.errors import Code, PortingError
from tests.checkpoint.test_bin_against_torch import bits, bytes_changed, pickle_changed
from tests.checkpoint.test_bin_file import RunsCode, changed, entries, pickle_of, saved, tiny, with_pickle, zipped

WEIGHTS = {"layer.weight": torch.arange(12.0).view(3, 4), "layer.bias": torch.arange(3.0)}


class Block(nn.Module):
    """A module of somebody's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 3, bias=False)
        self.down = nn.Linear(4, 3)
        self.down.weight = self.up.weight
        self.act = nn.ReLU()
        self.register_buffer("scale", torch.rand(2))
        self.register_buffer("mask", torch.ones(2), persistent=False)


class Averages:
    """An object with tensors in its attributes."""

    def __init__(self, shadow: dict[str, torch.Tensor]) -> None:
        self.shadow = shadow
        self.around = self


class Config(dict[str, object]):
    """A dictionary of a class of its own."""


def training(seed: int = 0) -> dict[str, object]:
    """What a training loop saves."""
    torch.manual_seed(seed)
    model = Block()
    optimizer = torch.optim.Adam(model.parameters())
    model.down(model.norm(torch.randn(2, 4))).sum().backward()
    optimizer.step()
    return {
        "epoch": 3,
        "args": argparse.Namespace(lr=1e-3, kind=Block, path=Path("x")),
        "optimizer": optimizer.state_dict(),
        "model": model.state_dict(),
        "ema": Averages({"norm.weight": torch.rand(4)}),
        "history": collections.defaultdict(list, loss=[0.5, float("nan")]),
        "rng": (torch.get_rng_state(), random.getstate()),
    }


def all_bits(source: str) -> dict[str, bytes]:
    checkpoint = open_checkpoint(source)
    return {name: bits(checkpoint.read(name)) for name in checkpoint.tensors}


def bits_of(state: object) -> dict[str, bytes]:
    assert isinstance(state, dict)
    return {name: bits(tensor) for name, tensor in state.items()}


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("ending", ["pt", "pth", "ckpt", "bin"])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_state_dict_inside_is_named_by_its_path(tmp_path: Path, protocol: int, ending: str, zipped: bool) -> None:
    path = tmp_path / f"step.{ending}"
    value = training()
    torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    assert all_bits(f"{path}#model") == bits_of(value["model"])
    checkpoint = open_checkpoint(f"{path}#model")
    assert checkpoint.warnings == ()
    assert checkpoint.part == "model"
    assert checkpoint.shared == (frozenset({"up.weight", "down.weight"}),)
    assert [*all_bits(f"{path}#model.norm")] == ["weight", "bias"], "a prefix of names is a path as well"
    assert [*all_bits(f"{path}#ema.shadow")] == ["norm.weight"], "so is an attribute of an object"
    moments = all_bits(f"{path}#optimizer.state.0")
    assert [*moments] == ["step", "exp_avg", "exp_avg_sq"], "and a number"


def test_without_a_path_the_places_are_named(tmp_path: Path) -> None:
    torch.save(training(), tmp_path / "step.pt")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "step.pt")
    (fault,) = caught.value.faults
    assert fault.code == Code.INNER_PATH
    assert fault.message == "this file holds more than a state dict; its only state dict is at 'model' (6 tensors)"
    assert fault.hint == f"open '{tmp_path}/step.pt#model'"
    found = inspect_checkpoint(tmp_path / "step.pt")
    assert [(inner.path, inner.tensors) for inner in found.inner_paths] == [("model", 6)]
    assert "'argparse.Namespace'" in found.warnings[0]


def test_places_are_where_tensors_have_names_those_with_most_first(tmp_path: Path) -> None:
    value = {
        "small": {"inner": {"w": torch.ones(1)}},
        "large": WEIGHTS,
        "list": [WEIGHTS],
        "direct": torch.ones(2),
        "nothing": {"a": 1},
    }
    torch.save(value, tmp_path / "m.pt")
    found = inspect_checkpoint(tmp_path / "m.pt").inner_paths
    assert [(place.path, place.tensors) for place in found] == [("large", 2), ("small.inner", 1), ("", 6)]
    assert [*all_bits(f"{tmp_path}/m.pt#")] == [
        "small.inner.w",
        "large.layer.weight",
        "large.layer.bias",
        "list.0.layer.weight",
        "list.0.layer.bias",
        "direct",
    ]


def test_names_of_dictionaries_in_each_other_are_joined_where_they_differ(tmp_path: Path) -> None:
    nested = {"model": {"encoder": {"weight": torch.ones(2), "_extra_state": None}, "version": 3}}
    torch.save(nested, tmp_path / "m.pt")
    checkpoint = open_checkpoint(f"{tmp_path}/m.pt#model")
    assert [*checkpoint.tensors] == ["encoder.weight"]
    (note,) = checkpoint.warnings
    assert note.message == "no tensor, and not read: 'encoder._extra_state', 'version'"
    torch.save({"model": {"a": {"b": torch.ones(1)}, "a.b": torch.ones(2)}}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"tensor 'a.b': two tensors have this name"):
        open_checkpoint(f"{tmp_path}/m.pt#model")


def test_entries_that_are_none_are_left_out_with_a_note(tmp_path: Path) -> None:
    torch.save({**WEIGHTS, "layer._extra_state": None}, tmp_path / "m.pt")
    checkpoint = open_checkpoint(tmp_path / "m.pt")
    assert [*checkpoint.tensors] == [*WEIGHTS]
    assert [note.code for note in checkpoint.warnings] == [Code.NOT_READ]


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code:UserWarning")
def test_a_whole_module_has_the_tensors_of_its_state_dict(tmp_path: Path, zipped: bool) -> None:
    model = Block()
    torch.save(model, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
    assert all_bits(f"{tmp_path}/m.pt") == bits_of(model.state_dict())
    (note,) = open_checkpoint(tmp_path / "m.pt").warnings
    assert "'tests.checkpoint.test_inner_path.Block'" in note.message
    assert note.message.endswith("nothing of it is imported or called")
    torch.save({"ema": model, "epoch": 1}, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
    assert all_bits(f"{tmp_path}/m.pt#ema") == bits_of(model.state_dict())


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_has_the_tensors_of_its_modules(tmp_path: Path, traced: bool) -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3, bias=False), nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()))
    given = torch.zeros(2, 4)
    saved_as = torch.jit.trace(model.eval(), given) if traced else torch.jit.script(model)  # type: ignore[no-untyped-call]  # torch's
    torch.jit.save(saved_as, tmp_path / "m.pt", _extra_files={"config.json": "{}"})
    assert all_bits(f"{tmp_path}/m.pt") == bits_of(model.state_dict())
    assert [*all_bits(f"{tmp_path}/m.pt#1")] == ["weight"]
    torch.jit.save(torch.jit.freeze(torch.jit.script(model.eval())), tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="a whole module, which runs code when loaded"):
        open_checkpoint(tmp_path / "m.pt")  # its weights are constants of the program


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_that_reads_its_state_by_code_is_refused(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "m.pt")
    inside = entries((tmp_path / "m.pt").read_bytes())
    code = next(name for name in inside if "/code/" in name and name.endswith(".py"))
    inside[code] += b"  def __setstate__(self, state: Tensor) -> NoneType:\n    self.weight = torch.mul(state, 2)\n"
    for source in (f"{tmp_path}/m.pt", f"{tmp_path}/m.pt#"):
        (tmp_path / "m.pt").write_bytes(zipped(inside))
        with pytest.raises(CheckpointError, match=r"how objects are read|a whole module, which runs code"):
            open_checkpoint(source)
        inside[code] = inside[code].replace(b"def ", b"def  ")


class Scale(nn.Module):
    """A factor, which TorchScript can compile."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Scales(nn.Module):
    """Two factors."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Scale(1.0), Scale(2.0)
        self.note = "text"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) if self.note else x


def built_twice(structure: bytes) -> bytes:
    """The second object is made of the place of the first, which torch takes for its class."""
    first = structure.index(b")\x81}(X\x06\x00\x00\x00weight")
    second = structure.rindex(b")\x81}(") - 2
    return structure[: first + 2] + b"q\x63" + structure[first + 2 : second] + b"h\x63" + structure[second + 4 :]


SCRIPTS: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("an object used before it has a state", built_twice, "that is used before it has a state"),
    ("a second state", lambda found: found[:-1] + b"}b.", "a second state for an object of '__torch__."),
    ("an attribute that no class declares", lambda found: found[: found.rindex(b"ub")] + b"X\x05\x00\x00\x00extraNub.",
     "the attribute 'extra', which '__torch__."),
]  # fmt: skip


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The entries of a file of TorchScript."""
    path = tmp_path_factory.mktemp("script") / "m.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(Scales()), path)
    return entries(path.read_bytes())


@pytest.mark.parametrize(("change", "message"), [row[1:] for row in SCRIPTS], ids=[row[0] for row in SCRIPTS])
def test_torchscript_that_torch_reads_otherwise_is_refused(
    tmp_path: Path, scripted: dict[str, bytes], change: Callable[[bytes], bytes], message: str
) -> None:
    structure = next(name for name in scripted if name.endswith("/data.pkl"))
    for found in (scripted[structure], change(scripted[structure])):
        (tmp_path / "m.pt").write_bytes(zipped({**scripted, structure: found}))
        if found == scripted[structure]:
            assert [*all_bits(f"{tmp_path}/m.pt#")] == ["a.weight", "b.weight"]
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(f"{tmp_path}/m.pt#")


def test_torchscript_with_a_declaration_in_a_text_is_refused(tmp_path: Path, scripted: dict[str, bytes]) -> None:
    code = next(name for name in scripted if name.endswith(".py"))
    text = scripted[code].replace(b"  note : str\n", b'  """\n  note : str\n  """\n')
    assert text != scripted[code]
    (tmp_path / "m.pt").write_bytes(zipped({**scripted, code: text}))
    with pytest.raises(CheckpointError, match="a text of several lines"):
        open_checkpoint(f"{tmp_path}/m.pt#")


@pytest.mark.parametrize(
    ("after", "held"),
    [
        (b"", ["a", "v.a"]),
        (b"}X\x08\x00\x00\x00_modules}sb", ["a"]),  # a later state is added to the first
        (b"h\x20X\x08\x00\x00\x00_modules}s0", ["a", "v.a"]),  # the dictionary of the state, written to afterwards
        (b"h\x21X\x01\x00\x00\x00v}s0", ["a"]),  # what it holds is the module's own
    ],
)
def test_a_state_is_copied_when_it_is_given_to_a_module(tmp_path: Path, after: bytes, held: list[str]) -> None:
    leaf = b"cmine\nBlock\n)\x81}(X\x0b\x00\x00\x00_parameters" + FLAT + MODULE + b"}ub"
    state = b"}q\x20(X\x0b\x00\x00\x00_parameters" + FLAT + MODULE + b"}q\x21X\x01\x00\x00\x00v" + leaf + b"su"
    (tmp_path / "m.pt").write_bytes(with_pickle(b"\x80\x02cmine\nBlock\n)\x81" + state + b"b" + after + b"."))
    assert [*all_bits(f"{tmp_path}/m.pt#")] == held


@pytest.mark.parametrize("kind", [set, frozenset])
def test_buffers_that_are_left_out_are_in_a_set(tmp_path: Path, kind: Callable[[list[str]], object]) -> None:
    model = Block()
    model._non_persistent_buffers_set = kind(["mask"])  # type: ignore[assignment]
    torch.save(model, tmp_path / "m.pt")
    assert all_bits(f"{tmp_path}/m.pt") == bits_of(model.state_dict())


@pytest.mark.parametrize("kind", [list, tuple, dict.fromkeys, collections.deque, collections.Counter, lambda _: None])
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code:UserWarning")
def test_buffers_that_are_left_out_and_in_no_set_are_refused(
    tmp_path: Path, kind: Callable[[list[str]], object]
) -> None:
    model = Block()
    model._non_persistent_buffers_set = kind(["mask"])  # type: ignore[assignment]
    torch.save(model, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"_non_persistent_buffers_set\) are not in a set of names"):
        open_checkpoint(tmp_path / "m.pt")


def test_a_dictionary_of_a_class_of_its_own_is_one(tmp_path: Path) -> None:
    torch.save({"model": Config(WEIGHTS), "n": 1}, tmp_path / "m.pt")
    assert all_bits(f"{tmp_path}/m.pt#model") == bits_of(WEIGHTS)


def test_numbers_and_texts_beside_a_state_dict_are_its_config(tmp_path: Path) -> None:
    run = argparse.Namespace(layers=2, name="x", rates=[0.1, 2], nested={"width": 4, "none": None}, path=Path("/x"))
    run.around = run
    saved = {
        "model": WEIGHTS, "args": run, "hyper_parameters": Config(heads=3), "epoch": 7, "long": "x" * 5000, 5: 6,
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "lr": 0.1}, "_hidden": 1, "mixed": [1, None],
    }  # fmt: skip
    torch.save(saved, tmp_path / "run.pt")
    checkpoint = open_checkpoint(f"{tmp_path}/run.pt#model")
    arguments: Any = checkpoint.config["args"]
    depth = 0
    while "around" in arguments and depth < 20:
        inner, depth = arguments.pop("around"), depth + 1
        assert arguments == {"layers": 2, "name": "x", "rates": [0.1, 2], "nested": {"width": 4}}
        arguments = inner
    assert 0 < depth < 20
    assert {**checkpoint.config, "args": None} == {"args": None, "hyper_parameters": {"heads": 3}, "epoch": 7}
    assert checkpoint.config_name == ""
    (tmp_path / "config.json").write_text('{"width": 1}')
    assert open_checkpoint(f"{tmp_path}/run.pt#model").config == {"width": 1}


def test_a_config_that_is_shared_at_each_level_is_walked_within_bounds(tmp_path: Path) -> None:
    node: object = {str(number): number for number in range(9)}
    for _ in range(7):
        node = dict.fromkeys("abcdefghij", node)
    torch.save({"model": WEIGHTS, "args": node}, tmp_path / "run.pt")
    found = open_checkpoint(f"{tmp_path}/run.pt#model").config
    assert len(repr(found)) < 1_000_000


def test_a_path_that_has_the_sign_in_it_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "c#"
    folder.mkdir()
    torch.save({"model": WEIGHTS, "n": 1}, folder / "m.pt")
    torch.save(WEIGHTS, folder / "m.pt#flat.pt")
    assert [*open_checkpoint(f"{folder}/m.pt#model").tensors] == [*WEIGHTS]
    assert [*open_checkpoint(f"{folder}/m.pt#flat.pt").tensors] == [*WEIGHTS]


def test_a_directory_has_inner_paths_and_other_containers_have_none(tmp_path: Path) -> None:
    torch.save({"model": WEIGHTS, "n": 1}, tmp_path / "pytorch_model.bin")
    assert all_bits(f"{tmp_path}#model") == bits_of(WEIGHTS)
    with pytest.raises(CheckpointError, match=f"open '{tmp_path}#model'"):
        open_checkpoint(tmp_path)
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="a safetensors file has no state dicts inside, and the inner path 'mo"):
        open_checkpoint(f"{tmp_path}/model.safetensors#model")


# ------------------------------------------------------------------------------------------------ hostile files


class Gives:
    """What is called with something when it is unpickled."""

    def __init__(self, *given: object) -> None:
        self.given = given

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return print, self.given


def given_to_a_class() -> bytes:
    weights = dict(WEIGHTS)
    return saved({"model": weights, "hook": Gives([weights])})


def deep() -> bytes:
    value: object = {"w": torch.ones(1)}
    for _ in range(200):
        value = {"a": value}
    return saved({"model": value, "n": 1})


def in_itself() -> bytes:
    model: dict[str, object] = {"w": torch.ones(1)}
    model["again"] = model
    return saved({"model": model, "n": 1})


def laughs() -> bytes:
    value: object = WEIGHTS
    for _ in range(40):
        value = {"a": value, "b": value}
    return saved({"model": value, "n": 1})


def long_names() -> bytes:
    value: object = dict.fromkeys(map(str, range(50_000)), torch.ones(1))
    for _ in range(3):
        value = {"k" * 1300: value}
    return saved({"model": value, "n": 1})


def other_storage() -> bytes:
    """The tensor beside the state dict lies outside of its storage."""
    value = {"model": {"a": torch.ones(2)}, "other": {"b": torch.ones(7)}}
    return changed(value, pickle=pickle_of(value).replace(b"K\x07", b"K\x09"))


def crowd() -> bytes:
    """A list of objects of a class that nobody knows: a few bytes in the file are hundreds in memory."""
    objects = b"cos\nsystem\nq\x00" + b"h\x00)R" * 500_000
    return with_pickle(b"\x80\x02}X\x05\x00\x00\x00model](" + objects + b"es.")


FLAT = tiny(b"K\x0c\x85", b"K\x01\x85")[2:-1]
"""The opcodes that make a state dict of one tensor."""


MODULE = b"X\x08\x00\x00\x00_buffers}X\x08\x00\x00\x00_modules"
"""The opcodes behind a module's parameters in its state, up to its modules."""


def beside(opcodes: bytes) -> bytes:
    """A state dict at ``model``, and what these opcodes make beside it."""
    return with_pickle(b"\x80\x04}X\x05\x00\x00\x00model" + FLAT + b"sX\x05\x00\x00\x00other" + opcodes + b"s.")


def doubled() -> bytes:
    """Modules that hold the one before twice: tensors as many as two to the power of 20 000."""
    held = b"}(X\x0b\x00\x00\x00_parameters}X\x08\x00\x00\x00_buffers}X\x08\x00\x00\x00_modules}("
    level = b"cmine\nBlock\n)\x81" + held + b"X\x01\x00\x00\x00ah\x01X\x01\x00\x00\x00bh\x01uubq\x01"
    return with_pickle(b"\x80\x02" + FLAT + b"q\x01" + level * 20_000 + b".")


def many_places() -> bytes:
    """40 000 keys that lead to one dictionary, in which one long key leads on."""
    inner = {"k" * 4000: {"a": torch.ones(1), "b": torch.ones(1)}}
    return saved({**dict.fromkeys(map(str, range(40_000)), inner), "n": 1})


def long_keys() -> bytes:
    """Two hundred dictionaries with one key of a megabyte, which leads to no tensor."""
    key = "k" * 1_000_000
    return saved({"model": {str(number): {"w": torch.ones(1), key: 1} for number in range(200)}, "n": 1})


def long_class() -> bytes:
    """Classes whose module has a name of a megabyte."""
    calls = b"".join(b"h\x01\x8c\x02%02d\x93)R" % number for number in range(50))
    return beside(b"](X\x40\x42\x0f\x00" + b"m" * 1_000_000 + b"q\x01" + calls + b"e")


def copied_pairs() -> bytes:
    """Ordered dictionaries that are all made of one list of pairs."""
    return beside(b"](](" + b"](NNe" * 100_000 + b"eq\x01" + b"ccollections\nOrderedDict\nh\x01\x85R" * 12 + b"e")


def long_sizes() -> bytes:
    """A tensor whose sizes are numbers of 8 MB: a machine takes seconds for their product."""
    size = b"\x8b\x00\x00\x80\x00" + b"\x7f" * (8 << 20) + b"q\x01h\x01\x86"
    return with_pickle(b"\x80\x02}X\x05\x00\x00\x00model" + tiny(size, b"K\x01K\x01\x86")[2:-1] + b"s.")


def script(raw: bytes, method: int = ZIP_STORED) -> bytes:
    """An archive with the mark of TorchScript."""
    return zipped({**entries(raw), "archive/constants.pkl": b"\x80\x02)."}, method)


def test_what_often_lies_beside_a_state_dict_has_views_of_its_storages(tmp_path: Path) -> None:
    """A whole module among the arguments, as Lightning saves them, or the optimizer itself."""
    model = Block()
    for beside in (model, model.norm, torch.optim.SGD(model.parameters()), Averages(dict(model.named_parameters()))):
        torch.save({"model": model.state_dict(), "arguments": {"beside": beside}}, tmp_path / "m.pt")
        assert all_bits(f"{tmp_path}/m.pt#model") == bits_of(model.state_dict())


@pytest.mark.parametrize("cut", [{"archive/data/2": bytes(8)}, {"archive/data/2": bytes(16)}, {"archive/data/2": None}])
def test_a_storage_that_belongs_to_no_tensor_has_its_bytes(tmp_path: Path, cut: dict[str, bytes | None]) -> None:
    """Torch reads it as well, and refuses a file in which it has other ones."""
    whole = saved({"model": WEIGHTS, "raw": torch.arange(3.0).untyped_storage()})
    (tmp_path / "m.pt").write_bytes(whole)
    assert all_bits(f"{tmp_path}/m.pt#model") == bits_of(WEIGHTS)
    contents = {name: cut.get(name, raw) for name, raw in entries(whole).items()}
    (tmp_path / "m.pt").write_bytes(zipped({name: raw for name, raw in contents.items() if raw is not None}))
    with pytest.raises((RuntimeError, pickle.UnpicklingError)):
        torch.load(tmp_path / "m.pt", weights_only=True)
    with pytest.raises(CheckpointError, match="the storage '2' of 12 bytes "):
        all_bits(f"{tmp_path}/m.pt#model")


class Calls:
    """What unpickles as a call, and as items that its result is given."""

    def __init__(
        self, function: Callable[..., object], *given: object, items: Mapping[str, object] | None = None
    ) -> None:
        self.called = (function, given, None, None, None if items is None else iter(items.items()))

    def __reduce__(self) -> tuple[object, ...]:
        return self.called


def typed(tensor: torch.Tensor, state: object) -> Calls:
    """A tensor whose attributes are set by torch, for which it needs no trust."""
    function, args = tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]  # torch's
    return Calls(torch._tensor._rebuild_from_type_v2, function, torch.Tensor, args, state)


def parameter(tensor: torch.Tensor, state: object) -> Calls:
    """The same, of a parameter."""
    return Calls(torch._utils._rebuild_parameter_with_state, tensor, False, collections.OrderedDict(), state)


def written_through() -> bytes:
    """A call that this library does not know writes to a view of a tensor of the state dict."""
    whole = torch.arange(8.0)
    given: tuple[object, ...] = (whole[:4], False, collections.OrderedDict(), None)
    state = {"real": torch.full((4,), -99.0)}
    inner = torch._utils._rebuild_parameter_with_state
    call = Calls(torch._tensor._rebuild_from_type_v2, inner, nn.Parameter, given, state)
    return saved({"model": {"w": whole[:4]}, "other": call})


@pytest.mark.parametrize("make", [typed, parameter])
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(
    "state", [{"data": torch.ones(4)}, {"real": torch.ones(4)}, ({"x": 1}, {"data": torch.ones(4)}), [1]]
)
def test_attributes_that_change_a_tensor_are_refused_wherever_it_lies(
    tmp_path: Path, make: Callable[[torch.Tensor, object], Calls], state: object, beside: bool
) -> None:
    """Torch sets them, also when it reads weights alone; those of a view write to the whole storage."""
    whole = torch.arange(8.0)
    given = make(whole[:4], state)
    torch.save({"model": {"w": whole[:4]}, "epoch": [given]} if beside else {"model": {"w": given}}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"attributes? .*of a tensor") as caught:
        open_checkpoint(f"{tmp_path}/m.pt#model")
    assert [fault.code for fault in caught.value.faults] == [Code.BIN_UNSAFE]
    for harmless in ({"tensor_model_parallel": True}, None, {}, ({"x": 1}, None)):
        torch.save({"model": {"w": make(whole[:4], harmless)}}, tmp_path / "m.pt")
        assert all_bits(f"{tmp_path}/m.pt#model") == bits_of({"w": whole[:4]})


@pytest.mark.parametrize("given", [dict(WEIGHTS), [*WEIGHTS.items()], (*WEIGHTS.items(),)])
def test_what_an_ordered_dictionary_is_made_of_belongs_to_it(tmp_path: Path, given: object) -> None:
    more = {"layer.bias": torch.ones(3), "b": torch.zeros(2)}
    torch.save({"model": Calls(collections.OrderedDict, given, items=more)}, tmp_path / "m.pt")
    assert all_bits(f"{tmp_path}/m.pt#model") == bits_of({**WEIGHTS, **more})


SPARSE = torch.eye(3).to_sparse()

HOSTILE_INSIDE: list[tuple[str, Callable[[], bytes], str]] = [
    ("code beside no tensor", lambda: saved({"a": RunsCode(), "n": 1}), "it holds no tensor whose name begins with"),
    ("code in the state dict", lambda: saved({"model": {"a": RunsCode()}}), "it holds no tensor whose name begins"),
    ("the state dict given to a call", given_to_a_class, "is given a part of the state dict, and may change what"),
    ("a view of a tensor given to a call", written_through, "is given a part of the state dict, and may change what"),
    ("a counter made of tensors and given more", lambda: saved({"model": Calls(
        collections.Counter, WEIGHTS, items={"b": torch.ones(1)})}), "is made of tensors, and is given more of them"),
    ("a storage without values", lambda: with_pickle(pickle_of({"model": WEIGHTS}).replace(
        b"X\x03\x00\x00\x00cpu", b"X\x04\x00\x00\x00meta")), "a storage on the device 'meta', which has no values"),
    ("200 dictionaries in each other", deep, "more than 100 objects"),
    ("a billion tensors from forty dictionaries", laughs, "as much as one command may spend"),
    ("50 000 tensors with names of 4000 characters", long_names, "as much as one command may spend"),
    ("half a million objects", crowd, "as much as one command may spend"),
    ("half a million sets", lambda: beside(b"](" + b"\x8f" * 500_000 + b"e"), "as much as one command may spend"),
    ("half a million frozen sets", lambda: beside(b"](" + b"(\x91" * 500_000 + b"e"), "as much as one command may"),
    ("tensors as many as 2^20000, of shared modules", doubled, "(1,000,000,000 tensors)"),
    ("40 000 state dicts behind one name of 4000 characters", many_places, "as much as one command may spend"),
    ("200 entries of a name of a megabyte", long_keys, "as much as one command may spend"),
    ("classes with names of a megabyte", long_class, "a name without end"),
    ("dictionaries made of one list of 100 000 pairs", copied_pairs, "as much as one command may spend"),
    ("sizes that are numbers of 8 MB", long_sizes, "its sizes overflow 64 bits"),
    ("a tensor beside it that is outside of its storage", other_storage, "its storage should have 36 bytes"),
    ("a sparse tensor", lambda: saved({"model": {"a": SPARSE}, "n": 1}), "tensor 'a': it is a sparse tensor, which"),
    ("a path to one tensor", lambda: saved({"model": torch.ones(1), "n": 1}), "it holds no tensor whose name begins"),
    ("two tensors of one name", lambda: saved({"model": {1: torch.ones(1), "1": torch.ones(2)}}), "two tensors have"),
    ("a state dict that is said to be TorchScript", lambda: script(saved(WEIGHTS)), "holds no module"),
    ("TorchScript with compressed tensors", lambda: script(saved(nn.Linear(2, 2)), ZIP_DEFLATED), "is compressed"),
    ("a module in the archive of TorchScript", lambda: script(saved(nn.Linear(2, 2))), "holds no module"),
    ("no dictionary", lambda: saved([1, 2]), "it holds no tensor whose name begins with 'model.'"),
    ("attributes for a dictionary", lambda: with_pickle(b"\x80\x02}}b."), "attributes for a dictionary"),
    ("attributes for a class", lambda: with_pickle(b"\x80\x02cos\nsystem\n}b."), "attributes for a class"),
    ("a call without arguments", lambda: with_pickle(b"\x80\x02cos\nsystem\nNR."), "a call with None for its argum"),
    ("a stack that ends", lambda: with_pickle(b"\x80\x02000."), "too few values on the stack"),
    ("a string of 4 GB", lambda: with_pickle(b"\x80\x02X\xff\xff\xff\xff."), "a string of 4294967295 bytes"),
    ("a negative length", lambda: with_pickle(b"\x80\x02\x8b\xff\xff\xff\xff."), "a string of -1 bytes"),
    ("bytes of 2^62", lambda: with_pickle(b"\x80\x04\x8e" + (2**62).to_bytes(8, "little") + b"."), "a string of 4611"),
    ("the oldest protocol", lambda: with_pickle(pickle.dumps({"a": 1.5}, 0)), "the opcode 0x"),
]  # fmt: skip
"""What is wrong, the file, and what is said of ``file#model``."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "message"), [row[1:] for row in HOSTILE_INSIDE], ids=[row[0] for row in HOSTILE_INSIDE]
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_a_hostile_file_is_refused_in_one_line_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], bytes], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.pt").write_bytes(make())
    with pytest.raises(PortingError) as caught:
        open_checkpoint("m.pt#model")
    assert message in str(caught.value)
    assert all(line.isprintable() for line in str(caught.value).split("\n"))
    assert os.listdir() == ["m.pt"]


def test_code_beside_a_state_dict_is_never_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": WEIGHTS, "hook": RunsCode()}, "m.pt")
    assert all_bits("m.pt#model") == bits_of(WEIGHTS)
    assert "'posix.system'" in inspect_checkpoint("m.pt").warnings[0]
    assert os.listdir() == ["m.pt"]
    Path("m.pt").write_bytes(in_itself())
    assert [*open_checkpoint("m.pt#model").tensors] == ["w"], "what lies in itself is read once"


# ------------------------------------------------------------------------------------------------ against torch


class _Nothing:
    """In the place of every class that a file names."""

    def __init__(self, *args: object, **more: object) -> None: ...
    def __setstate__(self, state: object) -> None: ...
    def __setitem__(self, key: object, value: object) -> None: ...
    def __hash__(self) -> int:
        return id(self)

    def append(self, value: object) -> None: ...
    def extend(self, values: object) -> None: ...


class _Inert(pickle.Unpickler):
    """Torch's own reader, with nothing in the place of what is not a tensor."""

    def find_class(self, module: str, name: str) -> object:
        allowed = torch._weights_only_unpickler._get_allowed_globals()
        return allowed.get(f"{module}.{name}", _Nothing)


def torchs(raw: bytes) -> dict[str, bytes] | None:
    """The state dict inside, as torch reads it; None when it refuses, or nothing is there."""
    inert = SimpleNamespace(Unpickler=_Inert, load=lambda file, **_: _Inert(file).load(), __name__="pickle")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = torch.load(io.BytesIO(raw), weights_only=False, pickle_module=inert, map_location="cpu")
            state = found["model"]
            return {name: bits(tensor) for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
        except Exception:  # noqa: BLE001  # a damaged file may make it raise anything
            return None


@pytest.mark.parametrize("seed", range(4))
def test_what_is_read_inside_torch_reads_too_with_the_same_numbers(seed: int) -> None:
    value = {"epoch": 3, "args": argparse.Namespace(x=1), "model": WEIGHTS, "other": {0: {"m": torch.rand(12)}}}
    originals = [saved(value), saved(value, zipped=False)]
    draw = random.Random(seed)  # noqa: S311  # a test's draws
    read = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:  # noqa: S108  # memory
        path = Path(folder) / "m.pt"
        for number in range(400):
            raw = (
                draw.choice((bytes_changed, pickle_changed))(draw.choice(originals), draw)
                if number > 1
                else originals[number]
            )
            path.write_bytes(raw)
            try:
                mine = all_bits(f"{path}#model")
            except PortingError:
                assert number > 1, "what was not changed is read"
                continue
            read += 1
            assert torchs(raw) == mine, f"seed {seed}, file {number}"
    assert read > 20, "some changes are harmless"


@pytest.mark.parametrize("key", [("layer", 0), None, 1.5, True, b"x"])
def test_a_tensor_whose_key_is_no_name_is_not_left_out_silently(tmp_path: Path, key: object) -> None:
    torch.save({"model": {"x": torch.ones(4), key: torch.ones(4)}}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="the key of a tensor is neither text nor a whole number"):
        open_checkpoint(f"{tmp_path}/m.pt#model")


def test_what_a_conversion_leaves_unread_is_said(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(4), "steps": [1, 2]}, tmp_path / "m.pt")
    table = porting.parse_table('[rest]\n"{*rest}" = "{*rest}"\n')
    done = porting.convert(f"{tmp_path}/m.pt#", tmp_path / "out", table, derive=True)
    assert any("no tensor, and not read: 'steps'" in one for one in done.warnings)
