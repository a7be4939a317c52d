from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save_file

from porting.checkpoint import CheckpointError, open_checkpoint, write_safetensors
from porting.checkpoint.errors import FAULTS_SHOWN
from porting.checkpoint.layout import SAFETENSORS_DTYPES
from tests.checkpoint.hostile import entry, st_file

ONE = {"a": entry([3], 0, 3)}


def twice(*entries: str) -> bytes:
    """A header with the key "a" as often as there are entries."""
    return ("{" + ",".join(f'"a":{text}' for text in entries) + "}").encode()


E3 = '{"dtype":"U8","shape":[3],"data_offsets":[0,3]}'

HOSTILE: list[tuple[str, bytes, str]] = [
    ("empty", b"", "this is an empty file"),
    ("seven bytes", b"1234567", "7 bytes are too few"),
    ("length 2^64-1", b"\xff" * 8 + b"{}", "should have 18446744073709551615 bytes, and only 2 follow"),
    ("length beyond the file", st_file(ONE, b"abc", length=9999), "should have 9999 bytes, and only"),
    ("length 0", bytes(8) + b"{}x", "the header's length is 0"),
    ("all zeros", bytes(4096), "a file that begins with 1024 zero bytes"),
    ("not UTF-8", st_file(b'{"\xff":1}'), "not UTF-8 at byte 2"),
    ("not JSON", st_file(b'{"a":}'), "not JSON at character 5"),
    ("an array", st_file(b"[]"), "the header begins with '[]'"),
    ("no tensor", st_file(b"{}"), "it holds no tensor"),
    ("byte-order mark", st_file(b"\xef\xbb\xbf{}"), "the header begins with '\\xef\\xbb\\xbf{}'"),
    ("lone surrogate", st_file(b'{"\\ud800":' + E3.encode() + b"}", b"abc"), "control character U+D800"),
    ("deeply nested", st_file(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "nested too deeply"),
    ("digits without end", st_file(b'{"a":' + b"9" * 5000 + b"}"), "a whole number of 5000 digits"),
    ("NaN", st_file(b'{"a":NaN}'), "NaN is not JSON"),
    ("truncated data", st_file(ONE, b"ab"), "1 are missing (the file was cut short: fetch it again)"),
    ("trailing bytes", st_file(ONE, b"abcd"), "1 bytes after the last tensor belong to no tensor"),
    ("hole at the start", st_file({"a": entry([2], 1, 3)}, b"abc"), "1 bytes before the first tensor"),
    (
        "hole between",
        st_file({"a": entry([1], 0, 1), "b": entry([1], 2, 3)}, b"abc"),
        "1 bytes after tensor 'a' belong to no tensor",
    ),
    (
        "overlap",
        st_file({"a": entry([2], 0, 2), "b": entry([2], 1, 3)}, b"abc"),
        "tensor 'b': its range overlaps that of 'a' by 1 bytes",
    ),
    (
        "two tensors on one range",
        st_file({"a": entry([3], 0, 3), "b": entry([3], 0, 3)}, b"abc"),
        "tensor 'b': its range overlaps that of 'a' by 3 bytes",
    ),
    ("negative offset", st_file({"a": entry([3], -3, 0)}), "its data_offsets holds '-3', which is negative"),
    ("descending", st_file({"a": entry([3], 3, 0)}, b"abc"), "its data_offsets [3, 0] are not a range"),
    ("one offset", st_file({"a": {**entry([3], 0, 3), "data_offsets": [0]}}), "data_offsets [0] are not a range"),
    ("fractional", st_file({"a": entry([3], 0, 3.0)}, b"abc"), "'3.0', which is not a whole number"),
    ("boolean size", st_file({"a": entry([True], 0, 1)}, b"a"), "'True', which is not a whole number"),
    ("10^23", st_file({"a": entry([3], 0, 10**23)}, b"abc"), "which is more than 64 bits can hold"),
    ("wrong product", st_file({"a": entry([2, 2], 0, 3)}, b"abc"), "shape [2, 2] of uint8 needs 4"),
    ("overflow", st_file({"a": entry([2**40, 2**40], 0, 3)}, b"abc"), "overflows 64 bits"),
    ("negative shape", st_file({"a": entry([-3, -1], 0, 3)}, b"abc"), "its shape holds '-3'"),
    ("0 x huge", st_file({"a": entry([0, 2**62, 4], 0, 0)}), "overflows 64 bits"),
    ("shape a string", st_file({"a": entry("3", 0, 3)}, b"abc"), "its shape is a JSON string"),
    ("unknown dtype", st_file({"a": entry([3], 0, 3, "U7")}, b"abc"), "its dtype 'U7' is none that torch"),
    ("dtype a number", st_file({"a": entry([3], 0, 3, 7)}, b"abc"), "its dtype '7' is none"),
    ("4-bit", st_file({"a": entry([6], 0, 3, "F4")}, b"abc"), "its dtype F4 packs 4-bit elements"),
    ("rank 1000", st_file({"a": entry([1] * 1000, 0, 1)}, b"a"), "1000 dimensions; torch handles 64"),
    ("the same key twice, equal", st_file(twice(E3, E3), b"abc"), "the key 'a' stands twice"),
    ("the same key twice", st_file(twice(E3, E3.replace("3", "2")), b"abc"), "the key 'a' stands twice"),
    (
        "a field twice",
        st_file(E3.join(['{"a":{"dtype":"U8",', "}"]).replace(",{", ",").encode(), b"abc"),
        "the key 'dtype' stands twice",
    ),
    (
        "extra field",
        st_file({"a": {**entry([3], 0, 3), "shap": 1}}, b"abc"),
        "the field 'shap' is not one of the format's (did you mean 'shape'?)",
    ),
    ("missing field", st_file({"a": {"dtype": "U8", "shape": [3]}}, b"abc"), "no 'data_offsets' is given"),
    ("entry a list", st_file({"a": [1]}, b"abc"), "tensor 'a': a JSON array where an object is expected"),
    ("metadata null", st_file({"__metadata__": None, **ONE}, b"abc"), "__metadata__ is a JSON null"),
    ("metadata number", st_file({"__metadata__": {"a": 1}, **ONE}, b"abc"), "__metadata__ 'a' is a JSON number"),
    ("metadata with half a pair", st_file(b'{"__metadata__":{"a":"\\ud800"}}'), "'a' has half of a surrogate pair"),
    ("metadata twice", st_file(b'{"__metadata__":{},"__metadata__":{}}'), "'__metadata__' stands twice"),
    ("leading space", st_file(b" " + json.dumps(ONE).encode(), b"abc"), "the header begins with ' {"),
    ("padded by NUL", st_file(json.dumps(ONE).encode() + b"\0\0", b"abc"), "where '}' and spaces are expected"),
    ("empty name", st_file({"": entry([3], 0, 3)}, b"abc"), "the empty string for a name"),
    ("NUL in a name", st_file({"a\0b": entry([3], 0, 3)}, b"abc"), "control character U+0000"),
    ("newline in a name", st_file({"a\nb": entry([3], 0, 3)}, b"abc"), "tensor 'a\\nb': its name holds"),
    ("escape in a name", st_file({"\x1b[31m": entry([3], 0, 3)}, b"abc"), "control character U+001B"),
    (
        "names equal but for normalisation",
        st_file({"\u00e9": entry([1], 0, 1), "e\u0301": entry([1], 1, 2)}, b"ab"),
        "differs only by Unicode normalisation from '\\xe9'",
    ),
    ("Git-LFS pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "run `git lfs pull`"),
    ("HTML page", b"<!DOCTYPE html><html><body>Log in</body></html>", "this is an HTML page"),
    ("zip archive", b"PK\x03\x04" + bytes(100), "this is a zip archive, not a safetensors file"),
    ("gzip", b"\x1f\x8b\x08" + bytes(100), "this is a gzip archive"),
    ("pickle", b"\x80\x02}q\x00." + bytes(100), "this is a pickle"),
    ("JSON", b'{"weight_map": {}}' + b" " * 50, "this is a JSON text"),
    ("a list in JSON", b'["weights", "biases"]' + b" " * 50, "this is a JSON text"),
    ("a table", b'[mapping]\nname = "mine"\n' + b" " * 50, "this is a TOML text"),
    ("a table that extends", b'extends = "other"\n' + b" " * 50, "a mapping table is passed as "),
]


@pytest.mark.parametrize(("content", "message"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_hostile_file_is_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    text = str(caught.value)
    assert message in text
    for line in text.split("\n"):
        assert line.startswith(str(path)), "each line names the file"
        assert len(line) < 600
        assert line.isprintable()


def test_header_beyond_100_megabytes_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)  # sparse: no disk is used
    with pytest.raises(CheckpointError, match="should have 100000001 bytes; the format allows 100000000"):
        open_checkpoint(path)


def test_all_faults_are_reported_and_their_number_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(st_file({f"t{i}": entry([3], 0, 2) for i in range(100)}, b"ab"))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert len(caught.value.faults) == FAULTS_SHOWN + 1
    assert caught.value.faults[-1].message == f"and {100 - FAULTS_SHOWN} more faults, not shown"


FINE: list[tuple[str, bytes]] = [
    ("rank 0", st_file({"a": entry([], 0, 1)}, b"a")),
    ("no element", st_file({"a": entry([0, 5], 0, 0)})),
    ("unaligned header", st_file({"a": entry([1], 0, 4, "F32")}, bytes(4))),
    ("unaligned tensor", st_file({"a": entry([1], 0, 1), "b": entry([1], 1, 5, "F32")}, bytes(5))),
    ("path separators in a name", st_file({"params/dense\\kernel": entry([3], 0, 3)}, b"abc")),
    ("offsets out of order", st_file({"b": entry([1], 1, 2), "a": entry([1], 0, 1)}, b"ab")),
    ("a megabyte of metadata", st_file({"__metadata__": {"a": "x" * 1_000_000}, **ONE}, b"abc")),
]


@pytest.mark.parametrize("content", [row[1] for row in FINE], ids=[row[0] for row in FINE])
def test_unusual_but_valid_file_agrees_with_safetensors(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    checkpoint = open_checkpoint(path)
    expected = load(content)
    assert checkpoint.tensors.keys() == expected.keys()
    for own in (False, True):
        for name, tensor in expected.items():
            assert torch.equal(checkpoint.read(name, own=own), tensor)


def test_bool_that_is_neither_0_nor_1_is_refused_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(st_file({"mask": entry([3], 0, 3, "BOOL")}, b"\x00\x01\x07"))
    with pytest.raises(CheckpointError, match="tensor 'mask': a boolean is stored as the byte 7"):
        open_checkpoint(path).read("mask")


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Zl", "Zp"]), min_size=1, max_size=20)
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
ORACLE_DTYPES = [
    element.dtype
    for name, element in SAFETENSORS_DTYPES.items()
    if name not in ("F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
]


@given(
    specs=st.dictionaries(NAMES, st.tuples(SHAPES, st.sampled_from(ORACLE_DTYPES)), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_round_trip_agrees_with_safetensors(
    tmp_path_factory: pytest.TempPathFactory,
    specs: dict[str, tuple[tuple[int, ...], torch.dtype]],
    seed: int,
) -> None:
    import unicodedata

    specs = {unicodedata.normalize("NFC", name): spec for name, spec in specs.items()}
    specs.pop("__metadata__", None)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: random_tensor(shape, dtype, generator) for name, (shape, dtype) in specs.items()}
    directory = tmp_path_factory.mktemp("round")
    ours, theirs = directory / "ours.safetensors", directory / "theirs.safetensors"
    write_safetensors(ours, tensors, metadata={"format": "pt", "a": "b"})
    save_file(tensors, theirs)
    oracle = load_file(ours)
    written, read = open_checkpoint(ours), open_checkpoint(theirs)
    assert list(written.tensors) == list(tensors)
    for name, tensor in tensors.items():
        assert same_bits(oracle[name], tensor)
        for checkpoint in (written, read):
            assert same_bits(checkpoint.read(name), tensor)
            assert same_bits(checkpoint.read(name, own=True), tensor)
            info = checkpoint.tensors[name]
            assert (info.shape, info.dtype, info.nbytes) == (tuple(tensor.shape), tensor.dtype, tensor.nbytes)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Any bits at all, but for bool."""
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bytes; NaNs are as good as any other bits."""
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))


def test_every_dtype_of_torch_that_the_format_names_is_read(tmp_path: Path) -> None:
    header, data = {}, b""
    for name, element in SAFETENSORS_DTYPES.items():
        header[name] = entry([2], len(data), len(data) + 2 * element.itemsize, name)
        data += bytes([0, 1] * element.itemsize)
    path = tmp_path / "model.safetensors"
    path.write_bytes(st_file(header, data))
    checkpoint = open_checkpoint(path)
    for name, element in SAFETENSORS_DTYPES.items():
        assert checkpoint.read(name).dtype == element.dtype
        assert checkpoint.read(name, own=True).dtype == element.dtype


def test_a_header_of_many_tensors_is_read_in_linear_steps(tmp_path: Path) -> None:
    """Ten times the tensors take about ten times the steps, counted and not timed."""
    steps = []
    for count in (1_000, 10_000):
        path = tmp_path / f"{count}.safetensors"
        path.write_bytes(st_file({f"layer.{i}.weight": entry([1], i, i + 1) for i in range(count)}, bytes(count)))
        calls = 0

        def count_call(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count_call)
        try:
            assert len(open_checkpoint(path).tensors) == count
        finally:
            sys.setprofile(None)
        steps.append(calls)
    assert steps[1] < 12 * steps[0]


@pytest.mark.slow
def test_opening_imports_neither_transformers_nor_the_hub_client(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(st_file(ONE, b"abc"))
    code = (
        "import sys; from porting.checkpoint import open_checkpoint\n"
        f"open_checkpoint({str(path)!r}).read('a')\n"
        "print([m for m in ('transformers', 'huggingface_hub', 'numpy.testing') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root, env=dict(os.environ)
    )
    assert result.stdout.strip() == "[]"
