"""Every container keeps what it promises, and nothing outside of the registry knows one from another."""

from __future__ import annotations

import io
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from porting.checkpoint import CheckpointError, open_checkpoint, write_directory
from porting.checkpoint.container import DTYPES, Container, Seal, WriteOptions
from porting.checkpoint.layout import ElementType
from porting.checkpoint.registry import CONTAINERS, MAINS, container_of, named, writer_of
from porting.comparing.differences import diff
from porting.comparing.digests import digest
from porting.converting.conversion import convert
from porting.converting.integrity import verify_files
from porting.converting.making import Made, Maker
from porting.export_files import weight_files
from porting.notation.table import parse_table
from porting.plan.copies import Copy
from porting.plan.move import Window
from porting.plan.recipe import Recipe
from porting.staging import MoveReader
from porting.target import TargetError
from scripts.containers_page import PAGE, written
from tests.checkpoint.test_bin_file import saved
from tests.checkpoint.test_flax_msgpack import written as flax_file
from tests.checkpoint.test_hdf5_file import write as write_hdf5
from tests.checkpoint.test_npz import read_by
from tests.checkpoint.test_onnx_file import written as onnx_file
from tests.checkpoint.test_orbax_file import written as orbax_files
from tests.checkpoint.test_tensorflow_file import written as tensorflow_files
from tests.converting.drawing import bits, values, write
from tests.guards.test_architecture import spoken
from tests.guards.tree import modules, parse
from tests.hub_server import Hub

TABLE = parse_table('[mapping]\nname = "t"\n[tensors]\n"{*n}" = "{*n}"\n')
HOLDING = [container for container in CONTAINERS if not container.single]
WRITTEN = [container for container in HOLDING if container.promises.writes]
ALL_DTYPES = [element.dtype for element in ElementType]


def hdf5_file(tensors: dict[str, torch.Tensor]) -> bytes:
    with io.BytesIO() as file:
        write_hdf5(file, tensors)
        return file.getvalue()


SAVERS: dict[str, Callable[[dict[str, torch.Tensor]], bytes | dict[str, bytes]]] = {
    "bin": saved,
    "flax": flax_file,
    "onnx": onnx_file,
    "tensorflow": tensorflow_files,
    "hdf5": hdf5_file,
    "orbax": orbax_files,
}
"""What makes the files of containers that are not written: the main one, or all by their names."""


def option(container: Container) -> str | None:
    """How it is asked for."""
    return None if container.name == "safetensors" else container.name


def tensors_for(container: Container) -> dict[str, torch.Tensor]:
    """One of every dtype that the container stores."""
    stored = sorted((element.dtype for element in container.promises.dtypes & DTYPES), key=str)
    more = {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "wide": values((300, 40), torch.float32, 9)}
    return {str(dtype): values((7, 3), dtype, 1) for dtype in stored} | more


def all_bits(folder: Path | str) -> dict[str, bytes]:
    """Every tensor, to the bit."""
    checkpoint = open_checkpoint(folder)
    return {name: bits(checkpoint.read(name)) for name in checkpoint.tensors}


def made(container: Container, root: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A directory of that container, and the name of its largest file."""
    folder = root / f"a {container.name}"
    if container.promises.writes:
        convert(write(root / f"source of {container.name}", tensors), folder, TABLE, to=option(container))
    else:
        folder.mkdir()
        files = SAVERS[container.name](tensors)
        for name, raw in (files if isinstance(files, dict) else {container.main: files}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(raw)
    return folder


def weights(folder: Path) -> Path:
    """The largest file."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


# --------------------------------------------------------------------------------------------------- the registry


def test_names_endings_and_main_files_are_each_of_one_container() -> None:
    endings = [ending for container in CONTAINERS for ending in container.endings]
    assert len({*endings}) == len(endings)
    assert len({*MAINS}) == len(MAINS)
    assert len({container.name for container in HOLDING}) == len(HOLDING)
    for container in CONTAINERS:
        assert all(container_of(name) is container for name in container.mains)
        assert all(container_of(f"x{ending}") is container for ending in container.endings)
        assert container.single or named(container.name) is container
    assert container_of("config.json") is None


def test_what_is_written_is_named_by_its_name() -> None:
    assert {writer_of(option(container))[0] for container in WRITTEN} == {*WRITTEN}
    assert writer_of("dcp/model") == (named("dcp"), "model")
    for wrong in ("onnx", "npz/model", "index", "safetensors", "npz/"):
        with pytest.raises(
            CheckpointError, match="expected bin, or dcp, or dcp/model for what is saved under 'model', or npz, or gguf"
        ):
            writer_of(wrong)


def test_the_table_on_the_page_is_the_registry() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "run `python -m scripts.containers_page`"


TOLD = {
    "porting.cli.options": "the help of the source, --to and --inputs, and a recording, which is a safetensors file",
    "porting.cli.record": "a recording, which is a safetensors file",
    "porting.cli.report_bug": "the package safetensors, whose version is named",
    "porting.notation.reading": "a list of shards, which [files] may not name: a conversion writes it itself",
    "porting.tracing.running": "the package safetensors, which is no user's code",
}


def test_nothing_outside_of_the_containers_names_one() -> None:
    """No `if suffix == ".bin"`: whoever reads or writes weights asks the registry."""
    names = [rf"(?<!\w){re.escape(name)}\b" for container in CONTAINERS for name in container.mains]
    names += [rf"{re.escape(ending)}\b" for container in CONTAINERS for ending in container.endings]
    pattern = re.compile("|".join([*names, *(f"^{container.name}$" for container in HOLDING)]))
    found = {
        module
        for module, path in modules().items()
        if not module.startswith(("porting.checkpoint", "porting.models", "porting.mappings"))
        for text, _ in spoken(parse(path))
        if pattern.search(text) and text not in {"importlib.metadata", *modules()}
    }
    assert found == {*TOLD}


# --------------------------------------------------------------------------------------------------- its promises


@pytest.mark.slow
@pytest.mark.parametrize("container", HOLDING, ids=lambda container: container.name)
def test_what_lies_between_descriptions_is_not_charged(
    container: Container, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elements stand between the descriptions in some containers; a model of thousands of tensors has to open."""
    folder = made(container, tmp_path, {f"layer{number}.w": torch.rand(20_000) for number in range(100)})
    monkeypatch.setenv("PORTING_LIMITS", "metadata=1000000")
    assert len(open_checkpoint(folder).tensors) == 100


@pytest.mark.parametrize("container", WRITTEN, ids=lambda container: container.name)
def test_dtypes_are_stored_exactly_or_refused(container: Container, tmp_path: Path) -> None:
    expected = tensors_for(container)
    folder = made(container, tmp_path, expected)
    assert all_bits(folder) == {name: bits(tensor) for name, tensor in expected.items()}
    assert str(digest(folder)) == str(digest(tmp_path / f"source of {container.name}"))
    assert diff(folder, tmp_path / f"source of {container.name}").equal
    assert verify_files(folder).same
    lost = [dtype for dtype in ALL_DTYPES if ElementType.of(dtype) not in container.promises.dtypes]
    described = {str(one): torch.zeros(2, dtype=one) for one in lost}
    with pytest.raises(CheckpointError) as caught:
        container.outline(described, WriteOptions(where="x"))
    assert [fault.message.partition("'")[2].partition("'")[0] for fault in caught.value.faults] == [*described]


@pytest.mark.parametrize("container", WRITTEN, ids=lambda container: container.name)
def test_bytes_are_the_same_each_time_and_a_killed_conversion_goes_on(
    container: Container, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(container, tmp_path, tensors_for(container))
    source, begun, real = tmp_path / f"source of {container.name}", list[str](), Maker.make

    def make(self: Maker, recipe: Recipe, target: int, at: int) -> Made:
        begun.append(recipe.name)
        if len(begun) == 6:
            raise KeyboardInterrupt
        return real(self, recipe, target, at)

    monkeypatch.setattr(Maker, "make", make)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "b", TABLE, to=option(container), threads=1)
    done = convert(source, tmp_path / "b", TABLE, to=option(container), threads=2, memory=9 << 20)
    assert (done.resumed > 0) == container.promises.resumable
    same = {name: (folder / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in os.listdir(folder)}
    assert all(same.values()) == container.promises.deterministic


@pytest.mark.parametrize("container", WRITTEN, ids=lambda container: container.name)
def test_what_is_exported_has_the_bytes_of_what_is_converted(container: Container, tmp_path: Path) -> None:
    """One writes from memory and the other from files."""
    folder = made(container, tmp_path, tensors_for(container))
    expected = open_checkpoint(tmp_path / f"source of {container.name}")
    held = {name: expected.read(name) for name in open_checkpoint(folder).tensors}
    write_directory(tmp_path / "out", weight_files(None, held, to=option(container), where="x"))
    assert {*os.listdir(tmp_path / "out")} == {*os.listdir(folder)} - {"config.json", "provenance.json"}
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (folder / path.name).read_bytes()


@pytest.mark.parametrize("container", WRITTEN, ids=lambda container: container.name)
def test_tensors_are_divided_among_files_or_a_size_is_refused(container: Container, tmp_path: Path) -> None:
    source = write(tmp_path / "source", tensors_for(container))
    if not container.promises.shards:
        with pytest.raises(TargetError, match="all tensors lie in one file"):
            convert(source, tmp_path / "out", TABLE, to=option(container), shard_size=100)
        return
    convert(source, tmp_path / "out", TABLE, to=option(container), shard_size=100)
    assert len(open_checkpoint(tmp_path / "out").files) > 5
    assert diff(tmp_path / "out", source).equal


@pytest.mark.parametrize("container", WRITTEN, ids=lambda container: container.name)
def test_the_metadata_of_a_header_is_kept_or_not(container: Container, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    save_file({"a": torch.ones(3)}, tmp_path / "source" / "model.safetensors", metadata={"by": "me"})
    convert(tmp_path / "source", tmp_path / "out", TABLE, to=option(container))
    kept = [file.metadata.get("by") for file in open_checkpoint(tmp_path / "out").files]
    assert (kept == ["me"]) == container.promises.metadata


@pytest.mark.slow
@pytest.mark.parametrize("container", HOLDING, ids=lambda container: container.name)
def test_a_part_of_a_tensor_is_read_without_the_rest(container: Container, tmp_path: Path) -> None:
    large = {"w": values((4 << 20,), torch.float32, 3), "small": torch.ones(3)}
    folder = made(container, tmp_path, large)
    assert read_by(lambda: open_checkpoint(folder)) < 1 << 19
    checkpoint = open_checkpoint(folder)
    checkpoint.pieces("w")  # where it has a checksum, that is compared once
    row = Copy("w", "w", (10,), (3 << 20), (1,), 0, (1,))
    found: list[torch.Tensor] = []
    reader, where = MoveReader(checkpoint, sparing=True), Window.of_row(0, 10)
    assert read_by(lambda: found.extend(tensor for tensor, _ in reader.read(row, where))) < 1 << 19
    assert bits(found[0]) == bits(large["w"][3 << 20 : (3 << 20) + 10])


@pytest.mark.parametrize("container", HOLDING, ids=lambda container: container.name)
def test_a_damaged_element_is_an_error_where_there_are_checksums(container: Container, tmp_path: Path) -> None:
    folder = made(container, tmp_path, {"w": values((300, 40), torch.float32, 3)})
    (piece,) = open_checkpoint(folder).pieces("w")
    path, at = weights(folder), piece.extent.start + 9
    raw = path.read_bytes()
    path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    checkpoint = open_checkpoint(folder)
    if not container.promises.checksums:
        assert checkpoint.read("w").shape == (300, 40)
        return
    with pytest.raises(CheckpointError, match="does not match its bytes"):
        checkpoint.read("w")


@pytest.mark.parametrize(
    "container", [one for one in HOLDING if one.promises.headers], ids=lambda container: container.name
)
def test_headers_are_read_from_the_hub_without_weights_and_weights_are_fetched(
    hub: Hub, container: Container, tmp_path: Path
) -> None:
    """The hub is a place below the containers: each is read from there as it is."""
    expected = {"w": values((1 << 20,), torch.float32, 3), "small": torch.ones(3)}
    folder = made(container, tmp_path, expected)
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "provenance.json"}
    hub.add("org/name", files)
    headers = open_checkpoint("org/name", weights=False)
    assert {name: tensor.shape for name, tensor in headers.tensors.items()} == {"w": (1 << 20,), "small": (3,)}
    assert all_bits("org/name") == {name: bits(tensor) for name, tensor in expected.items()}
    hub.requests.clear()
    again = open_checkpoint("org/name", local_files_only=True)
    assert bits(again.read("w")) == bits(expected["w"])
    assert not hub.requests


def test_a_checksum_is_taken_over_what_stands_in_front_as_well() -> None:
    generator = np.random.default_rng(1)
    for length in (0, 1, 7, 1000, 70_000):
        front, back = generator.bytes(33), generator.bytes(length)
        seal = Seal(places=(0,), before=zlib.crc32(front))
        assert seal.of(zlib.crc32(back), length) == zlib.crc32(front + back).to_bytes(4, "little")
